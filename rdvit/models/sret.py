"""SReT, the sliced recursive transformer (Shen et al., arXiv:2111.05297; systems.md section 12), as a segmentation encoder.

A pyramid of three stages. In a stage each block runs twice (recursion: shared weights), with a non-linear projection layer
of its own after every pass, and attention inside slices of the token sequence; on the later passes the tokens are shuffled
first, so that slices mix. Every residual branch and every identity has a learnable scale. Between stages a depth-wise
convolution halves the grid and doubles the width. The stages are the deep levels of the decoder's pyramid, the stem's
convolutions the fine ones.

What differs from the paper: computed positions instead of a learned map, so that any image size goes in; and in evaluation
the shuffle is the same each time (the paper's code draws a new one, and its predictions with it).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from einops import rearrange
from monai.networks.blocks import MLPBlock
from monai.networks.layers import DropPath
from torch import Tensor, nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.attention import Attention, mix
from rdvit.models.block import layer_norm
from rdvit.models.encoder import ConvStem, Encoding, embed, init_weights, split_patch
from rdvit.models.merging import Merging, TokenMerger
from rdvit.models.recurrence import LoopRecord, relative_step


def sliced_attention(
    attn: Attention,
    x_BND: Tensor,
    slices: int,
    order_N: Tensor | None = None,
    mass_BN: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Self-attention inside contiguous slices of the sequence, or of the shuffled sequence.

    Args:
        attn: Projections.
        x_BND: Tokens.
        slices: Number of slices g; 1 is full attention.
        order_N: Shuffles before the slicing; its inverse comes before the output projection.
        mass_BN: Masses of merged tokens, shuffled alike.

    Returns:
        Output (B, N, D) and keys (B, H, N, K), both in the order of ``x_BND``.

    Raises:
        ModelError: If g does not divide N.
    """
    tokens = x_BND.shape[1]
    if tokens % slices:
        raise ModelError(f"expected a number of tokens that {slices} slices divide, found {tokens}")
    q, k, v = attn.project(x_BND)
    parts = [x_BHNK if order_N is None else x_BHNK[:, :, order_N] for x_BHNK in (q, k, v)]
    parts = [rearrange(part, "b h (g n) k -> (b g) h n k", g=slices) for part in parts]
    if mass_BN is not None:
        mass_BN = mass_BN if order_N is None else mass_BN[:, order_N]
        mass_BN = rearrange(mass_BN, "b (g n) -> (b g) n", g=slices)
    y_BND = rearrange(mix(parts[0], parts[1], parts[2], mass_BN), "(b g) n d -> b (g n) d", g=slices)
    return attn.proj(y_BND if order_N is None else y_BND[:, order_N.argsort()]), k


class Scales(nn.Module):
    """Learnable scalars of a residual: ``c1 x + c2 branch``; both start at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.identity = nn.Parameter(torch.ones(()))
        self.branch = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, branch: Tensor) -> Tensor:
        """The scaled sum."""
        return self.identity * x + self.branch * branch


class SlicedBlock(nn.Module):
    """Sliced attention and a feed-forward, both with scaled residuals and, in training, dropped paths.

    Args:
        dim: Token width D.
        heads: Number of heads.
        config: The model's configuration.
        drop_path: Probability that a sample skips a branch.
    """

    def __init__(self, dim: int, heads: int, config: ModelConfig, drop_path: float) -> None:
        super().__init__()
        self.attn_norm, self.ffn_norm = layer_norm(dim), layer_norm(dim)
        self.attn = Attention(dim, heads, qkv_bias=True)
        self.ffn = MLPBlock(dim, round(dim * config.mlp_ratio), config.dropout)
        self.attn_scales, self.ffn_scales = Scales(), Scales()
        self.drop_path = DropPath(drop_path)

    def forward(self, x_BND: Tensor, slices: int, order_N: Tensor | None, step: int, merger: TokenMerger | None) -> Tensor:
        """One pass; tokens merge between attention and feed-forward where ``merger`` has it so."""
        mass_BN = None if merger is None else merger.mass_BM
        y_BND, k_BHNK = sliced_attention(self.attn, self.attn_norm(x_BND), slices, order_N, mass_BN)
        x_BND = self.attn_scales(x_BND, self.drop_path(y_BND))
        groups = None if merger is None else merger.after_attention(k_BHNK, step)
        del y_BND, k_BHNK  # k is a view of q, k and v together; the feed-forward needs the most memory as it is
        if groups is not None:
            x_BND = groups.merge(x_BND)
        return self.ffn_scales(x_BND, self.drop_path(self.ffn(self.ffn_norm(x_BND))))


class NonLinearProjection(nn.Module):
    """The layer between two passes, never shared: ``c1 x + c2 MLP(norm x)``."""

    def __init__(self, dim: int, ratio: float) -> None:
        super().__init__()
        self.norm, self.ffn, self.scales = layer_norm(dim), MLPBlock(dim, round(dim * ratio)), Scales()

    def forward(self, x_BND: Tensor) -> Tensor:
        """Tokens in, tokens out."""
        return self.scales(x_BND, self.ffn(self.norm(x_BND)))


class Stage(nn.Module):
    """Blocks that run several times each, on the tokens of one grid.

    Args:
        config: The model's configuration.
        number: Which stage, from 0.
        dim: Token width D of the stage.
        drop_paths: Of each block.
    """

    def __init__(self, config: ModelConfig, number: int, dim: int, drop_paths: Sequence[float]) -> None:
        super().__init__()
        assert config.sret is not None
        heads = max(1, config.num_heads * dim // config.embed_dim)
        self.passes, self.slices, self.seed = config.loops, config.sret.slices[number], config.sret.seed
        self.blocks = nn.ModuleList(SlicedBlock(dim, heads, config, rate) for rate in drop_paths)
        steps = len(self.blocks) * self.passes
        self.projections = nn.ModuleList(NonLinearProjection(dim, config.sret.projection_ratio) for _ in range(steps))

    def forward(self, x_BND: Tensor, merging: Merging | None) -> tuple[Tensor, list[Tensor], int]:
        """Tokens after the stage, (B, N, D), the relative step size (B,) of each pass, and how many tokens had merged away."""
        steps, merger = len(self.projections), None
        if merging is not None and merging.rate:
            merger = TokenMerger(merging, x_BND.shape[1], steps, math.lcm(*self.slices))
        residuals = []
        for step, project in enumerate(self.projections):
            before_BND, later = x_BND, step % self.passes > 0
            slices = self.slices[1 if later else 0]
            order_N = self._order(x_BND, step) if later and slices > 1 else None
            x_BND = project(self.blocks[step // self.passes](x_BND, slices, order_N, step, merger))
            before_BND, mass_BN = (before_BND, None) if merger is None else (merger.align(before_BND), merger.mass_BM)
            residuals.append(relative_step(before_BND, x_BND, mass_BN))
        return (x_BND, residuals, 0) if merger is None else (merger.unmerge(x_BND), residuals, merger.merged)

    def _order(self, x_BND: Tensor, step: int) -> Tensor:
        """A shuffle of the tokens: a fresh one in training, in evaluation the one that the seed and the pass give."""
        generator = None if self.training else torch.Generator().manual_seed(self.seed + step)
        return torch.randperm(x_BND.shape[1], generator=generator).to(x_BND.device)


class Pool(nn.Module):
    """Depth-wise convolution from stage to stage: half the grid where ``stride`` is 2, twice the width.

    In 3D separable, in the plane and then along the slices, and in float32 under autocast, as the local mixing is.
    """

    def __init__(self, dim: int, stride: tuple[int, ...]) -> None:
        super().__init__()
        (x, y), through = stride[:2], stride[2:]
        kernel = (2 * x - 1, 2 * y - 1)
        self.plane = nn.Conv2d(dim, 2 * dim, kernel, (x, y), (x - 1, y - 1), groups=dim)
        strided = bool(through) and through[0] > 1
        self.through = nn.Conv1d(2 * dim, 2 * dim, 3, 2, 1, groups=2 * dim) if strided else None

    def forward(self, x_BND: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Tokens on ``grid`` to those of the next stage."""
        depth = grid[2] if len(grid) == 3 else 1
        planes = rearrange(x_BND, "b (x y z) d -> (b z) d x y", x=grid[0], y=grid[1], z=depth)
        with torch.autocast(x_BND.device.type, enabled=False):
            planes = self.plane(planes.to(self.plane.weight.dtype))
            x, y = planes.shape[2:]
            if self.through is None:
                return rearrange(planes, "(b z) d x y -> b (x y z) d", z=depth)
            lines = self.through(rearrange(planes, "(b z) d x y -> (b x y) d z", z=depth))
            return rearrange(lines, "(b x y) d z -> b (x y z) d", x=x, y=y)


class SRet(nn.Module):
    """The encoder: stem, three stages with pooling in between; :meth:`encode` is that of :class:`RecurrentViT`.

    ``patch_size`` is the stride of the last stage's tokens. Images are whole multiples of it, which makes every stage's
    number of tokens divide into its slices, whatever the image.

    Args:
        config: The model's configuration with its ``sret`` section, and a settled ``patch_size``.

    Raises:
        ModelError: If the slices of a stage need not divide its tokens.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.patch_size == "auto" or config.sret is None:
            raise ModelError("expected a settled patch_size and the section model.sret before a model is built")
        self.config, self.patch_size = config, config.patch_size
        blocks = config.sret.blocks
        self.stem_patch, self.pool_strides = split_patch(config)
        self._check_slices()
        dims = [config.embed_dim // 2**i for i in reversed(range(len(blocks)))]
        self.stem = ConvStem(config.model_copy(update={"sret": None, "patch_size": self.stem_patch, "embed_dim": dims[0]}))
        self.embed_norm = layer_norm(dims[0])
        rates = iter(torch.linspace(0, config.sret.drop_path, sum(blocks)).tolist())
        self.stages = nn.ModuleList(
            Stage(config, i, dim, [next(rates) for _ in range(n)]) for i, (dim, n) in enumerate(zip(dims, blocks, strict=True))
        )
        self.norms = nn.ModuleList(layer_norm(dim) for dim in dims)
        self.pools = nn.ModuleList(Pool(dim, stride) for dim, stride in zip(dims, self.pool_strides, strict=False))
        self.apply(init_weights)

    def _check_slices(self) -> None:
        assert self.config.sret is not None
        for i, slices in enumerate(self.config.sret.slices):
            sure = math.prod(math.prod(stride) for stride in self.pool_strides[i:])
            if sure % math.lcm(*slices):
                raise ModelError(
                    f"stage {i + 1} of sret has a multiple of {sure} tokens, which its slices {slices} must divide",
                    hint=f"fewer slices, or a larger patch_size than {self.patch_size}",
                )

    def encode(
        self,
        images: Tensor,
        loops: int | None = None,
        halts_B: Tensor | None = None,
        keep_states: bool = False,
        early: Sequence[int] = (),
        merging: Merging | None = None,
    ) -> Encoding:
        """Encode images whose sizes are multiples of the patch.

        Args:
            images: (B, C, X, Y) or (B, C, X, Y, Z).
            loops: Passes of each block; only the trained number has projections.
            halts_B: Must be None: nothing halts here.
            keep_states: Keep the last stage's tokens as the only state.
            early: Must be empty: the tokens before the end are those of finer grids.
            merging: Merge tokens in every stage; its steps are the passes of the stage's blocks.

        Returns:
            The last stage's tokens as token map; the stem's levels and the earlier stages as skips.

        Raises:
            ModelError: If something is asked that the system does not have.
        """
        self._check(loops, halts_B, early, merging)
        grid = tuple(s // p for s, p in zip(images.shape[2:], self.stem_patch, strict=True))
        token_map, skips = self.stem(images)
        x_BND = embed(token_map, self.embed_norm, self.config)
        residuals: list[Tensor] = []
        tokens = merged = 0
        for i, stage in enumerate(self.stages):
            if i:
                x_BND = self.pools[i - 1](x_BND, grid)
                grid = tuple(n // s for n, s in zip(grid, self.pool_strides[i - 1], strict=True))
            x_BND, moved, gone = stage(x_BND, merging)
            residuals, tokens, merged = residuals + moved, tokens + x_BND.shape[1], merged + gone
            skips.append(self.norms[i](x_BND).transpose(1, 2).unflatten(2, grid))
        tokens_BND = skips[-1].flatten(2).transpose(1, 2)
        states = [tokens_BND] if keep_states else None
        record = LoopRecord(tokens_BND, self.config.loops, torch.stack(residuals), states, merged=merged / tokens)
        return Encoding(skips.pop(), skips, grid, record, [])

    def _check(self, loops: int | None, halts_B: Tensor | None, early: Sequence[int], merging: Merging | None) -> None:
        trained = self.config.loops
        if loops not in (None, trained):
            raise ModelError(
                f"preset 'sret' runs each block {trained} times, with projections of their own in between: "
                f"{loops} loops are not possible",
                hint=f"--loops {trained}, or none",
            )
        if halts_B is not None:
            raise ModelError("halting 'act' was asked for, but preset 'sret' has no halting head", hint="halting none")
        if early:
            raise ModelError("preset 'sret' has one read-out, after its last stage", hint="training.supervision final")
        if self.training and merging is not None and merging.rate:
            raise ModelError("tokens are merged after training, not in it", hint="model.eval()")
