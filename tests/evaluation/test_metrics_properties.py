"""Metrics on any masks and spacings: against definitions written out slowly, against SimpleITK, and what must hold for all."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its customary name
from hypothesis import given, settings
from hypothesis import strategies as st

from rdvit.evaluation.metrics import case_metrics, diagonal_mm, dice, iou, surface_distances, surface_metrics
from rdvit.evaluation.summary import CaseResult, summarize

Masks = tuple[np.ndarray, np.ndarray, tuple[float, float, float]]


@st.composite
def masks(draw: st.DrawFn, low: int = 1, high: int = 7) -> Masks:
    """Two random masks of one shape, none of them empty, from a few voxels to nearly full, and a spacing in mm."""
    shape = tuple(draw(st.integers(low, high)) for _ in range(3))
    dice_ = np.random.default_rng(draw(st.integers(0, 2**32)))
    pair = []
    for _ in range(2):
        mask = dice_.random(shape) < draw(st.sampled_from([0.03, 0.3, 0.7, 1.0]))
        mask[tuple(dice_.integers(0, shape))] = True
        pair.append(mask)
    x, y, z = (draw(st.floats(0.2, 12)) for _ in range(3))
    return pair[0], pair[1], (x, y, z)


def surface_points(mask: np.ndarray) -> list[tuple[int, ...]]:
    """Voxels with a face neighbour outside the mask or the array, but not beyond the array along an axis of length 1."""
    found = []
    for index in np.ndindex(mask.shape):
        if not mask[index]:
            continue
        for axis in range(3):
            for step in (-1, 1):
                place = list(index)
                place[axis] += step
                beyond = not 0 <= place[axis] < mask.shape[axis]
                if (beyond and mask.shape[axis] > 1) or (not beyond and not mask[tuple(place)]):
                    found.append(index)
    return sorted(set(found))


def slow_distances(start: np.ndarray, end: np.ndarray, spacing: tuple[float, ...]) -> list[float]:
    ends = surface_points(end)
    return [min(sum(((a - b) * s) ** 2 for a, b, s in zip(p, q, spacing, strict=True)) ** 0.5 for q in ends)
            for p in surface_points(start)]  # fmt: skip


@settings(max_examples=40, deadline=None)
@given(masks(high=5))
def test_slow_definitions_agree(given_masks: Masks) -> None:
    pred, ref, spacing = given_masks
    both, either = int((pred & ref).sum()), int((pred | ref).sum())
    assert dice(pred, ref) == pytest.approx(2 * both / (pred.sum() + ref.sum()))
    assert iou(pred, ref) == pytest.approx(both / either)
    to_ref, to_pred = surface_distances(pred, ref, spacing)
    assert to_ref == pytest.approx(slow_distances(pred, ref, spacing))
    assert to_pred == pytest.approx(slow_distances(ref, pred, spacing))


@settings(max_examples=40, deadline=None)
@given(masks(low=2))
def test_simpleitk_agrees(given_masks: Masks) -> None:
    pred, ref, spacing = given_masks

    def image(mask: np.ndarray) -> sitk.Image:
        padded = sitk.GetImageFromArray(np.pad(mask, 1).T.astype(np.uint8))
        padded.SetSpacing(spacing)
        return padded

    a, b = image(pred), image(ref)
    overlap = sitk.LabelOverlapMeasuresImageFilter()
    overlap.Execute(a, b)
    assert dice(pred, ref) == pytest.approx(overlap.GetDiceCoefficient())
    assert iou(pred, ref) == pytest.approx(overlap.GetJaccardCoefficient())
    contours = [sitk.LabelContour(mask, fullyConnected=False) for mask in (a, b)]
    hausdorff = sitk.HausdorffDistanceImageFilter()
    hausdorff.Execute(*contours)
    directed = []
    for start, end in (contours, contours[::-1]):
        signed = sitk.SignedMaurerDistanceMap(
            end, squaredDistance=False, useImageSpacing=True
        )  # below 0 inside a thick contour
        distances = sitk.GetArrayFromImage(signed)[sitk.GetArrayFromImage(start) > 0]
        directed.append(np.maximum(distances, 0))
    ours = surface_metrics(pred, ref, spacing)
    assert ours["HD"] == pytest.approx(hausdorff.GetHausdorffDistance(), rel=1e-5, abs=1e-5)
    assert ours["HD95"] == pytest.approx(max(np.percentile(d, 95) for d in directed), rel=1e-5, abs=1e-5)
    assert ours["ASSD"] == pytest.approx(np.concatenate(directed).mean(), rel=1e-5, abs=1e-5)


@settings(max_examples=40, deadline=None)
@given(masks(), st.integers(0, 2), st.permutations(range(3)), st.floats(0.5, 3))
def test_what_holds_for_all(given_masks: Masks, axis: int, order: list[int], factor: float) -> None:
    pred, ref, spacing = given_masks
    ours = surface_metrics(pred, ref, spacing)
    assert surface_metrics(ref, pred, spacing) == pytest.approx(ours)
    assert surface_metrics(np.flip(pred, axis), np.flip(ref, axis), spacing) == pytest.approx(ours)
    turned = [spacing[i] for i in order]
    assert surface_metrics(pred.transpose(order), ref.transpose(order), turned) == pytest.approx(ours)
    scaled = surface_metrics(pred, ref, [factor * s for s in spacing])
    assert scaled == pytest.approx({name: factor * value for name, value in ours.items()})
    longer = [s * (2 if i == axis else 1) for i, s in enumerate(spacing)]  # each axis in its own millimetres
    for name, value in surface_metrics(pred, ref, longer).items():
        assert value >= ours[name] - 1e-9
    assert 0 <= ours["HD95"] <= ours["HD"] <= diagonal_mm(pred.shape, spacing) + 1e-9 and ours["ASSD"] <= ours["HD"] + 1e-9
    assert iou(pred, ref) == pytest.approx(dice(pred, ref) / (2 - dice(pred, ref)))


@settings(max_examples=40, deadline=None)
@given(masks(), masks())
def test_a_missed_structure_never_makes_a_mean_better(first: Masks, second: Masks) -> None:
    def scored(name: str, pair: Masks, missed: bool) -> CaseResult:
        pred, ref, spacing = pair
        labels = np.zeros_like(ref) if missed else pred
        return CaseResult(name, name, None, case_metrics(labels.astype(np.uint8), ref.astype(np.uint8), spacing, {1: "LV"}))

    found, missed = (summarize([scored("a", first, False), scored("b", second, m)], {1: "LV"}) for m in (False, True))
    for metric in ("HD95", "HD", "ASSD"):
        assert missed["foreground_mean"][metric] >= found["foreground_mean"][metric] - 1e-9
    for metric in ("Dice", "IoU"):
        assert missed["foreground_mean"][metric] <= found["foreground_mean"][metric]
    assert (found["n_missed"], missed["n_missed"], missed["n"]) == ({"1": 0}, {"1": 1}, {"1": 2})


def check_memory(shape: tuple[int, int, int]) -> None:
    """Two layers against one, nothing but surface: known distances, in a fixed number of bytes for each voxel."""
    both = np.ones((*shape[:2], 2), dtype=bool)
    one = both & np.array([True, False])
    tracemalloc.start()
    ours = surface_metrics(both, one, (1.0, 1.5, 4.0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert ours == pytest.approx({"HD95": 4.0, "HD": 4.0, "ASSD": 4 / 3})  # half of two layers lies 4 mm off
    assert peak < 45 * both.size


def test_many_surface_points_in_little_memory() -> None:
    check_memory((256, 256, 2))


@pytest.mark.slow
def test_2_to_the_24_surface_points() -> None:
    check_memory((2048, 4096, 2))
