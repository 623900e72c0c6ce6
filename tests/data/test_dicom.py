"""DICOM folders: order by place and time, one line for what is missing, and nothing of the patient in what comes out."""

from __future__ import annotations

import logging
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from rdvit.data.volume import frame_count, read_frames, read_image
from rdvit.errors import DataError
from rdvit.inference.writer import write_labels

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
REAL = SHARED / "hippocampus" / "dicom_series"
ROWS, COLUMNS, SLICES = 5, 4, 6
SECRETS = ("Doe^Jane", "MRN-4711", "19620229", "Dr^Who")
TURN = Rotation.from_euler("xyz", [25, -35, 60], degrees=True).as_matrix()  # columns: along a row, down a column, across

pydicom: Any = pytest.importorskip("pydicom", reason='needs pydicom: pip install "rdvit[dicom]"')


def picture(z: int, t: int = 0) -> np.ndarray:
    """(rows, columns) values that say where and when they are."""
    return (np.arange(ROWS * COLUMNS).reshape(ROWS, COLUMNS) + 100 * z + 1000 * t).astype(np.int16)


def write_slice(path: Path, z: float, t: int = 0, **changes: Any) -> Path:
    """One MR slice, 2 mm rows, 1.5 mm columns, 8 mm between slices, double-oblique, rescaled by 2 x - 10."""
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.uid import ExplicitVRLittleEndian, MRImageStorage

    data = Dataset()
    data.file_meta = FileMetaDataset()
    data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    data.file_meta.MediaStorageSOPClassUID = data.SOPClassUID = MRImageStorage
    data.file_meta.MediaStorageSOPInstanceUID = data.SOPInstanceUID = changes.pop("uid", f"1.2.3.4.{round(z * 1000)}.{t}")
    data.SeriesInstanceUID, data.SeriesDescription, data.Modality = "1.2.840.99.1111", "SAX cine", "MR"
    data.PatientName, data.PatientID, data.PatientBirthDate, data.ReferringPhysicianName = SECRETS
    data.ImageOrientationPatient = [*TURN[:, 0], *TURN[:, 1]]
    data.ImagePositionPatient = [*(TURN[:, 2] * 8 * z + (10, -20, 30))]
    data.PixelSpacing, data.SliceThickness, data.TriggerTime = [2, 1.5], 6, t * 40.0
    data.Rows, data.Columns, data.SamplesPerPixel, data.PhotometricInterpretation = ROWS, COLUMNS, 1, "MONOCHROME2"
    data.BitsAllocated, data.BitsStored, data.HighBit, data.PixelRepresentation = 16, 16, 15, 1
    data.RescaleSlope, data.RescaleIntercept = 2, -10
    data.PixelData = picture(round(z), t).tobytes()
    for name, value in changes.items():
        if value is None:
            delattr(data, name)
        else:
            setattr(data, name, value)
    data.save_as(path, enforce_file_format=True)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A stack whose file names say nothing about its order."""
    path = tmp_path / "Serie 1 ü"
    path.mkdir()
    for z in range(SLICES):
        write_slice(path / f"IM{(z * 5) % 7:03d}", z)
    (path / "readme.txt").write_text("passed over")
    return path


def expected(t: int = 0) -> np.ndarray:
    return np.stack([picture(z, t).T * 2.0 - 10 for z in range(SLICES)], axis=-1)


def test_slices_lie_where_their_headers_say(folder: Path) -> None:
    volume = read_image(folder)
    np.testing.assert_array_equal(volume.array, expected())
    assert volume.spacing == pytest.approx((1.5, 2, 8))
    for index in ((0, 0, 0), (COLUMNS - 1, 0, 0), (0, ROWS - 1, SLICES - 1)):
        lps = np.array([10, -20, 30]) + TURN @ (np.array(index) * (1.5, 2, 8))
        np.testing.assert_allclose((volume.affine @ (*index, 1))[:3], lps * (-1, -1, 1), atol=1e-6)


def test_simpleitk_agrees(folder: Path) -> None:
    import SimpleITK as sitk  # noqa: N813 - its customary name

    reader = sitk.ImageSeriesReader()
    reader.SetFileNames(reader.GetGDCMSeriesFileNames(str(folder)))
    image, volume = reader.Execute(), read_image(folder)
    np.testing.assert_array_equal(sitk.GetArrayFromImage(image).T, volume.array)
    far = tuple(size - 1 for size in volume.array.shape)
    place = np.array(image.TransformIndexToPhysicalPoint(far)) * (-1, -1, 1)
    np.testing.assert_allclose((volume.affine @ (*far, 1))[:3], place, atol=1e-4)


def test_a_cine_is_ordered_by_place_and_trigger_time(tmp_path: Path) -> None:
    for z in range(SLICES):
        for t in range(3):
            write_slice(tmp_path / f"{100 - 7 * z - 11 * t}.dcm", z, t)
    assert frame_count(tmp_path) == 3
    for t, frame in enumerate(read_frames(tmp_path)):
        np.testing.assert_array_equal(frame.array, expected(t))
        assert frame.header is not None and frame.header["pixdim"][4] == 40
    np.testing.assert_array_equal(read_image(tmp_path, frame=2).array, expected(1))
    with pytest.raises(DataError, match="3 time frames"):
        read_image(tmp_path)


def test_several_series_are_listed_and_one_is_named(folder: Path) -> None:
    for z in range(2):
        write_slice(
            folder / f"B{z}", z, uid=f"9.{z}", SeriesInstanceUID="1.2.840.99.2222", SeriesDescription="LAX", RescaleSlope=1
        )
    with pytest.raises(DataError, match=r"2 series: \.99\.1111 \(SAX cine, 6 images\); \.99\.2222 \(LAX, 2 images\).*--series"):
        read_image(folder)
    assert read_image(folder, series="1111").array.shape[2] == SLICES
    for name in ("2222", "1.2.840.99.2222", "LAX"):
        assert read_image(folder, series=name).array.shape[2] == 2
    with pytest.raises(DataError, match=r"no series are called '3333', it holds .*LAX"):
        read_image(folder, series="3333")


Spoil = Callable[[Path], object]
FAULTS: list[tuple[str, Spoil, str]] = [
    ("missing", lambda folder: (folder / "IM003").unlink(), r"1 slice\(s\) are missing: 16 mm between"),
    ("doubled", lambda folder: write_slice(folder / "X", 2, uid="9.9"), r"images are missing or doubled: 1 at most .* 2 at"),
    ("uneven", lambda folder: write_slice(folder / "X", 7.4), r"unevenly spaced: 19\.2 mm between"),
    ("size", lambda folder: write_slice(folder / "X", 6, PixelSpacing=[2, 2]), "differ in size or pixel spacing"),
    (
        "direction",
        lambda folder: write_slice(folder / "X", 6, ImageOrientationPatient=[1, 0, 0, 0, 1, 0]),
        "different directions",
    ),
    ("place", lambda folder: write_slice(folder / "X", 6, ImagePositionPatient=None), "ImagePositionPatient is missing"),
    ("colours", lambda folder: write_slice(folder / "X", 6, SamplesPerPixel=3), "holds colours"),
    ("frames", lambda folder: write_slice(folder / "X", 6, NumberOfFrames=12), "enhanced multi-frame.*dcm2niix"),
    ("cut", lambda folder: (folder / "IM003").write_bytes((folder / "IM003").read_bytes()[:-20]), "IM003: "),
    (
        "huge",
        lambda folder: write_slice(folder / "X", 6, Rows=60000, Columns=60000),
        r"X: is cut short: its header promises 72",
    ),
]


@pytest.mark.parametrize(("kind", "spoil", "text"), FAULTS, ids=[kind for kind, _, _ in FAULTS])
def test_what_is_no_regular_stack_is_refused_in_one_line(folder: Path, kind: str, spoil: Spoil, text: str) -> None:
    spoil(folder)
    with pytest.raises(DataError, match=text) as refusal:
        read_image(folder)
    assert "\n" not in str(refusal.value) and str(folder) in str(refusal.value)
    assert not any(secret in str(refusal.value) for secret in SECRETS)


@pytest.mark.parametrize("garbage", [b"\x00\x56\x00\x53\x00\x2d\x00\x3b", b"\x18\x00\x28\x00OB\x00\x00\xf0\xff\xff\x7f"])
def test_an_element_longer_than_its_file_is_refused_before_memory_is_taken(folder: Path, garbage: bytes) -> None:
    """Found by fuzzing: GDCM allocates what such an element promises, and then finds the file too short."""
    with (folder / "IM003").open("ab") as stream:
        stream.write(garbage)
    with pytest.raises(DataError, match=r"IM003: cannot be true: its element .* promises \d+ bytes"):
        read_image(folder)


def test_meta_information_of_an_unknown_type_is_refused_before_gdcm_sees_it(folder: Path) -> None:
    """CVE-2026-3650: GDCM 3.2.2 allocates without end there."""
    file = folder / "IM003"
    content = file.read_bytes()
    place = content.index(b"\x02\x00\x10\x00UI")  # transfer syntax, explicit VR
    file.write_bytes(content[: place + 4] + b"QQ" + content[place + 6 :])
    with pytest.raises(DataError, match="IM003"):
        read_image(folder)
    place = content.index(b"\x02\x00\x03\x00UI")  # SOP instance, which pydicom itself does not need
    file.write_bytes(content[: place + 4] + b"QQ" + content[place + 6 :])
    with pytest.raises(DataError, match=r"IM003: its meta information is damaged: element .* has the type 'QQ'"):
        read_image(folder)


def test_doubled_frames_without_times_are_refused(tmp_path: Path) -> None:
    for z in range(3):
        for t in range(2):
            write_slice(tmp_path / f"{z}{t}", z, t, TriggerTime=None)
    with pytest.raises(DataError, match=r"slices are doubled: 2 images lie at .* no trigger times"):
        read_image(tmp_path)


def test_copies_and_small_unevenness_are_said(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    shutil.copy(folder / "IM000", folder / "again")
    write_slice(folder / "X", SLICES + 0.03)
    with caplog.at_level(logging.WARNING, logger="rdvit"):
        volume = read_image(folder)
    assert "1 of 8 images are copies" in caplog.text and "not quite evenly spaced, 8.24 mm between" in caplog.text
    assert volume.array.shape[2] == SLICES + 1 and volume.spacing[2] == pytest.approx(8.04)


def test_files_without_pixels_are_passed_over_and_named(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_slice(folder / "report", 9, Rows=None)
    np.testing.assert_array_equal(read_image(folder).array, expected())
    assert "1 DICOM file(s) without an image are passed over: report" in caplog.text


def test_a_single_slice_has_its_thickness(tmp_path: Path) -> None:
    write_slice(tmp_path / "a", 0)
    assert read_image(tmp_path).spacing == pytest.approx((1.5, 2, 6))
    write_slice(tmp_path / "a", 0, SliceThickness=None)
    with pytest.raises(DataError, match="SliceThickness"):
        read_image(tmp_path)


def test_nothing_of_the_patient_comes_out(folder: Path, tmp_path: Path) -> None:
    volume = read_image(folder)
    mask = write_labels(tmp_path / "mask.nii", (volume.array > 300).astype(np.uint8), volume, {1: "LV"})
    written = mask.read_bytes()
    assert not any(secret.encode() in written for secret in (*SECRETS, "SAX cine", "1.2.840"))
    np.testing.assert_allclose(nib.load(mask).affine, volume.affine, atol=1e-5)


def test_without_pydicom_the_command_to_install_it_is_given(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(DataError, match=r'needs pydicom \(pip install "rdvit\[dicom\]"'):
        read_image(folder)


def test_one_file_and_no_image(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="one DICOM file; name the folder"):
        read_image(folder / "IM000")
    for file in folder.iterdir():
        if file.name != "readme.txt":
            file.unlink()
    write_slice(folder / "report", 0, Rows=None)
    with pytest.raises(DataError, match="no image among them"):
        read_image(folder)


@pytest.mark.skipif(not REAL.is_dir(), reason=f"needs {REAL}")
def test_a_real_series() -> None:
    volume = read_image(REAL)
    assert volume.array.shape == (35, 51, 32) and volume.spacing == (1, 1, 1)
    np.testing.assert_array_equal(volume.affine, [[-1, 0, 0, 0], [0, -1, 0, 0], [0, 0, 1, 1], [0, 0, 0, 1]])
    assert volume.array.mean() == pytest.approx(58.59, abs=0.01)
