"""What changes over the steps of a training: the learning rate and the number of loops."""

from __future__ import annotations

import math

import numpy as np

from rdvit.config import ModelConfig, TrainingConfig


def learning_rate(progress: float, config: TrainingConfig) -> float:
    """Linear warm-up, then cosine to ``final_learning_rate_share``, over ``progress`` from 0 to 1."""
    if progress < config.warmup_share:
        return config.learning_rate * (0.02 + 0.98 * progress / config.warmup_share)
    along = min((progress - config.warmup_share) / max(1 - config.warmup_share, 1e-9), 1.0)
    floor = config.final_learning_rate_share
    return config.learning_rate * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * along)))


def training_loops(step: int, model: ModelConfig, config: TrainingConfig) -> int:
    """Loops of an optimiser step, the same on every process and after a resume.

    ``fixed`` is the model's depth. ``uniform`` draws from ``low..high``. ``poisson`` is Huginn's log-normal Poisson
    (Geiping et al. 2025, arXiv:2502.05171; sigma 0.5) plus one, clipped to twice the depth.
    """
    sampling = config.loop_sampling
    if sampling.kind == "fixed":
        return model.loops
    rng = np.random.default_rng([config.seed, step, 2])
    if sampling.kind == "uniform":
        return int(rng.integers(sampling.low, sampling.high + 1))
    sigma = 0.5
    mean = max(model.loops - 1, 1e-3)
    rate = rng.lognormal(math.log(mean) - sigma**2 / 2, sigma)
    return int(min(1 + rng.poisson(rate), 2 * model.loops))


def stage_ends(loops: int, config: TrainingConfig) -> list[int]:
    """The loops after which a training step is supervised: the last alone, or the ends of ``stages`` even stages.

    Of fewer loops than stages each is a stage (deep supervision of arXiv:2608.04879).
    """
    stages = config.stages if config.supervision == "stagewise" else 1
    return sorted({-(-loops * stage // stages) for stage in range(1, stages + 1)})


def ema_decay(updates: int, limit: float) -> float:
    """Decay of the weight average after some updates: short memory at first, up to ``limit``."""
    return min(limit, (1 + updates) / (10 + updates))
