"""``rdvit check``: exit codes, the table, JSON alone on standard output, the montage."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

Rdvit = Callable[..., CompletedProcess[str]]


def test_a_clean_data_set_gives_0_and_a_montage(rdvit: Rdvit, phantom: Path, tmp_path: Path) -> None:
    picture = tmp_path / "montage.png"
    done = rdvit("check", phantom, "--json", "--montage", picture)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["cases"], result["problems"]) == (10, 0) and result["classes"] == {"1": "RV", "2": "MYO", "3": "LV"}
    assert "10 cases, 0 problems" in done.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = rdvit("check", phantom, "--montage", picture)
    assert again.returncode == 2 and "--overwrite replaces" in again.stderr


def test_a_problem_gives_1_and_the_rest_is_still_checked(rdvit: Rdvit, phantom: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(phantom, tmp_path / "copy")
    bad = copy / "training" / "patient004" / "patient004_frame01.nii.gz"
    bad.write_bytes(b"")
    done = rdvit("check", copy, "--json", "--montage", tmp_path / "montage.png")
    assert done.returncode == 1
    result = json.loads(done.stdout)
    assert result["problems"] == 1 and result["cases"] == 10
    (problem,) = [finding for finding in result["findings"] if finding["level"] == "problem"]
    assert problem["case"] == "patient004_ED" and str(bad) in problem["what"]
    assert "patient004_ED" in done.stderr


def test_no_data_set_gives_2(rdvit: Rdvit, tmp_path: Path) -> None:
    done = rdvit("check", tmp_path)
    assert done.returncode == 2 and done.stdout == "" and "no data set found" in done.stderr
