"""Many files, a third of them bad: every good one is done, every bad one named, and a stopped run goes on where it was."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from rdvit.data.volume import read_image, read_labels

Segment = Callable[..., CompletedProcess[str]]
BAD = ("empty", "text", "cut", "nan", "singular", "4D", "colours", "bomb")


@pytest.fixture
def command(tiny_model_folder: Path, tmp_path: Path) -> list[str]:
    """The words of ``rdvit infer`` with the tiny model into ``tmp_path / "out"``."""
    fixed = ("-q", "infer", "--model", tiny_model_folder, "--out", tmp_path / "out", "--device", "cpu", "--precision", "fp32")
    return [str(word) for word in fixed]


@pytest.fixture
def segment(rdvit: Segment, command: list[str]) -> Segment:
    return lambda *words: rdvit(*command, *words)


def write_good(path: Path, seed: int) -> None:
    noise = np.random.default_rng(seed).normal(100, 20, (34, 30, 3)).astype(np.float32)
    nib.save(nib.Nifti1Image(noise, np.diag([3.0, 3, 8, 1])), path)


def write_bad(path: Path, kind: str) -> None:
    write_good(path, 0)
    content = path.read_bytes()
    image = nib.Nifti1Image(np.ones((34, 30, 3), np.float32), np.diag([3.0, 3, 8, 1]))
    if kind == "empty":
        path.write_bytes(b"")
    elif kind == "text":
        path.write_text("patient,EF\n1,60\n")
    elif kind == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif kind == "nan":
        nib.save(nib.Nifti1Image(np.full((34, 30, 3), np.nan, np.float32), image.affine), path)
    elif kind == "singular":
        image.header["sform_code"], image.header["qform_code"] = 2, 0
        image.header["srow_x"], image.header["srow_y"], image.header["srow_z"] = (3, 3, 0, 0), (3, 3, 0, 0), (0, 0, 8, 0)
        nib.save(nib.Nifti1Image(np.asarray(image.dataobj), None, image.header), path)
    elif kind == "4D":
        nib.save(nib.Nifti1Image(np.ones((8, 8, 3, 5), np.float32), image.affine), path)
    elif kind == "colours":
        nib.save(nib.Nifti1Image(np.zeros((8, 8, 3), [("R", "u1"), ("G", "u1"), ("B", "u1")]), image.affine), path)
    else:
        image.header.set_data_shape((30000, 30000, 30000))
        path.write_bytes(image.header.binaryblock + bytes(64))


def fill(folder: Path, count: int) -> tuple[set[str], set[str]]:
    """Write a mixed folder; the names of the good and the bad files. Every third is bad, each in its own way."""
    folder.mkdir()
    good, bad = set(), set()
    for number in range(count):
        name = f"scan{number:03d}.nii" + (".gz" if number % 2 else "")
        if number % 3 == 1:
            write_bad(folder / name, BAD[number // 3 % len(BAD)])
            bad.add(name)
        else:
            write_good(folder / name, number)
            good.add(name)
    return good, bad


def stems(names: set[str]) -> set[str]:
    return {name.split(".")[0] for name in names}


def check_results(out: Path, folder: Path, good: set[str], bad: set[str]) -> None:
    """Every good file has a whole mask and a record, every bad one a line in failures.json, and nothing else is there."""
    expected = {f"{stem}_{end}" for stem in stems(good) for end in ("seg.nii.gz", "result.json")}
    assert {path.name for path in out.iterdir()} == expected | {"run.json", "failures.json"}
    for name in good:
        mask = read_labels(out / f"{name.split('.')[0]}_seg.nii.gz")
        assert mask.array.shape == read_image(folder / name).array.shape
    failures = json.loads((out / "failures.json").read_text())["failures"]
    assert {failure["file"] for failure in failures} == {str(folder / name) for name in bad}
    assert all(failure["file"] in failure["reason"] for failure in failures)
    record = json.loads((out / "run.json").read_text())
    assert [case["file"] for case in record["cases"]] == sorted(str(folder / name) for name in good)


def moments(out: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in out.glob("*_seg.nii.gz")}


def stop_at(monkeypatch: pytest.MonkeyPatch, stem: str, end: str, error: BaseException) -> None:
    """Let a run die when it writes, or moves to its place, a certain file."""
    replace = Path.replace

    def dying(self: Path, target: Path) -> Path:
        if self.name == f"{stem}_{end}" and self.parent.name.endswith(".partial"):
            raise error
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", dying)


def test_a_third_is_bad_and_the_rest_is_done(segment: Segment, tmp_path: Path) -> None:
    good, bad = fill(tmp_path / "in", 24)
    done = segment(tmp_path / "in", "--json")
    assert done.returncode == 1
    assert done.stderr.count("rdvit: error: ") == len(bad) == len(BAD)
    check_results(tmp_path / "out", tmp_path / "in", good, bad)
    result = json.loads(done.stdout)
    assert (len(result["cases"]), result["skipped"], len(result["failures"])) == (len(good), 0, len(bad))

    before = moments(tmp_path / "out")  # again: nothing is redone but what failed
    again = segment(tmp_path / "in", "--json")
    assert again.returncode == 1 and moments(tmp_path / "out") == before
    assert json.loads(again.stdout) == result | {"skipped": len(good)}
    check_results(tmp_path / "out", tmp_path / "in", good, bad)


@pytest.mark.parametrize("end", ["result.json", "seg.nii.gz"])
def test_a_stopped_run_goes_on_where_it_was(
    segment: Segment, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    good, bad = fill(tmp_path / "in", 12)
    with monkeypatch.context() as patch:
        stop_at(patch, "scan006", end, KeyboardInterrupt())
        assert segment(tmp_path / "in").returncode == 130
    out = tmp_path / "out"
    before = moments(out)
    assert before.keys() == {f"{stem}_seg.nii.gz" for stem in stems(good) if stem < "scan006"}
    done_before = [Path(case["mask"]).name for case in json.loads((out / "run.json").read_text())["cases"]]
    assert done_before == sorted(before)
    (out / ".scan006.partial").mkdir()  # what SIGKILL leaves
    (out / ".scan006.partial" / "scan006_seg.nii.gz").write_bytes(b"half")

    done = segment(tmp_path / "in", "--json")
    assert done.returncode == 1 and json.loads(done.stdout)["skipped"] == len(before)
    assert {name: when for name, when in moments(out).items() if name in before} == before
    check_results(out, tmp_path / "in", good, bad)


def test_other_options_another_model_another_input_are_refused(
    segment: Segment, tiny_model_folder: Path, tmp_path: Path
) -> None:
    fill(tmp_path / "in", 1)
    file, mask = tmp_path / "in" / "scan000.nii", tmp_path / "out" / "scan000_seg.nii.gz"
    assert segment(file).returncode == 0
    before = mask.read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    for part in tiny_model_folder.iterdir():
        content = part.read_bytes()
        (other / part.name).write_bytes(content.replace(b'"none"', b'"some"') if part.suffix == ".json" else content)

    def refused(reason: str, *words: str | Path) -> None:
        outcome = segment(file, *words)
        assert outcome.returncode == 2 and reason in outcome.stderr and "--overwrite" in outcome.stderr, outcome.stderr
        assert mask.read_bytes() == before

    refused("made with a different loops", "--loops", "5")
    refused("made with a different maps", "--maps")
    refused("made with a different model", "--model", other)
    write_good(file, 99)
    refused("made with a different input")
    assert segment(file, "--loops", "5", "--overwrite").returncode == 0


def test_corrections_of_a_finished_case_stay_and_a_removed_mask_is_made_again(segment: Segment, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1)
    mask = tmp_path / "out" / "scan000_seg.nii.gz"
    assert segment(tmp_path / "in").returncode == 0
    made = mask.read_bytes()
    mask.write_bytes(b"corrected by hand")
    assert segment(tmp_path / "in").returncode == 0 and mask.read_bytes() == b"corrected by hand"
    mask.unlink()
    assert segment(tmp_path / "in").returncode == 0 and mask.read_bytes() == made


def test_files_of_a_name_that_no_record_knows_are_not_touched(segment: Segment, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "scan000_entropy.nii.gz").write_text("of another tool")
    assert segment(tmp_path / "in").returncode == 0
    assert (tmp_path / "out" / "scan000_entropy.nii.gz").read_text() == "of another tool"


def test_results_beside_the_images_are_no_inputs(segment: Segment, tmp_path: Path) -> None:
    fill(tmp_path / "in", 1)
    for _ in range(2):
        assert segment(tmp_path / "in", "--out", tmp_path / "in", "--maps").returncode == 0
    assert len(list((tmp_path / "in").glob("*_seg.nii.gz"))) == 1


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_two_hundred_files_and_three_signals(command: list[str], tmp_path: Path) -> None:
    good, bad = fill(tmp_path / "in", 200)
    out, known = tmp_path / "out", dict[str, int]()

    def run(stop: int | None) -> dict[str, Any]:
        """One process, stopped when it has made ten new masks."""
        code = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"  # ignored below a shell's `&`
        code += "; from rdvit.cli.app import main; main()"
        words = [sys.executable, "-c", code, *command, str(tmp_path / "in"), "--json"]
        process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        end = time.monotonic() + 600
        while stop and process.poll() is None and len(moments(out)) < len(known) + 10 and time.monotonic() < end:
            time.sleep(0.01)
        if stop:
            process.send_signal(stop)
        text, _ = process.communicate(timeout=600)
        expected = {None: 1, signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -signal.SIGKILL}
        assert process.returncode == expected[None if stop is None else signal.Signals(stop)]
        for path in out.glob("*_seg.nii.gz"):
            read_labels(path)  # whole
        now = moments(out)
        assert known.items() <= now.items(), "a finished case was made again"
        known.update(now)
        hidden = [path.name for path in out.iterdir() if path.name.startswith(".")]
        assert stop == signal.SIGKILL or hidden == []
        return json.loads(text) if text else {}

    out.mkdir()
    for stop in (signal.SIGINT, signal.SIGKILL, signal.SIGTERM):
        run(stop)
    assert 30 <= len(known) < len(good)
    skipped = len([path for path in out.glob("*_result.json") if f"{path.name[:7]}_seg.nii.gz" in known])
    result = run(None)
    assert (result["skipped"], len(result["cases"]), len(result["failures"])) == (skipped, len(good), len(bad))
    check_results(out, tmp_path / "in", good, bad)
