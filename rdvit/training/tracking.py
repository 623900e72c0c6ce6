"""What a training leaves behind while it runs: `metrics.csv`, always, and an MLflow run, as long as MLflow works.

`MetricsLog` is the record that resume, reports and figures read. The tracker is a courtesy on top of it: its first
failure is warned about once, and the training goes on without it.
"""

from __future__ import annotations

import contextlib
import csv
import functools
import logging
import math
import os
import re
import shutil
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar
from uuid import uuid4

from rdvit.atomic import atomic
from rdvit.errors import DataError
from rdvit.training.lock import locked
from rdvit.training.signals import held

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

logger = logging.getLogger("rdvit")

RunStatus = Literal["FINISHED", "FAILED", "KILLED"]
Config = Mapping[str, Any]  # nested
Table = Sequence[Mapping[str, object]]  # one mapping per row, all with the same columns

RUN_TAG = "rdvit.run"  # the tag that holds a run folder's own name, by which its MLflow run is found again
MAX_PARAM_LENGTH = 6000  # MLflow's own limit for the value of a parameter
MAX_DIGEST_LENGTH = 36  # and for the digest of a data set
SERVER_SCHEMES = ("http", "https", "databricks", "databricks-uc")  # these choose where artifacts go by themselves

P = ParamSpec("P")
R = TypeVar("R")


class MetricsLog:
    """The history of a training: one row per epoch, kept in memory and in `metrics.csv`.

    The file is small, so every epoch rewrites all of it: a new column may appear at any time, and a reader never sees
    half a row.
    """

    def __init__(self, path: Path, rows: list[dict[str, float]]) -> None:
        self.path = path
        self.rows = rows

    @classmethod
    def open(cls, run_dir: Path, keep_until_epoch: int | None = None) -> MetricsLog:
        """Continues the `metrics.csv` of a run folder, or begins one; nothing is written before the first `append`.

        Args:
            run_dir: The run folder, created if need be.
            keep_until_epoch: The epoch that the training (re)starts with: rows of it and of later epochs are dropped.
                None keeps all rows, 0 none.

        Raises:
            DataError: The file is there but is not a table of numbers with a column `epoch`.
        """
        run_dir.mkdir(parents=True, exist_ok=True)
        path = run_dir / "metrics.csv"
        rows = _read_rows(path) if path.exists() else []
        return cls(path, [row for row in rows if keep_until_epoch is None or row["epoch"] < keep_until_epoch])

    def append(self, row: Mapping[str, float]) -> None:
        """Adds one epoch and rewrites the file; where that fails (open in Excel, disk full), it warns and goes on.

        Args:
            row: Names and values, `epoch` among them. What was not measured in this epoch is simply left out.
        """
        values = {name: float(value) for name, value in row.items()}
        self.rows.append({"epoch": int(row["epoch"])} | {k: v for k, v in values.items() if k != "epoch"})
        try:
            self._write()
        except OSError as error:
            logger.warning("%s could not be written (%s); the next epoch tries again", self.path, error)

    def _write(self) -> None:
        columns = list(dict.fromkeys(name for row in self.rows for name in row))  # in order of appearance
        with atomic(self.path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, columns, restval="")
            writer.writeheader()
            writer.writerows(self.rows)


def _read_rows(path: Path) -> list[dict[str, float]]:
    """Reads back what `MetricsLog` wrote: an empty cell is a value that was not measured."""
    rows: list[dict[str, float]] = []
    with path.open(encoding="utf-8-sig", newline="") as file:
        for cells in csv.DictReader(file):
            try:
                epoch = int(cells.pop("epoch"))
                rows.append({"epoch": epoch} | {name: float(cell) for name, cell in cells.items() if cell})
            except (KeyError, TypeError, ValueError) as error:
                raise DataError(
                    f"expected a column 'epoch' and numbers only, found {error!r} in row {len(rows) + 1}",
                    file=path,
                    hint="the file was changed by hand: repair it, or move it away to resume without the history",
                ) from error
    return rows


class NullTracker:
    """The tracker that does nothing: it stands in where tracking is off, and names what a tracker can do.

    Attributes:
        uri: Where the runs are kept, for `mlflow ui --backend-store-uri URI`; None without MLflow.
        run_id: MLflow's id of this run, to be kept in the training state for resume; None before `start`.
    """

    uri: str | None = None
    run_id: str | None = None

    def start(self, run_name: str, params: Config, tags: Mapping[str, str], run_id: str | None = None) -> str | None:
        """Begins a run, or continues the one of `run_id`, or else of the same tag `rdvit.run`; a new one where that is gone.

        The nested configuration `params` is flattened to dotted names and logged once per run.

        Returns:
            The id of the run, or None where there is no tracking.
        """
        return None

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Logs the measures of one step (an epoch); NaN and infinity are left out, as MLflow garbles them."""

    def log_text(self, text: str, file: str) -> None:
        """Stores a text as an artifact, e.g. the resolved `config.yaml`."""

    def log_dict(self, dictionary: dict[str, Any], file: str) -> None:
        """Stores a dictionary as an artifact, written as JSON or YAML by the suffix of `file`, e.g. `split.json`."""

    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        """Copies a file to the artifacts, into `folder` if one is given."""

    def log_dataset(self, name: str, cases: Table, digest: str, context: str = "train") -> None:
        """Records which cases were used, and for what (`context`: train, validation, test).

        The digest, a hash of the data, is cut to the 36 characters that MLflow takes.
        """

    def end(self, status: RunStatus) -> None:
        """Closes the run. Belongs into a `finally`: a run that nobody closes counts as running for ever."""


def make_tracker(runs_dir: Path, experiment: str = "rdvit", enabled: bool = True) -> NullTracker:
    """The tracker of a training.

    Args:
        runs_dir: The folder of all runs; it holds `mlflow.db` and `mlartifacts/` unless the environment says otherwise.
        experiment: MLflow's name for a group of runs.
        enabled: False gives the tracker that does nothing.
    """
    return Tracker(runs_dir, experiment) if enabled else NullTracker()


def _never_fails(method: Callable[Concatenate[Tracker, P], R]) -> Callable[Concatenate[Tracker, P], R | None]:
    """Lets the first exception of any call switch the tracker off instead of stopping the training.

    A signal waits for a call on a database: within a statement it would leave it locked, also for `end`.
    """

    @functools.wraps(method)
    def guarded(self: Tracker, *args: P.args, **kwargs: P.kwargs) -> R | None:
        if not self.failed:
            try:
                with contextlib.nullcontext() if self._is_server else held():
                    return method(self, *args, **kwargs)
            except Exception as error:
                self._switch_off(method.__name__, error)
        return None

    return guarded


class Tracker(NullTracker):
    """Keeps a training as an MLflow run.

    The environment wins over the arguments: MLFLOW_TRACKING_URI, MLFLOW_EXPERIMENT_NAME, MLFLOW_RUN_ID, and
    MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING for CPU, memory and GPU curves. Every call names its run by id, so MLflow's
    global "active run" is neither used nor left behind. MLflow itself is imported by `start`. After a first failure
    `failed` is True, and nothing more is logged.
    """

    def __init__(self, runs_dir: Path, experiment: str) -> None:
        self.failed = False
        runs_dir = runs_dir.absolute()  # not resolve(): a mapped Windows drive has to stay a drive letter
        self._artifacts = runs_dir / "mlartifacts"
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        self._database = None if uri else runs_dir / "mlflow.db"
        self.uri: str = uri or f"sqlite:///{(runs_dir / 'mlflow.db').as_posix()}"
        self.experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or experiment
        self._is_server = self.uri.partition(":")[0] in SERVER_SCHEMES
        self._client: MlflowClient
        self._system_metrics: Any = None

    @_never_fails
    def start(self, run_name: str, params: Config, tags: Mapping[str, str], run_id: str | None = None) -> str | None:
        _import_mlflow_quietly()
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunTag

        with contextlib.nullcontext() if self._database is None else _setting_up(self._database):
            self._client = MlflowClient(self.uri)
            experiment_id = self._experiment_id()
        with held():  # a run that is begun is also known, so that `end` can close it
            run = self._open_run(run_name, experiment_id, run_id, tags)
            self.run_id = run.info.run_id
        # MLflow refuses to change a parameter, so a resumed run keeps those it began with.
        new = {key: value for key, value in _flatten(params).items() if key not in run.data.params}
        self._client.log_batch(
            self.run_id,
            params=[Param(key, value) for key, value in new.items()],
            tags=[RunTag(key, value) for key, value in tags.items()],
        )
        self._start_system_metrics()
        return self.run_id

    def _open_run(self, run_name: str, experiment_id: str, run_id: str | None, tags: Mapping[str, str]) -> Run:
        """Reopens the run that the environment or the caller names, or creates one."""
        from mlflow import MlflowException

        # Taken out of the environment, as mlflow.start_run does: it names one run, not all of this process.
        run_id = os.environ.pop("MLFLOW_RUN_ID", None) or run_id or self._lost_run(experiment_id, tags)
        if run_id is not None:
            try:
                run = self._client.get_run(run_id)
                self._client.update_run(run_id, status="RUNNING")
                return run
            except MlflowException as error:
                # Not there, or in MLflow's bin, which is an invalid state
                if error.error_code not in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    raise
                logger.warning("MLflow cannot continue run %s (%s): a new run begins", run_id, error)
        return self._client.create_run(experiment_id, run_name=run_name, tags=dict(tags))

    def _lost_run(self, experiment_id: str, tags: Mapping[str, str]) -> str | None:
        """The id of the run that this training created before it was killed, and had no time to note."""
        if RUN_TAG not in tags:
            return None
        runs = self._client.search_runs([experiment_id], f"tags.`{RUN_TAG}` = '{tags[RUN_TAG]}'", max_results=1)
        return str(runs[0].info.run_id) if runs else None

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.experiment)
        if experiment is not None:
            return experiment.experiment_id
        location = None if self._is_server else self._artifacts.as_uri()
        return self._client.create_experiment(self.experiment, artifact_location=location)

    def _start_system_metrics(self) -> None:
        from mlflow.environment_variables import MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING

        if MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING.get():
            from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

            self._system_metrics = SystemMetricsMonitor(self.run_id, resume_logging=True, tracking_uri=self.uri)
            self._system_metrics.start()

    @_never_fails
    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        from mlflow.entities import Metric

        now_ms = int(time.time() * 1000)
        finite = {key: float(value) for key, value in metrics.items() if math.isfinite(value)}
        self._client.log_batch(self.run_id, [Metric(_name(key), value, now_ms, step) for key, value in finite.items()])

    @_never_fails
    def log_text(self, text: str, file: str) -> None:
        self._client.log_text(self.run_id, text, file)

    @_never_fails
    def log_dict(self, dictionary: dict[str, Any], file: str) -> None:
        self._client.log_dict(self.run_id, dictionary, file)

    @_never_fails
    def log_artifact(self, path: Path, folder: str | None = None) -> None:
        self._client.log_artifact(self.run_id, str(path), folder)

    @_never_fails
    def log_dataset(self, name: str, cases: Table, digest: str, context: str = "train") -> None:
        import mlflow.data
        import pandas as pd  # type: ignore[import-untyped]
        from mlflow.entities import Dataset, DatasetInput, InputTag

        table = pd.DataFrame([{column: str(value) for column, value in case.items()} for case in cases])
        dataset = mlflow.data.from_pandas(table, name=name, digest=digest[:MAX_DIGEST_LENGTH])
        entry = DatasetInput(Dataset.from_dictionary(dataset.to_dict()), tags=[InputTag("mlflow.data.context", context)])
        self._client.log_inputs(self.run_id, datasets=[entry])

    def end(self, status: RunStatus) -> None:
        if self.run_id is None:
            return
        if self._system_metrics is not None:
            self._system_metrics.finish()
        try:  # after a failure as well: the run should not count as running for ever if MLflow can still be told
            self._client.set_terminated(self.run_id, status)
        except Exception as error:
            self._switch_off("end", error)

    def _switch_off(self, call: str, error: Exception) -> None:
        if not self.failed:
            reason = " ".join(str(error).split())[:300]
            text = "MLflow tracking is off from here on: %s failed (%s: %s). metrics.csv still holds every epoch."
            logger.warning(text, call, type(error).__name__, reason)
        self.failed = True


@contextlib.contextmanager
def _setting_up(database: Path) -> Iterator[None]:
    """Creates the database if need be, one process at a time: two at once break its schema for good, and so does a kill.

    A file that cannot be opened fails here, where MLflow would retry for 100 seconds.
    """
    if re.search(r"[%?]", database.as_posix()):
        raise ValueError(f"a database URI cannot hold the % or ? of {database}; set MLFLOW_TRACKING_URI")
    database.parent.mkdir(parents=True, exist_ok=True)
    with locked(database.with_suffix(".lock"), timeout=60):
        if not database.exists():
            _create(database)
        sqlite3.connect(database).close()
        yield


def _create(database: Path) -> None:
    """Makes MLflow's tables under another name first: with half of them, as a kill leaves them, MLflow could not go on."""
    from mlflow import MlflowClient

    for leftover in database.parent.glob(f"{database.stem}.*.part"):
        leftover.unlink(missing_ok=True)
    part = database.with_suffix(f".{uuid4().hex}.part")  # a new name: MLflow keeps one connection for each
    MlflowClient(f"sqlite:///{part.as_posix()}").search_experiments(max_results=1)
    whole = shutil.copyfile(part, database.with_suffix(".whole.part"))
    whole.replace(database)
    with contextlib.suppress(OSError):  # Windows keeps what MLflow still has open
        part.unlink()


def _import_mlflow_quietly() -> None:
    """Imports MLflow without telemetry and without chatter on standard output or error.

    MONAI imports MLflow too, so it may have been set up before: what is running is switched off again.
    """
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("DO_NOT_TRACK", "true")
    # Standard output belongs to --json; MLflow prints the address of a run on a server there.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    # MLflow would wait four minutes and more for a server that is down, at every call.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "3")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
    import mlflow

    if hasattr(mlflow, "telemetry"):
        mlflow.telemetry.set_telemetry_client()
    if "MLFLOW_LOGGING_LEVEL" not in os.environ:
        for name in ("mlflow", "alembic"):
            logging.getLogger(name).setLevel(logging.WARNING)
        logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # tracebacks of what we tell in a line
        logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)  # a line per retry


def _flatten(config: Config, prefix: str = "") -> dict[str, str]:
    """Turns a nested configuration into MLflow parameters: {"a": {"b": 1}} becomes {"a.b": "1"}."""
    flat: dict[str, str] = {}
    for key, value in config.items():
        if isinstance(value, Mapping):
            flat |= _flatten(value, f"{prefix}{key}.")
        else:
            text = str(value)
            if len(text) > MAX_PARAM_LENGTH:
                text = text[: MAX_PARAM_LENGTH - 1] + "…"
            flat[_name(f"{prefix}{key}")] = text
    return flat


def _name(key: str) -> str:
    """Replaces what MLflow does not take in the name of a metric or parameter (the stricter rule, that of Windows)."""
    return re.sub(r"[^/\w.\- ]", "_", key)
