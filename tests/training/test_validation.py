"""Validation measures on the file's own grid, leaves out what is nowhere, and draws what the loop did."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.text import Text
from torch import Tensor

from rdvit.checkpoint import ModelInfo
from rdvit.config import Config
from rdvit.data.datalist import Case, load_data, select
from rdvit.errors import DataError
from rdvit.inference.predictor import Predictor
from rdvit.models.build import build_segmenter
from rdvit.training.validation import Validation, entropy_of_usage

NAMES = {1: "RV", 2: "MYO", 3: "LV"}
MakeConfig = Callable[..., Config]


class Oracle(Predictor):
    """Answers with the reference of each case, all tokens at ``steps`` loops; ``wrong`` classes are never found."""

    def __init__(self, validation: Validation, names: dict[int, str], steps: float = 2.0, wrong: tuple[int, ...] = ()) -> None:
        config = validation.config
        super().__init__(build_segmenter(config.model, seed=0), ModelInfo(config, names), "cpu", "fp32")
        self.answers = {id(case.image_1XYZ): case.label_1XYZ for case in validation.cases}
        self.steps, self.wrong = steps, wrong

    def run(self, image_1XYZ: Tensor, loops: int | None = None, halting: object = None) -> Tensor:
        labels_XYZ = self.answers[id(image_1XYZ)][0].long()
        for index in self.wrong:
            labels_XYZ = labels_XYZ.where(labels_XYZ != index, 0)
        logits_CXYZ = torch.nn.functional.one_hot(labels_XYZ, len(self.class_values)).movedim(-1, 0).float()
        return torch.cat([logits_CXYZ, torch.full_like(logits_CXYZ[:1], self.steps)])


@pytest.fixture(scope="module")
def cases(phantom: Path) -> list[Case]:
    return select(load_data(phantom), "fold0-val")


def predictor_of(config: Config) -> Predictor:
    return Predictor(build_segmenter(config.model, seed=0), ModelInfo(config, NAMES), "cpu", "fp32")


def test_a_perfect_network_scores_one(cases: list[Case], tiny_config: MakeConfig) -> None:
    validation = Validation(cases, tiny_config(data={"spacing": "native"}), NAMES)
    metrics = validation(Oracle(validation, NAMES, steps=3.5))
    scores = {"val/dice": 1.0, "val/dice_RV": 1.0, "val/dice_MYO": 1.0, "val/dice_LV": 1.0}
    assert metrics == pytest.approx(scores | {"val/steps": 3.5})


def test_dice_is_measured_on_the_files_grid(cases: list[Case], tiny_config: MakeConfig) -> None:
    validation = Validation(cases, tiny_config(data={"spacing": 9.0}), NAMES)
    case = validation.cases[0]
    assert case.reference_XYZ.shape == case.frame.shape != tuple(case.image_1XYZ.shape[1:])
    metrics = validation(Oracle(validation, NAMES))
    assert 0.3 < metrics["val/dice_MYO"] < 0.95  # perfect at 9 mm is not perfect at 3 mm


def test_mean_is_over_structures(cases: list[Case], tiny_config: MakeConfig) -> None:
    validation = Validation(cases, tiny_config(data={"spacing": "native"}), NAMES)
    metrics = validation(Oracle(validation, NAMES, wrong=(2,)))
    assert metrics["val/dice_MYO"] == 0.0
    assert metrics["val/dice"] == pytest.approx(2 / 3)


def test_a_structure_that_is_nowhere_counts_neither_way(cases: list[Case], tiny_config: MakeConfig) -> None:
    names = {**NAMES, 7: "scar"}
    config = tiny_config(data={"spacing": "native"}, model={"out_channels": 5})
    validation = Validation(cases, config, names)
    metrics = validation(Oracle(validation, names))
    assert np.isnan(metrics["val/dice_scar"])
    assert metrics["val/dice"] == 1.0


def test_a_case_without_labels_or_with_those_of_another_is_refused(
    phantom: Path, cases: list[Case], tiny_config: MakeConfig
) -> None:
    case = cases[0]
    with pytest.raises(DataError, match=f"case {case.id} has no label"):
        Validation([replace(case, label=None)], tiny_config(), NAMES)
    stranger = next(other for other in load_data(phantom).cases if other.patient != case.patient)
    with pytest.raises(DataError, match="labels have shape"):
        Validation([replace(case, label=stranger.label)], tiny_config(), NAMES)


@pytest.mark.parametrize(
    ("dim", "preset", "kinds"),
    [
        ("2d", "rdvit", {"preview", "halting"}),
        ("2d", "vit", {"preview"}),
        ("3d", "rdvit-moe", {"preview", "halting", "experts"}),
    ],
)
def test_figures_fit_the_preset(cases: list[Case], tiny_config: MakeConfig, dim: str, preset: str, kinds: set[str]) -> None:
    config = tiny_config(dim, preset)
    figures = Validation(cases[:1], config, NAMES).figures(predictor_of(config))
    assert figures.keys() == kinds
    texts = [text.get_text() for text in figures["preview"].findobj(Text) if isinstance(text, Text)]
    assert any(cases[0].id in text for text in texts)


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_expert_usage_is_a_share_per_structure(cases: list[Case], tiny_config: MakeConfig, dim: str) -> None:
    config = tiny_config(dim, "rdvit-moe")
    validation = Validation(cases, config, NAMES)
    usage_CE = validation.expert_usage(predictor_of(config))
    assert usage_CE is not None and usage_CE.shape == (4, 4)
    assert usage_CE.sum(1) == pytest.approx(np.ones(4), abs=1e-5)
    assert 0 < entropy_of_usage(usage_CE) <= 1
    plain = tiny_config(dim, "rdvit")
    assert Validation(cases[:1], plain, NAMES).expert_usage(predictor_of(plain)) is None


def test_entropy_is_one_for_all_alike_and_zero_for_one() -> None:
    assert entropy_of_usage(np.full((3, 4), 0.25)) == pytest.approx(1.0)
    assert entropy_of_usage(np.eye(4)[:3]) == pytest.approx(0.0)
    assert entropy_of_usage(np.array([[0.5, 0.5], [1.0, 0.0]])) == pytest.approx(0.5)
    assert entropy_of_usage(np.array([[0.5, 0.5], [np.nan, np.nan]])) == pytest.approx(1.0)  # a structure without tokens
