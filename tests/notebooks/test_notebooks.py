"""Every notebook runs from top to bottom, and is stored without outputs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_stored_without_outputs(path: Path) -> None:
    cells = nbformat.read(path, as_version=4).cells
    assert cells[0].cell_type == "markdown" and "colab-badge" in cells[0].source
    dirty = [i for i, cell in enumerate(cells) if cell.cell_type == "code" and (cell.outputs or cell.execution_count)]
    assert not dirty, f"cells {dirty} hold outputs: clear them"


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_runs_end_to_end(path: Path) -> None:
    command = [sys.executable, "-m", "pytest", "--nbmake", "--nbmake-timeout=600", "-o", "addopts=", "-q", str(path)]
    done = subprocess.run(command, env=os.environ | {"RDVIT_SMOKE": "1"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
