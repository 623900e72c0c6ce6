"""The bank of feed-forwards: a convex mixture in weight space by depth, kept no longer than it holds."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rdvit.config import BankConfig, ModelConfig
from rdvit.models.bank import ExpertBank, depth_coordinate
from rdvit.models.build import count_parameters
from rdvit.models.feedforward import FeedForward, swiglu
from rdvit.models.recurrence import Recurrence
from rdvit.models.segmenter import Segmenter

ConfigMaker = Callable[..., ModelConfig]
Randomize = Callable[[nn.Module], None]
PLAIN: dict[str, Any] = {"injection": "none", "lora_rank": 0, "loop_embedding": False, "halting": "none"}


def make(num_experts: int = 4, noise: float = 0.1) -> ExpertBank:
    torch.manual_seed(0)
    return ExpertBank(16, 24, BankConfig(num_experts=num_experts, noise=noise))


def tokens() -> Tensor:
    return torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))


def choose(bank: ExpertBank, expert: int) -> None:
    """Make g's softmax one-hot at every depth."""
    last = bank.router[-1]
    assert isinstance(last, nn.Linear)
    nn.init.zeros_(last.weight)
    with torch.no_grad():
        last.bias.copy_(torch.where(torch.arange(len(bank.w_in)) == expert, 0.0, -1e4))


@pytest.mark.parametrize("expert", [0, 3])
def test_one_hot_coefficients_are_that_expert(expert: int) -> None:
    """RV-1, bit for bit."""
    bank = make()
    choose(bank, expert)
    assert torch.equal(bank(tokens(), 1, 3), swiglu(tokens(), bank.w_in[expert], bank.w_out[expert]))


def test_identical_experts_are_the_plain_loop(small_config: ConfigMaker, randomize: Randomize) -> None:
    """RV-2: bViT, whatever the coefficients."""
    plain = Recurrence(small_config(**PLAIN))
    randomize(plain)
    loop = Recurrence(small_config(**PLAIN, bank=BankConfig(num_experts=4)))
    ffn, bank = plain.blocks[0].ffn, loop.blocks[0].ffn
    assert isinstance(ffn, FeedForward)
    assert isinstance(bank, ExpertBank)
    randomize(bank)
    loop.load_state_dict(plain.state_dict(), strict=False)
    with torch.no_grad():
        bank.w_in.copy_(ffn.w_in.weight.expand_as(bank.w_in))
        bank.w_out.copy_(ffn.w_out.weight.expand_as(bank.w_out))
        e_BND = torch.randn(2, 20, 32)
        runs = [r(e_BND, (4, 5), 5).tokens_BND for r in (loop, plain)]
    torch.testing.assert_close(*runs, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("loops", [1, 2, 7])
def test_coefficients_are_convex_and_weights_bounded(randomize: Randomize, loops: int) -> None:
    """RV-3 and RV-4."""
    bank = make()
    randomize(bank)
    largest = bank.w_in.flatten(1).norm(dim=1).max()
    for k in range(loops):
        a_E = bank.coefficients(k, loops)
        assert (a_E >= 0).all()
        assert a_E.sum().item() == pytest.approx(1, abs=1e-6)
        assert bank.merge(k, loops)[0].norm() <= largest
        torch.testing.assert_close(bank.merge(k, loops)[1], torch.einsum("e,eij->ij", a_E, bank.w_out))


def test_depth_programs_the_weights(randomize: Randomize) -> None:
    """Loops differ from one another, and the mixture is of weights, not of outputs."""
    bank = make()
    randomize(bank)
    x = tokens()
    y = [bank(x, k, 4) for k in range(4)]
    assert all((y[k] - y[k + 1]).abs().max() > 1e-3 for k in range(3))
    of_outputs = sum(a * swiglu(x, *w) for a, *w in zip(bank.coefficients(1, 4), bank.w_in, bank.w_out, strict=True))
    assert not torch.allclose(y[1], torch.as_tensor(of_outputs), atol=1e-4)


def test_another_number_of_loops_samples_the_same_trajectory(randomize: Randomize) -> None:
    """RV-6: the ends are the same, bit for bit, and so are coordinates that coincide; one loop is the beginning."""
    bank = make()
    randomize(bank)
    assert [depth_coordinate(k, 5) for k in range(5)] == [0, 0.25, 0.5, 0.75, 1]
    assert depth_coordinate(0, 1) == 0
    for k, loops in ((0, 1), (0, 2), (0, 9)):
        assert torch.equal(bank.merge(k, loops)[0], bank.merge(0, 3)[0])
    for loops in (2, 9):
        assert torch.equal(bank.merge(loops - 1, loops)[0], bank.merge(2, 3)[0])
    assert torch.equal(bank.merge(4, 9)[0], bank.merge(1, 3)[0])


def test_parameters_are_those_of_the_experts_whatever_the_loops(small_config: ConfigMaker) -> None:
    """RV-7."""
    counts = {count_parameters(Recurrence(small_config(**PLAIN, loops=k, bank=BankConfig()))) for k in (1, 3, 12)}
    assert len(counts) == 1
    assert make(8).w_in.numel() == 2 * make(4).w_in.numel()


def test_experts_start_from_one_draw(small_config: ConfigMaker) -> None:
    """Inside a whole network too, after its own initialisation: the average is as large as an expert."""
    bank = Segmenter(small_config(bank=BankConfig(num_experts=8))).encoder.recurrence.blocks[0].ffn
    assert isinstance(bank, ExpertBank)
    for weight in (bank.w_in, bank.w_out):
        assert weight.mean(0).std().item() == pytest.approx(0.02, rel=0.05)
        assert (weight - weight.mean(0)).std().item() == pytest.approx(0.002, rel=0.15)
    assert bank.coefficients(1, 4).max() < 0.5
    assert float(bank.router[-1].state_dict()["weight"].std()) > 0.05  # not the 0.02 of the network's other layers
    same = make(noise=0.0)
    assert torch.equal(same.w_in[0], same.w_in[3])


def test_gradient_reaches_every_expert_and_the_depth_mlp() -> None:
    bank = make()
    bank(tokens(), 1, 3).square().sum().backward()
    for name, parameter in bank.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_are_merged_in_float32(randomize: Randomize, dtype: torch.dtype) -> None:
    """Under autocast, and in a bfloat16 model, whose weights are rounded once, after the sum."""
    bank = make().to(dtype)
    randomize(bank)
    with torch.no_grad():
        with torch.autocast("cpu", torch.bfloat16):
            merged, a_E = bank.merge(1, 3)[0], bank.coefficients(1, 3)
        expected = torch.einsum("e,eij->ij", a_E.double(), bank.w_in.double())
    assert (a_E.dtype, merged.dtype) == (torch.float32, dtype)
    torch.testing.assert_close(merged, expected.to(dtype), atol=1e-6, rtol=1e-6 if dtype == torch.float32 else 0.008)
    assert bank(tokens().to(dtype), 1, 3).isfinite().all()


def change_by_optimiser(bank: ExpertBank) -> None:
    """A fused step, which does not count as a change of a tensor; in evaluation mode, as fine-tuning may be."""
    bank(tokens(), 1, 3).sum().backward()
    torch.optim.AdamW(bank.parameters(), lr=0.1, fused=True).step()


def change_by_loading(bank: ExpertBank) -> None:
    bank.load_state_dict({name: 1.5 * value for name, value in bank.state_dict().items()})


def change_by_average(bank: ExpertBank) -> None:
    weights = [p.detach() for p in bank.parameters()]
    torch._foreach_lerp_(weights, [w + 1 for w in weights], 0.5)


def change_the_depth_mlp(bank: ExpertBank) -> None:
    choose(bank, 2)


def change_behind_autograd(bank: ExpertBank) -> None:
    bank.w_in.data.mul_(2)
    bank.eval()


@pytest.mark.parametrize(
    "change", [change_by_optimiser, change_by_loading, change_by_average, change_the_depth_mlp, change_behind_autograd]
)
def test_kept_weights_are_dropped_when_a_parameter_changes(change: Callable[[ExpertBank], None]) -> None:
    bank = make().eval()
    with torch.no_grad():
        before = bank(tokens(), 1, 3)
    change(bank)
    with torch.no_grad():
        after = bank(tokens(), 1, 3)
        assert torch.equal(after, swiglu(tokens(), *bank.merge(1, 3)))
    assert not torch.allclose(before, after, atol=1e-6)


def test_weights_are_merged_once_per_depth_in_evaluation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    bank = make()
    merge, merged = bank.merge, list[tuple[int, int]]()

    def counted(k: int, loops: int) -> tuple[Tensor, Tensor]:
        merged.append((k, loops))
        return merge(k, loops)

    monkeypatch.setattr(bank, "merge", counted)

    def depths(loops: int, grad: bool = False) -> list[tuple[int, int]]:
        merged.clear()
        with torch.set_grad_enabled(grad):
            for _ in range(2):
                for k in range(loops):
                    bank(tokens(), k, loops)
        return list(merged)

    assert len(depths(3)) == 6  # in training mode
    bank.eval()
    assert depths(3) == [(0, 3), (1, 3), (2, 3)]
    assert depths(3) == []
    assert depths(2) == [(0, 2), (1, 2)]  # the same loop of fewer is another depth
    assert len(depths(2, grad=True)) == 4  # a gradient wants its graph
    assert depths(2) == [(0, 2), (1, 2)]  # and may be followed by a change
    bank.train()
    assert len(depths(2)) == 4
    with torch.inference_mode():
        bank.eval()
        bank(tokens(), 0, 2)
    assert bank(tokens(), 0, 2).requires_grad


def test_a_kept_bank_can_be_copied_and_saved() -> None:
    bank = make().eval()
    with torch.no_grad():
        bank(tokens(), 0, 2)
        assert torch.equal(copy.deepcopy(bank)(tokens(), 0, 2), bank(tokens(), 0, 2))
    assert bank.state_dict().keys() == make().state_dict().keys()


def test_an_inference_model_is_merged_anew() -> None:
    with torch.inference_mode():
        bank = make().eval()
        before = bank(tokens(), 0, 2)
        bank.w_in.mul_(2)
        assert not torch.equal(bank(tokens(), 0, 2), before)
