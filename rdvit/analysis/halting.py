"""Where and when tokens halt: loops per structure, at boundaries, and over a whole batch.

Three quantities go by the name "ponder" (Graves, arXiv:1603.08983) and they differ: the halting step n, Graves's cost
n + R with the remainder R = w_n, and the expected depth sum_t t * w_t. At a halting probability of 0.5 they are 2, 2.5
and 1.5. `HaltingSummary` gives all three, so that a report can say which one it means.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import ndimage

from rdvit.errors import DataError

# Float16 weights of many loops miss 1 by about this much; anything beyond is mass lost by the read-out.
WEIGHT_SUM_TOLERANCE = 2e-3


@dataclass(frozen=True, eq=False)
class HaltingSummary:
    """What a set of tokens did with T loops.

    Attributes:
        mean_steps: Mean halting step n, in [1, T].
        mean_ponder: Mean of Graves's n + R, in [2, T + 1].
        expected_depth: Mean of sum_t t * w_t, in [1, T].
        mass_per_loop: Mean read-out weight of each loop, (T,); sums to 1.
        steps_fraction: Fraction of tokens that halt at each loop, (T,); sums to 1.
    """

    mean_steps: float
    mean_ponder: float
    expected_depth: float
    mass_per_loop: np.ndarray
    steps_fraction: np.ndarray

    @property
    def fraction_at_one(self) -> float:
        """Fraction of tokens that halt at the first loop, and so send no gradient to the halting head."""
        return float(self.steps_fraction[0])

    @property
    def fraction_at_cap(self) -> float:
        """Fraction of tokens that run all T loops."""
        return float(self.steps_fraction[-1])


def halting_steps(weights: np.ndarray, loop_axis: int = -1) -> np.ndarray:
    """Halting step n of every token: the last loop with a read-out weight above zero.

    With ACT that loop carries the remainder, which is larger than epsilon by construction, so the step can be read off
    the weights. A read-out that weighs all loops (softmax mixture) or takes the last state has n = T everywhere.

    Args:
        weights: Read-out weights, loops along `loop_axis`, any other axes.
        loop_axis: The axis of the loops: -1 for (N, T), 0 for (T, ...).

    Returns:
        Steps in 1..T, the shape of `weights` without the loop axis, int64.

    Raises:
        DataError: If a token's weights do not sum to 1 or one is negative.
    """
    weights_NT = _checked_weights(weights, loop_axis)
    return weights_NT.shape[-1] - (weights_NT[..., ::-1] > 0).argmax(axis=-1)


def halting_summary(weights: np.ndarray, loop_axis: int = -1) -> HaltingSummary:
    """Summary of the read-out weights of many tokens.

    Args:
        weights: Read-out weights over loops, summing to 1 for every token: (N, T), (B, N, T), or (T, ...) with
            `loop_axis=0`.
        loop_axis: The axis of the loops.

    Returns:
        Means over all tokens.

    Raises:
        DataError: If there is no token, a token's weights do not sum to 1, or one is negative.
    """
    weights_NT = _checked_weights(weights, loop_axis)
    n_loops = weights_NT.shape[-1]
    weights_NT = weights_NT.reshape(-1, n_loops)
    steps_N = halting_steps(weights_NT)
    remainder_N = np.take_along_axis(weights_NT, steps_N[:, None] - 1, axis=1)[:, 0]
    mass_per_loop = weights_NT.mean(axis=0)
    return HaltingSummary(
        mean_steps=float(steps_N.mean()),
        mean_ponder=float((steps_N + remainder_N).mean()),
        expected_depth=float(mass_per_loop @ np.arange(1, n_loops + 1)),
        mass_per_loop=mass_per_loop,
        steps_fraction=np.bincount(steps_N - 1, minlength=n_loops) / len(steps_N),
    )


def ponder_by_structure(
    steps: np.ndarray | Sequence[np.ndarray],
    labels: np.ndarray | Sequence[np.ndarray],
    class_names: Mapping[int, str],
) -> dict[str, float]:
    """Mean loops spent on each structure and on the background.

    Of several volumes each counts once: the mean over volumes of the mean over the structure's voxels, since the volume
    (or the patient) is the unit of every test, and a large heart should not weigh more than a small one.

    Args:
        steps: Loops per voxel, (X, Y, Z); one volume or a list.
        labels: Label maps on the same grids.
        class_names: Label value to name, without the background.

    Returns:
        "background" and every name of `class_names`, to mean loops; NaN for a structure that no volume contains.

    Raises:
        DataError: If a map and its labels differ in shape, or the lists in length.
    """
    steps_list = [steps] if isinstance(steps, np.ndarray) else list(steps)
    labels_list = [labels] if isinstance(labels, np.ndarray) else list(labels)
    if len(steps_list) != len(labels_list):
        raise DataError(f"expected one label map per map of loops, got {len(steps_list)} maps, {len(labels_list)} labels")

    ponder = {}
    for value, name in {0: "background", **class_names}.items():
        means = []
        for steps_XYZ, labels_XYZ in zip(steps_list, labels_list, strict=True):
            _check_same_shape(steps_XYZ, labels_XYZ)
            inside_XYZ = labels_XYZ == value
            if inside_XYZ.any():
                means.append(float(steps_XYZ[inside_XYZ].mean(dtype=np.float64)))
        ponder[name] = float(np.mean(means)) if means else float("nan")
    return ponder


def boundary_ponder(steps_XYZ: np.ndarray, labels_XYZ: np.ndarray, width_voxels: int = 2) -> dict[str, float]:
    """Mean loops at the boundaries of the structures, inside them, and in the background.

    More loops at a boundary are no evidence by themselves: boundaries also have strong gradients and lie near the
    centre of the image. Compare pairs per patient, and control for both.

    Args:
        steps_XYZ: Loops per voxel.
        labels_XYZ: Label map on the same grid.
        width_voxels: Half width of the band; see `boundary_band`.

    Returns:
        "boundary": voxels of the band, on either side; "interior": structure voxels outside the band; "background":
        background voxels outside the band. NaN for a region without voxels.

    Raises:
        DataError: If the shapes differ or the width is not positive.
    """
    _check_same_shape(steps_XYZ, labels_XYZ)
    band_XYZ = boundary_band(labels_XYZ, width_voxels)
    regions = {
        "boundary": band_XYZ,
        "interior": ~band_XYZ & (labels_XYZ != 0),
        "background": ~band_XYZ & (labels_XYZ == 0),
    }
    return {
        name: float(steps_XYZ[region].mean(dtype=np.float64)) if region.any() else float("nan")
        for name, region in regions.items()
    }


def boundary_band(labels_XYZ: np.ndarray, width_voxels: int = 2) -> np.ndarray:
    """Voxels with another label within `width_voxels` steps in the slice, on both sides of every boundary.

    Distance is counted in in-plane steps along X and Y (city block). Neighbouring slices do not count: they lie 5 to
    10 mm apart, and a band through them would swallow whole apical structures. The edge of the volume is no boundary.

    Args:
        labels_XYZ: Label map.
        width_voxels: Half width of the band, at least 1.

    Returns:
        (X, Y, Z) bool.

    Raises:
        DataError: If the width is not positive.
    """
    if width_voxels < 1:
        raise DataError(f"expected a boundary band of at least 1 voxel, got {width_voxels}")
    in_plane_cross = ndimage.generate_binary_structure(2, 1)[:, :, None]
    band_XYZ = np.zeros(labels_XYZ.shape, dtype=bool)
    for value in np.unique(labels_XYZ):
        inside_XYZ = labels_XYZ == value
        core_XYZ = ndimage.binary_erosion(inside_XYZ, in_plane_cross, iterations=width_voxels, border_value=1)
        band_XYZ |= inside_XYZ & ~core_XYZ
    return band_XYZ


def _checked_weights(weights: np.ndarray, loop_axis: int) -> np.ndarray:
    """The weights in float64 with the loops last, or an error that says how far off they are."""
    weights_NT = np.moveaxis(np.asarray(weights, dtype=np.float64), loop_axis, -1)
    if weights_NT.size == 0:
        raise DataError(f"expected read-out weights of at least one token and one loop, got shape {np.shape(weights)}")
    worst = float(np.abs(weights_NT.sum(axis=-1) - 1).max())
    # Written so that NaN fails too.
    if not (worst <= WEIGHT_SUM_TOLERANCE and weights_NT.min() >= 0):
        raise DataError(
            f"expected read-out weights >= 0 that sum to 1 for every token, got a sum off by {worst:.3g} "
            f"and a smallest weight of {weights_NT.min():.3g}",
            hint=f"is axis {loop_axis} of shape {np.shape(weights)} the loops?",
        )
    return weights_NT


def _check_same_shape(steps_XYZ: np.ndarray, labels_XYZ: np.ndarray) -> None:
    if steps_XYZ.shape != labels_XYZ.shape or steps_XYZ.ndim != 3:
        raise DataError(
            f"expected a map of loops and labels of one shape (X, Y, Z), got {steps_XYZ.shape} and {labels_XYZ.shape}"
        )
