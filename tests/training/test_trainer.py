"""A training learns, stops when it should, survives being stopped, and repeats itself exactly."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from safetensors.torch import load_file
from torch import Tensor

from rdvit.checkpoint import ModelInfo, load_state
from rdvit.config import Config
from rdvit.data.loaders import TrainingSamples, cached_cases
from rdvit.errors import DataError, ModelError
from rdvit.inference.predictor import Predictor
from rdvit.models.build import build_segmenter, expert_layers
from rdvit.training import trainer as trainer_module
from rdvit.training.run import make_split
from rdvit.training.schedule import ema_decay, learning_rate
from rdvit.training.signals import Interrupted, stop_signals
from rdvit.training.tracking import NullTracker
from rdvit.training.trainer import Trainer
from rdvit.training.validation import Validation

NAMES = {1: "RV", 2: "MYO", 3: "LV"}
CLOCKS = ("seconds", "train/network_share")  # the only columns that may differ between two equal trainings
MakeTrainer = Callable[..., Trainer]


class Scores(Validation):
    """A validation that takes no time: hands out the Dice it was given, one after the other, then the last for ever."""

    def __init__(self, *dice: float) -> None:
        self.cases, self.scores, self.calls = [], list(dice), 0

    def __call__(self, predictor: Predictor) -> dict[str, float]:
        self.calls += 1
        return {"val/dice": self.scores[min(self.calls, len(self.scores)) - 1]}

    def expert_usage(self, predictor: Predictor) -> np.ndarray | None:
        return None

    def figures(self, predictor: Predictor) -> dict[str, Figure]:
        return {}


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory, phantom: Path, tiny_config: Callable[..., Config]) -> MakeTrainer:
    """``make_trainer(folder, validation, dim, preset, model=..., **training)``; the cases are read once for all."""
    split = make_split(phantom)
    cases = cached_cases(split.train, tiny_config(), tuple(NAMES), tmp_path_factory.mktemp("cache"))

    def make(
        folder: Path,
        validation: Validation | None = None,
        dim: str = "2d",
        preset: str = "rdvit",
        model: dict[str, Any] | None = None,
        **training: Any,
    ) -> Trainer:
        report = training.pop("report", lambda text, done, total: None)
        config = tiny_config(dim, preset, model=model or {}, training=training)
        validation = validation or Validation(split.validation[:1], config, NAMES)
        info = ModelInfo(config, NAMES, {"data": "phantom"})
        return Trainer(config, info, folder, TrainingSamples(cases, config), validation, NullTracker(), report)

    return make


@pytest.fixture(autouse=True)
def figures(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the figures that would be made: drawing takes longer than these trainings, test_run.py looks at them."""
    names: list[str] = []
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: names.append(name))
    return names


def rows_of(trainer: Trainer) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in CLOCKS} for row in trainer.history.rows]


def tensors_of(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, averaged weights and the optimiser's moments."""
    state = load_state(trainer.folder)
    moments = {f"{i}.{k}": v for i, values in state["optimizer"]["state"].items() for k, v in values.items()}
    return {f"model.{k}": v for k, v in state["model"].items()} | {f"ema.{k}": v for k, v in state["ema"].items()} | moments


# Learning


def test_loss_falls_on_the_phantom(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=6, steps_per_epoch=6, batch_size=4, learning_rate=1e-2)
    trainer.fit()
    for part, share in (("loss", 0.9), ("cross_entropy", 0.8)):
        values = [row[f"train/{part}"] for row in trainer.history.rows]
        assert values[-1] < share * values[0], part
    assert all(row["train/gradient_norm"] > 0 and 1 <= row["train/loops"] <= 3 for row in trainer.history.rows)


@pytest.mark.parametrize(
    ("dim", "preset"),
    [
        ("2d", "vit"),
        ("3d", "vit"),
        ("3d", "rdvit-moe"),
        ("2d", "bvit"),
        ("3d", "revit"),
        ("2d", "revit"),
        ("2d", "softmor"),
        ("2d", "sret"),
        ("3d", "sret"),
    ],
)
def test_every_preset_trains(tmp_path: Path, make_trainer: MakeTrainer, dim: str, preset: str) -> None:
    trainer = make_trainer(tmp_path, dim=dim, preset=preset, epochs=1, steps_per_epoch=4, loop_sampling={"low": 2})
    before = {name: p.detach().clone() for name, p in trainer.model.module.named_parameters()}
    trainer.fit()
    (row,) = trainer.history.rows
    assert {"val/dice", "val/dice_RV", "val/dice_MYO", "val/dice_LV", "val/steps"} <= row.keys()
    assert ("train/ponder" in row) == preset.startswith("rdvit")
    assert ("train/balance" in row) == ("val/expert_entropy" in row) == (preset == "rdvit-moe")
    still = [name for name, p in trainer.model.module.named_parameters() if torch.equal(p, before[name])]
    assert not still  # nothing is left out of the optimiser or cut off from the loss


def test_one_stage_trains_as_the_last_state_does_and_two_do_not(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """TC-5 through a whole training: the same weights to the last digit."""
    runs = []
    settings: list[dict[str, Any]] = [{"supervision": "final"}, *({"supervision": "stagewise", "stages": n} for n in (1, 2))]
    for i, setting in enumerate(settings):
        setting |= {"epochs": 1, "steps_per_epoch": 3, "loop_sampling": {"low": 2}}
        trainer = make_trainer(tmp_path / str(i), Scores(0.5), model={"backprop_loops": None}, **setting)
        trainer.fit()
        runs.append((rows_of(trainer), tensors_of(trainer)))
    assert runs[0][0] == runs[1][0]
    assert all(torch.equal(value, runs[1][1][name]) for name, value in runs[0][1].items())
    assert runs[0][0] != runs[2][0]


@pytest.mark.parametrize("model", [{"backprop_loops": 2}, {"solver": "midpoint"}])
def test_other_ways_through_the_loop_train(tmp_path: Path, make_trainer: MakeTrainer, model: dict[str, Any]) -> None:
    """Every parameter moves."""
    trainer = make_trainer(tmp_path, Scores(0.5), model=model, epochs=1, steps_per_epoch=4, loop_sampling={"low": 3})
    before = {name: p.detach().clone() for name, p in trainer.model.module.named_parameters()}
    trainer.fit()
    assert not [name for name, p in trainer.model.module.named_parameters() if torch.equal(p, before[name])]


def test_learning_rate_follows_the_epochs(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=5, steps_per_epoch=1)
    trainer.fit()
    expected = [learning_rate(done / 5, trainer.config.training) for done in range(5)]
    assert [row["lr"] for row in trainer.history.rows] == pytest.approx(expected)


def test_averaged_weights_follow_their_schedule(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    passed: list[Tensor] = []

    def remember(text: str, done: int, total: int) -> None:
        if "loss" in text:
            passed.append(trainer.model.module.decoder.out.conv.conv.weight.detach().clone())

    trainer = make_trainer(tmp_path, Scores(0.5), epochs=1, steps_per_epoch=5, learning_rate=1e-2, report=remember)
    trainer.fit()
    expected = passed[0]
    for update, weight in enumerate(passed[1:], start=2):
        expected = expected.lerp(weight, 1 - ema_decay(update, trainer.config.training.ema_decay))
    averaged = trainer.averaged.decoder.out.conv.conv.weight
    assert torch.allclose(averaged, expected, atol=1e-6)
    assert not torch.allclose(averaged, passed[-1], atol=1e-4)


def test_router_biases_move_against_the_load(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, preset="rdvit-moe", epochs=1, steps_per_epoch=3)
    (layer,) = expert_layers(trainer.model.module)
    layer.router_bias_E.copy_(torch.tensor([9.0, 0.0, 0.0, -9.0]))  # the first always chosen, the last never
    trainer.fit()
    rate = 1e-3
    assert layer.router_bias_E[[0, 3]].tolist() == pytest.approx([9 - 3 * rate, -9 + 3 * rate], abs=1e-5)
    (averaged,) = expert_layers(trainer.averaged)
    assert torch.equal(averaged.router_bias_E, layer.router_bias_E)  # biases are followed, not averaged
    assert 0 <= trainer.history.rows[-1]["val/expert_entropy"] < 1  # two or three of four experts are in use


# Keeping the best, and stopping


def test_best_epoch_is_what_the_folder_keeps(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5, 0.7, 0.6), epochs=2, learning_rate=1e-2)
    trainer.fit()
    best = {name: value.clone() for name, value in trainer.averaged.state_dict().items()}
    raw = trainer.model.module.state_dict()
    saved = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in best.items())
    assert any(not torch.equal(saved[name], value) for name, value in raw.items())  # the average, not the last step
    longer = trainer.config.training.model_copy(update={"epochs": 3})
    trainer.config = trainer.config.model_copy(update={"training": longer})
    progress = trainer.fit()
    assert (progress.epoch, progress.best_epoch, progress.best_dice, progress.validations_without_gain) == (3, 2, 0.7, 1)
    again = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(again[name], value) for name, value in best.items())
    description = json.loads((tmp_path / "model.json").read_text())
    assert description["training"] == {"data": "phantom", "epoch": 2, "val_dice": 0.7}


def test_first_validation_is_kept_even_without_a_dice(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    make_trainer(tmp_path, Scores(float("nan"), 0.1), epochs=1).fit()
    assert (tmp_path / "model.safetensors").is_file()


def test_validations_come_when_due_and_at_the_end(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=5, steps_per_epoch=1, validate_every=2)
    trainer.fit()
    assert [row["epoch"] for row in trainer.history.rows if "val/dice" in row] == [1, 3, 4]


def test_figures_come_at_each_nth_validation_and_at_the_end(
    tmp_path: Path, make_trainer: MakeTrainer, figures: list[str]
) -> None:
    make_trainer(tmp_path, Scores(0.5), epochs=9, steps_per_epoch=1, validate_every=2, figures_every=2).fit()
    assert figures == ["epoch0004", "epoch0008", "final"]  # the last validation, of epoch 9, is not due


def test_patience_ends_a_training(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5, 0.6, 0.6, 0.55, 0.9), epochs=20, steps_per_epoch=1, patience=2)
    progress = trainer.fit()
    assert (progress.epoch, progress.best_epoch) == (4, 2)  # two validations without gain after the best


def test_minutes_end_a_training_and_plan_its_learning_rate(
    tmp_path: Path, make_trainer: MakeTrainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0

    def ten_seconds_later(text: str, done: int, total: int) -> None:  # after every step, and at each validation
        nonlocal now
        now += 10

    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=time.perf_counter)
    monkeypatch.setattr(trainer_module, "time", clock)
    validation = Scores(0.5)
    limits = {"epochs": None, "max_minutes": 2, "steps_per_epoch": 2, "validate_every": 3}
    trainer = make_trainer(tmp_path, validation, report=ten_seconds_later, **limits)
    progress = trainer.fit()
    # 3 epochs of 20 s, a validation of 10 s, then 120 - 12 s are the budget: two epochs more reach it, one more validation.
    assert [row["seconds"] for row in trainer.history.rows] == [20, 40, 70, 90, 120]
    assert (progress.epoch, validation.calls) == (5, 2)
    last_step = learning_rate(100 / 108, trainer.config.training)
    assert trainer.history.rows[-1]["lr"] == pytest.approx(last_step)
    assert trainer.share_done() == 1.0


def test_minutes_may_cut_planned_epochs_short(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=50, steps_per_epoch=1, max_minutes=1e-4)
    assert trainer.fit().epoch == 1
    assert "val/dice" in trainer.history.rows[-1]  # and it is validated all the same
    assert trainer.share_done() == pytest.approx(1 / 50)  # the learning rate was planned over the epochs


def test_loss_that_is_not_finite_names_its_cases(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=1)
    with torch.no_grad():
        next(trainer.model.module.decoder.out.parameters()).fill_(float("nan"))
    cases = [str(trainer.samples[number]["id"]) for number in range(2)]
    with pytest.raises(DataError, match=f"loss became nan in step 0, on cases {', '.join(cases)}"):
        trainer.fit()
    assert all(case.startswith("patient") for case in cases)
    assert not (tmp_path / "state.pt").exists()  # a spoiled state is not worth keeping


def test_gradient_that_is_not_finite_names_its_cases_too(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    """The loss would only be lost in the next step, whose cases are not the ones at fault."""
    trainer = make_trainer(tmp_path, Scores(0.5), epochs=1)
    weight = next(trainer.model.module.decoder.out.parameters())
    before = weight.detach().clone()
    weight.register_hook(lambda gradient: gradient * float("inf"))
    cases = [str(trainer.samples[number]["id"]) for number in range(2)]
    with pytest.raises(DataError, match=rf"gradient became (nan|inf) in step 0, on cases {', '.join(cases)}"):
        trainer.fit()
    assert torch.equal(weight, before)


# Resume


@pytest.mark.parametrize(("dim", "preset"), [("2d", "rdvit"), ("2d", "rdvit-moe"), ("3d", "rdvit"), ("2d", "sret")])
def test_resume_equals_uninterrupted(tmp_path: Path, make_trainer: MakeTrainer, dim: str, preset: str) -> None:
    whole = make_trainer(tmp_path / "whole", dim=dim, preset=preset, epochs=4)
    whole.fit()

    def stop_in_epoch_3(text: str, done: int, total: int) -> None:
        if text.startswith("epoch 3 ") and done == 1:
            os.kill(os.getpid(), signal.SIGTERM)

    before = signal.getsignal(signal.SIGTERM)
    halved = make_trainer(tmp_path / "halved", dim=dim, preset=preset, epochs=4, report=stop_in_epoch_3)
    with pytest.raises(Interrupted, match="SIGTERM"), stop_signals():
        halved.fit()
    assert signal.getsignal(signal.SIGTERM) == before
    assert load_state(tmp_path / "halved")["progress"]["epoch"] == 2

    resumed = make_trainer(tmp_path / "halved", dim=dim, preset=preset, epochs=4)
    resumed.resume()
    progress = resumed.fit()
    assert (progress.epoch, progress.step) == (4, 8)
    assert rows_of(resumed) == rows_of(whole)
    lines = [(tmp_path / name / "metrics.csv").read_text().splitlines() for name in ("whole", "halved")]
    assert len(lines[0]) == len(lines[1]) == 5 and lines[0][0] == lines[1][0]
    ours, theirs = tensors_of(resumed), tensors_of(whole)
    assert ours.keys() == theirs.keys()
    assert not [name for name in ours if not torch.equal(ours[name], theirs[name])]
    best = [load_file(tmp_path / name / "model.safetensors") for name in ("whole", "halved")]
    assert all(torch.equal(best[0][name], best[1][name]) for name in best[0])
    if preset == "rdvit-moe":
        biases = [value for name, value in ours.items() if name.endswith("router_bias_E")]
        assert biases and all(bool(bias.any()) for bias in biases)


def test_resume_of_a_finished_training_changes_nothing(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    make_trainer(tmp_path, Scores(0.5), epochs=2).fit()
    before = (tmp_path / "metrics.csv").read_bytes()
    resumed = make_trainer(tmp_path, Scores(0.9), epochs=2)
    resumed.resume()
    assert resumed.fit().epoch == 2
    assert (tmp_path / "metrics.csv").read_bytes() == before


def test_nothing_to_resume(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    with pytest.raises(ModelError, match=r"state\.pt is missing"):
        make_trainer(tmp_path, Scores(0.5)).resume()


def test_a_network_given_is_trained_in_the_place_of_the_configured_one(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    made = make_trainer(tmp_path / "made", Scores(0.5))
    other = build_segmenter(made.config.model, seed=5)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    folder = tmp_path / "given"
    given = Trainer(made.config, made.info, folder, made.samples, Scores(0.5, 0.6), NullTracker(), network=other)
    assert given.model.module is other
    given.fit()
    assert not torch.equal(before["decoder.out.conv.conv.weight"], other.state_dict()["decoder.out.conv.conv.weight"])
    saved = load_file(folder / "model.safetensors")
    assert all(torch.equal(saved[name], value) for name, value in given.averaged.state_dict().items())


def test_another_seed_is_another_training(tmp_path: Path, make_trainer: MakeTrainer) -> None:
    losses = []
    for run, seed in (("a", 0), ("b", 0), ("c", 1)):
        trainer = make_trainer(tmp_path / run, Scores(0.5), epochs=1, seed=seed)
        trainer.fit()
        losses.append(trainer.history.rows[0]["train/loss"])
    assert losses[0] == losses[1] != losses[2]
