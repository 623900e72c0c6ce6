"""Cached cases and the endless sequence of training samples."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from rdvit.config import Config
from rdvit.data.datalist import Case, load_data
from rdvit.data.loaders import TrainingSamples, cached_cases, naming_lost_workers, training_batches
from rdvit.data.transforms import PrepareCase
from rdvit.errors import DataError

CLASSES = (1, 2, 3)
MakeConfig = Callable[..., Config]


@pytest.fixture(scope="module")
def cases(phantom: Path) -> list[Case]:
    return list(load_data(phantom).cases[:4])


@pytest.fixture(scope="module")
def cached(cases: list[Case], tiny_config: MakeConfig, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return cached_cases(cases, tiny_config(), CLASSES, tmp_path_factory.mktemp("cache"))


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Same keys, types and values."""
    assert one.keys() == other.keys()
    for key, value in one.items():
        if isinstance(value, torch.Tensor):
            assert type(value) is type(other[key])
            assert value.dtype == other[key].dtype
            assert torch.equal(value, other[key]), key
        else:
            assert value == other[key]


# The cache


def test_cache_holds_what_preparing_a_case_gives(cases: list[Case], cached: Dataset) -> None:
    for i, case in enumerate(cases):
        assert_equal(cached[i], PrepareCase(3.0, (0.5, 99.5), CLASSES)(case))


def test_disk_cache_gives_the_same_as_memory(
    cases: list[Case], cached: Dataset, tiny_config: MakeConfig, tmp_path: Path
) -> None:
    on_disk = cached_cases(cases, tiny_config(data={"cache": "disk"}), CLASSES, tmp_path)
    for i in range(len(cases)):
        assert_equal(on_disk[i], cached[i])
    assert len(list(tmp_path.glob("*.pt"))) == len(cases)


def test_memory_cache_reads_each_case_once(
    cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = count_reads(monkeypatch)
    dataset = cached_cases(cases, tiny_config(), CLASSES, tmp_path)
    for _ in range(2):
        for i in range(len(cases)):
            dataset[i]
    assert read == [case.id for case in cases]
    assert not list(tmp_path.iterdir())


def test_disk_cache_is_found_again(
    cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(data={"cache": "disk"})
    read = count_reads(monkeypatch)
    first = cached_cases(cases, config, CLASSES, tmp_path)
    assert sorted(read) == sorted(case.id for case in cases)
    again = cached_cases(cases[::-1], config, CLASSES, tmp_path)
    assert len(read) == len(cases)
    assert_equal(again[0], first[len(cases) - 1])


@pytest.mark.parametrize(
    ("data", "classes"),
    [({"spacing": 2.5}, CLASSES), ({"clip_percentiles": (1.0, 99.0)}, CLASSES), ({}, (1, 2, 3, 4))],
    ids=["spacing", "percentiles", "classes"],
)
def test_disk_cache_of_other_preprocessing_is_left_alone(
    cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, data: dict[str, Any], classes: tuple[int, ...]
) -> None:
    one = cases[:1]
    cached_cases(one, tiny_config(data={"cache": "disk"}), CLASSES, tmp_path)
    other = cached_cases(one, tiny_config(data={"cache": "disk", **data}), classes, tmp_path)
    assert len(list(tmp_path.glob("*.pt"))) == 2
    assert_equal(other[0], cached_cases(one, tiny_config(data=data), classes, tmp_path)[0])


def test_disk_cache_sees_that_a_file_changed(cases: list[Case], tiny_config: MakeConfig, tmp_path: Path) -> None:
    config = tiny_config(data={"cache": "disk"})
    image, label = tmp_path / "image.nii.gz", tmp_path / "label.nii.gz"
    shutil.copyfile(cases[0].image, image)
    shutil.copyfile(str(cases[0].label), label)
    case = Case("a", "a", image, label)
    assert int(cached_cases([case], config, CLASSES, tmp_path / "cache")[0]["label"].max()) == 3
    old = nib.load(label)
    nib.Nifti1Image(np.minimum(np.asarray(old.dataobj), 1).astype(np.uint8), old.affine, old.header).to_filename(label)
    os.utime(label, ns=(1, 1))
    assert int(cached_cases([case], config, CLASSES, tmp_path / "cache")[0]["label"].max()) == 1


def test_cache_says_what_it_costs(
    cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO, logger="rdvit"):
        dataset = cached_cases(cases, tiny_config(data={"spacing": 0.8}), CLASSES, tmp_path)
    megabytes = sum(v.nbytes for i in range(4) for v in dataset[i].values() if isinstance(v, torch.Tensor)) / 1e6
    assert f"cached 4 cases in memory: {megabytes:.0f} MB" in caplog.text


def count_reads(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the cases that are prepared from now on."""
    read: list[str] = []
    prepare = PrepareCase.__call__

    def counting(self: PrepareCase, case: Case) -> dict[str, Any]:
        read.append(case.id)
        return prepare(self, case)

    monkeypatch.setattr(PrepareCase, "__call__", counting)
    return read


@pytest.mark.parametrize("cache", ["memory", "disk"])
def test_a_bad_file_is_named(cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, cache: str) -> None:
    image = tmp_path / "bad.nii.gz"
    image.write_bytes(cases[1].image.read_bytes()[:1000])
    bad = [cases[0], Case("b", "b", image, cases[1].label)]
    with pytest.raises(DataError, match=r"^\S*bad\.nii\.gz: [^\n]*$"):
        cached_cases(bad, tiny_config(data={"cache": cache}), CLASSES, tmp_path / "cache")


@pytest.mark.parametrize("damage", ["cut", "gone"])
def test_a_damaged_cache_file_is_made_anew(
    cases: list[Case], cached: Dataset, tiny_config: MakeConfig, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    dataset = cached_cases(cases[:1], tiny_config(data={"cache": "disk"}), CLASSES, tmp_path)
    (file,) = tmp_path.glob("*.pt")
    file.write_bytes(file.read_bytes()[:500]) if damage == "cut" else file.unlink()
    caplog.clear()
    for _ in range(2):
        assert_equal(dataset[0], cached[0])
    assert [record.getMessage().endswith(f"case {cases[0].id} is read again") for record in caplog.records] == (
        [True] if damage == "cut" else []
    )


@pytest.mark.parametrize("workers", [0, 1])
def test_a_file_gone_bad_in_the_middle_of_an_epoch_is_named(
    cases: list[Case], tiny_config: MakeConfig, tmp_path: Path, workers: int
) -> None:
    """Its prepared copy is damaged, and so is the original: one line, also out of a worker process."""
    image = tmp_path / "goes bad.nii.gz"
    shutil.copyfile(cases[0].image, image)
    config = tiny_config(data={"cache": "disk", "num_workers": workers}, training={"batch_size": 1})
    dataset = cached_cases([Case("a", "a", image, cases[0].label)], config, CLASSES, tmp_path / "cache")
    batches = training_batches(TrainingSamples(dataset, config), config, 0)
    next(batches) if workers == 0 else None
    (file,) = (tmp_path / "cache").glob("*.pt")
    file.write_bytes(b"")
    image.write_bytes(b"")
    with pytest.raises(DataError, match=r"goes bad\.nii\.gz: [^\n]*$"):
        list(batches)


# Training samples


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_samples_are_what_the_network_takes(dim: str, cached: Dataset, tiny_config: MakeConfig) -> None:
    config = tiny_config(dim)
    samples = TrainingSamples(cached, config)
    for number in range(24):
        item = samples[number]
        assert item["image"].shape == item["label"].shape == (1, *config.data.crop_size)
        assert item["image"].dtype == torch.float32
        assert item["label"].dtype == torch.uint8
        assert set(item["label"].unique().tolist()) <= {0, *CLASSES}
        assert torch.isfinite(item["image"]).all()


def test_a_sample_is_the_same_however_it_is_reached(cached: Dataset, tiny_config: MakeConfig) -> None:
    numbers = list(range(9))
    expected = TrainingSamples(cached, tiny_config())
    forward = [expected[i] for i in numbers]
    torch.manual_seed(99)  # global random states play no part
    np.random.seed(99)
    other = TrainingSamples(cached, tiny_config())
    for i in reversed(numbers):
        assert_equal(other[i], forward[i])


def test_a_sample_is_the_same_in_a_worker_process(cached: Dataset, tiny_config: MakeConfig) -> None:
    samples = TrainingSamples(cached, tiny_config())
    here, there = (list(DataLoader(samples, batch_size=3, sampler=[5, 0, 7], num_workers=workers)) for workers in (0, 1))
    assert_equal(here[0], there[0])


def test_samples_differ_from_each_other_and_with_the_seed(cases: list[Case], tiny_config: MakeConfig, tmp_path: Path) -> None:
    """Even of one and the same case, within a pass and from pass to pass."""
    same = cached_cases([cases[0]] * 4, tiny_config(), CLASSES, tmp_path)
    first, second = (TrainingSamples(same, tiny_config(training={"seed": seed})) for seed in (0, 1))
    images = [samples[i]["image"].numpy().tobytes() for samples in (first, second) for i in range(12)]
    assert len(set(images)) == 24


def test_every_case_comes_once_in_every_pass_in_a_new_order(cached: Dataset, tiny_config: MakeConfig) -> None:
    samples = TrainingSamples(cached, tiny_config())
    passes = [tuple(samples[4 * turn + i]["id"] for i in range(4)) for turn in range(6)]
    assert all(len(set(ids)) == 4 for ids in passes)
    assert len(set(passes)) > 2


# Batches


class Numbers(Dataset):
    """Stands in for the samples: sample i is the number i."""

    num_workers = 0

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"number": number}


def numbers_of(config: Config, first_step: int, rank: int = 0, world: int = 1) -> list[list[int]]:
    samples: Any = Numbers()
    return [batch["number"].tolist() for batch in training_batches(samples, config, first_step, rank, world)]


def flat(batches: Sequence[Sequence[int]]) -> list[int]:
    return [number for batch in batches for number in batch]


def test_an_epoch_has_its_steps_and_the_next_one_goes_on(tiny_config: MakeConfig) -> None:
    config = tiny_config(training={"steps_per_epoch": 3, "batch_size": 4})
    first, second = numbers_of(config, 0), numbers_of(config, 3)
    assert [len(batch) for batch in first] == [4, 4, 4]
    assert flat([*first, *second]) == list(range(24))


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_samples_without_gap_or_overlap(world: int, tiny_config: MakeConfig) -> None:
    """And step by step, so that all ranks together see what one process with a batch of their sum would see."""
    config = tiny_config(training={"steps_per_epoch": 3, "batch_size": 4})
    ranks = [numbers_of(config, 6, rank, world) for rank in range(world)]
    for step in range(3):
        together = flat([batches[step] for batches in ranks])
        start = (6 + step) * 4 * world
        assert sorted(together) == list(range(start, start + 4 * world))


def test_resumed_training_sees_the_batches_of_an_unbroken_one(cached: Dataset, tiny_config: MakeConfig) -> None:
    unbroken = list(training_batches(TrainingSamples(cached, tiny_config()), tiny_config(training={"steps_per_epoch": 4}), 0))
    resumed = list(training_batches(TrainingSamples(cached, tiny_config()), tiny_config(training={"steps_per_epoch": 2}), 2))
    for one, other in zip(unbroken[2:], resumed, strict=True):
        assert_equal(one, other)


class DyingSamples(Numbers):
    """Whose worker process is killed at the third sample, as by a full /dev/shm."""

    def __init__(self, workers: int) -> None:
        self.num_workers, self.home = workers, os.getpid()

    def __getitem__(self, number: int) -> dict[str, Any]:
        if number == 3 and os.getpid() != self.home:
            os.kill(os.getpid(), signal.SIGBUS)
        return {"number": number}


@pytest.mark.skipif(not hasattr(signal, "SIGBUS"), reason="no bus errors on this system")
def test_where_workers_die_this_process_loads_the_rest(tiny_config: MakeConfig, caplog: pytest.LogCaptureFixture) -> None:
    config = tiny_config(data={"num_workers": 1}, training={"steps_per_epoch": 3, "batch_size": 2})
    samples: Any = DyingSamples(1)
    first = flat([batch["number"].tolist() for batch in training_batches(samples, config, 0)])
    second = flat([batch["number"].tolist() for batch in training_batches(samples, config, 3)])
    assert first + second == list(range(12))
    (warning,) = caplog.records  # and not again in the second epoch
    assert "loading in 1 processes failed" in warning.getMessage() and "--shm-size" in warning.getMessage()


def test_a_worker_that_dies_under_the_network_says_what_to_do() -> None:
    with (
        pytest.raises(DataError, match=r"DataLoader worker \(pid 7\) is killed.*num_workers to 0.*--resume"),
        naming_lost_workers(),
    ):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Bus error.\nMore.")
    with pytest.raises(RuntimeError, match="other"), naming_lost_workers():
        raise RuntimeError("other")


NO_SHARED_MEMORY = """
import sys
from typing import Any
import torch
from rdvit.config import resolve_config
from rdvit.data.loaders import training_batches
class Samples(torch.utils.data.Dataset):
    num_workers = 1
    def __len__(self): return 8
    def __getitem__(self, number): return {"image": torch.full((1 << 16,), float(number))}
flags = {"data": {"num_workers": 1}, "training": {"steps_per_epoch": 4, "batch_size": 2}}
batches = training_batches(Samples(), resolve_config("2d", "vit", flags=flags), 0)
print([int(value) for batch in batches for value in batch["image"][:, 0]])
"""


@pytest.mark.slow
@pytest.mark.parametrize("size", ["0", "64k"])
def test_without_shared_memory(size: str) -> None:
    """In a mount namespace of its own whose /dev/shm is tiny, or cannot be written at all."""
    option = "ro" if size == "0" else f"size={size}"
    words = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs -o {option} tmpfs /dev/shm || exit 77; exec "$0" -c "$1"']
    if shutil.which("unshare") is None:
        pytest.skip("needs unshare(1)")
    outcome = subprocess.run(
        [*words, sys.executable, NO_SHARED_MEMORY], capture_output=True, text=True, timeout=300, check=False
    )
    if outcome.returncode in (1, 77) and ("unshare" in outcome.stderr or "mount" in outcome.stderr):
        pytest.skip(f"mounting is refused: {outcome.stderr.strip()}")
    assert outcome.stdout.strip() == str(list(range(8))), outcome.stderr
    assert outcome.stderr.count("this process loads from here on") == 1, outcome.stderr
