"""Clinical measures of the heart from label maps: volumes, ejection fraction, myocardial mass, and their agreement.

Structures are found by name, never by label value: ACDC has RV = 1 and LV = 3, other data sets the reverse.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from rdvit.evaluation.metrics import voxel_volume_ml

MYOCARDIAL_DENSITY_G_PER_ML = 1.05  # Bernard et al., IEEE TMI 37(11), 2018


def structure_volumes_ml(labels_XYZ: np.ndarray, spacing: Sequence[float], class_names: Mapping[int, str]) -> dict[str, float]:
    """Volume of every structure: the count of its voxels (never the sum of label values) times the voxel volume.

    Args:
        labels_XYZ: Label values, (X, Y, Z).
        spacing: True voxel size in mm. ACDC's stored affine says 1 x 1 x 1 mm and is wrong (24-fold for patient001).
        class_names: Label value to structure name, without the background.

    Returns:
        Structure name to volume in mL; 0 where a structure is absent.

    Raises:
        DataError: The spacing is not three positive numbers.
    """
    voxel_ml = voxel_volume_ml(spacing)
    return {name: int(np.count_nonzero(labels_XYZ == value)) * voxel_ml for value, name in class_names.items()}


def ejection_fraction(edv: float, esv: float) -> float:
    """Ejection fraction 100 (EDV - ESV) / EDV.

    Args:
        edv: End-diastolic volume in mL.
        esv: End-systolic volume in mL.

    Returns:
        The ejection fraction in %; NaN if the end-diastolic volume is 0. Negative if the phases are swapped.
    """
    return 100.0 * (edv - esv) / edv if edv != 0 else float("nan")


def cardiac_measures(ed_volumes: Mapping[str, float], es_volumes: Mapping[str, float]) -> dict[str, float]:
    """Measures of one patient from the structure volumes at end-diastole (ED) and end-systole (ES).

    Args:
        ed_volumes: Structure name to volume in mL at ED.
        es_volumes: Structure name to volume in mL at ES.

    Returns:
        For "LV" and "RV", each where both phases name it: `LV_EDV_ml`, `LV_ESV_ml`, `LV_SV_ml` (stroke volume) and
        `LV_EF_percent`, and the same for RV; where ED names "MYO", `LV_mass_g`, its volume at ED x 1.05 g/mL.
    """
    measures: dict[str, float] = {}
    for ventricle in ("LV", "RV"):
        if ventricle in ed_volumes and ventricle in es_volumes:
            edv, esv = ed_volumes[ventricle], es_volumes[ventricle]
            measures[f"{ventricle}_EDV_ml"] = edv
            measures[f"{ventricle}_ESV_ml"] = esv
            measures[f"{ventricle}_SV_ml"] = edv - esv
            measures[f"{ventricle}_EF_percent"] = ejection_fraction(edv, esv)
    if "MYO" in ed_volumes:
        measures["LV_mass_g"] = ed_volumes["MYO"] * MYOCARDIAL_DENSITY_G_PER_ML
    return measures


def cine_measures(volumes_T: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Measures of one patient from the structure volumes of all frames of a cine.

    Args:
        volumes_T: For each frame, structure name to volume in mL.

    Returns:
        `ED_frame` and `ES_frame`, counted from 1: where the LV (the RV where there is no LV) is largest and smallest; and
        what `cardiac_measures` makes of those two. Empty where neither ventricle is named.
    """
    ventricle = next((name for name in ("LV", "RV") if volumes_T and name in volumes_T[0]), None)
    if ventricle is None:
        return {}
    curve = [volumes[ventricle] for volumes in volumes_T]
    ed, es = int(np.argmax(curve)), int(np.argmin(curve))
    return {"ED_frame": ed + 1, "ES_frame": es + 1, **cardiac_measures(volumes_T[ed], volumes_T[es])}


def agreement(predicted: Sequence[float], reference: Sequence[float]) -> dict[str, float]:
    """Agreement of predicted and reference measures, one pair per patient (Bland and Altman, Lancet 1986).

    Args:
        predicted: Values from the predictions; a pair with a NaN on either side is left out.
        reference: Values from the references, in the same order and unit.

    Returns:
        `n` pairs used, `mean_absolute_error`, `bias` (mean of predicted - reference), `sd` of the differences
        (n - 1 in the denominator), the limits of agreement `loa_low` and `loa_high` (bias -/+ 1.96 sd) and
        `pearson_r`. NaN where it is undefined: no pair; for the sd fewer than 2; for the correlation fewer than 3
        (two points always correlate perfectly) or a constant side.
    """
    pairs = np.array([predicted, reference], dtype=float).reshape(2, -1)
    pred, ref = pairs[:, np.isfinite(pairs).all(axis=0)]
    n, difference = pred.size, pred - ref
    bias = float(difference.mean()) if n else np.nan
    sd = float(difference.std(ddof=1)) if n > 1 else np.nan
    correlates = n > 2 and np.ptp(pred) > 0 and np.ptp(ref) > 0
    return {
        "n": n,
        "mean_absolute_error": float(np.abs(difference).mean()) if n else np.nan,
        "bias": bias,
        "sd": sd,
        "loa_low": bias - 1.96 * sd,
        "loa_high": bias + 1.96 * sd,
        "pearson_r": float(np.corrcoef(pred, ref)[0, 1]) if correlates else np.nan,
    }
