"""Token labels and routing statistics, against loops written out and cases with known answers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from rdvit.analysis.experts import (
    MIXED,
    normalized_mutual_information,
    routing_counts,
    routing_entropy,
    shares,
    shuffled,
    token_labels,
    usage_by_structure,
)
from rdvit.errors import DataError


@pytest.mark.parametrize("patch", [(2, 2, 1), (3, 2, 2), (4, 3, 3), (1, 1, 1)])
def test_token_labels_are_in_c_order_of_the_grid(patch: tuple[int, ...]) -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, (4, 3, 2)).repeat(2, axis=0).repeat(3, axis=1).repeat(2, axis=2)[:7]
    expected = []
    for x in range(0, labels.shape[0], patch[0]):
        for y in range(0, labels.shape[1], patch[1]):
            for z in range(0, labels.shape[2], patch[2]):
                voxels = labels[x : x + patch[0], y : y + patch[1], z : z + patch[2]].ravel()
                votes = Counter(voxels.tolist())
                votes[0] += int(np.prod(patch)) - voxels.size  # the padding
                value, count = votes.most_common(1)[0]
                expected.append(value if count >= 0.8 * np.prod(patch) else MIXED)
    np.testing.assert_array_equal(token_labels(labels, patch), expected)
    assert len(set(expected)) > 1  # the case is not trivial


def test_majority_counts_at_its_limit_and_a_slice_works() -> None:
    patch = np.array([[1, 1, 1, 1, 2]])
    assert token_labels(patch, (1, 5), majority=0.8) == [1]
    assert token_labels(patch, (1, 5), majority=0.81) == [MIXED]


@pytest.mark.parametrize(("patch", "majority"), [((2, 2), 0.8), ((2, 2, 0), 0.8), ((2, 2, 2), 0.5), ((2, 2, 2), 1.1)])
def test_token_labels_refuse_a_wrong_patch_or_majority(patch: tuple[int, ...], majority: float) -> None:
    with pytest.raises(DataError, match="expected a"):
        token_labels(np.zeros((4, 4, 4)), patch, majority)


def test_usage_is_the_mean_share_of_each_structure() -> None:
    gates = np.array([[0.75, 0.25, 0], [0.5, 0, 0.5], [0, 0, 0.3], [0, 0, 0], [1, 0, 0]])
    labels = np.array([1, 1, 2, 2, MIXED])
    usage = usage_by_structure(gates, labels, 4)
    np.testing.assert_allclose(usage[1], [0.625, 0.125, 0.25])
    np.testing.assert_allclose(usage[2], [0, 0, 1])  # the unrouted token does not dilute, a gate of 0.3 counts as one token
    assert np.isnan(usage[[0, 3]]).all()
    np.testing.assert_allclose(usage[1:3].sum(axis=1), 1)
    np.testing.assert_allclose(routing_counts(gates, labels, 4).sum(axis=1), [0, 2, 1, 0])


@pytest.mark.parametrize(
    ("gates", "labels", "message"),
    [
        (np.ones((3, 2)), np.zeros(2, int), "one label per token"),
        (np.ones((2, 2)), np.array([0, 4]), "below 4"),
        (np.array([[1, -1.0]]), np.zeros(1, int), "negative weight"),
        (np.array([[1, np.nan]]), np.zeros(1, int), "NaN"),
    ],
)
def test_routing_refuses_what_does_not_fit(gates: np.ndarray, labels: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        routing_counts(gates, labels, 4)


def test_entropy_is_zero_for_one_expert_and_one_for_all_alike() -> None:
    usage = np.array([[1, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0], [np.nan] * 4])
    np.testing.assert_allclose(routing_entropy(usage), [0, 1, 0.5, np.nan], atol=1e-12)
    np.testing.assert_allclose(routing_entropy(7 * usage[:3]), routing_entropy(usage[:3]))  # counts serve as well
    assert routing_entropy(np.array([1.0])) == 0


def test_mutual_information_of_known_cases() -> None:
    assert normalized_mutual_information(np.diag([90, 5, 3, 2])) == pytest.approx(1)
    independent = np.outer([0.9, 0.05, 0.03, 0.02], [0.5, 0.3, 0.2])
    assert normalized_mutual_information(independent) == pytest.approx(0, abs=1e-12)
    # Two of four equal classes share each expert: one of the two bits is known.
    assert normalized_mutual_information(np.array([[1, 0], [1, 0], [0, 1], [0, 1]])) == pytest.approx(0.5)
    # Splitting a class over two experts of its own costs nothing: it is normalised by the structure's entropy.
    assert normalized_mutual_information(np.array([[1, 1, 0], [0, 0, 2]])) == pytest.approx(1)
    assert np.isnan(normalized_mutual_information(np.array([[3, 4], [0, 0]])))


def test_mutual_information_from_gates_to_the_number() -> None:
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 4, 4000)
    one_to_one = np.eye(4)[[2, 0, 3, 1]][labels]
    random = np.eye(4)[rng.integers(0, 4, 4000)]
    assert normalized_mutual_information(routing_counts(one_to_one, labels, 4)) == pytest.approx(1)
    assert normalized_mutual_information(routing_counts(random, labels, 4)) < 0.01


def test_shuffled_labels_count_the_same_tokens() -> None:
    labels = np.array([MIXED, 0, 0, 0, 1, 2, MIXED, 2] * 20)
    control = shuffled(labels, np.random.default_rng(0))
    np.testing.assert_array_equal(control == MIXED, labels == MIXED)
    np.testing.assert_array_equal(np.bincount(control + 1), np.bincount(labels + 1))
    assert (control != labels).sum() > 30
    gates = np.eye(3)[np.clip(labels, 0, 2)]  # an expert for each structure: all is known, and nothing of shuffled labels
    known, chance = (normalized_mutual_information(routing_counts(gates, some, 3)) for some in (labels, control))
    assert known == pytest.approx(1) and chance < 0.1


def test_shares_of_pooled_counts() -> None:
    np.testing.assert_array_equal(shares(np.array([[1.0, 3.0], [0.0, 0.0]])), [[0.25, 0.75], [np.nan, np.nan]])
