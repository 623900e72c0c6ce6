"""A larger network begins as the smaller one that it grows from: the same function, where both are defined."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rdvit.config import ModelConfig
from rdvit.models.build import build_segmenter
from rdvit.models.growth import grow, inherited, obstacle
from rdvit.models.segmenter import Segmenter

MakeConfig = Callable[..., ModelConfig]
# Twice 16 units shared and twice 16 routed: the 64 of a dense feed-forward of width 32 and ratio 3.
EXPERTS = {"num_experts": 4, "top_k": 2, "num_shared": 1, "hidden_dim": 16}


def stirred(config: ModelConfig) -> Segmenter:
    """A network whose parts all do something: fresh ones hold zeros where a trained one does not."""
    model = build_segmenter(config, seed=1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


def grown(small: Segmenter, **changes: Any) -> Segmenter:
    """The network that grows from a smaller one."""
    config = ModelConfig.model_validate(inherited(small.config, changes["spatial_dims"]) | changes)
    assert obstacle(small.config, config) is None
    model = build_segmenter(config, seed=2)
    model.load_state_dict(grow(small.state_dict(), model.state_dict(), config))
    return model.eval()


VOLUME = {"spatial_dims": 3, "patch_size": (8, 8, 1)}
MOE = {"preset": "rdvit-moe", "experts": EXPERTS}


@pytest.mark.parametrize("halting", ["none", "act"])
@torch.no_grad()
def test_a_volume_of_one_slice_is_the_slice(small_config: MakeConfig, halting: Any) -> None:
    small = stirred(small_config())
    large = grown(small, **VOLUME)
    image = torch.randn(2, 1, 32, 40)
    expected, found = small(image, loops=5, halting=halting), large(image[..., None], loops=5, halting=halting)
    torch.testing.assert_close(found[..., 0], expected, rtol=1e-4, atol=1e-4)
    assert large(torch.randn(1, 1, 32, 40, 3), loops=2).shape == (1, 4, 32, 40, 3)


@pytest.mark.parametrize("sizes", [VOLUME, {"spatial_dims": 2, "patch_size": (8, 8)}])
@torch.no_grad()
def test_experts_of_different_parts_are_the_dense_feed_forward(small_config: MakeConfig, sizes: dict[str, Any]) -> None:
    small = stirred(small_config(mlp_ratio=3.0))
    large = grown(small, **sizes, **MOE)
    ffn = large.encoder.recurrence.blocks[0].ffn
    ffn.router.weight.zero_()  # equal gates
    image = torch.randn(2, 1, 32, 40)
    expected = small(image, loops=3, halting="none")
    shaped = image[..., None] if sizes is VOLUME else image
    for chosen, dense in [((0, 1), True), ((2, 3), True), ((1, 2), True), ((0, 2), False)]:
        ffn.router_bias_E.copy_(torch.tensor([float(e in chosen) for e in range(4)]))
        found = large(shaped, loops=3, halting="none").reshape(expected.shape)
        assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4) == dense


@torch.no_grad()
def test_pooled_keys_need_no_weights_of_their_own(small_config: MakeConfig) -> None:
    small = stirred(small_config())
    large, image = grown(small, **VOLUME, kv_pool=(2, 2, 1)), torch.randn(1, 1, 32, 32)
    found, expected = large(image[..., None], loops=2)[..., 0], small(image, loops=2)
    assert not torch.allclose(found, expected, atol=1e-4)
    large.encoder.recurrence.blocks[0].kv_pool = (1, 1, 1)
    torch.testing.assert_close(large(image[..., None], loops=2)[..., 0], expected, rtol=1e-4, atol=1e-4)


def test_how_the_smaller_one_was_trained_is_not_inherited(small_config: MakeConfig) -> None:
    shared = inherited(small_config(backprop_loops=2, checkpoint_loops=True, loops=5), 3)
    assert shared["loops"] == 5 and shared["local_kernel"] == [3, 3, 3]
    assert not {"backprop_loops", "checkpoint_loops", "patch_size", "kv_pool"} & shared.keys()


def test_what_cannot_grow_says_why(small_config: MakeConfig) -> None:
    flat, deep = small_config(mlp_ratio=3.0), small_config(3, mlp_ratio=3.0)
    moe = small_config(3, mlp_ratio=3.0, **MOE)
    assert obstacle(flat, deep) is None and obstacle(flat, moe) is None and obstacle(moe, moe) is None
    assert "does not become one of slices" in str(obstacle(deep, flat))
    assert "patch_size is (8, 8) there, (4, 4, 4) here" in str(obstacle(flat, small_config(3, patch_size=(4, 4, 4))))
    assert "local_kernel is (3, 3) there, None here" in str(obstacle(flat, small_config(3, local_kernel=None)))
    assert "experts are num_experts=4" in str(obstacle(moe, deep))
    more = small_config(3, preset="rdvit-moe", mlp_ratio=3.0, experts=EXPERTS | {"hidden_dim": 24})
    assert "has 64 hidden units, shared and 2 chosen of 4 experts have 48 + 48" in str(obstacle(flat, more))
    odd = small_config(3, preset="rdvit-moe", mlp_ratio=3.0, experts=EXPERTS | {"num_experts": 5})
    assert "a multiple of those chosen" in str(obstacle(flat, odd))
