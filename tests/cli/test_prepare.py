"""``rdvit prepare phantom`` makes a data set that the other commands take, and never touches anything else."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import nibabel as nib
import numpy as np
import pytest

from rdvit.data.datalist import load_data

Rdvit = Callable[..., CompletedProcess[str]]


def refused(outcome: CompletedProcess[str], expected: str) -> None:
    assert (outcome.returncode, outcome.stdout) == (2, ""), outcome.stderr
    assert outcome.stderr.startswith("rdvit: error: ") and outcome.stderr.count("\n") == 1, outcome.stderr
    assert expected in outcome.stderr


@pytest.fixture(scope="module")
def made(rdvit: Rdvit, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepare") / "phantom"
    outcome = rdvit("prepare", "phantom", folder, "--patients", "5", "--cines", "0", "--seed", "3")
    assert outcome.returncode == 0 and outcome.stdout == ""
    assert outcome.stderr == f"5 patients written to {folder}\n"
    return folder


def test_the_phantom_is_a_data_set_with_known_volumes(made: Path) -> None:
    data = load_data(made)
    assert len(data.cases) == 10 and {case.group for case in data.cases} == {"NOR", "DCM", "HCM", "MINF", "RV"}
    truth = json.loads((made / "phantom.json").read_text())
    assert truth["seed"] == 3
    case = next(case for case in data.cases if case.phase == "ED")
    assert case.label is not None
    label = nib.load(case.label)
    counted = (np.asarray(label.dataobj) == 3).sum() * np.prod(label.header.get_zooms()) / 1000
    assert counted == pytest.approx(truth["patients"][case.patient]["lv_edv_ml"], rel=0.02)


def test_what_is_there_is_kept(rdvit: Rdvit, made: Path, tmp_path: Path) -> None:
    refused(rdvit("prepare", "phantom", made, "--patients", "5"), "already holds a phantom")
    assert json.loads((made / "phantom.json").read_text())["seed"] == 3
    (tmp_path / "thesis.tex").write_text("years of work")
    for overwrite in ([], ["--overwrite"]):
        refused(rdvit("prepare", "phantom", tmp_path, *overwrite), "files that are no phantom")
    assert (tmp_path / "thesis.tex").read_text() == "years of work"


def test_a_folder_that_cannot_be_made(rdvit: Rdvit, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    refused(rdvit("prepare", "phantom", tmp_path / "file"), "found a file")
    refused(rdvit("prepare", "phantom", tmp_path / "file" / "below"), "NotADirectoryError")


def test_five_patients_at_least(rdvit: Rdvit, tmp_path: Path) -> None:
    outcome = rdvit("prepare", "phantom", tmp_path / "phantom", "--patients", "4")
    assert outcome.returncode == 2 and not (tmp_path / "phantom").exists()
