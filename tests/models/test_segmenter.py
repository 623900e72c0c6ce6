"""Image to logits: any size, every option, 2D against 3D, precision, and repeatability."""

from __future__ import annotations

import doctest
from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn

from rdvit.config import ExpertsConfig, ModelConfig, resolve_config
from rdvit.errors import ModelError
from rdvit.models import segmenter as segmenter_module
from rdvit.models.merging import Merging
from rdvit.models.segmenter import Segmenter, pad_to_patches

ConfigMaker = Callable[..., ModelConfig]
Randomize = Callable[[nn.Module], None]
Shape = tuple[int, ...]
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)


def image(*size: int, batch: int = 2) -> Tensor:
    return torch.randn(batch, 1, *size, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize(
    ("dims", "patch", "size"),
    [
        *[(2, (8, 8), (24, 32)), (2, (8, 8), (37, 29)), (2, (8, 8), (3, 50)), (2, (16, 16), (33, 16)), (2, (1, 1), (5, 7))],
        *[(3, (8, 8, 1), (24, 17, 1)), (3, (8, 8, 1), (17, 24, 3)), (3, (8, 8, 2), (17, 9, 1)), (3, (4, 4, 4), (9, 11, 6))],
    ],
)
@pytest.mark.parametrize("training", [True, False])
def test_any_size_goes_in_and_comes_out(
    small_config: ConfigMaker, dims: int, patch: Shape, size: Shape, training: bool
) -> None:
    """Positions are computed, never fixed to a training size; one model takes them all."""
    model = Segmenter(small_config(dims, patch_size=patch, out_channels=3)).train(training)
    with torch.set_grad_enabled(training):
        logits, record = model(image(*size), return_record=True)
    assert logits.shape == (2, 3, *size)
    assert logits.isfinite().all()
    assert record.tokens_BND.shape[1] == torch.tensor([-(-s // p) for s, p in zip(size, patch, strict=True)]).prod()


@pytest.mark.parametrize("stem", ["conv", "patch"])
@pytest.mark.parametrize("skips", ["all", "image", "none"])
@pytest.mark.parametrize("norm", ["instance", "batch"])
def test_every_stem_and_skip_trains_all_of_its_parameters(small_config: ConfigMaker, stem: str, skips: str, norm: str) -> None:
    model = Segmenter(small_config(stem=stem, skips=skips, norm=norm, experts=EXPERTS, prelude_depth=1))
    logits, record = model(image(24, 16), return_record=True)
    assert record.ponder_BN is not None
    assert record.balance is not None
    (logits.square().mean() + record.ponder_BN.mean() + record.balance).backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


def test_decoder_reads_the_skips_it_should(small_config: ConfigMaker) -> None:
    """Without skips the logits come from the tokens alone, with the image's from the finest level too, else from all."""
    for skips, expected in (("none", []), ("image", [0]), ("all", [0, 1, 2])):
        model = Segmenter(small_config(skips=skips)).eval()
        with torch.no_grad():
            encoding = model.encoder.encode(image(24, 16))
            plain = model.decoder(encoding.token_map, encoding.skips)
            used = []
            for i, skip in enumerate(encoding.skips):
                changed = [torch.randn_like(s) if s is skip else s for s in encoding.skips]
                if not torch.equal(model.decoder(encoding.token_map, changed), plain):
                    used.append(i)
        assert used == expected


def test_padding_repeats_the_border_and_is_cut_off_again(small_config: ConfigMaker) -> None:
    padded = pad_to_patches(image(13, 8, 3), (8, 8, 2))
    assert padded.shape == (2, 1, 16, 8, 4)
    assert torch.equal(padded[:, :, :13, :, :3], image(13, 8, 3))
    assert torch.equal(padded[:, :, 13:, :, :3], image(13, 8, 3)[:, :, 12:].expand(-1, -1, 3, -1, -1))
    assert torch.equal(padded[..., 3], padded[..., 2])
    whole = image(16, 8)
    assert pad_to_patches(whole, (8, 8)) is whole
    model = Segmenter(small_config()).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(image(13, 15)), model(pad_to_patches(image(13, 15), (8, 8)))[..., :13, :15])


@pytest.mark.parametrize(
    ("dims", "shape", "message"),
    [
        (2, (1, 2, 16, 16), r"1 channel.*\(1, 2, 16, 16\)"),
        (2, (1, 1, 16, 16, 3), "of 4 axes"),
        (3, (1, 1, 16, 16), "of 5 axes"),
    ],
)
def test_images_of_another_kind_are_refused(small_config: ConfigMaker, dims: int, shape: Shape, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        Segmenter(small_config(dims))(torch.zeros(shape))


def test_halting_is_the_configured_one_a_named_one_or_one_per_image(small_config: ConfigMaker, randomize: Randomize) -> None:
    model = Segmenter(small_config(halting_bias=0.0)).eval()
    randomize(model)
    with torch.no_grad():
        default, act, none = model(image(24, 16)), model(image(24, 16), halting="act"), model(image(24, 16), halting="none")
        mixed = model(image(24, 16), halting=torch.tensor([1, 0]))
    assert torch.equal(default, act)
    assert not torch.allclose(act, none, atol=1e-3)
    torch.testing.assert_close(mixed, torch.stack([act[0], none[1]]), atol=1e-4, rtol=1e-4)
    with pytest.raises(ModelError, match="without a halting head"):
        Segmenter(small_config(halting="none"))(image(24, 16), halting="act")


def test_evaluation_uses_the_trained_depth_and_is_deterministic(small_config: ConfigMaker) -> None:
    """DEP-5: with dropout and experts in the model too; the random state is left alone."""
    model = Segmenter(small_config(dropout=0.3, experts=EXPERTS)).eval()
    state = torch.random.get_rng_state()
    with torch.no_grad():
        first, record = model(image(24, 16), halting="none", return_record=True)
        assert torch.equal(first, model(image(24, 16), halting="none"))
        assert torch.equal(first, model(image(24, 16), loops=4, halting="none"))
        assert not torch.equal(first, model(image(24, 16), loops=9, halting="none"))
    assert record.loops == 4
    assert torch.equal(state, torch.random.get_rng_state())


@pytest.mark.parametrize("halting", ["act", "none"])
def test_training_and_evaluation_agree_without_dropout(small_config: ConfigMaker, randomize: Randomize, halting: Any) -> None:
    """Masked with gradients, skipped without: the same logits."""
    model = Segmenter(small_config(experts=EXPERTS))
    randomize(model)
    masked = model(image(24, 16), loops=6, halting=halting)
    with torch.no_grad():
        torch.testing.assert_close(model(image(24, 16), loops=6, halting=halting), masked, atol=1e-4, rtol=1e-4)


def test_halted_tokens_are_skipped_where_no_gradient_is_asked_for(small_config: ConfigMaker) -> None:
    model = Segmenter(small_config(halting_bias=50.0))
    assert model(image(24, 16), return_record=True)[1].loops == 4
    with torch.no_grad():
        assert model(image(24, 16), return_record=True)[1].loops == 1


def test_a_fresh_soft_mixture_reads_nine_tenths_from_the_last_state(small_config: ConfigMaker) -> None:
    """Also after the network's own initialisation, at any number of loops; the states are all computed."""
    model = Segmenter(small_config(halting="none", readout="soft"))
    for loops in (2, 4, 7):
        _, record = model(image(24, 16), loops, return_record=True)
        assert record.weights_BNT is not None
        assert record.weights_BNT.shape == (2, 6, loops)
        torch.testing.assert_close(record.weights_BNT[..., -1], torch.full((2, 6), 0.9))
    with pytest.raises(ModelError, match="without a halting head"):
        model(image(24, 16), halting="act")


@pytest.mark.parametrize("halting", ["act", "none", torch.tensor([1, 0])])
def test_early_states_are_decoded_as_a_shorter_run_is(small_config: ConfigMaker, randomize: Randomize, halting: Any) -> None:
    """By the same coda, norm and decoder; the last logits are those of the read-out, unchanged."""
    model = Segmenter(small_config(coda_depth=1, halting_bias=-2.5)).eval()
    randomize(model)
    with torch.no_grad():
        early, record = model(image(24, 17), 5, halting, early=(1, 3))
        alone, _ = model(image(24, 17), 5, halting, early=())
        plain = model(image(24, 17), 5, halting)
        one, three = (model(image(24, 17), loops, "none") for loops in (1, 3))
    assert len(early) == 3
    assert [record.loops, len(alone)] == [5, 1]
    assert torch.equal(alone[0], plain)
    torch.testing.assert_close(early[2], plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(early[0], one, atol=1e-4, rtol=1e-4)
    if isinstance(halting, str) and halting == "none":
        torch.testing.assert_close(early[1], three, atol=1e-4, rtol=1e-4)
    else:  # tokens that had halted by then keep their state
        assert not torch.allclose(early[1][0], three[0], atol=1e-4)


def test_early_states_after_all_have_halted_are_the_last(small_config: ConfigMaker) -> None:
    model = Segmenter(small_config(halting_bias=50.0)).eval()
    with torch.no_grad():
        (early, last), record = model(image(24, 16), 5, early=(4,))
    assert record.loops == 1
    torch.testing.assert_close(early, last)


def test_batch_norms_average_what_they_see_of_all_stages(small_config: ConfigMaker, randomize: Randomize) -> None:
    """One batch for all stages: what is learned with the batch's statistics is what the running ones stand for."""
    model = Segmenter(small_config(halting="none", skips="none"))
    randomize(model)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.momentum = 1.0
    stages, _ = model(image(24, 16, batch=4), 4, early=(1, 2))
    model.decoder.eval()
    with torch.no_grad():
        again, _ = model(image(24, 16, batch=4), 4, early=(1, 2))
    for ours, theirs in zip(again, stages, strict=True):
        torch.testing.assert_close(ours, theirs, atol=0.02, rtol=0.02)


def weights_in_3d(planar: nn.Module, spatial: nn.Module) -> dict[str, Tensor]:
    """The 2D weights for the 3D network: kernels in the centre slice; mixing through the slices as it starts."""
    weights = planar.state_dict()
    for name, target in spatial.state_dict().items():
        if name.endswith("through_KD"):
            weights[name] = target
        elif target.ndim == weights[name].ndim + 1:
            kernel = torch.zeros_like(target)
            kernel[..., target.shape[-1] // 2] = weights[name]
            weights[name] = kernel
    return weights


def assert_planar_is_spatial_at_depth_one(config_2d: ModelConfig, config_3d: ModelConfig, randomize: Randomize) -> None:
    planar, spatial = Segmenter(config_2d).eval(), Segmenter(config_3d).eval()
    randomize(planar)
    spatial.load_state_dict(weights_in_3d(planar, spatial))
    with torch.no_grad():
        logits_2d, record_2d = planar(image(27, 16), return_record=True)
        logits_3d, record_3d = spatial(image(27, 16)[..., None], return_record=True)
    torch.testing.assert_close(record_3d.steps_BN, record_2d.steps_BN)
    torch.testing.assert_close(logits_3d[..., 0], logits_2d, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("stem", ["conv", "patch"])
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_2d_equals_3d_at_depth_one(
    small_config: ConfigMaker, randomize: Randomize, stem: str, experts: ExpertsConfig | None
) -> None:
    """RD-5: the whole network but positions; halting and skipping, prelude and coda included."""
    changes = {"stem": stem, "experts": experts, "position": "none", "prelude_depth": 1, "coda_depth": 1}
    assert_planar_is_spatial_at_depth_one(small_config(2, **changes), small_config(3, **changes), randomize)


def test_2d_equals_3d_at_depth_one_with_positions(small_config: ConfigMaker, randomize: Randomize) -> None:
    """RD-5: the same with sine and cosine positions."""
    assert_planar_is_spatial_at_depth_one(small_config(2), small_config(3), randomize)


@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("grad", [True, False])
def test_autocast_keeps_the_sums_in_float32(
    small_config: ConfigMaker, randomize: Randomize, experts: ExpertsConfig | None, grad: bool
) -> None:
    """LTI-2 and ACT-1 under autocast: 0 < A < 1, weights sum to 1 within 1e-6; the logits are near those in float32."""
    model = Segmenter(small_config(experts=experts))
    randomize(model)
    assert model.encoder.recurrence.injection is not None
    with torch.set_grad_enabled(grad):
        with torch.autocast("cpu", torch.bfloat16):
            logits, record = model(image(24, 16), loops=16, halting=torch.tensor([1, 0]), return_record=True)
            decay_D = model.encoder.recurrence.injection.decay()
        exact = model(image(24, 16), loops=16, halting=torch.tensor([1, 0]))
    assert logits.dtype == torch.bfloat16
    assert decay_D.min() > 0
    assert decay_D.max() < 1
    assert record.weights_BNT is not None
    assert record.weights_BNT.dtype == torch.float32
    assert (record.weights_BNT.sum(-1) - 1).abs().max() <= 1e-6
    assert (logits[1].float() - exact[1]).norm() < 0.1 * exact[1].norm()  # without halting, which may flip at a threshold
    if grad:
        logits.float().square().mean().backward()
        assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("halting", ["act", "none"])
def test_a_model_in_bfloat16_runs(small_config: ConfigMaker, randomize: Randomize, halting: Any) -> None:
    """LTI-2 after ``model.bfloat16()``; ACT weights still sum to 1 within 1e-6."""
    model = Segmenter(small_config(experts=EXPERTS))
    randomize(model)
    model.bfloat16().eval()
    with torch.no_grad():
        logits, record = model(image(24, 16).bfloat16(), halting=halting, return_record=True)
    assert logits.dtype == torch.bfloat16
    assert logits.isfinite().all()
    assert record.weights_BNT is None or (record.weights_BNT.sum(-1) - 1).abs().max() <= 1e-6


def test_an_image_does_not_depend_on_the_rest_of_its_batch(small_config: ConfigMaker, randomize: Randomize) -> None:
    model = Segmenter(small_config(experts=EXPERTS)).eval()
    randomize(model)
    with torch.no_grad():
        together, alone = model(image(24, 16)), torch.cat([model(image(24, 16)[b : b + 1]) for b in range(2)])
    torch.testing.assert_close(together, alone, atol=1e-4, rtol=1e-4)


def test_examples_of_the_documentation_hold() -> None:
    results = doctest.testmod(segmenter_module)
    assert results.attempted > 0
    assert results.failed == 0


# Looks


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("halting", ["act", "none"])
def test_a_look_is_the_result_of_so_many_loops(
    small_config: ConfigMaker,
    randomize: Randomize,
    dims: int,
    experts: ExpertsConfig | None,
    halting: Literal["act", "none"],
) -> None:
    """Bare looks between others, too: what was decoded before leaves no trace."""
    changes = {"experts": experts, "halting_bias": -2.0, "prelude_depth": 1, "coda_depth": 1}
    model = Segmenter(small_config(dims, **changes)).eval()
    randomize(model)
    images = image(21, 18, 3) if dims == 3 else image(21, 18)
    with torch.inference_mode():
        for look in model.looks(images, 5, halting):
            assert not look.decoded
            if look.loops in (2, 4, 5):
                logits, record = model(images, look.loops, halting, return_record=True)
                torch.testing.assert_close(look.logits, logits, atol=1e-5, rtol=1e-5)
                torch.testing.assert_close(look.residual_B, record.residuals_TB[-1], atol=1e-5, rtol=1e-5)
                assert look.record.loops == record.loops == look.loops
                assert look.decoded
        assert look.loops == 5


def test_looks_end_where_all_tokens_have_halted(small_config: ConfigMaker) -> None:
    model = Segmenter(small_config(halting_bias=0.0)).eval()  # 0.5 per loop: halts at the second
    with torch.inference_mode():
        looks = list(model.looks(image(24, 16), 9))
        assert [look.loops for look in looks] == [1, 2]
        torch.testing.assert_close(looks[-1].logits, model(image(24, 16), 9))


@pytest.mark.parametrize("preset", ["sret", "revit"])
def test_what_must_know_its_number_of_loops_gives_no_looks(preset: str) -> None:
    model = Segmenter(resolve_config("2d", preset, flags={"model": {"patch_size": (8, 8)}}).model).eval()
    with pytest.raises(ModelError, match=f"preset '{preset}' must know its number of loops beforehand"):
        next(model.looks(image(32, 32), 2))


def test_looks_of_merged_tokens(small_config: ConfigMaker, randomize: Randomize) -> None:
    model = Segmenter(small_config(halting_bias=-2.0)).eval()
    randomize(model)
    images = torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        for look in model.looks(images, 4, merging=Merging(0.25)):
            logits, record = model(images, look.loops, merging=Merging(0.25), return_record=True)
            torch.testing.assert_close(look.logits, logits, atol=1e-5, rtol=1e-5)
            assert look.record.merged == record.merged > 0
        with pytest.raises(ModelError, match="needs a fixed number of loops"):
            next(model.looks(images, 4, merging=Merging(0.25, "constant")))
