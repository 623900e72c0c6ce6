"""What the loop hands on, token by token: adaptive computation time, or a soft mixture of the states.

ACT is Graves 2016, arXiv:1603.08983 (systems.md section 5); the mixture is SoftMoR, Lee and Park 2026, arXiv:2607.00774
(section 10). Of both the weights of all loops sum to 1; only ACT saves loops.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class HaltingHead(nn.Module):
    """Halting probability of each token from its updated state.

    Args:
        embed_dim: Token width D.
        bias: Start of the bias; sigmoid(bias) is the first halting probability. Negative, or all tokens halt at loop 1.
    """

    def __init__(self, embed_dim: int, bias: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, bias=False)
        self.proj = nn.Linear(embed_dim, 1)
        self.start_bias = bias
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero weights: at first every token halts at the same loop, which the bias alone sets."""
        nn.init.zeros_(self.proj.weight)
        nn.init.constant_(self.proj.bias, self.start_bias)

    def forward(self, h_BND: Tensor) -> Tensor:
        """Probabilities (B, N) in float32, also under autocast (bfloat16 sums miss 1 by 0.01 over 16 loops)."""
        with torch.autocast(h_BND.device.type, enabled=False):
            x_BND = F.layer_norm(h_BND.float(), h_BND.shape[-1:], self.norm.weight.float(), eps=self.norm.eps)
            return torch.sigmoid(x_BND @ self.proj.weight[0].float() + self.proj.bias.float())


class HaltingState:
    """Running sums of ACT: the weights of all loops sum to 1 for every token, the remainder goes to its last loop.

    A token stops at the first loop whose cumulated probability reaches ``1 - epsilon``, or at the last loop regardless; that
    loop's weight is the forced remainder R. Its ponder cost is ``steps + R`` (Graves).

    Args:
        like_BND: A state; gives the shape and device.
        epsilon: Graves's epsilon.
    """

    def __init__(self, like_BND: Tensor, epsilon: float) -> None:
        shape, device = like_BND.shape[:2], like_BND.device
        self.epsilon = epsilon
        self.halted_BN = torch.zeros(shape, dtype=torch.bool, device=device)
        self.cumulative_BN = torch.zeros(shape, device=device)
        self.remainder_BN = torch.zeros(shape, device=device)
        self.steps_BN = torch.zeros(shape, device=device)

    def update(self, p_BN: Tensor, last: bool) -> Tensor:
        """Take one loop's halting probabilities; returns the loop's weights (B, N), 0 for tokens that had halted."""
        active = ~self.halted_BN
        stops = active & ((self.cumulative_BN + p_BN >= 1 - self.epsilon) | last)
        remainder = 1 - self.cumulative_BN
        weight_BN = torch.where(stops, remainder, torch.where(active, p_BN, 0.0))
        self.remainder_BN = torch.where(active, remainder, self.remainder_BN)
        self.cumulative_BN = torch.where(active & ~stops, self.cumulative_BN + p_BN, self.cumulative_BN)
        self.steps_BN = self.steps_BN + active
        self.halted_BN = self.halted_BN | stops
        return weight_BN

    @property
    def rest_BN(self) -> Tensor:
        """What each token has not given to any loop; if the loop ends here, it goes to the last one. 0 where it halted."""
        return torch.where(self.halted_BN, 0.0, 1 - self.cumulative_BN)

    @property
    def ponder_BN(self) -> Tensor:
        """Graves's cost ``n + R`` of each token if the loop ends here; between 2 and T + 1 after T loops."""
        return self.steps_BN + self.remainder_BN


class SoftReadout(nn.Module):
    """Soft mixture ``y = sum_r w_r z_r`` of the states of all loops, with weights of its own for each token.

    ``w = softmax_r(score(z_r))``, the score one linear head on the normed state, the same for all loops, so that their
    number R may change. The last loop's score has an addition of ``ln(9 (R - 1))``, which gives it the weight 0.9 at first,
    and a learned offset.

    Args:
        embed_dim: Token width D.
    """

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(embed_dim, eps=1e-6, bias=False)
        self.score = nn.Linear(embed_dim, 1, bias=False)  # a bias would cancel in the softmax
        self.last_offset = nn.Parameter(torch.zeros(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Equal scores for all states: at first only the addition tells the loops apart."""
        nn.init.zeros_(self.score.weight)
        nn.init.zeros_(self.last_offset)

    def forward(self, states: list[Tensor]) -> tuple[Tensor, Tensor]:
        """The mixture (B, N, D) of R states, and its weights (B, N, R), which are float32 also under autocast."""
        with torch.autocast(states[0].device.type, enabled=False):
            width, scale_D = states[0].shape[-1:], self.norm.weight.float()
            normed = [F.layer_norm(z_BND.float(), width, scale_D, eps=self.norm.eps) for z_BND in states]
            scores_BNR = torch.stack([x_BND @ self.score.weight[0].float() for x_BND in normed], dim=-1)
            last_1 = self.last_offset.float() + math.log(9 * max(len(states) - 1, 1))
            scores_BNR = torch.cat([scores_BNR[..., :-1], scores_BNR[..., -1:] + last_1], dim=-1)
        weights_BNR = scores_BNR.softmax(-1)
        parts = [w_BN[..., None].to(z.dtype) * z for w_BN, z in zip(weights_BNR.unbind(-1), states, strict=True)]
        return torch.stack(parts).sum(0), weights_BNR
