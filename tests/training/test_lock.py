"""A run's folder belongs to one process at a time, and to none when that has ended."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from rdvit.config import Config
from rdvit.errors import ConfigError
from rdvit.training.lock import LOCK, sole_training
from rdvit.training.run import make_split, resume_run, start_run

HOLD = "import sys, pathlib; from rdvit.training.lock import sole_training\n"
HOLD += "with sole_training(pathlib.Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"


def silent(text: str, done: int, total: int) -> None:
    """A report that nobody reads."""


def test_a_second_training_is_refused_until_the_first_is_gone(
    tiny_config: Callable[..., Config], phantom: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    config = tiny_config(training={"epochs": 1})
    start_run(config, make_split(phantom), run, tmp_path, track=False, report=silent)
    with subprocess.Popen([sys.executable, "-c", HOLD, str(run)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdout is not None and other.stdout.readline().strip() == b"held"
        before = (run / "config.yaml").read_text()
        with pytest.raises(ConfigError, match="another process is training in this folder") as refusal:
            resume_run(run, {"training": {"epochs": 2}}, None, tmp_path, track=False, report=silent)
        assert str(run) in str(refusal.value)
        assert (run / "config.yaml").read_text() == before
        other.kill()  # no farewell: the lock must go with the process
    summary = resume_run(run, {"training": {"epochs": 2}}, None, tmp_path, track=False, report=silent)
    assert summary["run"]["progress"]["epoch"] == 2
    assert json.loads((run / "summary.json").read_text())["run"]["progress"]["epoch"] == 2


def test_later_processes_of_one_training_do_not_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with sole_training(tmp_path):
        assert (tmp_path / LOCK).exists()
        monkeypatch.setenv("LOCAL_RANK", "1")
        with sole_training(tmp_path):
            pass
    assert not (tmp_path / LOCK).exists()
