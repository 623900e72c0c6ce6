"""Token merging: the way there and back, masses, safe numbers, schedules, and the loop with merged tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdvit.config import BankConfig, ExpertsConfig, ModelConfig
from rdvit.errors import ConfigError, ModelError
from rdvit.models import merging as merging_module
from rdvit.models.attention import Attention
from rdvit.models.merging import Groups, Merging, TokenMerger, match, safe_count
from rdvit.models.segmenter import Segmenter

ConfigMaker = Callable[..., ModelConfig]
Randomize = Callable[[nn.Module], None]
PLAIN: dict[str, Any] = {"injection": "none", "loop_embedding": False, "lora_rank": 0, "halting": "none"}
SYSTEMS: dict[str, dict[str, Any]] = {
    "rdvit": {},
    "rdvit-moe": {"experts": ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)},
    "vit": {**PLAIN, "shared_block": False, "preset": "vit"},
    "bvit": PLAIN,
    "revit": {**PLAIN, "bank": BankConfig(num_experts=4)},
    "softmor": {**PLAIN, "readout": "soft"},
    "midpoint": {"solver": "midpoint", "step_size": 0.5},
    "rk4": {**PLAIN, "solver": "rk4", "prelude_depth": 1, "coda_depth": 1},
    "half Euler": {"step_size": 0.5},
    "pooled": {"kv_pool": (2,)},  # along each axis
}


def of_system(system: str, dims: int) -> dict[str, Any]:
    """The settings of a system for so many axes."""
    return {key: value * dims if key == "kv_pool" else value for key, value in SYSTEMS[system].items()}


def draw(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def groups(tokens: int, count: int, seed: int = 1, mass_BM: Tensor | None = None) -> Groups:
    keys = draw(2, 3, tokens, 4, seed=seed)
    return match(keys, torch.ones(2, tokens) if mass_BM is None else mass_BM, count)


def twice(tokens: int = 21, first: int = 7, second: int = 5) -> tuple[Groups, Groups]:
    one = groups(tokens, first)
    return one, groups(tokens - first, second, seed=2, mass_BM=one.mass_BM)


# Groups


@pytest.mark.parametrize(("tokens", "count"), [(2, 1), (9, 4), (16, 8), (16, 1)])
def test_round_trip(tokens: int, count: int) -> None:
    """TM-2, TM-3, TM-5, TM-8: order, length, masses, and the values of tokens alone bit for bit."""
    g, x = groups(tokens, count), draw(2, tokens, 5)
    merged = g.merge(x)
    assert merged.shape == (2, tokens - count, 5)
    assert torch.equal(g.mass_BM.sum(1), torch.full((2,), float(tokens)))
    torch.testing.assert_close((g.mass_BM[..., None] * merged).sum(1), x.sum(1), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(g.merge(g.unmerge(merged)), merged, atol=1e-6, rtol=1e-6)
    back = g.unmerge(merged)
    for b in range(2):
        for n in range(tokens):
            members = (g.index_BN[b] == g.index_BN[b, n]).nonzero()[:, 0]
            if len(members) == 1:
                assert torch.equal(back[b, n], x[b, n])
            torch.testing.assert_close(back[b, n], x[b, members].mean(0), atol=1e-6, rtol=1e-6)
    assert torch.equal(g.keeper_BM, g.keeper_BM.sort(1).values)  # what is left stays in its order


def test_two_merges_are_undone_last_in_first_out_and_as_one() -> None:
    """MO-3: and the second weighs by the masses that the first has made."""
    one, two = twice()
    both, x = one.then(two), draw(2, 21, 5)
    merged = two.merge(one.merge(x))
    assert merged.shape[1] == 21 - 12
    assert torch.equal(both.unmerge(merged), one.unmerge(two.unmerge(merged)))
    torch.testing.assert_close(both.merge(x), merged, atol=1e-6, rtol=1e-6)
    assert torch.equal(both.mass_BM, torch.zeros(2, 9).scatter_add(1, both.index_BN, torch.ones(2, 21)))
    kept = (both.mass_BM == 1).gather(1, both.index_BN)
    assert 0 < kept.sum() < kept.numel()
    assert torch.equal(both.unmerge(merged)[kept], x[kept])
    heavy = (two.mass_BM == two.weight_BN.gather(1, two.keeper_BM)) & (two.mass_BM > 1)  # merged before, not now
    assert heavy.any()
    assert torch.equal(merged[heavy], one.merge(x).gather(1, two.keeper_BM[..., None].expand(-1, -1, 5))[heavy])


def test_the_most_similar_pairs_merge() -> None:
    """Keys on a circle: tokens 0 and 3 point alike, 2 and 1 nearly, 4 lies alone; a zero key is no NaN."""
    angles = torch.tensor([0.0, 1.0, 1.1, 0.02, 2.5, 4.0])
    keys = torch.stack([angles.cos(), angles.sin()], -1)[None, None]
    ones = torch.ones(1, 6)
    assert match(keys, ones, 1).index_BN.tolist() == [[2, 0, 1, 2, 3, 4]]
    assert match(keys, ones, 2).index_BN.tolist() == [[1, 0, 0, 1, 2, 3]]
    assert match(keys, ones, 2).mass_BM.tolist() == [[2, 2, 1, 1]]
    assert match(torch.zeros(1, 1, 6, 2), ones, 3).mass_BM.sum() == 6


def test_masses_do_not_change_who_merges_and_images_do_not_either() -> None:
    """TM-7: and matching takes keys without their masses."""
    keys = draw(3, 2, 12, 4)
    together = match(keys, torch.ones(3, 12), 4)
    assert torch.equal(match(keys, 1 + draw(3, 12).abs(), 4).index_BN, together.index_BN)
    for b in range(3):
        assert torch.equal(match(keys[b : b + 1], torch.ones(1, 12), 4).index_BN[0], together.index_BN[b])


def test_rows_taken_a_few_at_a_time_match_as_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    keys, ones = draw(3, 2, 37, 4), torch.ones(3, 37)
    whole = match(keys, ones, 9)
    for few in (1, 100):  # a row at a time, and some that do not divide the rows
        monkeypatch.setattr(merging_module, "SIMILARITIES", few)
        assert torch.equal(match(keys, ones, 9).index_BN, whole.index_BN)


def test_matching_goes_with_a_permutation_of_tokens() -> None:
    """Permuted among the even places and among the odd ones, the same tokens merge."""
    keys = draw(1, 2, 14, 4)
    generator = torch.Generator().manual_seed(3)
    order = torch.empty(14, dtype=torch.long)
    order[::2], order[1::2] = 2 * torch.randperm(7, generator=generator), 2 * torch.randperm(7, generator=generator) + 1
    plain, moved = (match(k, torch.ones(1, 14), 5) for k in (keys, keys[:, :, order]))
    assert not torch.equal(moved.index_BN, plain.index_BN)
    for g, ids in ((plain, torch.arange(14)), (moved, order)):
        g_sets = {frozenset(ids[g.index_BN[0] == m].tolist()) for m in range(9)}
        assert g_sets == {frozenset((plain.index_BN[0] == m).nonzero()[:, 0].tolist()) for m in range(9)}


def test_a_key_of_mass_s_counts_like_s_keys() -> None:
    """TM-4: proportional attention over merged duplicates is attention over all of them."""
    attn, x = Attention(8, 2), draw(2, 6, 8)
    repeats = torch.tensor([1, 3, 2, 1, 1, 4])
    full = attn(x.repeat_interleave(repeats, dim=1))
    ours = attn.attend(*attn.project(x), repeats.float().expand(2, -1))
    torch.testing.assert_close(ours.repeat_interleave(repeats, dim=1), full, atol=1e-6, rtol=1e-5)
    assert not torch.allclose(attn(x), ours, atol=1e-3)


# How many


@pytest.mark.parametrize(
    ("tokens", "divisor", "rate", "left"),
    [(784, 8, 0.25, 584), (196, 4, 0.25, 144), (49, 1, 0.25, 37), (784, 8, 0.4, 464), (196, 4, 0.4, 116), (49, 1, 0.4, 30)],
)
def test_published_numbers(tokens: int, divisor: int, rate: float, left: int) -> None:
    """MO-1."""
    assert tokens - safe_count(tokens, Merging(rate).wanted(tokens, 0, 4), divisor) == left


@pytest.mark.parametrize("divisor", [1, 2, 4, 6, 8])
def test_numbers_are_safe(divisor: int) -> None:
    """MO-2: a multiple is left, at most half go, 0 stays 0, and nothing less than what was wanted unless half is reached."""
    for tokens in range(divisor, 401, divisor):
        assert safe_count(tokens, 0, divisor) == 0
        for wanted in {1, tokens // 4, tokens // 2, tokens}:
            count = safe_count(tokens, wanted, divisor)
            assert (tokens - count) % divisor == 0
            assert 0 <= count <= tokens // 2
            assert count >= wanted or count + divisor > tokens // 2
    with pytest.raises(ModelError, match="that 8 divides, found 12"):
        safe_count(12, 1, 8)


def test_schedules() -> None:
    """Constant and linear come to what single takes at once; exponential is the published one."""
    plans = {name: [Merging(0.4, name).wanted(100, d, 5) for d in range(5)] for name in ("single", "constant", "linear")}
    assert plans == {"single": [40, 0, 0, 0, 0], "constant": [8] * 5, "linear": [16, 12, 8, 4, 0]}
    assert [Merging(0.4, "exponential", 0.3).wanted(100, d, 5) for d in range(4)] == [40, 12, 3, 1]
    assert Merging(0.4, "linear").wanted(100, 0, 1) == 40


@pytest.mark.parametrize("rate", [1.0, -0.1, 2.0, float("nan")])
def test_impossible_rates(rate: float) -> None:
    with pytest.raises(ConfigError, match="at least 0 and below 1"):
        Merging(rate)


@pytest.mark.parametrize(("rate", "divisor", "merged", "said"), [(0.7, 1, 8, "at most half"), (0.3, 8, 8, "multiple of 8")])
def test_what_cannot_be_met_is_adjusted_and_said_once(
    caplog: pytest.LogCaptureFixture, rate: float, divisor: int, merged: int, said: str
) -> None:
    merging_module._say.cache_clear()
    with caplog.at_level("INFO", logger="rdvit"):
        for _ in range(2):
            merger = TokenMerger(Merging(rate), 16, 1, divisor)
            assert merger.after_attention(draw(1, 1, 16, 4), 0) is not None
            assert merger.merged == merged
    assert len(caplog.messages) == 1 and said in caplog.messages[0]


# The loop


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("system", SYSTEMS)
def test_rate_zero_is_no_merging_and_others_keep_length_and_order(
    small_config: ConfigMaker, randomize: Randomize, system: str, dims: int
) -> None:
    """TM-1, MO-5: bit for bit; and everything in the record is on the whole grid."""
    model = Segmenter(small_config(dims, **of_system(system, dims))).eval()
    randomize(model)
    images = draw(2, 1, *((30, 33), (16, 24, 3))[dims - 2])
    with torch.no_grad():
        plain, whole = model(images, return_record=True)
        zero = model(images, merging=Merging(0.0))
        half, record = model(images, merging=Merging(0.4), return_record=True)
        again = model(images, merging=Merging(0.4))
    assert torch.equal(plain, zero) and torch.equal(half, again)
    assert half.shape == plain.shape and not torch.allclose(half, plain, atol=1e-4)
    assert record.merged == pytest.approx(0.4, abs=0.06)
    for name, tensor in vars(whole).items():
        other = getattr(record, name)
        assert (tensor is None) == (other is None), name
        if isinstance(tensor, Tensor) and name != "residuals_TB":
            axes = slice(1, 3) if name == "gates_TBNE" else slice(0, 2)  # images and tokens; all may have halted earlier
            assert other.shape[axes] == tensor.shape[axes] and other.isfinite().all(), name
    if record.weights_BNT is not None:
        torch.testing.assert_close(record.weights_BNT.sum(-1), torch.ones(record.weights_BNT.shape[:2]))


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("system", ["rdvit", "rdvit-moe", "vit", "rk4", "pooled"])
def test_merging_equal_tokens_changes_nothing(small_config: ConfigMaker, randomize: Randomize, system: str, dims: int) -> None:
    """Tokens of a constant image are all alike, so that any merge is exact: attention, local mixing and read-out with it."""
    changes = {**of_system(system, dims), "position": "none", "local_kernel": (1,) * dims, "norm": "instance"}
    model = Segmenter(small_config(dims, **changes)).eval()
    randomize(model)
    images = torch.full((1, 1, *((32, 40), (16, 24, 4))[dims - 2]), 0.7)
    axes = tuple(range(2, dims + 2))
    model.encoder.stem.register_forward_hook(lambda module, _, out: (out[0].mean(axes, keepdim=True).expand_as(out[0]), out[1]))
    with torch.no_grad():
        plain, whole = model(images, return_record=True)
        merged, record = model(images, merging=Merging(0.5), return_record=True)
    assert record.merged == 0.5
    torch.testing.assert_close(merged, plain, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(record.residuals_TB, whole.residuals_TB, atol=1e-4, rtol=1e-4)  # weighted by mass


@pytest.mark.parametrize("system", ["rdvit", "pooled"])
def test_halted_merged_tokens_are_skipped_as_they_are_masked(
    small_config: ConfigMaker, randomize: Randomize, system: str
) -> None:
    """Keys and values are merged with their tokens, so that halted ones can still be looked at."""
    model = Segmenter(small_config(halting_bias=-2.0, **of_system(system, 2))).eval()
    randomize(model)
    loop, e = model.encoder.recurrence, draw(2, 30, 32)
    with torch.no_grad():
        runs = [loop(e, (5, 6), 6, torch.ones(2), skip, merging=Merging(0.3)) for skip in (False, True)]
    torch.testing.assert_close(runs[1].tokens_BND, runs[0].tokens_BND, atol=1e-5, rtol=1e-5)
    assert torch.equal(runs[1].steps_BN, runs[0].steps_BN) and len(runs[0].steps_BN.unique()) >= 3
    assert runs[0].tokens_BND.unique(dim=1).shape[1] <= 2 * 21


@pytest.mark.parametrize("schedule", ["constant", "linear", "exponential"])
@pytest.mark.parametrize("system", ["vit", "softmor", "rdvit-moe"])
def test_the_other_schedules_merge_on(small_config: ConfigMaker, randomize: Randomize, system: str, schedule: Any) -> None:
    model = Segmenter(small_config(**SYSTEMS[system])).eval()
    randomize(model)
    sizes = []
    for block in model.encoder.recurrence.blocks:
        block.ffn_norm.register_forward_pre_hook(lambda module, args: sizes.append(args[0].shape[1]))
    with torch.no_grad():
        _, record = model(draw(1, 1, 64, 64), halting="none", merging=Merging(0.4, schedule), return_record=True)
    expected = {"constant": [58, 52, 46, 40], "linear": [52, 44, 40, 40], "exponential": [39, 27, 21, 18]}[schedule]
    assert sizes == expected
    assert record.tokens_BND.shape[1] == 64 and record.merged == 1 - expected[-1] / 64


def test_what_cannot_be_merged(small_config: ConfigMaker) -> None:
    model, images = Segmenter(small_config()), torch.zeros(2, 1, 16, 16)
    with pytest.raises(ModelError, match="after training, not in it"):
        model(images, merging=Merging(0.2))
    with pytest.raises(ModelError, match="'linear' goes on merging while tokens halt"):
        model.eval()(images, merging=Merging(0.2, "linear"))
    assert model(images[..., :8, :8], merging=Merging(0.4)).isfinite().all()  # one token: nothing to merge with
