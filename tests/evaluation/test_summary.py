"""The summary: nnU-Net's keys, counted failures, honest n, and JSON that every reader takes."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pytest

from rdvit.errors import DataError
from rdvit.evaluation.metrics import EMPTY_RULE, case_metrics, diagonal_mm, missing_prediction_metrics
from rdvit.evaluation.summary import CaseResult, dice_table, summarize, to_json

NAMES = {1: "RV", 2: "MYO", 3: "LV"}
SPACING = (1.0, 1.0, 10.0)


def heart(lv: int, rv: int = 20, myo: int = 30) -> np.ndarray:
    """A label map with known voxel counts per structure."""
    flat = np.zeros(10 * 10 * 4, dtype=np.uint8)
    for value, (start, count) in {1: (0, rv), 2: (100, myo), 3: (200, lv)}.items():
        flat[start : start + count] = value
    return flat.reshape(10, 10, 4)


def scored(case: str, pred: np.ndarray, ref: np.ndarray, phase: str | None = None) -> CaseResult:
    metrics = case_metrics(pred, ref, SPACING, NAMES)
    return CaseResult(case, case[:2], phase, metrics, None, f"{case}_pred.nii.gz", f"{case}_ref.nii.gz")


def missing(case: str, ref: np.ndarray, phase: str | None = None) -> CaseResult:
    metrics = missing_prediction_metrics(ref, SPACING, NAMES)
    return CaseResult(case, case[:2], phase, metrics, "no prediction", None, f"{case}_ref.nii.gz")


def test_nnunet_keys_and_the_two_step_mean() -> None:
    summary = summarize([scored("a", heart(40), heart(40)), scored("b", heart(40), heart(80))], NAMES)
    lv_dice = (1.0 + 2 * 40 / 120) / 2
    assert summary["mean"]["3"]["Dice"] == pytest.approx(lv_dice)
    assert summary["mean"]["1"]["Dice"] == 1.0
    assert summary["foreground_mean"]["Dice"] == pytest.approx((1.0 + 1.0 + lv_dice) / 3)
    first = summary["metric_per_case"][0]
    assert (first["case"], first["prediction_file"], first["reference_file"]) == ("a", "a_pred.nii.gz", "a_ref.nii.gz")
    assert set(first["metrics"]) == {"1", "2", "3"} and "failed" not in first
    assert summary["class_names"] == {"1": "RV", "2": "MYO", "3": "LV"}
    assert summary["conventions"]["empty_structures"] == EMPTY_RULE
    assert summary["failures"] == [] and "cardiac" not in summary


def test_structure_absent_in_one_case_leaves_its_mean_and_n() -> None:
    absent = heart(40, rv=0)
    summary = summarize([scored("a", heart(40), heart(40)), scored("b", absent, absent)], NAMES)
    assert summary["n"] == {"1": 1, "2": 2, "3": 2}
    assert summary["mean"]["1"]["Dice"] == 1.0


def test_structure_absent_everywhere_is_undefined_and_not_zero() -> None:
    absent = heart(40, rv=0)
    summary = summarize([scored("a", absent, absent)], NAMES)
    assert math.isnan(summary["mean"]["1"]["Dice"]) and summary["n"]["1"] == 0
    assert summary["foreground_mean"]["Dice"] == 1.0


def test_missing_prediction_counts_as_zero_and_is_listed() -> None:
    summary = summarize([scored("a", heart(40), heart(40)), missing("b", heart(40, rv=0))], NAMES)
    assert summary["mean"]["3"]["Dice"] == 0.5 and summary["n"]["3"] == 2
    assert summary["mean"]["1"]["Dice"] == 1.0 and summary["n"]["1"] == 1  # b's reference has no RV
    diagonal = diagonal_mm((10, 10, 4), SPACING)
    assert summary["mean"]["3"]["HD95"] == diagonal / 2 and summary["n_missed"] == {"1": 0, "2": 1, "3": 1}
    assert summary["failures"] == [{"case": "b", "reason": "no prediction"}]
    assert summary["metric_per_case"][1]["failed"] == "no prediction"


def test_unreadable_reference_is_listed_and_in_no_mean() -> None:
    broken = CaseResult("b", "b", failed="reference is corrupt")
    summary = summarize([scored("a", heart(40), heart(40)), broken], NAMES)
    assert summary["n"]["3"] == 1 and summary["mean"]["3"]["Dice"] == 1.0
    assert summary["failures"] == [{"case": "b", "reason": "reference is corrupt"}]
    assert len(summary["metric_per_case"]) == 2


def patients() -> list[CaseResult]:
    results = []
    for patient, (pred_es, ref_es) in {"p1": (40, 30), "p2": (35, 35), "p3": (50, 30), "p4": (20, 20)}.items():
        results.append(scored(f"{patient}_ED", heart(80), heart(100), "ED"))
        results.append(scored(f"{patient}_ES", heart(pred_es), heart(ref_es), "ES"))
    return results


def test_cardiac_compares_each_patient() -> None:
    cardiac = summarize(patients(), NAMES)["cardiac"]
    first = cardiac["patients"][0]
    assert first["patient"] == "p1"
    assert first["reference"]["LV_EDV_ml"] == pytest.approx(1.0)  # 100 voxels of 10 mm³
    assert first["prediction"]["LV_EF_percent"] == pytest.approx(50.0)
    assert first["reference"]["LV_EF_percent"] == pytest.approx(70.0)
    assert first["reference"]["LV_mass_g"] == pytest.approx(0.3 * 1.05)
    fraction = cardiac["agreement"]["LV_EF_percent"]
    errors = np.array([50 - 70, 56.25 - 65, 37.5 - 70, 75 - 80])
    assert fraction["n"] == 4
    assert fraction["bias"] == pytest.approx(errors.mean())
    assert fraction["mean_absolute_error"] == pytest.approx(np.abs(errors).mean())
    assert fraction["loa_high"] - fraction["loa_low"] == pytest.approx(2 * 1.96 * errors.std(ddof=1))
    assert cardiac["agreement"]["LV_EDV_ml"]["bias"] == pytest.approx(-0.2)


def test_patient_without_a_prediction_leaves_the_agreement_but_not_the_list() -> None:
    results = [*patients(), scored("p5_ED", heart(100), heart(100), "ED"), missing("p5_ES", heart(20), "ES")]
    cardiac = summarize(results, NAMES)["cardiac"]
    assert len(cardiac["patients"]) == 5
    assert cardiac["agreement"]["LV_EF_percent"]["n"] == 4
    assert cardiac["agreement"]["LV_EDV_ml"]["n"] == 5


def test_patient_with_one_phase_has_no_ejection_fraction() -> None:
    assert "cardiac" not in summarize(patients()[:1], NAMES)


def test_two_cases_of_one_phase_are_refused() -> None:
    with pytest.raises(DataError, match="one ED case"):
        summarize([patients()[0], patients()[0]], NAMES)


def test_no_case_is_refused() -> None:
    with pytest.raises(DataError, match="at least one"):
        summarize([], NAMES)


def test_json_has_no_nan_and_round_trips() -> None:
    def refuse(constant: str) -> Any:
        raise AssertionError(f"{constant} is no JSON")

    summary = summarize([missing("a", heart(40, rv=0)), *patients()], NAMES)
    read = json.loads(to_json(summary), parse_constant=refuse)
    assert read["metric_per_case"][0]["metrics"]["1"]["Dice"] is None
    assert read["metric_per_case"][0]["metrics"]["3"]["Dice"] == 0.0
    assert read["mean"]["3"]["Dice"] == pytest.approx(summary["mean"]["3"]["Dice"])
    for fresh, stored in zip(dice_table(summary), dice_table(read), strict=True):
        assert fresh == pytest.approx(stored, nan_ok=True)


def test_json_takes_numpy_values() -> None:
    values: dict[Any, Any] = {"a": np.float32(1.5), "b": np.array([1.0, np.inf]), 3: (np.int64(2), math.nan)}
    assert json.loads(to_json(values)) == {"a": 1.5, "b": [1.0, None], "3": [2, None]}


def test_dice_table_rows() -> None:
    rows = dice_table(summarize([scored("a", heart(40), heart(40)), missing("b", heart(40))], NAMES))
    assert [row["structure"] for row in rows] == ["RV", "MYO", "LV", "mean"]
    lv, mean = rows[2], rows[3]
    half = diagonal_mm((10, 10, 4), SPACING) / 2
    assert (lv["n"], lv["n_missed"], lv["Dice"], lv["HD95"], lv["ASSD"]) == (2, 1, 0.5, half, half)
    assert lv["Dice_sd"] == pytest.approx(math.sqrt(0.5)) and lv["HD95_sd"] == pytest.approx(math.sqrt(2) * half)
    assert (mean["n"], mean["n_missed"], mean["Dice"]) == (2, 3, 0.5)
