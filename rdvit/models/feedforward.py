"""The dense feed-forward: SwiGLU (Shazeer 2020, arXiv:2002.05202), the same function that one expert computes."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ROWS_AT_ONCE = 512


def swiglu(x: Tensor, w_in: Tensor, w_out: Tensor) -> Tensor:
    """``down(silu(gate x) * up x)`` with ``w_in`` (2M, D) holding gate and up, and ``w_out`` (D, M); no biases.

    Without gradient a few tokens at a time and in place: in large fresh tensors page faults take longer than the products.
    """
    if torch.is_grad_enabled():
        gate, up = F.linear(x, w_in).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * up, w_out)
    parts = []
    for x_RD in x.flatten(0, -2).split(ROWS_AT_ONCE):
        gate, up = F.linear(x_RD, w_in).chunk(2, dim=-1)
        parts.append(F.linear(F.silu(gate, inplace=True).mul_(up), w_out))
    return torch.cat(parts).unflatten(0, x.shape[:-1])


def hidden_width(embed_dim: int, mlp_ratio: float) -> int:
    """Hidden width with the parameters of a two-matrix MLP of ``mlp_ratio``: two thirds of it, a multiple of 8."""
    return max(8, round(embed_dim * mlp_ratio * 2 / 3 / 8) * 8)


class FeedForward(nn.Module):
    """Dense SwiGLU feed-forward.

    Args:
        embed_dim: Token width D.
        hidden_dim: Hidden width M.
    """

    def __init__(self, embed_dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w_in = nn.Linear(embed_dim, 2 * hidden_dim, bias=False)
        self.w_out = nn.Linear(hidden_dim, embed_dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map tokens (..., D) to (..., D)."""
        return swiglu(x, self.w_in.weight, self.w_out.weight)
