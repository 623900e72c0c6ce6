"""``rdvit evaluate``: a perfect copy scores perfectly, a missing one counts, and loops are compared in one table."""

from __future__ import annotations

import csv
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import nibabel as nib
import numpy as np
import pytest

Rdvit = Callable[..., CompletedProcess[str]]
FAST = ("--device", "cpu", "--precision", "fp32")


@pytest.fixture
def copies(phantom: Path, tmp_path: Path) -> Path:
    """A folder with a copy of every reference of the phantom."""
    folder = tmp_path / "predictions"
    folder.mkdir()
    for label in phantom.glob("training/*/*_gt.nii.gz"):
        shutil.copy(label, folder)
    return folder


def refused(outcome: CompletedProcess[str], expected: str) -> None:
    """Exit code 2, nothing on standard output, and one line of error at the end of what was said."""
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert "Traceback" not in outcome.stderr
    *_, last = outcome.stderr.splitlines()
    assert last.startswith("rdvit: error: ") and expected in last


# Predictions against references


def test_a_perfect_copy_scores_perfectly(rdvit: Rdvit, copies: Path, phantom: Path) -> None:
    outcome = rdvit("evaluate", "--pred", copies, "--ref", phantom, "--json")
    assert outcome.returncode == 0
    summary = json.loads(outcome.stdout)
    assert len(summary["metric_per_case"]) == 10 and summary["failures"] == []
    for mean in (*summary["mean"].values(), summary["foreground_mean"]):
        assert (mean["Dice"], mean["IoU"], mean["HD95"], mean["ASSD"]) == (1.0, 1.0, 0.0, 0.0)
    agreement = summary["cardiac"]["agreement"]
    assert len(summary["cardiac"]["patients"]) == 5
    assert agreement["LV_EF_percent"]["mean_absolute_error"] == agreement["LV_mass_g"]["bias"] == 0.0


def test_a_missing_prediction_counts_as_zero(rdvit: Rdvit, copies: Path, phantom: Path) -> None:
    (copies / "patient003_frame01_gt.nii.gz").unlink()
    outcome = rdvit("evaluate", "--pred", copies, "--ref", phantom, "--json")
    assert outcome.returncode == 1
    summary = json.loads(outcome.stdout)
    assert [failure["case"] for failure in summary["failures"]] == ["patient003_ED"]
    dice = {case["case"]: [m["Dice"] for m in case["metrics"].values()] for case in summary["metric_per_case"]}
    assert dice.pop("patient003_ED") == [0.0, 0.0, 0.0]
    assert all(values == [1.0, 1.0, 1.0] for values in dice.values()) and len(dice) == 9
    assert summary["foreground_mean"]["Dice"] == pytest.approx(0.9)
    assert "rdvit: error: patient003_ED: no prediction was found" in outcome.stderr


def test_an_unreadable_or_misplaced_prediction_is_a_failure(rdvit: Rdvit, copies: Path, phantom: Path) -> None:
    (copies / "patient001_frame01_gt.nii.gz").write_text("broken")
    shutil.copy(copies / "patient003_frame01_gt.nii.gz", copies / "patient002_frame01_gt.nii.gz")
    outcome = rdvit("evaluate", "--pred", copies, "--ref", phantom, "--json")
    assert outcome.returncode == 1
    reasons = {failure["case"]: failure["reason"] for failure in json.loads(outcome.stdout)["failures"]}
    assert reasons.keys() == {"patient001_ED", "patient002_ED"}
    assert "cannot be read" in reasons["patient001_ED"] and "shape" in reasons["patient002_ED"]


def test_references_in_a_plain_folder(rdvit: Rdvit, copies: Path, tmp_path: Path) -> None:
    references = tmp_path / "references"
    shutil.copytree(copies, references)
    named = json.loads(rdvit("evaluate", "--pred", copies, "--ref", references, "--labels", "1=RV,3=LV", "--json").stdout)
    assert named["class_names"] == {"1": "RV", "3": "LV"} and named["foreground_mean"]["Dice"] == 1.0
    found = json.loads(rdvit("evaluate", "--pred", copies, "--ref", references, "--json").stdout)
    assert found["class_names"] == {"1": "label_1", "2": "label_2", "3": "label_3"}
    assert "cardiac" not in found  # ED and ES are not known here


def test_dice_of_a_shifted_copy(rdvit: Rdvit, copies: Path, phantom: Path) -> None:
    path = copies / "patient001_frame01_gt.nii.gz"
    reference = nib.load(path)
    labels = np.asarray(reference.dataobj)
    shifted = np.roll(labels, 2, axis=0)
    nib.save(nib.Nifti1Image(shifted, None, reference.header), path)
    outcome = rdvit("evaluate", "--pred", copies, "--ref", phantom, "--json")
    case = next(c for c in json.loads(outcome.stdout)["metric_per_case"] if c["case"] == "patient001_ED")
    overlap = 2 * ((labels == 3) & (shifted == 3)).sum() / (2 * (labels == 3).sum())
    assert case["metrics"]["3"]["Dice"] == pytest.approx(overlap)
    assert 0 < case["metrics"]["3"]["HD95"] <= 2 * reference.header.get_zooms()[0] + 1e-6  # mm by pixdim, not by the affine


# A model on data


def test_one_run_agrees_with_the_training_that_made_the_model(
    rdvit: Rdvit, training: CompletedProcess[str], trained_run: Path, phantom: Path, tmp_path: Path
) -> None:
    words = ("evaluate", "--data", phantom, "--model", "tiny", "--runs", trained_run.parent, *FAST, "--out", tmp_path / "out")
    outcome = rdvit(*words, "--json")
    assert outcome.returncode == 0
    summary = json.loads(outcome.stdout)
    assert summary == json.loads((tmp_path / "out" / "summary.json").read_text())
    for key in ("mean", "foreground_mean", "cardiac", "n"):
        assert summary[key] == json.loads(training.stdout)[key]
    assert summary["run"]["loops"] == 2 and summary["run"]["split"] == "fold0-val"
    assert "warning" not in outcome.stderr
    refused(rdvit(*words), "--overwrite replaces them")
    assert rdvit(*words, "--overwrite").returncode == 0


def test_several_loops_give_a_table_and_a_figure(rdvit: Rdvit, trained_run: Path, phantom: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--data", phantom, "--runs", trained_run.parent, "--loops", "1,2", "--halting", "none", *FAST, "--out", out)
    outcome = rdvit("evaluate", *words, "--json")
    assert outcome.returncode == 0
    result = json.loads(outcome.stdout)
    with (out / "loops.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["loops"] for row in rows] == ["1", "2"] and {row["halting"] for row in rows} == {"none"}
    for row, entry, summary in zip(rows, result["table"], result["summaries"], strict=True):
        assert float(row["dice"]) == pytest.approx(summary["foreground_mean"]["Dice"]) == entry["dice"]
        assert {"dice_RV", "dice_MYO", "dice_LV", "hd95_mm", "lv_ef_error", "rv_ef_error"} <= row.keys()
    assert result["summaries"][0]["metric_per_case"] != result["summaries"][1]["metric_per_case"]
    assert (out / "loops.png").read_bytes().startswith(b"\x89PNG")
    assert {path.name for path in out.iterdir()} == {"summary.json", "loops.csv", "loops.png"}
    assert f"model: {trained_run}" in outcome.stderr  # the newest finished run, and it is said


def test_loops_that_end_by_themselves_are_a_row_and_a_star(
    rdvit: Rdvit, trained_run: Path, phantom: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    words = ("--data", phantom, "--runs", trained_run.parent, "--loops", "1,auto,6", "--halting", "none", *FAST, "--out", out)
    outcome = rdvit("evaluate", *words, "--json")
    assert outcome.returncode == 0, outcome.stderr
    first, auto, last = json.loads(outcome.stdout)["table"]
    assert [row["loops"] for row in (first, auto, last)] == [1, "auto", 6]
    assert first["loops_taken"] == 1 < auto["loops_taken"] <= 4 and last["loops_taken"] == 6  # at most twice the trained 2
    assert all(row["seconds_per_case"] > 0 for row in (first, auto, last))
    runs = [summary["run"] for summary in json.loads((out / "summary.json").read_text())["summaries"]]
    assert [(run["loops"], run["loops_taken"]) for run in runs] == [(r["loops"], r["loops_taken"]) for r in (first, auto, last)]
    with (out / "loops.csv").open(newline="") as file:
        assert [row["loops"] for row in csv.DictReader(file)] == ["1", "auto", "6"]
    assert (out / "loops.png").read_bytes().startswith(b"\x89PNG")


def test_several_rates_of_merging_give_a_table(rdvit: Rdvit, trained_run: Path, phantom: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ("--data", phantom, "--runs", trained_run.parent, "--merge", "0,0.4", *FAST, "--out", out)
    outcome = rdvit("evaluate", *words, "--json")
    assert outcome.returncode == 0
    result = json.loads(outcome.stdout)
    with (out / "merging.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["merge"] for row in rows] == ["0.0", "0.4"] and {row["loops"] for row in rows} == {"2"}
    assert [entry["dice"] for entry in result["table"]] == pytest.approx([float(row["dice"]) for row in rows])
    assert result["summaries"][0]["metric_per_case"] != result["summaries"][1]["metric_per_case"]
    assert {path.name for path in out.iterdir()} == {"summary.json", "merging.csv"}


def test_patients_of_the_training_are_pointed_out(rdvit: Rdvit, trained_run: Path, phantom: Path) -> None:
    outcome = rdvit("-q", "evaluate", "--data", phantom, "--split", "all", "--model", trained_run, "--loops", "1", *FAST)
    assert outcome.returncode == 0
    assert outcome.stderr == "warning: 4 of these patients were in the training of this model\n"


# What is refused


def test_contradicting_or_missing_options(rdvit: Rdvit, phantom: Path, copies: Path) -> None:
    for words in (["--pred", copies], ["--ref", phantom], ["--pred", copies, "--ref", phantom, "--data", phantom]):
        refused(rdvit("evaluate", *words), "either --data, or --pred and --ref together")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--loops", "1,many"], "expected a number of loops or auto, found 'many'"),
        (["--loops", "0,2"], "expected at least 1 loop, found 0"),
        (["--loops", "2,automatic"], "expected a number of loops or auto, found 'automatic'"),
        (["--merge", "0,half"], "expected --merge like 0,0.1,0.25, found '0,half'"),
        (["--merge", "0,1"], "expected a merging rate of at least 0 and below 1"),
        (["--split", "fold7-val"], "no split 'fold7-val'"),
        (["--model", "none such"], "no model 'none such'"),
    ],
)
def test_options_that_cannot_work(
    rdvit: Rdvit, phantom: Path, tiny_model_folder: Path, words: list[str], expected: str
) -> None:
    refused(rdvit("evaluate", "--data", phantom, "--model", tiny_model_folder, *FAST, *words), expected)


def test_data_that_cannot_be_scored(rdvit: Rdvit, phantom: Path, tiny_model_folder: Path, copies: Path, tmp_path: Path) -> None:
    def evaluate(data: Path) -> CompletedProcess[str]:
        return rdvit("evaluate", "--data", data, "--model", tiny_model_folder, "--split", "all", *FAST)

    refused(evaluate(tmp_path / "none such"), "no such folder or file")
    refused(evaluate(copies), "no data set found")
    label = next(phantom.glob("training/patient001/*_frame01_gt.nii.gz"))
    entry = {"image": str(label).replace("_gt", ""), "label": str(label)}
    listed = {"labels": {"1": "left", "2": "right"}, "training": [entry]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    refused(evaluate(tmp_path / "list.json"), "are not the model's {1: 'RV', 2: 'MYO', 3: 'LV'}")
    refused(rdvit("evaluate", "--pred", tmp_path / "none such", "--ref", phantom), "no such folder")


def test_an_output_folder_that_cannot_be_written(rdvit: Rdvit, copies: Path, phantom: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    outcome = rdvit("evaluate", "--pred", copies, "--ref", phantom, "--out", tmp_path / "file" / "below")
    refused(outcome, "output folder cannot be written")


def test_labels_are_missing(rdvit: Rdvit, phantom: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    """A case without a reference cannot be scored: told by name, and exit code 1."""
    image = next(phantom.glob("training/patient001/*_frame01.nii.gz"))
    listed = {"labels": {"1": "RV", "2": "MYO", "3": "LV"}, "training": [{"id": "bare", "image": str(image)}]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    words = ("--data", tmp_path / "list.json", "--split", "training", "--model", tiny_model_folder, *FAST)
    outcome = rdvit("evaluate", *words)
    assert outcome.returncode == 1 and outcome.stdout == ""
    assert "rdvit: error: bare: " in outcome.stderr and "has no label to compare with" in outcome.stderr
