"""``rdvit demo`` goes the whole way by itself."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest


@pytest.mark.slow
def test_demo_from_nothing_to_a_segmented_heart(rdvit: Callable[..., CompletedProcess[str]], tmp_path: Path) -> None:
    out = tmp_path / "demo"
    outcome = rdvit("demo", "--out", out, "--minutes", "0.05", "--patients", "5")
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout == ""
    assert [line[:2] for line in outcome.stderr.splitlines() if line[1:3] == ". "] == ["1.", "2.", "3.", "4.", "5."]
    assert json.loads((out / "runs" / "demo" / "summary.json").read_text())["failures"] == []
    loops = (out / "evaluation" / "loops.csv").read_text().splitlines()
    assert [line.split(",")[0] for line in loops] == ["loops", "1", "2", "4", "6", "12"]
    written = {path.name for path in (out / "segmentations").iterdir()}
    ends = ("seg.nii.gz", "halting.nii.gz", "entropy.nii.gz", "preview.png", "result.json")
    assert written == {"run.json", *(f"patient001_frame01_{end}" for end in ends)}
    assert (out / "runs" / "mlflow.db").is_file()

    again = rdvit("demo", "--out", out, "--minutes", "0.05", "--patients", "5")
    assert again.returncode == 2
    assert "holds a run already" in again.stderr.splitlines()[-1]
