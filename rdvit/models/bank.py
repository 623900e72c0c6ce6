"""A bank of feed-forwards, mixed in weight space by depth (reViT, Bulat et al. 2026, arXiv:2610.12448; systems.md section 9).

    W(k) = sum_e a_e(s_k) W_e,   a = softmax(g(s_k)),   s_k = k / (K - 1)

The depth programs the experts, not the token: one merged feed-forward per loop. The coordinate runs from 0 to 1 whatever the
number of loops K, so another K samples the same trajectory of weights at other places.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from rdvit.config import BankConfig
from rdvit.models.feedforward import swiglu


def depth_coordinate(k: int, loops: int) -> float:
    """``s_k = k / (K - 1)`` of loop k = 0 .. K - 1; 0 where there is one loop."""
    return k / (loops - 1) if loops > 1 else 0.0


class ExpertBank(nn.Module):
    """SwiGLU feed-forward whose weights are a convex combination of E experts, with coefficients that the depth sets.

    All experts start from one draw plus small noise of their own: the average of independent draws would be smaller by
    sqrt(E). In evaluation without gradient the merged weights are kept for each loop. ``train()``, ``eval()``, a pass with
    gradient, another number of loops and a change of a parameter drop them; of a change that PyTorch does not count, through
    ``parameter.data``, tell the bank by ``eval()``.

    Args:
        embed_dim: Token width D.
        hidden_dim: Hidden width M of the merged feed-forward.
        config: Number of experts E, noise, and the size of the depth MLP g.
    """

    def __init__(self, embed_dim: int, hidden_dim: int, config: BankConfig) -> None:
        super().__init__()
        self.noise, self.frequencies = config.noise, config.frequencies
        self.w_in = nn.Parameter(torch.empty(config.num_experts, 2 * hidden_dim, embed_dim))
        self.w_out = nn.Parameter(torch.empty(config.num_experts, embed_dim, hidden_dim))
        self.router = nn.Sequential(
            nn.Linear(2 * config.frequencies, config.router_dim), nn.SiLU(), nn.Linear(config.router_dim, config.num_experts)
        )
        self._merged: dict[int, tuple[Tensor, Tensor]] = {}
        self._merged_for: tuple[object, ...] = ()
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """One draw for all experts and a little of their own; PyTorch's own start for g, far from a saturated softmax."""
        for weight in (self.w_in, self.w_out):
            with torch.no_grad():
                shared = nn.init.trunc_normal_(torch.empty_like(weight[0]), std=0.02)
                weight.copy_(shared + 0.02 * self.noise * torch.randn_like(weight))
        for layer in self.router:
            if isinstance(layer, nn.Linear):
                layer.reset_parameters()

    def coefficients(self, k: int, loops: int) -> Tensor:
        """Coefficients (E,) of loop ``k`` of ``loops``, at least 0 and of sum 1; in float32 under any autocast."""
        with torch.autocast(self.w_in.device.type, enabled=False):
            octaves_F = 2.0 ** torch.arange(self.frequencies, device=self.w_in.device)
            angles_F = math.pi * depth_coordinate(k, loops) * octaves_F
            features = torch.cat([angles_F.sin(), angles_F.cos()])
            return self.router(features.to(self.w_in.dtype)).float().softmax(-1)

    def merge(self, k: int, loops: int) -> tuple[Tensor, Tensor]:
        """Merged weights (2M, D) and (D, M) of loop ``k`` of ``loops``, in float32 (no TF32: no matrix product)."""
        a_E11 = self.coefficients(k, loops)[:, None, None]
        return (a_E11 * self.w_in).sum(0).to(self.w_in.dtype), (a_E11 * self.w_out).sum(0).to(self.w_out.dtype)

    def forward(self, x: Tensor, k: int, loops: int) -> Tensor:
        """Map tokens (..., D) to (..., D) as loop ``k`` of ``loops`` does."""
        if self.training or torch.is_grad_enabled() or self.w_in.is_inference():  # inference tensors do not count changes
            self._merged = {}  # nor does PyTorch count those by a fused optimiser, which may be next
            return swiglu(x, *self.merge(k, loops))
        state = (loops, *((p._version, p.data_ptr(), p.dtype) for p in self.parameters()))
        if state != self._merged_for:
            self._merged, self._merged_for = {}, state
        if k not in self._merged:
            self._merged[k] = self.merge(k, loops)
        return swiglu(x, *self._merged[k])

    def train(self, mode: bool = True) -> ExpertBank:
        """Switch between training and evaluation, and drop the merged weights."""
        self._merged, self._merged_for = {}, ()
        return super().train(mode)
