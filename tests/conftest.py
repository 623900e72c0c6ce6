"""What tests of several folders share: a phantom data set, tiny settled configurations, and a tiny model in a folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from rdvit.config import Config, merge, resolve_config

torch.set_num_threads(1)  # networks this small gain nothing from more, and tests often share their machine with a training

ACDC_CLASSES = {1: "RV", 2: "MYO", 3: "LV"}
TINY: dict[str, dict[str, Any]] = {
    "model": {"embed_dim": 32, "num_heads": 2, "stem_channels": 4, "loops": 2, "out_channels": 4},
    "data": {"spacing": 3.0},
    "training": {
        "epochs": 2,
        "steps_per_epoch": 2,
        "batch_size": 2,
        "validate_every": 1,
        "loop_sampling": {"low": 1, "high": 3},
        "device": "cpu",
        "precision": "fp32",
    },
}
TINY_PER_DIM: dict[str, dict[str, Any]] = {
    "2d": {"model": {"patch_size": (8, 8), "local_kernel": (3, 3)}, "data": {"crop_size": (32, 32)}},
    "3d": {"model": {"patch_size": (8, 8, 1), "local_kernel": (3, 3, 3)}, "data": {"crop_size": (32, 32, 4)}},
}


@pytest.fixture(scope="session")
def phantom(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a small phantom in ACDC's layout, made once; read-only.

    Five patients (one per group) with ED and ES frames, in-plane 47 to 64 pixels of about 3 mm, at most 10 slices; patient001
    also has a cine of 6 to 8 frames, ``training/patient001/patient001_4d.nii.gz``. ``load_data`` takes the folder: ten cases.
    """
    from rdvit.data.phantom import write_phantom

    return write_phantom(tmp_path_factory.mktemp("phantom"), patients=5, shape_range=(48, 64), cines=1)


@pytest.fixture(scope="session")
def tiny_config() -> Callable[..., Config]:
    """``tiny_config(dim="2d", preset="rdvit", **settings)``: a settled configuration that trains on the phantom in seconds.

    Width 32, 2 heads, 2 loops, 4 output channels, patch 8 x 8 [x 1], crops of 32 x 32 [x 4] at 3 mm, two epochs of two steps of
    two samples, each validated, on the CPU in float32. ``settings`` go over that, section by section:
    ``tiny_config("3d", "vit", model={"loops": 3}, training={"epochs": 1})``.
    """

    def make(dim: str = "2d", preset: str = "rdvit", **settings: Any) -> Config:
        tiny = merge(TINY, TINY_PER_DIM[dim])
        if preset == "rdvit-moe":
            tiny = merge(tiny, {"model": {"experts": {"num_experts": 4, "top_k": 2, "num_shared": 1, "hidden_dim": 16}}})
        if preset == "sret":
            tiny = merge(tiny, {"model": {"local_kernel": None}})
        return resolve_config(dim, preset, flags=merge(tiny, settings))

    return make


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory: pytest.TempPathFactory, tiny_config: Callable[..., Config]) -> Path:
    """Folder with ``model.safetensors`` and ``model.json`` of an untrained ``tiny_config("2d", "rdvit")``; read-only.

    Classes are ACDC's: 1 RV, 2 MYO, 3 LV. There is no ``summary.json``, so for ``find_model`` it is not a finished run.
    """
    from rdvit.checkpoint import ModelInfo, save_model
    from rdvit.models.build import build_segmenter

    config = tiny_config("2d", "rdvit")
    folder = tmp_path_factory.mktemp("models") / "tiny"
    save_model(folder, build_segmenter(config.model, seed=0), ModelInfo(config, ACDC_CLASSES, {"data": "none", "epochs": 0}))
    return folder
