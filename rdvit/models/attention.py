"""Multi-head self-attention whose keys and values can outlive their tokens.

A token that has halted asks no more questions, but the others may still look at it: its key and value stay as they were
when it halted (systems.md section 5, semantics S2). So queries, keys and values are made apart from the product itself.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn


class Attention(nn.Module):
    """Multi-head attention through PyTorch's fused ``scaled_dot_product_attention``.

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
    bias_B11N = None if mass_BN is None else mass_BN.log().to(q_BHMK.dtype)[:, None, None]
    y_BHMK = F.scaled_dot_product_attention(q_BHMK, k_BHNK, v_BHNK, attn_mask=bias_B11N)
    return rearrange(y_BHMK, "b h m k -> b m (h k)")


def gather_tokens(x_BND: Tensor, index_BM: Tensor) -> Tensor:
    """The tokens (B, M, D) that ``index_BM`` names."""
    return torch.gather(x_BND, 1, index_BM[..., None].expand(-1, -1, x_BND.shape[-1]))


def scatter_tokens(x_BND: Tensor, index_BM: Tensor, new_BMD: Tensor) -> Tensor:
    """A copy of the tokens with those named by ``index_BM`` replaced."""
    return x_BND.scatter(1, index_BM[..., None].expand_as(new_BMD), new_BMD.to(x_BND.dtype))
