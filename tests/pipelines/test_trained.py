"""Studies of trained models: what is scored is kept, what is wanted is checked, and they run through on the phantom."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from rdvit.checkpoint import ModelInfo, save_model
from rdvit.config import Config
from rdvit.errors import ConfigError
from rdvit.inference.predictor import Predictor
from rdvit.models.build import build_segmenter, expert_layers

PIPELINES = Path(__file__).parents[2] / "pipelines"
NAMES = {1: "RV", 2: "MYO", 3: "LV"}


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """As a script sees it: its own folder is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINES))
        yield


def model(folder: Path, config: Config) -> Path:
    """An untrained model in a folder."""
    save_model(folder, build_segmenter(config.model, seed=0), ModelInfo(config, NAMES, {"validation": "fold0-val"}))
    return folder


def table(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_depths_of_a_loop_and_of_a_stack(
    phantom: Path, tmp_path: Path, tiny_config: Callable[..., Config], monkeypatch: pytest.MonkeyPatch
) -> None:
    study = importlib.import_module("depth_extrapolation")
    loop = model(tmp_path / "loop", tiny_config("2d", "rdvit"))
    stack = model(tmp_path / "stack", tiny_config("2d", "vit"))
    words = ["--data", str(phantom), "--out", str(tmp_path / "out"), "--models", f"loop={loop}", f"stack={stack}"]
    words += ["--loops", "1", "12", "24", "--device", "cpu"]
    study.main(words)
    rows = table(tmp_path / "out" / "depth_extrapolation.csv")
    found = [(row["model"], row["halting"], int(row["loops"])) for row in rows]
    deep = [1, 2, 12, 24]
    assert found == [
        *[("loop", mode, n) for mode in ("act", "none") for n in deep],
        *[("stack", "none", n) for n in (1, 2)],
    ]
    for row in rows:
        assert float(row["dice"]) == pytest.approx(np.mean([float(row[f"dice_{name}"]) for name in NAMES.values()]))
    wanted = table(tmp_path / "out" / "depth_extrapolation_wanted.csv")
    assert [(row["model"], row["wanted"]) for row in wanted] == [
        ("loop", ">= 0.02"),
        ("loop", "<= 0.003"),
        ("loop", "<= 0.003"),
        ("stack", ">= 0.02"),
    ]
    for name in ("dice", "hd95", "loop", "stack"):
        assert (tmp_path / "out" / f"depth_extrapolation_{name}.png").stat().st_size > 1000
    first = (tmp_path / "out" / "depth_extrapolation.md").read_text()

    def fail(*arguments: object) -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(importlib.import_module("trained"), "score_cases", fail)
    study.main(words)
    assert (tmp_path / "out" / "depth_extrapolation.md").read_text() == first
    with pytest.raises(AssertionError, match="again"):
        study.main([*words, "--loops", "5"])


def test_wanted_figures_are_those_of_the_patients() -> None:
    study = importlib.import_module("depth_extrapolation")
    loops = {1: 0.80, 6: 0.86, 8: 0.87, 12: 0.868, 24: 0.85}
    patients = {("none", n): {f"p{i}": dice + 0.01 * i for i in range(5)} for n, dice in loops.items()}
    patients["act", 6] = {f"p{i}": 0.99 for i in range(5)}
    trained = type("Model", (), {"name": "m", "predictor": None})()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "trained_loops", lambda model: 6)
        rows = study.check(trained, patients)
    assert [(round(row["value"], 6), row["met"]) for row in rows] == [(0.06, "yes"), (0.002, "yes"), (0.02, "no")]
    assert study.best_depth(patients) == 8


def test_halting_and_experts_with_their_controls(phantom: Path, tmp_path: Path, tiny_config: Callable[..., Config]) -> None:
    study = importlib.import_module("halting_and_experts")
    act = model(tmp_path / "act", tiny_config("2d", "rdvit"))
    both = model(tmp_path / "both", tiny_config("3d", "rdvit-moe"))
    out = tmp_path / "out"
    words = ["--data", str(phantom), "--out", str(out), "--split", "all", "--fraction", "0.4", "--device", "cpu"]
    study.main([*words, "--models", f"act={act}", f"both={both}"])
    rows = table(out / "halting_and_experts.csv")
    assert {row["model"] for row in rows if "ponder" in row["what"]} == {"act", "both"}
    value = {row["what"]: float(row["value"]) for row in rows if row["model"] == "both"}
    assert 1 <= value["ponder"] <= 2
    assert value["ponder at boundaries over that inside"] == pytest.approx(
        value["ponder at boundaries"] / value["ponder inside structures"]
    )
    for control in ("labels shuffled", "router at random"):
        assert value[f"NMI, trained less {control}"] == pytest.approx(value["NMI, trained"] - value[f"NMI, {control}"])
    assert 0 <= value["share of the tokens that the least used expert gets"] <= 0.5
    usage = table(out / "halting_and_experts_usage.csv")
    assert len(usage) == 3 * 4
    for row in usage:
        shares = [float(row[f"expert_{i}"]) for i in range(1, 5)]
        assert sum(shares) == pytest.approx(1) or np.isnan(shares).all()
    assert len(table(out / "halting_and_experts_cases.csv")) == 2 * 4
    for name in ("act_ponder", "act_map", "both_ponder", "both_usage_random", "both_information"):
        assert (out / f"halting_and_experts_{name}.png").stat().st_size > 1000

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study, "look", None)
        study.main([*words, "--models", f"act={act}"])  # kept: not looked at again
    stack = model(tmp_path / "stack", tiny_config("2d", "vit"))
    with pytest.raises(ConfigError, match="neither ACT nor experts"):
        study.main([*words, "--models", f"stack={stack}"])


def test_random_routers_are_as_wide_as_the_trained_and_leave_those_alone(tiny_config: Callable[..., Config]) -> None:
    study = importlib.import_module("halting_and_experts")
    config = tiny_config("2d", "rdvit-moe")
    predictor = Predictor(build_segmenter(config.model, seed=0), ModelInfo(config, NAMES), "cpu")
    (trained,) = expert_layers(predictor.model)
    trained.router_bias_E.fill_(1.0)
    before = trained.router.weight.detach().clone()
    (drawn,) = expert_layers(study.random_routers(predictor))
    assert torch.equal(trained.router.weight, before) and not torch.equal(drawn.router.weight, before)
    assert drawn.router.weight.detach().std().item() == pytest.approx(before.std().item(), rel=0.2)
    assert not drawn.router_bias_E.any() and torch.equal(drawn.w_in, trained.w_in)
