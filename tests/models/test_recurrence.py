"""The loop: its definition step by step, halting with and without computing halted tokens, and what it must not depend on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rdvit.config import ExpertsConfig, ModelConfig
from rdvit.errors import ModelError
from rdvit.models.build import count_parameters
from rdvit.models.depth import loop_embedding
from rdvit.models.recurrence import LoopRecord, Recurrence, Turn

ConfigMaker = Callable[..., ModelConfig]
Randomize = Callable[[nn.Module], None]
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)
PLAIN: dict[str, Any] = {"injection": "none", "lora_rank": 0, "loop_embedding": False, "halting": "none"}
GRIDS: dict[int, tuple[int, ...]] = {2: (4, 5), 3: (3, 4, 2)}
LOOPS = 6


def count_call(counter: Counter[str], *_: object) -> None:
    counter["block"] += 1


def tokens(grid: tuple[int, ...], batch: int = 3) -> Tensor:
    return torch.randn(batch, torch.Size(grid).numel(), 32, generator=torch.Generator().manual_seed(1))


def reference(loop: Recurrence, e_ND: Tensor, grid: tuple[int, ...], loops: int, halts: bool) -> tuple[Tensor, Tensor]:
    """One image by the book: the read-out (N, D) and the loop (N,) at which each token halted."""
    assert loop.input_norm is not None
    assert loop.injection is not None
    assert loop.lora is not None
    assert loop.halting is not None
    block: Any = loop.blocks[0]
    e = e_ND[None]
    h, y, n = e, torch.zeros_like(e), e.shape[1]
    active, cumulative, steps = torch.ones(n, dtype=torch.bool), torch.zeros(n), torch.zeros(n)
    u = k = v = torch.zeros(1)
    for t in range(loops):
        fresh = loop.input_norm(h + loop_embedding(t, 32) + e)
        u = torch.where(active[:, None], fresh, u)
        x = u + block.local(block.local_norm(u), grid)
        q, new_k, new_v = block.attn.project(block.attn_norm(x))
        k, v = torch.where(active[:, None], new_k, k), torch.where(active[:, None], new_v, v)
        seen_k, seen_v = (k, v) if loop.config.kv_pool is None else (pooled(z, grid, loop.config.kv_pool) for z in (k, v))
        x = x + block.attn.attend(q, seen_k, seen_v)
        out = block.ffn(block.ffn_norm(x))
        x = x + (out[0] if isinstance(out, tuple) else out)
        h = torch.where(active[:, None], loop.injection(h, e, x + loop.lora(x, t)), h)
        p = loop.halting(h)[0] * halts
        stops = active & ((cumulative + p >= 0.99) | torch.tensor(t == loops - 1))
        y = y + torch.where(stops, 1 - cumulative, p * active)[:, None] * h
        cumulative, steps, active = cumulative + p, steps + active, active & ~stops
    return y[0], steps


def pooled(x_BHNK: Tensor, grid: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Means over cells of the grid, by PyTorch's pooling of images."""
    cells = x_BHNK[0].transpose(1, 2).unflatten(2, grid)
    pool = nn.functional.avg_pool2d if len(grid) == 2 else nn.functional.avg_pool3d
    cells = pool(cells, sizes, ceil_mode=True, count_include_pad=False)
    return cells.flatten(2).transpose(1, 2)[None]


def assert_same_run(skipped: LoopRecord, masked: LoopRecord) -> None:
    """Every field of the record, over the loops that the skipping run needed; nothing happens in the others."""

    def same(ours: Tensor, theirs: Tensor) -> None:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)

    ran = skipped.loops
    pairs = [
        (skipped.weights_BNT, masked.weights_BNT),
        (skipped.steps_BN, masked.steps_BN),
        (skipped.ponder_BN, masked.ponder_BN),
    ]
    for ours, theirs in pairs:
        assert ours is not None
        assert theirs is not None
        same(ours, theirs[..., :ran] if theirs.ndim == 3 else theirs)
    assert masked.weights_BNT is not None
    assert not masked.weights_BNT[..., ran:].any()
    same(skipped.tokens_BND, masked.tokens_BND)
    same(skipped.residuals_TB, masked.residuals_TB[:ran])
    assert not masked.residuals_TB[ran:].any()
    for ours, theirs in zip(skipped.states or [], masked.states or [], strict=False):
        same(ours, theirs)
    assert skipped.states is not None
    assert len(skipped.states) == ran
    if masked.gates_TBNE is not None:
        assert skipped.gates_TBNE is not None
        same(skipped.gates_TBNE, masked.gates_TBNE[:ran])
        assert not masked.gates_TBNE[ran:].any()


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("halts", [[1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
@pytest.mark.parametrize("kv_pool", [None, 2])
def test_skipping_halted_tokens_equals_masking_them(
    small_config: ConfigMaker,
    randomize: Randomize,
    dims: int,
    experts: ExpertsConfig | None,
    halts: list[float],
    kv_pool: int | None,
) -> None:
    """ACT-8: and both are what the definition gives for each image alone."""
    pool = None if kv_pool is None else (kv_pool,) * dims
    config = small_config(dims, experts=experts, halting_bias=-2.0, kv_pool=pool)
    loop, grid, halts_B = Recurrence(config), GRIDS[dims], torch.tensor(halts)
    randomize(loop)
    e_BND = tokens(grid)
    with torch.no_grad():
        masked, skipped = (loop(e_BND, grid, LOOPS, halts_B, skip, keep_states=True) for skip in (False, True))
    assert_same_run(skipped, masked)
    assert masked.steps_BN is not None
    assert len(masked.steps_BN[0].unique()) >= 3  # tokens of one image halt at different loops
    with torch.no_grad():
        for b, halted in enumerate(halts):
            y_ND, steps_N = reference(loop, e_BND[b], grid, LOOPS, bool(halted))
            torch.testing.assert_close(masked.tokens_BND[b], y_ND, atol=1e-5, rtol=1e-5)
            assert torch.equal(masked.steps_BN[b], steps_N)


@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize(("bias", "loops_run"), [(50.0, 1), (0.5, 2), (-50.0, LOOPS)])
def test_skipping_where_all_or_none_have_halted(
    small_config: ConfigMaker, randomize: Randomize, experts: ExpertsConfig | None, bias: float, loops_run: int
) -> None:
    """ACT-8: all tokens halt together at loop 1 or 2, or none does before the end."""
    loop = Recurrence(small_config(experts=experts))
    randomize(loop)
    assert loop.halting is not None
    nn.init.zeros_(loop.halting.proj.weight)
    nn.init.constant_(loop.halting.proj.bias, bias)
    with torch.no_grad():
        runs = [loop(tokens((4, 5)), (4, 5), LOOPS, torch.ones(3), skip, keep_states=True) for skip in (False, True)]
    assert_same_run(runs[1], runs[0])
    assert [r.loops for r in runs] == [LOOPS, loops_run]


def test_skipping_costs_less(small_config: ConfigMaker, randomize: Randomize) -> None:
    """The operations counted, not the mask: they fall with the ponder."""
    loop, e_BND = Recurrence(small_config(halting_bias=-1.0)), tokens((4, 5), batch=1)
    randomize(loop)

    def operations(skip: bool, bias: float) -> int:
        assert loop.halting is not None
        nn.init.constant_(loop.halting.proj.bias, bias)
        with torch.no_grad(), FlopCounterMode(display=False) as counter:
            loop(e_BND, (4, 5), LOOPS, torch.ones(1), skip)
        return counter.get_total_flops()

    full = operations(skip=False, bias=-2.0)
    assert operations(skip=True, bias=-1.0) < operations(skip=True, bias=-2.0) < 0.9 * full
    assert operations(skip=False, bias=-1.0) == full


def test_mixed_batch_is_each_image_on_its_own(small_config: ConfigMaker, randomize: Randomize) -> None:
    """Images that halt and images that run to the end do not disturb one another."""
    loop, e_BND = Recurrence(small_config(experts=EXPERTS)), tokens((4, 5))
    randomize(loop)
    with torch.no_grad():
        together = loop(e_BND, (4, 5), LOOPS, torch.tensor([1.0, 0.0, 1.0]), skip=True)
        for b, halts in enumerate((1.0, 0.0, 1.0)):
            alone = loop(e_BND[b : b + 1], (4, 5), LOOPS, torch.tensor([halts]), skip=True)
            torch.testing.assert_close(together.tokens_BND[b : b + 1], alone.tokens_BND, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("skip", [False, True])
def test_halting_of_nobody_is_the_last_state(small_config: ConfigMaker, randomize: Randomize, skip: bool) -> None:
    loop, e_BND = Recurrence(small_config()), tokens((4, 5))
    randomize(loop)
    with torch.no_grad():
        off = loop(e_BND, (4, 5), LOOPS, keep_states=True)
        zeros = loop(e_BND, (4, 5), LOOPS, torch.zeros(3), skip)
    assert off.states is not None
    assert torch.equal(off.tokens_BND, off.states[-1])
    assert torch.equal(off.tokens_BND, zeros.tokens_BND)
    assert off.weights_BNT is off.steps_BN is off.ponder_BN is None
    assert zeros.steps_BN is not None
    assert (zeros.steps_BN == LOOPS).all()


def test_one_loop_without_add_ons_is_one_block(small_config: ConfigMaker, randomize: Randomize) -> None:
    """RD-1: A e + b e + block(norm(2 e)), and BV-1: without injection block(e), bit for bit."""
    e_BND = tokens((4, 5))
    loop = Recurrence(small_config(lora_rank=0, loop_embedding=False, halting="none"))
    randomize(loop)
    assert loop.injection is not None
    assert loop.input_norm is not None
    expected = loop.injection(e_BND, e_BND, loop.blocks[0](loop.input_norm(2 * e_BND), (4, 5))[0])
    torch.testing.assert_close(loop(e_BND, (4, 5), 1).tokens_BND, expected)
    shared, stacked = Recurrence(small_config(**PLAIN)), Recurrence(small_config(**PLAIN, shared_block=False, loops=1))
    randomize(shared)
    stacked.load_state_dict(shared.state_dict())
    assert torch.equal(shared(e_BND, (4, 5), 1).tokens_BND, shared.blocks[0](e_BND, (4, 5))[0])
    assert torch.equal(shared(e_BND, (4, 5), 1).tokens_BND, stacked(e_BND, (4, 5), 1).tokens_BND)


def test_tying_all_layers_of_a_stack_is_the_loop(small_config: ConfigMaker, randomize: Randomize) -> None:
    """BV-2: the same output, and the loop's gradient is the sum over the layers'."""
    shared, stacked = Recurrence(small_config(**PLAIN)), Recurrence(small_config(**PLAIN, shared_block=False))
    randomize(shared)
    for layer in stacked.blocks:
        layer.load_state_dict(shared.blocks[0].state_dict())
    e_BND = tokens((4, 5))
    direction_BND = torch.randn(e_BND.shape, generator=torch.Generator().manual_seed(2))
    outputs = [loop(e_BND, (4, 5), 4).tokens_BND for loop in (shared, stacked)]
    assert torch.equal(outputs[0], outputs[1])
    for y_BND in outputs:
        (y_BND * direction_BND).mean().backward()
    of_layers = zip(*(layer.parameters() for layer in stacked.blocks), strict=True)
    for ours, layers in zip(shared.blocks[0].parameters(), of_layers, strict=True):
        gradients = [p.grad for p in layers if p.grad is not None]
        assert len(gradients) == 4
        torch.testing.assert_close(ours.grad, torch.stack(gradients).sum(0), atol=1e-5, rtol=1e-4)


def test_parameters_do_not_grow_with_the_loops(small_config: ConfigMaker) -> None:
    """RD-2: only the scales of LoRA do, by one row each; BV-3: without them nothing; a stack grows by a block each."""
    counts = [count_parameters(Recurrence(small_config(loops=loops, lora_rank=4))) for loops in (1, 3, 12)]
    assert [count - counts[0] for count in counts] == [0, 2 * 4, 11 * 4]
    assert len({count_parameters(Recurrence(small_config(**PLAIN, loops=loops))) for loops in (1, 3, 12)}) == 1
    stack = Recurrence(small_config(**PLAIN, shared_block=False, loops=3))
    assert count_parameters(stack) == 3 * count_parameters(stack.blocks[0])


@pytest.mark.parametrize("changes", [{}, PLAIN, {"experts": EXPERTS}, {**PLAIN, "shared_block": False, "loops": 5}])
def test_states_of_a_shorter_run_are_a_prefix(small_config: ConfigMaker, randomize: Randomize, changes: dict[str, Any]) -> None:
    """RD-3 and BV-4, bit for bit; beyond the trained depth of 4 too, where the block is shared."""
    loop, e_BND = Recurrence(small_config(**changes)), tokens((4, 5))
    randomize(loop)
    with torch.no_grad():
        runs = [loop(e_BND, (4, 5), loops, keep_states=True).states or [] for loops in (1, 4, 5)]
    assert [len(states) for states in runs] == [1, 4, 5]
    for states in runs[:2]:
        assert all(torch.equal(ours, longer) for ours, longer in zip(states, runs[2], strict=False))
    assert not torch.allclose(runs[2][3], runs[2][4])


@pytest.mark.parametrize("skip", [False, True])
def test_permuting_tokens_permutes_everything(small_config: ConfigMaker, randomize: Randomize, skip: bool) -> None:
    """RD-4: states, ponder and routing, where neither local mixing nor positions tie a token to its place."""
    loop, e_BND = Recurrence(small_config(local_kernel=None, experts=EXPERTS)), tokens((4, 5))
    order_N = torch.randperm(20, generator=torch.Generator().manual_seed(0))
    randomize(loop)
    with torch.no_grad():
        run, permuted = (loop(x, (4, 5), LOOPS, torch.ones(3), skip) for x in (e_BND, e_BND[:, order_N]))
    for name in ("tokens_BND", "weights_BNT", "steps_BN", "ponder_BN"):
        torch.testing.assert_close(getattr(permuted, name), getattr(run, name)[:, order_N], atol=1e-5, rtol=1e-5)
    assert run.gates_TBNE is not None
    assert permuted.gates_TBNE is not None
    torch.testing.assert_close(permuted.gates_TBNE, run.gates_TBNE[:, :, order_N], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(permuted.residuals_TB, run.residuals_TB)


@pytest.mark.parametrize("halts_B", [None, torch.tensor([1.0, 0.0, 1.0])])
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_checkpointing_each_loop_changes_no_gradient(
    small_config: ConfigMaker, randomize: Randomize, halts_B: Tensor | None, experts: ExpertsConfig | None
) -> None:
    """RD-6: with dropout, whose draws are repeated; and each block really is computed a second time."""
    gradients, calls = [], []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        loop = Recurrence(small_config(checkpoint_loops=checkpointed, experts=experts, dropout=0.1))
        randomize(loop)
        computed = Counter[str]()
        loop.blocks[0].register_forward_hook(partial(count_call, computed))
        e_BND = tokens((4, 5)).requires_grad_()
        torch.manual_seed(3)
        record = loop(e_BND, (4, 5), 4, halts_B)
        terms = [record.tokens_BND.square().mean(), record.ponder_BN, record.balance]
        torch.stack([term.mean() for term in terms if term is not None]).sum().backward()
        gradients.append({"e": e_BND.grad, **{name: p.grad for name, p in loop.named_parameters()}})
        calls.append(computed["block"])
    assert calls == [4, 8]
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain)


SOFT: dict[str, Any] = {"halting": "none", "readout": "soft"}


def test_soft_mixture_reads_the_states_of_all_loops(small_config: ConfigMaker, randomize: Randomize) -> None:
    """It changes the read-out alone; states are handed on only if asked for."""
    loop, last = Recurrence(small_config(**SOFT)), Recurrence(small_config(halting="none"))
    randomize(loop)
    last.load_state_dict(loop.state_dict(), strict=False)
    record, plain = loop(tokens((4, 5)), (4, 5), 5, keep_states=True), last(tokens((4, 5)), (4, 5), 5, keep_states=True)
    assert record.states is not None
    assert plain.states is not None
    assert record.weights_BNT is not None
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(record.states, plain.states, strict=True))
    mixture = (record.weights_BNT[:, :, None] * torch.stack(record.states, -1)).sum(-1)
    torch.testing.assert_close(record.tokens_BND, mixture)
    assert not torch.allclose(record.tokens_BND, plain.tokens_BND, atol=1e-3)
    assert (record.steps_BN, record.ponder_BN) == (None, None)
    assert loop(tokens((4, 5)), (4, 5), 5).states is None
    one = loop(tokens((4, 5)), (4, 5), 1, keep_states=True)  # SM-3
    assert torch.equal(one.tokens_BND, (one.states or [])[0])


def gradients_of(loop: Recurrence, e_BND: Tensor, loops: int, halts_B: Tensor | None) -> dict[str, Tensor | None]:
    record = loop(e_BND, (4, 5), loops, halts_B)
    terms = [record.tokens_BND.square().mean(), record.ponder_BN, record.balance]
    torch.stack([term.mean() for term in terms if term is not None and term.requires_grad]).sum().backward()
    return {"e": e_BND.grad, **{name: p.grad for name, p in loop.named_parameters()}}


@pytest.mark.parametrize(
    ("changes", "halts_B"),
    [({}, None), ({"halting": "act"}, torch.tensor([1.0, 0.0, 1.0])), ({"experts": EXPERTS}, torch.ones(3)), (SOFT, None)],
)
def test_a_cut_before_the_first_loop_changes_nothing(
    small_config: ConfigMaker, randomize: Randomize, changes: dict[str, Any], halts_B: Tensor | None
) -> None:
    """DEP-3: bit for bit, also where there are fewer loops than would be back-propagated."""
    gradients = []
    for backprop_loops in (None, 4, 9):
        torch.manual_seed(0)
        loop = Recurrence(small_config(**changes, backprop_loops=backprop_loops))
        randomize(loop)
        gradients.append(gradients_of(loop, tokens((4, 5)).requires_grad_(), 4, halts_B))
    for name, full in gradients[0].items():
        for cut in gradients[1:]:
            ours = cut[name]
            assert (ours is None) == (full is None), name
            assert full is None or (ours is not None and torch.equal(ours, full)), name


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("halts_B", [None, torch.tensor([1.0, 0.0, 1.0])])
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_states_before_the_cut_have_no_gradient(
    small_config: ConfigMaker, randomize: Randomize, experts: ExpertsConfig | None, halts_B: Tensor | None, checkpointed: bool
) -> None:
    """DEP-2: shared weights and the encoded input still learn, through the last loops; the values are the same."""
    loop = Recurrence(
        small_config(experts=experts, backprop_loops=2, halting_bias=-2.5, checkpoint_loops=checkpointed, solver="midpoint")
    )
    randomize(loop)
    record = loop(tokens((4, 5)).requires_grad_(), (4, 5), 5, halts_B, keep_states=True)
    assert record.states is not None
    assert [state.requires_grad for state in record.states] == [False, False, False, True, True]
    with torch.no_grad():
        assert torch.equal(record.tokens_BND, loop(tokens((4, 5)), (4, 5), 5, halts_B).tokens_BND)
    for name, gradient in gradients_of(loop, tokens((4, 5)).requires_grad_(), 5, halts_B).items():
        unused = name.startswith("halting") and halts_B is None
        assert unused == (gradient is None), name
        assert gradient is None or gradient.abs().sum() > 0, name


def test_truncated_gradient_is_that_of_the_last_loops(small_config: ConfigMaker, randomize: Randomize) -> None:
    """As if the state before them had been given: by hand, from a detached state on."""
    loop = Recurrence(small_config(halting="none", backprop_loops=2))
    randomize(loop)
    ours = gradients_of(loop, tokens((4, 5)).requires_grad_(), 5, None)
    loop.zero_grad()
    e_BND = tokens((4, 5)).requires_grad_()
    with torch.no_grad():
        h_BND = loop(e_BND, (4, 5), 3).tokens_BND
    for t in (3, 4):
        h_BND = loop._step(Turn(t, 5, (4, 5)), e_BND, h_BND, None)[0].h_BND
    h_BND.square().mean().backward()
    for name, expected in {"e": e_BND.grad, **{name: p.grad for name, p in loop.named_parameters()}}.items():
        torch.testing.assert_close(ours[name], expected)


def test_weights_learn_after_a_cut_under_autocast(small_config: ConfigMaker, randomize: Randomize) -> None:
    """Casts of the weights made without gradient must not be used with it; and the cut leaves no trace in evaluation."""
    loop = Recurrence(small_config(halting="none", backprop_loops=1))
    randomize(loop)
    with torch.autocast("cpu", torch.bfloat16):
        gradients = gradients_of(loop, tokens((4, 5)).requires_grad_(), 3, None)
    assert all(gradient is not None and gradient.abs().sum() > 0 for gradient in gradients.values())
    with torch.no_grad():
        loop(tokens((4, 5)), (4, 5), 3)
        assert not torch.is_grad_enabled()


def test_residuals_are_relative_step_sizes(small_config: ConfigMaker, randomize: Randomize) -> None:
    loop, e_BND = Recurrence(small_config()), tokens((4, 5))
    randomize(loop)
    record = loop(e_BND, (4, 5), 3, keep_states=True)
    states = [e_BND, *(record.states or [])]
    for t, residual_B in enumerate(record.residuals_TB):
        moved = (states[t + 1] - states[t]).flatten(1).norm(dim=1) / states[t].flatten(1).norm(dim=1)
        torch.testing.assert_close(residual_B, moved)
    assert not record.residuals_TB.requires_grad


def test_expert_record_covers_every_token_while_it_is_active(small_config: ConfigMaker, randomize: Randomize) -> None:
    loop = Recurrence(small_config(experts=EXPERTS, halting_bias=-2.0))
    randomize(loop)
    record = loop(tokens((4, 5)), (4, 5), LOOPS, torch.ones(3))
    assert record.gates_TBNE is not None
    assert record.steps_BN is not None
    assert record.balance is not None
    loop_T11 = torch.arange(LOOPS)[:, None, None]
    torch.testing.assert_close(record.gates_TBNE.sum(-1), (loop_T11 < record.steps_BN).float())
    assert record.balance.requires_grad
    assert not record.gates_TBNE.requires_grad


def test_balance_term_ignores_loops_in_which_nobody_is_active(small_config: ConfigMaker) -> None:
    """All tokens halt at loop 1: masked loops after it must not thin out the term that skipping them gives."""
    loop = Recurrence(small_config(experts=EXPERTS, halting_bias=50.0))
    masked, skipped = (loop(tokens((4, 5)), (4, 5), 5, torch.ones(3), skip).balance for skip in (False, True))
    torch.testing.assert_close(masked, skipped)


@pytest.mark.parametrize(
    ("changes", "loops", "halts", "message"),
    [
        ({}, 0, False, "at least 1 loop, found 0"),
        ({**PLAIN, "shared_block": False, "preset": "vit"}, 5, False, "'vit' stacks 4 different blocks and cannot run 5 loops"),
        ({"halting": "none"}, 2, True, "without a halting head"),
    ],
)
def test_impossible_runs_are_refused(
    small_config: ConfigMaker, changes: dict[str, Any], loops: int, halts: bool, message: str
) -> None:
    loop = Recurrence(small_config(**changes))
    with pytest.raises(ModelError, match=message):
        loop(tokens((4, 5)), (4, 5), loops, torch.ones(3) if halts else None)


# Ended in between


@pytest.mark.parametrize("dims", [2, 3])
@pytest.mark.parametrize("experts", [None, EXPERTS])
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize("halts", [None, [1.0, 1.0, 1.0], [1.0, 0.0, 1.0]])
def test_ended_after_some_loops_is_a_run_of_so_many(
    small_config: ConfigMaker,
    randomize: Randomize,
    dims: int,
    experts: ExpertsConfig | None,
    skip: bool,
    halts: list[float] | None,
) -> None:
    """With ACT what is left goes to the loop it ends at; to look does not disturb what follows."""
    loop, grid = Recurrence(small_config(dims, experts=experts, halting_bias=-2.0)), GRIDS[dims]
    randomize(loop)
    e_BND, halts_B = tokens(grid), None if halts is None else torch.tensor(halts)
    with torch.no_grad():
        for t, progress in enumerate(loop.run(e_BND, grid, LOOPS, halts_B, skip, keep_states=True), start=1):
            ended, fixed = loop.record(progress, keep_states=True), loop(e_BND, grid, t, halts_B, skip, keep_states=True)
            assert ended.loops == fixed.loops == t
            for name in ("tokens_BND", "residuals_TB", "weights_BNT", "steps_BN", "ponder_BN", "gates_TBNE", "balance"):
                ours, theirs = getattr(ended, name), getattr(fixed, name)
                assert (ours is None) == (theirs is None), name
                if ours is not None:
                    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
            torch.testing.assert_close(ended.states, fixed.states, atol=1e-5, rtol=1e-5)
        if ended.weights_BNT is not None:
            torch.testing.assert_close(ended.weights_BNT.sum(-1), torch.ones(e_BND.shape[:2]))


@pytest.mark.parametrize("changes", [{**PLAIN, "readout": "soft"}, {**PLAIN, "shared_block": False, "loops": LOOPS}])
def test_other_loops_end_in_between_as_well(small_config: ConfigMaker, randomize: Randomize, changes: dict[str, Any]) -> None:
    loop, e_BND = Recurrence(small_config(**changes)), tokens((4, 5))
    randomize(loop)
    with torch.no_grad():
        for t, progress in enumerate(loop.run(e_BND, (4, 5), LOOPS), start=1):
            expected = loop(e_BND, (4, 5), t).tokens_BND
            torch.testing.assert_close(loop.record(progress).tokens_BND, expected, atol=1e-5, rtol=1e-5)


def test_loops_are_run_when_they_are_asked_for(small_config: ConfigMaker) -> None:
    loop, counter = Recurrence(small_config()), Counter[str]()
    loop.blocks[0].register_forward_hook(partial(count_call, counter))
    turns = loop.run(tokens((4, 5)), (4, 5), LOOPS)
    for expected in (1, 2, 3):
        loop.record(next(turns))
        assert counter["block"] == expected
