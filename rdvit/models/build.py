"""From a configuration to a network, and from a network to what an optimiser and a report need of it."""

from __future__ import annotations

import torch
from torch import nn

from rdvit.config import ModelConfig
from rdvit.models.experts import Experts
from rdvit.models.segmenter import Segmenter


def build_segmenter(config: ModelConfig, seed: int | None = None) -> Segmenter:
    """A segmenter with fresh weights.

    Args:
        config: The model's configuration, with a settled ``patch_size``.
        seed: Draws the same weights each time, and leaves the global random state alone; None uses that state.
    """
    if seed is None:
        return Segmenter(config)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # not torch.manual_seed, which would also reseed every GPU
        return Segmenter(config)


def count_parameters(module: nn.Module) -> int:
    """Number of trainable parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Optimiser groups: weight decay for matrices and kernels only.

    Norms, biases, the LTI decay and input gain, the LoRA scales and the halting head go without: decay would pull A towards
    its start, starve the injection, or move the halting probability (systems.md section 2 and 17.3).
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        exempt = parameter.ndim < 2 or name.endswith("scale_Tr") or "halting" in name.split(".")
        (free if exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def expert_layers(module: nn.Module) -> list[Experts]:
    """The mixtures of experts of a network."""
    return [m for m in module.modules() if isinstance(m, Experts)]
