"""The three tasks are read as they should be, split without overlap, and a training of each system runs."""

from __future__ import annotations

import csv
import importlib
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch

from rdvit.errors import DataError


@pytest.fixture(scope="module")
def task() -> Iterator[ModuleType]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(Path(__file__).parents[2] / "pipelines"))
        yield importlib.import_module("classification")


def test_a_fifth_of_each_class_is_held_out(task: ModuleType) -> None:
    labels = torch.tensor([0] * 20 + [1] * 10)
    images = torch.arange(30.0)
    train, train_labels, test, test_labels = task.split_at_random(images, labels)
    assert torch.bincount(test_labels).tolist() == [4, 2] and torch.bincount(train_labels).tolist() == [16, 8]
    assert sorted(torch.cat([train, test]).tolist()) == images.tolist()
    assert (labels[test.long()] == test_labels).all()


def test_shifts_repeat_the_border(task: ModuleType) -> None:
    torch.manual_seed(0)
    images = torch.arange(16.0).view(1, 1, 4, 4)
    moved = torch.cat([task.augmented(images, 1, False) for _ in range(40)])
    assert len(moved.flatten(1).unique(dim=0)) == 9
    assert torch.equal(task.augmented(images, 0, False), images)


def test_digits(task: ModuleType) -> None:
    train, labels, test, _ = task.digits()
    assert train.shape[1:] == (1, 8, 8) and len(train) + len(test) == 1797
    assert labels.unique().tolist() == list(range(10)) and (train.min(), train.max()) == (-1, 1)


def test_acdc_groups(task: ModuleType, phantom: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(task, "split_at_random", lambda images, labels: (images, labels))
    volumes, labels = task.acdc(phantom)
    assert volumes.shape == (5, 2, 64, 64, 8) and sorted(labels.tolist()) == [0, 1, 2, 3, 4]
    assert torch.isfinite(volumes).all() and (volumes[:, 0] != volumes[:, 1]).any(dim=(1, 2, 3)).all()


def test_image_folder(task: ModuleType, tmp_path: Path) -> None:
    from PIL import Image

    for part, count in (("train", 3), ("test", 1)):
        for number, name in enumerate(("apple", "bear")):
            (tmp_path / part / name).mkdir(parents=True)
            for i in range(count):
                color = np.full((8, 6, 3), (255 * number, 0, 0), np.uint8)
                Image.fromarray(color).save(tmp_path / part / name / f"{i}.png")
    train, labels, test, test_labels = task.image_folder(tmp_path)
    assert train.shape == (6, 3, 8, 6) and labels.tolist() == [0, 0, 0, 1, 1, 1] and test_labels.tolist() == [0, 1]
    assert train[:3, 0].max() == -1 and train[3:, 0].min() == 1 and len(test) == 2
    with pytest.raises(DataError, match="expected train/CLASS"):
        task.image_folder(tmp_path / "train")


def test_a_study_of_one_epoch(task: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    few = [part[:64] for part in task.digits()]
    monkeypatch.setattr(task, "digits", lambda: few)
    task.main(["digits", "--epochs", "1", "--seeds", "1", "--out", str(tmp_path)])
    with (tmp_path / "classification_digits.csv").open(newline="") as file:
        vit, flops, memory = csv.DictReader(file)
    assert int(vit["loop_parameters"]) == 6 * int(flops["loop_parameters"])
    assert int(memory["loop_parameters"]) == pytest.approx(int(vit["loop_parameters"]), rel=0.1)
    assert "bViT, equal memory: accuracy" in (tmp_path / "classification_digits.md").read_text()
