"""`rdvit.data.integrity`: a clean phantom is clean, and each fault put into a copy is found, alone and named."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from rdvit.data.integrity import Finding, check_data
from rdvit.errors import DataError


@pytest.fixture
def copy(phantom: Path, tmp_path: Path) -> Path:
    """A phantom to spoil."""
    return Path(shutil.copytree(phantom, tmp_path / "copy"))


def frame(root: Path, patient: int = 2, end: str = "") -> Path:
    name = f"patient{patient:03d}"
    return root / "training" / name / f"{name}_frame01{end}.nii.gz"


def poke(value: float, count: int = 3) -> Callable[[np.ndarray], np.ndarray]:
    def change(array: np.ndarray) -> np.ndarray:
        array = array.astype(np.float32)
        array.flat[:count] = value
        return array

    return change


def save_float(path: Path, array: np.ndarray) -> None:
    header = nib.load(path).header.copy()
    header.set_data_dtype(np.float32)
    nib.save(nib.Nifti1Image(array.astype(np.float32), None, header), path)


def problems(root: Path) -> list[Finding]:
    return [finding for finding in check_data(root).findings if finding.level == "problem"]


def test_a_phantom_is_clean(phantom: Path) -> None:
    result = check_data(phantom)
    assert result.count("problem") == 0 and len(result.data.cases) == 10
    assert {finding.kind for finding in result.findings} <= {"repaired", "bare slices"}


def spoil(kind: str, root: Path) -> None:
    image, label = frame(root), frame(root, end="_gt")
    array, labels = np.asarray(nib.load(image).dataobj), np.asarray(nib.load(label).dataobj)
    if kind == "unknown label":
        save_float(label, poke(7)(labels))
    elif kind == "fraction":
        save_float(label, poke(1.5)(labels))
    elif kind == "nan":
        save_float(image, poke(np.nan, array.size // 10)(array))
    elif kind == "constant":
        save_float(image, np.full(array.shape, 5))
    elif kind == "shape":
        save_float(label, labels[1:])
    elif kind == "place":
        header = nib.load(label).header.copy()
        header["srow_x"][3] += 20
        header["qoffset_x"] += 20
        nib.save(nib.Nifti1Image(labels, None, header), label)
    elif kind == "missing":
        label.unlink()
    elif kind == "info":
        (image.parent / "Info.cfg").write_text("ED: one\n")
    elif kind == "copy":
        shutil.copy(frame(root, 1), image)
        shutil.copy(frame(root, 1, "_gt"), label)
    else:
        image.write_bytes(image.read_bytes()[:200])


@pytest.mark.parametrize(
    ("kind", "found", "text"),
    [
        ("unknown label", "labels", "7 (3 voxels)"),
        ("fraction", "labels", "3 of"),
        ("nan", "image", "NaN or infinite"),
        ("constant", "constant", "is 5"),
        ("shape", "geometry", "have shape"),
        ("place", "geometry", "mm off their image"),
        ("missing", "files", "patient002_frame01_gt.nii.gz"),
        ("info", "files", "ED: frame number"),
        ("copy", "copies", "patient001_ED, patient002_ED"),
        ("truncated", "image", "cannot be"),
    ],
)
def test_each_fault_is_found_alone_and_named(copy: Path, kind: str, found: str, text: str) -> None:
    spoil(kind, copy)
    (problem,) = problems(copy)
    assert problem.kind == found and text in problem.text
    assert problem.case == "" or "patient002_ED" in problem.case + problem.text


def write_decathlon(root: Path, labels: dict[str, str], values: np.ndarray, shift_mm: float = 0.0) -> None:
    """One case, 2 x 2 x 3 mm, whose label file holds the values as scaled floats, shifted along x."""
    for folder in ("imagesTr", "labelsTr"):
        (root / folder).mkdir()
    (root / "dataset.json").write_text(json.dumps({"labels": labels}))
    affine = np.diag([2.0, 2, 3, 1])
    nib.save(nib.Nifti1Image(np.random.default_rng(0).random(values.shape, np.float32), affine), root / "imagesTr" / "a.nii.gz")
    affine[0, 3] = shift_mm
    nib.save(nib.Nifti1Image((values * 0.9999).astype(np.float32), affine), root / "labelsTr" / "a.nii.gz")


def test_values_that_are_not_consecutive_are_fine_where_the_classes_say_so(tmp_path: Path) -> None:
    values = np.zeros((6, 6, 4))
    values[1:3, 2, 2], values[4, 4, 1] = 2, 5
    write_decathlon(tmp_path, {"0": "background", "2": "LV", "5": "RV"}, values)
    assert problems(tmp_path) == []  # as floats, 1.9998 and 4.9995
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"1": "LV", "2": "RV"}}))
    (problem,) = problems(tmp_path)
    assert problem.kind == "labels" and "values without a class: 5 (1 voxels); known are 1, 2" in problem.text


@pytest.mark.parametrize(("shift_mm", "level"), [(0.005, None), (0.9, "warning"), (1.1, "problem")])
def test_half_a_voxel_is_the_limit(tmp_path: Path, shift_mm: float, level: str | None) -> None:
    write_decathlon(tmp_path, {"1": "LV"}, np.pad(np.ones((2, 2, 2)), 2), shift_mm)
    found = [finding.level for finding in check_data(tmp_path).findings if "off their image" in finding.text]
    assert found == ([] if level is None else [level])


def test_two_bad_cases_are_both_found(copy: Path) -> None:
    spoil("truncated", copy)
    frame(copy, 3, "_gt").write_text("no image")
    assert [(finding.kind, finding.case) for finding in problems(copy)] == [
        ("image", "patient002_ED"),
        ("labels", "patient003_ED"),
    ]


def test_warnings_are_no_problems(copy: Path) -> None:
    image, label = frame(copy), frame(copy, end="_gt")
    save_float(image, poke(np.nan)(np.asarray(nib.load(image).dataobj)))
    save_float(label, np.zeros(nib.load(label).shape))
    for end in ("", "_gt"):
        header = nib.load(frame(copy, 3, end)).header.copy()
        header["pixdim"][1:3] *= 4
        nib.save(nib.Nifti1Image(np.asarray(nib.load(frame(copy, 3, end)).dataobj), None, header), frame(copy, 3, end))
    result = check_data(copy)
    assert result.count("problem") == 0
    warned = {(finding.kind, finding.case) for finding in result.findings if finding.level == "warning"}
    assert {("repaired", "patient002_ED"), ("empty", "patient002_ED"), ("spacing", "patient003_ED")} <= warned


def test_orphans_and_orientations_of_a_decathlon_folder(tmp_path: Path) -> None:
    for folder in ("imagesTr", "labelsTr"):
        (tmp_path / folder).mkdir()
    (tmp_path / "dataset.json").write_text(json.dumps({"labels": {"0": "background", "1": "thing"}}))
    for number in range(4):
        array = np.random.default_rng(number).random((6, 6, 4), np.float32)
        affine = np.diag([-2.0 if number == 3 else 2.0, 2, 3, 1])
        nib.save(nib.Nifti1Image(array, affine), tmp_path / "imagesTr" / f"c{number}.nii.gz")
        nib.save(nib.Nifti1Image((array > 0.5).astype(np.uint8), affine), tmp_path / "labelsTr" / f"c{number}.nii.gz")
    (tmp_path / "labelsTr" / "c0.nii.gz").unlink()
    (tmp_path / "imagesTr" / "c1.nii.gz").unlink()
    result = check_data(tmp_path)
    texts = [finding.text for finding in result.findings if finding.kind == "files"]
    assert len(texts) == 2 and "c0" in texts[0] and "c1" in texts[1]
    assert [case.id for case in result.data.cases] == ["c2", "c3"]
    (other,) = [finding for finding in result.findings if finding.kind == "orientation"]
    assert other.case == "c3" and "LAS" in other.text and other.level == "info"


def test_a_patient_in_two_splits_and_missing_files_of_a_json_list(phantom: Path, tmp_path: Path) -> None:
    def entry(patient: int, number: str) -> dict[str, str]:
        name = f"patient{patient:03d}"
        stem = phantom / "training" / name / f"{name}_frame{number}"
        return {"id": f"{name}-{number}", "patient": name, "image": f"{stem}.nii.gz", "label": f"{stem}_gt.nii.gz"}

    other = sorted((phantom / "training" / "patient001").glob("*_gt.nii.gz"))[-1].name[16:18]
    lists = {"training": [entry(1, "01"), entry(2, "01"), entry(5, "99")], "validation": [entry(1, other)]}
    path = tmp_path / "list.json"
    path.write_text(json.dumps({"labels": {"1": "RV", "2": "MYO", "3": "LV"}, **lists}))
    found = {finding.kind: finding.text for finding in problems(path)}
    assert found.keys() == {"splits", "files"}
    assert "patient001 is in training and in validation" in found["splits"]
    assert "2 of 8 listed files are missing" in found["files"]


def test_no_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="no data set found"):
        check_data(tmp_path)
