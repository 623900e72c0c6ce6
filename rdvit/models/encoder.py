"""Image in, tokens out: stem, positions, prelude blocks, the loop, coda blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from monai.networks.blocks import Convolution
from torch import Tensor, nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.bank import ExpertBank
from rdvit.models.block import Block, layer_norm
from rdvit.models.depth import DepthLoRA
from rdvit.models.merging import Merging
from rdvit.models.readout import HaltingHead, SoftReadout
from rdvit.models.recurrence import LoopRecord, Recurrence


def strides_and_kernels(patch_size: tuple[int, ...]) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """Strides from level to level and 3- or 1-wide kernels at each level of the pyramid that ends in tokens.

    There are ``log2(max(patch_size))`` steps. An axis with a smaller patch is strided in the last steps only, and is not
    convolved at the fine levels: there its voxels are much thicker than the others (ACDC: 1.5 x 1.5 x 10 mm, patch
    8 x 8 x 1). It gets a kernel of 3 once the level's stride comes within a factor of 2 of the proportion of the patch.

    Returns:
        Strides of the steps, and kernels of the levels 0 (full resolution) .. tokens: one more than steps.
    """
    steps = max(patch_size).bit_length() - 1
    strides = [tuple(2 if p >> (steps - i) else 1 for p in patch_size) for i in range(steps)]
    kernels = [tuple(3 if 2 ** (i + 1) * p >= max(patch_size) else 1 for p in patch_size) for i in range(steps + 1)]
    return strides, kernels


def split_patch(config: ModelConfig) -> tuple[tuple[int, ...], list[tuple[int, ...]]]:
    """The patch as what the stem strides, and the strides from stage to stage after it (SReT; otherwise none)."""
    assert config.patch_size != "auto"
    if config.sret is None:
        return config.patch_size, []
    pools = strides_and_kernels(config.patch_size)[0][1 - len(config.sret.blocks) :]
    return tuple(p // math.prod(s) for p, s in zip(config.patch_size, zip(*pools, strict=True), strict=True)), pools


def level_channels(config: ModelConfig) -> list[int]:
    """Channels of the levels 0 .. last before the tokens; SReT's stages before its last are levels, too."""
    patch, pools = split_patch(config)
    steps = max(patch).bit_length() - 1
    return [config.stem_channels * 2**i for i in range(steps)] + [config.embed_dim // 2**i for i in range(len(pools), 0, -1)]


def decoder_strides_and_kernels(config: ModelConfig) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]]]:
    """:func:`strides_and_kernels` down to the last tokens; below the stem's end kernels are as there."""
    patch, pools = split_patch(config)
    strides, kernels = strides_and_kernels(patch)
    return strides + pools, kernels + kernels[-1:] * len(pools)


class ConvStem(nn.Module):
    """Convolutional stem: a small pyramid whose levels are the decoder's skips and whose end are the tokens."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.patch_size != "auto"
        strides, kernels = strides_and_kernels(config.patch_size)
        channels = level_channels(config)
        dims = config.spatial_dims
        self.levels = nn.ModuleList()
        previous = config.in_channels
        for i, width in enumerate(channels):
            stride = strides[i - 1] if i else 1
            layers = [conv_layer(config, previous, width, kernels[i], stride)]
            if i:
                layers.append(conv_layer(config, width, width, kernels[i], 1))
            self.levels.append(nn.Sequential(*layers))
            previous = width
        last = {} if not strides else {"strides": strides[-1]}
        self.to_tokens = Convolution(dims, previous, config.embed_dim, kernel_size=kernels[-1], conv_only=True, **last)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Token map (B, D, *grid) and one skip per level, full resolution first."""
        skips, x = [], images
        for level in self.levels:
            x = level(x)
            skips.append(x)
        return self.to_tokens(x), skips


class PatchStem(nn.Module):
    """Plain patch embedding; its one skip is a convolution of the image itself."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        assert config.patch_size != "auto"
        self.to_tokens = Convolution(
            config.spatial_dims,
            config.in_channels,
            config.embed_dim,
            kernel_size=config.patch_size,
            strides=config.patch_size,
            padding=0,
            conv_only=True,
        )
        kernel = strides_and_kernels(config.patch_size)[1][0]
        self.image = conv_layer(config, config.in_channels, config.stem_channels, kernel, 1) if config.skips != "none" else None

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Token map (B, D, *grid) and the full-resolution skip."""
        return self.to_tokens(images), [] if self.image is None else [self.image(images)]


def conv_layer(
    config: ModelConfig, in_channels: int, out_channels: int, kernel: tuple[int, ...], stride: tuple[int, ...] | int
) -> nn.Module:
    """MONAI convolution, norm, activation."""
    norm = (config.norm, {"affine": True})
    act = ("leakyrelu", {"inplace": True, "negative_slope": 0.01})
    return Convolution(
        config.spatial_dims,
        in_channels,
        out_channels,
        strides=stride,
        kernel_size=kernel,
        norm=norm,
        act=act,
        adn_ordering="NA",
        bias=False,
    )


def sincos_position(grid: tuple[int, ...], embed_dim: int, device: torch.device | None = None) -> Tensor:
    """Fixed sine and cosine position embedding (N, D), computed for any grid, centred on its middle.

    Each axis gets a third of the channels, as sines and cosines with wavelengths from 2 pi to 10000 tokens; what does not
    divide evenly stays zero, and so does the third axis at depth 1, which makes 2D and 3D agree there.
    """
    pairs = embed_dim // 6
    frequency = 10000.0 ** (-torch.arange(pairs, device=device, dtype=torch.float32) / pairs)
    axes = [torch.arange(size, device=device, dtype=torch.float32) - (size - 1) / 2 for size in grid]
    coordinates = torch.meshgrid(*axes, indexing="ij")
    angles_AND = torch.stack([c.flatten()[:, None] * frequency for c in coordinates])
    parts = [part for angles_ND in angles_AND for part in (angles_ND.sin(), angles_ND.cos())]
    if len(grid) == 3:
        parts[-1] = parts[-1] - 1
    position_ND = torch.cat(parts, dim=1)
    return nn.functional.pad(position_ND, (0, embed_dim - position_ND.shape[1]))


def embed(token_map: Tensor, norm: nn.LayerNorm, config: ModelConfig) -> Tensor:
    """Tokens (B, N, D) from a stem's map (B, D, *grid): normed, with the configured position."""
    x_BND = norm(token_map.flatten(2).transpose(1, 2).to(norm.weight.dtype))
    if config.position == "sincos":
        grid = tuple(token_map.shape[2:])
        x_BND = x_BND + sincos_position(grid, x_BND.shape[-1], x_BND.device).to(x_BND.dtype)
    return x_BND


@dataclass
class Encoding:
    """Encoder output.

    Attributes:
        token_map: What the decoder reads, (B, D, *grid).
        skips: The stem's levels, full resolution first.
        grid: Token grid.
        record: The loop's record.
        early_maps: Token maps of the earlier states that were asked for, made as the last one is.
    """

    token_map: Tensor
    skips: list[Tensor]
    grid: tuple[int, ...]
    record: LoopRecord
    early_maps: list[Tensor]


class RecurrentViT(nn.Module):
    """The encoder; called like MONAI's ``ViT`` it returns ``(tokens, hidden_states)`` and fits into MONAI's ``UNETR``.

    Args:
        config: The model's configuration, with a settled ``patch_size``.

    Example:
        >>> config = ModelConfig(patch_size=(16, 16), stem="patch", loops=12, embed_dim=96)
        >>> tokens, states = RecurrentViT(config)(torch.zeros(1, 1, 64, 64))
        >>> tokens.shape, len(states)
        (torch.Size([1, 16, 96]), 12)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        if config.patch_size == "auto":
            raise ModelError("patch_size 'auto' must be settled from the data before a model is built")
        self.config = config
        self.patch_size = config.patch_size
        self.stem = ConvStem(config) if config.stem == "conv" else PatchStem(config)
        self.embed_norm = layer_norm(config.embed_dim)
        self.prelude = nn.ModuleList(Block(config) for _ in range(config.prelude_depth))
        self.recurrence = Recurrence(config)
        self.coda = nn.ModuleList(Block(config) for _ in range(config.coda_depth))
        self.norm = layer_norm(config.embed_dim)
        self.apply(init_weights)

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
            loops: Number of loops; the trained depth where None.
            halts_B: See :meth:`Recurrence.forward`.
            keep_states: Keep all states in the record.
            early: After which loops, counted from 1, the state is wanted as a token map too; the last one where all tokens
                had halted before.
            merging: Merge tokens in the loop; prelude and coda see all of them.

        Raises:
            ModelError: If an axis is not a multiple of the patch.
        """
        e_BND, skips, grid = self.begin(images)
        loops = self.config.loops if loops is None else loops
        keep_states = keep_states or bool(early)
        skip = not torch.is_grad_enabled()
        record = self.recurrence(e_BND, grid, loops, halts_B, skip=skip, keep_states=keep_states, merging=merging)
        early_maps = [self.finish(record.states[min(t, record.loops) - 1], grid) for t in early] if record.states else []
        return Encoding(self.finish(record.tokens_BND, grid), skips, grid, record, early_maps)

    def begin(self, images: Tensor) -> tuple[Tensor, list[Tensor], tuple[int, ...]]:
        """What comes before the loop: the encoded input (B, N, D), the stem's skips, the token grid.

        Raises:
            ModelError: If an axis is not a multiple of the patch.
        """
        sizes = tuple(images.shape[2:])
        if len(sizes) != len(self.patch_size) or any(s % p for s, p in zip(sizes, self.patch_size, strict=True)):
            raise ModelError(f"expected image sizes that are multiples of the patch {self.patch_size}, found {sizes}")
        grid = tuple(s // p for s, p in zip(sizes, self.patch_size, strict=True))
        token_map, skips = self.stem(images)
        e_BND = embed(token_map, self.embed_norm, self.config)
        for block in self.prelude:
            e_BND = block(e_BND, grid)[0]
        return e_BND, skips, grid

    def finish(self, h_BND: Tensor, grid: tuple[int, ...]) -> Tensor:
        """Token map (B, D, *grid) of a state or read-out: coda, norm."""
        for block in self.coda:
            h_BND = block(h_BND, grid)[0]
        return self.norm(h_BND).transpose(1, 2).unflatten(2, grid)

    def forward(self, images: Tensor) -> tuple[Tensor, list[Tensor]]:
        """MONAI's ``ViT`` call: final tokens (B, N, D) and the state after each loop, at the trained depth without halting."""
        encoding = self.encode(images, keep_states=True)
        states = encoding.record.states
        assert states is not None
        return encoding.token_map.flatten(2).transpose(1, 2), states


def init_weights(module: nn.Module) -> None:
    """Small normal weights without bias for linears; the parts that start otherwise do so themselves."""
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        if module.bias is not None:
            nn.init.zeros_(module.bias)
    if isinstance(module, DepthLoRA | HaltingHead | SoftReadout | ExpertBank):  # after their own linears: starts of their own
        module.reset_parameters()
