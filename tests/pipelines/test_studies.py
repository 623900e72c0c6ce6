"""The crops hold the heart, results are kept, and every study runs through on the phantom."""

from __future__ import annotations

import csv
import importlib
import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from rdvit.data.datalist import load_data
from rdvit.data.volume import read_image, read_labels
from rdvit.training.run import make_split
from rdvit.training.trainer import Trainer

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture(autouse=True)
def _no_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the trainings; those of the studies are drawn."""
    monkeypatch.setattr(Trainer, "_save_figures", lambda self, name: None)


@pytest.fixture(scope="module", autouse=True)
def _importable() -> Iterator[None]:
    """As a script sees it: its own folder is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINES))
        yield


@pytest.fixture
def study() -> ModuleType:
    return importlib.import_module("study")


def words(phantom: Path, out: Path, *more: str) -> list[str]:
    """One training of one step of a tiny network on one patient."""
    sizes = ["--seeds", "1", "--steps", "1", "--fraction", "0.25", "--width", "32", "--heads", "2", "--loops", "2"]
    return ["--data", str(phantom), "--out", str(out), "--device", "cpu", *sizes, *more]


def test_the_heart_is_what_moves(study: ModuleType) -> None:
    first = np.ones((60, 50, 3), np.float32)
    second = first.copy()
    second[35:41, 20:26] = 2
    assert study.heart_centre([first, second], (1.5, 1.5, 10.0)) == pytest.approx((37.5, 22.5), abs=1.5)
    assert study.heart_centre([first], (1.5, 1.5, 10.0)) == study.heart_centre([first, first], (1.5, 1.5, 10.0)) == (29.5, 24.5)


def test_crops_are_the_image_at_the_same_place(study: ModuleType, phantom: Path, tmp_path: Path) -> None:
    listed = study.heart_crops(make_split(phantom), tmp_path, size_mm=130.0)
    crops, whole = load_data(listed), {case.id: case for case in load_data(phantom).cases}
    assert json.loads(listed.read_text())["labelled_voxels_inside"] > 0.97
    assert [len(crops.splits[name]) for name in ("training", "validation")] == [8, 2]
    for case in crops.cases[:3]:
        assert case.phase == whole[case.id].phase and case.label is not None and whole[case.id].label is not None
        crop, image = read_image(case.image), read_image(whole[case.id].image)
        assert crop.spacing == pytest.approx(image.spacing, rel=1e-5)
        assert max(crop.array.shape[:2]) * max(crop.spacing[:2]) < 134
        place = np.linalg.inv(image.affine) @ crop.affine @ [3, 4, 1, 1]
        at = tuple(np.rint(place[:3]).astype(int))
        np.testing.assert_allclose(place[:3], at, atol=1e-3)
        assert image.array[at] == crop.array[3, 4, 1]
        labels = read_labels(whole[case.id].label)
        assert read_labels(case.label).array[3, 4, 1] == labels.array[at]


def test_paired_differences(study: ModuleType) -> None:
    low = [{f"p{i}": 0.5 + 0.01 * i for i in range(10)}]
    high = [{p: v + 0.1 + 0.001 * i for i, (p, v) in enumerate(low[0].items())}] * 2
    difference, p = study.paired(high, low)
    assert difference == pytest.approx(0.1045) and p < 0.01
    assert study.paired(low, low) == (0.0, 1.0)


def test_a_finished_training_is_not_made_again(
    study: ModuleType, phantom: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = study.setting(None, words(phantom, tmp_path))
    folder = study.train(given, study.configure(given, "bvit", 0, {}))
    scores = study.patient_dice(given, folder, 3)
    assert len(scores) == 1

    def fail(*arguments: object) -> None:
        raise AssertionError("trained or scored again")

    monkeypatch.setattr(study, "start_run", fail)
    monkeypatch.setattr(study, "score", fail)
    assert study.train(given, study.configure(given, "bvit", 0, {})) == folder
    assert study.patient_dice(given, folder, 3) == scores
    with pytest.raises(AssertionError, match="again"):
        study.train(given, study.configure(given, "bvit", 1, {}))


def test_data_efficiency_compares_systems_at_nested_fractions(study: ModuleType, phantom: Path, tmp_path: Path) -> None:
    tiny = ["model.embed_dim=32", "model.num_heads=2", "model.stem_channels=4", "model.loops=2", "training.batch_size=1"]
    given = ["--data", str(phantom), "--out", str(tmp_path), "--presets", "bvit,vit", "--fractions", "1,0.25", "--seeds", "1"]
    importlib.import_module("data_efficiency").main([*given, "--steps", "1", *(word for s in tiny for word in ("--set", s))])
    with (tmp_path / "data_efficiency.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert [(row["system"], row["patients"]) for row in table] == [("bvit", "1"), ("vit", "1"), ("bvit", "4"), ("vit", "4")]
    for row in table:
        structures = [float(row[f"dice_{name}"]) for name in ("RV", "MYO", "LV")]
        assert float(row["dice"]) == pytest.approx(np.mean(structures))
    said = (tmp_path / "data_efficiency.md").read_text()
    assert "bvit less vit at 25 %" in said
    assert (tmp_path / "data_efficiency.png").stat().st_size > 1000


STUDIES = {
    "matched_budget": (3, ["_loop_parameters.png", "_gflops.png", "_cka.png", "_attention.png", "_states.csv"]),
    "beyond_horizon": (5 * 8, [".png"]),
    "solver_order": (5, [".png"]),
    "width_scaling": (8, [".png"]),
    "step_pruning": (2 * 2 * 4, ["_bvit.png", "_vit.png"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STUDIES)
def test_every_study_runs(name: str, phantom: Path, tmp_path: Path) -> None:
    importlib.import_module(name).main(words(phantom, tmp_path))
    rows, files = STUDIES[name]
    with (tmp_path / f"{name}.csv").open(newline="") as file:
        table = list(csv.DictReader(file))
    assert len(table) == rows and all(0 <= float(row["dice"]) <= 1 for row in table)
    for suffix in files:
        assert (tmp_path / f"{name}{suffix}").stat().st_size > 1000 or suffix.endswith(".csv")
    paragraph = (tmp_path / f"{name}.md").read_text()
    assert "nan" not in paragraph and paragraph.count(".") > 3


def test_budgets_match(study: ModuleType, phantom: Path, tmp_path: Path) -> None:
    budget = importlib.import_module("matched_budget")
    given = study.setting(None, [*words(phantom, tmp_path)[:-6], "--width", "96", "--heads", "3", "--loops", "6"])
    found = budget.systems(given)
    networks = {name: study.configure(given, preset, 0, changes).model for name, (preset, changes) in found.items()}
    vit, same_flops, same_memory = networks.values()
    assert budget.loop_parameters(same_memory) == pytest.approx(budget.loop_parameters(vit), rel=0.08)
    assert budget.flops(same_flops, (32, 32)) == budget.flops(vit, (32, 32))
    assert budget.loop_parameters(vit) == 6 * budget.loop_parameters(same_flops)
    assert budget.flops(same_memory, (32, 32)) > 2.5 * budget.flops(vit, (32, 32))
