"""Distances, statistics and similarities of known arrays."""

from __future__ import annotations

import numpy as np
import pytest

from rdvit.analysis.charts import seeds_curve, similarity_figure
from rdvit.analysis.dynamics import activation_statistics, attention_distance, cka_matrix, linear_cka, participation_ratio
from rdvit.errors import DataError

RNG = np.random.default_rng(0)


def test_looking_at_oneself_is_no_distance_and_next_door_is_one_token() -> None:
    itself, neighbour = np.eye(6), np.eye(6)[[1, 0, 3, 2, 5, 4]]
    distances = attention_distance(np.stack([itself, neighbour]), (3, 2))
    assert distances.tolist() == [0.0, 1.0]
    assert attention_distance(neighbour[None], (3, 2), token_size=(1.0, 12.0)).tolist() == [12.0]


def test_uniform_attention_sees_the_mean_distance() -> None:
    uniform = np.full((1, 3, 3), 1 / 3)
    assert attention_distance(uniform, (3, 1))[0] == pytest.approx((2 * (0 + 1 + 2) + (1 + 0 + 1)) / 9)


def test_wrong_attention() -> None:
    with pytest.raises(DataError, match=r"N = 6 tokens, found \(1, 4, 4\)"):
        attention_distance(np.eye(4)[None], (3, 2))
    with pytest.raises(DataError, match="rows of sum 1"):
        attention_distance(2 * np.eye(6)[None], (3, 2))


def test_statistics_of_a_walk() -> None:
    start, move = np.array([[3.0, 4.0]] * 5), np.array([[0.6, 0.8]] * 5)
    rows = activation_statistics(np.stack([start, start + move, start + 2 * move, start + move]))
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[0]["rms"] == pytest.approx(np.sqrt(12.5)) and np.isnan(rows[0]["relative_step"])
    assert rows[1]["relative_step"] == pytest.approx(1 / 5) and np.isnan(rows[1]["step_cosine"])
    assert [rows[2]["step_cosine"], rows[3]["step_cosine"]] == pytest.approx([1, -1])


def test_participation_ratio_counts_dimensions() -> None:
    assert participation_ratio(RNG.normal(size=(20_000, 8))) == pytest.approx(8, rel=0.01)
    assert participation_ratio(RNG.normal(size=(100, 1)) * np.ones((1, 8))) == pytest.approx(1)


def test_cka_sees_rotations_and_scalings_only() -> None:
    x, noise = RNG.normal(size=(500, 6)), RNG.normal(size=(500, 4))
    rotation, _ = np.linalg.qr(RNG.normal(size=(6, 6)))
    assert linear_cka(x, 3 * x @ rotation + 5) == pytest.approx(1)
    assert linear_cka(x, noise) < 0.05
    assert linear_cka(x, noise) == pytest.approx(linear_cka(noise, x))
    matrix = cka_matrix([x, x @ np.diag([9, 1, 1, 1, 1, 1])], [x, noise, x])
    assert matrix.shape == (2, 3) and matrix[0, 0] == pytest.approx(1) and matrix[1, 0] < 0.9
    with pytest.raises(DataError, match="found 500 and 10"):
        linear_cka(x, x[:10])


def test_figures_draw_what_they_are_given() -> None:
    rows = [{"loops": n, "seed": s, "dice": 0.1 * n + 0.01 * s, "system": "bvit"} for n in (1, 2, 4) for s in range(3)]
    ax = seeds_curve(rows, "loops", "dice", "system", ("loops", "Dice"), log=True, mark=2).axes[0]
    line = next(line for line in ax.lines if line.get_label() == "bvit")
    np.testing.assert_allclose(line.get_xydata(), [[1, 0.11], [2, 0.21], [4, 0.41]])
    figure = similarity_figure({"a": np.eye(3), "b": np.ones((2, 3))})
    assert [ax.get_title(loc="left") for ax in figure.axes[:2]] == ["a", "b"]
