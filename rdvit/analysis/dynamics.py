"""What the states do from step to step: attention distance, activation statistics, similarity (systems.md sections 8, 15)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rdvit.errors import DataError


def attention_distance(attention_HNN: np.ndarray, grid: Sequence[int], token_size: Sequence[float] | None = None) -> np.ndarray:
    """Mean distance that each head looks: that of queries and keys, weighed by the attention (Dosovitskiy et al. 2021, D.7).

    Args:
        attention_HNN: Attention weights, each row (query) of sum 1; tokens in C order of the grid.
        grid: Token grid.
        token_size: Size of a token per axis, in mm say; distances are in tokens where None.

    Returns:
        (H,) distances, the mean over all queries.

    Raises:
        DataError: If the grid does not hold the tokens, or rows do not sum to 1.
    """
    tokens = attention_HNN.shape[-1]
    if int(np.prod(grid)) != tokens or attention_HNN.ndim != 3:
        raise DataError(f"expected attention (heads, N, N) with N = {int(np.prod(grid))} tokens, found {attention_HNN.shape}")
    if not np.allclose(attention_HNN.sum(-1), 1, atol=1e-3):
        raise DataError(f"expected rows of sum 1, found sums from {attention_HNN.sum(-1).min():.3g}")
    places_ND = np.indices(grid).reshape(len(grid), -1).T * (
        np.ones(len(grid)) if token_size is None else np.asarray(token_size)
    )
    distance_NN = np.linalg.norm(places_ND[:, None] - places_ND[None], axis=-1)
    return (attention_HNN * distance_NN).sum(-1).mean(-1)


def activation_statistics(states_TND: np.ndarray) -> list[dict[str, float]]:
    """One row per step: how large the tokens are, how far and where to they moved, in how many directions they lie.

    Args:
        states_TND: State after each step, tokens of any number of images together.

    Returns:
        Rows with "step" (from 1), "rms" of all entries, "relative_step" |z_t - z_{t-1}| / |z_{t-1}| and "step_cosine" between
        this and the last move (medians over tokens; NaN where there is no step before), and "participation_ratio"
        (sum lambda)^2 / sum lambda^2 of the covariance eigenvalues: 1 of a line, D of white noise.
    """
    states_TND = np.asarray(states_TND, dtype=np.float64)
    moves_TND = np.diff(states_TND, axis=0)
    rows = []
    for t, state_ND in enumerate(states_TND):
        relative = cosine = float("nan")
        if t >= 1:
            relative = float(np.median(_norm(moves_TND[t - 1]) / np.maximum(_norm(states_TND[t - 1]), 1e-12)))
        if t >= 2:
            now, before = moves_TND[t - 1], moves_TND[t - 2]
            cosine = float(np.median((now * before).sum(-1) / np.maximum(_norm(now) * _norm(before), 1e-12)))
        rows.append(
            {
                "step": t + 1,
                "rms": float(np.sqrt((state_ND**2).mean())),
                "relative_step": relative,
                "step_cosine": cosine,
                "participation_ratio": participation_ratio(state_ND),
            }
        )
    return rows


def participation_ratio(x_ND: np.ndarray) -> float:
    """Effective number of dimensions of tokens: (sum lambda)^2 / sum lambda^2 of their covariance."""
    covariance_DD = np.cov(np.asarray(x_ND, dtype=np.float64), rowvar=False)
    return float(np.trace(covariance_DD) ** 2 / np.maximum((covariance_DD**2).sum(), 1e-300))


def linear_cka(x_ND: np.ndarray, y_NE: np.ndarray) -> float:
    """Linear centred kernel alignment of two representations of the same tokens (Kornblith et al. 2019, arXiv:1905.00414).

    1 where one is a rotation and scaling of the other, 0 where they share no linear direction. The widths may differ.

    Raises:
        DataError: If the tokens are not as many.
    """
    if len(x_ND) != len(y_NE):
        raise DataError(f"expected the same tokens twice, found {len(x_ND)} and {len(y_NE)}")
    x, y = (z.astype(np.float64) - z.mean(axis=0, dtype=np.float64) for z in (x_ND, y_NE))
    scale = np.linalg.norm(x.T @ x) * np.linalg.norm(y.T @ y)
    return float(np.linalg.norm(y.T @ x) ** 2 / scale) if scale > 0 else float("nan")


def cka_matrix(first: Sequence[np.ndarray], second: Sequence[np.ndarray]) -> np.ndarray:
    """Linear CKA (T, L) between the steps of one network and the steps or layers of another."""
    return np.array([[linear_cka(x_ND, y_NE) for y_NE in second] for x_ND in first])


def _norm(x_ND: np.ndarray) -> np.ndarray:
    return np.linalg.norm(x_ND, axis=-1)
