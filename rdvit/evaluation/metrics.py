"""Overlap and surface distance of one prediction and its reference, on the native grid and in millimetres.

Definitions follow MONAI's (`compute_dice`, `compute_hausdorff_distance`, `compute_average_surface_distance`); what
happens where a structure is empty is written once, in `EMPTY_RULE`, and travels with every summary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import SupportsInt

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from rdvit.errors import DataError

EMPTY_RULE = (
    "Dice and IoU are NaN where prediction and reference are both empty (the case leaves the mean of that structure; "
    "n tells how many cases stayed) and 0 where only one of them is; "
    "HD95, HD and ASSD are NaN where both are empty, and the diagonal of the volume in mm where only one is: no prediction "
    "lies farther off, so a structure that was missed never makes a mean better (n_missed tells how many cases these are)."
)

METRIC_NAMES = (
    *("Dice", "IoU", "HD95", "HD", "ASSD"),
    *("TP", "FP", "FN", "TN", "n_pred", "n_ref"),
    *("volume_ml", "volume_ref_ml"),
)

Mask = NDArray[np.bool_]


def dice(pred: np.ndarray, ref: np.ndarray) -> float:
    """Dice coefficient 2 |P and R| / (|P| + |R|) of two masks.

    Args:
        pred: Mask of any shape; every value but 0 lies inside.
        ref: Mask of the same shape.

    Returns:
        A value in [0, 1]; NaN if both are empty (`EMPTY_RULE`).

    Raises:
        DataError: The shapes differ.
    """
    pred, ref = _as_masks(pred, ref)
    return _ratio(2 * np.count_nonzero(pred & ref), np.count_nonzero(pred) + np.count_nonzero(ref))


def iou(pred: np.ndarray, ref: np.ndarray) -> float:
    """Intersection over union (Jaccard index) |P and R| / |P or R| of two masks.

    Args:
        pred: Mask of any shape; every value but 0 lies inside.
        ref: Mask of the same shape.

    Returns:
        A value in [0, 1]; NaN if both are empty (`EMPTY_RULE`).

    Raises:
        DataError: The shapes differ.
    """
    pred, ref = _as_masks(pred, ref)
    return _ratio(np.count_nonzero(pred & ref), np.count_nonzero(pred | ref))


def surface_distances(
    pred: np.ndarray, ref: np.ndarray, spacing: Sequence[float]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Distance of every surface voxel to the nearest surface voxel of the other mask.

    A surface voxel has a face neighbour outside the mask; the outside of the array counts as outside, except along an
    axis of length 1, so that a single slice has a contour and not two lids.

    Args:
        pred: Mask, (X, Y, Z) or (X, Y); every value but 0 lies inside.
        ref: Mask of the same shape.
        spacing: Voxel size per axis in mm. Mandatory: a distance in voxels means nothing where slices are 10 mm apart.

    Returns:
        The distances in mm from the surface of `pred` to that of `ref`, and from `ref` to `pred`; both arrays have no
        element if either mask is empty.

    Raises:
        DataError: The shapes differ, or the spacing does not fit them.
    """
    pred, ref = _as_masks(pred, ref)
    sampling = check_spacing(spacing, axes=pred.ndim)
    if not pred.any() or not ref.any():
        return np.empty(0), np.empty(0)
    axis_has_faces = tuple(slice(None) if length > 1 else slice(1, 2) for length in pred.shape)
    faces = ndimage.generate_binary_structure(pred.ndim, 1)[axis_has_faces]
    # Outside the joint box both masks are empty, so neither surface nor distance changes by the crop.
    box = ndimage.find_objects((pred | ref).astype(np.uint8))[0]
    surface_pred, surface_ref = (m[box] & ~ndimage.binary_erosion(m[box], faces) for m in (pred, ref))
    return _distances(surface_pred, surface_ref, sampling), _distances(surface_ref, surface_pred, sampling)


def surface_metrics(pred: np.ndarray, ref: np.ndarray, spacing: Sequence[float]) -> dict[str, float]:
    """Hausdorff distance, its robust form and the average surface distance of two masks.

    Args:
        pred: Mask, (X, Y, Z) or (X, Y); every value but 0 lies inside.
        ref: Mask of the same shape.
        spacing: Voxel size per axis in mm.

    Returns:
        In mm; NaN if both masks are empty, the diagonal of the array if one is (`EMPTY_RULE`):
        "HD95", the larger of the two directed 95th percentiles
        (linear interpolation, as MONAI's `compute_hausdorff_distance(percentile=95)`); "HD", the largest distance;
        "ASSD", the mean over the surface voxels of both masks pooled, so the larger surface weighs more.

    Raises:
        DataError: The shapes differ, or the spacing does not fit them.
    """
    to_ref, to_pred = surface_distances(pred, ref, spacing)
    if to_ref.size == 0:
        worst = diagonal_mm(pred.shape, spacing) if np.any(pred) or np.any(ref) else np.nan
        return {"HD95": worst, "HD": worst, "ASSD": worst}
    return {
        "HD95": float(max(np.percentile(to_ref, 95), np.percentile(to_pred, 95))),
        "HD": float(max(to_ref.max(), to_pred.max())),
        "ASSD": float(np.concatenate([to_ref, to_pred]).mean()),
    }


def case_metrics(
    pred_XYZ: np.ndarray, ref_XYZ: np.ndarray, spacing: Sequence[float], class_names: Mapping[int, str]
) -> dict[str, dict[str, float]]:
    """Score one predicted label map against its reference, structure by structure, over the whole volume.

    Args:
        pred_XYZ: Predicted label values, (X, Y, Z).
        ref_XYZ: Reference label values, (X, Y, Z), on the same grid.
        spacing: True voxel size per axis in mm.
        class_names: Label value to structure name, without the background.

    Returns:
        Per structure name the values of `METRIC_NAMES`: ratios in [0, 1], distances in mm, voxel counts, mL.

    Raises:
        DataError: The shapes differ or are not 3D, the spacing does not fit, or the background is among the classes.
    """
    if pred_XYZ.ndim != 3 or pred_XYZ.shape != ref_XYZ.shape:
        raise DataError(
            f"expected two label maps of one shape (X, Y, Z), got prediction {pred_XYZ.shape} and reference {ref_XYZ.shape}",
            hint="write the prediction back onto the grid of its image first",
        )
    if 0 in class_names:
        raise DataError(f"label 0 is the background and no structure, got it as {class_names[0]!r}")
    voxel_ml = voxel_volume_ml(spacing)
    scores: dict[str, dict[str, float]] = {}
    for value, name in class_names.items():
        pred, ref = pred_XYZ == value, ref_XYZ == value
        n_pred, n_ref = int(np.count_nonzero(pred)), int(np.count_nonzero(ref))
        tp = int(np.count_nonzero(pred & ref))
        scores[name] = {
            "Dice": dice(pred, ref),
            "IoU": iou(pred, ref),
            **surface_metrics(pred, ref, spacing),
            "TP": tp,
            "FP": n_pred - tp,
            "FN": n_ref - tp,
            "TN": ref.size - n_pred - n_ref + tp,
            "n_pred": n_pred,
            "n_ref": n_ref,
            "volume_ml": n_pred * voxel_ml,
            "volume_ref_ml": n_ref * voxel_ml,
        }
    return scores


def missing_prediction_metrics(
    ref_XYZ: np.ndarray, spacing: Sequence[float], class_names: Mapping[int, str]
) -> dict[str, dict[str, float]]:
    """Score a case without a usable prediction as if the prediction were empty.

    Args:
        ref_XYZ: Reference label values, (X, Y, Z).
        spacing: True voxel size per axis in mm.
        class_names: Label value to structure name, without the background.

    Returns:
        As `case_metrics`: Dice and IoU are 0 and distances the volume's diagonal for every structure that the reference
        holds, and NaN for the others. `volume_ml` is NaN: nothing was measured, so no ejection fraction may come of it.

    Raises:
        DataError: As `case_metrics`.
    """
    scores = case_metrics(np.zeros_like(ref_XYZ), ref_XYZ, spacing, class_names)
    return {name: {**values, "volume_ml": np.nan} for name, values in scores.items()}


def diagonal_mm(shape: Sequence[int], spacing: Sequence[float]) -> float:
    """Distance between the two farthest voxels of a grid in mm; no distance between two masks on it is larger.

    Args:
        shape: Number of voxels per axis.
        spacing: Voxel size per axis in mm.

    Raises:
        DataError: The spacing does not fit the axes.
    """
    sizes = check_spacing(spacing, axes=len(shape))
    return float(np.linalg.norm([(count - 1) * size for count, size in zip(shape, sizes, strict=True)]))


def voxel_volume_ml(spacing: Sequence[float]) -> float:
    """Volume of one voxel in mL (1 mL = 1000 mm³).

    Args:
        spacing: Voxel size along X, Y and Z in mm.

    Raises:
        DataError: Not three positive, finite numbers.
    """
    return float(np.prod(check_spacing(spacing, axes=3))) / 1000.0


def check_spacing(spacing: Sequence[float], axes: int) -> tuple[float, ...]:
    """Return the voxel size as floats if it fits.

    Args:
        spacing: Voxel size per axis in mm.
        axes: How many axes the array has.

    Raises:
        DataError: Another number of values, or one that is not positive and finite.
    """
    sizes = tuple(float(size) for size in spacing)
    if len(sizes) != axes or not all(np.isfinite(size) and size > 0 for size in sizes):
        raise DataError(f"expected a spacing of {axes} positive numbers in mm, got {sizes}")
    return sizes


def _as_masks(pred: np.ndarray, ref: np.ndarray) -> tuple[Mask, Mask]:
    if pred.shape != ref.shape:
        raise DataError(f"expected two masks of one shape, got prediction {pred.shape} and reference {ref.shape}")
    return pred.astype(bool, copy=False), ref.astype(bool, copy=False)


def _distances(start: Mask, end: Mask, sampling: Sequence[float]) -> NDArray[np.float64]:
    """Distance of every point of `start` to the nearest of `end`, in the order of `np.nonzero`.

    The transform gives the nearest points only, 4 bytes per voxel and axis; its distances of all voxels would take three
    times that more, and most voxels lie on no surface.
    """
    nearest = ndimage.distance_transform_edt(~end, sampling=sampling, return_distances=False, return_indices=True)
    squared = np.zeros(np.count_nonzero(start))
    for axis, here in enumerate(np.indices(start.shape, nearest.dtype, sparse=True)):
        nearest[axis] -= here  # now the way there, in voxels
        squared += np.square(nearest[axis][start] * sampling[axis])
    return np.sqrt(squared, out=squared)


def _ratio(part: SupportsInt, whole: SupportsInt) -> float:
    return int(part) / int(whole) if int(whole) else float("nan")
