"""Loops per structure, at boundaries and over a batch, against values worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest

from rdvit.analysis.halting import (
    boundary_band,
    boundary_ponder,
    halting_steps,
    halting_summary,
    ponder_by_structure,
)
from rdvit.errors import DataError

NAMES = {1: "RV", 2: "MYO", 3: "LV"}


def act_weights(bias: float, n_loops: int) -> np.ndarray:
    """Weights of one token whose halting probability is the same at every loop, by Graves's definition."""
    probability = 1 / (1 + np.exp(-bias))
    weights = np.zeros(n_loops)
    for t in range(n_loops):
        if t == n_loops - 1 or (t + 1) * probability >= 0.99:
            weights[t] = 1 - weights.sum()
            break
        weights[t] = probability
    return weights


@pytest.mark.parametrize(
    ("bias", "n_loops", "steps", "remainder", "depth"),
    [(0, 8, 2, 0.5, 1.5), (-1, 8, 4, 0.193, 2.39), (-2, 8, 8, 0.166, 4.7), (-4, 8, 8, 0.874, 7.5), (4.6, 8, 1, 1, 1)],
)
def test_summary_reproduces_the_closed_form_of_act(
    bias: float, n_loops: int, steps: int, remainder: float, depth: float
) -> None:
    summary = halting_summary(act_weights(bias, n_loops)[None])
    assert summary.mean_steps == steps
    assert summary.mean_ponder == pytest.approx(steps + remainder, abs=1e-3)
    assert summary.expected_depth == pytest.approx(depth, abs=0.05)


def test_summary_is_a_mean_over_tokens_whatever_the_layout() -> None:
    weights_NT = np.array([[1.0, 0, 0], [0.5, 0.5, 0], [0.2, 0.2, 0.6], [0, 0, 1.0]])
    summary = halting_summary(weights_NT)
    np.testing.assert_allclose(summary.mass_per_loop, [0.425, 0.175, 0.4])
    np.testing.assert_allclose(summary.steps_fraction, [0.25, 0.25, 0.5])
    assert summary.mean_steps == pytest.approx((1 + 2 + 3 + 3) / 4)
    assert summary.mean_ponder == pytest.approx((1 + 1 + 2 + 0.5 + 3 + 0.6 + 3 + 1) / 4)
    assert summary.expected_depth == pytest.approx((1 + 1.5 + 2.4 + 3) / 4)
    assert summary.fraction_at_one == 0.25
    assert summary.fraction_at_cap == 0.5

    loops_first = halting_summary(weights_NT.T.reshape(3, 2, 2), loop_axis=0)
    np.testing.assert_allclose(loops_first.mass_per_loop, summary.mass_per_loop)
    assert loops_first.mean_ponder == pytest.approx(summary.mean_ponder)


def test_steps_keep_the_shape_of_the_map() -> None:
    weights_TXY = np.zeros((4, 2, 3))
    expected = np.array([[1, 2, 3], [4, 1, 2]])
    np.put_along_axis(weights_TXY, expected[None] - 1, 1.0, axis=0)
    np.testing.assert_array_equal(halting_steps(weights_TXY, loop_axis=0), expected)


@pytest.mark.parametrize("weights", [[[0.5, 0.4]], [[1.2, -0.2]], [[np.nan, 1.0]], np.zeros((0, 3))])
def test_lost_mass_is_an_error(weights: list[list[float]] | np.ndarray) -> None:
    with pytest.raises(DataError, match="read-out weights"):
        halting_summary(np.array(weights))


def test_ponder_by_structure_of_one_volume() -> None:
    labels = np.array([0, 0, 1, 1, 2]).reshape(5, 1, 1)
    steps = np.array([1, 1, 2, 5, 4]).reshape(5, 1, 1)
    ponder = ponder_by_structure(steps, labels, NAMES)
    assert ponder == {"background": 1, "RV": 3.5, "MYO": 4, "LV": pytest.approx(np.nan, nan_ok=True)}


def test_ponder_by_structure_weighs_volumes_alike() -> None:
    small, large = np.full((1, 1, 1), 1), np.full((10, 10, 1), 1)
    ponder = ponder_by_structure([small * 2, large * 4], [small, large], {1: "RV"})
    assert ponder["RV"] == 3  # over all voxels it would be 3.98


def test_ponder_by_structure_refuses_what_does_not_fit() -> None:
    volume = np.ones((2, 2, 2))
    with pytest.raises(DataError, match="one shape"):
        ponder_by_structure(volume, volume[:1], NAMES)
    with pytest.raises(DataError, match="2 maps, 1 labels"):
        ponder_by_structure([volume, volume], [volume], NAMES)


def test_band_lies_on_both_sides_in_the_slice_only() -> None:
    labels = np.zeros((9, 9, 3), dtype=np.uint8)
    labels[3:6, 3:6, 1] = 1
    band = boundary_band(labels, width_voxels=1)
    assert not band[:, :, [0, 2]].any()
    expected = np.zeros((9, 9), dtype=bool)
    expected[3:6, 2:7] = expected[2:7, 3:6] = True  # the square and its four neighbours, without the diagonal ones
    expected[4, 4] = False
    np.testing.assert_array_equal(band[:, :, 1], expected)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_band_agrees_with_city_block_distance(width: int) -> None:
    labels = np.random.default_rng(0).integers(0, 3, (4, 4, 2)).repeat(4, axis=0).repeat(4, axis=1)
    band = boundary_band(labels, width)
    x, y = np.indices(labels.shape[:2])
    for index in np.ndindex(labels.shape):
        distance = np.abs(x - index[0]) + np.abs(y - index[1])
        differs = labels[:, :, index[2]] != labels[index]
        assert band[index] == (distance[differs].min() <= width)


def test_the_edge_of_the_volume_is_no_boundary() -> None:
    assert not boundary_band(np.ones((5, 5, 2)), 2).any()


def test_boundary_ponder_separates_the_three_regions() -> None:
    labels = np.zeros((20, 20, 2), dtype=np.uint8)
    labels[4:16, 4:16] = 3
    band = boundary_band(labels, 2)
    steps = np.where(band, 5.0, np.where(labels == 3, 2.0, 1.0))
    assert boundary_ponder(steps, labels, width_voxels=2) == {"boundary": 5, "interior": 2, "background": 1}
    # A band twice as wide takes in voxels of both sides.
    wider = boundary_ponder(steps, labels, width_voxels=4)
    assert 1 < wider["boundary"] < 5


def test_boundary_ponder_of_an_empty_volume_and_of_a_wrong_width() -> None:
    steps = np.full((4, 4, 1), 2.0)
    ponder = boundary_ponder(steps, np.zeros((4, 4, 1)))
    assert ponder["background"] == 2
    assert np.isnan([ponder["boundary"], ponder["interior"]]).all()
    with pytest.raises(DataError, match="at least 1 voxel"):
        boundary_ponder(steps, np.zeros((4, 4, 1)), width_voxels=0)
