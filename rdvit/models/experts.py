"""Mixture-of-experts feed-forward: routed and shared experts, without capacity limits (DeepSeekMoE, arXiv:2401.06066).

Balancing is the loss-free rule of arXiv:2408.15664: a bias per expert joins the selection, never the gate weight, and moves
against the load after every optimiser step (:meth:`Experts.balance`). The Switch loss (arXiv:2101.03961) can be added.
"""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rdvit.models.feedforward import FeedForward, swiglu

ROWS = 128  # token counts are rounded up to whole multiples of this where they vary from step to step


class Routing(NamedTuple):
    """Where the tokens went: router probabilities and gate weights, both (B, M, E) in float32; gates are 0 if unused."""

    probabilities_BME: Tensor
    gates_BME: Tensor


class Experts(nn.Module):
    """Top-k routed SwiGLU experts plus shared ones that are always on.

    Args:
        embed_dim: Token width D.
        num_experts: Number of routed experts E.
        top_k: Experts per token.
        hidden_dim: Hidden width of one routed expert.
        num_shared: Shared experts; each has the width ``hidden_dim * top_k``.

    Raises:
        ValueError: If ``top_k`` does not lie in 1..num_experts.
    """

    router_bias_E: Tensor

    def __init__(self, embed_dim: int, num_experts: int, top_k: int, hidden_dim: int, num_shared: int = 1) -> None:
        super().__init__()
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"expected top_k in 1..{num_experts} (num_experts), found {top_k}")
        self.num_experts, self.top_k = num_experts, top_k
        self.router = nn.Linear(embed_dim, num_experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(num_experts, 2 * hidden_dim, embed_dim))
        self.w_out = nn.Parameter(torch.empty(num_experts, embed_dim, hidden_dim))
        self.shared = FeedForward(embed_dim, num_shared * top_k * hidden_dim) if num_shared else None
        self.register_buffer("router_bias_E", torch.zeros(num_experts))
        nn.init.trunc_normal_(self.w_in, std=0.02)
        nn.init.trunc_normal_(self.w_out, std=0.02)

    def route(self, x_ND: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Router probabilities (N, E), chosen experts (N, k) and their gate weights (N, k), in float32 under any autocast."""
        with torch.autocast(x_ND.device.type, enabled=False):
            logits_NE = x_ND.float() @ self.router.weight.float().T
        probabilities_NE = logits_NE.softmax(-1)
        chosen_Nk = (logits_NE + self.router_bias_E).topk(self.top_k, dim=-1).indices
        chosen_Nk = chosen_Nk.sort(dim=-1).values  # the order of the sum must not depend on the bias
        gates_Nk = probabilities_NE.gather(1, chosen_Nk)
        if self.top_k > 1:  # with one expert the renormalised gate would be 1 and the router would get no gradient
            gates_Nk = gates_Nk / gates_Nk.sum(-1, keepdim=True)
        return probabilities_NE, chosen_Nk, gates_Nk

    def forward(self, x_BMD: Tensor) -> tuple[Tensor, Routing]:
        """Send every token through its experts: sort by expert, one product per expert, put back, weigh and add."""
        x_ND = x_BMD.reshape(-1, x_BMD.shape[-1])
        probabilities_NE, chosen_Nk, gates_Nk = self.route(x_ND)
        whole = x_ND.device.type == "cpu" and x_ND.dtype != torch.float32
        token_R, place_Nk, rows = self._dispatch(chosen_Nk, ROWS if whole else 1)
        out_RD = self._through_experts(x_ND.index_select(0, token_R), rows)
        weights_Nk = gates_Nk.to(out_RD.dtype)  # gather, weigh and sum in one pass
        y_ND = F.embedding_bag(place_Nk, out_RD, per_sample_weights=weights_Nk, mode="sum")
        if self.shared is not None:
            y_ND = y_ND + self.shared(x_ND)
        gates_NE = torch.zeros_like(probabilities_NE).scatter(1, chosen_Nk, gates_Nk)
        batch = x_BMD.shape[:2]
        return y_ND.view_as(x_BMD), Routing(probabilities_NE.view(*batch, -1), gates_NE.view(*batch, -1))

    def _through_experts(self, x_RD: Tensor, rows: list[int]) -> Tensor:
        """Rows through the expert that each belongs to, expert by expert."""
        w_in, w_out = self.w_in, self.w_out  # read once: with a low-rank update each reading makes them anew
        inputs = x_RD.split(rows)
        if torch.is_grad_enabled():
            return torch.cat([swiglu(x, w_in[e], w_out[e]) for e, x in enumerate(inputs) if len(x)])
        for e, x in enumerate(inputs):
            if len(x):
                x.copy_(swiglu(x, w_in[e], w_out[e]))  # each row is read once
        return x_RD

    def _dispatch(self, chosen_Nk: Tensor, step: int) -> tuple[Tensor, Tensor, list[int]]:
        """Which token each row holds (R,), which row each token-expert pair has (N, k), and how many rows each expert.

        An expert's rows are filled up to a round number where that is asked for: for bfloat16 a CPU compiles a product for
        every new one.
        """
        order_P = chosen_Nk.flatten().argsort(stable=True)  # token-expert pairs, expert by expert
        counts = torch.bincount(chosen_Nk.flatten(), minlength=self.num_experts).tolist()
        rows = [_rounded(count, step) for count in counts]
        fillings = [0, *accumulate(row - count for row, count in zip(rows, counts, strict=True))]  # before each expert
        shift_P = torch.tensor(fillings[:-1], device=order_P.device)[chosen_Nk.flatten()[order_P]]
        place_P = torch.arange(len(order_P), device=order_P.device) + shift_P
        token_R = order_P.new_zeros(sum(rows)).index_copy(0, place_P, order_P // self.top_k)
        return token_R, torch.empty_like(place_P).index_copy(0, order_P, place_P).view_as(chosen_Nk), rows

    @torch.no_grad()
    def balance(self, load_E: Tensor, rate: float) -> None:
        """Lower the selection bias of overloaded experts and raise that of idle ones, by ``rate`` each."""
        self.router_bias_E += rate * torch.sign(load_E.mean() - load_E)


def _rounded(count: int, step: int) -> int:
    """``count`` rounded up to whole steps, or quarters of one where few are left."""
    step = step if count > step else max(1, step // 4)
    return -(-count // step) * step


def switch_loss(routing: Routing, active_BM: Tensor | None = None) -> Tensor:
    """Switch-Transformer balance term ``E * sum_i f_i P_i`` over the active tokens: 1 when experts and router are balanced.

    ``f_i`` is the share of token-expert pairs sent to expert i, ``P_i`` its mean router probability.
    """
    weight_BM1 = torch.ones_like(routing.gates_BME[..., :1]) if active_BM is None else active_BM[..., None].float()
    used_BME = (routing.gates_BME > 0).float() * weight_BM1
    share_E = used_BME.sum((0, 1)) / used_BME.sum().clamp(min=1)
    probability_E = (routing.probabilities_BME * weight_BM1).sum((0, 1)) / weight_BM1.sum().clamp(min=1)
    return share_E.shape[0] * (share_E * probability_E).sum()
