"""What tells the shared block which loop it is in: a loop-index embedding and depth-wise LoRA (systems.md sections 3, 4)."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def loop_embedding(t: int, embed_dim: int, device: torch.device | None = None) -> Tensor:
    """Sinusoidal embedding (D,) of loop t = 0, 1, ..., in the leading ``embed_dim // 8`` channels, zero elsewhere.

    Sines first, then cosines, frequencies ``10000^(-2k/c)``. Defined for any t. It is added to a copy of the state that
    the block reads, so the carried state never collects it.

    Raises:
        ValueError: If ``embed_dim // 8`` is odd or zero.
    """
    channels = embed_dim // 8
    if channels < 2 or channels % 2:
        raise ValueError(f"expected embed_dim // 8 to be even and at least 2, found {channels} for width {embed_dim}")
    k = torch.arange(channels // 2, device=device, dtype=torch.float32)
    angles = t * 10000.0 ** (-2 * k / channels)
    embedding_D = torch.zeros(embed_dim, device=device)
    embedding_D[:channels] = torch.cat([angles.sin(), angles.cos()])
    return embedding_D


class DepthLoRA(nn.Module):
    """Low-rank output adapter with one scale row per trained loop: ``delta_t(x) = ((x W_down) * S[t]) W_up``.

    Zero at initialisation (``W_up`` is zero, the scales are one). Past the trained depth the last row is used.

    Args:
        embed_dim: Token width D.
        rank: Rank r.
        loops: Trained loops T, the rows of S.
    """

    def __init__(self, embed_dim: int, rank: int, loops: int) -> None:
        super().__init__()
        self.down = nn.Linear(embed_dim, rank, bias=False)
        self.up = nn.Linear(rank, embed_dim, bias=False)
        self.scale_Tr = nn.Parameter(torch.ones(loops, rank))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Random down, zero up: no effect at first, but a gradient from the first step on."""
        nn.init.normal_(self.down.weight, std=0.02)
        nn.init.zeros_(self.up.weight)

    def forward(self, x_BMD: Tensor, t: int) -> Tensor:
        """The correction (B, M, D) of loop ``t``."""
        return self.up(self.down(x_BMD) * self.scale_Tr[min(t, len(self.scale_Tr) - 1)])
