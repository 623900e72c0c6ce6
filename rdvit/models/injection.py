"""State injection: how one loop's block output joins the carried state (systems.md section 2)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

# Bounds of x in A = exp(-exp(x)). At -6 A is 0.9975, still below 1 after a cast to bfloat16; at 4 it is 1.9e-24, above 0.
LOWEST, HIGHEST = -6.0, 4.0


class LTIInjection(nn.Module):
    """Diagonal linear time-invariant injection ``h <- A h + b e + v`` with ``0 < A < 1`` strictly, per channel.

    ``A = exp(-exp(x))`` and x is a smooth bounded function of the raw parameter, so that the bound holds for any parameter
    value and no channel dies at a hard clamp. What this promises is a bounded state, since the block sees normalised input;
    it does not make the whole loop a contraction. Starts at A = e^-1 and b = 0.1.

    Args:
        embed_dim: Token width D.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        start = -LOWEST / (HIGHEST - LOWEST)  # x = 0
        self.raw_decay = nn.Parameter(torch.full((embed_dim,), math.log(start / (1 - start))))
        self.input_gain = nn.Parameter(torch.full((embed_dim,), 0.1))

    def decay(self) -> Tensor:
        """A (D,), in float32 whatever the parameters' type and under any autocast."""
        with torch.autocast(self.raw_decay.device.type, enabled=False):
            x = LOWEST + (HIGHEST - LOWEST) * torch.sigmoid(self.raw_decay.float())
            return torch.exp(-torch.exp(x))

    def forward(self, h_BND: Tensor, e_BND: Tensor, v_BND: Tensor) -> Tensor:
        """The next state (B, N, D) from the state, the encoded input and the block output."""
        return self.decay().to(h_BND.dtype) * h_BND + self.input_gain.to(h_BND.dtype) * e_BND + v_BND
