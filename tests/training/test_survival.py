"""What else a training survives: signals outside its loop, a full disk, a tracker that goes away."""

from __future__ import annotations

import csv
import errno
import logging
import os
import shutil
import signal
import sqlite3
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from rdvit.checkpoint import STATE, load_state
from rdvit.config import Config
from rdvit.errors import RdvitError
from rdvit.training import run
from rdvit.training.run import make_split, resume_run, start_run
from rdvit.training.signals import Interrupted, stop_signals
from rdvit.training.tracking import Tracker
from rdvit.training.trainer import Trainer

MakeConfig = Callable[..., Config]
CLOCKS = ("seconds", "train/network_share")
EPOCHS = 4


def silent(text: str, done: int, total: int) -> None:
    """A report that nobody reads."""


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return [{k: v for k, v in row.items() if k not in CLOCKS} for row in csv.DictReader(file)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figures, and no MLflow settings of whoever runs the tests."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("survival") / "runs"


@pytest.fixture(scope="module")
def config(tiny_config: MakeConfig) -> Config:
    return tiny_config(training={"epochs": EPOCHS, "steps_per_epoch": 1})


@pytest.fixture(scope="module")
def whole(runs: Path, phantom: Path, config: Config) -> list[dict[str, str]]:
    """The metrics of the training that nothing happens to."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_save_figures", lambda self, name: None)
        start_run(config, make_split(phantom), runs / "whole", runs, track=False, report=silent)
    return rows_of(runs / "whole")


def statuses(runs: Path, name: str) -> list[str]:
    """Of MLflow's runs of one name."""
    with sqlite3.connect(runs / "mlflow.db") as database:
        return [row[0] for row in database.execute("select status from runs where name = ?", (name,))]


def in_epoch(number: int, action: Callable[[], Any]) -> Callable[[str, int, int], None]:
    """A report that does something once, after the first step of an epoch."""
    done = []

    def report(text: str, step: int, total: int) -> None:
        if text.startswith(f"epoch {number} ") and "loss" in text and not done:
            done.append(True)
            action()

    return report


# Signals


@pytest.mark.parametrize(
    ("place", "owner", "function", "before"),
    [
        ("caching", run, "cached_cases", []),
        ("tracker", Tracker, "_start_system_metrics", ["KILLED"]),
        ("table", Tracker, "log_dataset", ["KILLED"]),
        ("scoring", run, "score_cases", ["KILLED"]),
    ],
)
def test_a_signal_outside_the_loop(
    runs: Path, phantom: Path, config: Config, whole: list[dict[str, str]],
    place: str, owner: Any, function: str, before: list[str],
) -> None:  # fmt: skip
    folder = runs / place

    def told(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, function, told)
        with pytest.raises(Interrupted) as caught, stop_signals():
            start_run(config, make_split(phantom), folder, runs, track=True, report=silent)
    assert caught.value.folder == folder
    if before:  # where caching is stopped there may be no database yet
        assert statuses(runs, place) == before
    resume_run(folder, {}, None, runs, track=True, report=silent)
    assert statuses(runs, place) == ["FINISHED"]  # the same run
    assert rows_of(folder) == whole


# A full disk


def full_disk(self: Path, data: bytes) -> int:
    with self.open("wb") as file:
        file.write(bytes(data)[:1000])
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_ends_a_training_that_can_be_resumed(
    tmp_path: Path, phantom: Path, config: Config, whole: list[dict[str, str]]
) -> None:
    folder = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patch:
        report = in_epoch(3, lambda: patch.setattr(Path, "write_bytes", full_disk))
        with pytest.raises(RdvitError, match=r"cannot be written: No space left on device"):
            start_run(config, make_split(phantom), folder, tmp_path, track=False, report=report)
    assert load_state(folder)["progress"]["epoch"] == 2
    assert not list(folder.rglob(".tmp-*"))
    resume_run(folder, {}, None, tmp_path, track=False, report=silent)
    assert rows_of(folder) == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 16 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if shutil.which("mount") is None:
        pytest.skip("needs mount(8)")
    words = ["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(folder)]
    mounted = subprocess.run(words, capture_output=True, text=True, check=False)
    if mounted.returncode:
        pytest.skip(f"mounting is refused: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(small_disk: Path, phantom: Path, config: Config, whole: list[dict[str, str]]) -> None:
    folder, filler = small_disk / "run", small_disk / "filler"

    def fill() -> None:
        with filler.open("wb", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(4096))
            except OSError:
                pass

    with pytest.raises(RdvitError, match=rf"{STATE}|model\.safetensors.*: cannot be written: No space left on device"):
        start_run(config, make_split(phantom), folder, small_disk, track=False, report=in_epoch(3, fill))
    assert load_state(folder)["progress"]["epoch"] == 2
    assert not list(folder.rglob(".tmp-*"))
    filler.unlink()
    resume_run(folder, {}, None, small_disk, track=False, report=silent)
    assert rows_of(folder) == whole


# A tracker that goes away


@pytest.mark.parametrize("how", ["refuses", "deleted", pytest.param("locked", marks=pytest.mark.slow)])
def test_a_tracker_that_goes_away(
    tmp_path: Path, runs: Path, phantom: Path, config: Config, whole: list[dict[str, str]], how: str,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    here = tmp_path / "runs"
    here.mkdir()
    if (runs / "mlflow.db").exists():  # making one takes seconds
        shutil.copyfile(runs / "mlflow.db", here / "mlflow.db")
    locks: list[sqlite3.Connection] = []

    def go_away() -> None:
        if how == "refuses":
            from mlflow import MlflowClient

            def stopped(*args: Any, **kwargs: Any) -> None:
                raise ConnectionError("the server was stopped")

            monkeypatch.setattr(MlflowClient, "log_batch", stopped)
        elif how == "deleted":
            (here / "mlflow.db").unlink()
        else:
            locks.append(sqlite3.connect(here / "mlflow.db"))
            locks[0].execute("BEGIN EXCLUSIVE")

    with caplog.at_level(logging.WARNING, logger="rdvit"):
        start_run(config, make_split(phantom), here / "run", here, track=True, report=in_epoch(2, go_away))
    for lock in locks:
        lock.close()
    assert rows_of(here / "run") == whole
    said = [record.getMessage() for record in caplog.records if "MLflow tracking is off" in record.getMessage()]
    assert len(said) == (0 if how == "deleted" and not said else 1)
    assert (here / "run" / "summary.json").exists()


def test_a_database_that_was_killed_at_birth_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """MLflow cannot go on with half of its tables: it must never find them under the name it opens."""
    from rdvit.training import tracking

    def killed(*args: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(tracking.shutil, "copyfile", killed)
        with pytest.raises(KeyboardInterrupt):
            tracking.make_tracker(tmp_path).start("x", {}, {})
    assert not (tmp_path / "mlflow.db").exists()
    assert list(tmp_path.glob("mlflow.*.part"))
    tracker = tracking.make_tracker(tmp_path)
    assert tracker.start("x", {}, {}) is not None
    tracker.end("FINISHED")
    assert sorted(path.name for path in tmp_path.glob("mlflow.*")) == ["mlflow.db", "mlflow.lock"]
