"""A network of slices made one of volumes, and a dense feed-forward made experts, so that neither begins from nothing.

In 3D each kernel has the plane's in its middle slice and zeros beside it (cf. Carreira and Zisserman 2017, arXiv:1705.07750,
who spread it over time), and the mixing along the slices starts as the identity: on a volume of one slice the function is the
same. Experts are sparse upcycling (Komatsuzaki et al. 2023, arXiv:2212.05055) of a hidden layer shared out: its first units
become the shared expert, the rest is dealt to the routed ones, each part to several of them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from rdvit.config import ModelConfig
from rdvit.models.feedforward import hidden_width

# What a larger network has of its own; the other settings are those of the network that it grows from.
OWN = {"preset", "spatial_dims", "patch_size", "local_kernel", "experts", "kv_pool"}
THROUGH = 3  # width of the local mixing along the slices, where there was none
HOW_IT_TRAINS = {"checkpoint_loops", "backprop_loops"}  # of no meaning to a trained network
_FFN = "encoder.recurrence.blocks.0.ffn."


def inherited(config: ModelConfig, spatial_dims: int) -> dict[str, Any]:
    """The settings that a network of so many axes which grows from this one shares with it."""
    shared = {key: value for key, value in config.model_dump(mode="json").items() if key not in OWN | HOW_IT_TRAINS}
    if config.local_kernel is None or spatial_dims == config.spatial_dims:
        return shared | {"local_kernel": config.local_kernel}
    return shared | {"local_kernel": [*config.local_kernel, THROUGH]}


def obstacle(small: ModelConfig, large: ModelConfig) -> str | None:
    """Why one network cannot grow into the other, or None if it can; what :func:`inherited` names is not looked at."""
    if small.spatial_dims > large.spatial_dims:
        return "a network of volumes does not become one of slices"
    for key in ("patch_size", "local_kernel"):
        there, here = getattr(small, key), getattr(large, key)
        if (there is None) != (here is None) or (there is not None and tuple(there) != tuple(here)[: len(there)]):
            return f"{key} is {there} there, {here} here, which differs in the plane"
    if large.experts is None or small.experts is not None:
        same = large.experts == small.experts
        return None if same else f"experts are {small.experts} there, {large.experts} here"
    shared, part, top_k = _widths(large)
    dense = hidden_width(small.embed_dim, small.mlp_ratio)
    if dense != shared + top_k * part or large.experts.num_experts % top_k:
        return (
            f"the dense feed-forward has {dense} hidden units, shared and {top_k} chosen of {large.experts.num_experts} "
            f"experts have {shared} + {top_k * part}: they must be as many, and the experts a multiple of those chosen"
        )
    return None


def grow(tensors: dict[str, Tensor], fresh: dict[str, Tensor], large: ModelConfig) -> dict[str, Tensor]:
    """The state of the larger network: what the smaller one knows, and fresh weights where it knows nothing.

    Args:
        tensors: State of the smaller network.
        fresh: Fresh state of the larger one.
        large: Its configuration, with no :func:`obstacle`.
    """
    if large.experts is not None and f"{_FFN}router.weight" not in tensors:
        tensors = _dealt(tensors, large)
    return {name: _inflated(tensors[name], value) if name in tensors else value for name, value in fresh.items()}


def _inflated(kernel: Tensor, like: Tensor) -> Tensor:
    """A tensor of the plane as the middle slice of one with a third axis, zeros beside it; others as they are."""
    if kernel.ndim == like.ndim:
        return kernel
    volume = torch.zeros_like(like)
    volume[..., like.shape[-1] // 2] = kernel
    return volume


def _widths(config: ModelConfig) -> tuple[int, int, int]:
    """Hidden units of the shared experts together, those of one routed expert, and how many are chosen."""
    assert config.experts is not None
    ex = config.experts
    return ex.num_shared * ex.top_k * ex.hidden_dim, ex.hidden_dim, ex.top_k


def _dealt(tensors: dict[str, Tensor], large: ModelConfig) -> dict[str, Tensor]:
    """The dense feed-forward's units as shared and routed experts, the routed ones amplified against gates that sum to 1."""
    assert large.experts is not None
    shared, part, top_k = _widths(large)
    kept = {name: value for name, value in tensors.items() if not name.startswith(_FFN)}
    gate_MD, up_MD = tensors[f"{_FFN}w_in.weight"].chunk(2)
    out_DM = tensors[f"{_FFN}w_out.weight"]
    parts = [slice(shared + k * part, shared + (k + 1) * part) for k in range(top_k)]
    dealt = [parts[e % top_k] for e in range(large.experts.num_experts)]
    kept[f"{_FFN}w_in"] = torch.stack([torch.cat([gate_MD[units], up_MD[units]]) for units in dealt])
    kept[f"{_FFN}w_out"] = torch.stack([top_k * out_DM[:, units] for units in dealt])
    if shared:
        kept[f"{_FFN}shared.w_in.weight"] = torch.cat([gate_MD[:shared], up_MD[:shared]])
        kept[f"{_FFN}shared.w_out.weight"] = out_DM[:, :shared].clone()
    return kept
