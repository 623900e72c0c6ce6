"""``rdvit prepare`` makes data sets that the other commands take, and never touches anything else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import nibabel as nib
import numpy as np
import pytest

from rdvit.data.datalist import load_data

Rdvit = Callable[..., CompletedProcess[str]]


def refused(outcome: CompletedProcess[str], expected: str) -> None:
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert outcome.stderr.startswith("rdvit: error: ") and outcome.stderr.count("\n") == 1, outcome.stderr
    assert expected in outcome.stderr


@pytest.fixture(scope="module")
def made(rdvit: Rdvit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "phantom"
    outcome = rdvit("prepare", "phantom", folder, "--patients", "5", "--cines", "0", "--seed", "3")
    assert outcome.returncode == 0 and outcome.stdout == ""
    assert outcome.stderr == f"5 patients written to {folder}\n"
    return folder


def test_the_phantom_is_a_data_set_with_known_volumes(made: Path) -> None:
    data = load_data(made)
    assert len(data.cases) == 10 and {case.group for case in data.cases} == {"NOR", "DCM", "HCM", "MINF", "RV"}
    truth = json.loads((made / "phantom.json").read_text())
    assert truth["seed"] == 3
    case = next(case for case in data.cases if case.phase == "ED")
    assert case.label is not None
    label = nib.load(case.label)
    counted = (np.asarray(label.dataobj) == 3).sum() * np.prod(label.header.get_zooms()) / 1000
    assert counted == pytest.approx(truth["patients"][case.patient]["lv_edv_ml"], rel=0.02)


def test_what_is_there_is_kept(rdvit: Rdvit, made: Path, tmp_path: Path) -> None:
    refused(rdvit("prepare", "phantom", made, "--patients", "5"), "already holds a phantom")
    assert json.loads((made / "phantom.json").read_text())["seed"] == 3
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in ([], ["--overwrite"]):
        refused(rdvit("prepare", "phantom", tmp_path, *overwrite), "files that are no phantom")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_cannot_be_made(rdvit: Rdvit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(rdvit("prepare", "phantom", tmp_path / "file"), "found a file")
    refused(rdvit("prepare", "phantom", tmp_path / "file" / "below"), "NotADirectoryError")


def test_five_patients_at_least(rdvit: Rdvit, tmp_path: Path) -> None:
    outcome = rdvit("prepare", "phantom", tmp_path / "phantom", "--patients", "4")
    assert outcome.returncode == 2 and not (tmp_path / "phantom").exists()


# ACDC in one file


def test_acdc_is_packed_and_scored_like_its_folder(
    rdvit: Rdvit, phantom: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "acdc.pack"
    outcome = rdvit("prepare", "acdc", phantom, out, "--pack", "--json")
    assert outcome.returncode == 0, outcome.stderr
    told = json.loads(outcome.stdout)
    assert (told["patients"], told["frames"], told["levels"]) == (5, 10, 255)
    assert told["size"] == out.stat().st_size < 48e6
    assert told["label_dice"] == 1 and told["voxel_shift_mm"] == 0 and 0 < told["intensity_error"] < 0.02
    assert f"10 frames of 5 patients packed into {out}: {out.stat().st_size / 1e6:.1f} MB" in outcome.stderr
    assert "Dice of the labels 1.0000" in outcome.stderr

    scores = []
    for data in (phantom, out):
        words = ("evaluate", "--data", data, "--model", tiny_model_folder, "--split", "fold0-val", "--device", "cpu", "--json")
        scored = rdvit(*words)
        assert scored.returncode == 0, scored.stderr
        scores.append(json.loads(scored.stdout))
    folder, packed = ({case["case"]: case for case in score["metric_per_case"]} for score in scores)
    assert folder.keys() == packed.keys() and len(folder) == 2
    for name, case in folder.items():
        for structure, metrics in case["metrics"].items():
            other = packed[name]["metrics"][structure]
            assert other["volume_ref_ml"] == metrics["volume_ref_ml"] > 0
            assert other["Dice"] == pytest.approx(metrics["Dice"], abs=0.02)

    refused(rdvit("prepare", "acdc", phantom, out, "--pack"), "exist already")
    size = out.stat().st_size
    refused(rdvit("prepare", "acdc", phantom, out, "--pack", "--overwrite", "--max-mb", "0.01"), "take more than 0.01 MB")
    assert out.stat().st_size == size
    refused(rdvit("prepare", "acdc", phantom, tmp_path / "other"), "--pack makes one file")
    refused(rdvit("prepare", "acdc", phantom, tmp_path, "--pack"), "is a folder")


# DICOM


@pytest.fixture
def study(tmp_path: Path) -> Path:
    """A volume and a cine of one patient, and a localizer of another, whose names are in the headers."""
    pydicom = pytest.importorskip("pydicom", reason='needs pydicom: pip install "rdvit[dicom]"')
    import SimpleITK as sitk  # noqa: N813 - its customary name

    def write(path: Path, uid: str, z: float, t: int, description: str) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        values = np.arange(20, dtype=np.int16).reshape(1, 5, 4) + int(10 * z) + 1000 * t
        sitk.WriteImage(sitk.GetImageFromArray(values), str(path))
        header = pydicom.dcmread(path)
        header.SeriesInstanceUID, header.SOPInstanceUID, header.SeriesDescription = uid, f"{uid}.{int(z)}.{t}", description
        header.ImageOrientationPatient, header.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [5, 6, z]
        header.PixelSpacing, header.TriggerTime, header.SliceThickness = [1.5, 1.5], 30 * t, 8
        header.PatientName, header.PatientID, header.PatientBirthDate = "Doe^Jane", "MRN-4711", "19620229"
        header.save_as(path)

    for z in range(3):
        write(tmp_path / "study" / "a" / f"{z}.dcm", "1.2.3", 8.0 * z, 0, "T1")
        for t in range(2):
            write(tmp_path / "study" / "a" / f"cine{z}{t}.dcm", "1.2.4", 8.0 * z, t, "SAX cine")
    for z in (0, 8, 30):
        write(tmp_path / "study" / "b" / "deep" / f"{z}.dcm", "1.2.5", z, 0, "uneven")
    return tmp_path / "study"


def test_dicom_series_become_numbered_files_without_the_patient(rdvit: Rdvit, study: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    outcome = rdvit("prepare", "dicom", study, "--out", out, "--json")
    assert outcome.returncode == 1, outcome.stderr  # the third is no stack, and stops no other
    result = json.loads(outcome.stdout)
    assert [(row["file"], row["description"], row["images"]) for row in result["series"]] == [
        (str(out / "scan001.nii.gz"), "T1", 3),
        (str(out / "scan002.nii.gz"), "SAX cine", 6),
        ("-", "uneven", 3),
    ]
    assert result["failed"] == 1 and "slice" in outcome.stderr and str(study / "b" / "deep") in outcome.stderr
    assert sorted(path.name for path in out.iterdir()) == ["scan001.nii.gz", "scan002.nii.gz"]
    volume, cine = nib.load(out / "scan001.nii.gz"), nib.load(out / "scan002.nii.gz")
    assert volume.shape == (4, 5, 3) and cine.shape == (4, 5, 3, 2) and cine.header["pixdim"][4] == 30
    assert np.asarray(cine.dataobj)[1, 2, 1, 1] == 9 + 80 + 1000
    for path in out.iterdir():
        content = gzip.decompress(path.read_bytes())
        assert not any(secret in content for secret in (b"Jane", b"4711", b"1962", b"1.2.3", b"T1", b"SAX"))

    refused(rdvit("prepare", "dicom", study, "--out", out), "exist already")
    assert rdvit("prepare", "dicom", study, "--out", out, "--series", "SAX cine", "--overwrite").returncode == 0


def test_dicom_series_are_listed_and_nothing_written(rdvit: Rdvit, study: Path, tmp_path: Path) -> None:
    outcome = rdvit("prepare", "dicom", study, "--out", tmp_path / "out", "--list")
    assert outcome.returncode == 0 and not (tmp_path / "out").exists()
    assert all(text in outcome.stderr for text in ("T1", "SAX cine", "uneven", "1.2.4"))
    refused(rdvit("prepare", "dicom", study, "--series", "9.9"), "none of 3 series is called '9.9'")
    refused(rdvit("prepare", "dicom", tmp_path / "absent"), "no such folder")
    (tmp_path / "bare" / "below").mkdir(parents=True)
    refused(rdvit("prepare", "dicom", tmp_path / "bare"), "no DICOM file is in it or its 1 subfolders")
