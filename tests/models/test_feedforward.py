"""The dense feed-forward: its function, and a width that keeps the parameters of a plain MLP."""

from __future__ import annotations

import pytest
import torch

from rdvit.models.build import count_parameters
from rdvit.models.feedforward import FeedForward, hidden_width


def test_is_swiglu_token_by_token() -> None:
    torch.manual_seed(0)
    layer, x_BND = FeedForward(6, 8), torch.randn(2, 3, 6)
    gate_MD, up_MD = layer.w_in.weight[:8], layer.w_in.weight[8:]
    for x_D, y_D in zip(x_BND.reshape(-1, 6), layer(x_BND).reshape(-1, 6), strict=True):
        g_M = gate_MD @ x_D
        torch.testing.assert_close(y_D, layer.w_out.weight @ (g_M * torch.sigmoid(g_M) * (up_MD @ x_D)))


@pytest.mark.parametrize(("embed_dim", "mlp_ratio"), [(192, 4.0), (96, 4.0), (256, 3.0)])
def test_three_matrices_cost_what_two_of_the_mlp_would(embed_dim: int, mlp_ratio: float) -> None:
    hidden_dim = hidden_width(embed_dim, mlp_ratio)
    assert hidden_dim % 8 == 0
    plain_mlp = 2 * embed_dim * int(embed_dim * mlp_ratio)
    assert count_parameters(FeedForward(embed_dim, hidden_dim)) == pytest.approx(plain_mlp, rel=0.02)


def test_hidden_width_is_never_zero() -> None:
    assert hidden_width(16, 0.1) == 8
