"""`rdvit.inference.batch`: the files of a case appear together, and a record can be trusted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from rdvit.errors import DataError
from rdvit.inference.batch import clear, digest, finished, listed, made_with, named, staged, write_record

SETTINGS: dict[str, Any] = {"model": "abc", "loops": None}


@pytest.fixture
def scan(tmp_path: Path) -> Path:
    path = tmp_path / "scan.nii"
    path.write_bytes(b"voxels")
    return path


@pytest.fixture
def target(tmp_path: Path) -> Path:
    (tmp_path / "out").mkdir()
    return tmp_path / "out" / "scan"


def make(scan: Path, target: Path, settings: dict[str, Any] = SETTINGS) -> None:
    with staged(target) as stage:
        named(stage, "seg.nii.gz").write_bytes(b"mask")
        write_record(stage, {"file": str(scan), "value": 1.5}, made_with(scan, settings))


def names(target: Path) -> set[str]:
    return {path.name for path in target.parent.iterdir()}


def test_files_appear_together_and_the_record_knows_them(scan: Path, target: Path) -> None:
    assert finished(target, scan, SETTINGS) is None
    make(scan, target)
    assert names(target) == {"scan_seg.nii.gz", "scan_result.json"}
    record = finished(target, scan, SETTINGS)
    assert record is not None and record["value"] == 1.5
    assert {path.name for path in listed(target)} == names(target)


def test_an_error_leaves_nothing(target: Path) -> None:
    with pytest.raises(KeyboardInterrupt), staged(target) as stage:
        named(stage, "seg.nii.gz").write_bytes(b"mask")
        raise KeyboardInterrupt
    assert names(target) == set()


def test_a_case_without_all_its_files_is_not_finished(scan: Path, target: Path) -> None:
    make(scan, target)
    named(target, "seg.nii.gz").unlink()
    assert finished(target, scan, SETTINGS) is None


@pytest.mark.parametrize(
    "settings", [{"model": "def", "loops": None}, {"model": "abc", "tta": True}, {"model": "abc", "loops": 2}]
)
def test_other_settings_are_named(scan: Path, target: Path, settings: dict[str, Any]) -> None:
    make(scan, target)
    with pytest.raises(DataError, match=r"scan_result\.json: .* a different (model|loops|tta) "):
        finished(target, scan, settings)


def test_another_input_is_noticed_also_of_a_header_with_its_voxels_beside_it(scan: Path, target: Path) -> None:
    header, voxels = scan.with_suffix(".mhd"), scan.with_suffix(".raw")
    header.write_text("ElementDataFile = scan.raw")
    voxels.write_bytes(b"1")
    make(header, target)
    voxels.write_bytes(b"2")
    with pytest.raises(DataError, match="a different input"):
        finished(target, header, SETTINGS)
    assert digest([header, voxels]) != digest([header])
    with pytest.raises(DataError, match="no such file"):
        digest([scan.with_name("absent")])


def test_what_is_there_is_kept(scan: Path, target: Path) -> None:
    named(target, "seg.nii.gz").write_text("mine")
    with pytest.raises(DataError, match="exists already"):
        make(scan, target)
    assert names(target) == {"scan_seg.nii.gz"} and named(target, "seg.nii.gz").read_text() == "mine"
    clear(target, ())  # no record lists it
    assert names(target) == {"scan_seg.nii.gz"}
    clear(target, ["seg.nii.gz"])
    assert names(target) == set()


@pytest.mark.parametrize("name", ["../thesis.tex", "other_seg.nii.gz", "scan_/../../thesis.tex", "..", 7])
def test_a_record_that_lists_foreign_files_is_none(scan: Path, target: Path, name: object) -> None:
    make(scan, target)
    for path in (target.parent.parent / "thesis.tex", target.parent / "other_seg.nii.gz"):
        path.write_text("years of work")
    content = json.loads(named(target, "result.json").read_text())
    named(target, "result.json").write_text(json.dumps({**content, "files": [*content["files"], name]}))
    assert finished(target, scan, SETTINGS) is None and listed(target) == []
    clear(target, ["seg.nii.gz"])
    assert (target.parent.parent / "thesis.tex").exists() and (target.parent / "other_seg.nii.gz").exists()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"made_with": 1, "files": []}', '{"made_with": {}, "files": "a"}', "\xff"])
def test_a_damaged_record_is_none(scan: Path, target: Path, text: str) -> None:
    named(target, "result.json").write_bytes(text.encode("latin-1"))
    assert finished(target, scan, SETTINGS) is None
