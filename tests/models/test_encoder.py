"""From image to tokens: the pyramid's strides, positions for any grid, and the encoder inside MONAI's UNETR."""

from __future__ import annotations

import doctest
from collections.abc import Callable

import pytest
import torch
from monai.networks.nets.unetr import UNETR
from torch import nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models import encoder as encoder_module
from rdvit.models.block import Block
from rdvit.models.encoder import RecurrentViT, sincos_position, strides_and_kernels

ConfigMaker = Callable[..., ModelConfig]
Shape = tuple[int, ...]


@pytest.mark.parametrize(
    ("patch", "strides", "kernels"),
    [
        ((8, 8), [(2, 2)] * 3, [(3, 3)] * 4),
        ((16, 16), [(2, 2)] * 4, [(3, 3)] * 5),
        ((4, 4, 4), [(2, 2, 2)] * 2, [(3, 3, 3)] * 3),
        ((8, 8, 1), [(2, 2, 1)] * 3, [(3, 3, 1)] * 2 + [(3, 3, 3)] * 2),
        ((8, 8, 2), [(2, 2, 1)] * 2 + [(2, 2, 2)], [(3, 3, 1)] + [(3, 3, 3)] * 3),
    ],
)
def test_strides_and_kernels(patch: Shape, strides: list[Shape], kernels: list[Shape]) -> None:
    assert strides_and_kernels(patch) == (strides, kernels)


@pytest.mark.parametrize("patch", [(1, 1), (2, 2), (8, 4), (16, 16, 2), (4, 4, 1), (32, 32)])
def test_strides_multiply_to_the_patch(patch: Shape) -> None:
    strides, kernels = strides_and_kernels(patch)
    assert torch.tensor([[1] * len(patch), *strides]).prod(0).tolist() == list(patch)
    assert len(kernels) == len(strides) + 1


@pytest.mark.parametrize("grid", [(1, 1), (5, 3), (40, 7), (2, 3, 1), (7, 6, 5)])
@pytest.mark.parametrize("embed_dim", [32, 48, 50])
def test_positions_of_any_grid_are_distinct_and_centred(grid: Shape, embed_dim: int) -> None:
    position_ND = sincos_position(grid, embed_dim)
    count = torch.Size(grid).numel()
    assert position_ND.shape == (count, embed_dim)
    assert len(torch.unique(position_ND, dim=0)) == count
    mirrored_ND = position_ND.flip(0)  # through the centre: sines change sign, cosines stay
    odd_D, even_D = (torch.isclose(mirrored_ND, s * position_ND, atol=1e-5).all(0) for s in (-1, 1))
    assert (odd_D | even_D).all()


def test_positions_of_a_larger_grid_contain_those_of_a_smaller_one() -> None:
    large_XYD = sincos_position((9, 8), 32).unflatten(0, (9, 8))
    torch.testing.assert_close(large_XYD[2:7, 2:6].flatten(0, 1), sincos_position((5, 4), 32))


def test_positions_follow_the_order_of_the_token_map() -> None:
    """Along the first axis only the first share of the channels changes, along the last only the last share."""
    position_XYZD = sincos_position((3, 4, 2), 48).unflatten(0, (3, 4, 2))
    for axis in range(3):
        changed_D = position_XYZD.diff(dim=axis).abs().flatten(0, 2).amax(0) > 0
        assert all(channel // 16 == axis for channel in changed_D.nonzero().flatten().tolist())
        assert changed_D[16 * axis]


@pytest.mark.parametrize("stem", ["conv", "patch"])
@pytest.mark.parametrize(
    ("dims", "patch", "size", "grid"),
    [
        (2, (8, 8), (24, 40), (3, 5)),
        (2, (16, 16), (16, 32), (1, 2)),
        (3, (8, 8, 1), (16, 24, 1), (2, 3, 1)),
        (3, (4, 4, 2), (8, 12, 6), (2, 3, 3)),
    ],
)
def test_encoding_has_the_grid_of_the_patches(
    small_config: ConfigMaker, stem: str, dims: int, patch: Shape, size: Shape, grid: Shape
) -> None:
    config = small_config(dims, patch_size=patch, stem=stem, prelude_depth=1, coda_depth=1, in_channels=2)
    encoding = RecurrentViT(config).encode(torch.randn(2, 2, *size), keep_states=True)
    assert encoding.grid == grid
    assert encoding.token_map.shape == (2, 32, *grid)
    assert [tuple(s.shape) for s in encoding.record.states or []] == [(2, torch.Size(grid).numel(), 32)] * 4
    assert encoding.skips[0].shape == (2, 4, *size)
    assert len(encoding.skips) == (len(strides_and_kernels(patch)[0]) if stem == "conv" else 1)


@pytest.mark.parametrize(("dims", "size", "grid"), [(2, (24, 40), (3, 5)), (3, (16, 24, 2), (2, 3, 2))])
def test_positions_are_added_to_the_tokens_if_configured(
    small_config: ConfigMaker, dims: int, size: Shape, grid: Shape
) -> None:
    placed, plain = (RecurrentViT(small_config(dims, position=position)).eval() for position in ("sincos", "none"))
    plain.load_state_dict(placed.state_dict())
    seen: list[torch.Tensor] = []
    for model in (placed, plain):
        model.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        model(torch.ones(1, 1, *size))
    torch.testing.assert_close(seen[0] - seen[1], sincos_position(grid, 32)[None], atol=1e-5, rtol=0)


def test_token_map_and_image_have_the_same_orientation(small_config: ConfigMaker) -> None:
    """A change in one corner of the image moves the tokens of that corner, seen before any token looks at another."""
    model = RecurrentViT(small_config(stem="patch", skips="none", loops=1, position="none"))
    seen: list[torch.Tensor] = []
    model.recurrence.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    images = torch.zeros(1, 1, 24, 40)
    model(images)
    images[0, 0, -1, 0] = 5
    model(images)
    changed_N = (seen[0] != seen[1]).any(-1)[0]
    assert changed_N.unflatten(0, (3, 5)).nonzero().tolist() == [[2, 0]]


@pytest.mark.parametrize(("dims", "size"), [(2, (20, 24)), (2, (24, 24, 8)), (3, (24, 24)), (3, (24, 20, 3))])
def test_sizes_that_are_no_multiple_of_the_patch_are_refused(small_config: ConfigMaker, dims: int, size: Shape) -> None:
    with pytest.raises(ModelError, match=r"multiples of the patch \(8, 8(, 1)?\), found \(2"):
        RecurrentViT(small_config(dims)).encode(torch.zeros(1, 1, *size))


def test_auto_patch_must_be_settled_first(small_config: ConfigMaker) -> None:
    with pytest.raises(ModelError, match="must be settled"):
        RecurrentViT(small_config(patch_size="auto"))


def test_starts_with_a_silent_adapter_and_the_chosen_halting(small_config: ConfigMaker) -> None:
    """The general initialisation must not overwrite those of LoRA and of the halting head."""
    loop = RecurrentViT(small_config(halting_bias=-2.5)).recurrence
    assert loop.lora is not None
    assert loop.halting is not None
    assert not loop.lora.up.weight.any()
    assert loop.lora.down.weight.std().item() == pytest.approx(0.02, rel=0.3)
    assert (loop.lora.scale_Tr == 1).all()
    assert not loop.halting.proj.weight.any()
    assert loop.halting.proj.bias.tolist() == [-2.5]
    block = loop.blocks[0]
    assert isinstance(block, Block)
    assert block.attn.qkv.weight.std().item() == pytest.approx(0.02, rel=0.1)


def test_prelude_and_coda_are_used(small_config: ConfigMaker) -> None:
    model = RecurrentViT(small_config(prelude_depth=2, coda_depth=1))
    model(torch.randn(1, 1, 16, 16))[0].square().sum().backward()
    for parameter in [*model.prelude.parameters(), *model.coda.parameters()]:
        assert parameter.grad is not None
        assert parameter.grad.abs().max() > 0


@pytest.mark.parametrize(("dims", "image_size"), [(2, 64), (3, 32)])
def test_replaces_the_vit_of_monais_unetr(dims: int, image_size: int) -> None:
    """The same call, the same returned pair; one optimiser step of MONAI's network trains it."""
    torch.manual_seed(0)
    network = UNETR(1, 3, image_size, feature_size=8, hidden_size=96, mlp_dim=96, num_heads=4, spatial_dims=dims)
    images = torch.randn(1, 1, *[image_size] * dims)
    theirs, their_states = network.vit(images)
    network.vit = RecurrentViT(
        ModelConfig(spatial_dims=dims, patch_size=(16,) * dims, stem="patch", skips="none", embed_dim=96, num_heads=4, loops=12)
    )
    ours, our_states = network.vit(images)
    assert ours.shape == theirs.shape
    assert [s.shape for s in our_states] == [s.shape for s in their_states]

    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    before = {name: p.detach().clone() for name, p in network.vit.named_parameters()}
    loss = nn.functional.cross_entropy(network(images), (images[:, 0] > 0).long())
    loss.backward()
    assert loss.isfinite()
    silent = {name for name, p in network.vit.named_parameters() if p.grad is None}
    assert silent == {name for name in before if ".halting." in name}  # called like this the encoder does not halt
    optimiser.step()
    unchanged = {name for name, p in network.vit.named_parameters() if torch.equal(p, before[name])}
    assert unchanged - silent <= {"recurrence.lora.down.weight", "recurrence.lora.scale_Tr"}  # behind a zero at first


def test_examples_of_the_documentation_hold() -> None:
    results = doctest.testmod(encoder_module)
    assert results.attempted > 0
    assert results.failed == 0
