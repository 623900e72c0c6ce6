"""Confidence intervals over patients: the bootstrap, for any statistic of whatever each patient has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from rdvit.errors import DataError


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its confidence interval; NaN ends where there are too few patients for one."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4f} ({self.low:.4f} to {self.high:.4f})"


def mean(patients_P: np.ndarray) -> float:
    """Mean over the patients."""
    return float(np.mean(patients_P))


def ratio_of_means(patients_P2: np.ndarray) -> float:
    """Mean of the first column over the mean of the second.

    Unlike the mean of the patients' own ratios it does not hang on the patient whose denominator is nearest to 0.
    """
    first, second = np.mean(patients_P2, axis=0)
    return float(first / second)


def bootstrap(
    patients: np.ndarray,
    statistic: Callable[[np.ndarray], float] = mean,
    confidence: float = 0.95,
    samples: int = 2000,
    seed: int = 0,
) -> Interval:
    """Percentile bootstrap over patients, who are the unit of every test: voxels, tokens and phases of one are alike.

    Paired differences come of it where the statistic is that of differences, or of the columns of one patient.

    Args:
        patients: What each patient has, along the first axis: (P,), or (P, ...) where the statistic takes that.
        statistic: From such an array, of patients drawn with replacement, to a number.
        confidence: Share of the draws inside the interval.
        samples: Number of draws.
        seed: Of the draws.

    Returns:
        The statistic of the patients as they are, and its interval.

    Raises:
        DataError: Without a patient, or with a value that is not finite: who has no value must be left out knowingly.
    """
    patients = np.asarray(patients, dtype=np.float64)
    if len(patients) == 0 or not np.isfinite(patients).all():
        bad = int(np.sum(~np.isfinite(patients)))
        raise DataError(
            f"expected finite values of at least one patient, got {len(patients)} patients, {bad} values not finite"
        )
    value = statistic(patients)
    if len(patients) < 2:
        return Interval(value, float("nan"), float("nan"))
    drawn = np.random.default_rng(seed).integers(len(patients), size=(samples, len(patients)))
    tail = 50 * (1 - confidence)
    low, high = np.percentile([statistic(patients[rows]) for rows in drawn], [tail, 100 - tail])
    return Interval(value, float(low), float(high))
