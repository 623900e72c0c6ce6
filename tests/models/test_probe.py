"""What is seen of a running network is what it computes, and a matrix is changed at its step alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.build import build_segmenter, unroll
from rdvit.models.probe import (
    largest_singular_values,
    states_and_attention,
    weight_at_step,
    without_heads,
    without_neurons,
)
from rdvit.models.segmenter import Segmenter

IMAGES = torch.randn(2, 1, 24, 16, generator=torch.Generator().manual_seed(3))


@pytest.fixture
def model(small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None]) -> Segmenter:
    made = build_segmenter(small_config(halting="none"), seed=0).eval()
    randomize(made)
    return made


@pytest.mark.parametrize("solver", ["euler", "rk4"])
def test_states_and_attention_are_the_networks(model: Segmenter, solver: str, small_config: Callable[..., ModelConfig]) -> None:
    network = build_segmenter(small_config(halting="none", solver=solver), seed=0).eval()
    network.load_state_dict(model.state_dict())
    states, attention = states_and_attention(network, IMAGES, loops=3)
    assert len(states) == len(attention) == 3
    assert torch.equal(states[-1], network(IMAGES, loops=3, return_record=True)[1].tokens_BND)
    assert attention[0].shape == (2, 2, 6, 6)
    torch.testing.assert_close(attention[0].sum(-1), torch.ones(2, 2, 6))
    assert not torch.allclose(attention[0], attention[1])


def test_attention_weights_make_the_attention(model: Segmenter) -> None:
    """With the values caught beside, the weights give what the fused attention gives."""
    attn = model.encoder.recurrence.blocks[0].attn  # type: ignore[union-attr]
    seen: list[tuple[torch.Tensor, ...]] = []
    hook = attn.proj.register_forward_pre_hook(lambda module, given: seen.append(given))  # type: ignore[union-attr]
    values: list[torch.Tensor] = []
    other = attn.qkv.register_forward_hook(lambda module, given, out: values.append(out))  # type: ignore[union-attr]
    _, attention = states_and_attention(model, IMAGES, loops=1)
    hook.remove(), other.remove()
    v_BHNK = values[0].unflatten(-1, (3, 2, -1))[:, :, 2].transpose(1, 2)
    torch.testing.assert_close((attention[0] @ v_BHNK).transpose(1, 2).flatten(2), seen[0][0], rtol=1e-4, atol=1e-5)


def test_no_heads_no_attention(model: Segmenter) -> None:
    weight = torch.randn(32, 32)
    x = torch.randn(5, 32)
    assert torch.equal(without_heads(weight, [], 2), weight)
    assert without_heads(weight, [0, 1], 2).abs().sum() == 0
    only_second = x.clone()
    only_second[:, :16] = 0
    torch.testing.assert_close(F.linear(x, without_heads(weight, [0], 2)), F.linear(only_second, weight))


def test_neurons_and_singular_values() -> None:
    weight = torch.randn(8, 12)
    gone = without_neurons(weight, torch.tensor([1, 5]))
    assert (gone == 0).sum() == 16 and torch.equal(gone[:, 0], weight[:, 0])
    torch.testing.assert_close(largest_singular_values(weight, 8), weight, rtol=1e-4, atol=1e-5)
    low = largest_singular_values(weight, 3)
    assert torch.linalg.matrix_rank(low) == 3
    torch.testing.assert_close((weight - low).norm() ** 2, torch.linalg.svdvals(weight)[3:].square().sum())


@pytest.mark.parametrize("step", [0, 2, 3])
def test_only_that_step_changes(model: Segmenter, step: int) -> None:
    """The states before the step are untouched, and afterwards the network is what it was. A stack agrees with the loop."""
    before, _ = states_and_attention(model, IMAGES)
    other = torch.zeros_like(model.state_dict()["encoder.recurrence.blocks.0.ffn.w_out.weight"])
    with weight_at_step(model, "ffn.w_out.weight", step, other):
        during, _ = states_and_attention(model, IMAGES)
        logits = model(IMAGES)
    for t, (old, new) in enumerate(zip(before, during, strict=True)):
        assert torch.equal(old, new) == (t < step)
    stack = unroll(model, 4)
    with weight_at_step(stack, "ffn.w_out.weight", step, other):
        torch.testing.assert_close(stack(IMAGES), logits, rtol=1e-4, atol=1e-5)
    for network in (model, stack):
        after, _ = states_and_attention(network, IMAGES)
        torch.testing.assert_close(after[-1], before[-1], rtol=1e-4, atol=1e-5)
    assert torch.equal(states_and_attention(model, IMAGES)[0][-1], before[-1])


def test_unknown_matrix(model: Segmenter) -> None:
    with pytest.raises(ModelError, match=r"no parameter 'ffn.weight'; it has .*attn.qkv.weight"):  # noqa: SIM117
        with weight_at_step(model, "ffn.weight", 0, torch.zeros(1)):
            pass
