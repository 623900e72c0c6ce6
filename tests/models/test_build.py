"""From configuration to network: seeds, parameter budgets of the presets, and what weight decay may touch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rdvit.config import PRESETS, BankConfig, Config, ExpertsConfig, ModelConfig, resolve_config
from rdvit.errors import ModelError
from rdvit.models.build import (
    build_segmenter,
    channels_last,
    count_parameters,
    expert_layers,
    for_inference,
    parameter_groups,
    unroll,
)
from rdvit.models.feedforward import FeedForward
from rdvit.models.recurrence import Recurrence

ConfigMaker = Callable[..., ModelConfig]
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)


def preset(dim: str, name: str, **model: Any) -> Config:
    patch = [8, 8] if dim == "2d" else [8, 8, 1]
    return resolve_config(dim, name, flags={"model": {"patch_size": patch, **model}})


@pytest.mark.parametrize(("dim", "name"), [("2d", "rdvit"), ("3d", "rdvit"), ("2d", "rdvit-moe"), ("3d", "rdvit-moe")])
def test_recurrent_presets_keep_to_three_million_parameters(dim: str, name: str) -> None:
    count = count_parameters(build_segmenter(preset(dim, name).model))
    assert 0.3e6 < count <= 3.0e6


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_stacked_baseline_has_a_block_for_each_loop_and_shares_the_rest(dim: str) -> None:
    stacked, looped = (build_segmenter(preset(dim, name).model) for name in ("vit", "rdvit"))
    loops = stacked.config.loops
    assert loops == looped.config.loops
    assert len(stacked.encoder.recurrence.blocks) == loops
    assert len(looped.encoder.recurrence.blocks) == 1
    block = count_parameters(stacked.encoder.recurrence.blocks[0])
    assert block == count_parameters(looped.encoder.recurrence.blocks[0])
    assert count_parameters(stacked.decoder) == count_parameters(looped.decoder)
    rest = [count_parameters(m.encoder) - count_parameters(m.encoder.recurrence) for m in (stacked, looped)]
    assert rest[0] == rest[1]
    assert count_parameters(stacked.encoder.recurrence) == loops * block


@pytest.mark.parametrize("name", PRESETS)
def test_presets_segment(name: str) -> None:
    model = build_segmenter(preset("2d", name, embed_dim=48, num_heads=2, stem_channels=4).model)
    assert model(torch.zeros(1, 1, 24, 16)).shape == (1, 4, 24, 16)
    assert len(expert_layers(model)) == (name == "rdvit-moe")


@pytest.mark.parametrize("dim", ["2d", "3d"])
@pytest.mark.parametrize("name", ["rdvit", "bvit", "sret"])
@pytest.mark.parametrize("norm", ["batch", "instance"])
def test_for_inference_is_the_same_function_with_the_same_loop(
    dim: str, name: str, norm: str, randomize: Callable[[nn.Module], None]
) -> None:
    model = build_segmenter(preset(dim, name, embed_dim=48, num_heads=2, stem_channels=4, norm=norm).model, seed=0)
    randomize(model)
    images = torch.randn(2, 1, 32, 32, *[2] * (dim == "3d"), generator=torch.Generator().manual_seed(1))
    model(images)  # batch norms learn a mean and a variance
    before = {key: value.clone() for key, value in model.state_dict().items()}
    folded = for_inference(model)
    norms = [m for m in folded.modules() if isinstance(m, nn.BatchNorm2d | nn.BatchNorm3d)]
    assert not norms
    channels_last(folded, images.ndim - 2)
    for part in folded.modules():
        if isinstance(part, nn.Conv2d | nn.Conv3d):
            layout: Any = torch.channels_last if part.weight.ndim == 4 else torch.channels_last_3d
            assert part.weight.is_contiguous(memory_format=layout)
    with torch.no_grad():
        expected = model(images)
        torch.testing.assert_close(folded(images), expected, atol=1e-5 * float(expected.abs().max()), rtol=0)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    own, loops = dict(model.named_parameters()), [n for n, _ in folded.named_parameters() if not n.startswith("decoder")]
    assert all(dict(folded.named_parameters())[n] is own[n] for n in loops if "stem" not in n)


PLAIN: dict[str, Any] = {"injection": "none", "lora_rank": 0, "loop_embedding": False, "halting": "none"}


@pytest.mark.parametrize("loops", [1, 3, 6])
@pytest.mark.parametrize(
    "changes",
    [{**PLAIN, "bank": BankConfig(num_experts=4)}, PLAIN, {}, {"experts": EXPERTS}, {"halting": "none", "readout": "soft"}],
    ids=["revit", "bvit", "rdvit", "rdvit-moe", "softmor"],
)
def test_unrolled_stack_is_the_loop(
    small_config: ConfigMaker, randomize: Callable[[nn.Module], None], changes: dict[str, Any], loops: int
) -> None:
    """RV-5 to 1e-5 of the logits, past the trained depth of 4 too; a bank becomes dense feed-forwards of their own."""
    model = build_segmenter(small_config(**changes, prelude_depth=1), seed=0).eval()
    randomize(model)
    state = torch.random.get_rng_state()
    stack = unroll(model, loops)
    assert torch.equal(state, torch.random.get_rng_state())
    images = torch.randn(2, 1, 24, 17)
    with torch.no_grad():
        dynamic, dense = model(images, loops), stack(images, loops)
        torch.testing.assert_close(dense, dynamic, atol=1e-5 * float(dynamic.abs().max()), rtol=1e-5)
        assert torch.equal(stack(images), dense)
    blocks = stack.encoder.recurrence.blocks
    assert len(blocks) == loops
    assert all(isinstance(block.ffn, FeedForward) for block in blocks) == ("experts" not in changes)
    if loops > 1 and "bank" in changes:
        first, second = (block.state_dict()["ffn.w_in.weight"] for block in list(blocks)[:2])
        assert not torch.equal(first, second)


def test_a_stack_is_not_unrolled(small_config: ConfigMaker) -> None:
    with pytest.raises(ModelError, match="'vit', which is none"):
        unroll(build_segmenter(small_config(**PLAIN, shared_block=False, preset="vit")), 3)


@pytest.mark.parametrize("dim", ["2d", "3d"])
def test_systems_of_the_literature_are_parts_of_one_loop(dim: str) -> None:
    """Next to the plain loop of bViT, SoftMoR adds a score, reViT experts, and nobody what grows with the loops."""
    plain, soft, bank = (count_parameters(build_segmenter(preset(dim, name).model)) for name in ("bvit", "softmor", "revit"))
    assert soft - plain == 2 * 192 + 1
    ffn = 3 * 192 * 512
    assert bank - plain == 7 * ffn + (8 * 32 + 32) + (32 * 8 + 8)
    deeper = preset(dim, "bvit", loops=20).model
    assert count_parameters(build_segmenter(deeper)) == plain


def test_a_seed_draws_the_same_weights_and_leaves_the_random_state_alone(small_config: ConfigMaker) -> None:
    state = torch.random.get_rng_state()
    first, second, other = (build_segmenter(small_config(), seed).state_dict() for seed in (3, 3, 4))
    assert torch.equal(state, torch.random.get_rng_state())
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)
    build_segmenter(small_config())
    assert not torch.equal(state, torch.random.get_rng_state())


def test_frozen_and_shared_parameters_are_counted_as_they_should() -> None:
    layer = nn.Linear(3, 2)
    assert count_parameters(nn.Sequential(layer, layer)) == 8
    layer.bias.requires_grad_(False)
    assert count_parameters(layer) == 6


def test_experts_are_found_wherever_they_are(small_config: ConfigMaker) -> None:
    assert expert_layers(build_segmenter(small_config())) == []
    stacked = build_segmenter(small_config(experts=EXPERTS, shared_block=False, loops=3, prelude_depth=1))
    assert len(expert_layers(stacked)) == 3  # in the loop, not in the prelude


@pytest.mark.parametrize("dims", [2, 3])
def test_weight_decay_touches_matrices_and_kernels_only(small_config: ConfigMaker, dims: int) -> None:
    """LTI-5 and systems.md 17.3: norms, biases, A, b, the LoRA scales and the halting head are free."""
    model = build_segmenter(small_config(dims, experts=EXPERTS, prelude_depth=1))
    decayed, free = parameter_groups(model, weight_decay=0.05)
    assert (decayed["weight_decay"], free["weight_decay"]) == (0.05, 0.0)
    names = {id(p): name for name, p in model.named_parameters()}
    groups: list[list[str]] = [[names[id(p)] for p in group["params"]] for group in (decayed, free)]  # type: ignore[attr-defined]
    assert sorted(groups[0] + groups[1]) == sorted(names.values())  # every parameter once
    normalised = {
        f"{name}.weight"
        for name, module in model.named_modules()
        if isinstance(module, nn.LayerNorm | nn.modules.batchnorm._NormBase)
    }
    expected = {name for name in names.values() if name in normalised or name.endswith(".bias")}
    loop = "encoder.recurrence."
    expected |= {
        f"{loop}injection.raw_decay",
        f"{loop}injection.input_gain",
        f"{loop}lora.scale_Tr",
        f"{loop}halting.proj.weight",
    }
    assert set(groups[1]) == expected
    torch.optim.AdamW(parameter_groups(model, weight_decay=0.05))


def test_scores_of_the_soft_mixture_are_free_of_decay_and_the_bank_is_not(small_config: ConfigMaker) -> None:
    model = build_segmenter(small_config(halting="none", readout="soft", bank=BankConfig(num_experts=2)))
    decayed, free = (
        {name for name, p in model.named_parameters() if any(p is q for q in group["params"])}  # type: ignore[attr-defined]
        for group in parameter_groups(model, weight_decay=0.05)
    )
    loop = "encoder.recurrence."
    assert {f"{loop}soft.score.weight", f"{loop}soft.last_offset", f"{loop}soft.norm.weight"} <= free
    assert {f"{loop}blocks.0.ffn.w_in", f"{loop}blocks.0.ffn.w_out"} <= decayed


def test_halting_head_is_free_of_decay_in_a_bare_loop_too(small_config: ConfigMaker) -> None:
    loop = Recurrence(small_config())
    assert loop.halting is not None
    free: Any = parameter_groups(loop, weight_decay=0.05)[1]["params"]
    assert any(p is loop.halting.proj.weight for p in free)
