"""LTI injection: a decay strictly between 0 and 1, its closed form, and a state that stays bounded."""

from __future__ import annotations

import math

import pytest
import torch

from rdvit.models.injection import HIGHEST, LOWEST, LTIInjection

RAW = [-1e4, -20.0, -1.0, 0.0, 1.0, 20.0, 1e4]


def injection_with(raw: list[float]) -> LTIInjection:
    injection = LTIInjection(len(raw))
    with torch.no_grad():
        injection.raw_decay.copy_(torch.tensor(raw))
    return injection


def assert_strictly_inside(decay: torch.Tensor) -> None:
    assert (decay > 0).all()
    assert (decay < 1).all()


def test_decay_is_strictly_inside_for_any_parameter() -> None:
    """LTI-1."""
    decay_D = injection_with(RAW).decay()
    assert decay_D.dtype == torch.float32
    assert_strictly_inside(decay_D)
    assert (decay_D.diff() <= 0).all()  # monotone in the raw parameter


@pytest.mark.parametrize("sign", [-1, 1])
def test_decay_is_strictly_inside_after_a_huge_optimiser_step(sign: int) -> None:
    """LTI-1."""
    injection = injection_with(RAW)
    optimiser = torch.optim.Adam(injection.parameters(), lr=10)
    (sign * injection.decay().sum()).backward()
    optimiser.step()
    assert not torch.equal(injection.raw_decay, torch.tensor(RAW))
    assert_strictly_inside(injection.decay())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decay_is_strictly_inside_in_bfloat16_and_under_autocast(dtype: torch.dtype) -> None:
    """LTI-2: the parameters in bfloat16, A itself cast to bfloat16, and the whole under autocast."""
    in_bfloat16 = injection_with(RAW).bfloat16()
    for injection in (injection_with(RAW), in_bfloat16):
        with torch.autocast("cpu", dtype):
            decay_D = injection.decay()
        assert decay_D.dtype == torch.float32
        assert_strictly_inside(decay_D)
        assert_strictly_inside(decay_D.bfloat16())
    state_BND = torch.ones(1, 1, len(RAW), dtype=torch.bfloat16)
    h_BND = in_bfloat16(state_BND, 0 * state_BND, 0 * state_BND)
    assert h_BND.dtype == torch.bfloat16
    assert_strictly_inside(h_BND)


def test_starts_where_the_literature_does() -> None:
    injection = LTIInjection(5)
    torch.testing.assert_close(injection.decay(), torch.full((5,), math.exp(-1)))
    assert torch.equal(injection.input_gain, torch.full((5,), 0.1))


def test_closed_form_without_a_block() -> None:
    """LTI-3: h_t = A^t h_0 + (1 - A^t) / (1 - A) b e."""
    torch.manual_seed(0)
    injection = injection_with([-2.0, -0.5, 0.0, 0.3, 1.0])
    h0_BND, e_BND = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    with torch.no_grad():
        injection.input_gain.normal_()
        h_BND, decay_D = h0_BND, injection.decay()
        for t in range(1, 13):
            h_BND = injection(h_BND, e_BND, torch.zeros_like(e_BND))
            expected = decay_D**t * h0_BND + (1 - decay_D**t) / (1 - decay_D) * injection.input_gain * e_BND
            torch.testing.assert_close(h_BND, expected)


def test_block_output_is_added_as_it_is() -> None:
    torch.manual_seed(0)
    injection, (h, e, v) = LTIInjection(4), torch.randn(3, 2, 6, 4)
    torch.testing.assert_close(injection(h, e, v) - injection(h, e, torch.zeros_like(v)), v)


def test_gradient_of_the_decay_is_finite_everywhere_and_alive_in_range() -> None:
    """LTI-4: no dead channel inside the bounds, no NaN at the rails."""
    x = torch.linspace(LOWEST + 0.1, HIGHEST - 0.5, 50)
    share = (x - LOWEST) / (HIGHEST - LOWEST)
    for raw, alive in ((torch.logit(share).tolist(), True), (RAW, False)):
        injection = injection_with(raw)
        injection.decay().sum().backward()
        gradient_D = injection.raw_decay.grad
        assert gradient_D is not None
        assert gradient_D.isfinite().all()
        assert not alive or (gradient_D < 0).all()


def test_state_stays_bounded_for_a_thousand_loops() -> None:
    """LTI-6: ||h_t|| <= (||b e|| + M) / (1 - max A), nearly reached by the worst block there is."""
    injection = injection_with([-1e4] * 8)  # the slowest decay that the parameter can express
    e_BND = torch.ones(1, 1, 8)
    bounded_output = 3 * e_BND / e_BND.norm()  # M = 3, always in the direction of the state
    with torch.no_grad():
        longest_memory = injection.decay().max().item()
        bound = (0.1 * e_BND.norm().item() + 3) / (1 - longest_memory)
        h_BND = e_BND
        for _ in range(1000):
            h_BND = injection(h_BND, e_BND, bounded_output)
            assert h_BND.norm().item() <= bound
    assert h_BND.norm().item() > 0.9 * bound
