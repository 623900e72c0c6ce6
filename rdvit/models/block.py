"""The transformer block: local mixing, attention, feed-forward; pre-norm, residual inside."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from rdvit.config import ModelConfig
from rdvit.models.attention import Attention, gather_tokens, scatter_tokens
from rdvit.models.bank import ExpertBank
from rdvit.models.experts import Experts, Routing
from rdvit.models.feedforward import FeedForward, hidden_width
from rdvit.models.merging import Groups, TokenMerger


def layer_norm(embed_dim: int) -> nn.LayerNorm:
    """Token norm without bias. LayerNorm, not RMSNorm: the same bound on the block's input, and on CPUs four times as fast."""
    return nn.LayerNorm(embed_dim, eps=1e-6, bias=False)


class KeysValues(NamedTuple):
    """Keys and values (B, H, N, K) of all tokens, halted ones as they were when they halted."""

    k_BHNK: Tensor
    v_BHNK: Tensor


class Selection(NamedTuple):
    """Which tokens a loop computes.

    ``halted_BN`` marks tokens that keep their state. With ``index_BM`` only the named tokens are computed (all active ones,
    rows padded with halted ones, whose result is dropped); without it all are computed and the halted ones masked.
    """

    halted_BN: Tensor
    index_BM: Tensor | None

    def gather(self, x: Tensor) -> Tensor:
        """The computed tokens (B, M, D) of (B, N, D)."""
        return x if self.index_BM is None else gather_tokens(x, self.index_BM)

    def write(self, old: Tensor, new: Tensor) -> Tensor:
        """``old`` (B, N, D) with the active tokens taken from ``new`` (B, M, D), or (B, N, D) where all were computed."""
        if self.index_BM is None:
            return self.freeze(old, new)
        return scatter_tokens(old, self.index_BM, torch.where(self.padding_BM[..., None], self.gather(old), new))

    def freeze(self, old: Tensor, new: Tensor) -> Tensor:
        """The active tokens of ``new``, the halted ones of ``old``, both (B, N, D)."""
        return torch.where(self.halted_BN[..., None], old, new)

    @property
    def padding_BM(self) -> Tensor:
        """Which of the computed tokens had halted and only fill a row."""
        return self.halted_BN if self.index_BM is None else self.halted_BN.gather(1, self.index_BM)


class LocalMixing(nn.Module):
    """Depth-wise convolution over the token grid, so that each loop widens what a token knows of its neighbourhood.

    In 3D it is separable: in the plane, then along the slices, starting as the identity there. PyTorch's depth-wise Conv3d
    takes 80 times as long backwards on a CPU as the planes together. In float32 under any autocast: the weight gradient in
    bfloat16 is five times slower.

    Args:
        embed_dim: Token width D.
        kernel_size: Odd size per axis, two or three of them.
    """

    def __init__(self, embed_dim: int, kernel_size: tuple[int, ...]) -> None:
        super().__init__()
        (x, y), through = kernel_size[:2], kernel_size[2:]
        self.plane = nn.Conv2d(embed_dim, embed_dim, (x, y), padding=(x // 2, y // 2), groups=embed_dim)
        self.through_KD: nn.Parameter | None = None
        if through:
            taps_KD = torch.zeros(through[0], embed_dim)
            taps_KD[through[0] // 2] = 1
            self.through_KD = nn.Parameter(taps_KD)

    def forward(self, x_BND: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Mix tokens that lie on ``grid`` (in C order); (B, N, D) in and out."""
        depth = grid[2] if len(grid) == 3 else 1
        planes = rearrange(x_BND, "b (x y z) d -> (b z) d x y", x=grid[0], y=grid[1], z=depth)
        with torch.autocast(x_BND.device.type, enabled=False):
            planes = self.plane(_channels_last(planes.to(self.plane.weight.dtype)))
            if self.through_KD is None:
                return rearrange(planes, "b d x y -> b (x y) d").to(x_BND.dtype)
            lines = _channels_last(rearrange(planes, "(b z) d x y -> b d (x y) z", z=depth))
            size, width = self.through_KD.shape
            taps = self.through_KD.T.reshape(width, 1, 1, size)
            lines = F.conv2d(lines, taps, padding=(0, size // 2), groups=width)
            return rearrange(lines, "b d xy z -> b (xy z) d").to(x_BND.dtype)


def _channels_last(x: Tensor) -> Tensor:
    """Depth-wise convolutions of other layouts take five times as long on a CPU."""
    return x.contiguous(memory_format=torch.channels_last)


class Block(nn.Module):
    """Pre-norm block ``x + local(norm x)``, ``x + attention(norm x)``, ``x + feed-forward(norm x)``.

    The local convolution is computed over the whole grid (it is cheap and reads the frozen states of halted neighbours);
    attention and feed-forward only for the tokens of the selection.

    Args:
        config: The model's configuration.
        experts: Whether the feed-forward is the configured mixture of experts or bank; dense otherwise.
    """

    def __init__(self, config: ModelConfig, experts: bool = False) -> None:
        super().__init__()
        dim = config.embed_dim
        self.local = LocalMixing(dim, config.local_kernel) if config.local_kernel else None
        self.local_norm = layer_norm(dim) if config.local_kernel else None
        self.kv_pool = config.kv_pool
        self.attn_norm = layer_norm(dim)
        self.attn = Attention(dim, config.num_heads)
        self.ffn_norm = layer_norm(dim)
        self.dropout = nn.Dropout(config.dropout)
        self.ffn: FeedForward | Experts | ExpertBank
        if experts and config.experts is not None:
            ex = config.experts
            self.ffn = Experts(dim, ex.num_experts, ex.top_k, ex.hidden_dim, ex.num_shared)
        elif experts and config.bank is not None:
            self.ffn = ExpertBank(dim, hidden_width(dim, config.mlp_ratio), config.bank)
        else:
            self.ffn = FeedForward(dim, hidden_width(dim, config.mlp_ratio))

    def forward(
        self,
        x_BND: Tensor,
        grid: tuple[int, ...],
        selection: Selection | None = None,
        memory: KeysValues | None = None,
        t: int = 0,
        loops: int = 1,
        merger: TokenMerger | None = None,
    ) -> tuple[Tensor, KeysValues, Routing | None]:
        """One pass over the tokens.

        Args:
            x_BND: Block input; frozen for halted tokens.
            grid: Token grid, in C order.
            selection: Which tokens are computed; all where None.
            memory: Keys and values of the loop before, needed with a selection.
            t: Which loop this is, for a bank.
            loops: How many loops there are, for a bank.
            merger: Merges tokens after the attention; what has merged is on the grid again for the local mixing only.

        Returns:
            The output (B, N, D), or (B, M, D) for an indexed selection, the keys and values to carry on, and the routing
            of a mixture of experts.
        """
        if torch.is_autocast_enabled(x_BND.device.type):  # the state stays in float32, a block's inside need not
            x_BND = x_BND.to(torch.get_autocast_dtype(x_BND.device.type))
        if self.local is not None and self.local_norm is not None:
            x_BND = x_BND + self._mix_locally(self.local_norm(x_BND), grid, None if merger is None else merger.groups)
        x_BMD = x_BND if selection is None else selection.gather(x_BND)
        q, k, v = self.attn.project(self.attn_norm(x_BMD))
        if selection is not None and memory is not None:
            k, v = _remember(selection, memory.k_BHNK, k), _remember(selection, memory.v_BHNK, v)
        seen_k, seen_v, mass_BM = self._seen(k, v, grid, merger)
        x_BMD = x_BMD + self.dropout(self.attn.attend(q, seen_k, seen_v, mass_BM))
        groups = None if merger is None else merger.after_attention(k, t)
        if groups is not None:
            x_BMD, k, v = groups.merge(x_BMD), _of_heads(groups.merge, k), _of_heads(groups.merge, v)
        y_BMD, routing = self.ffn_norm(x_BMD), None
        if isinstance(self.ffn, ExpertBank):
            y_BMD = self.ffn(y_BMD, t, loops)
        elif isinstance(self.ffn, Experts):
            y_BMD, routing = self.ffn(y_BMD)
        else:
            y_BMD = self.ffn(y_BMD)
        return x_BMD + self.dropout(y_BMD), KeysValues(k, v), routing

    def _seen(
        self, k_BHNK: Tensor, v_BHNK: Tensor, grid: tuple[int, ...], merger: TokenMerger | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Keys and values as the queries see them, and the keys' masses: pooled over the grid where that is configured.

        Pooled after the halted tokens' own are put in, so that skipping these tokens and masking them stay the same.
        """
        if self.kv_pool is None:
            return k_BHNK, v_BHNK, None if merger is None else merger.mass_BM
        if merger is not None and merger.groups is not None:
            k_BHNK, v_BHNK = (_of_heads(merger.groups.unmerge, x) for x in (k_BHNK, v_BHNK))
        return pool_tokens(k_BHNK, grid, self.kv_pool), pool_tokens(v_BHNK, grid, self.kv_pool), None

    def _mix_locally(self, x_BMD: Tensor, grid: tuple[int, ...], groups: Groups | None) -> Tensor:
        """Local mixing; merged tokens go to the grid for it and get the mean of what their places get."""
        assert self.local is not None
        return self.local(x_BMD, grid) if groups is None else groups.merge(self.local(groups.unmerge(x_BMD), grid))


def pool_tokens(x_BHNK: Tensor, grid: tuple[int, ...], sizes: tuple[int, ...]) -> Tensor:
    """Means (B, H, M, K) over cells of ``sizes`` tokens of the grid; the last cell of an axis may hold fewer."""
    x = x_BHNK.unflatten(2, grid)
    for axis, size in enumerate(sizes, start=2):
        whole = x.shape[axis] // size * size
        rest = x.narrow(axis, whole, x.shape[axis] - whole)
        x = x.narrow(axis, 0, whole).unflatten(axis, (-1, size)).mean(axis + 1) if size > 1 else x
        x = torch.cat([x, rest.mean(axis, keepdim=True)], axis) if rest.shape[axis] else x
    return x.flatten(2, -2)


def _of_heads(change: Callable[[Tensor], Tensor], x_BHNK: Tensor) -> Tensor:
    """Keys or values, changed as tokens are: merged, or on the whole grid again."""
    tokens = change(rearrange(x_BHNK, "b h n k -> b n (h k)"))
    return rearrange(tokens, "b n (h k) -> b h n k", h=x_BHNK.shape[1])


def _remember(selection: Selection, old_BHNK: Tensor, new_BHMK: Tensor) -> Tensor:
    """Keys or values with halted tokens as they were."""
    if selection.index_BM is None:
        return torch.where(selection.halted_BN[:, None, :, None], old_BHNK, new_BHMK)
    old_BNHK, new_BMHK = old_BHNK.transpose(1, 2), new_BHMK.transpose(1, 2)
    padding = selection.padding_BM[..., None, None]
    new_BMHK = torch.where(padding, gather_tokens(old_BNHK, selection.index_BM), new_BMHK.to(old_BHNK.dtype))
    return scatter_tokens(old_BNHK, selection.index_BM, new_BMHK).transpose(1, 2)
