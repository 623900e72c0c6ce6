"""The block: its formula, local mixing on the token grid, and the two ways to leave halted tokens out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rdvit.config import ExpertsConfig, ModelConfig
from rdvit.models.block import Block, KeysValues, LocalMixing, Selection
from rdvit.models.experts import Experts
from rdvit.models.feedforward import FeedForward

EXPERTS = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)
GRIDS: list[tuple[int, ...]] = [(4, 5), (3, 2, 4)]


def as_map(x_BND: Tensor, grid: tuple[int, ...]) -> Tensor:
    return x_BND.transpose(1, 2).unflatten(2, grid)


def as_tokens(x_BDxyz: Tensor) -> Tensor:
    return x_BDxyz.flatten(2).transpose(1, 2)


def test_local_mixing_in_2d_is_a_depthwise_convolution_of_the_token_map() -> None:
    torch.manual_seed(0)
    mixing, x_BND = LocalMixing(6, (3, 5)), torch.randn(2, 4 * 7, 6)
    weight, bias = mixing.plane.weight, mixing.plane.bias
    expected = F.conv2d(as_map(x_BND, (4, 7)), weight, bias, padding=(1, 2), groups=6)
    torch.testing.assert_close(mixing(x_BND, (4, 7)), as_tokens(expected))


def test_local_mixing_in_3d_is_a_separable_depthwise_convolution() -> None:
    torch.manual_seed(0)
    mixing, grid = LocalMixing(6, (3, 5, 3)), (4, 7, 5)
    x_BND = torch.randn(2, 4 * 7 * 5, 6)
    assert mixing.through_KD is not None
    nn.init.normal_(mixing.through_KD)
    in_plane = F.conv3d(as_map(x_BND, grid), mixing.plane.weight[..., None], mixing.plane.bias, padding=(1, 2, 0), groups=6)
    taps_D111K = mixing.through_KD.T[:, None, None, None]
    expected = F.conv3d(in_plane, taps_D111K, padding=(0, 0, 1), groups=6)
    torch.testing.assert_close(mixing(x_BND, grid), as_tokens(expected), atol=1e-5, rtol=1e-5)


def test_local_mixing_in_3d_starts_slice_by_slice() -> None:
    torch.manual_seed(0)
    mixing, planes = LocalMixing(6, (3, 3, 5)), LocalMixing(6, (3, 3))
    planes.plane.load_state_dict(mixing.plane.state_dict())
    x_BND = torch.randn(2, 4 * 5 * 3, 6)
    of_slices = [planes(x_BND.unflatten(1, (20, 3))[:, :, z], (4, 5)) for z in range(3)]
    torch.testing.assert_close(mixing(x_BND, (4, 5, 3)), torch.stack(of_slices, 2).flatten(1, 2))


def test_local_mixing_works_in_float32_under_autocast() -> None:
    torch.manual_seed(0)
    mixing, x_BND = LocalMixing(6, (3, 3)), torch.randn(1, 12, 6)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = mixing(x_BND, (3, 4))
    assert torch.equal(mixed, mixing(x_BND, (3, 4)))


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("experts", [False, True])
def test_is_a_pre_norm_residual_block(
    small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None], grid: tuple[int, ...], experts: bool
) -> None:
    torch.manual_seed(0)
    block = Block(small_config(len(grid), experts=EXPERTS), experts=experts)
    randomize(block)
    x_BND = torch.randn(2, torch.Size(grid).numel(), 32)
    assert block.local is not None
    assert block.local_norm is not None
    y_BND = x_BND + block.local(block.local_norm(x_BND), grid)
    y_BND = y_BND + block.attn(block.attn_norm(y_BND))
    z_BND = block.ffn(block.ffn_norm(y_BND))
    expected = y_BND + (z_BND[0] if isinstance(z_BND, tuple) else z_BND)
    out_BND, memory, routing = block(x_BND, grid)
    torch.testing.assert_close(out_BND, expected)
    assert (routing is not None) == experts
    assert isinstance(block.ffn, Experts if experts else FeedForward)
    for ours, theirs in zip(
        memory, block.attn.project(block.attn_norm(x_BND + block.local(block.local_norm(x_BND), grid)))[1:], strict=True
    ):
        torch.testing.assert_close(ours, theirs)


def test_experts_stay_out_of_blocks_that_do_not_ask_for_them(small_config: Callable[..., ModelConfig]) -> None:
    config = small_config(experts=EXPERTS)
    assert isinstance(Block(config).ffn, FeedForward)
    assert isinstance(Block(small_config(), experts=True).ffn, FeedForward)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("experts", [False, True])
def test_naming_the_active_tokens_gives_what_masking_the_others_gives(
    small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None], grid: tuple[int, ...], experts: bool
) -> None:
    torch.manual_seed(0)
    block, tokens = Block(small_config(len(grid), experts=EXPERTS), experts=experts), torch.Size(grid).numel()
    randomize(block)
    x_BND, old_BND = torch.randn(2, 2, tokens, 32)
    memory = KeysValues(*torch.randn(2, 2, 2, tokens, 16))
    halted_BN = torch.rand(2, tokens) < 0.5
    halted_BN[0, :3] = True  # rows of different length, so that the index is padded
    active = int((~halted_BN).sum(1).max())
    index_BM = halted_BN.to(torch.uint8).argsort(dim=1, stable=True)[:, :active]
    masked, named = Selection(halted_BN, None), Selection(halted_BN, index_BM)
    with torch.no_grad():
        out_BND, memory_masked, _ = block(x_BND, grid, masked, memory)
        out_BMD, memory_named, _ = block(x_BND, grid, named, memory)
    assert out_BMD.shape == (2, active, 32)
    torch.testing.assert_close(named.write(old_BND, out_BMD), masked.write(old_BND, out_BND), atol=1e-5, rtol=1e-5)
    for of_masked, of_named, old in zip(memory_masked, memory_named, memory, strict=True):
        torch.testing.assert_close(of_named, of_masked, atol=1e-5, rtol=1e-5)
        kept = halted_BN[:, None, :, None].expand_as(old)
        assert torch.equal(of_masked[kept], old[kept])
        assert not torch.isclose(of_masked[~kept], old[~kept]).all()


def test_write_keeps_halted_tokens_and_takes_active_ones() -> None:
    old_BND, halted_BN = torch.zeros(1, 3, 1), torch.tensor([[False, True, False]])
    whole = Selection(halted_BN, None).write(old_BND, torch.tensor([[[1.0], [2.0], [3.0]]]))
    assert whole.flatten().tolist() == [1, 0, 3]
    padded = Selection(halted_BN, torch.tensor([[2, 0, 1]])).write(old_BND, torch.tensor([[[3.0], [1.0], [9.0]]]))
    assert padded.flatten().tolist() == [1, 0, 3]


def test_halted_neighbours_are_still_seen(
    small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None]
) -> None:
    """Semantics S2: a halted token asks nothing, but its key, its value and its place in the grid stay visible."""
    torch.manual_seed(0)
    block = Block(small_config(local_kernel=None))
    randomize(block)
    x_BND, memory = torch.randn(1, 6, 32), KeysValues(*torch.randn(2, 1, 2, 6, 16))
    halted_BN = torch.tensor([[True, False, False, False, False, False]])
    selection = Selection(halted_BN, torch.arange(1, 6)[None])
    other = KeysValues(memory.k_BHNK, memory.v_BHNK.clone())
    other.v_BHNK[:, :, 0] += 5
    with torch.no_grad():
        assert not torch.allclose(block(x_BND, (2, 3), selection, memory)[0], block(x_BND, (2, 3), selection, other)[0])


def test_dropout_acts_in_training_only(small_config: Callable[..., ModelConfig]) -> None:
    torch.manual_seed(0)
    block, x_BND = Block(small_config(dropout=0.5)), torch.randn(1, 6, 32)
    assert not torch.equal(block(x_BND, (2, 3))[0], block(x_BND, (2, 3))[0])
    block.eval()
    assert torch.equal(block(x_BND, (2, 3))[0], block(x_BND, (2, 3))[0])
