"""The summary of a data set: nnU-Net's three keys, so that its users can diff, and the conventions beside them.

`summarize` takes one `CaseResult` per REFERENCE; a reference without a prediction is a failure that counts, never a
case that silently drops out.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rdvit.errors import DataError
from rdvit.evaluation.cardiac import agreement, cardiac_measures
from rdvit.evaluation.metrics import EMPTY_RULE, METRIC_NAMES

CONVENTIONS = {
    "empty_structures": EMPTY_RULE,
    "missing_predictions": (
        "Scored as an empty prediction: Dice and IoU 0 and distances the volume's diagonal for every structure in "
        "the reference, volume_ml NaN; listed under failures. A case whose reference cannot be read is listed and in no mean."
    ),
    "Dice": "2 TP / (2 TP + FP + FN) over the voxels of the whole volume, per structure, never with the background.",
    "IoU": "TP / (TP + FP + FN), over the same voxels.",
    "HD95": "mm; the larger of the two directed 95th percentiles of the surface distances (as MONAI), native grid.",
    "HD": "mm; the largest surface distance in either direction, native grid.",
    "ASSD": "mm; mean over the surface voxels of both masks pooled, native grid.",
    "volume_ml": "Voxel count x voxel volume, mm^3 / 1000.",
    "mean": "Mean per structure over the cases where the metric is defined.",
    "foreground_mean": "Mean over the structures' means; a structure without any defined case is left out.",
    "cardiac": (
        "EF = 100 (EDV - ESV) / EDV; LV mass = MYO volume at ED x 1.05 g/mL; bias = mean of predicted - reference, "
        "sd with n - 1, limits of agreement = bias -/+ 1.96 sd; patients without both predictions are left out."
    ),
}


@dataclass(frozen=True)
class CaseResult:
    """The scores of one reference.

    Attributes:
        case: Id of the case.
        patient: Id of the patient; the ED and ES cases of one patient are paired by it.
        phase: "ED", "ES", or None where the phase is unknown.
        metrics: From `case_metrics`; of a failed case from `missing_prediction_metrics`, or empty if its reference
            cannot be read either.
        failed: Why there is no usable prediction; None if there is one.
        prediction_file: Where the prediction was read from.
        reference_file: Where the reference was read from.
        loops: Loops that the network took, mean over slices or windows; None where the prediction was read, or failed.
        seconds: What the prediction took, if it was not read.
    """

    case: str
    patient: str
    phase: str | None = None
    metrics: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failed: str | None = None
    prediction_file: str | None = None
    reference_file: str | None = None
    loops: float | None = None
    seconds: float | None = None


def summarize(results: Sequence[CaseResult], class_names: Mapping[int, str]) -> dict[str, Any]:
    """Summarise the scores of a data set.

    Args:
        results: One per reference, failures included.
        class_names: Label value to structure name, without the background.

    Returns:
        nnU-Net's `metric_per_case`, `mean` (per class) and `foreground_mean`; per class `n` (cases in its means) and
        `n_missed` (those of them where prediction or reference, not both, are empty);
        `failures`, `class_names`, `conventions`; and `cardiac` where a
        patient has both an ED and an ES case. Classes are label values as strings. Numbers may be NaN: write the
        file through `to_json`.

    Raises:
        DataError: No result at all, or two results for one phase of one patient.
    """
    if not results:
        raise DataError("expected at least one case to summarise, got none")
    per_case = [_case_entry(result, class_names) for result in results]
    classes = [str(value) for value in class_names]
    mean = {c: {m: _mean(_column(per_case, c, m)) for m in METRIC_NAMES} for c in classes}
    summary: dict[str, Any] = {
        "metric_per_case": per_case,
        "mean": mean,
        "foreground_mean": {m: _mean(mean[c][m] for c in classes) for m in METRIC_NAMES},
        "n": {c: _defined(_column(per_case, c, "Dice")).size for c in classes},
        "n_missed": {c: sum(_is_missed(entry["metrics"].get(c)) for entry in per_case) for c in classes},
        "failures": [{"case": result.case, "reason": result.failed} for result in results if result.failed is not None],
        "class_names": {str(value): name for value, name in class_names.items()},
        "conventions": CONVENTIONS,
    }
    cardiac = _compare_patients(results)
    return {**summary, "cardiac": cardiac} if cardiac else summary


def to_json(summary: Mapping[str, Any]) -> str:
    """Turn a summary into JSON that every reader takes: NaN and infinity, which JSON lacks, become null.

    Args:
        summary: Nested mappings and sequences of plain or numpy values.

    Returns:
        JSON text, indented, ASCII only.
    """
    return json.dumps(_json_safe(summary), indent=2, allow_nan=False)


def dice_table(summary: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The rows of a result table, one per structure and a last one, "mean", over the structures.

    Args:
        summary: From `summarize`, or read back from its JSON.

    Returns:
        Rows with `structure`, `n`, `Dice`, `Dice_sd`, `n_missed`, `HD95`, `HD95_sd`, `ASSD`, `ASSD_sd` (mm; sd over
        cases with n - 1 in the denominator). NaN where a value is undefined, as are the sd of the last row; its `n`
        counts the cases, its `n_missed` adds up the structures'.
    """
    rows: list[dict[str, Any]] = []
    for label, name in summary["class_names"].items():
        row = {"structure": name, "n": summary["n"][label], "n_missed": summary["n_missed"][label]}
        for metric in ("Dice", "HD95", "ASSD"):
            values = _defined(_column(summary["metric_per_case"], label, metric))
            row[metric] = _mean(values)
            row[f"{metric}_sd"] = float(values.std(ddof=1)) if values.size > 1 else math.nan
        rows.append(row)
    n_cases = len(summary["metric_per_case"])
    last: dict[str, Any] = {"structure": "mean", "n": n_cases, "n_missed": sum(summary["n_missed"].values())}
    for metric in ("Dice", "HD95", "ASSD"):
        last[metric] = _mean([summary["foreground_mean"][metric]])
        last[f"{metric}_sd"] = math.nan
    return [*rows, last]


def _case_entry(result: CaseResult, class_names: Mapping[int, str]) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "case": result.case,
        "patient": result.patient,
        "phase": result.phase,
        "prediction_file": result.prediction_file,
        "reference_file": result.reference_file,
        "metrics": {str(value): dict(result.metrics[name]) for value, name in class_names.items() if name in result.metrics},
    }
    return entry if result.failed is None else {**entry, "failed": result.failed}


def _compare_patients(results: Sequence[CaseResult]) -> dict[str, Any] | None:
    """Predicted against reference measures of every patient that has an ED and an ES case; None without any."""
    phases: dict[str, dict[str, CaseResult]] = {}
    for result in results:
        if result.phase in ("ED", "ES"):
            of_patient = phases.setdefault(result.patient, {})
            if result.phase in of_patient:
                raise DataError(
                    f"expected one {result.phase} case per patient, got {of_patient[result.phase].case!r} and "
                    f"{result.case!r} of {result.patient!r}"
                )
            of_patient[result.phase] = result

    patients = []
    for patient, cases in phases.items():
        if len(cases) == 2:
            predicted, reference = (
                cardiac_measures(*(_volumes(cases[phase], key) for phase in ("ED", "ES")))
                for key in ("volume_ml", "volume_ref_ml")
            )
            if reference:
                patients.append({"patient": patient, "prediction": predicted, "reference": reference})
    if not patients:
        return None
    names = dict.fromkeys(name for patient in patients for name in patient["reference"])
    return {
        "patients": patients,
        "agreement": {name: agreement(*_pairs(patients, name)) for name in names},
    }


def _volumes(result: CaseResult, key: str) -> dict[str, float]:
    return {name: values[key] for name, values in result.metrics.items()}


def _pairs(patients: Sequence[Mapping[str, Any]], name: str) -> tuple[list[float], list[float]]:
    """Predicted and reference values of one measure, one element per patient."""
    return (
        [patient["prediction"].get(name, math.nan) for patient in patients],
        [patient["reference"].get(name, math.nan) for patient in patients],
    )


def _is_missed(metrics: Mapping[str, float] | None) -> bool:
    return metrics is not None and (metrics["n_pred"] == 0) != (metrics["n_ref"] == 0)


def _column(per_case: Iterable[Mapping[str, Any]], label: str, metric: str) -> list[float | None]:
    """One metric of one class over the cases; a case without that class has none."""
    return [entry["metrics"].get(label, {}).get(metric) for entry in per_case]


def _defined(values: Iterable[float | None]) -> np.ndarray:
    """The numbers among the values: None (NaN after a round trip through JSON) and NaN are left out."""
    numbers = np.array([math.nan if value is None else value for value in values], dtype=float)
    return numbers[~np.isnan(numbers)]


def _mean(values: Iterable[float | None]) -> float:
    numbers = _defined(values)
    return float(numbers.mean()) if numbers.size else math.nan


def _json_safe(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_json_safe(item) for item in value]
    if isinstance(value, np.ndarray | np.generic):
        return _json_safe(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
