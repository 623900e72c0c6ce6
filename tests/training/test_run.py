"""A run from data to summary: what its folder holds, what MLflow holds, and what is refused."""

from __future__ import annotations

import csv
import json
import math
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from rdvit.checkpoint import load_model, load_state
from rdvit.config import Config, load_config
from rdvit.data.datalist import load_data
from rdvit.errors import ConfigError, DataError
from rdvit.training.run import make_split, resume_run, start_run
from rdvit.training.signals import Interrupted
from rdvit.training.trainer import Trainer

if TYPE_CHECKING:
    from mlflow.entities import Run

MakeConfig = Callable[..., Config]


def silent(text: str, done: int, total: int) -> None:
    """A report that nobody reads."""


@dataclass(frozen=True)
class FinishedRun:
    runs: Path
    folder: Path
    summary: dict[str, Any]


@pytest.fixture(scope="module", autouse=True)
def clean_environment() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
            patch.delenv(name)
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, phantom: Path, tiny_config: MakeConfig) -> FinishedRun:
    """One run with experts and halting, from beginning to end and tracked; read-only."""
    runs = tmp_path_factory.mktemp("tracked") / "runs"
    config = tiny_config(preset="rdvit-moe")
    summary = start_run(config, make_split(phantom), runs / "moe", runs, track=True, report=silent)
    return FinishedRun(runs, runs / "moe", summary)


@pytest.fixture(autouse=True)
def no_more_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of ``finished``, which is set up first, are enough: drawing takes most of the time of a tiny run."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)


@pytest.fixture
def untracked(tmp_path: Path, phantom: Path, tiny_config: MakeConfig) -> Callable[..., dict[str, Any]]:
    """``untracked(**training)``: a small run in ``tmp_path / "runs" / "small"`` without MLflow."""

    def start(report: Callable[[str, int, int], None] = silent, **training: Any) -> dict[str, Any]:
        config = tiny_config(training={"epochs": 1, "steps_per_epoch": 1} | training)
        runs = tmp_path / "runs"
        return start_run(config, make_split(phantom), runs / "small", runs, track=False, report=report)

    return start


def mlflow_run(runs: Path, run_id: str) -> Run:
    from mlflow import MlflowClient

    return MlflowClient(f"sqlite:///{(runs / 'mlflow.db').as_posix()}").get_run(run_id)


def run_ids(runs: Path, name: str) -> list[str]:
    """MLflow's ids of the runs of one name."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{(runs / 'mlflow.db').as_posix()}")
    found = client.search_runs(["1"], f"tags.`mlflow.runName` = '{name}'")
    return [run.info.run_id for run in found]


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def png_size(path: Path) -> tuple[int, int]:
    """Width and height from the file's own header."""
    width, height = struct.unpack(">II", path.read_bytes()[16:24])
    return width, height


# The folder


def test_folder_holds_what_the_design_says(finished: FinishedRun) -> None:
    names = {path.name for path in finished.folder.iterdir()}
    files = {"config.yaml", "metrics.csv", "model.safetensors", "model.json", "state.pt", "state.previous.pt", "summary.json"}
    assert names == files | {"split.json", "figures"}  # and no temporary file is left


def test_configuration_is_the_settled_one(finished: FinishedRun) -> None:
    config = load_config(finished.folder / "config.yaml")
    assert config.model.preset == "rdvit-moe" and config.model.out_channels == 4
    _, info = load_model(finished.folder)
    assert info.config == config
    assert info.class_names == {1: "RV", 2: "MYO", 3: "LV"}
    assert info.training["train"] == "fold0-train" and info.training["patients"] == 4


def test_split_says_who_trained_and_who_validated(finished: FinishedRun) -> None:
    split = json.loads((finished.folder / "split.json").read_text())
    train, validation = split["train_patients"], split["validation_patients"]
    assert len(train) == 4 and len(validation) == 1 and not set(train) & set(validation)
    assert split["train_digest"] != split["validation_digest"]


def test_metrics_have_a_row_for_each_epoch(finished: FinishedRun) -> None:
    rows = rows_of(finished.folder)
    assert [row["epoch"] for row in rows] == ["0", "1"]
    assert {"train/loss", "train/ponder", "train/balance", "lr", "seconds", "val/dice", "val/steps"} <= rows[0].keys()
    assert all(0 <= float(row["val/expert_entropy"]) <= 1 for row in rows)
    assert 0 < float(rows[0]["seconds"]) < float(rows[1]["seconds"])


def test_summary_scores_the_best_weights(finished: FinishedRun) -> None:
    written = json.loads((finished.folder / "summary.json").read_text())
    assert written["run"] == finished.summary["run"]
    assert len(written["metric_per_case"]) == 2 and written["failures"] == []
    run = written["run"]
    best = max(float(row["val/dice"]) for row in rows_of(finished.folder))
    assert run["model"]["val_dice"] == run["progress"]["best_dice"] == pytest.approx(best)
    assert written["foreground_mean"]["Dice"] == pytest.approx(best, abs=1e-6)  # scored anew from the files on the disk
    model, _ = load_model(finished.folder)
    assert run["model"]["parameters"] == sum(p.numel() for p in model.parameters())


def test_figures_show_something(finished: FinishedRun) -> None:
    figures = sorted(path.name for path in (finished.folder / "figures").iterdir())
    assert figures == [f"{kind}_final.png" for kind in ("curves", "experts", "halting", "preview")]
    for name in figures:
        width, height = png_size(finished.folder / "figures" / name)
        assert width > 200 and height > 100


# MLflow


def test_mlflow_has_the_whole_run(finished: FinishedRun) -> None:
    from mlflow import MlflowClient

    run_id = finished.summary["run"]["progress"]["run_id"]
    run = mlflow_run(finished.runs, run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "moe"
    assert run.data.params["model.preset"] == "rdvit-moe"
    assert run.data.params["model.experts.num_experts"] == "4"
    last = rows_of(finished.folder)[-1]
    assert run.data.metrics["val/dice"] == pytest.approx(float(last["val/dice"]))
    assert run.data.metrics["train/loss"] == pytest.approx(float(last["train/loss"]))
    assert {entry.tags[0].value for entry in run.inputs.dataset_inputs} == {"train", "validation"}
    client = MlflowClient(f"sqlite:///{(finished.runs / 'mlflow.db').as_posix()}")
    assert {"config.yaml", "split.json", "summary.json", "figures"} <= {f.path for f in client.list_artifacts(run_id)}
    assert (finished.runs / "mlartifacts").is_dir()


@pytest.mark.parametrize(("error", "status"), [(Interrupted(15), "KILLED"), (DataError("spoiled"), "FAILED")])
def test_a_run_that_ends_early_is_closed(
    finished: FinishedRun, phantom: Path, tiny_config: MakeConfig, error: BaseException, status: str
) -> None:
    def stop(text: str, done: int, total: int) -> None:
        raise error

    folder = finished.runs / status
    with pytest.raises(type(error)):
        start_run(tiny_config(), make_split(phantom), folder, finished.runs, track=True, report=stop)
    (run_id,) = run_ids(finished.runs, status)
    assert mlflow_run(finished.runs, run_id).info.status == status
    assert not (folder / "summary.json").exists()  # so that it is not taken for a finished run


def test_resume_continues_the_same_mlflow_run(finished: FinishedRun, tmp_path: Path) -> None:
    folder = finished.runs / "copy"
    shutil.copytree(finished.folder, folder)
    run_id = load_state(folder)["progress"]["run_id"]
    untracked = resume_run(folder, {"training": {"epochs": 3}}, None, finished.runs, track=False, report=silent)
    assert untracked["run"]["progress"]["run_id"] == run_id  # remembered for the next tracked resume
    resume_run(folder, {"training": {"epochs": 4}}, None, finished.runs, track=True, report=silent)
    assert run_ids(finished.runs, "copy") == []
    run = mlflow_run(finished.runs, run_id)
    assert run.info.status == "FINISHED"
    assert run.data.metrics["train/loss"] == pytest.approx(float(rows_of(folder)[-1]["train/loss"]))
    assert [row["epoch"] for row in rows_of(folder)] == ["0", "1", "2", "3"]
    assert load_config(folder / "config.yaml").training.epochs == 4


def test_without_tracking_there_is_no_store(tmp_path: Path, untracked: Callable[..., dict[str, Any]]) -> None:
    summary = untracked()
    assert sorted(path.name for path in (tmp_path / "runs").iterdir()) == ["small"]
    assert summary["run"]["progress"]["run_id"] == ""
    assert math.isfinite(summary["foreground_mean"]["Dice"])


# What is refused


def test_an_existing_run_is_never_overwritten(tmp_path: Path, untracked: Callable[..., dict[str, Any]]) -> None:
    def stop(text: str, done: int, total: int) -> None:
        raise Interrupted(2)

    with pytest.raises(Interrupted):
        untracked(report=stop)
    with pytest.raises(ConfigError, match=r"holds a run already.*--resume .*small continues it"):
        untracked()


def test_a_folder_that_cannot_be_made(tmp_path: Path, untracked: Callable[..., dict[str, Any]]) -> None:
    (tmp_path / "runs").write_text("a file where the folder should be")
    with pytest.raises(ConfigError, match=r"small: cannot be created"):
        untracked()


def test_resume_of_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no run to resume"):
        resume_run(tmp_path, {}, None, tmp_path, track=False, report=silent)


@pytest.mark.parametrize("part", ["train", "validation"])
def test_resume_with_other_data_is_refused(finished: FinishedRun, phantom: Path, tmp_path: Path, part: str) -> None:
    other = tmp_path / "other"
    shutil.copytree(phantom, other)
    patient = json.loads((finished.folder / "split.json").read_text())[f"{part}_patients"][0]
    image = next(path for path in (other / "training" / patient).glob("*_frame01.nii.gz"))
    image.write_bytes(image.read_bytes() + b"\0")
    before = (finished.folder / "config.yaml").read_bytes()
    with pytest.raises(DataError, match=f"the {part} cases differ"):
        resume_run(finished.folder, {"training": {"epochs": 3}}, other, finished.runs, track=False, report=silent)
    assert (finished.folder / "config.yaml").read_bytes() == before


def test_resume_takes_data_that_moved(finished: FinishedRun, phantom: Path, tmp_path: Path) -> None:
    moved, folder = tmp_path / "moved", tmp_path / "runs" / "run"
    shutil.copytree(phantom, moved)
    shutil.copytree(finished.folder, folder)
    summary = resume_run(folder, {}, moved, tmp_path / "runs", track=False, report=silent)
    assert str(moved) in summary["metric_per_case"][0]["reference_file"]


# Splits


def test_split_by_fold_and_fraction(phantom: Path) -> None:
    whole, half = make_split(phantom, fold=2), make_split(phantom, fold=2, fraction=0.5)
    assert len(half.record["train_patients"]) == 2
    assert set(half.record["train_patients"]) < set(whole.record["train_patients"])
    assert half.record["validation_patients"] == whole.record["validation_patients"]
    assert half.record["train_digest"] != whole.record["train_digest"]
    held_out = [make_split(phantom, fold=k).record["validation_patients"] for k in range(5)]
    assert sorted(patient for patients in held_out for patient in patients) == [f"patient{i:03d}" for i in range(1, 6)]


def test_a_list_keeps_its_own_split(phantom: Path, tmp_path: Path) -> None:
    def entry(patient: int) -> dict[str, str]:
        stem = phantom / "training" / f"patient{patient:03d}" / f"patient{patient:03d}_frame01"
        return {"id": f"p{patient}", "image": f"{stem}.nii.gz", "label": f"{stem}_gt.nii.gz"}

    listed = {"labels": {"1": "RV"}, "training": [entry(1), entry(2)], "validation": [entry(3)]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    split = make_split(tmp_path / "list.json", fold=4)
    assert [case.id for case in split.train] == ["p1", "p2"] and [case.id for case in split.validation] == ["p3"]
    assert (split.names["train"], split.names["validation"]) == ("training", "validation")


def test_nothing_to_validate_with(phantom: Path, tmp_path: Path) -> None:
    image = next(phantom.glob("training/patient001/*_frame01.nii.gz"))
    listed = {"labels": {"1": "RV"}, "training": [{"image": str(image)}], "validation": [{"image": str(image)}]}
    (tmp_path / "list.json").write_text(json.dumps(listed))
    with pytest.raises(DataError, match="0 labelled cases in 'training', 0 in 'validation'"):
        make_split(tmp_path / "list.json")


def test_all_patients_train_for_weights_to_ship(phantom: Path, caplog: pytest.LogCaptureFixture) -> None:
    split = make_split(phantom, "all")
    everyone = {case.patient for case in load_data(phantom).cases}
    assert {case.patient for case in split.train} == everyone
    assert {case.patient for case in split.validation} < everyone
    assert "say nothing of new patients" in caplog.text
