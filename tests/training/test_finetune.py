"""A trained model moves to other data: what it takes along, what is frozen, that it resumes, and what is refused."""

from __future__ import annotations

import json
import shutil
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from rdvit.checkpoint import WEIGHTS, load_info, load_model
from rdvit.config import Config
from rdvit.errors import ConfigError, ModelError
from rdvit.training.finetune import with_spacing_of_model
from rdvit.training.run import make_split, resume_run, start_run
from rdvit.training.signals import Interrupted
from rdvit.training.trainer import Trainer

MakeConfig = Callable[..., Config]
HEAD = ("decoder.out.conv.conv.weight", "decoder.out.conv.conv.bias")


def silent(text: str, done: int, total: int) -> None:
    """A report that nobody reads."""


@pytest.fixture(autouse=True)
def no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drawing takes longer than a tiny training."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)


@pytest.fixture
def adapt(tiny_model_folder: Path, tiny_config: MakeConfig, tmp_path: Path) -> Callable[..., tuple[Path, dict[str, Any]]]:
    """``adapt(data, train_only="lora", **training)``: the tiny model fine-tuned; its run folder and its summary."""

    def start(
        data: Path, report: Callable[[str, int, int], None] = silent, name: str = "adapted", **training: Any
    ) -> tuple[Path, dict[str, Any]]:
        config = tiny_config(training={"finetune": str(tiny_model_folder), "learning_rate": 1e-2} | training)
        folder = tmp_path / "runs" / name
        return folder, start_run(config, make_split(data), folder, folder.parent, track=False, report=report)

    return start


@pytest.fixture
def two_classes(phantom: Path, tmp_path: Path) -> Path:
    """The phantom with the LV alone to segment, as a JSON list whose labels are called 3: heart."""
    from rdvit.data.datalist import load_data
    from rdvit.data.volume import read_labels
    from rdvit.inference.writer import write_labels

    entries = []
    for case in load_data(phantom).cases:
        assert case.label is not None
        labels = read_labels(case.label)
        only = np.where(labels.array == 3, 3, 0).astype(np.uint8)
        file = write_labels(tmp_path / f"{case.id}.nii.gz", only, labels, {3: "heart"})
        entries.append({"id": case.id, "patient": case.patient, "image": str(case.image), "label": str(file)})
    listed = tmp_path / "heart.json"
    listed.write_text(json.dumps({"labels": {"3": "heart"}, "hearts": entries}))
    return listed


@pytest.mark.parametrize("part", ["all", "lora", "norms", "head"])
def test_only_the_part_moves(
    part: str, adapt: Callable[..., tuple[Path, dict[str, Any]]], phantom: Path, tiny_model_folder: Path
) -> None:
    folder, summary = adapt(phantom, train_only=part)
    before, after = load_file(tiny_model_folder / WEIGHTS), load_file(folder / WEIGHTS)
    assert before.keys() == after.keys()  # plain, loads without a word about updates
    load_model(folder)
    moved = {name for name in before if before[name].is_floating_point() and not torch.equal(before[name], after[name])}
    moved = {name for name in moved if "running_" not in name}
    assert set(HEAD) <= moved
    matrices = {name for name in before if name.endswith(("qkv.weight", "attn.proj.weight", "w_in.weight", "w_out.weight"))}
    if part == "head":
        assert moved == set(HEAD)
    elif part == "lora":
        assert moved - set(HEAD) == matrices
    elif part == "norms":
        assert all(before[name].ndim == 1 for name in moved - set(HEAD)) and "encoder.norm.weight" in moved
    else:
        assert matrices < moved and "encoder.stem.to_tokens.conv.weight" in moved
    model = summary["run"]["model"]
    assert model["train_only"] == part and model["finetuned_from"] == str(tiny_model_folder)
    assert (model["trained_parameters"] == model["parameters"]) == (part == "all")


def test_it_begins_where_the_model_ended(
    adapt: Callable[..., tuple[Path, dict[str, Any]]], phantom: Path, tiny_model_folder: Path
) -> None:
    folder, _ = adapt(phantom, train_only="all", learning_rate=1e-12, weight_decay=0.0)
    before, after = load_file(tiny_model_folder / WEIGHTS), load_file(folder / WEIGHTS)
    for name in before:
        if "running_" not in name and "num_batches" not in name:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=1e-6)


def test_the_saved_model_is_what_was_validated(adapt: Callable[..., tuple[Path, dict[str, Any]]], phantom: Path) -> None:
    _, summary = adapt(phantom, train_only="lora")
    best = summary["run"]["progress"]["best_dice"]  # of the network with its updates apart
    assert summary["foreground_mean"]["Dice"] == pytest.approx(best, abs=1e-6)  # of the merged one, read from the disk


def test_other_classes_get_a_new_head(
    adapt: Callable[..., tuple[Path, dict[str, Any]]], two_classes: Path, tiny_model_folder: Path, caplog: Any
) -> None:
    with caplog.at_level("INFO", logger="rdvit"):
        folder, _ = adapt(two_classes, train_only="lora")
    model, info = load_model(folder)
    assert info.class_names == {3: "heart"} and info.config.model.out_channels == 2
    assert model.decoder.out.conv.conv.weight.shape[0] == 2
    before, after = load_file(tiny_model_folder / WEIGHTS), load_file(folder / WEIGHTS)
    assert torch.equal(before["encoder.stem.to_tokens.conv.weight"], after["encoder.stem.to_tokens.conv.weight"])
    assert "with a new head: its classes are {1: 'RV', 2: 'MYO', 3: 'LV'}, those of the data {3: 'heart'}" in caplog.text
    assert "parameters are trained" in caplog.text


def test_resumed_is_the_same_training(adapt: Callable[..., tuple[Path, dict[str, Any]]], phantom: Path) -> None:
    whole, _ = adapt(phantom, train_only="lora", epochs=3, name="whole")

    def stop_in_epoch_two(text: str, done: int, total: int) -> None:
        if text.startswith("epoch 2  loss"):
            raise Interrupted(signal.SIGTERM)

    part = whole.parent / "part"
    with pytest.raises(Interrupted):
        adapt(phantom, report=stop_in_epoch_two, train_only="lora", epochs=3, name="part")
    resume_run(part, {}, None, part.parent, track=False, report=silent)
    one, other = load_file(whole / WEIGHTS), load_file(part / WEIGHTS)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_resume_does_not_need_the_model_any_more(
    adapt: Callable[..., tuple[Path, dict[str, Any]]], phantom: Path, tiny_model_folder: Path, tmp_path: Path
) -> None:
    gone = tmp_path / "gone"
    shutil.copytree(tiny_model_folder, gone)
    folder, _ = adapt(phantom, train_only="lora", finetune=str(gone), epochs=1)
    shutil.rmtree(gone)
    summary = resume_run(folder, {"training": {"epochs": 2}}, None, folder.parent, track=False, report=silent)
    assert summary["run"]["progress"]["epoch"] == 2 and load_info(folder).training["finetuned_from"] == str(gone)


def test_spacing_of_the_same_structures_is_the_models(tiny_model_folder: Path, tiny_config: MakeConfig) -> None:
    config = tiny_config(training={"finetune": str(tiny_model_folder)}, data={"spacing": "auto"})
    assert with_spacing_of_model(config, {1: "RV", 2: "MYO", 3: "LV"}).data.spacing == 3.0
    assert with_spacing_of_model(config, {1: "anterior", 2: "posterior"}).data.spacing == "auto"
    asked = tiny_config(training={"finetune": str(tiny_model_folder)}, data={"spacing": 2.0})
    assert with_spacing_of_model(asked, {1: "RV", 2: "MYO", 3: "LV"}).data.spacing == 2.0


def test_another_network_is_refused(tiny_model_folder: Path, tiny_config: MakeConfig, phantom: Path, tmp_path: Path) -> None:
    config = tiny_config(model={"embed_dim": 64, "loops": 3}, training={"finetune": str(tiny_model_folder)})
    with pytest.raises(ConfigError, match=r"keeps the network of its model: embed_dim is 32 there, 64 here; loops is 2 there"):
        start_run(config, make_split(phantom), tmp_path / "run", tmp_path, track=False, report=silent)
    assert not (tmp_path / "run").exists()


def test_no_model_there(tiny_config: MakeConfig, phantom: Path, tmp_path: Path) -> None:
    config = tiny_config(training={"finetune": str(tmp_path / "none")})
    with pytest.raises(ModelError, match="no model here"):
        start_run(config, make_split(phantom), tmp_path / "run", tmp_path, track=False, report=silent)


def test_freezing_fresh_weights_is_refused(tiny_config: MakeConfig) -> None:
    with pytest.raises(ConfigError, match="train_only lora freezes the rest and needs a trained model"):
        tiny_config(training={"train_only": "lora"})
