"""The bootstrap against closed forms, and its promise: it covers the truth as often as it says."""

from __future__ import annotations

import numpy as np
import pytest

from rdvit.errors import DataError
from rdvit.evaluation.intervals import bootstrap, ratio_of_means


def test_interval_of_a_mean_is_that_of_the_normal_distribution() -> None:
    values = np.random.default_rng(1).normal(0.9, 0.03, 400)
    found = bootstrap(values)
    half = 1.96 * values.std() / np.sqrt(len(values))
    assert found.value == values.mean()
    assert (found.low, found.high) == pytest.approx((values.mean() - half, values.mean() + half), abs=0.1 * half)
    narrow = bootstrap(values, confidence=0.5)
    assert found.low < narrow.low < narrow.value < narrow.high < found.high


def test_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    covered = [i.low <= 0 <= i.high for i in (bootstrap(rng.normal(size=40), samples=300) for _ in range(200))]
    assert 0.88 < np.mean(covered) < 0.99


def test_pairs_stay_together() -> None:
    """A patient's own two values are drawn together: a ratio that is the same in all of them has no spread."""
    second = np.linspace(1, 5, 20)
    found = bootstrap(np.stack([1.5 * second, second], axis=1), ratio_of_means)
    assert (found.value, found.low, found.high) == pytest.approx((1.5, 1.5, 1.5))


def test_a_ratio_of_means_is_no_mean_of_ratios() -> None:
    assert ratio_of_means(np.array([[1.0, 1.0], [9.0, 3.0]])) == 2.5


def test_draws_are_the_same_each_time_and_take_whole_patients() -> None:
    tables = np.arange(24.0).reshape(6, 2, 2)
    seen: list[tuple[int, ...]] = []
    bootstrap(tables, lambda t: float(seen.append(t.shape) or t.sum()), samples=5)
    assert set(seen) == {(6, 2, 2)}
    values = np.random.default_rng(0).normal(size=20)
    assert bootstrap(values) == bootstrap(values) != bootstrap(values, seed=1)


def test_few_and_missing_patients() -> None:
    alone = bootstrap(np.array([0.8]))
    assert alone.value == 0.8 and np.isnan([alone.low, alone.high]).all()
    assert str(bootstrap(np.array([0.5, 0.5]))) == "0.5000 (0.5000 to 0.5000)"
    for values in ([], [0.8, np.nan]):
        with pytest.raises(DataError, match="patients"):
            bootstrap(np.array(values))
