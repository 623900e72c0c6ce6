"""The study of token merging: what it measures is what it says, and it goes on where it stopped."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

from rdvit.checkpoint import ModelInfo, save_model
from rdvit.config import Config
from rdvit.models.build import build_segmenter
from rdvit.models.merging import SIMILARITIES, match

PIPELINES = Path(__file__).parents[2] / "pipelines"


@pytest.fixture(scope="module")
def study() -> Iterator[ModuleType]:
    """As a script sees it: its own folder is on the path."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(PIPELINES))
        yield importlib.import_module("token_merging")


def test_memory_is_that_of_the_tensors_alive(study: ModuleType) -> None:
    with study.PeakMemory() as memory:
        a = torch.ones(1000)
        b = a + 1
        assert memory.now == 8000
        del a
        c = b[:10]  # a view is no memory
        assert (memory.now, memory.peak) == (4000, 8000)
        memory.restart()
        assert memory.peak == 4000
    assert c.sum() == 20


def test_matching_needs_little_memory_beside_the_tokens(study: ModuleType) -> None:
    keys, mass = torch.randn(2, 1, 8192, 16), torch.ones(2, 8192)  # all similarities at once: 134 MB
    with study.PeakMemory() as memory:
        match(keys, mass, 2048)
    assert memory.peak < 4 * SIMILARITIES + 4 * 4 * keys.numel()


@pytest.mark.parametrize("preset", ["rdvit", "sret"])
def test_runs_through_and_goes_on(
    study: ModuleType, preset: str, phantom: Path, tmp_path: Path, tiny_config: Callable[..., Config]
) -> None:
    config = tiny_config("2d", preset)
    info = ModelInfo(config, {1: "RV", 2: "MYO", 3: "LV"}, {})
    save_model(tmp_path / "model", build_segmenter(config.model, seed=0), info)
    how = {"split": "fold0-val", "cases": 1, "rates": "0.25", "halting": "none", "repeats": 1, "device": "cpu"}
    how |= {"precision": "fp32", "attention": "fused", "out": tmp_path / "out"}
    study.main([tmp_path / "model"], phantom, schedules="single", batches="2", **how)
    first = (tmp_path / "out" / "token_merging.csv").read_text()
    study.main([tmp_path / "model"], phantom, schedules="single,linear", batches="2", **how)
    second = (tmp_path / "out" / "token_merging.csv").read_text()
    assert second.startswith(first)
    none, single, linear = csv.DictReader(second.splitlines())
    assert [row["schedule"] for row in (none, single, linear)] == ["none", "single", "linear"]
    assert (float(none["rate"]), float(none["merged"])) == (0, 0)
    assert 0.15 < float(single["merged"]) < 0.35
    for row in (none, single, linear):
        assert 0 < float(row["loop_ms"]) < float(row["ms_per_image"])
        assert 0 < float(row["loop_mb"]) <= float(row["peak_mb"])
    assert (tmp_path / "out" / "token_merging.png").stat().st_size > 0
