"""SReT: slices, shuffles, recursion and residual scales; any image size; merging in stages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdvit.config import SRET_HAS_NOT, ModelConfig, SRetConfig, resolve_config
from rdvit.errors import ConfigError, ModelError
from rdvit.models.attention import Attention
from rdvit.models.build import build_segmenter, count_parameters, parameter_groups, unroll
from rdvit.models.merging import Merging
from rdvit.models.segmenter import Segmenter
from rdvit.models.sret import SlicedBlock, SRet, sliced_attention

Randomize = Callable[[nn.Module], None]
PATCHES: dict[int, tuple[int, ...]] = {2: (32, 32), 3: (32, 32, 1)}
SMALL: dict[str, Any] = {"embed_dim": 32, "num_heads": 4, "stem_channels": 4, "loops": 2, "position": "sincos"}


def config(dims: int = 2, **changes: Any) -> ModelConfig:
    sret = SRetConfig(blocks=(1, 2, 1), drop_path=0.2)
    parts = {"preset": "sret", "sret": sret, "patch_size": PATCHES[dims], "spatial_dims": dims}
    return ModelConfig(**{**SRET_HAS_NOT, **SMALL, **parts, **changes})


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def test_sizes() -> None:
    """The stages at the paper's tiny width have its parameters, less positions, stem and classifier; the default is small."""
    tiny = {"embed_dim": 256, "num_heads": 8, "patch_size": (32, 32)}
    model = build_segmenter(resolve_config("2d", "sret", flags={"model": tiny}).model)
    assert isinstance(model.encoder, SRet)
    assert count_parameters(model.encoder.stages) == pytest.approx(4.38e6, rel=0.01)
    for dim, patch in (("2d", (32, 32)), ("3d", (32, 32, 1)), ("3d", (16, 16, 16))):
        small = build_segmenter(resolve_config(dim, "sret", flags={"model": {"patch_size": patch}}).model)
        assert 1.5e6 < count_parameters(small) < 3.0e6


def test_one_slice_is_full_attention_and_shuffles_do_not_matter_there() -> None:
    """SR-1, MO-4: to tolerance, also with masses."""
    attn, x, order = Attention(16, 2), draw(2, 12, 16), torch.randperm(12, generator=torch.Generator().manual_seed(2))
    masses = torch.arange(1.0, 25).view(2, 12)
    assert torch.equal(sliced_attention(attn, x, 1)[0], attn(x))
    for mass in (None, masses):
        plain, shuffled = (sliced_attention(attn, x, 1, o, mass)[0] for o in (None, order))
        torch.testing.assert_close(shuffled, plain, atol=1e-6, rtol=1e-5)


def test_slices_attend_to_themselves() -> None:
    """Each slice, of the shuffled sequence too, is attended to alone, with its own masses; keys come back in order."""
    attn, x, order = Attention(16, 2), draw(2, 12, 16), torch.randperm(12, generator=torch.Generator().manual_seed(2))
    mass = 1 + draw(2, 12).abs()
    for o in (torch.arange(12), order):
        out, keys = sliced_attention(attn, x, 3, o, mass)
        assert torch.equal(keys, attn.project(x)[1])
        for part in o.split(4):
            alone = attn.attend(*attn.project(x[:, part]), mass[:, part])
            torch.testing.assert_close(out[:, part], alone, atol=1e-6, rtol=1e-5)


def test_shuffling_around_a_map_of_single_tokens_is_the_identity() -> None:
    """SR-2: with as many slices as tokens attention is such a map."""
    attn, x = Attention(16, 2), draw(2, 8, 16)
    order = torch.randperm(8, generator=torch.Generator().manual_seed(2))
    torch.testing.assert_close(sliced_attention(attn, x, 8, order)[0], sliced_attention(attn, x, 8)[0], atol=1e-6, rtol=1e-5)


def test_slices_must_divide() -> None:
    """SR-6; in the model they always do, or it cannot be built."""
    with pytest.raises(ModelError, match="that 5 slices divide, found 12"):
        sliced_attention(Attention(16, 2), draw(1, 12, 16), 5)
    with pytest.raises(ModelError, match="stage 1 of sret has a multiple of 4 tokens"):
        SRet(config(patch_size=(1, 32)))


def test_a_block_without_its_branches_is_the_identity() -> None:
    """SR-3."""
    block, x = SlicedBlock(16, 2, config(), 0.0), draw(2, 8, 16)
    assert not torch.equal(block(x, 2, None, 0, None), x)
    for scales in (block.attn_scales, block.ffn_scales):
        nn.init.zeros_(scales.branch)
    assert torch.equal(block(x, 2, None, 0, None), x)


def test_gradients_of_the_passes_add_up() -> None:
    """SR-4: two copies of a block, one for each pass, get what sums to the shared block's gradient."""
    model = SRet(config(sret=SRetConfig(blocks=(1, 1, 1), drop_path=0.0))).eval()
    stage, x = model.stages[2], draw(2, 4, 32)
    assert len(stage.blocks) == 1 and len(stage.projections) == 2
    stage(x, None)[0].square().sum().backward()
    shared = {name: p.grad for name, p in stage.blocks[0].named_parameters()}
    copies = [SlicedBlock(32, 4, config(), 0.0) for _ in range(2)]
    for copy, project in zip(copies, stage.projections, strict=True):
        copy.load_state_dict(stage.blocks[0].state_dict())
        x = project(copy(x, 1, None, 0, None))
    x.square().sum().backward()
    for name, grad in shared.items():
        parts = [dict(copy.named_parameters())[name].grad for copy in copies]
        torch.testing.assert_close(parts[0] + parts[1], grad, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("dims", "size", "patch"),
    [
        (2, (33, 70), (32, 32)),
        (2, (3, 5), (32, 32)),
        (2, (16, 24), (8, 8)),
        (3, (40, 33, 3), (32, 32, 1)),
        (3, (17, 9, 5), (16, 16, 16)),
    ],
)
def test_any_size_and_twice_the_same(randomize: Randomize, dims: int, size: tuple[int, ...], patch: tuple[int, ...]) -> None:
    """SR-5, MO-5: evaluation repeats itself; rate 0 is no merging, bit for bit; merged or not, the image's size comes out."""
    model = Segmenter(config(dims, patch_size=patch)).eval()
    randomize(model)
    images = draw(2, 1, *size)
    with torch.no_grad():
        plain, record = model(images, return_record=True)
        assert torch.equal(model(images), plain) and torch.equal(model(images, merging=Merging(0.0)), plain)
        merged, shrunk = model(images, merging=Merging(0.3), return_record=True)
    assert plain.shape == merged.shape == (2, 4, *size)
    assert record.residuals_TB.shape == (8, 2) and record.residuals_TB.isfinite().all() and record.loops == 2
    assert shrunk.tokens_BND.shape == record.tokens_BND.shape and 0 < shrunk.merged <= 0.5
    assert not torch.equal(merged, plain)


def test_training_draws_and_reaches_every_parameter() -> None:
    model, images = Segmenter(config()).train(), draw(4, 1, 32, 64)
    torch.manual_seed(0)
    outputs = [model(images) for _ in range(2)]
    assert not torch.equal(*outputs)  # shuffles and dropped paths
    outputs[0].square().mean().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []
    free = parameter_groups(model, 0.1)[1]["params"]
    assert sum(p.ndim == 0 for p in free) == 2 * 2 * 4 + 2 * 8  # type: ignore[attr-defined]


@pytest.mark.parametrize("schedule", ["single", "constant", "linear", "exponential"])
def test_merging_keeps_to_the_slices(schedule: Any) -> None:
    """Of stages of 64, 16 and 4 tokens, what is left divides into 8, 4 and 1 slices at every pass."""
    model = SRet(config()).eval()
    seen: list[tuple[int, int]] = []
    for i, stage in enumerate(model.stages):
        for projection in stage.projections:
            projection.register_forward_pre_hook(lambda module, args, i=i: seen.append((i, args[0].shape[1])))
    with torch.no_grad():
        model.encode(draw(1, 1, 64, 64), merging=Merging(0.25, schedule))
    for i, tokens in seen:
        assert tokens % (8, 4, 1)[i] == 0
    assert len(seen) == 8
    if schedule == "single":
        assert seen == [*[(0, 48)] * 2, *[(1, 12)] * 4, *[(2, 3)] * 2]


def test_what_it_does_not_have() -> None:
    model, images = Segmenter(config()), torch.zeros(1, 1, 32, 32)
    with pytest.raises(ModelError, match=r"runs each block 2 times.*3 loops are not possible"):
        model(images, loops=3)
    with pytest.raises(ModelError, match="no halting head"):
        model(images, halting="act")
    with pytest.raises(ModelError, match="after training"):
        model(images, merging=Merging(0.1))
    with pytest.raises(ModelError, match="one shared block in a loop"):
        unroll(model, 2)
    for setting, message in (
        ("model.lora_rank=4", "expected lora_rank 0, found 4"),
        ("model.embed_dim=38", "embed_dim"),
        ("training.supervision=stagewise", "supervision final"),
        ("training.loop_sampling.kind=uniform", "loop_sampling.kind fixed"),
        ("model.sret.blocks=[1,2]", "two numbers of slices for each stage"),
        ("model.sret.slice=2", "did you mean 'model.sret.slices'"),
    ):
        with pytest.raises(ConfigError, match=message):
            resolve_config("2d", "sret", settings=[setting])
