"""What the tests of the networks share: a small configuration and weights that are far from their gentle start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rdvit.config import ModelConfig
from rdvit.models import experts, recurrence


@pytest.fixture(autouse=True)
def _few_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Token counts are rounded up to 4 here, not 128: small grids could not skip a token otherwise.

    Seeded, too: whether tokens of a small grid halt at different loops must not depend on the tests before.
    """
    torch.manual_seed(0)
    monkeypatch.setattr(experts, "ROWS", 4)
    monkeypatch.setattr(recurrence, "ROWS", 4)


@pytest.fixture
def small_config() -> Callable[..., ModelConfig]:
    """Makes a configuration of a few thousand parameters with every part of ``rdvit`` on; keywords change it."""

    def make(spatial_dims: int = 2, **changes: Any) -> ModelConfig:
        small = {"embed_dim": 32, "num_heads": 2, "stem_channels": 4, "loops": 4, "lora_rank": 4, "position": "sincos"}
        sizes: dict[str, Any] = {"patch_size": (8, 8), "local_kernel": (3, 3)}
        if spatial_dims == 3:
            sizes = {"patch_size": (8, 8, 1), "local_kernel": (3, 3, 3)}
        return ModelConfig(**{**small, **sizes, "spatial_dims": spatial_dims, **changes})

    return make


@pytest.fixture
def randomize() -> Callable[[nn.Module], None]:
    """Adds noise to every parameter of a module.

    Fresh weights make the block nearly the identity, the adapter zero and halting the same for all tokens: a wrong loop
    would look right.
    """

    def add_noise(module: nn.Module) -> None:
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                scale = 0.6 if "halting" in name else 0.15
                parameter.add_(scale * torch.randn(parameter.shape, generator=generator))

    return add_noise
