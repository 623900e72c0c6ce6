"""The history of a training survives restarts, and MLflow records it without ever getting in the way."""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import sqlite3
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlparse

import pytest
from matplotlib.figure import Figure

from rdvit.errors import DataError
from rdvit.training.signals import Interrupted, stop_signals
from rdvit.training.tracking import MetricsLog, NullTracker, RunStatus, Tracker, make_tracker

if TYPE_CHECKING:
    from mlflow.entities import Run

PARAMS = {"model": {"preset": "rdvit", "loops": [1, 4]}, "training": {"lr": 1e-3, "note": None}}


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def runs_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One store for the module (its first use takes seconds), in a folder whose name asks for trouble."""
    return tmp_path_factory.mktemp("runs") / "Läufe & co #1"


@pytest.fixture()
def started(runs_dir: Path) -> Tracker:
    tracker = make_tracker(runs_dir)
    assert isinstance(tracker, Tracker)
    assert tracker.start("demo", PARAMS, {"preset": "rdvit"}) is not None
    return tracker


def stored_run(tracker: NullTracker) -> Run:
    """What another process would see of the tracker's run."""
    from mlflow import MlflowClient

    return MlflowClient(tracker.uri).get_run(tracker.run_id)


def history(tracker: NullTracker, key: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [(m.step, m.value) for m in MlflowClient(tracker.uri).get_metric_history(tracker.run_id, key)]


def artifact(tracker: NullTracker, file: str) -> Path:
    return Path(unquote(urlparse(stored_run(tracker).info.artifact_uri).path)) / file


# The CSV history


def test_the_header_grows_with_new_columns(tmp_path: Path) -> None:
    log = MetricsLog.open(tmp_path / "run")
    log.append({"epoch": 0, "loss": 0.1 + 0.2})
    log.append({"epoch": 1, "loss": 0.25, "val_dice": 0.5})
    lines = (tmp_path / "run" / "metrics.csv").read_text(encoding="utf-8").splitlines()
    assert lines == ["epoch,loss,val_dice", "0,0.30000000000000004,", "1,0.25,0.5"]


def test_reading_back_gives_the_same_numbers(tmp_path: Path) -> None:
    log = MetricsLog.open(tmp_path)
    log.append({"loss": 1 / 3, "epoch": 0, "steps": 250})
    log.append({"epoch": 1, "loss": math.nan, "grad": math.inf})
    rows = MetricsLog.open(tmp_path).rows
    assert rows[0] == {"epoch": 0, "loss": 1 / 3, "steps": 250.0}
    assert isinstance(rows[0]["epoch"], int)
    assert list(rows[1]) == ["epoch", "loss", "grad"]
    assert math.isnan(rows[1]["loss"])
    assert rows[1]["grad"] == math.inf


@pytest.mark.parametrize(("keep", "epochs"), [(None, [0, 1, 2, 3]), (2, [0, 1]), (0, []), (9, [0, 1, 2, 3])])
def test_resume_drops_the_epochs_that_will_be_run_again(tmp_path: Path, keep: int | None, epochs: list[int]) -> None:
    log = MetricsLog.open(tmp_path)
    for epoch in range(4):
        log.append({"epoch": epoch, "loss": 1.0})
    resumed = MetricsLog.open(tmp_path, keep_until_epoch=keep)
    assert [row["epoch"] for row in resumed.rows] == epochs
    resumed.append({"epoch": 7, "loss": 2.0})
    assert [row["epoch"] for row in MetricsLog.open(tmp_path).rows] == [*epochs, 7]


def test_a_write_that_fails_keeps_the_old_file_and_is_made_up_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    log = MetricsLog.open(tmp_path)
    log.append({"epoch": 0, "loss": 1.0})
    before = log.path.read_bytes()
    with monkeypatch.context() as patch:

        def locked(*_: object) -> None:
            raise PermissionError("opened in another program")

        patch.setattr(Path, "replace", locked)
        log.append({"epoch": 1, "loss": 0.5})
    assert log.path.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.csv"]
    assert "opened in another program" in caplog.text
    log.append({"epoch": 2, "loss": 0.25})
    assert [row["epoch"] for row in MetricsLog.open(tmp_path).rows] == [0, 1, 2]


@pytest.mark.parametrize("text", ["loss\n1.0\n", "epoch,loss\n0,good\n", "epoch;loss\n0;1\n", "epoch,loss\n0,1,2\n"])
def test_a_file_spoilt_by_hand_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.csv").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"metrics\.csv: expected a column 'epoch'.*row 1"):
        MetricsLog.open(tmp_path)


# MLflow


def test_a_run_comes_back_through_the_client(started: Tracker) -> None:
    started.log_metrics({"loss": 0.5, "val_dice": math.nan, "grad": math.inf, "dice:LV": 0.75}, step=0)
    started.log_metrics({"loss": 0.25, "val_dice": 0.5}, step=1)
    started.end("FINISHED")
    run = stored_run(started)
    assert run.data.params == {
        "model.preset": "rdvit",
        "model.loops": "[1, 4]",
        "training.lr": "0.001",
        "training.note": "None",
    }
    assert run.data.tags["preset"] == "rdvit"
    assert run.info.run_name == "demo"
    assert run.info.status == "FINISHED"
    assert history(started, "loss") == [(0, 0.5), (1, 0.25)]
    assert history(started, "val_dice") == [(1, 0.5)]
    assert history(started, "dice_LV") == [(0, 0.75)]
    assert "grad" not in run.data.metrics
    assert not started.failed


def test_artifacts_lie_under_mlartifacts(started: Tracker, runs_dir: Path, tmp_path: Path) -> None:
    figure = Figure()
    figure.add_subplot().plot([0, 1])
    (tmp_path / "summary.json").write_text("{}", encoding="utf-8")
    figure.savefig(tmp_path / "preview_epoch010.png")
    started.log_artifact(tmp_path / "preview_epoch010.png", "figures")
    started.log_text("note: ä\n", "config.yaml")
    started.log_dict({"train": ["a"], "root": Path("x")}, "split.json")
    started.log_artifact(tmp_path / "summary.json", "results")
    assert not started.failed
    assert artifact(started, "").is_relative_to(runs_dir / "mlartifacts")
    assert artifact(started, "figures/preview_epoch010.png").read_bytes().startswith(b"\x89PNG")
    assert artifact(started, "config.yaml").read_text(encoding="utf-8") == "note: ä\n"
    assert json.loads(artifact(started, "split.json").read_text(encoding="utf-8")) == {"train": ["a"], "root": "x"}
    assert artifact(started, "results/summary.json").is_file()
    started.end("FINISHED")


def test_the_data_set_is_recorded(started: Tracker) -> None:
    cases = [{"id": f"patient{i:03d}", "image": Path("a.nii.gz"), "group": None} for i in range(3)]
    started.log_dataset("acdc", cases, digest="0123456789abcdef" * 4, context="validation")
    (entry,) = stored_run(started).inputs.dataset_inputs
    assert (entry.dataset.name, entry.dataset.digest) == ("acdc", ("0123456789abcdef" * 4)[:36])
    assert json.loads(entry.dataset.profile)["num_rows"] == 3
    assert [(tag.key, tag.value) for tag in entry.tags] == [("mlflow.data.context", "validation")]
    started.end("FINISHED")


@pytest.mark.parametrize("status", ["FAILED", "KILLED"])
def test_a_run_ends_as_told(started: Tracker, status: RunStatus) -> None:
    assert stored_run(started).info.status == "RUNNING"
    started.end(status)
    assert stored_run(started).info.status == status


def test_a_signal_waits_for_a_statement(started: Tracker, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within one it would leave the database locked: the run could not be closed, and no other one go on."""
    finished = []

    def told(*_: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        finished.append(True)

    with monkeypatch.context() as patch:
        patch.setattr(started._client, "log_batch", told)
        with pytest.raises(Interrupted), stop_signals():
            started.log_metrics({"loss": 1.0}, step=0)
    assert finished and not started.failed
    started.end("KILLED")
    assert stored_run(started).info.status == "KILLED"


def test_resume_continues_the_same_run(started: Tracker, runs_dir: Path) -> None:
    started.log_metrics({"loss": 0.5}, step=0)
    started.end("KILLED")
    resumed = make_tracker(runs_dir)
    changed = {"model": {"preset": "bvit"}, "resumed": True}
    assert resumed.start("another name", changed, {"resumed": "yes"}, run_id=started.run_id) == started.run_id
    assert stored_run(resumed).info.status == "RUNNING"
    resumed.log_metrics({"loss": 0.25}, step=1)
    resumed.end("FINISHED")
    run = stored_run(started)
    assert history(started, "loss") == [(0, 0.5), (1, 0.25)]
    assert run.data.params["model.preset"] == "rdvit"  # logged once
    assert run.data.params["resumed"] == "True"
    assert run.data.tags["resumed"] == "yes"
    assert run.info.status == "FINISHED"


def test_an_unfinished_run_is_not_joined(started: Tracker, runs_dir: Path) -> None:
    other = make_tracker(runs_dir)
    assert other.start("demo", PARAMS, {}) not in (None, started.run_id)
    for tracker in (other, started):
        tracker.end("FINISHED")


def test_a_run_that_is_gone_gives_way_to_a_new_one(started: Tracker, runs_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    from mlflow import MlflowClient

    started.end("FINISHED")
    MlflowClient(started.uri).delete_run(started.run_id)
    for gone in (started.run_id, "0" * 32):
        tracker = make_tracker(runs_dir)
        assert tracker.start("again", {}, {}, run_id=gone) not in (None, gone)
        assert f"cannot continue run {gone}" in caplog.text
        tracker.end("FINISHED")


def test_long_parameters_are_cut_and_many_are_taken(runs_dir: Path) -> None:
    tracker = make_tracker(runs_dir)
    tracker.start("long", {"long": "a" * 6001, "fits": "b" * 6000} | {f"p{i}": i for i in range(150)}, {})
    params = stored_run(tracker).data.params
    assert params["long"] == "a" * 5999 + "…"
    assert params["fits"] == "b" * 6000
    assert params["p149"] == "149"
    tracker.end("FINISHED")


def test_the_environment_wins(started: Tracker, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlflow import MlflowClient

    monkeypatch.setenv("MLFLOW_TRACKING_URI", started.uri)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "from the environment")
    monkeypatch.setenv("MLFLOW_RUN_ID", started.run_id or "")
    first, second = make_tracker(tmp_path / "unused"), make_tracker(tmp_path / "unused")
    assert first.start("x", {}, {}, run_id="0" * 32) == started.run_id
    assert second.start("x", {}, {}) != started.run_id  # MLFLOW_RUN_ID names one run only
    experiment = MlflowClient(started.uri).get_experiment(stored_run(second).info.experiment_id)
    assert experiment.name == "from the environment"
    assert not (tmp_path / "unused").exists()
    second.end("FINISHED")
    first.end("FINISHED")


def test_nothing_global_is_left_behind(started: Tracker, runs_dir: Path) -> None:
    import mlflow
    from mlflow.telemetry import client, get_telemetry_client

    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() != started.uri
    # As if MONAI had imported MLflow with telemetry on
    client._set_telemetry_client(SimpleNamespace(info={"session_id": "x"}))
    again = make_tracker(runs_dir)
    again.start("again", {}, {})
    assert get_telemetry_client() is None
    assert os.environ["MLFLOW_DISABLE_TELEMETRY"] == "true"
    again.end("FINISHED")
    started.end("FINISHED")


def test_starting_and_ending_is_silent(runs_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    tracker = make_tracker(runs_dir)
    tracker.start("silent", PARAMS, {})
    tracker.log_metrics({"loss": 1.0}, 0)
    tracker.end("FINISHED")
    assert capfd.readouterr() == ("", "")


def test_a_failure_warns_once_and_the_run_is_still_closed(started: Tracker, caplog: pytest.LogCaptureFixture) -> None:
    started.log_artifact(Path("no such file"))
    started.log_artifact(Path("no such file"))
    started.log_metrics({"loss": 1.0}, step=0)
    started.end("FAILED")
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert warnings[0].name == "rdvit"
    assert "log_artifact failed" in warnings[0].getMessage()
    assert "metrics.csv" in warnings[0].getMessage()
    run = stored_run(started)
    assert run.data.metrics == {}
    assert run.info.status == "FAILED"


def test_an_unreachable_server_costs_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR", "0")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_BACKOFF_JITTER", "0")
    tracker = make_tracker(tmp_path)
    begin = time.perf_counter()
    assert tracker.start("x", PARAMS, {}) is None
    tracker.log_metrics({"loss": 1.0}, step=0)
    tracker.log_text("x", "config.yaml")
    tracker.end("FINISHED")
    assert time.perf_counter() - begin < 10
    assert [record.name for record in caplog.records] == ["rdvit"]
    assert "start failed" in caplog.text


@pytest.mark.parametrize("obstacle", ["folder", "no database", "percent"])
def test_a_store_that_cannot_be_used_is_given_up_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, obstacle: str
) -> None:
    runs_dir = tmp_path / ("a%20b" if obstacle == "percent" else "runs")
    runs_dir.mkdir()
    if obstacle == "folder":
        (runs_dir / "mlflow.db").mkdir()
    elif obstacle == "no database":
        (runs_dir / "mlflow.db").write_bytes(b"this is text, not a database " * 10)
    tracker = make_tracker(runs_dir)
    begin = time.perf_counter()
    assert tracker.start("x", {}, {}) is None
    assert time.perf_counter() - begin < 5
    assert len(caplog.records) == 1


def test_a_start_waits_while_another_process_creates_the_database(started: Tracker, runs_dir: Path) -> None:
    started.end("FINISHED")
    other = sqlite3.connect(runs_dir / "mlflow.lock", check_same_thread=False)
    other.execute("BEGIN EXCLUSIVE")
    release = threading.Timer(0.5, other.close)
    begin = time.perf_counter()
    release.start()
    tracker = make_tracker(runs_dir)
    assert tracker.start("x", {}, {}) is not None
    assert time.perf_counter() - begin >= 0.5
    release.join()
    tracker.end("FINISHED")


def test_switched_off_there_is_no_mlflow(tmp_path: Path) -> None:
    tracker = make_tracker(tmp_path / "runs", enabled=False)
    assert tracker.start("x", PARAMS, {}) is None
    tracker.log_metrics({"loss": 1.0}, 0)
    tracker.log_artifact(tmp_path / "nothing")
    tracker.end("FINISHED")
    assert type(tracker) is NullTracker
    assert (tracker.uri, tracker.run_id) == (None, None)
    assert not (tmp_path / "runs").exists()
