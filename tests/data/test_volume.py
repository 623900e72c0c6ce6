"""Reading volumes: true spacing, frames, odd and broken files, and the common orientation and back."""

from __future__ import annotations

import gzip
import logging
import os
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from rdvit.data import volume as volume_module
from rdvit.data.volume import (
    Volume,
    canonical_geometry,
    check_same_grid,
    frame_count,
    from_canonical,
    read_image,
    read_labels,
    to_canonical,
    true_affine,
)
from rdvit.errors import DataError, RdvitError

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
PATIENT_1 = SHARED / "acdc" / "training" / "patient001"
PATIENT_90 = SHARED / "acdc" / "training" / "patient090"
ZOO = SHARED / "nifti_zoo"

RAMP = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)


def save(path: Path, array: np.ndarray, affine: np.ndarray | None = None, **image_kwargs: object) -> Path:
    nib.Nifti1Image(array, np.diag([1.5, 1.5, 8, 1]) if affine is None else affine, **image_kwargs).to_filename(path)
    return path


def acdc_like(path: Path, array: np.ndarray, pixdim: tuple[float, float, float] = (1.5625, 1.5625, 10)) -> Path:
    """A file with ACDC's fault: no qform, an sform of 1 mm, and the truth in pixdim."""
    header = nib.Nifti1Header()
    header.set_data_shape(array.shape)
    header.set_data_dtype(array.dtype)
    header.set_sform(np.diag([-1, -1, 1, 1]), code=2)
    header["qform_code"] = 0
    header["pixdim"][1:4] = pixdim
    image = nib.Nifti1Image(array, header.get_best_affine(), header)
    assert np.allclose(image.affine, np.diag([-1, -1, 1, 1]))
    image.to_filename(path)
    return path


def world(affine: np.ndarray, index: np.ndarray) -> np.ndarray:
    return affine[:3, :3] @ index + affine[:3, 3]


class TestSpacing:
    def test_affine_is_the_truth_when_it_states_a_spacing(self, tmp_path: Path) -> None:
        affine = np.eye(4)
        affine[:3, :3] = Rotation.from_euler("xyz", [20, 30, -40], degrees=True).as_matrix() * [1.2, 1.3, 9]
        read = read_image(save(tmp_path / "a.nii.gz", RAMP, affine))
        assert read.spacing == pytest.approx((1.2, 1.3, 9), rel=1e-5)
        np.testing.assert_allclose(read.affine, affine, atol=1e-6)

    def test_pixdim_is_the_truth_when_the_affine_says_1_mm(self, tmp_path: Path) -> None:
        read = read_image(acdc_like(tmp_path / "a.nii.gz", RAMP))
        assert read.spacing == (1.5625, 1.5625, 10)
        np.testing.assert_array_equal(read.affine, np.diag([-1.5625, -1.5625, 10, 1]))

    def test_origin_is_kept_when_columns_are_stretched(self) -> None:
        header = nib.Nifti1Header()
        header["pixdim"][1:4] = 2, 3, 4
        affine = np.eye(4)
        affine[:3, 3] = 7, -8, 9
        np.testing.assert_array_equal(true_affine(header, affine), [[2, 0, 0, 7], [0, 3, 0, -8], [0, 0, 4, 9], [0, 0, 0, 1]])

    def test_real_1_mm_volume_stays_as_it_is(self) -> None:
        header = nib.Nifti1Header()
        header["pixdim"][1:4] = 1, 0, 1.0004  # 0 says nothing, 1.0004 is rounding
        np.testing.assert_array_equal(true_affine(header, np.eye(4)), np.eye(4))

    def test_without_qform_and_sform_pixdim_makes_the_affine(self, tmp_path: Path) -> None:
        header = nib.Nifti1Header()
        header.set_data_shape(RAMP.shape)
        header["pixdim"][1:4] = 1.4, 1.4, 6
        image = nib.Nifti1Image(RAMP, None, header)
        image.to_filename(tmp_path / "a.nii")
        assert nib.load(tmp_path / "a.nii").header["sform_code"] == 0
        assert read_image(tmp_path / "a.nii").spacing == pytest.approx((1.4, 1.4, 6))

    def test_disagreement_is_said_once_per_process(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(volume_module, "_told", set())
        for name in ("a.nii", "b.nii"):
            read_image(acdc_like(tmp_path / name, RAMP))
        messages = [record.getMessage() for record in caplog.records if record.name == "rdvit"]
        assert len(messages) == 1
        assert all(word in messages[0] for word in ("a.nii", "1.5625 x 1.5625 x 10", "1 x 1 x 1", "pixdim is taken"))

    def test_agreement_is_not_worth_a_word(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(volume_module, "_told", set())
        read_image(save(tmp_path / "a.nii", RAMP))
        assert not caplog.records

    @pytest.mark.parametrize("size", [0.01, 51])
    def test_impossible_spacing_is_refused(self, tmp_path: Path, size: float) -> None:
        with pytest.raises(DataError, match=r"a\.nii.*spacing .*0\.05 to 50 mm"):
            read_image(save(tmp_path / "a.nii", RAMP, np.diag([1.5, size, 8, 1])))

    def test_singular_affine_is_refused(self, tmp_path: Path) -> None:
        image = nib.Nifti1Image(RAMP, np.eye(4))
        image.header["srow_x"], image.header["srow_y"], image.header["srow_z"] = (
            [2, 2, 0, 0],
            [0, 0, 0, 0],
            [0, 0, 2, 0],
        )
        (tmp_path / "a.nii").write_bytes(nib.Nifti1Image(RAMP, image.header.get_sform(), image.header).to_bytes())
        with pytest.raises(DataError, match=r"a\.nii.*singular"):
            read_image(tmp_path / "a.nii")


class TestVoxels:
    @pytest.mark.parametrize("dtype", ["u1", "i1", "<i2", ">i2", ">u2", ">i4", "<u4", ">f4", "<f8", ">f8"])
    def test_every_dtype_and_byte_order(self, tmp_path: Path, dtype: str) -> None:
        header = nib.Nifti1Header(endianness=">" if dtype[0] == ">" else "<")
        header.set_data_dtype(dtype)
        image = nib.Nifti1Image(RAMP.astype(dtype), np.diag([2, 2, 2, 1]), header)
        image.to_filename(tmp_path / "a.nii.gz")
        for read in (read_image(tmp_path / "a.nii.gz"), read_labels(tmp_path / "a.nii.gz")):
            np.testing.assert_array_equal(read.array, RAMP)
        assert read_image(tmp_path / "a.nii.gz").array.dtype == np.float32

    def test_slope_and_intercept_are_applied(self, tmp_path: Path) -> None:
        image = nib.Nifti1Image(RAMP, np.diag([2, 2, 2, 1]))
        image.header.set_slope_inter(0.5, -3)
        image.to_filename(tmp_path / "a.nii")
        np.testing.assert_allclose(read_image(tmp_path / "a.nii").array, RAMP * 0.5 - 3)

    def test_pair_and_nifti2(self, tmp_path: Path) -> None:
        nib.Nifti1Pair(RAMP, np.eye(4) * 2).to_filename(tmp_path / "pair.hdr")
        nib.Nifti2Image(RAMP, np.eye(4) * 2).to_filename(tmp_path / "two.nii")
        for name in ("pair.hdr", "pair.img", "two.nii"):
            np.testing.assert_array_equal(read_image(tmp_path / name).array, RAMP)

    @pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
    def test_renamed_files_are_read_by_content(self, tmp_path: Path, kind: type) -> None:
        content = kind(RAMP, np.eye(4) * 2).to_bytes()
        (tmp_path / "zipped.nii").write_bytes(gzip.compress(content))
        (tmp_path / "PLAIN.NII.GZ").write_bytes(content)
        for name in ("zipped.nii", "PLAIN.NII.GZ"):
            np.testing.assert_array_equal(read_image(tmp_path / name).array, RAMP)

    def test_path_with_spaces_and_umlauts(self, tmp_path: Path) -> None:
        folder = tmp_path / "Größe 1 心臓"
        folder.mkdir()
        assert read_image(str(save(folder / "ein bild.nii.gz", RAMP))).array.shape == RAMP.shape

    def test_2d_becomes_one_slice(self, tmp_path: Path) -> None:
        read = read_image(save(tmp_path / "a.nii", RAMP[..., 0]))
        np.testing.assert_array_equal(read.array, RAMP[..., :1])

    def test_few_nan_voxels_become_the_median(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        array = np.ones((10, 10, 2), dtype=np.float32)
        array[:3] = 5
        array[0, 0, 0], array[9, 9, 1] = np.nan, -np.inf
        read = read_image(save(tmp_path / "a.nii", array)).array
        assert read[0, 0, 0] == read[9, 9, 1] == 1
        assert np.array_equal(read[1:9], array[1:9])
        assert "a.nii" in caplog.text and "2 voxels" in caplog.text

    def test_many_nan_voxels_are_refused(self, tmp_path: Path) -> None:
        array = np.ones((10, 10, 2), dtype=np.float32)
        array[0] = np.nan
        with pytest.raises(DataError, match=r"a\.nii.*20 of 200"):
            read_image(save(tmp_path / "a.nii", array))

    def test_float64_beyond_float32_counts_as_infinite(self, tmp_path: Path) -> None:
        with pytest.raises(DataError, match="NaN or infinite"):
            read_image(save(tmp_path / "a.nii", np.full((2, 2, 2), 1e300)))


class TestFrames:
    @pytest.fixture
    def cine(self, tmp_path: Path) -> Path:
        return save(tmp_path / "cine.nii.gz", np.stack([RAMP + 100 * t for t in range(5)], axis=-1))

    def test_frames_count_from_1(self, cine: Path) -> None:
        assert frame_count(cine) == 5
        np.testing.assert_array_equal(read_image(cine, frame=1).array, RAMP)
        np.testing.assert_array_equal(read_image(cine, frame=5).array, RAMP + 400)

    def test_4d_without_a_frame_names_the_choices(self, cine: Path) -> None:
        with pytest.raises(DataError, match=r"5 time frames.*--frame K.*--all-frames"):
            read_image(cine)

    @pytest.mark.parametrize("frame", [0, 6, -1])
    def test_frame_out_of_range(self, cine: Path, frame: int) -> None:
        with pytest.raises(DataError, match="from 1 to 5"):
            read_image(cine, frame=frame)

    def test_3d_has_one_frame(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.nii", RAMP)
        assert frame_count(path) == 1
        np.testing.assert_array_equal(read_image(path, frame=1).array, RAMP)
        with pytest.raises(DataError, match="no frame 2"):
            read_image(path, frame=2)

    def test_single_4d_frame_is_3d(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.nii", RAMP[..., None])
        assert frame_count(path) == 1
        np.testing.assert_array_equal(read_image(path).array, RAMP)


class TestLabels:
    def test_scaled_labels_are_rounded(self, tmp_path: Path) -> None:
        labels = RAMP % 4
        read = read_labels(save(tmp_path / "a.nii", labels - 1e-5))
        np.testing.assert_array_equal(read.array, labels)
        assert read.array.dtype == np.uint8

    def test_large_labels_become_uint16(self, tmp_path: Path) -> None:
        labels = np.array([0, 255, 256, 1000], dtype=np.int32).reshape(2, 2, 1)
        read = read_labels(save(tmp_path / "a.nii", labels))
        np.testing.assert_array_equal(read.array, labels)
        assert read.array.dtype == np.uint16

    def test_64_values_are_labels_65_are_an_image(self, tmp_path: Path) -> None:
        values = np.arange(64, dtype=np.int16).reshape(4, 4, 4) * 3
        assert read_labels(save(tmp_path / "a.nii", values)).array.max() == 189
        values = np.arange(65, dtype=np.int16).reshape(5, 13, 1)
        with pytest.raises(DataError, match=r"looks like an image.*65 distinct"):
            read_labels(save(tmp_path / "b.nii", values))

    @pytest.mark.parametrize(("value", "reason"), [(-1.0, "-1"), (1.01, "0.01"), (70000.0, "70000"), (np.nan, "NaN")])
    def test_what_is_no_label(self, tmp_path: Path, value: float, reason: str) -> None:
        labels = np.zeros((3, 3, 3))
        labels[1, 1, 1] = value
        with pytest.raises(DataError, match=rf"a\.nii.*{reason}"):
            read_labels(save(tmp_path / "a.nii", labels))


def write_text(path: Path) -> None:
    path.write_text("patient;volume\n1;295.5\n" * 50)


def write_truncated(path: Path) -> None:
    whole = nib.Nifti1Image(np.random.default_rng(0).random((20, 20, 20)), np.eye(4) * 2).to_bytes()
    zipped = gzip.compress(whole)
    path.write_bytes(zipped[: len(zipped) // 2] if path.name.endswith(".gz") else whole[: len(whole) // 2])


class TestBrokenFiles:
    @pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "a.hdr"])
    @pytest.mark.parametrize("write", [Path.touch, write_text, write_truncated])
    def test_one_clear_error(self, tmp_path: Path, name: str, write: Callable[[Path], None]) -> None:
        write(tmp_path / name)
        with pytest.raises(DataError, match=rf"{name}: .+"):
            read_image(tmp_path / name)

    def test_damaged_bytes_inside_gzip(self, tmp_path: Path) -> None:
        zipped = bytearray(gzip.compress(nib.Nifti1Image(RAMP.repeat(20, 0), np.eye(4) * 2).to_bytes()))
        zipped[len(zipped) // 2] ^= 0xFF
        (tmp_path / "a.nii.gz").write_bytes(zipped)
        with pytest.raises(DataError, match=r"a\.nii\.gz"):
            read_image(tmp_path / "a.nii.gz")

    def test_missing_folder_and_suffix(self, tmp_path: Path) -> None:
        (tmp_path / "a.png").touch()
        with pytest.raises(DataError, match="no such file"):
            read_image(tmp_path / "none.nii.gz")
        with pytest.raises(DataError, match="folder without DICOM"):
            read_image(tmp_path)
        with pytest.raises(DataError, match=r"should end in \.nii"):
            read_image(tmp_path / "a.png")

    @pytest.mark.parametrize("shape", [(4,), (2, 2, 2, 1, 3)])
    def test_wrong_number_of_axes(self, tmp_path: Path, shape: tuple[int, ...]) -> None:
        with pytest.raises(DataError, match="2D, 3D or 4D"):
            read_image(save(tmp_path / "a.nii", np.zeros(shape, dtype=np.float32)))

    @pytest.mark.parametrize("kind", [nib.Nifti1Image, nib.Nifti2Image])
    def test_negative_sizes(self, tmp_path: Path, kind: type) -> None:
        """Found by fuzzing: the geometry alone was asked for, and no voxel was read that could have failed."""
        header = kind(RAMP, np.eye(4)).header
        header["dim"][2] = -5
        (tmp_path / "a.nii").write_bytes(header.binaryblock + bytes(400))
        for read in (canonical_geometry, frame_count, read_image):
            with pytest.raises(DataError, match=r"a\.nii"):
                read(tmp_path / "a.nii")

    def test_colours_and_complex_numbers(self, tmp_path: Path) -> None:
        rgb = np.zeros((2, 2, 2), dtype=[("R", "u1"), ("G", "u1"), ("B", "u1")])
        with pytest.raises(DataError, match="colours"):
            read_image(save(tmp_path / "rgb.nii", rgb))
        with pytest.raises(DataError, match="complex64"):
            read_image(save(tmp_path / "k.nii", np.zeros((2, 2, 2), dtype=np.complex64)))


@st.composite
def volumes(draw: st.DrawFn) -> Volume:
    """Any axis order, flips and obliqueness; half of them stacks of thick slices."""
    shape = tuple(draw(st.integers(1, 5)) for _ in range(3))
    spacing = [draw(st.floats(0.7, 2.0)) for _ in range(3)]
    spacing[draw(st.integers(0, 2))] *= draw(st.sampled_from([1, 8]))
    # Never exactly 45 degrees, where two body axes are equally near and the choice is rounding's.
    angles = [draw(st.integers(-180, 179)) + 0.37 for _ in range(3)]
    affine = np.eye(4)
    affine[:3, :3] = Rotation.from_euler("xyz", angles, degrees=True).as_matrix() * spacing
    affine[:3, :3] *= draw(st.sampled_from([1, -1]))  # left-handed as well
    affine[:3, 3] = [draw(st.floats(-200, 200)) for _ in range(3)]
    return Volume(np.arange(np.prod(shape), dtype=np.float32).reshape(shape), affine)


class TestOrientation:
    @settings(max_examples=80, deadline=None)
    @given(volumes())
    def test_round_trip_and_place(self, original: Volume) -> None:
        canonical, orientation = to_canonical(original)
        np.testing.assert_array_equal(from_canonical(canonical.array, orientation), original.array)
        # Every voxel stays where it was in the patient.
        for value in (0, original.array.size - 1):
            before = np.argwhere(original.array == value)[0]
            after = np.argwhere(canonical.array == value)[0]
            np.testing.assert_allclose(world(canonical.affine, after), world(original.affine, before), atol=1e-9)
        assert sorted(canonical.spacing) == pytest.approx(sorted(original.spacing))
        assert canonical.header is None

    @settings(max_examples=80, deadline=None)
    @given(volumes())
    def test_canonical_twice_is_once(self, original: Volume) -> None:
        once, _ = to_canonical(original)
        twice, orientation = to_canonical(once)
        np.testing.assert_array_equal(orientation, [[0, 1], [1, 1], [2, 1]])
        np.testing.assert_array_equal(twice.array, once.array)

    def test_geometry_from_the_header_is_that_of_the_volume(self, tmp_path: Path) -> None:
        path = save(tmp_path / "a.nii", RAMP, np.array([[9, 0, 0, 0], [0, 0, 1.5, 0], [0, 1.5, 0, 0], [0, 0, 0, 1.0]]))
        canonical, _ = to_canonical(read_image(path))
        assert canonical_geometry(path) == (canonical.array.shape, canonical.spacing) == ((4, 3, 2), (1.5, 1.5, 9))
        cine = save(tmp_path / "cine.nii", np.stack([RAMP, RAMP], axis=-1))
        assert canonical_geometry(cine) == ((2, 3, 4), (1.5, 1.5, 8))
        assert canonical_geometry(save(tmp_path / "slice.nii", RAMP[..., 0]))[0] == (2, 3, 1)

    def test_leading_axes_are_left_alone(self) -> None:
        original = Volume(RAMP, np.array([[0, -1.5, 0, 0], [0, 0, 9, 0], [-1.5, 0, 0, 0], [0, 0, 0, 1.0]]))
        canonical, orientation = to_canonical(original)
        logits = np.stack([canonical.array, canonical.array + 50])[None]  # (1, 2, X, Y, Z)
        np.testing.assert_array_equal(from_canonical(logits, orientation), np.stack([RAMP, RAMP + 50])[None])

    def test_isotropic_volumes_become_ras(self) -> None:
        # Axes stored as superior, left, posterior.
        affine = np.array([[0, -1.2, 0, 5], [0, 0, -1.2, 6], [1.2, 0, 0, 7], [0, 0, 0, 1]])
        canonical, _ = to_canonical(Volume(RAMP, affine))
        np.testing.assert_allclose(canonical.affine[:3, :3], np.eye(3) * 1.2)
        assert canonical.array.shape == (3, 4, 2)

    @pytest.mark.parametrize("axis", [0, 1, 2])
    @pytest.mark.parametrize("angles", [(0, 0, 0), (90, 0, 0), (0, 90, 0), (40, -55, 25), (-70, 50, 130)])
    def test_slice_axis_stays_last_however_oblique(self, axis: int, angles: tuple[float, float, float]) -> None:
        spacing = np.full(3, 1.4)
        spacing[axis] = 9
        affine = np.eye(4)
        affine[:3, :3] = Rotation.from_euler("xyz", angles, degrees=True).as_matrix() * spacing
        canonical, orientation = to_canonical(Volume(RAMP, affine))
        assert canonical.spacing == pytest.approx((1.4, 1.4, 9))
        assert orientation[axis, 0] == 2
        np.testing.assert_array_equal(nib.io_orientation(canonical.affine)[:, 1], 1)  # all to the positive side

    def test_coronal_stack_keeps_right_and_superior_in_plane(self) -> None:
        # Stored as (superior, left) pictures with slices to the back.
        affine = np.array([[0, -1.4, 0, 0], [0, 0, -9, 0], [1.4, 0, 0, 0], [0, 0, 0, 1]])
        canonical, _ = to_canonical(Volume(RAMP, affine))
        np.testing.assert_allclose(canonical.affine[:3, :3], [[1.4, 0.0, 0.0], [0.0, 0.0, 9.0], [0.0, 1.4, 0.0]])

    def test_thin_pixels_do_not_make_a_slice_axis(self) -> None:
        # 1 x 2 x 4 mm: 4 is 1.5 times both others, but these differ by a factor of 2, so plain RAS applies.
        affine = np.array([[0, 0, 4, 0], [0, 2, 0, 0], [1, 0, 0, 0], [0, 0, 0, 1.0]])
        canonical, _ = to_canonical(Volume(RAMP, affine))
        assert canonical.spacing == pytest.approx((4, 2, 1))

    def test_a_single_slice_is_across_its_only_axis(self) -> None:
        affine = np.array([[0, 0, 1, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1.0]])  # sagittal picture
        canonical, _ = to_canonical(Volume(RAMP[..., :1], affine))
        assert canonical.array.shape == (2, 3, 1)


class TestSameGrid:
    @staticmethod
    def pair(shift_mm: float) -> tuple[Volume, Volume]:
        affine, moved = np.diag([2.0, 2, 8, 1]), np.diag([2.0, 2, 8, 1])
        moved[0, 3] += shift_mm
        return Volume(RAMP, affine, Path("image.nii")), Volume(RAMP, moved, Path("label.nii"))

    def test_rounding_passes_in_silence(self, caplog: pytest.LogCaptureFixture) -> None:
        check_same_grid(*self.pair(0.005))
        assert not caplog.records

    def test_a_small_shift_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING, logger="rdvit"):
            check_same_grid(*self.pair(0.9))
        assert all(word in caplog.text for word in ("image.nii", "label.nii", "0.9 mm"))

    def test_half_a_voxel_is_an_error(self) -> None:
        with pytest.raises(DataError, match=r"label\.nii.*1 mm off.*image\.nii"):
            check_same_grid(*self.pair(1.0))

    def test_rotation_is_measured_at_the_corners(self) -> None:
        image, _ = self.pair(0)
        turned = image.affine.copy()
        turned[:3, :3] = Rotation.from_euler("z", 180, degrees=True).as_matrix() @ turned[:3, :3]
        with pytest.raises(DataError, match="off their image"):
            check_same_grid(image, Volume(RAMP, turned))

    def test_other_shape_is_an_error(self) -> None:
        image, label = self.pair(0)
        with pytest.raises(DataError, match=r"\(2, 3, 3\).*image\.nii.*\(2, 3, 4\)"):
            check_same_grid(image, Volume(label.array[..., :3], label.affine, label.path))


@pytest.mark.skipif(not PATIENT_1.is_dir(), reason=f"needs {PATIENT_1}")
class TestAcdc:
    def test_patient001_has_295_ml_in_the_left_ventricle(self) -> None:
        labels = read_labels(PATIENT_1 / "patient001_frame01_gt.nii.gz")
        assert labels.spacing == (1.5625, 1.5625, 10)
        volume_ml = np.count_nonzero(labels.array == 3) * np.prod(labels.spacing) / 1000
        assert volume_ml == pytest.approx(295.5, abs=0.05)

    def test_image_and_label_share_a_grid_and_the_slice_axis(self) -> None:
        image = read_image(PATIENT_1 / "patient001_frame01.nii.gz")
        check_same_grid(image, read_labels(PATIENT_1 / "patient001_frame01_gt.nii.gz"))
        canonical, orientation = to_canonical(image)
        assert canonical.spacing == image.spacing
        np.testing.assert_array_equal(canonical.array, image.array[::-1, ::-1])
        np.testing.assert_array_equal(from_canonical(canonical.array, orientation), image.array)

    def test_frame_of_the_cine_is_the_frame_file(self) -> None:
        cine = PATIENT_90 / "patient090_4d.nii.gz"
        assert frame_count(cine) == 12
        frame = read_image(PATIENT_90 / "patient090_frame04.nii.gz")
        np.testing.assert_array_equal(read_image(cine, frame=4).array, frame.array)


@pytest.mark.skipif(not ZOO.is_dir(), reason=f"needs {ZOO}")
def test_every_file_of_the_zoo_reads_or_raises_our_error() -> None:
    read = set()
    for path in sorted(path for path in ZOO.rglob("*") if path.is_file()):
        for reader in (read_image, read_labels):
            try:
                volume = reader(path, frame=1)
            except RdvitError as error:
                assert path.name in str(error)
            else:
                assert volume.array.ndim == 3 and np.isfinite(volume.array).all()
                read.add(path.name)
    assert {"anatomical.nii", "example4d.nii.gz", "example_nifti2.nii.gz", "functional.nii", "minimal.hdr"} <= read
    assert not {"empty.nii.gz", "complex32.nii", "analyze.hdr", "3D.nii"} & read
