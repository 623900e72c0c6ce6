"""Fine-tuning of few parameters: low-rank updates of weight matrices, and which parameters are trained.

    W = W' + up down        form B of systems.md section 4 (weight LoRA), one update per stored matrix

The matrices of a shared block have one update for all loops, so that it can be merged: the merged network has the tensors and
the function of a plain one. It is a parametrization of PyTorch's: what reads ``layer.weight`` reads the updated one.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils import parametrize

from rdvit.models.attention import Attention
from rdvit.models.bank import ExpertBank
from rdvit.models.build import build_segmenter
from rdvit.models.experts import Experts
from rdvit.models.feedforward import FeedForward
from rdvit.models.segmenter import Segmenter

TrainOnly = Literal["all", "lora", "norms", "head"]


class LowRankUpdate(nn.Module):
    """``W + up @ down``, zero at first: ``up`` is zero, ``down`` is not, so that a gradient flows from the first step on.

    Args:
        weight: The matrix (..., M, D); a stack of matrices gets an update for each.
        rank: Rank r.
        generator: Draws ``down``.
    """

    def __init__(self, weight: Tensor, rank: int, generator: torch.Generator) -> None:
        super().__init__()
        *stack, rows, columns = weight.shape
        self.down = nn.Parameter(0.02 * torch.randn(*stack, rank, columns, generator=generator))
        self.up = nn.Parameter(torch.zeros(*stack, rows, rank))

    def forward(self, weight: Tensor) -> Tensor:
        """The updated matrix; in float32 under any autocast, so that merging changes nothing."""
        with torch.autocast(weight.device.type, enabled=False):
            return weight + self.up @ self.down


def lora_targets(model: nn.Module) -> list[tuple[nn.Module, str]]:
    """The matrices of all attentions and feed-forwards, experts and banks included, as (module, parameter name)."""
    targets: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, Attention):
            targets += [(module.qkv, "weight"), (module.proj, "weight")]
        elif isinstance(module, FeedForward):
            targets += [(module.w_in, "weight"), (module.w_out, "weight")]
        elif isinstance(module, Experts | ExpertBank):
            targets += [(module, "w_in"), (module, "w_out")]
    return targets


def add_lora(model: nn.Module, rank: int, seed: int = 0) -> None:
    """Give every matrix of :func:`lora_targets` a low-rank update; the network's function is not changed by that."""
    generator = torch.Generator().manual_seed(seed)
    for module, name in lora_targets(model):
        parametrize.register_parametrization(module, name, LowRankUpdate(getattr(module, name), rank, generator))


@torch.no_grad()
def merged(model: Segmenter) -> Segmenter:
    """A copy with plain weights: each update added to its matrix.

    Not ``deepcopy`` and ``remove_parametrizations``: copies share the class that holds the property of the parametrized tensor,
    and removing it from one breaks the other.
    """
    tensors = {name: value for name, value in model.state_dict().items() if ".parametrizations." not in name}
    for prefix, module in model.named_modules():
        if parametrize.is_parametrized(module):
            tensors |= {f"{prefix}.{name}": getattr(module, name) for name in module.parametrizations}
    plain = build_segmenter(model.config, seed=0)
    plain.load_state_dict(tensors)
    return plain.train(model.training)


def train_only(model: Segmenter, part: TrainOnly, rank: int, seed: int = 0) -> None:
    """Freeze a network but for a part of it; the head, the convolution that makes the logits, is always trained.

    Batch norms go on to follow the statistics of what they see: they are no parameters, and other images have others.

    Args:
        model: The network; ``lora`` adds updates to it.
        part: ``all``, ``lora`` (updates of the matrices), ``norms`` (scales and shifts of all norms) or ``head``.
        rank: Rank of the updates.
        seed: Of their random half.
    """
    if part == "all":
        return
    model.requires_grad_(False)
    if part == "lora":
        add_lora(model, rank, seed)
    for module in model.modules():
        if isinstance(module, LowRankUpdate) or (part == "norms" and isinstance(module, nn.LayerNorm | _NormBase)):
            module.requires_grad_(True)
    model.decoder.out.requires_grad_(True)
