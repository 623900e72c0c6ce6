"""The solvers: orders, exactness at unit step, evaluations, agreement with torchdiffeq, and halting under each of them."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdvit.config import ExpertsConfig, ModelConfig
from rdvit.models.recurrence import Recurrence, Turn
from rdvit.models.solver import Solver, solver_step

ConfigMaker = Callable[..., ModelConfig]
Randomize = Callable[[nn.Module], None]
PLAIN: dict[str, Any] = {"injection": "none", "lora_rank": 0, "loop_embedding": False, "halting": "none"}
EXPERTS = ExpertsConfig(num_experts=4, top_k=2, hidden_dim=8)
GRID = (4, 5)
SOLVERS: list[tuple[Solver, int]] = [("euler", 1), ("midpoint", 2), ("rk4", 4)]  # evaluations, and order


def tokens(dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(3, 20, 32, generator=torch.Generator().manual_seed(1)).to(dtype)


def integrate(solver: Solver, loop: Callable[[Tensor], Tensor], z: Tensor, horizon: float, steps: int) -> Tensor:
    for _ in range(steps):
        z = solver_step(solver, loop, z, horizon / steps)
    return z


def swirl(z: Tensor) -> Tensor:
    """A field that is neither linear nor a pure decay."""
    return z + torch.stack([z[..., 1].sin() - z[..., 0], z[..., 0] * z[..., 1]], dim=-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_unit_euler_step_is_the_plain_loop(small_config: ConfigMaker, randomize: Randomize, dtype: torch.dtype) -> None:
    """TC-1, bit for bit: the block again and again, and what the formula with dt = 1 would give."""
    loop = Recurrence(small_config(**PLAIN)).to(dtype)
    randomize(loop)
    with torch.no_grad():
        z = tokens(dtype)
        for state in loop(z, GRID, 5, keep_states=True).states or []:
            f = loop.blocks[0](z, GRID)[0]
            assert torch.equal(state, f)
            assert torch.equal(state, (1 - 1.0) * z + 1.0 * f)
            z = f
    assert solver_step("euler", lambda _: z, tokens(dtype), 1.0) is z  # nothing is done to what the loop gives


@pytest.mark.parametrize(("solver", "_"), SOLVERS)
@pytest.mark.parametrize("dt", [0.3, 1.0, 2.0])
def test_a_loop_that_changes_nothing_leaves_the_state(solver: Solver, _: int, dt: float) -> None:
    """TC-2."""
    torch.testing.assert_close(solver_step(solver, lambda z: z, tokens(), dt), tokens())


@pytest.mark.parametrize(("solver", "order"), SOLVERS)
def test_error_falls_with_the_order(solver: Solver, order: int) -> None:
    """TC-3: on dz/dt = -z the slope of the error over the step size is the order; TC-6: doubled steps converge."""
    z, exact = torch.ones(1, dtype=torch.float64), math.exp(-2)
    errors = [float((integrate(solver, torch.zeros_like, z, 2.0, steps) - exact).abs()) for steps in (16, 32, 64, 128)]
    slopes = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(errors)]
    assert slopes == pytest.approx([order] * 3, abs=0.15)


@pytest.mark.parametrize(("solver", "evaluations"), SOLVERS)
def test_evaluations_per_loop(small_config: ConfigMaker, solver: Solver, evaluations: int) -> None:
    """TC-4: of the block, in the whole recurrence."""
    loop, calls = Recurrence(small_config(solver=solver)), []
    loop.blocks[0].register_forward_hook(lambda *_: calls.append(1))
    loop(tokens(), GRID, 3)
    assert len(calls) == 3 * evaluations


@pytest.mark.parametrize(("solver", "tolerance"), [("euler", 1e-12), ("midpoint", 1e-12), ("rk4", 1e-7)])
def test_agrees_with_torchdiffeq(solver: Solver, tolerance: float) -> None:
    """Its fixed grids, step for step; its rk4 is the 3/8 rule, which agrees with the classical one to the fourth order."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    z = torch.randn(5, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    times = torch.tensor([0.0, 1.5], dtype=torch.float64)
    theirs = torchdiffeq.odeint(lambda _, y: swirl(y) - y, z, times, method=solver, options={"step_size": 1.5 / 60})[-1]
    torch.testing.assert_close(integrate(solver, swirl, z, 1.5, 60), theirs, atol=tolerance, rtol=tolerance)


def test_runge_kutta_of_order_four_agrees_with_torchdiffeq_where_all_of_them_do() -> None:
    """On a linear field every four-stage method of order four is the same polynomial, also in one coarse step."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    generator = torch.Generator().manual_seed(0)
    a, z = (torch.randn(shape, dtype=torch.float64, generator=generator) for shape in ((3, 3), (4, 3)))
    theirs = torchdiffeq.odeint(lambda _, y: y @ a - y, z, torch.tensor([0.0, 1.0], dtype=torch.float64), method="rk4")[-1]
    torch.testing.assert_close(solver_step("rk4", lambda y: y @ a, z, 1.0), theirs)


@pytest.mark.parametrize(("solver", "_"), SOLVERS)
def test_whole_recurrence_is_the_flow_of_its_block(
    small_config: ConfigMaker, randomize: Randomize, solver: Solver, _: int
) -> None:
    """In float64 against torchdiffeq's adaptive solver: half the step, half the distance or less (TC-6), to the same end."""
    torchdiffeq = pytest.importorskip("torchdiffeq")
    block = Recurrence(small_config(**PLAIN)).double()
    randomize(block)
    with torch.no_grad():
        times = torch.tensor([0.0, 1.0], dtype=torch.float64)
        field = lambda _, z: block.blocks[0](z, GRID)[0] - z  # noqa: E731
        exact = torchdiffeq.odeint(field, tokens(torch.float64), times, method="dopri5", rtol=1e-8, atol=1e-8)[-1]
        distances = []
        for steps in (8, 16, 32):
            loop = Recurrence(small_config(**PLAIN, solver=solver, step_size=1 / steps)).double()
            loop.load_state_dict(block.state_dict())
            distances.append(float((loop(tokens(torch.float64), GRID, steps).tokens_BND - exact).abs().max()))
    assert distances[1] < 0.6 * distances[0]
    assert distances[2] < 0.6 * distances[1]


@pytest.mark.parametrize("solver", ["midpoint", "rk4"])
def test_a_step_is_made_of_whole_loops(small_config: ConfigMaker, randomize: Randomize, solver: Solver) -> None:
    """Injection, LoRA and embedding of the loop's own t are inside F: the plain loop's first steps from given states."""
    loop, plain = (Recurrence(small_config(solver=s, halting="none")) for s in (solver, "euler"))
    randomize(plain)
    loop.load_state_dict(plain.state_dict())
    e = tokens()

    def f(z: Tensor) -> Tensor:
        carry, _ = plain._evaluate(Turn(0, 1, GRID), e, z, None)
        return carry.h_BND

    with torch.no_grad():
        k1 = f(e) - e
        k2 = f(e + 0.5 * k1) - (e + 0.5 * k1)
        k3 = f(e + 0.5 * k2) - (e + 0.5 * k2)
        k4 = f(e + k3) - (e + k3)
        expected = e + k2 if solver == "midpoint" else e + (k1 + 2 * k2 + 2 * k3 + k4) / 6
        torch.testing.assert_close(loop(e, GRID, 1).tokens_BND, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("solver", "_"), SOLVERS)
@pytest.mark.parametrize("step_size", [0.3, 1.0])  # 0.7 h + 0.3 h is not h
@pytest.mark.parametrize("experts", [None, EXPERTS])
def test_skipping_halted_tokens_equals_masking_them(
    small_config: ConfigMaker, randomize: Randomize, solver: Solver, _: int, step_size: float, experts: ExpertsConfig | None
) -> None:
    """ACT-8 for every solver; halted tokens keep their state bit for bit in both."""
    config = small_config(solver=solver, step_size=step_size, experts=experts, halting_bias=-2.0)
    loop, halts_B = Recurrence(config), torch.tensor([1.0, 0.0, 1.0])
    randomize(loop)
    with torch.no_grad():
        masked, skipped = (loop(tokens(), GRID, 6, halts_B, skip, keep_states=True) for skip in (False, True))
    assert masked.steps_BN is not None
    assert len(masked.steps_BN[halts_B == 1].unique()) >= 3
    for name in ("tokens_BND", "weights_BNT", "steps_BN", "ponder_BN", "residuals_TB", "gates_TBNE"):
        ours, theirs = getattr(skipped, name), getattr(masked, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    for run in (masked, skipped):
        assert run.states is not None
        assert run.steps_BN is not None
        for t, (before, after) in enumerate(zip(run.states, run.states[1:], strict=False), start=1):
            halted_BN = run.steps_BN <= t
            assert halted_BN.any() or t == 1
            assert torch.equal(before[halted_BN], after[halted_BN])


@pytest.mark.parametrize("solver", ["midpoint", "rk4"])
def test_checkpointing_changes_no_gradient(small_config: ConfigMaker, randomize: Randomize, solver: Solver) -> None:
    gradients = []
    for checkpointed in (False, True):
        torch.manual_seed(0)
        loop = Recurrence(small_config(solver=solver, checkpoint_loops=checkpointed, experts=EXPERTS))
        randomize(loop)
        record = loop(tokens(), GRID, 3, torch.ones(3))
        assert record.balance is not None
        (record.tokens_BND.square().mean() + record.balance).backward()
        gradients.append({name: p.grad for name, p in loop.named_parameters()})
    for name, plain in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], plain)


def test_experts_are_recorded_as_the_mean_over_a_steps_evaluations(small_config: ConfigMaker, randomize: Randomize) -> None:
    """The gate weights of a token still sum to 1."""
    loop = Recurrence(small_config(solver="rk4", experts=EXPERTS, halting="none"))
    randomize(loop)
    record = loop(tokens(), GRID, 3)
    assert record.gates_TBNE is not None
    assert record.gates_TBNE.shape == (3, 3, 20, 4)
    torch.testing.assert_close(record.gates_TBNE.sum(-1), torch.ones(3, 3, 20))
