"""Opening files of every kind: NRRD and MetaImage, sheared transforms, files that promise too much, the whole zoo."""

from __future__ import annotations

import gzip
import logging
import os
import struct
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its customary name
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.spatial.transform import Rotation

from rdvit.data.files import stem
from rdvit.data.itk import ras_from_lps
from rdvit.data.volume import Volume, frame_count, from_canonical, read_frames, read_image, read_labels, to_canonical
from rdvit.errors import ConfigError, DataError
from rdvit.inference.writer import write_labels

SHARED = Path(os.environ.get("RDVIT_SHARED", Path(__file__).resolve().parents[3] / "shared" / "data"))
ZOO = SHARED / "nifti_zoo"
RAMP = np.arange(2 * 3 * 4, dtype=np.int16).reshape(2, 3, 4)
SUFFIX, HALF, OPEN = "not the name of an image", "one half of a pair", "cannot be read as NIfTI"
FRAMES, COLOURS = "2 time frames", "holds colours"
# Every file: its shape (X, Y, Z), or what the error says.
ZOO_TABLE: dict[str, tuple[int, int, int] | str] = {
    "monai/LICENSE": SUFFIX,
    "monai/anatomical.nii": (33, 41, 25),
    "monai/anatomical_label.nii.gz": (33, 41, 25),
    "monai/reoriented_anat_moved.nii": (21, 26, 22),
    "monai/reoriented_anat_moved_label.nii.gz": (21, 26, 22),
    "nibabel/COPYING": SUFFIX,
    "nibabel/analyze.hdr": HALF,
    "nibabel/anatomical.nii": (33, 41, 25),
    "nibabel/example4d.nii.gz": FRAMES,
    "nibabel/example_nifti2.nii.gz": FRAMES,
    "nibabel/functional.nii": "20 time frames",
    "nibabel/nifti1.hdr": HALF,
    "nibabel/nifti2.hdr": HALF,
    "nibabel/reoriented_anat_moved.nii": (21, 26, 22),
    "nibabel/resampled_anat_moved.nii": "153 of 1071 voxels (14.3%) are NaN",
    "nibabel/standard.nii.gz": (4, 5, 7),
    "nifti-jl/LICENSE.md": SUFFIX,
    "nifti-jl/avg152T1_RL_nifti.nii.gz": (91, 109, 91),
    "nifti-jl/empty.nii.gz": "the file is empty",
    "nifti-jl/example4d.hdr.gz": FRAMES,
    "nifti-jl/example4d.img.gz": FRAMES,
    "nifti-jl/example4d.nii.gz": FRAMES,
    **{f"nifti-rs/27/{kind}{bits}.nii": (3, 3, 3) for kind in ("int", "uint") for bits in (8, 16, 32, 64)},
    "nifti-rs/27/float32.nii": (3, 3, 3),
    "nifti-rs/27/float64.nii": (3, 3, 3),
    "nifti-rs/LICENSE-APACHE": SUFFIX,
    "nifti-rs/LICENSE-MIT": SUFFIX,
    "nifti-rs/complex/complex32.nii": "holds complex64 values",
    "nifti-rs/complex/complex64.nii": "holds complex128 values",
    "nifti-rs/f32.nii.gz": (11, 11, 11),
    "nifti-rs/fuzz_artifacts/crash-08123ef33416bd6f0c5fa63d44b681b8581d62a0": SUFFIX,
    "nifti-rs/fuzz_artifacts/crash-1.nii": OPEN,
    "nifti-rs/fuzz_artifacts/crash-98aa054390f8d3f932f190dc22ef62c6ff2d6619": SUFFIX,
    "nifti-rs/fuzz_artifacts/crash-d03c6346fe83a026738f6b8cd2a9335a3f8cb158": SUFFIX,
    "nifti-rs/fuzz_artifacts/crash-ed7d46344d7efb3b9f0c374d66d2e02f66cc447d.nii": OPEN,
    **{f"nifti-rs/minimal{end}": (64, 64, 10) for end in (".hdr", ".hdr.gz", ".img", ".img.gz", ".nii", ".nii.gz")},
    "nifti-rs/minimal2.hdr": HALF,
    "nifti-rs/minimal2.img.gz": HALF,
    "nifti-rs/minimal_extended_hdr.nii": (8, 8, 1),
    "nifti-rs/rgb/3D.nii": COLOURS,
    "nifti-rs/rgb/4D.nii": COLOURS,
    "nifti-rs/rgba/4D.nii": COLOURS,
    "nifti-rs/zstat1.nii.gz": (64, 64, 21),
}
GEOMETRY = ("pixdim", "qform_code", "sform_code", "srow_x", "srow_y", "srow_z", "qoffset_x", "quatern_b", "quatern_c")


@pytest.mark.skipif(not ZOO.is_dir(), reason=f"needs {ZOO}")
class TestZoo:
    def test_the_table_names_every_file(self) -> None:
        there = {path.relative_to(ZOO).as_posix() for path in ZOO.rglob("*") if path.is_file()}
        assert there == ZOO_TABLE.keys()

    @pytest.mark.parametrize("name", ZOO_TABLE)
    def test_each_works_or_says_why_not(self, name: str, tmp_path: Path) -> None:
        path, expected = ZOO / name, ZOO_TABLE[name]
        if isinstance(expected, str):
            with pytest.raises(DataError) as refusal:
                read_image(path)
            assert expected in str(refusal.value) and str(path) in str(refusal.value)
            if "time frames" not in expected:
                return
        volume = read_image(path, frame=None if isinstance(expected, tuple) else 2)
        if isinstance(expected, tuple):
            assert volume.array.shape == expected
        labels = (np.arange(volume.array.size).reshape(volume.array.shape) % 3).astype(np.uint8)
        mask = nib.load(write_labels(tmp_path / "mask.nii.gz", labels, volume, {1: "a", 2: "b"}))
        source = nib.load(path)
        assert np.array_equal(mask.affine, source.affine) and mask.shape == source.shape[:3]
        for field in GEOMETRY:
            first = 4 if field == "pixdim" else None
            np.testing.assert_array_equal(
                mask.header[field][..., :first] if first else mask.header[field],
                source.header[field][..., :first] if first else source.header[field],
            )
        np.testing.assert_array_equal(read_labels(tmp_path / "mask.nii.gz").array, labels)


def itk_image(array: np.ndarray = RAMP) -> sitk.Image:
    """A double-oblique image in ITK's own terms, (X, Y, Z)."""
    image = sitk.GetImageFromArray(array.T)
    image.SetSpacing((1.5, 1.75, 8))
    image.SetOrigin((-31.5, 40.25, 12))
    image.SetDirection(Rotation.from_euler("xyz", [20, -30, 50], degrees=True).as_matrix().ravel().tolist())
    return image


class TestItk:
    @pytest.mark.parametrize("name", ["a.nrrd", "a.nhdr", "a.mha", "a.mhd", "B.NRRD"])
    @pytest.mark.parametrize("packed", [False, True])
    def test_voxels_lie_where_itk_puts_them(self, tmp_path: Path, name: str, packed: bool) -> None:
        image = itk_image()
        sitk.WriteImage(image, str(tmp_path / name.lower()), packed)
        (tmp_path / name.lower()).rename(tmp_path / name)
        volume = read_image(tmp_path / name)
        np.testing.assert_array_equal(volume.array, RAMP)
        for index in ((0, 0, 0), (1, 2, 3)):
            left, posterior, superior = image.TransformIndexToPhysicalPoint(index)
            place = volume.affine @ (*index, 1)
            np.testing.assert_allclose(place[:3], (-left, -posterior, superior), atol=1e-9)

    def test_masks_of_nrrd_are_nifti_in_its_geometry(self, tmp_path: Path) -> None:
        image = itk_image()
        sitk.WriteImage(image, str(tmp_path / "a.nrrd"))
        labels = (RAMP % 3).astype(np.uint8)
        mask = write_labels(tmp_path / "mask.nii.gz", labels, read_image(tmp_path / "a.nrrd"), {1: "a", 2: "b"})
        again = sitk.ReadImage(str(mask))
        for part in ("GetSpacing", "GetOrigin", "GetDirection"):
            np.testing.assert_allclose(getattr(again, part)(), getattr(image, part)(), atol=1e-5)
        np.testing.assert_array_equal(sitk.GetArrayFromImage(again).T, labels)

    def test_ras_is_turned_once(self, tmp_path: Path) -> None:
        head = "NRRD0004\ntype: short\ndimension: 3\nspace: right-anterior-superior\nsizes: 2 3 4\n"
        head += "space directions: (1.5,0,0) (0,2,0) (0,0,8)\nkinds: domain domain domain\nendian: little\n"
        head += "encoding: raw\nspace origin: (1,2,3)\n\n"
        (tmp_path / "a.nrrd").write_bytes(head.encode() + RAMP.T.tobytes())
        affine = read_image(tmp_path / "a.nrrd").affine
        np.testing.assert_allclose(affine, [[1.5, 0, 0, 1], [0, 2, 0, 2], [0, 0, 8, 3], [0, 0, 0, 1]])
        np.testing.assert_array_equal(ras_from_lps(ras_from_lps(affine)), affine)

    @pytest.mark.parametrize("end", ["nrrd", "mha"])
    def test_time_is_the_fourth_axis_and_2d_is_one_slice(self, tmp_path: Path, end: str) -> None:
        cine = sitk.JoinSeries([itk_image(RAMP + 100 * t) for t in range(3)])
        sitk.WriteImage(cine, str(tmp_path / f"cine.{end}"))
        assert frame_count(tmp_path / f"cine.{end}") == 3
        frames = list(read_frames(tmp_path / f"cine.{end}"))
        for number, frame in enumerate(frames):
            np.testing.assert_array_equal(frame.array, RAMP + 100 * number)
        assert frames[0].spacing == pytest.approx((1.5, 1.75, 8))
        sitk.WriteImage(sitk.GetImageFromArray(RAMP[..., 0].T), str(tmp_path / f"flat.{end}"))
        np.testing.assert_array_equal(read_image(tmp_path / f"flat.{end}").array, RAMP[..., :1])

    def test_what_is_refused(self, tmp_path: Path) -> None:
        colours = sitk.Compose([itk_image()] * 3)
        for end in ("nrrd", "mha"):
            sitk.WriteImage(colours, str(tmp_path / f"rgb.{end}"))
            (tmp_path / f"text.{end}").write_text("EF 60 %")
            (tmp_path / f"empty.{end}").touch()
            sitk.WriteImage(itk_image(), str(tmp_path / f"short.{end}"))
            whole = (tmp_path / f"short.{end}").read_bytes()
            (tmp_path / f"short.{end}").write_bytes(whole[:-20])
            for name, reason in (
                ("rgb", "3 values per voxel"),
                ("text", "cannot be read"),
                ("empty", "is empty"),
                ("short", "voxels"),
            ):
                with pytest.raises(DataError, match=rf"{name}\.{end}: .*{reason}"):
                    read_image(tmp_path / f"{name}.{end}")
        sitk.WriteImage(itk_image(), str(tmp_path / "a.mhd"))
        (tmp_path / "a.raw").unlink()
        with pytest.raises(DataError, match=r"a\.mhd: its voxels should be in 'a\.raw'"):
            read_image(tmp_path / "a.mhd")
        (tmp_path / "b.mhd").write_bytes((tmp_path / "a.mhd").read_bytes().replace(b"a.raw", b"../a.raw"))
        with pytest.raises(DataError, match="in the same folder"):
            read_image(tmp_path / "b.mhd")

    @pytest.mark.parametrize("keep", [0.3, 0.9])
    def test_damaged_compressed_voxels_do_not_hang(self, tmp_path: Path, keep: float) -> None:
        """ITK's MetaIO unpacks a stream that ends too early for ever."""
        sitk.WriteImage(itk_image(), str(tmp_path / "a.mha"), True)
        whole = (tmp_path / "a.mha").read_bytes()
        start = whole.index(b"LOCAL\n") + 6
        cut = start + int(keep * (len(whole) - start))
        for content in (whole[:cut], whole[:cut].replace(b"CompressedDataSize", b"Comment")):
            (tmp_path / "a.mha").write_bytes(content)
            with pytest.raises(DataError, match="its voxels cannot be read"):
                read_image(tmp_path / "a.mha")

    @pytest.mark.parametrize(
        ("old", "new", "reason"),
        [
            (b"NDims = 3", b"NDims = 9999", "NDims is 9999"),
            (b"DimSize = 2 3 4", b"DimSize = 2 3 4 5", "DimSize is '2 3 4 5', 3 numbers"),
            (b"= Image", b"", "no single 'Key = value'"),
        ],
    )
    def test_meta_headers_that_itk_would_trust(self, tmp_path: Path, old: bytes, new: bytes, reason: str) -> None:
        """NDims = 9999 writes beyond ITK's arrays and ends the process."""
        sitk.WriteImage(itk_image(), str(tmp_path / "a.mha"))
        whole = (tmp_path / "a.mha").read_bytes()
        assert old in whole
        (tmp_path / "a.mha").write_bytes(whole.replace(old, new))
        with pytest.raises(DataError, match=rf"a\.mha: cannot be read: .*{reason}"):
            read_image(tmp_path / "a.mha")

    def test_constant_voxels_pack_well_and_are_read(self, tmp_path: Path) -> None:
        sitk.WriteImage(sitk.GetImageFromArray(np.full((8, 200, 200), 7, np.int16)), str(tmp_path / "a.mha"), True)
        assert (read_image(tmp_path / "a.mha").array == 7).all()


class TestShear:
    @staticmethod
    def sheared(shear: float) -> np.ndarray:
        affine = np.eye(4)
        skew = np.eye(3)
        skew[0, 1] = shear
        affine[:3, :3] = Rotation.from_euler("xyz", [10, 20, 30], degrees=True).as_matrix() @ skew @ np.diag([1.5, 1.5, 8])
        return affine

    def test_small_shear_is_straightened_and_written_back(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        affine = self.sheared(0.005)
        nib.save(nib.Nifti1Image(RAMP, affine), tmp_path / "a.nii")
        with caplog.at_level(logging.WARNING, logger="rdvit"):
            volume = read_image(tmp_path / "a.nii")
        assert "a.nii" in caplog.text and "0.29 degrees" in caplog.text
        axes = volume.affine[:3, :3] / volume.spacing
        np.testing.assert_allclose(axes.T @ axes, np.eye(3), atol=1e-12)
        assert volume.spacing == pytest.approx((1.5, 1.5 * np.hypot(1, 0.005), 8))
        assert 1e-4 < np.abs(volume.affine - affine).max() < 0.01
        mask = nib.load(write_labels(tmp_path / "m.nii", RAMP % 2, volume, {1: "a"}))
        np.testing.assert_array_equal(mask.affine, nib.load(tmp_path / "a.nii").affine)

    def test_large_shear_is_refused_and_rounding_is_not_worth_a_word(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        nib.save(nib.Nifti1Image(RAMP, self.sheared(0.02)), tmp_path / "a.nii")
        with pytest.raises(DataError, match=r"1\.1 degrees off perpendicular"):
            read_image(tmp_path / "a.nii")
        nib.save(nib.Nifti1Image(RAMP, self.sheared(1e-6)), tmp_path / "b.nii")
        read_image(tmp_path / "b.nii")
        assert not caplog.records


def bomb(shape: tuple[int, int, int], content: int = 0) -> bytes:
    """A NIfTI header that promises a shape of float32, and so many zeros behind it."""
    header = nib.Nifti1Image(np.zeros((1, 1, 1), np.float32), np.diag([2, 2, 2, 1])).to_bytes()[:352]
    return header[:42] + struct.pack("<3h", *shape) + header[48:] + bytes(content)


class TestBombs:
    @pytest.mark.parametrize("name", ["a.nii", "a.nii.gz", "renamed.nii", "renamed.nii.gz"])
    def test_a_promise_above_the_limit_is_refused_from_the_header(
        self, tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        content = bomb((30000, 30000, 30000))
        zipped = name.endswith(".gz") != name.startswith("renamed")
        (tmp_path / name).write_bytes(gzip.compress(content) if zipped else content)
        with pytest.raises(DataError, match=r"promises 1\.08e\+05 GB.*limit is 8 GB.*RDVIT_MAX_GB"):
            read_image(tmp_path / name)
        monkeypatch.setenv("RDVIT_MAX_GB", "1e9")
        with pytest.raises(DataError, match=r"header promises 1080\d+ bytes, \d+ are there"):  # and still takes no memory
            read_image(tmp_path / name)

    @pytest.mark.parametrize("name", ["a.nii.gz", "renamed.nii"])
    def test_a_stream_much_longer_than_its_header_says_is_refused(self, tmp_path: Path, name: str) -> None:
        (tmp_path / name).write_bytes(gzip.compress(bomb((4, 4, 4), 3 * 2**20)))
        with pytest.raises(DataError, match=r"unpacks to \d+ bytes, its header promises 608"):
            read_image(tmp_path / name)
        (tmp_path / name).write_bytes(gzip.compress(bomb((4, 4, 4), 4 * 64 + 5000)))  # padding is no attack
        assert read_image(tmp_path / name).array.shape == (4, 4, 4)

    def test_the_limit_can_be_set_and_holds_for_nrrd(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        nib.save(nib.Nifti1Image(np.zeros((50, 50, 50), np.float32), np.eye(4) * 2), tmp_path / "a.nii.gz")
        sitk.WriteImage(sitk.GetImageFromArray(np.zeros((50, 50, 50), np.float32)), str(tmp_path / "a.nrrd"))
        monkeypatch.setenv("RDVIT_MAX_GB", "0.0004")
        for name in ("a.nii.gz", "a.nrrd"):
            with pytest.raises(DataError, match=r"the limit is 0\.0004 GB"):
                read_image(tmp_path / name)
        monkeypatch.setenv("RDVIT_MAX_GB", "much")
        with pytest.raises(ConfigError, match=r"RDVIT_MAX_GB.*'much'"):
            read_image(tmp_path / "a.nii.gz")


@st.composite
def grids(draw: st.DrawFn) -> Volume:
    """Any axis order, flips, rotation, spacing and place."""
    shape = tuple(draw(st.integers(1, 6)) for _ in range(3))
    turn = Rotation.from_euler("xyz", [draw(st.floats(-180, 180)) for _ in range(3)], degrees=True).as_matrix()
    order = draw(st.permutations(range(3)))
    flips = [draw(st.sampled_from([-1, 1])) for _ in range(3)]
    affine = np.eye(4)
    affine[:3, :3] = turn[:, order] * flips * [draw(st.floats(0.1, 20)) for _ in range(3)]
    affine[:3, 3] = [draw(st.floats(-300, 300)) for _ in range(3)]
    return Volume(np.arange(np.prod(shape), dtype=np.int16).reshape(shape), affine)


@settings(max_examples=60, deadline=None)
@given(grids())
def test_any_grid_through_a_file_and_the_canonical_orientation_and_back(
    tmp_path_factory: pytest.TempPathFactory, grid: Volume
) -> None:
    folder = tmp_path_factory.mktemp("grid")
    nib.save(nib.Nifti1Image(grid.array, grid.affine), folder / "a.nii")
    image = read_image(folder / "a.nii")
    canonical, orientation = to_canonical(image)
    labels = from_canonical((canonical.array % 7).astype(np.uint8), orientation)
    mask = read_labels(write_labels(folder / "mask.nii", labels, image, {}))
    np.testing.assert_array_equal(mask.array, grid.array % 7)
    ends = np.array([(0, 0, 0, 1), (*(size - 1 for size in grid.array.shape), 1)]).T
    np.testing.assert_allclose(mask.affine @ ends, grid.affine @ ends, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "expected"), [("a.nii.gz", "a"), ("B.NII", "B"), ("c.d.nrrd", "c.d"), ("e.mha", "e"), ("f.hdr.gz", "f")]
)
def test_names_without_suffixes(name: str, expected: str) -> None:
    assert stem(Path(name)) == expected
