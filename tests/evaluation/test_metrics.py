"""Metrics against MONAI, brute force and cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import ndimage
from scipy.spatial.distance import cdist

from rdvit.errors import DataError
from rdvit.evaluation.metrics import (
    METRIC_NAMES,
    case_metrics,
    diagonal_mm,
    dice,
    iou,
    missing_prediction_metrics,
    surface_distances,
    surface_metrics,
)

SPACING = (1.4, 1.6, 10.0)
FARTHEST = float(np.sqrt((5 * 1.4) ** 2 + (5 * 1.6) ** 2 + (3 * 10.0) ** 2))  # corner to corner of a 6 x 6 x 4 volume
NAMES = {1: "RV", 3: "LV"}


def blobs(seed: int, shape: tuple[int, ...] = (26, 24, 8)) -> np.ndarray:
    """A few smooth blobs, some of which touch the border of the array."""
    noise = ndimage.gaussian_filter(np.random.default_rng(seed).normal(size=shape), 2.0)
    return noise > np.quantile(noise, 0.8)


@pytest.mark.parametrize("seed", range(4))
def test_agrees_with_monai_on_random_blobs(seed: int) -> None:
    torch = pytest.importorskip("torch")
    from monai.metrics import compute_average_surface_distance, compute_dice, compute_hausdorff_distance, compute_iou

    pred, ref = blobs(seed), blobs(seed + 100)
    pair = [torch.from_numpy(mask)[None, None].float() for mask in (pred, ref)]
    options = {"include_background": True, "spacing": list(SPACING)}
    ours = surface_metrics(pred, ref, SPACING)
    assert dice(pred, ref) == pytest.approx(compute_dice(*pair).item(), rel=1e-6)
    assert iou(pred, ref) == pytest.approx(compute_iou(*pair).item(), rel=1e-6)
    assert ours["HD95"] == pytest.approx(compute_hausdorff_distance(*pair, percentile=95, **options).item(), rel=1e-5)
    assert ours["HD"] == pytest.approx(compute_hausdorff_distance(*pair, **options).item(), rel=1e-5)
    assd = compute_average_surface_distance(*pair, symmetric=True, **options)
    assert ours["ASSD"] == pytest.approx(assd.item(), rel=1e-5)


@pytest.mark.parametrize(("shape", "spacing"), [((11, 9, 6), SPACING), ((20, 15), (0.7, 1.9))])
def test_agrees_with_brute_force(shape: tuple[int, ...], spacing: tuple[float, ...]) -> None:
    def surface_mm(mask: np.ndarray) -> np.ndarray:
        padded = np.pad(mask, 1)
        inside = np.ones_like(padded)
        for axis in range(mask.ndim):
            inside &= np.roll(padded, 1, axis) & np.roll(padded, -1, axis)
        return np.argwhere(padded & ~inside) * np.array(spacing)

    pred, ref = blobs(1, shape), blobs(2, shape)
    between = cdist(surface_mm(pred), surface_mm(ref))
    to_ref, to_pred = between.min(axis=1), between.min(axis=0)
    ours = surface_metrics(pred, ref, spacing)
    assert ours["ASSD"] == pytest.approx((to_ref.sum() + to_pred.sum()) / (to_ref.size + to_pred.size))
    assert ours["HD"] == pytest.approx(max(to_ref.max(), to_pred.max()))
    assert ours["HD95"] == pytest.approx(max(np.percentile(to_ref, 95), np.percentile(to_pred, 95)))


def test_shift_by_one_slice_is_one_slice_spacing() -> None:
    mask = np.zeros((12, 12, 8), dtype=bool)
    mask[3:9, 3:9, 2:5] = True
    assert surface_metrics(np.roll(mask, 1, axis=2), mask, (1.0, 1.0, 10.0))["HD"] == pytest.approx(10.0)
    assert surface_metrics(np.roll(mask, 1, axis=0), mask, (1.5, 1.0, 10.0))["HD"] == pytest.approx(1.5)


def test_identical_masks_are_perfect_and_disjoint_ones_score_zero() -> None:
    mask = blobs(0)
    assert dice(mask, mask) == iou(mask, mask) == 1.0
    assert surface_metrics(mask, mask, SPACING) == {"HD95": 0.0, "HD": 0.0, "ASSD": 0.0}
    assert dice(mask, ~mask) == iou(mask, ~mask) == 0.0


def test_border_of_the_array_is_surface() -> None:
    full = np.ones((5, 5, 5), dtype=bool)
    to_ref, to_pred = surface_distances(full, full, (1.0, 1.0, 1.0))
    assert to_ref.size == to_pred.size == 5**3 - 3**3


def test_single_slice_scores_like_the_2d_mask() -> None:
    pred, ref = blobs(3, (30, 30)), blobs(4, (30, 30))
    in_3d = surface_metrics(pred[..., None], ref[..., None], (1.2, 1.5, 8.0))
    assert in_3d == pytest.approx(surface_metrics(pred, ref, (1.2, 1.5)))


def test_distance_is_symmetric_and_ignores_empty_margins() -> None:
    pred, ref = blobs(5), blobs(6)
    expected = surface_metrics(pred, ref, SPACING)
    assert surface_metrics(ref, pred, SPACING) == pytest.approx(expected)
    assert surface_metrics(np.pad(pred, 7), np.pad(ref, 7), SPACING) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("pred_voxel", "ref_voxel", "expected_dice", "expected_hd"),
    [(True, True, 1.0, 0.0), (True, False, 0.0, FARTHEST), (False, True, 0.0, FARTHEST), (False, False, np.nan, np.nan)],
)
def test_four_cases_of_the_empty_rule(pred_voxel: bool, ref_voxel: bool, expected_dice: float, expected_hd: float) -> None:
    pred, ref = np.zeros((2, 6, 6, 4), dtype=np.uint8)
    pred[2, 2, 2], ref[2, 2, 2] = pred_voxel, ref_voxel
    scores = case_metrics(pred, ref, SPACING, {1: "RV"})["RV"]
    assert scores["Dice"] == pytest.approx(expected_dice, nan_ok=True)
    assert scores["IoU"] == pytest.approx(expected_dice, nan_ok=True)
    assert [scores[m] for m in ("HD95", "HD", "ASSD")] == pytest.approx([expected_hd] * 3, nan_ok=True)


def test_case_metrics_counts_and_volumes() -> None:
    pred, ref = np.zeros((2, 10, 10, 4), dtype=np.uint8)
    ref[2:6, 2:6, 1:3] = 3  # 32 voxels
    pred[3:7, 2:6, 1:3] = 3  # shifted by one: 24 in common
    scores = case_metrics(pred, ref, (1.25, 1.0, 8.0), NAMES)
    lv = scores["LV"]
    assert set(scores) == {"RV", "LV"} and tuple(lv) == METRIC_NAMES
    assert (lv["TP"], lv["FP"], lv["FN"], lv["TN"]) == (24, 8, 8, 400 - 40)
    assert (lv["n_pred"], lv["n_ref"]) == (32, 32)
    assert lv["Dice"] == pytest.approx(48 / 64) and lv["IoU"] == pytest.approx(24 / 40)
    assert lv["volume_ml"] == lv["volume_ref_ml"] == pytest.approx(0.32)  # 32 voxels of 10 mm³
    assert scores["RV"]["TN"] == 400


def test_missing_prediction_scores_zero_only_where_the_reference_has_the_structure() -> None:
    ref = np.zeros((8, 8, 4), dtype=np.uint8)
    ref[2:5, 2:5, 1:3] = 3
    scores = missing_prediction_metrics(ref, SPACING, NAMES)
    assert scores["LV"]["Dice"] == scores["LV"]["IoU"] == 0.0
    assert scores["LV"]["FN"] == scores["LV"]["n_ref"] == 18
    assert scores["LV"]["HD95"] == scores["LV"]["ASSD"] == diagonal_mm((8, 8, 4), SPACING)
    assert np.isnan([scores["LV"]["volume_ml"], scores["RV"]["Dice"], scores["RV"]["HD95"]]).all()
    assert scores["LV"]["volume_ref_ml"] > 0


def test_wrong_input_is_refused_with_the_numbers() -> None:
    labels = np.zeros((4, 5, 6), dtype=np.uint8)
    with pytest.raises(DataError, match=r"\(4, 5, 6\).*\(5, 4, 6\)"):
        case_metrics(labels, labels.transpose(1, 0, 2), SPACING, NAMES)
    with pytest.raises(DataError, match="shape"):
        dice(labels, labels[:3])
    with pytest.raises(DataError, match="shape"):
        case_metrics(labels[0], labels[0], SPACING, NAMES)
    with pytest.raises(DataError, match="3 positive"):
        case_metrics(labels, labels, (1.0, 1.0), NAMES)
    with pytest.raises(DataError, match="3 positive"):
        surface_metrics(labels, labels, (1.0, 0.0, 1.0))
    with pytest.raises(DataError, match="background"):
        case_metrics(labels, labels, SPACING, {0: "background", 1: "RV"})
