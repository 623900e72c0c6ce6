"""Segment and score labelled cases: what ``rdvit evaluate`` and the end of a training do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from rdvit.data.datalist import Case
from rdvit.data.volume import Volume, check_same_grid, read_image, read_labels
from rdvit.errors import ModelError, RdvitError
from rdvit.evaluation.metrics import case_metrics, missing_prediction_metrics
from rdvit.evaluation.summary import CaseResult
from rdvit.inference.anytime import Loops
from rdvit.inference.predictor import Predictor
from rdvit.models.segmenter import Halting

Report = Callable[[str, int, int], None]
Predicted = tuple[np.ndarray, float | None, float | None]  # labels (X, Y, Z), loops and seconds that it took


def score_cases(
    predictor: Predictor,
    cases: Sequence[Case],
    class_names: dict[int, str],
    loops: Loops | None = None,
    halting: Halting | None = None,
    report: Report = lambda text, done, total: None,
) -> list[CaseResult]:
    """Segment every case and compare with its reference, on the file's own grid.

    Args:
        predictor: The model.
        cases: What to segment.
        class_names: Label value to structure name.
        loops: As for the predictor.
        halting: As for the predictor.
        report: Told of every case that is done.

    A case that fails is a failure in the result, scored like an empty prediction; it never stops the others.

    Raises:
        ModelError: If the model cannot do what is asked of it, whatever the case.
    """

    def predict(image: Volume, _: Path | None) -> Predicted:
        made = predictor(image, loops, halting)
        return made.labels_XYZ, made.loops_taken, sum(made.seconds.values())

    results = []
    for done, case in enumerate(cases, start=1):
        results.append(_score(case, class_names, predict, None))
        report(f"scoring {case.id}", done, len(cases))
    return results


def score_folder(folder: Path, cases: Sequence[Case], class_names: dict[int, str]) -> list[CaseResult]:
    """Compare predictions on the disk with the references: walks the references, so that a missing prediction counts.

    A prediction is ``ID.nii.gz`` or ``ID.nii`` in ``folder``, or the name of the case's image or label.
    """
    return [_score(case, class_names, _read_prediction, _find(folder, case)) for case in cases]


def _score(
    case: Case, class_names: dict[int, str], predict: Callable[[Volume, Path | None], Predicted], file: Path | None
) -> CaseResult:
    scored = CaseResult(case.id, case.patient, case.phase, prediction_file=_name(file), reference_file=_name(case.label))
    try:
        if case.label is None:
            raise RdvitError("has no label to compare with", file=case.image)
        reference = read_labels(case.label)
    except RdvitError as error:
        return replace(scored, failed=str(error))
    try:
        image = read_image(case.image) if case.image != case.label else reference
        check_same_grid(image, reference)
        labels_XYZ, loops, seconds = predict(image, file)
        metrics = case_metrics(labels_XYZ, reference.array, reference.spacing, class_names)
        return replace(scored, metrics=metrics, loops=loops, seconds=seconds)
    except ModelError:
        raise
    except RdvitError as error:
        metrics = missing_prediction_metrics(reference.array, reference.spacing, class_names)
        return replace(scored, metrics=metrics, failed=str(error))


def _read_prediction(image: Volume, file: Path | None) -> Predicted:
    if file is None:
        raise RdvitError("no prediction was found for this case")
    prediction = read_labels(file)
    check_same_grid(image, prediction)
    return prediction.array, None, None


def _name(file: Path | None) -> str | None:
    return None if file is None else str(file)


def _find(folder: Path, case: Case) -> Path | None:
    stems = [case.id] + [path.name.split(".nii")[0] for path in (case.image, case.label) if path is not None]
    candidates = [folder / f"{stem}{suffix}" for stem in stems for suffix in (".nii.gz", ".nii")]
    return next((path for path in candidates if path.is_file()), None)
