"""Look into a network while it runs, or change one matrix at one step only; nothing stays behind."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from einops import rearrange
from torch import Tensor, nn

from rdvit.errors import ModelError
from rdvit.models.block import Block
from rdvit.models.segmenter import Segmenter, pad_to_patches
from rdvit.models.sret import SRet


@torch.no_grad()
def states_and_attention(model: Segmenter, images: Tensor, loops: int | None = None) -> tuple[list[Tensor], list[Tensor]]:
    """State (B, N, D) after, and attention weights (B, H, N, N) in, each loop or block of a stack, without halting.

    Of a solver's several evaluations of a step it is the attention of the first.

    Args:
        model: The network; run in evaluation mode.
        images: (B, C, *space).
        loops: Number of loops; the trained depth where None.

    Raises:
        ModelError: If the network is no single loop or stack.
    """
    caught: list[Tensor] = []
    blocks = _blocks(model)
    hooks = [block.attn.qkv.register_forward_hook(lambda module, given, out: caught.append(out)) for block in blocks]
    try:
        encoding = model.eval().encoder.encode(pad_to_patches(images, model.encoder.patch_size), loops, keep_states=True)
    finally:
        for hook in hooks:
            hook.remove()
    states = encoding.record.states
    assert states is not None
    weights = []
    for qkv_BND in caught[:: len(caught) // len(states)]:
        q, k, _ = rearrange(qkv_BND, "b n (three h k) -> three b h n k", three=3, h=model.config.num_heads)
        weights.append((q @ k.mT / q.shape[-1] ** 0.5).softmax(-1))
    return states, weights


def _blocks(model: Segmenter) -> list[Block]:
    """The blocks of the loop or the stack."""
    if isinstance(model.encoder, SRet):
        raise ModelError("preset sret has three stages of blocks of their own: steps cannot be looked into or changed there")
    return [cast(Block, block) for block in model.encoder.recurrence.blocks]


def without_heads(proj_DD: Tensor, heads: list[int], num_heads: int) -> Tensor:
    """The output projection of an attention, deaf to some heads."""
    kept = proj_DD.clone()
    kept.unflatten(1, (num_heads, -1))[:, heads] = 0
    return kept


def without_neurons(w_out_DM: Tensor, neurons: Tensor) -> Tensor:
    """The output matrix of a feed-forward, deaf to some hidden neurons."""
    kept = w_out_DM.clone()
    kept[:, neurons] = 0
    return kept


def largest_singular_values(weight: Tensor, count: int) -> Tensor:
    """A matrix with only its ``count`` largest singular values: the nearest one of that rank."""
    u, s, v = torch.linalg.svd(weight.float(), full_matrices=False)
    return ((u[:, :count] * s[:count]) @ v[:count]).to(weight.dtype)


@contextmanager
def weight_at_step(model: Segmenter, name: str, step: int, weight: Tensor) -> Iterator[None]:
    """Run the network with another matrix at one step only: loop ``step`` (from 0) of a shared block, or that block of a stack.

    Args:
        model: The network, plain (no low-rank updates).
        name: Parameter of the block, e.g. ``attn.proj.weight``.
        step: The step.
        weight: The matrix to use there.

    Raises:
        ModelError: If the block has no such parameter.
    """
    blocks = _blocks(model)
    block = blocks[0 if model.config.shared_block else step]
    parameters = dict(block.named_parameters())
    if name not in parameters:
        raise ModelError(f"the block has no parameter '{name}'; it has {', '.join(parameters)}")
    parameter, original = parameters[name], parameters[name].data

    def swap(module: nn.Module, given: tuple[Any, ...]) -> None:
        t = given[4]  # as the loop calls Block.forward
        parameter.data = weight if t == step else original

    hook = block.register_forward_pre_hook(swap)
    try:
        yield
    finally:
        hook.remove()
        parameter.data = original
