"""``rdvit info`` says what is installed, which runs there are, and what a model is."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from subprocess import CompletedProcess

import pytest

Rdvit = Callable[..., CompletedProcess[str]]


def test_installation(rdvit: Rdvit, tmp_path: Path) -> None:
    outcome = rdvit("info", "--runs", tmp_path, "--json")
    facts = json.loads(outcome.stdout)
    assert (outcome.returncode, outcome.stderr) == (0, "")
    assert facts["torch"] == metadata.version("torch") and facts["monai"] == metadata.version("monai")
    assert facts["presets"] == ["vit", "bvit", "rdvit", "rdvit-moe", "revit", "softmor", "sret"] and facts["runs"] == []


def test_runs_and_their_models_by_name(rdvit: Rdvit, trained_run: Path) -> None:
    runs = trained_run.parent
    assert json.loads(rdvit("info", "--runs", runs, "--json").stdout)["runs"] == ["tiny"]
    facts = json.loads(rdvit("info", "tiny", "--runs", runs, "--json").stdout)
    assert facts["folder"] == str(trained_run)
    assert facts["classes"] == {"1": "RV", "2": "MYO", "3": "LV"}
    assert (facts["preset"], facts["dimensions"], facts["loops"], facts["halting"]) == ("rdvit", 2, 2, "act")
    assert facts["spacing_mm"] == 3.0
    assert facts["training"]["epoch"] in (1, 2) and 0 <= facts["training"]["val_dice"] <= 1


def test_without_json_it_is_for_reading(rdvit: Rdvit, tiny_model_folder: Path) -> None:
    outcome = rdvit("info", tiny_model_folder)
    assert (outcome.returncode, outcome.stdout) == (0, "")
    assert "preset: rdvit\n" in outcome.stderr and "loops: 2\n" in outcome.stderr


@pytest.mark.parametrize("content", [None, "{", '{"config": {}}', "[]"])
def test_a_missing_or_damaged_model(rdvit: Rdvit, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "model.json").write_text(content)
    outcome = rdvit("info", tmp_path)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("rdvit: error: ") and outcome.stderr.count("\n") == 1
    assert str(tmp_path) in outcome.stderr
