"""Multi-head self-attention whose keys and values can outlive their tokens.

A token that has halted asks no more questions, but the others may still look at it: its key and value stay as they were
when it halted (systems.md section 5, semantics S2). So queries, keys and values are made apart from the product itself.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

# Above so many attention weights (queries x keys x heads x images) the fused kernel trains, which does not keep them.
KEPT_WEIGHTS = 32_000_000


class KeptAttention(torch.autograd.Function):
    """``softmax(q k' / sqrt K) v`` that keeps its weights for the gradient.

    For training in bfloat16 on CPUs, where the backward pass of the fused kernel makes its products in pieces too small for
    the matrix units: whole products take half its time, a quarter at 64 channels per head and 256 tokens.
    """

    @staticmethod
    def forward(ctx: Any, q_GMK: Tensor, k_GNK: Tensor, v_GNK: Tensor) -> Tensor:
        """Heads and images are one axis G; returns (G, M, K)."""
        ctx.scale = q_GMK.shape[-1] ** -0.5
        zero = q_GMK.new_zeros(1, 1, 1)
        weights_GMN = torch.baddbmm(zero, q_GMK, k_GNK.mT, beta=0, alpha=ctx.scale).softmax(-1)
        ctx.save_for_backward(q_GMK, k_GNK, v_GNK, weights_GMN)
        return weights_GMN @ v_GNK

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of queries, keys and values."""
        q_GMK, k_GNK, v_GNK, weights_GMN = ctx.saved_tensors
        grad_GMK = grads[0].to(q_GMK.dtype)
        of_weights_GMN = grad_GMK @ v_GNK.mT
        of_scores_GMN = torch._softmax_backward_data(of_weights_GMN, weights_GMN, -1, weights_GMN.dtype)
        return of_scores_GMN @ k_GNK * ctx.scale, of_scores_GMN.mT @ q_GMK * ctx.scale, weights_GMN.mT @ grad_GMK


def attention(q_BHMK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor) -> Tensor:
    """Scaled dot-product attention (B, H, M, K) from M queries to N keys, by the way that is quickest here."""
    trains = torch.is_grad_enabled() and q_BHMK.requires_grad
    weights = q_BHMK.shape[:3].numel() * k_BHNK.shape[2]
    if trains and q_BHMK.device.type == "cpu" and q_BHMK.dtype == torch.bfloat16 and weights <= KEPT_WEIGHTS:
        y_GMK = KeptAttention.apply(*(x.flatten(0, 1) for x in (q_BHMK, k_BHNK, v_BHNK)))
        return y_GMK.unflatten(0, q_BHMK.shape[:2])
    return F.scaled_dot_product_attention(q_BHMK, k_BHNK, v_BHNK)


class Attention(nn.Module):
    """Multi-head attention.

    Args:
        embed_dim: Token width D.
        num_heads: Number of heads H; must divide ``embed_dim``.
        qkv_bias: Whether queries, keys and values have a bias.

    Raises:
        ValueError: If the heads do not divide the width.
    """

    def __init__(self, embed_dim: int, num_heads: int, qkv_bias: bool = False) -> None:
        super().__init__()
        if embed_dim % num_heads:
            raise ValueError(f"expected num_heads to divide embed_dim, found {num_heads} heads for width {embed_dim}")
        self.num_heads = num_heads
        self.qkv = nn.Linear(embed_dim, 3 * embed_dim, bias=qkv_bias)
        self.proj = nn.Linear(embed_dim, embed_dim)

    def project(self, x_BMD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values of the tokens, each (B, H, M, K)."""
        q_BHMK, k_BHMK, v_BHMK = rearrange(self.qkv(x_BMD), "b m (three h k) -> three b h m k", three=3, h=self.num_heads)
        return q_BHMK, k_BHMK, v_BHMK

    def attend(self, q_BHMK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mass_BN: Tensor | None = None) -> Tensor:
        """Attend from M queries to N keys, a key of mass s like s equal keys; returns (B, M, D)."""
        return self.proj(mix(q_BHMK, k_BHNK, v_BHNK, mass_BN))

    def forward(self, x_BND: Tensor) -> Tensor:
        """Plain self-attention over all tokens."""
        return self.attend(*self.project(x_BND))


def mix(q_BHMK: Tensor, k_BHNK: Tensor, v_BHNK: Tensor, mass_BN: Tensor | None = None) -> Tensor:
    """Mix the values of N keys for M queries; heads side by side, (B, M, D). The logarithm of a key's mass joins its logits."""
    if mass_BN is None:
        y_BHMK = attention(q_BHMK, k_BHNK, v_BHNK)
    else:
        bias_B11N = mass_BN.log().to(q_BHMK.dtype)[:, None, None]
        y_BHMK = F.scaled_dot_product_attention(q_BHMK, k_BHNK, v_BHNK, attn_mask=bias_B11N)
    return rearrange(y_BHMK, "b h m k -> b m (h k)")


def gather_tokens(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """The tokens (B, M, D) that ``index_BM`` names; D may be several axes. As whole rows: 20 times as fast as one by one."""
    return x_BND.flatten(0, 1).index_select(0, _rows(index_BM, x_BND.shape[1])).unflatten(0, index_BM.shape)


def scatter_tokens(x_BND: Tensor, index_BM: Tensor, new_BMD: Tensor) -> Tensor:
    """A copy of the tokens with those named by ``index_BM``, each once, replaced."""
    rows, new = _rows(index_BM, x_BND.shape[1]), new_BMD.to(x_BND.dtype).flatten(0, 1)
    return x_BND.flatten(0, 1).index_copy(0, rows, new).unflatten(0, x_BND.shape[:2])


def add_tokens(x_BND: Tensor, index_BM: Tensor, more_BMD: Tensor) -> Tensor:
    """A copy of the tokens with ``more_BMD`` added to those named by ``index_BM``, which may name one several times."""
    rows = _rows(index_BM, x_BND.shape[1])
    return x_BND.flatten(0, 1).index_add(0, rows, more_BMD.flatten(0, 1)).unflatten(0, x_BND.shape[:2])


def _rows(index_BM: Tensor, tokens: int) -> Tensor:
    """Places of tokens in a batch whose images lie behind each other, (B * M,)."""
    first_B1 = torch.arange(0, len(index_BM) * tokens, tokens, device=index_BM.device)[:, None]
    return (index_BM + first_B1).flatten()
