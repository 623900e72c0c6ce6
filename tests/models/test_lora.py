"""Low-rank updates: no effect at first, a gradient from the first step on, and merged the same network without them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from rdvit.config import PRESETS, BankConfig, ExpertsConfig, ModelConfig, resolve_config
from rdvit.models.build import all_parameters, build_segmenter, count_parameters, parameter_groups
from rdvit.models.lora import LowRankUpdate, TrainOnly, add_lora, lora_targets, merged, train_only
from rdvit.models.segmenter import Segmenter

SYSTEMS: list[dict[str, Any]] = [
    {},
    {"spatial_dims": 3},
    {"experts": ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)},
    {"bank": BankConfig(num_experts=3)},
    {"shared_block": False, "prelude_depth": 1, "coda_depth": 1},
]


@pytest.fixture(params=SYSTEMS, ids=["2d", "3d", "experts", "bank", "stack"])
def model(request: Any, small_config: Callable[..., ModelConfig], randomize: Callable[[nn.Module], None]) -> Segmenter:
    made = build_segmenter(small_config(**request.param), seed=0).eval()
    randomize(made)
    return made


def an_image(model: Segmenter) -> torch.Tensor:
    return torch.randn(2, 1, *((24, 16, 3) if model.config.spatial_dims == 3 else (24, 16)), generator=torch.Generator())


def test_nothing_changes_at_first(model: Segmenter) -> None:
    image = an_image(model)
    before = model(image)
    add_lora(model, rank=2)
    assert torch.equal(model(image), before)


def test_merged_gives_the_same_logits_and_plain_tensors(model: Segmenter, randomize: Callable[[nn.Module], None]) -> None:
    names, image = set(model.state_dict()), an_image(model)
    before = model(image)
    add_lora(model, rank=2)
    for update in (m for m in model.modules() if isinstance(m, LowRankUpdate)):
        randomize(update)
    adapted = model(image)
    assert (adapted - before).abs().max() > 1e-2
    plain = merged(copy.deepcopy(model))
    assert set(plain.state_dict()) == names != set(model.state_dict())
    torch.testing.assert_close(plain(image), adapted, rtol=1e-5, atol=1e-5)
    assert torch.equal(model(image), adapted)  # left as it was, although copies share their class


def test_every_update_gets_a_gradient_and_nothing_else_is_trained(model: Segmenter) -> None:
    train_only(model, "lora", rank=2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if not name.startswith("decoder.out.")} == {
        name for name, _ in model.named_parameters() if name.endswith((".0.up", ".0.down"))
    }
    model(an_image(model), halting="none").square().mean().backward()
    ups = {n: p.grad for n, p in model.named_parameters() if n.endswith(".0.up")}
    assert len(ups) == len(lora_targets(model))
    assert all(grad is not None and grad.abs().max() > 0 for grad in ups.values())
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)


def test_an_update_has_its_rank_and_each_matrix_of_a_stack_its_own() -> None:
    update = LowRankUpdate(torch.zeros(3, 10, 8), 2, torch.Generator().manual_seed(0))
    nn.init.normal_(update.up)
    delta_EMD = update(torch.zeros(3, 10, 8))
    assert torch.linalg.matrix_rank(delta_EMD).tolist() == [2, 2, 2]
    assert not torch.allclose(delta_EMD[0], delta_EMD[1])


def test_updates_stay_in_float32_under_autocast() -> None:
    update = LowRankUpdate(torch.randn(8, 8), 2, torch.Generator().manual_seed(0))
    nn.init.normal_(update.up)
    weight = torch.randn(8, 8)
    with torch.autocast("cpu", torch.bfloat16):
        under = update(weight)
        assert (update.up @ update.down).dtype == torch.bfloat16  # autocast is on
    assert torch.equal(under, update(weight))


@pytest.mark.parametrize("part", ["norms", "head"])
def test_what_norms_and_head_train(model: Segmenter, part: TrainOnly) -> None:
    train_only(model, part, rank=2)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    head = {name for name in trained if name.startswith("decoder.out.")}
    assert head == {"decoder.out.conv.conv.weight", "decoder.out.conv.conv.bias"}
    if part == "head":
        assert trained == head
    else:
        assert {"encoder.norm.weight", "encoder.embed_norm.weight", "encoder.recurrence.blocks.0.attn_norm.weight"} <= trained
        assert all(parameter.ndim == 1 for name, parameter in model.named_parameters() if name in trained - head)
    groups: list[Any] = parameter_groups(model, 0.1)
    assert sum(len(group["params"]) for group in groups) == len(trained)


def test_all_trains_all(model: Segmenter) -> None:
    names = set(model.state_dict())
    train_only(model, "all", rank=2)
    assert count_parameters(model) == all_parameters(model) and set(model.state_dict()) == names


@pytest.mark.parametrize(("dim", "patch"), [("2d", [8, 8]), ("3d", [8, 8, 1])])
@pytest.mark.parametrize("preset", PRESETS)
def test_less_than_three_percent(preset: str, dim: str, patch: list[int]) -> None:
    config = resolve_config(dim, preset, flags={"model": {"patch_size": patch}})
    whole = build_segmenter(config.model, seed=0)
    parts: list[TrainOnly] = ["lora", "norms", "head"]
    for part in parts:
        model = copy.deepcopy(whole)
        train_only(model, part, config.training.finetune_rank)
        assert 0 < count_parameters(model) < 0.03 * all_parameters(whole), part
