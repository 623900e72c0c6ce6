"""Model folders: weights and description there and back, damage named, the newest run found, no code in a state."""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from rdvit import __version__, checkpoint
from rdvit.checkpoint import (
    DESCRIPTION,
    PREVIOUS,
    STATE,
    WEIGHTS,
    ModelInfo,
    find_model,
    load_info,
    load_model,
    load_state,
    save_model,
    save_state,
)
from rdvit.config import Config
from rdvit.errors import ConfigError, ModelError
from rdvit.models.build import build_segmenter

NAMES = {5: "pool", 2: "wall", 7: "Vorhof, links"}


@pytest.fixture
def folder(tiny_model_folder: Path, tmp_path: Path) -> Path:
    """A copy of the tiny model that a test may damage."""
    return Path(shutil.copytree(tiny_model_folder, tmp_path / "model"))


# There and back


@pytest.mark.parametrize(("dim", "preset"), [("2d", "rdvit"), ("3d", "rdvit-moe"), ("2d", "vit")])
def test_model_comes_back_bit_for_bit(dim: str, preset: str, tiny_config: Callable[..., Config], tmp_path: Path) -> None:
    config = tiny_config(dim, preset)
    model = build_segmenter(config.model, seed=3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))
    saved = ModelInfo(config, NAMES, {"data": "phantom", "dice": 0.75, "folds": [0, 1]})
    save_model(tmp_path / "run", model, saved)
    loaded, info = load_model(tmp_path / "run")
    expected = model.state_dict()
    assert loaded.state_dict().keys() == expected.keys()
    for name, tensor in loaded.state_dict().items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    assert not loaded.training
    assert info == saved
    assert info.version == __version__
    assert list(info.class_names) == [5, 2, 7]  # their order is that of the output channels
    image = torch.randn(1, 1, *((16, 16) if dim == "2d" else (16, 16, 2)))
    with torch.no_grad():
        assert torch.equal(loaded(image), model.eval()(image))


def test_folder_holds_data_only(tiny_model_folder: Path) -> None:
    """Weights as safetensors and plain JSON: nothing that loading could execute."""
    assert sorted(os.listdir(tiny_model_folder)) == [DESCRIPTION, WEIGHTS]
    assert load_file(tiny_model_folder / WEIGHTS)
    description = json.loads((tiny_model_folder / DESCRIPTION).read_text())
    assert description["class_names"] == {"1": "RV", "2": "MYO", "3": "LV"}


def test_loading_leaves_the_random_state_alone(tiny_model_folder: Path) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    load_model(tiny_model_folder)
    assert torch.equal(torch.rand(3), expected)


# Damage


@pytest.mark.parametrize("keep", [0, 4, 100, -10])
def test_truncated_weights_are_an_error_that_names_the_file(keep: int, folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[:keep])
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: cannot read the weights"):
        load_model(folder)


def test_missing_weights_are_an_error_that_names_the_file(folder: Path) -> None:
    (folder / WEIGHTS).unlink()
    with pytest.raises(ModelError, match=rf"{WEIGHTS}: cannot read the weights"):
        load_model(folder)


def test_tensors_that_do_not_match_are_named(folder: Path) -> None:
    tensors = load_file(folder / WEIGHTS)
    reshaped, gone = sorted(tensors)[:2]
    tensors[reshaped] = torch.zeros(3, 1, 4, 1, 5)
    del tensors[gone]
    tensors["added.weight"] = torch.zeros(1)
    save_file(tensors, folder / WEIGHTS)
    with pytest.raises(ModelError) as caught:
        load_model(folder)
    for part in ("3 tensors", reshaped, gone, "added.weight", str(folder / WEIGHTS)):
        assert part in str(caught.value)


def test_a_long_list_of_mismatches_is_cut(folder: Path) -> None:
    total = len(load_file(folder / WEIGHTS))
    save_file({}, folder / WEIGHTS)
    with pytest.raises(ModelError, match=rf"{total} tensors .* and {total - 5} more"):
        load_model(folder)


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", "{}", '{"config": {}, "class_names": [1], "training": {}, "version": "0"}', "\ud800"]
)
def test_damaged_description_is_an_error_that_names_the_file(text: str, folder: Path) -> None:
    (folder / DESCRIPTION).write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(ModelError, match=f"{DESCRIPTION}: damaged model description"):
        load_info(folder)


@pytest.mark.parametrize("names", [{"1": "../LV"}, {"1": "LV", "2": "LV"}, {"1": ".."}, {"1": "a\nb"}])
def test_class_names_that_cannot_name_results_are_refused(names: dict[str, str], folder: Path) -> None:
    content = json.loads((folder / DESCRIPTION).read_text())
    (folder / DESCRIPTION).write_text(json.dumps({**content, "class_names": names}))
    with pytest.raises(ModelError, match="each class needs a name of its own"):
        load_info(folder)


def test_description_with_an_unknown_setting_is_refused(folder: Path) -> None:
    content = json.loads((folder / DESCRIPTION).read_text())
    content["config"]["model"]["embed_dimm"] = 32
    (folder / DESCRIPTION).write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"model\.json.*embed_dimm.*embed_dim"):
        load_info(folder)


def test_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"expected {DESCRIPTION} and {WEIGHTS}"):
        load_model(tmp_path)


# Which model is meant


def make_run(runs: Path, name: str, summary_time: int | None, model: bool = True) -> Path:
    """A run folder: with a description, and finished at a time, or not."""
    folder = runs / name
    folder.mkdir(parents=True)
    if model:
        (folder / DESCRIPTION).write_text("{}")
    if summary_time is not None:
        (folder / "summary.json").write_text("{}")
        os.utime(folder / "summary.json", (summary_time, summary_time))
    return folder


def test_newest_finished_run_is_taken(tmp_path: Path) -> None:
    make_run(tmp_path, "a-old", 1000)
    newest = make_run(tmp_path, "b-new", 3000)
    make_run(tmp_path, "c-middle", 2000)
    make_run(tmp_path, "d-running", None)
    make_run(tmp_path, "e-without-model", 4000, model=False)
    assert find_model(None, tmp_path) == newest


@pytest.mark.parametrize("runs", ["missing", "empty"])
def test_no_finished_run_and_no_shipped_model_is_an_error_that_says_what_to_do(
    runs: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "no weights")
    make_run(tmp_path / "empty", "running", None)
    with pytest.raises(ModelError, match=r"no finished run.*rdvit train"):
        find_model(None, tmp_path / runs)


def test_a_model_is_named_by_folder_or_by_run(tmp_path: Path) -> None:
    running = make_run(tmp_path / "runs", "mine", None)
    assert find_model("mine", tmp_path / "runs") == running
    assert find_model(str(running), tmp_path / "elsewhere") == running
    with pytest.raises(ModelError, match="no model 'other'"):
        find_model("other", tmp_path / "runs")


# The training state


def test_state_comes_back_bit_for_bit(tmp_path: Path) -> None:
    optimizer = {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(4, 5)}}, "param_groups": [{"lr": 1e-3}]}
    state = {"optimizer": optimizer, "epoch": 7, "best": 0.1 + 0.2, "rng": torch.get_rng_state(), "name": "run", "none": None}
    save_state(tmp_path, state)
    loaded = load_state(tmp_path)
    assert loaded.keys() == state.keys()
    assert torch.equal(loaded["optimizer"]["state"][0]["exp_avg"], optimizer["state"][0]["exp_avg"])  # type: ignore[index]
    assert torch.equal(loaded["rng"], torch.get_rng_state())
    assert {k: loaded[k] for k in ("epoch", "best", "name", "none")} == {k: state[k] for k in ("epoch", "best", "name", "none")}
    assert os.listdir(tmp_path) == [STATE]


class Payload:
    """Unpickling it makes a folder: what a hostile state would do, made harmless."""

    def __init__(self, target: Path) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.target),)


def test_state_with_code_in_it_is_refused_and_not_run(tmp_path: Path) -> None:
    torch.save({"epoch": 1, "payload": Payload(tmp_path / "ran")}, tmp_path / STATE)
    with pytest.raises(ModelError, match=f"{STATE}: damaged: "):
        load_state(tmp_path)
    assert not (tmp_path / "ran").exists()
    torch.load(tmp_path / STATE, weights_only=False)
    assert (tmp_path / "ran").exists()  # the payload is a real one


def test_damaged_state_is_an_error_whatever_the_bytes(tmp_path: Path) -> None:
    """torch raises RuntimeError, UnpicklingError, UnicodeDecodeError, IndexError and more, depending on what is hit."""
    save_state(tmp_path, {"weights": torch.arange(10.0), "epoch": 3})
    content = (tmp_path / STATE).read_bytes()
    damaged = [content[:cut] for cut in (0, 1, 64, len(content) // 2, len(content) - 1)]
    damaged += [b"\x80", b"}.", b"2", b"l\x85", b"\x80\x02X\x02\x00\x00\x00\xff\xfe.", bytes(range(256)), b"not a state"]
    for number, bad in enumerate(damaged):
        (tmp_path / STATE).write_bytes(bad)
        with pytest.raises(ModelError, match=f"{STATE}: damaged: .+"):
            load_state(tmp_path)
            pytest.fail(f"damage {number} went unseen")


def test_missing_state_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=f"nothing to resume: {STATE} is missing"):
        load_state(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty", "missing"])
def test_the_state_before_stands_in_for_a_damaged_one(damage: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for epoch in (1, 2, 3):
        save_state(tmp_path, {"epoch": epoch, "weights": torch.full((1000,), float(epoch))})
    content = (tmp_path / STATE).read_bytes()
    place = content.index(torch.full((1000,), 3.0).numpy().tobytes()) + 100
    changed = {"cut": content[:-100], "flipped": content[:place] + b"\1" + content[place + 1 :], "empty": b""}
    (tmp_path / STATE).unlink()
    if damage != "missing":
        (tmp_path / STATE).write_bytes(changed[damage])
    assert load_state(tmp_path)["epoch"] == 2
    (said,) = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert str(tmp_path / STATE) in said and "the state before it is taken" in said
    assert ("damaged" in said) == (damage != "missing")


def test_two_damaged_states_are_both_named(tmp_path: Path) -> None:
    (tmp_path / STATE).write_bytes(b"one")
    (tmp_path / PREVIOUS).write_bytes(b"other")
    with pytest.raises(ModelError, match=f"{STATE}: damaged: .*{PREVIOUS}: damaged: "):
        load_state(tmp_path)


# Models of the package


def test_without_a_run_the_model_of_the_package_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint, "SHIPPED", tmp_path / "weights")
    shipped = make_run(tmp_path / "weights", checkpoint.DEFAULT, None)
    other = make_run(tmp_path / "weights", "other", None)
    assert find_model(None, tmp_path / "runs") == shipped
    assert find_model("other", tmp_path / "runs") == other
    assert checkpoint.shipped_models() == [checkpoint.DEFAULT, "other"]
    with pytest.raises(ModelError, match=f"in the package: {checkpoint.DEFAULT}, other"):
        find_model("nothing", tmp_path / "runs")
    finished = make_run(tmp_path / "runs", "mine", 1000)
    assert find_model(None, tmp_path / "runs") == finished


def test_weights_in_half_precision_are_loaded_as_float32(tmp_path: Path, tiny_model_folder: Path) -> None:
    shutil.copytree(tiny_model_folder, tmp_path / "half")
    tensors = load_file(tmp_path / "half" / WEIGHTS)
    save_file({k: v.half() if v.is_floating_point() else v for k, v in tensors.items()}, tmp_path / "half" / WEIGHTS)
    model = load_model(tmp_path / "half")[0]
    for name, value in model.state_dict().items():
        assert value.dtype == tensors[name].dtype
        torch.testing.assert_close(value, tensors[name], rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("name", ["acdc-2d", "acdc-3d-moe"])
def test_models_of_the_package_are_small_load_and_name_no_folder(name: str) -> None:
    folder = checkpoint.SHIPPED / name
    model, info = load_model(folder)
    assert info.class_names == {1: "RV", 2: "MYO", 3: "LV"} and info.config.training.finetune is None
    assert {"figures", "licence", "commit", "dataset"} <= info.training.keys()
    assert sum(file.stat().st_size for file in folder.iterdir()) < 8e6
    text = (folder / checkpoint.DESCRIPTION).read_text()
    assert '"/' not in text and "\\\\" not in text
    assert all(bool(torch.isfinite(value).all()) for value in model.state_dict().values())
