"""What changes over a training: its shape at known points, and the same draws whenever they are asked for again."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pytest

from rdvit.config import LoopSamplingConfig, ModelConfig, TrainingConfig
from rdvit.training.schedule import ema_decay, learning_rate, stage_ends, training_loops


def training(**settings: Any) -> TrainingConfig:
    return TrainingConfig(learning_rate=1e-3, **settings)


def loops_of(
    kind: Literal["fixed", "uniform", "poisson"], steps: int = 4000, depth: int = 6, low: int = 2, high: int = 9, seed: int = 0
) -> np.ndarray:
    """Loops of the first steps, (steps,)."""
    config = training(seed=seed, loop_sampling=LoopSamplingConfig(kind=kind, low=low, high=high))
    return np.array([training_loops(step, ModelConfig(loops=depth), config) for step in range(steps)])


def test_learning_rate_warms_up_along_a_line_and_ends_along_a_cosine() -> None:
    config = training(warmup_share=0.2, final_learning_rate_share=0.1)
    assert learning_rate(0.0, config) == pytest.approx(2e-5)  # never 0: the first step should count
    assert learning_rate(0.1, config) == pytest.approx((2e-5 + 1e-3) / 2)
    assert learning_rate(0.2, config) == pytest.approx(1e-3)
    assert learning_rate(0.6, config) == pytest.approx((1e-3 + 1e-4) / 2)  # half-way down the cosine
    assert learning_rate(1.0, config) == pytest.approx(1e-4)
    assert learning_rate(1.5, config) == pytest.approx(1e-4)  # a clock may overrun


def test_learning_rate_has_one_peak_and_no_jump() -> None:
    config = training(warmup_share=0.04)
    rates = np.array([learning_rate(progress, config) for progress in np.linspace(0, 1, 1001)])
    steps = np.diff(rates)
    assert (steps[:40] > 0).all() and (steps[40:] <= 0).all()
    assert np.abs(steps).max() < 1e-3 / 39
    assert rates.max() == pytest.approx(1e-3)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_learning_rate_without_or_with_nothing_but_warm_up(share: float) -> None:
    config = training(warmup_share=share)
    assert learning_rate(share, config) == pytest.approx(1e-3)


def test_fixed_loops_are_the_depth() -> None:
    assert set(loops_of("fixed", steps=50, depth=5)) == {5}


def test_uniform_loops_take_every_value_alike() -> None:
    values, counts = np.unique(loops_of("uniform"), return_counts=True)
    assert values.tolist() == list(range(2, 10))
    assert counts / 4000 == pytest.approx(np.full(8, 1 / 8), abs=0.02)
    assert set(loops_of("uniform", steps=20, low=4, high=4)) == {4}


def test_poisson_loops_average_to_the_depth_with_a_tail() -> None:
    loops = loops_of("poisson", depth=6)
    assert loops.min() == 1 and loops.max() == 12  # at least one, at most twice the depth
    assert loops.mean() == pytest.approx(6, rel=0.05)
    assert np.median(loops) < loops.mean()
    assert loops.var() > 1.3 * (loops.mean() - 1)  # the log-normal rate makes it wider than a Poisson distribution
    assert set(loops_of("poisson", steps=200, depth=1)) <= {1, 2}


@pytest.mark.parametrize("kind", ["uniform", "poisson"])
def test_loops_depend_on_seed_and_step_alone(kind: Literal["uniform", "poisson"]) -> None:
    loops = loops_of(kind, steps=100)
    assert loops_of(kind, steps=100).tolist() == loops.tolist()
    assert loops_of(kind, steps=100, seed=1).tolist() != loops.tolist()
    config = training(loop_sampling=LoopSamplingConfig(kind=kind))
    backwards = [training_loops(step, ModelConfig(loops=6), config) for step in reversed(range(100))]
    assert backwards[::-1] == loops.tolist()  # a resumed training draws what an uninterrupted one would have drawn


def test_average_starts_short_and_ends_at_its_limit() -> None:
    decays = [ema_decay(updates, 0.995) for updates in range(3000)]
    assert decays[0] == pytest.approx(0.1)
    assert decays[90] == pytest.approx(0.91)
    assert (np.diff(decays) >= 0).all()
    assert decays[-1] == 0.995
    assert ema_decay(1000, 0.0) == 0.0


@pytest.mark.parametrize(
    ("loops", "stages", "ends"),
    [(12, 4, [3, 6, 9, 12]), (12, 1, [12]), (7, 3, [3, 5, 7]), (3, 4, [1, 2, 3]), (2, 4, [1, 2]), (1, 4, [1])],
)
def test_stages_are_even_and_end_with_the_last_loop(loops: int, stages: int, ends: list[int]) -> None:
    assert stage_ends(loops, training(supervision="stagewise", stages=stages)) == ends
    assert stage_ends(loops, training(supervision="final", stages=stages)) == [loops]
