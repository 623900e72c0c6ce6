"""Do experts specialise on structures? Token labels, routing per structure, and what routing tells about structure.

None of these numbers is evidence alone (background is 96 % of an ACDC volume, and neighbouring tokens are alike):
compare with labels shifted within the volume (`np.roll`), with the router at initialisation, over patients and seeds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.special import entr

from rdvit.errors import DataError

MIXED = -1  # label of a token in which no structure has the majority


def token_labels(labels_XYZ: np.ndarray, patch_size: Sequence[int], majority: float = 0.8) -> np.ndarray:
    """Label of every token by the voxels of its patch.

    The volume is padded with background at the far end of each axis to multiples of the patch. A slice (X, Y) with a
    patch of two sizes works alike.

    Args:
        labels_XYZ: Label map.
        patch_size: Voxels per token along each axis.
        majority: Least fraction of a patch's voxels that must agree, above 0.5 so that it is unique.

    Returns:
        (tokens,) int64 in C order of the token grid (X/p, Y/p, Z/p): the last axis runs fastest. `MIXED` (-1) where no
        label reaches the majority.

    Raises:
        DataError: If the patch does not fit the array's dimensions or the majority is not in (0.5, 1].
    """
    if len(patch_size) != labels_XYZ.ndim or min(patch_size) < 1:
        raise DataError(
            f"expected a patch of {labels_XYZ.ndim} positive sizes for labels of shape {labels_XYZ.shape}, "
            f"got {tuple(patch_size)}"
        )
    if not 0.5 < majority <= 1:
        raise DataError(f"expected a majority in (0.5, 1], got {majority}")

    padding = [(0, -size % patch) for size, patch in zip(labels_XYZ.shape, patch_size, strict=True)]
    padded = np.pad(labels_XYZ, padding)
    # (gx, px, gy, py, ...) -> (gx, gy, ..., px, py, ...) -> (tokens, voxels of a patch)
    split = [n for size, patch in zip(padded.shape, patch_size, strict=True) for n in (size // patch, patch)]
    order = [*range(0, len(split), 2), *range(1, len(split), 2)]
    voxels_per_token = int(np.prod(patch_size))
    patches_NV = padded.reshape(split).transpose(order).reshape(-1, voxels_per_token)

    tokens_N = np.full(len(patches_NV), MIXED, dtype=np.int64)
    for value in np.unique(padded):
        agreeing_N = np.count_nonzero(patches_NV == value, axis=1) / voxels_per_token
        tokens_N[agreeing_N >= majority] = value
    return tokens_N


def routing_counts(gates_NE: np.ndarray, token_labels_N: np.ndarray, n_classes: int) -> np.ndarray:
    """Joint counts of structure and expert; each routed token counts once, split over its experts by its gate weights.

    Args:
        gates_NE: Gate weights, 0 for experts a token does not use. A token without routing (an all-zero row, as of a
            halted or padded token) is left out. Rows need not sum to 1: top-1 routing has gates below 1.
        token_labels_N: Class of every token; negative (`MIXED`) is left out.
        n_classes: Number of classes C, background included.

    Returns:
        (C, E) float64; sums to the number of tokens counted.

    Raises:
        DataError: If the lengths differ, a gate is negative or NaN, or a label is not below `n_classes`.
    """
    gates_NE = np.asarray(gates_NE, dtype=np.float64)
    token_labels_N = np.asarray(token_labels_N)
    if gates_NE.ndim != 2 or token_labels_N.shape != gates_NE.shape[:1]:
        raise DataError(
            f"expected gates (tokens, experts) and one label per token, got {gates_NE.shape} and {token_labels_N.shape}"
        )
    if token_labels_N.size and token_labels_N.max() >= n_classes:
        raise DataError(f"expected token labels below {n_classes}, got {token_labels_N.max()}")
    if not (gates_NE >= 0).all():
        raise DataError("expected gate weights >= 0, got a negative weight or NaN")

    total_N = gates_NE.sum(axis=1)
    counted_N = (total_N > 0) & (token_labels_N >= 0)
    shares_NE = gates_NE[counted_N] / total_N[counted_N, None]
    counts_CE = np.zeros((n_classes, gates_NE.shape[1]))
    np.add.at(counts_CE, token_labels_N[counted_N], shares_NE)
    return counts_CE


def usage_by_structure(gates_NE: np.ndarray, token_labels_N: np.ndarray, n_classes: int) -> np.ndarray:
    """Share of each expert in the routing of each structure, Q[e | c].

    Args:
        gates_NE: Gate weights; see `routing_counts`.
        token_labels_N: Class of every token, negative to leave out.
        n_classes: Number of classes C, background included.

    Returns:
        (C, E); rows sum to 1. A class without a routed token has a row of NaN: its usage is unknown, not zero.

    Raises:
        DataError: As `routing_counts`.
    """
    return shares(routing_counts(gates_NE, token_labels_N, n_classes))


def shuffled(token_labels_N: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """The labels of the tokens in random order: a control of as many tokens of each structure, at other places.

    Args:
        token_labels_N: Class of every token; `MIXED` ones stay where they are, so that the same tokens are counted.
        rng: Draws the order.
    """
    mixed_N = token_labels_N < 0
    control_N = token_labels_N.copy()
    control_N[~mixed_N] = rng.permutation(token_labels_N[~mixed_N])
    return control_N


def routing_entropy(usage: np.ndarray) -> np.ndarray:
    """Entropy of the expert shares along the last axis, divided by log E: 0 is one expert, 1 is all alike.

    Args:
        usage: Shares or counts, (..., E).

    Returns:
        (...) in [0, 1]; 0 for a single expert, NaN for a row without routing.
    """
    n_experts = usage.shape[-1]
    entropy = entr(shares(np.asarray(usage, dtype=np.float64))).sum(axis=-1)
    return entropy / np.log(n_experts) if n_experts > 1 else entropy


def normalized_mutual_information(counts_CE: np.ndarray) -> float:
    """I(e; c) / H(c): the fraction of the uncertainty about the structure that knowing the expert removes.

    Estimated from the counts as they are. Few tokens bias it upwards, so compare it with a control of as many tokens.

    Args:
        counts_CE: Joint counts or probabilities, as of `routing_counts` (not the row-normalised usage).

    Returns:
        A value in [0, 1]; NaN if fewer than two classes occur, since there is nothing to know.
    """
    counts_CE = np.asarray(counts_CE, dtype=np.float64)
    if np.count_nonzero(counts_CE.sum(axis=1)) < 2:
        return float("nan")
    joint_CE = counts_CE / counts_CE.sum()
    class_entropy = entr(joint_CE.sum(axis=1)).sum()
    expert_entropy = entr(joint_CE.sum(axis=0)).sum()
    information = class_entropy + expert_entropy - entr(joint_CE).sum()
    return float(np.clip(information / class_entropy, 0, 1))  # rounding may step just outside


def shares(counts: np.ndarray) -> np.ndarray:
    """Rows (last axis) divided by their sums; NaN where a row sums to 0.

    Args:
        counts: Counts, as of `routing_counts`, or their sum over cases.
    """
    total = counts.sum(axis=-1, keepdims=True)
    return np.divide(counts, total, out=np.full_like(counts, np.nan), where=total > 0)
