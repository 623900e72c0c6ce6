"""Set up a run: find the data, settle the configuration, open the folder and the tracker, train, evaluate, sum up."""

from __future__ import annotations

import json
import logging
import os
import platform
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

import torch

from rdvit import __version__
from rdvit.atomic import write
from rdvit.checkpoint import DESCRIPTION, PREVIOUS, STATE, ModelInfo, load_model
from rdvit.config import Config, load_config, merge, validate
from rdvit.data.datalist import Case, DataList, digest, load_data, patients, select
from rdvit.data.loaders import TrainingSamples, cached_cases
from rdvit.data.planning import settle
from rdvit.errors import ConfigError, DataError
from rdvit.evaluation.summary import summarize, to_json
from rdvit.inference.cases import score_cases
from rdvit.inference.predictor import Predictor
from rdvit.models.build import all_parameters, build_segmenter, count_parameters
from rdvit.training.finetune import pretrained_weights, with_spacing_of_model
from rdvit.training.lock import sole_training
from rdvit.training.signals import Interrupted, held, interruptions_restored
from rdvit.training.tracking import RUN_TAG, NullTracker, make_tracker
from rdvit.training.trainer import Report, Trainer
from rdvit.training.validation import Validation

_log = logging.getLogger("rdvit")


@dataclass(frozen=True)
class Split:
    """Which cases train and which validate, and how they were chosen."""

    data: DataList
    train: list[Case]
    validation: list[Case]
    names: dict[str, Any]

    @property
    def record(self) -> dict[str, Any]:
        """For ``split.json``: names, patients and the digests of both parts."""
        return self.names | {
            "train_patients": patients(self.train),
            "validation_patients": patients(self.validation),
            "train_digest": digest(self.train),
            "validation_digest": digest(self.validation),
        }


def make_split(path: Path, fold: int | Literal["all"] = 0, fraction: float = 1.0) -> Split:
    """Training and validation cases of a data set.

    A JSON list with ``training`` and ``validation`` keeps its own split; everything else is split into five folds by patient.

    Args:
        path: Data set folder or JSON list.
        fold: The fold that validates; ``all`` trains on all patients, for weights to ship, and looks at those of fold 0 again.
        fraction: Share of the training patients that is used; validation is always whole.

    Raises:
        DataError: If either part is empty.
    """
    data = load_data(path)
    own = {"training", "validation"} <= data.splits.keys()
    train_name, validation_name = ("training", "validation") if own else (f"fold{fold}-train", f"fold{fold}-val")
    if fold == "all":
        train_name, validation_name = "all", "validation" if own else "fold0-val"
        _log.warning("warning: all patients train, those that validate too: the scores of this run say nothing of new patients")
    train = [c for c in select(data, train_name, fraction) if c.label is not None]
    validation = [c for c in select(data, validation_name) if c.label is not None]
    if not train or not validation:
        raise DataError(
            f"nothing to train with: {len(train)} labelled cases in '{train_name}', {len(validation)} in '{validation_name}'",
            file=data.root,
        )
    names = {"data": str(path), "train": train_name, "validation": validation_name, "fraction": fraction}
    return Split(data, train, validation, names)


def new_run_folder(out: Path | None, runs: Path, split: Split, config: Config) -> Path:
    """A folder for a new run; an existing run is never overwritten.

    Raises:
        ConfigError: If ``out`` already holds a run.
    """
    if out is None:
        stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
        out = runs / f"{split.data.name.lower()}-{config.model.spatial_dims}d-{config.model.preset}-{stamp}".replace(" ", "_")
    if (out / "config.yaml").exists():
        raise ConfigError("holds a run already", file=out, hint=f"--resume {out} continues it")
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot be created: {error.strerror}", file=out) from None
    return out


def start_run(config: Config, split: Split, out: Path | None, runs: Path, track: bool, report: Report) -> dict[str, Any]:
    """Train in a new folder, from scratch or from ``training.finetune``; returns the content of ``summary.json``."""
    config = settle(with_spacing_of_model(config, split.data.class_names), split.train, split.data.class_names)
    if config.training.finetune is not None:
        pretrained_weights(config, split.data.class_names)  # what cannot work is refused before a folder is made
    folder = new_run_folder(out, runs, split, config)
    record = split.record | {"run": uuid4().hex}
    write(folder / "split.json", json.dumps(record, indent=2))
    write(folder / "config.yaml", config.to_yaml())  # last: from here on it is a run that can be resumed
    with sole_training(folder):
        return _run(config, split, folder, record["run"], make_tracker(runs, enabled=track), report)


def resume_run(
    folder: Path, changes: dict[str, Any], data: Path | None, runs: Path, track: bool, report: Report
) -> dict[str, Any]:
    """Continue a run from its last complete epoch, or begin it if it was stopped before its first.

    Args:
        folder: The run.
        changes: Training settings to change, e.g. more epochs or minutes.
        data: Where the data lies now, if it moved.
        runs: Folder of all runs, for the tracker.
        track: Whether MLflow is used.
        report: Progress callback.

    Raises:
        DataError: If the data is no longer what the run began with.
        ConfigError: If there is no run, or another process trains in it.
    """
    if not all((folder / name).is_file() for name in ("config.yaml", "split.json")):
        raise ConfigError("no run to resume: expected config.yaml and split.json", file=folder)
    config = validate(merge(load_config(folder / "config.yaml").model_dump(), changes))
    record = json.loads((folder / "split.json").read_text(encoding="utf-8"))
    fold: Any = int(record["train"][4:-6]) if record["train"].startswith("fold") else "all" if record["train"] == "all" else 0
    split = make_split(data or Path(record["data"]), fold, record["fraction"])
    for part in ("train", "validation"):
        if split.record[f"{part}_digest"] != record[f"{part}_digest"]:
            raise DataError(f"the {part} cases differ from those the run began with", file=folder / "split.json")
    with sole_training(folder):
        write(folder / "config.yaml", config.to_yaml())
        return _run(config, split, folder, record.get("run", ""), make_tracker(runs, enabled=track), report)


def _run(config: Config, split: Split, folder: Path, name: str, tracker: NullTracker, report: Report) -> dict[str, Any]:
    """Train in a folder from where it stands; however that ends, MLflow is told."""
    status: Any = "FAILED"
    try:
        try:
            with interruptions_restored():
                trainer = _trainer(config, split, folder, tracker, report)
                _start_tracking(tracker, trainer, split, folder, name)
                trainer.fit()
                summary = _summary(trainer, split, folder, tracker)
            status = "FINISHED"
            return summary
        except KeyboardInterrupt:
            status = "KILLED"
            raise
        finally:
            with held():
                tracker.end(status)
    except Interrupted as stop:
        stop.folder = folder
        raise


def _trainer(config: Config, split: Split, folder: Path, tracker: NullTracker, report: Report) -> Trainer:
    """The cases in memory, and the training as the folder has it."""
    class_names = split.data.class_names
    origin = {"dataset": split.data.name, **split.names, "seed": config.training.seed, "patients": len(patients(split.train))}
    if config.training.finetune is not None:
        origin |= {"finetuned_from": config.training.finetune, "train_only": config.training.train_only}
    info = ModelInfo(config, class_names, origin)
    _log.info(
        "%s: %d cases of %d patients train, %d cases of %d patients validate",
        split.data.name, len(split.train), len(patients(split.train)), len(split.validation), len(patients(split.validation)),
    )  # fmt: skip
    samples = TrainingSamples(cached_cases(split.train, config, tuple(class_names), folder.parent / "cache"), config)
    resumes = any((folder / file).exists() for file in (STATE, PREVIOUS, DESCRIPTION, "metrics.csv"))
    weights = None if resumes or config.training.finetune is None else pretrained_weights(config, class_names)
    validation = Validation(split.validation, config, class_names)
    trainer = Trainer(config, info, folder, samples, validation, tracker, report, weights)
    trained, total = count_parameters(trainer.model.module), all_parameters(trainer.model.module)
    _log.info("%d of %d parameters are trained (%.2f %%)", trained, total, 100 * trained / total)
    if resumes:
        trainer.resume()
    return trainer


def _start_tracking(tracker: NullTracker, trainer: Trainer, split: Split, folder: Path, name: str) -> None:
    config = trainer.config
    tags = {
        RUN_TAG: name,
        "rdvit.version": __version__,
        "rdvit.folder": str(folder),
        "rdvit.parameters": str(all_parameters(trainer.model.module)),
        "rdvit.trained_parameters": str(count_parameters(trainer.model.module)),
        "rdvit.torch": torch.__version__,
    }
    run_id = tracker.start(folder.name, config.model_dump(mode="json"), tags, trainer.progress.run_id or None)
    trainer.progress.run_id = run_id or trainer.progress.run_id  # kept where this resume is not tracked
    if trainer.progress.epoch:
        return
    trainer.save()  # something to resume from, whatever the first epoch leaves behind
    tracker.log_text(config.to_yaml(), "config.yaml")
    tracker.log_dict(split.record, "split.json")
    for context, cases in (("train", split.train), ("validation", split.validation)):
        table = [{"id": c.id, "patient": c.patient, "group": c.group or "", "phase": c.phase or ""} for c in cases]
        tracker.log_dataset(split.data.name, table, digest(cases), context)


def _summary(trainer: Trainer, split: Split, folder: Path, tracker: NullTracker) -> dict[str, Any]:
    """Score the best weights on the validation cases with all metrics; write ``summary.json``."""
    model, info = load_model(folder)
    predictor = Predictor(model, info, trainer.config.training.device, trainer.precision)
    results = score_cases(predictor, split.validation, info.class_names, report=trainer.report)
    parameters = count_parameters(build_segmenter(info.config.model, seed=0))
    run = {
        "folder": str(folder),
        "model": info.training
        | {"parameters": parameters, "trained_parameters": count_parameters(trainer.model.module)}
        | {"loops": info.config.model.loops, "preset": info.config.model.preset},
        "progress": asdict(trainer.progress),
        "precision": trainer.precision.name,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, {torch.get_num_threads()} threads, torch {torch.__version__}",
    }
    summary = {"run": run, **summarize(results, info.class_names)}
    write(folder / "summary.json", to_json(summary))
    tracker.log_artifact(folder / "summary.json")
    tracker.log_metrics({"best/dice": trainer.progress.best_dice}, step=trainer.progress.epoch)
    return summary
