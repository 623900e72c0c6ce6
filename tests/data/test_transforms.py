"""From a volume to the network's grid and back, intensities, random crops and augmentation."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from rdvit.config import Config
from rdvit.data.datalist import Case
from rdvit.data.phantom import draw_labels, make_patient
from rdvit.data.transforms import (
    Frame,
    PrepareCase,
    RandCropRegiond,
    RandLowResolutiond,
    normalize,
    prepare_labels,
    resize_in_plane,
    restore,
    training_transform,
    working_size,
)
from rdvit.data.volume import Volume
from rdvit.errors import DataError
from rdvit.evaluation.metrics import dice

ALL = (0.0, 100.0)  # percentiles that clip nothing
QUIET = dict.fromkeys(("gamma", "bias_field", "blur", "low_resolution", "noise"), 0.0)


def volume(array: np.ndarray, spacing: tuple[float, float, float] = (1.5, 1.5, 8.0)) -> Volume:
    return Volume(array, np.diag([*spacing, 1.0]))


def frame(shape: tuple[int, int, int], spacing: tuple[float, float, float]) -> Frame:
    return Frame(np.array([[0, 1], [1, 1], [2, 1]]), shape, spacing)


# Resampling


@pytest.mark.parametrize(
    ("shape", "spacing", "target", "expected"),
    [
        ((216, 256, 10), (1.5625, 1.5625, 10.0), 1.5625, (216, 256)),
        ((216, 256, 10), (1.5, 1.0, 10.0), 2.0, (162, 128)),
        ((216, 256, 10), (1.5, 1.0, 10.0), None, (216, 256)),
        ((3, 2, 5), (1.0, 1.0, 1.0), 20.0, (1, 1)),  # never empty
    ],
)
def test_working_size_keeps_the_extent(
    shape: tuple[int, int, int], spacing: tuple[float, float, float], target: float | None, expected: tuple[int, int]
) -> None:
    assert working_size(frame(shape, spacing), target) == expected


@pytest.mark.parametrize("target", [0.9, 1.5, 2.6, None])
def test_constant_image_survives_there_and_back(target: float | None) -> None:
    shape, spacing = (41, 30, 3), (1.5, 1.5, 8.0)
    there = resize_in_plane(torch.full((2, *shape), 7.0), working_size(frame(shape, spacing), target))
    back = restore(there, frame(shape, spacing))
    assert back.shape == (2, *shape)
    np.testing.assert_allclose(back, 7.0, rtol=1e-6)


@pytest.mark.parametrize("target", [0.9, 1.3, 2.0, 2.6])
def test_linear_ramp_keeps_its_place_in_millimetres_and_comes_back(target: float) -> None:
    """A ramp of 1 per mm, measured from the edge of the volume: a shift by half a pixel would show as 0.75 mm."""
    n, spacing = 60, 1.5
    x_mm = (torch.arange(n) + 0.5) * spacing
    ramp = x_mm[None, :, None, None].expand(1, n, 20, 2)
    size = working_size(frame((n, 20, 2), (spacing, spacing, 8.0)), target)
    there = resize_in_plane(ramp, size)
    pixel = n * spacing / size[0]
    inner = slice(4, -4)  # the border has no neighbour beyond it and bends
    expected = (torch.arange(size[0]) + 0.5) * pixel
    assert_no_shift(there[0, inner, 3, 1] - expected[inner])
    back = restore(there, frame((n, 20, 2), (spacing, spacing, 8.0)))
    inner = slice(8, -8)
    assert_no_shift(torch.from_numpy(back)[0, inner, 3, 1] - x_mm[inner])


def assert_no_shift(gap_mm: Tensor) -> None:
    """Sampled filter weights make a ripple of a few hundredths of a mm, without drift."""
    assert float(gap_mm.abs().max()) < 0.12
    assert abs(float(gap_mm.mean())) < 0.005


def test_shrinking_does_not_alias() -> None:
    """Stripes finer than the new pixels become grey; without a low pass they would come back as broad stripes."""
    stripes = (torch.arange(60) % 2).float()[None, :, None, None].expand(1, 60, 20, 1)
    grey = resize_in_plane(stripes, (25, 20))[0, 2:-2]
    assert float((grey - 0.5).abs().max()) < 0.1


def test_slices_are_resampled_apart() -> None:
    """Slices lie 8 mm apart: nothing of one may reach the next."""
    image = torch.zeros(1, 12, 12, 3)
    image[..., 1] = 1
    resized = resize_in_plane(image, (20, 7))
    assert resized.shape == (1, 20, 7, 3)
    assert torch.equal(resized.amax((0, 1, 2)), torch.tensor([0.0, 1.0, 0.0]))


@pytest.mark.parametrize(("target", "tolerance"), [(1.25, 0.01), (1.5, 0.02), (2.0, 0.04)])
def test_phantom_volumes_survive_there_and_back(target: float, tolerance: float) -> None:
    for number in (1, 3, 5):  # in pixels of 1.3 to 1.8 mm
        patient = make_patient(number, shape_range=(96, 112))
        labels_XYZ = draw_labels(patient, phase=1.0)
        index_1XYZ = prepare_labels(volume(labels_XYZ, patient.spacing), target, (1, 2, 3))
        one_hot_CXYZ = torch.nn.functional.one_hot(index_1XYZ[0].long(), 4).movedim(-1, 0)
        back_XYZ = restore(one_hot_CXYZ, frame(patient.shape, patient.spacing)).argmax(0)
        for value in (1, 2, 3):
            voxels = np.count_nonzero(labels_XYZ == value)
            assert np.count_nonzero(back_XYZ == value) == pytest.approx(voxels, rel=tolerance)


# Labels


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.floats(0.6, 4.0))
def test_resampled_labels_hold_no_invented_class(seed: int, target: float) -> None:
    """Between a 1 and a 3 lies no 2: interpolating numbers would put one there."""
    array = np.random.default_rng(seed).choice(np.array([0, 1, 3], np.uint8), (9, 7, 2))
    index = prepare_labels(volume(array), target, (1, 2, 3))
    assert set(index.unique().tolist()) <= set(np.unique(array).tolist())
    for z in range(2):  # nor does a class come into a slice from the next one
        assert set(index[..., z].unique().tolist()) <= set(np.unique(array[..., z]).tolist())


@pytest.mark.parametrize("values", [(1, 2, 4), (4, 1, 2), (7, 300, 65535)])
@pytest.mark.parametrize("target", [None, 0.75])
def test_label_values_map_to_class_indices_and_come_back(values: tuple[int, ...], target: float | None) -> None:
    rng = np.random.default_rng(0)
    coarse = rng.choice(np.array([0, *values], np.uint16), (5, 6, 3))
    array = np.kron(coarse, np.ones((4, 4, 1), np.uint16))  # blocks, so that resampling has clear winners
    index = prepare_labels(volume(array), target, values)
    assert index.dtype == torch.uint8
    assert int(index.max()) == len(values)
    back = np.array([0, *values])[index[0].numpy()]
    step = 1 if target is None else 2
    np.testing.assert_array_equal(back[::step, ::step], array)


def test_unknown_label_values_are_named_with_their_counts() -> None:
    array = np.zeros((4, 4, 2), np.uint8)
    array[0, 0], array[1, :3, 0] = 9, 5
    with pytest.raises(DataError, match=r"5 \(3 voxels\), 9 \(2 voxels\).*\[1, 2\]") as caught:
        prepare_labels(Volume(array, np.eye(4), Path("odd_gt.nii.gz")), None, (1, 2))
    assert caught.value.file == "odd_gt.nii.gz"


# Intensities


def test_normalized_image_has_zero_mean_and_unit_deviation_over_the_nonzero_voxels() -> None:
    rng = np.random.default_rng(0)
    array = rng.gamma(2.0, 100.0, (40, 30, 5)).astype(np.float32)
    array[:10] = 0  # a mask outside the body, as many scanners write it
    image = normalize(torch.from_numpy(array), (0.5, 99.5))
    inside = image[torch.from_numpy(array) != 0]
    assert float(inside.mean()) == pytest.approx(0, abs=1e-5)
    assert float(inside.std(correction=0)) == pytest.approx(1, abs=1e-5)
    assert image[:10].unique().numel() == 1


def test_percentiles_are_those_of_the_nonzero_voxels_and_clip_outliers() -> None:
    array = torch.zeros(1000)
    array[500:] = torch.arange(500) + 1.0
    clean = normalize(array, (1.0, 99.0))
    array[-1] = 1e6
    assert float(normalize(array, (1.0, 99.0)).max()) == pytest.approx(float(clean.max()), rel=0.02)
    assert clean[500:].unique().numel() == pytest.approx(0.98 * 500, abs=3)


def test_normalization_forgets_gain_and_offset_of_the_scanner() -> None:
    array = torch.rand(20, 20, 3) + 0.5
    torch.testing.assert_close(normalize(37 * array + 5, ALL), normalize(array, ALL), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, 7.7, 123.456, 1e6, -3.3])
@pytest.mark.parametrize("zeros", [0, 5])
def test_constant_image_becomes_zeros(value: float, zeros: int) -> None:
    """Also where float32 sums miss the mean and give a deviation of 1e-8, which would blow rounding up to 1."""
    image = torch.full((101, 97, 3), value)
    image[:zeros] = 0
    assert not normalize(image, (0.5, 99.5)).any()


# A whole case


def test_prepare_case_gives_aligned_image_label_and_foreground(tmp_path: Path) -> None:
    """Stored with flipped and swapped axes, at another spacing: image and label take the same way."""
    labels = np.zeros((3, 20, 16), np.uint8)
    labels[1, 4:12, 6:14], labels[2, 4:8, 6:10] = 2, 5
    affine = np.array([[0, -2.0, 0, 3], [0, 0, 2.0, 4], [9.0, 0, 0, 5], [0, 0, 0, 1]])
    for name, array in (("image", labels * np.float32(10)), ("label", labels)):
        nib.Nifti1Image(array, affine).to_filename(tmp_path / f"{name}.nii")
    case = Case("a", "a", tmp_path / "image.nii", tmp_path / "label.nii")
    item = PrepareCase(1.0, ALL, (2, 5))(case)
    assert item["id"] == "a"
    assert item["image"].shape == item["label"].shape == (1, 40, 32, 3)
    assert item["image"].dtype == torch.float32
    assert item["label"].dtype == torch.uint8
    for index, value in ((1, 20.0), (2, 50.0)):
        inside = normalize(torch.from_numpy(labels * np.float32(10)), ALL)[torch.from_numpy(labels * 10 == value)].unique()
        assert float(item["image"][item["label"] == index].median()) == pytest.approx(float(inside), rel=1e-4)
    flat = item["label"].flatten()
    assert (flat[item["foreground"].long()] > 0).all()
    assert len(item["foreground"]) == int((flat > 0).sum())


def test_prepare_case_refuses_a_case_without_label_and_one_of_another_shape(tmp_path: Path) -> None:
    for name, shape in (("image", (6, 6, 3)), ("label", (6, 6, 2))):
        nib.Nifti1Image(np.ones(shape, np.uint8), np.eye(4)).to_filename(tmp_path / f"{name}.nii")
    prepare = PrepareCase(None, ALL, (1,))
    with pytest.raises(DataError, match="case a has no label"):
        prepare(Case("a", "a", tmp_path / "image.nii", None))
    with pytest.raises(DataError, match=r"\(6, 6, 2\)"):
        prepare(Case("a", "a", tmp_path / "image.nii", tmp_path / "label.nii"))


# Random crops


def coordinates(shape: tuple[int, int, int], foreground: list[tuple[int, int, int]]) -> dict[Hashable, Any]:
    """A prepared case whose image tells where each voxel came from, x + 1000 y + 1000000 z, and whose label repeats it."""
    x, y, z = torch.meshgrid(*(torch.arange(n) for n in shape), indexing="ij")
    code = (x + 1000 * y + 1000000 * z)[None]
    flat = np.ravel_multi_index(np.array(foreground, int).reshape(-1, 3).T, shape)
    return {"image": code.double(), "label": code, "foreground": torch.tensor(flat, dtype=torch.int32), "id": "a"}


def axes_of(region: Tensor) -> list[Tensor]:
    """The source indices along each axis of a cropped coordinate image, (X,), (Y,), (Z,); checks that it is a product."""
    region = region.reshape(*region.shape[:3], -1)[0]
    x, y, z = region % 1000, region // 1000 % 1000, region // 1000000
    assert (x == x[:, :1, :1]).all()
    assert (y == y[:1, :, :1]).all()
    assert (z == z[:1, :1, :]).all()
    return [x[:, 0, 0], y[0, :, 0], z[0, 0, :]]


@settings(max_examples=60, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 30), st.integers(1, 30), st.integers(1, 9)),
    size=st.one_of(
        st.tuples(st.integers(1, 24), st.integers(1, 24)),
        st.tuples(st.integers(1, 24), st.integers(1, 24), st.integers(1, 12)),
    ),
    seed=st.integers(0, 1000),
)
def test_crop_has_the_asked_shape_everywhere_and_keeps_image_and_label_together(
    shape: tuple[int, int, int], size: tuple[int, ...], seed: int
) -> None:
    crop = RandCropRegiond(size, foreground_share=0.0)
    crop.set_random_state(seed)
    out = crop(coordinates(shape, []))
    assert out["image"].shape == out["label"].shape == (1, *size)
    assert torch.equal(out["image"].long(), out["label"])
    for source, n in zip(axes_of(out["label"]), shape, strict=True):
        offsets = torch.arange(len(source)) - len(source) // 2  # around a voxel of the volume, the border repeated beyond it
        assert any(torch.equal(source, (centre + offsets).clamp(0, n - 1)) for centre in range(n))


@pytest.mark.parametrize("place", [(0, 0, 0), (29, 19, 6), (11, 0, 3)])
@pytest.mark.parametrize("size", [(16, 12), (16, 12, 3), (40, 40, 5)])
def test_full_foreground_share_centres_every_crop_on_a_labelled_voxel(
    place: tuple[int, int, int], size: tuple[int, ...]
) -> None:
    data = coordinates((30, 20, 7), [place])
    crop = RandCropRegiond(size, foreground_share=1.0)
    for _ in range(5):
        label = crop(data)["label"]
        column = label[0, size[0] // 2, size[1] // 2].reshape(-1)
        assert column[len(column) // 2] == place[0] + 1000 * place[1] + 1000000 * place[2]


def test_foreground_share_is_the_share_of_centred_crops() -> None:
    crop = RandCropRegiond((8, 8), foreground_share=0.3)
    crop.set_random_state(0)
    data = coordinates((30, 30, 5), [(7, 7, 2)])
    target = 7 + 1000 * 7 + 1000000 * 2
    hits = [int(crop(data)["label"][0, 4, 4]) == target for _ in range(500)]
    assert np.mean(hits) == pytest.approx(0.3, abs=0.07)


def test_crop_of_more_slices_than_there_are_holds_them_all_padded_alike() -> None:
    """Wherever the labelled voxel lies: a heart of 6 slices in a crop of 8 is whole."""
    for z in (0, 5):
        label = RandCropRegiond((4, 4, 8), foreground_share=1.0)(coordinates((9, 9, 6), [(4, 4, z)]))["label"]
        assert axes_of(label)[2].tolist() == [0, 0, 1, 2, 3, 4, 5, 5]


# Augmentation


def half_disc() -> dict[str, Any]:
    """A prepared case without symmetry whose image is its label: half a disc of 1 in five slices."""
    x, y, _ = torch.meshgrid(torch.arange(60) - 30, torch.arange(60) - 30, torch.arange(5), indexing="ij")
    label = ((x**2 + y**2 < 20**2) & (x > -6))[None]
    return {"image": label.float(), "label": label.byte(), "foreground": label.flatten().nonzero()[:, 0].int(), "id": "a"}


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_image_and_label_move_together(dim: str, tiny_config: Callable[..., Config]) -> None:
    crop = (48, 48) if dim == "2d" else (48, 48, 4)
    config = tiny_config(dim, data={"crop_size": crop, "foreground_share": 1.0, "augment": {**QUIET, "affine": 1.0}})
    transform = training_transform(config)
    transform.set_random_state(0)
    kept = []
    for _ in range(10):
        item = transform(half_disc())
        assert item["image"].shape == item["label"].shape == (1, *crop)
        assert dice(item["image"].numpy() > 0.5, item["label"].numpy()) > 0.97
        kept.append(item["label"])
    assert len({label.numpy().tobytes() for label in kept}) == 10


def test_augmentation_in_plane_leaves_slices_apart(tiny_config: Callable[..., Config]) -> None:
    """A rotation out of plane would mix slices that lie 10 mm apart: slice 2 is empty and stays so."""
    config = tiny_config("3d", data={"crop_size": (32, 32, 5), "augment": {**QUIET, "affine": 1.0, "blur": 1.0}})
    transform = training_transform(config)
    transform.set_random_state(0)
    case = half_disc()
    for key in ("image", "label"):
        case[key][..., 2] = 0
    for _ in range(5):
        item = transform(case)
        assert not item["image"][..., 2].any()
        assert not item["label"][..., 2].any()
        assert item["image"][..., 1].any()


def test_without_augmentation_a_sample_is_a_plain_crop(tiny_config: Callable[..., Config]) -> None:
    config = tiny_config("2d", data={"crop_size": (24, 24), "augment": {**QUIET, "affine": 0.0, "flip": 0.0}})
    transform = training_transform(config)
    transform.set_random_state(0)
    case = coordinates((40, 40, 3), [])
    case["image"] = case["image"].float()
    x, y, z = axes_of(transform(case)["image"].long())
    assert (len(x), len(y), len(z)) == (24, 24, 1)
    assert set(x.diff().tolist()) <= {0, 1}  # whole voxels, the border repeated where the crop leaves the volume


@pytest.mark.parametrize("name", QUIET)
def test_each_intensity_augmentation_changes_the_image_and_no_label(name: str, tiny_config: Callable[..., Config]) -> None:
    spatial = {"affine": 0.0, "flip": 0.0}
    case = half_disc()
    case["image"] += 0.3 * torch.rand(case["image"].shape, generator=torch.Generator().manual_seed(0))
    plain, changed = (
        training_transform(tiny_config("2d", data={"augment": {**QUIET, **spatial, name: share}})) for share in (0.0, 1.0)
    )
    for transform in (plain, changed):
        transform.set_random_state(3)
    before, after = plain(case), changed(case)
    assert torch.equal(before["label"], after["label"])
    assert torch.isfinite(after["image"]).all()
    assert 1e-3 < float((before["image"] - after["image"]).abs().mean()) < 1


def test_low_resolution_removes_detail_but_no_brightness() -> None:
    image = torch.randint(0, 2, (1, 32, 32), generator=torch.Generator().manual_seed(0)).float()
    out = RandLowResolutiond(1.0, (0.5, 0.5))({"image": image})["image"]
    assert out.shape == image.shape
    assert float(out.mean()) == pytest.approx(float(image.mean()), abs=0.01)
    assert float(out.std()) < 0.7 * float(image.std())
