"""Loop embedding and depth-wise LoRA: what they touch, and what they leave alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from rdvit.config import ModelConfig
from rdvit.models.block import KeysValues
from rdvit.models.depth import DepthLoRA, loop_embedding
from rdvit.models.recurrence import Recurrence


class SilentBlock(nn.Module):
    """A block that outputs zero."""

    def forward(self, x_BND: torch.Tensor, *_: object) -> tuple[torch.Tensor, KeysValues, None]:
        return torch.zeros_like(x_BND), KeysValues(x_BND, x_BND), None


class RecordingBlock(nn.Module):
    """A block that notes what it reads and hands it on."""

    def __init__(self) -> None:
        super().__init__()
        self.inputs: list[torch.Tensor] = []

    def forward(self, x_BND: torch.Tensor, *_: object) -> tuple[torch.Tensor, KeysValues, None]:
        self.inputs.append(x_BND)
        return x_BND, KeysValues(x_BND, x_BND), None


@pytest.mark.parametrize("t", [0, 1, 5, 40])
def test_embedding_is_sines_then_cosines_in_the_leading_channels(t: int) -> None:
    """LIE-2."""
    frequencies = torch.tensor([1.0, 10000 ** (-1 / 3), 10000 ** (-2 / 3)])
    expected = torch.cat([(t * frequencies).sin(), (t * frequencies).cos(), torch.zeros(42)])
    torch.testing.assert_close(loop_embedding(t, 48), expected, atol=1e-5, rtol=0)


def test_loop_zero_is_zeros_then_ones() -> None:
    """LIE-3."""
    assert loop_embedding(0, 32).tolist() == [0, 0, 1, 1] + [0] * 28


@pytest.mark.parametrize("embed_dim", [8, 24, 40])
def test_odd_or_missing_channels_are_refused(embed_dim: int) -> None:
    """LIE-5."""
    with pytest.raises(ValueError, match=f"found {embed_dim // 8} for width {embed_dim}"):
        loop_embedding(0, embed_dim)


def test_block_reads_the_embedding_alike_for_all_tokens_and_images(small_config: Callable[..., ModelConfig]) -> None:
    """LIE-1."""
    recurrence = Recurrence(small_config(injection="none", lora_rank=0, local_kernel=None))
    block = RecordingBlock()
    recurrence.blocks[0] = block
    e_BND = torch.zeros(2, 6, 32)
    recurrence(e_BND, (2, 3), loops=1)
    assert torch.equal(block.inputs[0], loop_embedding(0, 32).expand(2, 6, 32))


@pytest.mark.parametrize("injection", ["lti", "none"])
def test_carried_state_never_collects_the_embedding(small_config: Callable[..., ModelConfig], injection: str) -> None:
    """LIE-4."""
    torch.manual_seed(0)
    e_BND, states = torch.randn(2, 6, 32), []
    for embedding in (False, True):
        recurrence = Recurrence(small_config(injection=injection, loop_embedding=embedding))
        recurrence.blocks[0] = SilentBlock()
        states.append(recurrence(e_BND, (2, 3), loops=3).tokens_BND)
    assert torch.equal(states[0], states[1])


def test_lora_changes_nothing_at_initialisation(
    small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None]
) -> None:
    """LORA-1: the loop with a fresh adapter equals the loop without one, bit for bit."""
    torch.manual_seed(0)
    plain, adapted = Recurrence(small_config(lora_rank=0)), Recurrence(small_config(lora_rank=4))
    randomize(plain)
    missing, unexpected = adapted.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert all(name.startswith("lora.") for name in missing)
    e_BND = torch.randn(2, 12, 32)
    assert torch.equal(plain(e_BND, (3, 4), loops=4).tokens_BND, adapted(e_BND, (3, 4), loops=4).tokens_BND)


def test_lora_learns_from_the_first_step() -> None:
    """LORA-2."""
    torch.manual_seed(0)
    lora, x_BMD = DepthLoRA(16, rank=3, loops=4), torch.randn(2, 5, 16)
    assert not lora(x_BMD, 1).any()
    (lora(x_BMD, 1) * torch.randn(2, 5, 16)).sum().backward()
    assert lora.up.weight.grad is not None
    assert lora.up.weight.grad.abs().max() > 0
    torch.optim.SGD(lora.parameters(), lr=1.0).step()
    assert lora(x_BMD, 1).abs().max() > 0


def test_lora_is_linear_of_its_rank_at_most(randomize: Callable[[nn.Module], None]) -> None:
    """LORA-3."""
    lora = DepthLoRA(16, rank=3, loops=4)
    randomize(lora)
    matrix_DD = lora(torch.eye(16)[None], 2)[0]
    assert torch.linalg.matrix_rank(matrix_DD, rtol=1e-5) == 3
    x_BMD = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(lora(x_BMD, 2), x_BMD @ matrix_DD)


def test_each_loop_has_its_row_and_the_last_row_serves_beyond(randomize: Callable[[nn.Module], None]) -> None:
    """LORA-4."""
    lora, x_BMD = DepthLoRA(16, rank=3, loops=4), torch.ones(1, 2, 16)
    randomize(lora)
    deltas = [lora(x_BMD, t) for t in range(4)]
    assert all(not torch.allclose(deltas[i], deltas[j]) for i in range(4) for j in range(i))
    for t in (4, 5, 100):
        assert torch.equal(lora(x_BMD, t), deltas[3])
