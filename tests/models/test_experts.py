"""Mixture of experts: sparse dispatch against the dense sum, its balance, and the cases where it must be a dense layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from rdvit.models.experts import Experts, Routing, switch_loss
from rdvit.models.feedforward import FeedForward, swiglu


def random_experts(num_experts: int = 5, top_k: int = 2, num_shared: int = 1) -> Experts:
    torch.manual_seed(0)
    experts = Experts(12, num_experts, top_k, hidden_dim=8, num_shared=num_shared)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.5)
    return experts


def dense_sum(experts: Experts, x_BMD: Tensor) -> Tensor:
    """Every expert on every token, weighed by the gates: slow, and plain to see."""
    gates_BME = experts(x_BMD)[1].gates_BME
    outputs = [swiglu(x_BMD, w_in, w_out) for w_in, w_out in zip(experts.w_in, experts.w_out, strict=True)]
    y_BMD = sum((gates_BME[..., e, None] * out for e, out in enumerate(outputs)), torch.zeros_like(x_BMD))
    return y_BMD if experts.shared is None else y_BMD + experts.shared(x_BMD)


def test_one_expert_is_the_dense_block() -> None:
    """MOE-1, bit for bit."""
    experts, x_BMD = random_experts(num_experts=1, top_k=1, num_shared=0), torch.randn(2, 7, 12)
    dense = FeedForward(12, 8)
    dense.load_state_dict({"w_in.weight": experts.w_in[0], "w_out.weight": experts.w_out[0]})
    assert torch.equal(experts(x_BMD)[0], dense(x_BMD))


def test_identical_experts_are_the_dense_block_for_any_routing() -> None:
    """MOE-2."""
    experts, x_BMD = random_experts(top_k=3, num_shared=0), torch.randn(2, 7, 12)
    with torch.no_grad():
        experts.w_in.copy_(experts.w_in[:1].expand_as(experts.w_in))
        experts.w_out.copy_(experts.w_out[:1].expand_as(experts.w_out))
    y_BMD, routing = experts(x_BMD)
    assert len({tuple(row) for row in (routing.gates_BME > 0).flatten(0, 1).tolist()}) > 1  # the routes do differ
    torch.testing.assert_close(y_BMD, swiglu(x_BMD, experts.w_in[0], experts.w_out[0]))


@pytest.mark.parametrize("top_k", [2, 3, 5])
def test_gates_sum_to_one_over_the_chosen_experts(top_k: int) -> None:
    """MOE-3."""
    routing = random_experts(top_k=top_k)(torch.randn(2, 7, 12))[1]
    assert routing.gates_BME.dtype == torch.float32
    torch.testing.assert_close(routing.gates_BME.sum(-1), torch.ones(2, 7))
    torch.testing.assert_close(routing.probabilities_BME.sum(-1), torch.ones(2, 7))
    assert ((routing.gates_BME > 0).sum(-1) == top_k).all()
    chosen = routing.gates_BME > 0  # without a bias the most probable ones are chosen
    assert (
        routing.probabilities_BME.masked_fill(~chosen, 2).amin(-1) >= routing.probabilities_BME.masked_fill(chosen, 0).amax(-1)
    ).all()


def test_a_single_choice_is_weighed_by_its_probability_so_that_the_router_learns() -> None:
    experts, x_BMD = random_experts(top_k=1), torch.randn(2, 7, 12)
    y_BMD, routing = experts(x_BMD)
    torch.testing.assert_close(routing.gates_BME.sum(-1), routing.probabilities_BME.amax(-1))
    y_BMD.square().sum().backward()
    assert experts.router.weight.grad is not None
    assert experts.router.weight.grad.abs().max() > 1e-4


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_selection_bias_chooses_but_never_weighs(top_k: int) -> None:
    """MOE-4: the same selection gives the same output bit for bit; another selection gives another output."""
    experts, x_BMD = random_experts(top_k=top_k), 3 * torch.randn(2, 7, 12)
    before, routing = experts(x_BMD)
    logits = torch.log(routing.probabilities_BME).sort(-1, descending=True).values
    assert (logits[..., top_k - 1] - logits[..., top_k]).min() > 0.01
    experts.router_bias_E += torch.tensor([0.004, -0.004, 0.002, 0.0, -0.002])
    assert torch.equal(experts(x_BMD)[0], before)
    experts.router_bias_E[3] += 100.0
    after, routing = experts(x_BMD)
    assert (routing.gates_BME[..., 3] > 0).all()
    assert not torch.allclose(after, before)


def test_order_of_the_chosen_experts_does_not_matter() -> None:
    """MOE-4: a bias that only reorders the three chosen experts leaves the output as it is, bit for bit."""
    experts, x_BMD = random_experts(num_experts=3, top_k=3), torch.randn(4, 50, 12)
    before, _ = experts(x_BMD)
    experts.router_bias_E += torch.tensor([0.0, 50.0, 100.0])
    assert torch.equal(experts(x_BMD)[0], before)


def test_balance_moves_the_bias_against_the_load() -> None:
    """MOE-5."""
    experts = random_experts(num_experts=4)
    experts.balance(torch.tensor([9.0, 1.0, 4.0, 2.0]), rate=0.25)  # mean load 4
    assert experts.router_bias_E.tolist() == [-0.25, 0.25, 0, 0.25]


def test_balance_drives_a_skewed_router_to_even_loads() -> None:
    """MOE-5: the router stays as it is, only the selection bias moves."""
    experts, x_ND = random_experts(num_experts=4), torch.randn(400, 12) + 1.0
    loads = []
    for _ in range(300):
        loads.append(torch.bincount(experts.route(x_ND)[1].flatten(), minlength=4).float())
        experts.balance(loads[-1], rate=0.03)
    assert loads[0].max() > 1.5 * loads[0].mean()
    assert loads[-1].max() < 1.1 * loads[-1].mean()


def test_switch_term_is_one_when_balanced_and_E_when_collapsed() -> None:
    """MOE-6."""
    gates_BME = torch.eye(4).repeat(2, 3, 1)  # each of the four experts gets a quarter of the tokens
    uniform = Routing(torch.full((2, 12, 4), 0.25), gates_BME)
    assert switch_loss(uniform).item() == pytest.approx(1)
    one = torch.eye(4)[0].expand(2, 12, 4)
    assert switch_loss(Routing(one, one)).item() == pytest.approx(4)


def test_switch_term_divides_by_the_experts_per_token() -> None:
    """MOE-6: two experts per token, every expert used alike."""
    gates_BME = 0.5 * torch.tensor([[1, 1, 0, 0], [0, 0, 1, 1.0]]).repeat(1, 3, 1)
    assert switch_loss(Routing(torch.full((1, 6, 4), 0.25), gates_BME)).item() == pytest.approx(1)


def test_switch_term_counts_active_tokens_only() -> None:
    routing = random_experts()(torch.randn(1, 10, 12))[1]
    active_BM = torch.arange(10)[None] < 4
    of_the_first = Routing(routing.probabilities_BME[:, :4], routing.gates_BME[:, :4])
    torch.testing.assert_close(switch_loss(routing, active_BM), switch_loss(of_the_first))
    assert switch_loss(routing, torch.zeros(1, 10, dtype=torch.bool)).item() == 0


def test_permuting_tokens_permutes_output_and_routing() -> None:
    """MOE-7."""
    experts, x_BMD, order = random_experts(), torch.randn(2, 9, 12), torch.randperm(9)
    (y, routing), (y_permuted, routing_permuted) = experts(x_BMD), experts(x_BMD[:, order])
    torch.testing.assert_close(y_permuted, y[:, order])
    torch.testing.assert_close(routing_permuted.gates_BME, routing.gates_BME[:, order])


def test_an_unused_expert_has_a_gradient_of_zero() -> None:
    """MOE-8: zero and not None, or distributed training waits for it for ever."""
    experts = random_experts()
    experts.router_bias_E[2] = -1e6
    y_BMD, _ = experts(torch.randn(2, 7, 12))
    y_BMD.square().sum().backward()
    for weight in (experts.w_in, experts.w_out):
        assert weight.grad is not None
        assert [bool(g.any()) for g in weight.grad] == [True, True, False, True, True]


@pytest.mark.parametrize(("top_k", "num_shared"), [(1, 0), (2, 1), (3, 2), (5, 1)])
def test_sparse_dispatch_is_the_dense_sum(top_k: int, num_shared: int) -> None:
    """MOE-9, with its gradients."""
    experts, x_BMD = random_experts(top_k=top_k, num_shared=num_shared), torch.randn(2, 7, 12)
    parameters = list(experts.parameters())
    sparse, dense = experts(x_BMD)[0], dense_sum(experts, x_BMD)
    torch.testing.assert_close(sparse, dense)
    direction = torch.randn_like(sparse)
    gradients = [torch.autograd.grad((y * direction).sum(), parameters) for y in (sparse, dense)]
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)


def test_a_token_does_not_depend_on_the_rest_of_the_batch() -> None:
    """No capacity limit: whatever the others do, nobody is dropped."""
    experts, x_BMD = random_experts(), torch.randn(1, 1, 12)
    crowd_BMD = x_BMD.expand(3, 40, 12)
    torch.testing.assert_close(experts(crowd_BMD)[0], experts(x_BMD)[0].expand(3, 40, 12))


def test_router_works_in_float32_under_autocast() -> None:
    experts, x_BMD = random_experts(), torch.randn(2, 7, 12)
    expected = experts(x_BMD)[1]
    with torch.autocast("cpu", torch.bfloat16):
        routing = experts(x_BMD)[1]
    assert torch.equal(routing.probabilities_BME, expected.probabilities_BME)
    assert torch.equal(routing.gates_BME, expected.gates_BME)


@pytest.mark.parametrize("top_k", [0, 6])
def test_top_k_must_fit(top_k: int) -> None:
    with pytest.raises(ValueError, match=rf"top_k in 1\.\.5 \(num_experts\), found {top_k}"):
        Experts(12, 5, top_k, 8)
