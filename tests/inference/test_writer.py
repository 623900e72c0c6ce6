"""Written results lie exactly on their image, hold plain integers, and never appear half done."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import SimpleITK
from nibabel.nifti1 import Nifti1Extension
from scipy.spatial.transform import Rotation

from rdvit.data.volume import Volume, from_canonical, read_image, read_labels, to_canonical
from rdvit.errors import DataError
from rdvit.inference.writer import write_labels, write_map

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
PATIENT_1 = SHARED / "acdc" / "training" / "patient001"

NAMES = {1: "RV", 2: "MYO", 3: "LV"}
IMAGE = np.linspace(-50, 900, 3 * 4 * 5).reshape(3, 4, 5)
LABELS = np.arange(3 * 4 * 5).reshape(3, 4, 5) % 4
GEOMETRY = [
    *("dim", "pixdim", "dim_info", "xyzt_units", "qform_code", "quatern_b", "quatern_c", "quatern_d"),
    *("qoffset_x", "qoffset_y", "qoffset_z", "sform_code", "srow_x", "srow_y", "srow_z"),
]


def oblique(spacing: tuple[float, float, float] = (1.4, 1.4, 9.0)) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", [25, -40, 70], degrees=True).as_matrix() * spacing
    affine[:3, 3] = -31.7, 12.3, 88.1
    return affine


def write_image(path: Path, array: np.ndarray = IMAGE, kind: Any = nib.Nifti1Image, endianness: str = "<") -> Path:
    """An image with both transforms set, differently, and everything that must not be copied."""
    header = kind.header_class(endianness=endianness)
    header.set_data_dtype(np.int16)
    image = kind(array, oblique(), header)
    image.set_sform(oblique(), code=2)
    image.set_qform(oblique((1.4, 1.4, 9.001)), code=1, update_affine=False)
    image.header.set_xyzt_units("mm", "msec")
    image.header.set_dim_info(0, 1, 2)
    image.header["descrip"] = b"Jane Doe 1970-01-01"
    image.header["aux_file"] = b"jane.txt"
    image.header["intent_name"] = b"Jane"
    image.header["cal_max"] = 900
    if "db_name" in image.header:
        image.header["db_name"] = b"Jane Doe"
    image.header.extensions.append(Nifti1Extension("comment", b"Jane Doe"))
    image.to_filename(path)
    return path


def stored_header(path: Path) -> nib.Nifti1Header:
    """The header as it lies on disk: nibabel blanks slope and intercept of a loaded image."""
    header_class = type(nib.load(path).header)
    return header_class(path.read_bytes()[: header_class.sizeof_hdr])


def assert_same_geometry(result: Path, source: Path) -> None:
    written, original = nib.load(result), nib.load(source)
    for field in GEOMETRY:
        assert written.header[field].tobytes() == original.header[field].tobytes(), field
    assert np.array_equal(written.affine, original.affine)
    assert written.header.endianness == original.header.endianness


class TestGeometry:
    @pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.hdr"])
    @pytest.mark.parametrize("endianness", ["<", ">"])
    def test_bit_for_bit(self, tmp_path: Path, name: str, endianness: str) -> None:
        kind = nib.Nifti1Pair if name == "a.hdr" else nib.Nifti1Image
        source = write_image(tmp_path / name, kind=kind, endianness=endianness)
        for result in (
            write_labels(tmp_path / "labels.nii.gz", LABELS, read_image(source), NAMES),
            write_map(tmp_path / "map.nii.gz", LABELS / 4, read_image(source), "halting"),
        ):
            assert_same_geometry(result, source)
            assert isinstance(nib.load(result), nib.Nifti1Image)

    def test_nifti2_stays_nifti2(self, tmp_path: Path) -> None:
        source = write_image(tmp_path / "a.nii", kind=nib.Nifti2Image)
        result = write_labels(tmp_path / "labels.nii", LABELS, read_image(source), NAMES)
        assert_same_geometry(result, source)
        assert isinstance(nib.load(result), nib.Nifti2Image)

    def test_acdc_fault_is_kept_on_disk_and_repaired_on_reading(self, tmp_path: Path) -> None:
        header = nib.Nifti1Header()
        header.set_data_shape(IMAGE.shape)
        header.set_sform(np.diag([-1, -1, 1, 1]), code=2)
        header["pixdim"][1:4] = 1.5625, 1.5625, 10
        nib.Nifti1Image(IMAGE.astype(np.float32), header.get_best_affine(), header).to_filename(tmp_path / "a.nii")
        like = read_image(tmp_path / "a.nii")
        result = write_labels(tmp_path / "labels.nii", LABELS, like, NAMES)
        assert_same_geometry(result, tmp_path / "a.nii")
        assert read_labels(result).spacing == like.spacing == (1.5625, 1.5625, 10)

    def test_frame_of_a_cine_becomes_3d(self, tmp_path: Path) -> None:
        source = write_image(tmp_path / "cine.nii", np.stack([IMAGE, IMAGE + 1], axis=-1))
        result = nib.load(write_labels(tmp_path / "labels.nii", LABELS, read_image(source, frame=2), NAMES))
        assert result.shape == LABELS.shape
        assert np.array_equal(result.affine, nib.load(source).affine)
        assert np.array_equal(result.header["pixdim"][:4], nib.load(source).header["pixdim"][:4])

    def test_2d_stays_2d(self, tmp_path: Path) -> None:
        source = write_image(tmp_path / "a.nii", IMAGE[..., 0])
        result = write_labels(tmp_path / "labels.nii", LABELS[..., :1], read_image(source), NAMES)
        assert_same_geometry(result, source)
        np.testing.assert_array_equal(read_labels(result).array, LABELS[..., :1])

    def test_through_canonical_orientation_and_back(self, tmp_path: Path) -> None:
        like = read_image(write_image(tmp_path / "a.nii"))
        canonical, orientation = to_canonical(like)
        labels = from_canonical((canonical.array > 300).astype(np.uint8), orientation)
        result = write_labels(tmp_path / "labels.nii", labels, like, NAMES)
        np.testing.assert_array_equal(read_labels(result).array, like.array > 300)

    def test_without_a_header_the_affine_is_written(self, tmp_path: Path) -> None:
        result = nib.load(write_labels(tmp_path / "labels.nii.gz", LABELS, Volume(IMAGE, oblique()), NAMES))
        np.testing.assert_allclose(result.affine, oblique(), atol=1e-5)
        np.testing.assert_allclose(result.header.get_zooms(), (1.4, 1.4, 9), rtol=1e-6)
        assert (result.header["qform_code"], result.header["sform_code"]) == (1, 1)
        assert result.header.get_xyzt_units()[0] == "mm"

    def test_simpleitk_agrees(self, tmp_path: Path) -> None:
        source = write_image(tmp_path / "a.nii")
        result = SimpleITK.ReadImage(str(write_labels(tmp_path / "labels.nii.gz", LABELS, read_image(source), NAMES)))
        image = SimpleITK.ReadImage(str(source))
        for part in ("GetSize", "GetSpacing", "GetOrigin", "GetDirection"):
            assert getattr(result, part)() == getattr(image, part)()
        np.testing.assert_array_equal(SimpleITK.GetArrayFromImage(result).T, LABELS)


class TestValues:
    def test_labels_are_plain_integers(self, tmp_path: Path) -> None:
        """The source is scaled int16; copying its slope would turn label 3 into 2.9999."""
        source = write_image(tmp_path / "a.nii")
        assert stored_header(source)["scl_slope"] != 1
        result = write_labels(tmp_path / "labels.nii", LABELS.astype(np.int64), read_image(source), NAMES)
        header = stored_header(result)
        assert (header["scl_slope"], header["scl_inter"], header.get_data_dtype()) == (1, 0, np.uint8)
        np.testing.assert_array_equal(np.asanyarray(nib.load(result).dataobj), LABELS)

    def test_large_labels_need_uint16(self, tmp_path: Path) -> None:
        like = read_image(write_image(tmp_path / "a.nii", endianness=">"))
        result = write_labels(tmp_path / "labels.nii", LABELS * 1000, like, {})
        assert stored_header(result).get_data_dtype() == np.dtype(">u2")
        np.testing.assert_array_equal(read_labels(result).array, LABELS * 1000)

    def test_masks_of_bool(self, tmp_path: Path) -> None:
        like = read_image(write_image(tmp_path / "a.nii"))
        np.testing.assert_array_equal(
            read_labels(write_labels(tmp_path / "m.nii", LABELS > 1, like, {1: "m"})).array, LABELS > 1
        )

    def test_map_is_float32(self, tmp_path: Path) -> None:
        values = np.random.default_rng(0).normal(size=IMAGE.shape)
        result = write_map(tmp_path / "map.nii.gz", values, read_image(write_image(tmp_path / "a.nii")), "entropy")
        assert nib.load(result).get_data_dtype() == np.float32
        np.testing.assert_array_equal(read_image(result).array, values.astype(np.float32))
        assert nib.load(result).header["descrip"] == b"rdvit: entropy"

    def test_nothing_of_the_patient_is_left(self, tmp_path: Path) -> None:
        source = write_image(tmp_path / "a.nii")
        assert source.read_bytes().count(b"Jane") == 4 and b"jane" in source.read_bytes()
        result = write_labels(tmp_path / "labels.nii", LABELS, read_image(source), NAMES)
        assert b"jane" not in result.read_bytes().lower()
        header = nib.load(result).header
        for kind in (nib.Nifti1Image, nib.Nifti2Image):  # every field of text, whatever it is called
            source = write_image(tmp_path / "b.nii", kind=kind)
            content = bytearray(source.read_bytes())
            for dtype, offset, *_ in kind.header_class.template_dtype.fields.values():
                if dtype.kind == "S" and dtype.itemsize > 4:
                    content[offset : offset + dtype.itemsize] = b"Jane567890"[: dtype.itemsize].ljust(dtype.itemsize, b"J")
            source.write_bytes(content)
            other = write_labels(tmp_path / "c.nii", LABELS, read_image(source), NAMES, overwrite=True)
            assert b"Jane" not in other.read_bytes() and b"JJJ" not in other.read_bytes()
        assert header["descrip"] == b"rdvit: 1=RV 2=MYO 3=LV"
        assert header["cal_max"] == 0 and not header.extensions

    def test_long_description_is_cut_between_characters(self, tmp_path: Path) -> None:
        like = read_image(write_image(tmp_path / "a.nii"))
        result = write_labels(tmp_path / "labels.nii", LABELS, like, {10: "ü" * 100})  # two bytes each
        assert bytes(nib.load(result).header["descrip"].item()) == ("rdvit: 10=" + "ü" * 34).encode()

    @pytest.mark.parametrize("labels", [LABELS - 1, LABELS * 30000, LABELS.astype(float)])
    def test_what_is_no_label(self, tmp_path: Path, labels: np.ndarray) -> None:
        with pytest.raises(DataError, match=r"labels\.nii: labels must"):
            write_labels(tmp_path / "labels.nii", labels, Volume(IMAGE, np.eye(4)), NAMES)

    def test_wrong_shape(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match=r"\(3, 4, 4\).*\(3, 4, 5\)"):
            write_labels(tmp_path / "labels.nii", LABELS[..., :4], Volume(IMAGE, np.eye(4)), NAMES)


class TestFiles:
    like = Volume(IMAGE, oblique())

    def test_existing_file_is_kept_without_overwrite(self, tmp_path: Path) -> None:
        path = write_labels(tmp_path / "labels.nii.gz", LABELS, self.like, NAMES)
        before = path.read_bytes()
        with pytest.raises(DataError, match=r"exists already.*--overwrite"):
            write_labels(path, LABELS * 0, self.like, NAMES)
        assert path.read_bytes() == before
        write_labels(path, LABELS * 0, self.like, NAMES, overwrite=True)
        assert not read_labels(path).array.any()

    def test_folders_are_made_and_nothing_else_is_left(self, tmp_path: Path) -> None:
        path = write_labels(str(tmp_path / "new folder" / "ü" / "labels.nii.gz"), LABELS, self.like, NAMES)
        assert list(path.parent.iterdir()) == [path]

    def test_same_input_gives_the_same_bytes(self, tmp_path: Path) -> None:
        first, second = (write_labels(tmp_path / n, LABELS, self.like, NAMES) for n in ("a.nii.gz", "b.nii.gz"))
        assert first.read_bytes() == second.read_bytes()

    def test_a_failure_keeps_the_old_file_and_leaves_no_rest(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = write_labels(tmp_path / "labels.nii.gz", LABELS, self.like, NAMES)
        before = path.read_bytes()

        def disk_full(_descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", disk_full)
        with pytest.raises(DataError, match=r"labels\.nii\.gz: cannot be written: No space left"):
            write_labels(path, LABELS * 0, self.like, NAMES, overwrite=True)
        assert path.read_bytes() == before
        assert list(tmp_path.iterdir()) == [path]

    def test_places_that_cannot_be_written(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        (tmp_path / "folder.nii").mkdir()
        for path in (tmp_path / "file" / "labels.nii", tmp_path / "folder.nii"):
            with pytest.raises(DataError, match="cannot be written"):
                write_labels(path, LABELS, self.like, NAMES, overwrite=True)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder.nii"]

    @pytest.mark.parametrize("name", ["labels", "labels.nrrd", "labels.hdr", "labels.gz"])
    def test_only_nifti_suffixes(self, tmp_path: Path, name: str) -> None:
        with pytest.raises(DataError, match=r"\.nii or \.nii\.gz"):
            write_labels(tmp_path / name, LABELS, self.like, NAMES)


@pytest.mark.skipif(not PATIENT_1.is_dir(), reason=f"needs {PATIENT_1}")
def test_patient001_goes_through_unchanged(tmp_path: Path) -> None:
    image = PATIENT_1 / "patient001_frame01.nii.gz"
    labels = read_labels(PATIENT_1 / "patient001_frame01_gt.nii.gz")
    result = write_labels(tmp_path / "labels.nii.gz", labels.array, read_image(image), NAMES)
    assert_same_geometry(result, image)
    again = read_labels(result)
    np.testing.assert_array_equal(again.array, labels.array)
    assert np.count_nonzero(again.array == 3) * np.prod(again.spacing) / 1000 == pytest.approx(295.5, abs=0.05)
