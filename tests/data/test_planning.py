"""What `auto` becomes: spacing, patch, crop and classes from the headers of the training images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest

from rdvit.config import Config, resolve_config
from rdvit.data.datalist import Case
from rdvit.data.planning import settle
from rdvit.errors import ConfigError

Geometry = tuple[tuple[int, int, int], tuple[float, float, float]]  # shape and spacing in mm
CLASSES = {1: "RV", 2: "MYO", 3: "LV"}

ACDC: list[Geometry] = [
    ((216, 256, 10), (1.5625, 1.5625, 10.0)),
    ((256, 216, 9), (1.3672, 1.3672, 10.0)),
    ((232, 256, 10), (1.6797, 1.6797, 10.0)),
]
HIPPOCAMPUS: list[Geometry] = [
    ((35, 51, 35), (1.0, 1.0, 1.0)),
    ((34, 52, 35), (1.0, 1.0, 1.0)),
    ((36, 50, 40), (1.0, 1.0, 1.0)),
]
LARGE: list[Geometry] = [((300, 280, 120), (0.7, 0.7, 0.7))]
TINY: list[Geometry] = [((5, 7, 2), (2.0, 2.0, 2.0))]
SLICE: list[Geometry] = [((130, 90, 1), (1.0, 1.0, 1.0))]
THIN_STACK: list[Geometry] = [((100, 90, 3), (1.5, 1.5, 8.0))]


def config(dim: str, **flags: Any) -> Config:
    return resolve_config(dim, "rdvit", flags=flags)


def make_cases(folder: Path, geometries: list[Geometry], axes: tuple[int, int, int] = (0, 1, 2)) -> list[Case]:
    """Images with these geometries, stored with their axes in another order."""
    cases = []
    for i, (shape, spacing) in enumerate(geometries):
        affine = np.diag([*spacing, 1.0])[:, [*axes, 3]]
        path = folder / f"{i}.nii"
        nib.Nifti1Image(np.zeros([shape[axis] for axis in axes], np.uint8), affine).to_filename(path)
        cases.append(Case(str(i), str(i), path, None))
    return cases


@pytest.mark.parametrize(
    ("dim", "geometries", "spacing", "patch", "crop"),
    [
        ("2d", ACDC, 1.56, (8, 8), (128, 128)),
        ("3d", ACDC, 1.56, (8, 8, 1), (96, 96, 8)),
        ("2d", HIPPOCAMPUS, "native", (8, 8), (40, 56)),
        ("3d", HIPPOCAMPUS, "native", (4, 4, 4), (36, 52, 36)),
        ("2d", LARGE, "native", (8, 8), (128, 128)),
        ("3d", LARGE, "native", (4, 4, 4), (96, 96, 96)),
        ("2d", TINY, "native", (8, 8), (8, 8)),
        ("3d", TINY, "native", (4, 4, 4), (8, 8, 4)),
        ("2d", SLICE, "native", (8, 8), (128, 96)),
        ("3d", SLICE, "native", (4, 4, 4), (96, 92, 4)),
        ("3d", THIN_STACK, "native", (8, 8, 1), (96, 96, 3)),
    ],
)
def test_plan(
    dim: str, geometries: list[Geometry], spacing: float | str, patch: tuple[int, ...], crop: tuple[int, ...], tmp_path: Path
) -> None:
    settled = settle(config(dim), make_cases(tmp_path, geometries), CLASSES)
    assert settled.data.spacing == spacing
    assert settled.model.patch_size == patch
    assert settled.data.crop_size == crop
    assert settled.model.out_channels == 4
    assert all(c % p == 0 and c > 0 for c, p in zip(crop, patch, strict=True))


@pytest.mark.parametrize("axes", [(2, 0, 1), (0, 2, 1)])
def test_plan_does_not_depend_on_how_the_axes_are_stored(axes: tuple[int, int, int], tmp_path: Path) -> None:
    """Slices along the first or second axis of the file are still slices."""
    for name in ("plain", "moved"):
        (tmp_path / name).mkdir()
    plain = settle(config("3d"), make_cases(tmp_path / "plain", ACDC), CLASSES)
    assert settle(config("3d"), make_cases(tmp_path / "moved", ACDC, axes), CLASSES) == plain


def test_crop_follows_the_size_at_the_working_spacing(tmp_path: Path) -> None:
    """80 pixels of 1 mm, 80 of 2 mm and 80 of 1.5 mm: at 1.5 mm the images have 53, 107 and 80 pixels."""
    geometries: list[Geometry] = [((80, 80, 10), (s, s, 10.0)) for s in (1.0, 2.0, 1.5)]
    settled = settle(config("2d"), make_cases(tmp_path, geometries), CLASSES)
    assert settled.data.spacing == 1.5
    assert settled.data.crop_size == (80, 80)
    coarse = settle(config("2d", data={"spacing": 3.0}), make_cases(tmp_path, geometries), CLASSES)
    assert coarse.data.crop_size == (40, 40)


def test_pixels_that_are_not_square_count_as_different_spacings(tmp_path: Path) -> None:
    settled = settle(config("2d"), make_cases(tmp_path, [((64, 64, 8), (1.0, 2.0, 10.0))]), CLASSES)
    assert settled.data.spacing == 1.5


@pytest.mark.parametrize("geometries", [ACDC, HIPPOCAMPUS, TINY], ids=["acdc", "hippocampus", "tiny"])
@pytest.mark.parametrize(
    ("section", "values"),
    [
        ("data", {"spacing": 1.25}),
        ("data", {"spacing": "native"}),
        ("data", {"crop_size": (48, 40, 6)}),
        ("model", {"patch_size": (16, 16, 2)}),
    ],
)
def test_what_the_user_chose_is_kept(section: str, values: dict[str, Any], geometries: list[Geometry], tmp_path: Path) -> None:
    chosen = config("3d", **{section: values})
    settled = settle(chosen, make_cases(tmp_path, geometries), CLASSES)
    for key, value in values.items():
        assert getattr(getattr(settled, section), key) == value
    assert settled.training == chosen.training
    assert "auto" not in (settled.data.spacing, settled.data.crop_size, settled.model.patch_size)


def test_settling_again_changes_nothing(tmp_path: Path) -> None:
    cases = make_cases(tmp_path, ACDC)
    settled = settle(config("3d"), cases, CLASSES)
    assert settle(settled, cases, CLASSES) == settled


def test_a_patch_larger_than_the_crop_limit_still_gets_one_patch(tmp_path: Path) -> None:
    """Plain cubes of 16 on ACDC's ten slices, whose crops have at most 8."""
    settled = settle(config("3d", model={"patch_size": (16, 16, 16)}), make_cases(tmp_path, ACDC), CLASSES)
    assert settled.data.crop_size == (96, 96, 16)


def test_a_crop_of_other_dimensions_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"crop_size \(96, 96\) has 2 axes, model.spatial_dims is 3"):
        settle(config("3d", data={"crop_size": (96, 96)}), make_cases(tmp_path, ACDC), CLASSES)


def test_there_is_one_output_more_than_classes(tmp_path: Path) -> None:
    cases = make_cases(tmp_path, HIPPOCAMPUS)
    assert settle(config("2d"), cases, {2: "anterior", 5: "posterior"}).model.out_channels == 3


def labelled(folder: Path, masks: list[np.ndarray]) -> list[Case]:
    cases = []
    for i, mask in enumerate(masks):
        path = folder / f"label{i}.nii"
        nib.Nifti1Image(mask.astype(np.uint8), np.eye(4)).to_filename(path)
        cases.append(Case(str(i), str(i), path, path))
    return cases


def test_predictions_keep_one_piece_where_all_labels_are_one_piece(tmp_path: Path) -> None:
    whole = np.zeros((20, 20, 3), int)
    whole[2:12, 2:12], whole[4:10, 4:10] = 1, 2  # two structures, one inside the other
    stray, apart = whole.copy(), whole.copy()
    stray[18, 18, 0] = 1  # one voxel of 300
    apart[15:, 15:] = 2
    one = labelled(tmp_path, [whole, stray, whole * 0])
    assert settle(config("2d"), one, {1: "A", 2: "B"}).data.keep_largest is True
    two = [*one, *labelled(tmp_path, [whole * 0, whole, apart])]
    assert settle(config("2d"), two, {1: "A", 2: "B"}).data.keep_largest is False
    assert settle(config("2d", data={"keep_largest": True}), two, {1: "A", 2: "B"}).data.keep_largest is True
