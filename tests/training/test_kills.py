"""A training that is killed again and again, at any moment, ends as if it had never been: to the last digit.

The processes are real ones, and so are the signals. ``pytest -m slow --log-cli-level=INFO`` shows where they fell.
"""

from __future__ import annotations

import csv
import json
import logging
import os
import random
import select
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from rdvit.checkpoint import PREVIOUS, STATE, load_state
from rdvit.config import Config

_log = logging.getLogger(__name__)
CLOCKS = ("seconds", "train/network_share")  # the only columns that may differ between two equal trainings
EPOCHS = 12
Killed = tuple[str, str]  # signal, and where it fell

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes are forked, which this system cannot")


class Forks:
    """The process of ``prefork.py``: starts trainings, tells how they ended."""

    def __init__(self) -> None:
        environment = {k: v for k, v in os.environ.items() if not k.startswith("MLFLOW_")}
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        script = Path(__file__).with_name("prefork.py")
        environment |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        self.server = subprocess.Popen([sys.executable, str(script)], env=environment, **pipes)
        assert self._line() == "ready"

    def _line(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()

    def start(self, log: Path, words: list[str]) -> int:
        """The id of a new process."""
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps([str(log), words]) + "\n")
        self.server.stdin.flush()
        return int(self._line())

    def over(self, seconds: float = 0.0) -> bool:
        """Whether it has ended, waiting so long."""
        assert self.server.stdout is not None
        return bool(select.select([self.server.stdout], [], [], seconds)[0])

    def status(self) -> int:
        """Its exit status, negative for a signal, waiting for it."""
        assert self.over(120), "the process does not end"
        return int(self._line())


@dataclass
class Training:
    """A training in a folder, alive or dead."""

    forks: Forks
    words: list[str]
    runs: Path
    name: str
    epoch: int = 0
    before: list[str] = field(default_factory=list)
    falls: list[Killed] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        return self.runs / self.name

    @property
    def log(self) -> Path:
        return self.runs.parent / f"{self.name}.log"

    def live(self) -> None:
        """Start it, or go on where it stands."""
        begun = (self.folder / "config.yaml").exists()
        words = ["--resume", str(self.folder)] if begun else [*self.words, "--out", str(self.folder)]
        self.before = self.statuses() if (self.runs / "mlflow.db").exists() else []
        self.pid = self.forks.start(self.log, ["train", *words, "--runs", str(self.runs)])

    def kill(self, number: int, seconds: float, writing: int) -> bool:
        """Send a signal after so many seconds, or as soon as the n-th temporary file is seen; whether it ended by it."""
        self.live()
        end, seen = time.monotonic() + seconds, set[str]()
        while time.monotonic() < end and not self.forks.over():
            seen |= set(self.temporary())
            if writing and len(seen) >= writing:
                break
            time.sleep(0.0005)
        where = self.where()
        with suppress(ProcessLookupError):  # it was faster
            os.kill(self.pid, number)
        status = self.forks.status()
        if status == 0:
            return False
        if number == signal.SIGKILL and self.temporary():
            where = f"writing {self.temporary()[0].partition('.tmp-')[2].partition('.')[2]}"
        self.falls.append((signal.Signals(number).name, where))
        _log.info("%s: %s %s", self.name, *self.falls[-1])
        self.check_fallen(number, status)
        return True

    def temporary(self) -> list[str]:
        return [str(path) for path in self.folder.rglob(".tmp-*")]

    def where(self) -> str:
        """What the process is doing, as seen from outside."""
        if temporary := self.temporary():
            return f"writing {temporary[0].partition('.tmp-')[2].partition('.')[2]}"
        said = self.log.read_text() if self.log.exists() else ""
        if "cached" not in said:
            return "reading data"
        if (self.folder / "figures" / "curves_final.png").exists():
            return "scoring"
        return "training, tracking" if "training on" in said else "building"

    def check_fallen(self, number: int, status: int) -> None:
        """Nothing that was complete is lost, and a signal that can be answered was."""
        said, advanced = self.log.read_text(), False
        assert "Traceback" not in said and "error" not in said, said
        if (self.folder / STATE).exists() or (self.folder / PREVIOUS).exists():
            epoch = load_state(self.folder)["progress"]["epoch"]
            assert epoch >= self.epoch
            self.epoch, advanced = epoch, epoch > self.epoch
            assert epoch <= len(rows_of(self.folder)) <= epoch + 1
        if number == signal.SIGKILL:
            assert status == -signal.SIGKILL
            return
        assert status in (128 + number, -number), said  # the latter before the first line of the command
        if status > 0 and "stopped by" not in said:
            assert said.strip().endswith("interrupted") or not said.strip(), said
        if status > 0 and self.folder.exists():
            assert said.count("stopped by") == 1, said
        if (self.runs / "mlflow.db").exists():  # SIGKILL may have left a run open that this life did not come to
            assert "RUNNING" not in self.statuses() or ("RUNNING" in self.before and not advanced), said

    def query(self, command: str) -> list[Any]:
        with sqlite3.connect(f"file:{self.runs / 'mlflow.db'}?mode=ro", uri=True, timeout=10) as database:
            return database.execute(command, {"name": self.name}).fetchall()

    def statuses(self) -> list[str]:
        """Of MLflow's runs of this training."""
        return [row[0] for row in self.query("select status from runs where name = :name")]


def rows_of(folder: Path) -> list[dict[str, str]]:
    """The text of ``metrics.csv``, without the clocks."""
    if not (folder / "metrics.csv").exists():
        return []
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


def check_equal(killed: Training, whole: Training) -> None:
    """The killed training ended as the one that ran through."""
    assert rows_of(killed.folder) == rows_of(whole.folder)
    assert len(rows_of(killed.folder)) == EPOCHS
    states = [load_state(training.folder) for training in (killed, whole)]
    for part in ("model", "ema"):
        assert not [name for name, value in states[0][part].items() if not torch.equal(value, states[1][part][name])]
    weights = [(training.folder / "model.safetensors").read_bytes() for training in (killed, whole)]
    assert weights[0] == weights[1]
    scores = [json.loads((training.folder / "summary.json").read_text())["foreground_mean"] for training in (killed, whole)]
    assert scores[0] == scores[1]
    assert {path.name for path in killed.folder.iterdir()} == {path.name for path in whole.folder.iterdir()}
    assert not killed.temporary() and not list(killed.runs.glob("mlflow.*.part"))
    assert killed.statuses() == ["FINISHED"]  # of one run
    logged = "select step, value from metrics join runs using (run_uuid) where name = :name and key = 'train/loss'"
    points = {(step, value) for step, value in killed.query(logged)}
    assert points == {(int(row["epoch"]), float(row["train/loss"])) for row in rows_of(whole.folder)}


@pytest.fixture(scope="module")
def forks() -> Iterator[Forks]:
    forks = Forks()
    yield forks
    assert forks.server.stdin is not None
    forks.server.stdin.close()
    forks.server.wait(60)


@dataclass
class Reference:
    """The training that ran through, the seconds it took, and how to make another."""

    training: Training
    seconds: float


@pytest.fixture(scope="module")
def reference(
    forks: Forks, tmp_path_factory: pytest.TempPathFactory, phantom: Path, tiny_config: Callable[..., Config]
) -> Reference:
    root = tmp_path_factory.mktemp("kills")
    config = tiny_config(training={"epochs": EPOCHS, "steps_per_epoch": 1, "validate_every": 3})
    (root / "tiny.yaml").write_text(config.to_yaml())
    words = ["--dim", "2d", "--config", str(root / "tiny.yaml"), "--data", str(phantom)]
    training = Training(forks, words, root / "runs", "whole")
    start = time.monotonic()
    training.live()
    assert training.forks.status() == 0, training.log.read_text()
    return Reference(training, time.monotonic() - start)


def end(training: Training, whole: Training) -> None:
    """Let it run to its end, and compare."""
    training.live()
    assert training.forks.status() == 0, training.log.read_text()
    check_equal(training, whole)


def test_three_kills_leave_no_trace(forks: Forks, reference: Reference) -> None:
    whole = reference.training
    killed = Training(forks, whole.words, whole.runs, "killed")
    for number, writing in ((signal.SIGKILL, 5), (signal.SIGTERM, 9), (signal.SIGINT, 3)):
        killed.kill(number, 60, writing)
    assert len(killed.falls) == 3
    end(killed, whole)


@pytest.mark.slow
def test_fifty_kills_leave_no_trace(forks: Forks, reference: Reference, tmp_path: Path) -> None:
    """At seeded random moments: every third while a file is being written, the others by the clock."""
    rng = random.Random(7)
    falls: list[Killed] = []
    trainings = 0
    while len(falls) < 50 or trainings < 3:
        trainings += 1
        runs = tmp_path / "fresh" if trainings == 1 else reference.training.runs  # the first makes MLflow's database as well
        killed = Training(forks, reference.training.words, runs, f"killed{trainings}")
        runs.mkdir(exist_ok=True)
        for _ in range(10):
            number = rng.choice((signal.SIGKILL, signal.SIGKILL, signal.SIGTERM, signal.SIGINT))
            writing = rng.randint(1, 12) if rng.random() < 1 / 3 else 0
            if not killed.kill(number, 60 if writing else rng.uniform(0, reference.seconds / 2), writing):
                break
        end(killed, reference.training)
        _log.info("%s: %d kills, equal to the last digit", killed.name, len(killed.falls))
        falls += killed.falls
    counts = Counter(falls)
    for (name, where), count in sorted(counts.items()):
        _log.info("%-8s %-24s %d", name, where, count)
    _log.info("%d kills in %d trainings of %d epochs; lost: nothing", len(falls), trainings, EPOCHS)
    assert {name for name, _ in falls} == {"SIGKILL", "SIGTERM", "SIGINT"}
    assert sum(count for (_, where), count in counts.items() if where.startswith("writing")) >= 10
