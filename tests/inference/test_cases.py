"""Scores of a data set: what is missing or broken counts, and never stops the rest."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from rdvit.checkpoint import load_model
from rdvit.data.datalist import Case, load_data
from rdvit.data.volume import Volume, read_image, read_labels
from rdvit.errors import DataError
from rdvit.evaluation.summary import CaseResult, summarize
from rdvit.inference.anytime import Loops
from rdvit.inference.cases import score_cases, score_folder
from rdvit.inference.predictor import Prediction, Predictor
from rdvit.models.segmenter import Halting

CLASSES = {1: "RV", 2: "MYO", 3: "LV"}


@pytest.fixture(scope="module")
def cases(phantom: Path) -> list[Case]:
    """Both frames of two patients."""
    return list(load_data(phantom).cases[:4])


def copy_labels(cases: list[Case], folder: Path, name: Callable[[Case], str]) -> Path:
    folder.mkdir()
    for case in cases:
        shutil.copyfile(str(case.label), folder / name(case))
    return folder


def dices(result: CaseResult) -> list[float]:
    return [result.metrics[name]["Dice"] for name in CLASSES.values()]


# Predictions on the disk


@pytest.mark.parametrize(
    "name",
    [lambda case: f"{case.id}.nii.gz", lambda case: case.image.name, lambda case: str(case.label.name)],
    ids=["id", "image", "label"],
)
def test_the_reference_itself_scores_full_marks(name: Callable[[Case], str], cases: list[Case], tmp_path: Path) -> None:
    results = score_folder(copy_labels(cases, tmp_path / "pred", name), cases, CLASSES)
    assert [result.case for result in results] == [case.id for case in cases]
    for result, case in zip(results, cases, strict=True):
        assert result.failed is None
        assert dices(result) == [1.0, 1.0, 1.0]
        assert (result.patient, result.phase) == (case.patient, case.phase)
        assert result.prediction_file == str(tmp_path / "pred" / name(case))
        assert result.reference_file == str(case.label)


def test_volumes_are_those_of_the_true_spacing(cases: list[Case], tmp_path: Path) -> None:
    """The phantom's sform says 1 mm, as ACDC's does; only pixdim knows better."""
    folder = copy_labels(cases[:1], tmp_path / "pred", lambda case: f"{case.id}.nii.gz")
    metrics = score_folder(folder, cases[:1], CLASSES)[0].metrics
    image = nib.load(str(cases[0].label))
    voxel_ml = float(np.prod(image.header.get_zooms())) / 1000
    for value, name in CLASSES.items():
        assert metrics[name]["volume_ml"] == pytest.approx(np.count_nonzero(np.asarray(image.dataobj) == value) * voxel_ml)


def test_a_missing_prediction_is_a_failure_with_dice_0(cases: list[Case], tmp_path: Path) -> None:
    folder = copy_labels(cases[1:], tmp_path / "pred", lambda case: f"{case.id}.nii.gz")
    results = score_folder(folder, cases, CLASSES)
    assert len(results) == len(cases)
    assert "no prediction" in str(results[0].failed)
    assert results[0].prediction_file is None
    assert dices(results[0]) == [0.0, 0.0, 0.0]
    assert all(results[0].metrics[name]["HD95"] > 100 for name in CLASSES.values())  # the diagonal of the volume
    assert [result.failed for result in results[1:]] == [None] * 3
    summary = summarize(results, CLASSES)
    assert summary["mean"]["3"]["Dice"] == pytest.approx(3 / 4)
    assert [failure["case"] for failure in summary["failures"]] == [cases[0].id]


def test_predictions_on_other_grids_and_damaged_ones_are_named(cases: list[Case], tmp_path: Path) -> None:
    folder = copy_labels(cases, tmp_path / "pred", lambda case: f"{case.id}.nii.gz")
    files = [folder / f"{case.id}.nii.gz" for case in cases]
    images = [nib.load(path) for path in files]
    cut = np.asarray(images[0].dataobj)[:-1]
    nib.Nifti1Image(cut, images[0].affine, images[0].header).to_filename(files[0])
    affine = images[1].affine.copy()
    affine[0, 3] += 9  # mm, three pixels
    nib.Nifti1Image(np.asarray(images[1].dataobj), affine, images[1].header).to_filename(files[1])
    files[2].write_bytes(b"not an image")
    results = score_folder(folder, cases, CLASSES)
    reasons = [str(result.failed) for result in results]
    assert str(cut.shape) in reasons[0]
    assert "mm off their image" in reasons[1]
    assert "cannot be read" in reasons[2]
    for result, file in zip(results[:3], files, strict=False):
        assert str(file) in str(result.failed)
        assert dices(result) == [0.0, 0.0, 0.0]
    assert dices(results[3]) == [1.0, 1.0, 1.0]


def test_a_reference_that_is_missing_is_listed_and_in_no_mean(cases: list[Case], tmp_path: Path) -> None:
    folder = copy_labels(cases, tmp_path / "pred", lambda case: f"{case.id}.nii.gz")
    broken = [replace(cases[0], label=None), replace(cases[1], label=tmp_path / "gone.nii.gz"), *cases[2:]]
    results = score_folder(folder, broken, CLASSES)
    assert "no label" in str(results[0].failed)
    assert results[0].reference_file is None
    assert "gone.nii.gz" in str(results[1].failed)
    assert not results[0].metrics
    assert not results[1].metrics
    assert summarize(results, CLASSES)["mean"]["1"]["Dice"] == 1.0


# Predictions by a model


class Oracle(Predictor):
    """Knows the references of the cases; fails where it is told to."""

    def __init__(self, cases: list[Case], fails: str | None = None) -> None:
        self.labels = {str(case.image): read_labels(str(case.label)).array for case in cases}
        self.fails = fails
        self.asked: list[tuple[Loops | None, str | None]] = []

    def __call__(
        self,
        volume: Volume,
        loops: Loops | None = None,
        halting: Halting | None = None,
        maps: bool = False,
        max_seconds: float | None = None,
    ) -> Prediction:
        self.asked.append((loops, halting))
        if self.fails is not None and self.fails in str(volume.path):
            raise DataError("the network's output is not finite", file=volume.path)
        return Prediction(self.labels[str(volume.path)], loops or 1, 1.0, {"network": 0.5, "finish": 0.25}, loops_taken=3.5)


def test_cases_are_scored_on_their_own_grid_with_the_loops_asked_for(cases: list[Case]) -> None:
    oracle, told = Oracle(cases), []
    results = score_cases(oracle, cases, CLASSES, 7, "none", lambda *progress: told.append(progress))
    assert all(dices(result) == [1.0, 1.0, 1.0] for result in results)
    assert oracle.asked == [(7, "none")] * 4
    assert [(result.loops, result.seconds) for result in results] == [(3.5, 0.75)] * 4
    assert told == [(f"scoring {case.id}", i, 4) for i, case in enumerate(cases, start=1)]


def test_a_failing_case_never_stops_the_others(cases: list[Case], tmp_path: Path) -> None:
    oracle = Oracle(cases, fails=cases[1].image.name)
    broken = [replace(cases[0], image=tmp_path / "gone.nii.gz"), *cases[1:]]
    results = score_cases(oracle, broken, CLASSES)
    assert "gone.nii.gz: no such file" in str(results[0].failed)
    assert "not finite" in str(results[1].failed)
    assert dices(results[0]) == dices(results[1]) == [0.0, 0.0, 0.0]
    assert results[1].loops is results[1].seconds is None
    assert dices(results[2]) == dices(results[3]) == [1.0, 1.0, 1.0]


def test_a_label_of_another_grid_than_its_image_is_a_failure(cases: list[Case]) -> None:
    swapped = [replace(cases[0], image=cases[2].image)]
    results = score_cases(Oracle(cases), swapped, CLASSES)
    assert "labels have shape" in str(results[0].failed)
    assert dices(results[0]) == [0.0, 0.0, 0.0]


def test_scores_of_a_model_are_those_of_its_predictions(cases: list[Case], tiny_model_folder: Path) -> None:
    model, info = load_model(tiny_model_folder)
    predictor = Predictor(model, info, "cpu", "fp32")
    result = score_cases(predictor, cases[:1], CLASSES)[0]
    predicted, reference = predictor(read_image(cases[0].image)).labels_XYZ, read_labels(str(cases[0].label)).array
    for value, name in CLASSES.items():
        assert result.metrics[name]["TP"] == np.count_nonzero((predicted == value) & (reference == value))
        assert result.metrics[name]["n_pred"] == np.count_nonzero(predicted == value)
