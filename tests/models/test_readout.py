"""ACT: Graves's definition, its closed forms and its gradients. The soft mixture: what it is at its ends and its start."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from rdvit.models.readout import HaltingHead, HaltingState, SoftReadout

BIASES = [-8.0, -4.0, -2.0, -1.0, 0.0, 1.0, 4.6, 8.0]


def run(p_TBN: Tensor, epsilon: float = 0.01) -> tuple[Tensor, HaltingState]:
    """Weights (T, B, N) and the final state of a whole run."""
    halting = HaltingState(p_TBN[0][..., None], epsilon)
    loops = len(p_TBN)
    weights_TBN = torch.stack([halting.update(p_BN, last=t == loops - 1) for t, p_BN in enumerate(p_TBN)])
    return weights_TBN, halting


def constant(bias: float, loops: int) -> Tensor:
    return torch.sigmoid(torch.tensor(bias)).expand(loops, 1, 1)


@pytest.mark.parametrize("loops", range(1, 17))
def test_weights_sum_to_one(loops: int) -> None:
    """ACT-1: for every number of loops and bias, also with a probability of its own for each token and loop."""
    torch.manual_seed(loops)
    scattered = torch.sigmoid(2 * torch.randn(loops, 3, 50) - 1)
    for p_TBN in [*(constant(bias, loops) for bias in BIASES), scattered]:
        weights_TBN, halting = run(p_TBN)
        assert (weights_TBN.sum(0) - 1).abs().max() <= 1e-6
        assert (weights_TBN >= 0).all()
        assert halting.halted_BN.all()


def test_weights_are_those_of_the_definition() -> None:
    """Three tokens by hand: one halts at loop 1, one at loop 3, one is cut off at the last loop."""
    p_TN = torch.tensor([[0.995, 0.4, 0.1], [0.5, 0.4, 0.1], [0.5, 0.4, 0.1], [0.5, 0.4, 0.1]])
    weights_TBN, halting = run(p_TN[:, None])
    expected = torch.tensor([[1, 0.4, 0.1], [0, 0.4, 0.1], [0, 0.2, 0.1], [0, 0, 0.7]])
    torch.testing.assert_close(weights_TBN[:, 0], expected)
    assert halting.steps_BN.tolist() == [[1, 3, 4]]
    torch.testing.assert_close(halting.ponder_BN, torch.tensor([[2.0, 3.2, 4.7]]))


@pytest.mark.parametrize("loops", [1, 2, 5])
def test_extreme_biases_give_the_first_and_the_last_state(loops: int) -> None:
    """ACT-2, bit for bit."""
    torch.manual_seed(0)
    states_TBND = torch.randn(loops, 2, 6, 4)
    for bias, chosen in ((1e4, 0), (-1e4, loops - 1)):
        head = HaltingHead(4, bias)
        weights_TBN, _ = run(torch.stack([head(h_BND) for h_BND in states_TBND]))
        assert torch.equal((weights_TBN[..., None] * states_TBND).sum(0), states_TBND[chosen])


def test_equal_states_are_read_out_unchanged() -> None:
    """ACT-3."""
    torch.manual_seed(0)
    state_BND = torch.randn(2, 9, 5)
    weights_TBN, _ = run(torch.rand(7, 2, 9))
    read_out = sum(w_BN[..., None] * state_BND for w_BN in weights_TBN)
    torch.testing.assert_close(read_out, state_BND)


@pytest.mark.parametrize(
    ("bias", "loops", "steps", "remainder", "depth"),
    [
        *[(-4, 100, 56, 0.011, 28.3), (-3, 100, 21, 0.051, 11.0), (-2, 100, 9, 0.046, 4.71), (-1, 100, 4, 0.193, 2.39)],
        *[(-0.5, 100, 3, 0.245, 1.87), (0, 100, 2, 0.5, 1.5), (1, 100, 2, 0.269, 1.27), (2, 100, 2, 0.119, 1.12)],
        *[(4.6, 100, 1, 1.0, 1.0), (-4, 8, 8, 0.87, 7.5), (-3, 8, 8, 0.67, 6.7), (-2, 8, 8, 0.17, 4.7), (-1, 8, 4, 0.19, 2.4)],
    ],
)
def test_closed_form_of_a_constant_probability(bias: float, loops: int, steps: int, remainder: float, depth: float) -> None:
    """ACT-4: the table of systems.md section 5, rounded as printed there."""
    weights_TBN, halting = run(constant(bias, loops))
    expected_depth = (torch.arange(1, loops + 1) * weights_TBN[:, 0, 0]).sum().item()
    assert halting.steps_BN.item() == steps
    assert halting.remainder_BN.item() == pytest.approx(remainder, abs=0.006 if loops == 8 else 0.0006)
    assert expected_depth == pytest.approx(depth, abs=0.06)


def test_gradients_are_those_of_the_closed_form() -> None:
    """ACT-5: d(n + R)/dp_t = -1 before the halting loop n, else 0; d(g.y)/dp_t = g.(s_t - s_n) before n, else 0."""
    torch.manual_seed(0)
    p_TBN = torch.tensor([[0.2, 0.995], [0.3, 0.5], [0.6, 0.5], [0.7, 0.5]], dtype=torch.float64)[:, None]
    p_TBN.requires_grad_()
    states_TBND = torch.randn(4, 1, 2, 3, dtype=torch.float64)
    g_D = torch.randn(3, dtype=torch.float64)
    weights_TBN, halting = run(p_TBN)
    assert halting.steps_BN.tolist() == [[3, 1]]
    (ponder_gradient,) = torch.autograd.grad(halting.ponder_BN.sum(), p_TBN, retain_graph=True)
    assert ponder_gradient[:, 0].T.tolist() == [[-1, -1, 0, 0], [0, 0, 0, 0]]
    (task_gradient,) = torch.autograd.grad(((weights_TBN[..., None] * states_TBND).sum(0) @ g_D).sum(), p_TBN)
    before = (states_TBND[:2, 0, 0] - states_TBND[2, 0, 0]) @ g_D
    torch.testing.assert_close(task_gradient[:2, 0, 0], before, rtol=1e-6, atol=1e-7)
    assert not task_gradient[2:, 0, 0].any()
    assert not task_gradient[:, 0, 1].any()  # halting at loop 1 is absorbing


def test_loops_after_the_last_halt_change_nothing() -> None:
    """ACT-6, bit for bit."""
    torch.manual_seed(0)
    p_TBN = 0.25 + 0.5 * torch.rand(12, 2, 20)  # the slowest token halts at loop 4
    states_TBND = torch.randn(12, 2, 20, 3)
    read_outs, ponders = [], []
    for loops in (5, 6, 12):
        weights_TBN, halting = run(p_TBN[:loops])
        y_BND = torch.zeros(2, 20, 3)
        for w_BN, s_BND in zip(weights_TBN, states_TBND, strict=False):
            y_BND = y_BND + w_BN[..., None] * s_BND
        read_outs.append(y_BND)
        ponders.append(halting.ponder_BN)
    assert torch.equal(read_outs[0], read_outs[1])
    assert torch.equal(read_outs[0], read_outs[2])
    assert torch.equal(ponders[0], ponders[2])


@pytest.mark.parametrize(("bias", "loops"), list(itertools.product([-1e4, -3.0, 0.0, 3.0, 1e4], [1, 2, 9])))
def test_ponder_lies_between_two_and_loops_plus_one(bias: float, loops: int) -> None:
    """ACT-7."""
    torch.manual_seed(0)
    _, halting = run(torch.sigmoid(bias + torch.randn(loops, 2, 50)))
    assert (halting.ponder_BN >= 2).all()
    assert (halting.ponder_BN <= loops + 1).all()


def test_weights_of_a_token_depend_on_no_other() -> None:
    """ACT-9."""
    torch.manual_seed(0)
    head, states_TBND = HaltingHead(6, -1.0), torch.randn(5, 2, 8, 6)
    torch.nn.init.normal_(head.proj.weight)
    changed_TBND = torch.randn(5, 2, 8, 6)
    changed_TBND[:, 1, 3] = states_TBND[:, 1, 3]
    with torch.no_grad():
        first, second = (run(torch.stack([head(h_BND) for h_BND in s]))[0] for s in (states_TBND, changed_TBND))
    torch.testing.assert_close(first[:, 1, 3], second[:, 1, 3])
    assert not torch.allclose(first, second)


def test_head_starts_with_its_bias_alone() -> None:
    torch.manual_seed(0)
    p_BN = HaltingHead(8, -2.0)(torch.randn(3, 5, 8))
    torch.testing.assert_close(p_BN, torch.sigmoid(torch.tensor(-2.0)).expand(3, 5))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_probabilities_are_float32_under_autocast(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    head, h_BND = HaltingHead(8, -1.0), torch.randn(2, 5, 8).to(dtype)
    torch.nn.init.normal_(head.proj.weight)
    with torch.autocast("cpu", torch.bfloat16):
        p_BN = head(h_BND)
    assert p_BN.dtype == torch.float32
    torch.testing.assert_close(p_BN, head(h_BND.float()), rtol=0, atol=0)


def test_head_of_a_bfloat16_model_runs_and_stays_in_float32() -> None:
    torch.manual_seed(0)
    p_BN = HaltingHead(8, -1.0).bfloat16()(torch.randn(2, 5, 8).bfloat16())
    assert p_BN.dtype == torch.float32
    torch.testing.assert_close(p_BN, torch.sigmoid(torch.tensor(-1.0)).expand(2, 5))


def states(loops: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    generator = torch.Generator().manual_seed(loops)
    return [torch.randn(2, 5, 16, generator=generator).to(dtype) for _ in range(loops)]


def make_soft(seed: int = 0) -> SoftReadout:
    """With scores that differ from state to state and token to token."""
    soft = SoftReadout(16)
    with torch.no_grad():
        soft.score.weight.copy_(torch.randn(1, 16, generator=torch.Generator().manual_seed(seed)))
    return soft


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_one_hot_mixture_is_that_state(dtype: torch.dtype) -> None:
    """SM-1, bit for bit: the last one by the offset, another one by its score."""
    soft, z = make_soft(), states(4, dtype)
    with torch.no_grad():
        soft.last_offset.fill_(1e4)
        assert torch.equal(soft(z)[0], z[-1])
        soft.last_offset.fill_(-1e4)
        soft.score.weight.zero_()
        soft.score.weight[0, 0] = 1e4
        z[1] = z[1].index_fill(2, torch.tensor([0]), 50.0)
        assert torch.equal(soft(z)[0], z[1])


@pytest.mark.parametrize("loops", [1, 2, 4, 16])
def test_mixture_is_the_weighted_sum_with_weights_of_sum_one(loops: int) -> None:
    """SM-2, and the definition: a softmax over the steps of one head on the normed states."""
    soft, z = make_soft(), states(loops)
    y_BND, weights_BNR = soft(z)
    stacked = torch.stack(z, dim=-1)
    scores = torch.einsum("bndr,d->bnr", torch.nn.functional.layer_norm(stacked.mT, (16,), eps=1e-6).mT, soft.score.weight[0])
    scores[..., -1] += float(torch.tensor(9.0 * (loops - 1)).log()) if loops > 1 else 0
    torch.testing.assert_close(weights_BNR, scores.softmax(-1))
    assert (weights_BNR.sum(-1) - 1).abs().max() <= 1e-6
    torch.testing.assert_close(y_BND, (weights_BNR[:, :, None] * stacked).sum(-1))
    assert loops == 1 or weights_BNR.std(dim=1).max() > 0.01  # each token has its own


def test_one_loop_is_read_as_it_is() -> None:
    """SM-3; the scores' gradient is 0, but there, as distributed training wants it."""
    soft, (z,) = make_soft(), states(1)
    y_BND, weights_BNR = soft([z])
    assert torch.equal(y_BND, z)
    assert torch.equal(weights_BNR, torch.ones(2, 5, 1))
    y_BND.sum().backward()
    assert soft.score.weight.grad is not None
    assert not soft.score.weight.grad.any()


def test_equal_states_are_read_as_that_state() -> None:
    """SM-4."""
    z = states(1)[0]
    torch.testing.assert_close(make_soft()([z] * 5)[0], z)


@pytest.mark.parametrize("loops", [2, 4, 8, 30])
def test_last_loop_starts_at_nine_tenths(loops: int) -> None:
    """For any number of loops, whatever the states; the others share the rest alike."""
    weights_BNR = SoftReadout(16)(states(loops))[1].detach()
    torch.testing.assert_close(weights_BNR[..., -1], torch.full((2, 5), 0.9))
    torch.testing.assert_close(weights_BNR[..., :-1], torch.full((2, 5, loops - 1), 0.1 / (loops - 1)))


def test_gradient_reaches_every_state_and_the_scores() -> None:
    """SM-5, from the start on."""
    soft, z = SoftReadout(16), [state.requires_grad_() for state in states(5)]
    soft(z)[0].square().sum().backward()
    gradients = [*(state.grad for state in z), soft.score.weight.grad, soft.last_offset.grad]
    assert all(gradient is not None and gradient.abs().max() > 0 for gradient in gradients)


def test_softmax_over_loops_is_in_float32_under_autocast() -> None:
    soft, z = make_soft(), states(4)
    with torch.autocast("cpu", torch.bfloat16):
        weights_BNR = soft(z)[1]
    assert weights_BNR.dtype == torch.float32
    assert torch.equal(weights_BNR, soft(z)[1])
    assert soft.bfloat16()([state.bfloat16() for state in z])[1].dtype == torch.float32
