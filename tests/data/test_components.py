"""The largest piece of a mask."""

from __future__ import annotations

import numpy as np

from rdvit.data.components import largest_component


def test_the_larger_of_two_pieces_stays() -> None:
    mask = np.zeros((6, 6, 3), bool)
    mask[:2, :2] = mask[4:, 4:, 1] = True  # 12 and 4 voxels
    kept = largest_component(mask)
    assert kept[:2, :2].all() and kept.sum() == 12


def test_pieces_that_touch_at_a_corner_are_one() -> None:
    mask = np.zeros((4, 4, 4), bool)
    mask[0, 0, 0] = mask[1, 1, 1] = True
    assert np.array_equal(largest_component(mask), mask)


def test_nothing_stays_nothing() -> None:
    assert not largest_component(np.zeros((3, 3, 3), bool)).any()
