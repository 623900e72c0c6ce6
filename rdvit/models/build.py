"""From a configuration to a network, and from a network to what an optimiser and a report need of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from monai.networks.blocks import Convolution, UnetBasicBlock
from torch import nn
from torch.nn.utils import convert_conv2d_weight_memory_format, convert_conv3d_weight_memory_format
from torch.nn.utils.fusion import fuse_conv_bn_eval

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.bank import ExpertBank
from rdvit.models.experts import Experts
from rdvit.models.segmenter import Segmenter
from rdvit.models.sret import SRet


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


def channels_last(model: nn.Module, spatial_dims: int) -> torch.memory_format:
    """Lay the weights of all convolutions out with channels last; returns the layout that images should have, too.

    The whole network follows the weights. In 3D on a CPU convolutions then take about half the time. ``model.to`` cannot do
    it: a 3D network has 2D convolutions.
    """
    convert_conv2d_weight_memory_format(model, torch.channels_last)
    convert_conv3d_weight_memory_format(model, torch.channels_last_3d)
    return torch.channels_last if spatial_dims == 2 else torch.channels_last_3d


def for_inference(model: Segmenter) -> Segmenter:
    """The same function for inference alone: batch norms of stem and decoder become part of the convolution before them.

    The loop is that of the model, weights and hooks included; stem and decoder are copies, which do not follow later changes.
    """
    if not isinstance(model, Segmenter):  # a network of a study that answers as one
        return model.eval()
    loop = {id(part): part for name, part in model.eval().encoder.named_children() if name != "stem"}
    folded = copy.deepcopy(model, loop)
    for part in folded.modules():
        if isinstance(part, UnetBasicBlock):
            _fold(part.conv1, part, "norm1")
            _fold(part.conv2, part, "norm2")
        elif isinstance(part, Convolution) and hasattr(part, "adn"):
            _fold(part, part.adn, "N")
    return folded


def _fold(convolution: Any, owner: Any, name: str) -> None:
    """Let a convolution do what the batch norm ``name`` of ``owner`` does after it."""
    norm = getattr(owner, name)
    if isinstance(norm, nn.BatchNorm2d | nn.BatchNorm3d):
        convolution.conv = fuse_conv_bn_eval(convolution.conv, norm)
        setattr(owner, name, nn.Identity())


@torch.no_grad()
def unroll(model: Segmenter, loops: int) -> Segmenter:
    """The same function as an unshared stack: a block of its own for each loop, for deployment at a fixed depth.

    A bank becomes one dense feed-forward per block; what else the loop has (injection, LoRA, halting) stays as it is.

    Args:
        model: A segmenter with a shared block; left as it is.
        loops: Depth of the stack.

    Returns:
        A segmenter in evaluation mode that runs up to ``loops`` loops, and at ``loops`` gives the model's logits.

    Raises:
        ModelError: If the model is a stack already, or is SReT.
    """
    if not model.config.shared_block or isinstance(model.encoder, SRet):
        raise ModelError(
            f"expected a model with one shared block in a loop, found preset '{model.config.preset}', which is none"
        )
    changes = {"preset": "vit", "shared_block": False, "loops": loops, "bank": None, "backprop_loops": None}
    stack = build_segmenter(ModelConfig.model_validate({**model.config.model_dump(), **changes}), seed=0)
    block: Any = model.encoder.recurrence.blocks[0]
    prefix = "encoder.recurrence.blocks."
    weights = {name: value for name, value in model.state_dict().items() if not name.startswith(prefix)}
    for t in range(loops):
        own = block.state_dict()
        if isinstance(block.ffn, ExpertBank):
            own = {name: value for name, value in own.items() if not name.startswith("ffn.")}
            own["ffn.w_in.weight"], own["ffn.w_out.weight"] = block.ffn.merge(t, loops)
        weights |= {f"{prefix}{t}.{name}": value for name, value in own.items()}
    lora = "encoder.recurrence.lora.scale_Tr"
    if lora in weights:  # past the trained depth its last row counts on
        weights[lora] = weights[lora][[min(t, len(weights[lora]) - 1) for t in range(loops)]]
    stack.load_state_dict(weights)
    return stack.to(next(model.parameters())).eval()


def count_parameters(module: nn.Module) -> int:
    """Number of trainable parameters, shared ones once."""
    return sum(p.numel() for p in module.parameters() if p.requires_grad)


def all_parameters(module: nn.Module) -> int:
    """Number of parameters, trained or frozen, shared ones once."""
    return sum(p.numel() for p in module.parameters())


def parameter_groups(module: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Optimiser groups: weight decay for matrices and kernels only.

    Norms, biases, the LTI decay and input gain, the LoRA scales, the halting head and the scores of the soft mixture go
    without: decay would pull A towards its start, starve the injection, or move the read-out (systems.md section 2, 17.3).
    Frozen parameters are in neither.
    """
    decayed: list[nn.Parameter] = []
    free: list[nn.Parameter] = []
    for name, parameter in module.named_parameters():
        if not parameter.requires_grad:
            continue
        exempt = parameter.ndim < 2 or name.endswith("scale_Tr") or {"halting", "soft"} & set(name.split("."))
        (free if exempt else decayed).append(parameter)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": free, "weight_decay": 0.0}]


def expert_layers(module: nn.Module) -> list[Experts]:
    """The mixtures of experts of a network."""
    return [m for m in module.modules() if isinstance(m, Experts)]
