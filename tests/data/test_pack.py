"""A pack gives what its folder gives: the same folds, grids and labels, and images within half a level."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from rdvit.config import Config, resolve_config
from rdvit.data import archive
from rdvit.data.archive import unpack
from rdvit.data.datalist import Case, DataList, folds, load_data, patients, select
from rdvit.data.loaders import TrainingSamples, cached_cases
from rdvit.data.pack import LEVELS, Pack, quantize, write_pack
from rdvit.data.planning import settle
from rdvit.data.transforms import prepare_image
from rdvit.data.volume import Volume, canonical_geometry, read_image, read_labels
from rdvit.errors import DataError


@pytest.fixture(scope="module")
def made(phantom: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Pack]:
    path = tmp_path_factory.mktemp("pack") / "phantom.pack"
    return path, write_pack(phantom, path, 10_000_000)


@pytest.fixture(scope="module")
def pairs(phantom: Path, made: tuple[Path, Pack]) -> list[tuple[Case, Case]]:
    return list(zip(load_data(phantom).cases, load_data(made[0]).cases, strict=True))


def label_of(case: Case) -> Volume:
    assert case.label is not None
    return read_labels(case.label)


def facts(data: DataList) -> list[tuple[object, ...]]:
    return [(case.id, case.patient, case.group, case.phase) for case in data.cases]


def test_it_is_the_same_data_set(phantom: Path, made: tuple[Path, Pack]) -> None:
    path, pack = made
    before, after = load_data(phantom), load_data(path)
    assert pack == Pack(5, 10, 255, path.stat().st_size)
    assert (after.name, after.root, after.class_names) == ("ACDC", path, before.class_names)
    assert facts(after) == facts(before)
    assert folds(after) == folds(before)
    for split in ("fold0-train", "fold3-val"):
        assert patients(select(after, split, 0.5)) == patients(select(before, split, 0.5))


def test_grids_and_labels_are_exact(pairs: list[tuple[Case, Case]]) -> None:
    for before, after in pairs:
        old, new = label_of(before), label_of(after)
        np.testing.assert_array_equal(new.array, old.array)
        assert new.array.dtype == np.uint8
        np.testing.assert_array_equal(new.affine, old.affine)
        np.testing.assert_array_equal(read_image(after.image).affine, read_image(before.image).affine)
        assert canonical_geometry(after.image) == canonical_geometry(before.image)
        for value in (1, 2, 3):
            ml = [(volume.array == value).sum() * np.prod(volume.spacing) / 1000 for volume in (old, new)]
            assert ml[0] == ml[1] > 0


def test_intensities_are_within_half_a_level(pairs: list[tuple[Case, Case]]) -> None:
    for before, after in pairs:
        old, new = read_image(before.image).array, read_image(after.image).array
        np.testing.assert_array_equal(new == 0, old == 0)
        low, high = np.percentile(old[old != 0], (0.5, 99.5))
        off = np.abs(new - old.clip(low, high))[old != 0]
        assert off.max() <= 0.5 * high / 255 * 1.001
        assert off.max() > 0  # or it has not been packed at all


def test_training_sees_the_same_samples(
    pairs: list[tuple[Case, Case]], tiny_config: Callable[..., Config], tmp_path: Path
) -> None:
    config = tiny_config("2d", data={"augment": {"noise": 0.0}})
    sets = [TrainingSamples(cached_cases(cases, config, (1, 2, 3), tmp_path), config) for cases in zip(*pairs, strict=True)]
    labelled = 0
    for number in range(20):
        old, new = (samples[number] for samples in sets)
        assert old["id"] == new["id"]
        assert (old["label"] == new["label"]).all()
        labelled += int((old["label"] > 0).sum())
        assert float((old["image"] - new["image"]).abs().max()) < 0.05  # standard deviations; a level is about 0.02
    assert labelled > 0


def test_a_disk_cache_is_found_again_by_another_process(
    made: tuple[Path, Pack], tiny_config: Callable[..., Config], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config("2d", data={"cache": "disk"})
    for _ in range(2):
        cached_cases(load_data(made[0]).cases, config, (1, 2, 3), tmp_path)
        assert len(list(tmp_path.iterdir())) == 10
        monkeypatch.setattr(archive, "_folders", {})  # as in a new process, which unpacks elsewhere


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_what_is_auto_settles_alike(dim: str, pairs: list[tuple[Case, Case]]) -> None:
    names = {1: "RV", 2: "MYO", 3: "LV"}
    old, new = (settle(resolve_config(dim, "rdvit"), cases, names) for cases in zip(*pairs, strict=True))
    assert old == new and old.data.spacing != "auto"


def test_the_true_spacing_stands_in_the_affine(phantom: Path, tmp_path: Path) -> None:
    """As in ACDC: an affine that says 1 mm, pixdim that says the truth."""
    source = tmp_path / "training" / "patient001"
    shutil.copytree(phantom / "training" / "patient001", source)
    for path in source.glob("*frame*.nii.gz"):
        image = nib.load(path)
        zooms, array = image.header.get_zooms(), np.asarray(image.dataobj)
        lying = nib.Nifti1Image(array, np.diag([-1.0, -1.0, 1.0, 1.0]))
        lying.header["pixdim"][1:4] = zooms
        nib.save(lying, path)
        assert nib.load(path).affine[0, 0] == -1
    write_pack(tmp_path, tmp_path / "p.zip", 10_000_000)
    old, new = (load_data(path).cases[0].image for path in (tmp_path, tmp_path / "p.zip"))
    stored = nib.load(new)
    assert zooms[0] > 1.2 and stored.header.get_zooms() == zooms
    np.testing.assert_array_equal(stored.affine, np.diag([-zooms[0], -zooms[1], zooms[2], 1]))
    np.testing.assert_array_equal(stored.affine, read_image(old).affine)
    np.testing.assert_allclose(stored.get_qform(), stored.affine, atol=1e-5)


def test_the_size_settles_the_levels(phantom: Path, made: tuple[Path, Pack], tmp_path: Path) -> None:
    full = made[1].size
    out = tmp_path / "p.zip"
    assert write_pack(phantom, out, full).size == full  # to the byte: the same data, the same file
    assert out.read_bytes() == made[0].read_bytes()
    less = write_pack(phantom, out, full - 1)
    assert less.levels == LEVELS[1] and less.size < full
    with pytest.raises(DataError, match=f"10 frames take more than 0.01 MB even with {LEVELS[-1]} levels"):
        write_pack(phantom, out, 10_000)
    assert out.stat().st_size == less.size and [path.name for path in tmp_path.iterdir()] == ["p.zip"]


def test_nothing_of_the_patient_but_what_is_needed(made: tuple[Path, Pack]) -> None:
    assert (unpack(made[0]) / "training" / "patient001" / "Info.cfg").read_text().split("\n")[0] == "ED: 1"
    with zipfile.ZipFile(made[0]) as packed:
        names = packed.namelist()
        assert {member.date_time for member in packed.infolist()} == {(1980, 1, 1, 0, 0, 0)}
    assert "255 levels" in (unpack(made[0]) / "README.txt").read_text()
    assert len(names) == 1 + 5 + 20 and not any("4d" in name for name in names)


def test_quantizing_known_values() -> None:
    values = np.concatenate([[0.0, 1e-3], np.linspace(1, 1000, 998)]).astype(np.float32)
    numbers, step = quantize(Volume(values.reshape(10, 10, 10), np.eye(4)), 100)
    high = np.percentile(values[1:], 99.5)
    assert step == pytest.approx(high / 100)
    flat = numbers.ravel()
    assert flat[0] == 0 and flat[1] == 1 and flat[-1] == 100  # zero alone is 0, and the brightest are clipped
    assert flat[500] == round(values[500] / step)


def test_empty_and_negative_images() -> None:
    numbers, step = quantize(Volume(np.zeros((2, 2, 2), np.float32), np.eye(4)), 64)
    assert not numbers.any() and step == 1
    with pytest.raises(DataError, match=r"image.nii: 50.0% of its voxels are negative"):
        quantize(Volume(np.float32([[[-1, 2]]]), np.eye(4), Path("image.nii")), 64)


def test_normalization_does_not_notice_the_pack(pairs: list[tuple[Case, Case]]) -> None:
    """The statistics that z-scores rest on are those of the whole field of view, as in the folder."""
    for before, after in pairs[:2]:
        old, new = (prepare_image(read_image(case.image), None, (0.5, 99.5))[0] for case in (before, after))
        assert float(((old - new) ** 2).mean().sqrt()) < 0.01


def test_no_acdc_folder(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"expected patient folders with Info.cfg"):
        write_pack(tmp_path, tmp_path / "p.zip", 1000)
    assert list(tmp_path.iterdir()) == []
