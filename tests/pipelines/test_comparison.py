"""Outside networks train and are scored as rdvit's own, at sizes and steps that match, and the comparison runs through."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from rdvit.training.run import make_split
from rdvit.training.trainer import Trainer

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """As a script sees it: its own folder is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINES))
        yield


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trainings; those of the study are drawn."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)


@pytest.fixture
def comparison() -> ModuleType:
    return importlib.import_module("comparison")


@pytest.fixture
def outside() -> ModuleType:
    return importlib.import_module("outside")


TINY = [
    *("model.embed_dim=32", "model.num_heads=2", "model.stem_channels=4", "model.loops=2", "data.spacing=3.0"),
    *("training.batch_size=1", "training.device=cpu", "training.precision=fp32"),
]


def words(phantom: Path, out: Path, *more: str) -> list[str]:
    """One short training of tiny networks on one patient."""
    settings = [word for setting in TINY for word in ("--set", setting)]
    given = ["--data", str(phantom), "--out", str(out), "--fraction", "0.25", "--seeds", "1", "--steps", "2", "--rounds", "1"]
    return [*given, *settings, *more]


def systems(comparison: ModuleType, phantom: Path, *more: str) -> dict[str, Any]:
    given = comparison.options(["--data", str(phantom), "--systems", "vit", "vit-narrow", "UNETR", "DynUNet", "nnU-Net", *more])
    return {system.name: system for system in comparison.systems(given, make_split(phantom))}


def test_budgets_match(comparison: ModuleType, phantom: Path) -> None:
    found = {name: comparison.sizes(system) for name, system in systems(comparison, phantom).items()}
    assert found["vit"]["gflops"] == pytest.approx(found["rdvit"]["gflops"], rel=0.03)
    assert found["vit"]["parameters"] > 2.5 * found["rdvit"]["parameters"]
    for name in ("vit-narrow", "DynUNet"):
        assert found[name]["parameters"] == pytest.approx(found["rdvit"]["parameters"], rel=0.1)
    assert found["nnU-Net"]["parameters"] > 1e7


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("kind", ["UNETR", "DynUNet"])
def test_outside_networks_answer_as_a_segmenter_does(comparison: ModuleType, phantom: Path, dim: str, kind: str) -> None:
    settings = [word for setting in TINY for word in ("--set", setting)]
    system = systems(comparison, phantom, "--dim", dim, *settings)[kind]
    before = torch.get_rng_state()
    network = system.build()
    assert torch.equal(before, torch.get_rng_state())
    assert all(map(torch.equal, network.state_dict().values(), system.build().state_dict().values()))
    images = torch.randn(1, 1, *((50, 41) if dim == "2d" else (50, 41, 5)))
    with torch.no_grad():
        crops = torch.randn(2, 1, *system.config.data.crop_size)
        (stage,), _ = network.train()(crops, 3, "none", early=[])
        logits, record = network.eval()(images, return_record=True)
    assert stage.shape == (2, 4, *crops.shape[2:]) and logits.shape == (1, 4, *images.shape[2:])
    assert record.tokens_BND.shape[1] == 7 * 6 * (1 if dim == "2d" else 5) and record.steps_BN is None  # patches of 8


def test_windows_of_a_fixed_size_are_put_together(outside: ModuleType, comparison: ModuleType, phantom: Path) -> None:
    """A network that looks at one voxel at a time gives in windows what it gives as a whole."""
    config = systems(comparison, phantom)["UNETR"].config
    network = torch.nn.Conv2d(1, 4, 1)
    whole, windows = (outside.Outside(network, config.model, (16, 16), window).eval() for window in (None, (32, 32)))
    images = torch.randn(2, 1, 75, 40)
    with torch.no_grad():
        torch.testing.assert_close(windows(images), whole(images))


def test_every_depth_is_timed_as_often_as_it_is_drawn(comparison: ModuleType, phantom: Path) -> None:
    reference = systems(comparison, phantom, "--systems", "--steps", "400")["rdvit"]

    class Fake:
        config = reference.config

    shares = comparison.depths_drawn(Fake())
    drawn = {comparison.training_loops(step, Fake.config.model, Fake.config.training): share for step, share in shares.items()}
    assert drawn.keys() == set(range(3, 17)) and sum(drawn.values()) == pytest.approx(1)
    assert all(0.03 < share < 0.13 for share in drawn.values())


@pytest.mark.parametrize("steps", [1, 2.4, 60, 812.6, 1234, 3001])
def test_lengths_are_kept_to_a_percent(comparison: ModuleType, steps: float) -> None:
    length = comparison.length(steps)
    assert length["epochs"] * length["steps_per_epoch"] == pytest.approx(steps, rel=0.011, abs=0.5)
    assert length["steps_per_epoch"] < 76


def test_the_comparison_runs_at_equal_time_and_goes_on(
    comparison: ModuleType, outside: ModuleType, phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = words(phantom, tmp_path, "--systems", "vit", "DynUNet")

    def halves(found: list[Any], *others: Any) -> dict[str, float]:
        return {system.name: 0.5 if system.recipe else 2.0 for system in found}

    monkeypatch.setattr(comparison, "measured", halves)
    comparison.main(given)
    with (tmp_path / "comparison_2d_25.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["system"], row["steps"]) for row in table] == [("rdvit", "2"), ("vit", "2"), ("DynUNet", "8")]
    assert len({float(row["minutes"]) for row in table}) == 1
    for row in table:
        structures = [float(row[f"dice_{name}"]) for name in ("RV", "MYO", "LV")]
        assert float(row["dice"]) == pytest.approx(np.mean(structures))
    assert "rdvit less this" in (tmp_path / "comparison_2d_25.md").read_text()
    for name in ("dice", "difference"):
        assert (tmp_path / f"comparison_2d_25_{name}.png").stat().st_size > 1000

    (folder,) = (tmp_path / "models").glob("DynUNet-*")
    first = json.loads((folder / "summary.json").read_text())
    assert first["run"]["progress"]["step"] == 8

    def fail(*arguments: object, **named: object) -> None:
        raise AssertionError("made again")

    with monkeypatch.context() as patch:
        for module, name in ((comparison, "measured"), (outside, "score_cases")):
            patch.setattr(module, name, fail)
        comparison.main(given)
    (folder / "summary.json").unlink()  # as where it was stopped while it scored
    monkeypatch.setattr(Trainer, "_step", fail)
    comparison.main(given)
    assert json.loads((folder / "summary.json").read_text())["foreground_mean"] == first["foreground_mean"]


def test_seconds_are_measured_for_all_systems(comparison: ModuleType, phantom: Path, tmp_path: Path) -> None:
    given = comparison.options(words(phantom, tmp_path, "--systems", "DynUNet", "--set", "training.loop_sampling.high=3"))
    split = make_split(phantom, fraction=0.25)
    seconds = comparison.step_seconds(comparison.systems(given, split), split, given)
    assert seconds.keys() == {"rdvit", "DynUNet"} and min(seconds.values()) > 0
    assert seconds == comparison.step_seconds(comparison.systems(given, split), split, given)
