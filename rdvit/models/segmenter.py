"""Encoder and decoder: images of any size in, logits of the same size out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Literal, overload

import torch
import torch.nn.functional as F
from monai.networks.blocks import UnetBasicBlock, UnetOutBlock
from monai.networks.blocks.dynunet_block import get_conv_layer
from torch import Tensor, nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.encoder import RecurrentViT, decoder_strides_and_kernels, level_channels
from rdvit.models.merging import Merging
from rdvit.models.recurrence import LoopRecord
from rdvit.models.sret import SRet

Halting = Literal["act", "none"]


class UpBlock(nn.Module):
    """Transposed convolution, the skip where there is one, two convolutions; MONAI's DynUNet blocks."""

    def __init__(
        self,
        config: ModelConfig,
        channels: tuple[int, int],
        stride: tuple[int, ...],
        kernel: tuple[int, ...],
        skip: bool,
    ) -> None:
        super().__init__()
        coarse, fine = channels
        self.up = get_conv_layer(
            config.spatial_dims, coarse, fine, kernel_size=stride, stride=stride, conv_only=True, is_transposed=True
        )
        norm = (config.norm, {"affine": True})
        self.conv = UnetBasicBlock(
            config.spatial_dims, fine * (2 if skip else 1), fine, kernel_size=kernel, stride=1, norm_name=norm
        )

    def forward(self, x: Tensor, skip: Tensor | None) -> Tensor:
        """Coarse features to the next finer level."""
        x = self.up(x)
        return self.conv(x if skip is None else torch.cat([x, skip], dim=1))


class Decoder(nn.Module):
    """From the token map to logits, level by level, with skips at all levels, from the full resolution only, or none."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        strides, kernels = decoder_strides_and_kernels(config)
        channels = [*level_channels(config), config.embed_dim]
        has_skip = {
            "all": lambda i: config.stem == "conv" or i == 0,
            "image": lambda i: i == 0,
            "none": lambda i: False,
        }
        self.uses_skip = [has_skip[config.skips](i) for i in range(len(strides))]
        self.ups = nn.ModuleList(
            UpBlock(config, (channels[i + 1], channels[i]), strides[i], kernels[i], self.uses_skip[i])
            for i in reversed(range(len(strides)))
        )
        self.out = UnetOutBlock(config.spatial_dims, channels[0], config.out_channels)

    def forward(self, x: Tensor, skips: list[Tensor]) -> Tensor:
        """Logits (B, classes, X, Y[, Z]) from the token map (B, D, *grid) and the stem's skips, full resolution first."""
        for i, up in zip(reversed(range(len(self.ups))), self.ups, strict=True):
            x = up(x, skips[i] if self.uses_skip[i] else None)
        return self.out(x)


@dataclass(eq=False)
class Look:
    """The segmentation of a batch as it is if the loop ends here; made when it is asked for, before the loop goes on.

    Attributes:
        loops: Loops so far.
        residual_B: Relative step size of the last one, of each image.
        make_record: Makes the record.
        decode: Makes logits of a read-out (B, N, D).
    """

    loops: int
    residual_B: Tensor
    make_record: Callable[[], LoopRecord]
    decode: Callable[[Tensor], Tensor]

    @cached_property
    def record(self) -> LoopRecord:
        """The loop's record."""
        return self.make_record()

    @cached_property
    def logits(self) -> Tensor:
        """Logits (B, classes, X, Y[, Z])."""
        return self.decode(self.record.tokens_BND)

    @property
    def decoded(self) -> bool:
        """Whether the logits have been made."""
        return "logits" in self.__dict__


class Segmenter(nn.Module):
    """A recurrent vision transformer with a convolutional decoder.

    Args:
        config: The model's configuration, with a settled ``patch_size``.

    Example:
        >>> model = Segmenter(ModelConfig(patch_size=(8, 8), embed_dim=96))
        >>> model(torch.zeros(1, 1, 50, 61), loops=12).shape
        torch.Size([1, 4, 50, 61])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder: RecurrentViT | SRet = RecurrentViT(config) if config.sret is None else SRet(config)
        self.decoder = Decoder(config)

    @overload
    def forward(
        self,
        images: Tensor,
        loops: int | None = None,
        halting: Halting | Tensor | None = None,
        *,
        merging: Merging | None = None,
    ) -> Tensor: ...

    @overload
    def forward(
        self,
        images: Tensor,
        loops: int | None = None,
        halting: Halting | Tensor | None = None,
        *,
        merging: Merging | None = None,
        return_record: Literal[True],
    ) -> tuple[Tensor, LoopRecord]: ...

    @overload
    def forward(
        self,
        images: Tensor,
        loops: int | None = None,
        halting: Halting | Tensor | None = None,
        *,
        merging: Merging | None = None,
        early: Sequence[int],
    ) -> tuple[list[Tensor], LoopRecord]: ...

    def forward(
        self,
        images: Tensor,
        loops: int | None = None,
        halting: Halting | Tensor | None = None,
        *,
        merging: Merging | None = None,
        return_record: bool = False,
        early: Sequence[int] | None = None,
    ) -> Tensor | tuple[Tensor | list[Tensor], LoopRecord]:
        """Segment a batch.

        Args:
            images: (B, C, X, Y) or (B, C, X, Y, Z), any size; padded to whole patches by repeating the border.
            loops: Number of loops; the trained depth where None.
            halting: ``act``, ``none``, or for each image of the batch 1 to halt and 0 not to; the configured one where None.
            merging: Merge tokens in the loop (evaluation only); the decoder gets all of them.
            return_record: Return the loop's record too; its token grid covers the padded image.
            early: Decode the states after these loops, counted from 1, as well, by the same layers, in one batch: their batch
                norms then see in training what they average for evaluation.

        Returns:
            Logits (B, classes, X, Y[, Z]), or those and the record; with ``early`` a list of logits, those of the read-out
            last, and the record.

        Raises:
            ModelError: If the dimensions or channels are not the model's, or it cannot do what is asked.
        """
        padded, halts_B = self._padded(images), self._halts(halting, images)
        encoding = self.encoder.encode(padded, loops, halts_B, early=early or (), merging=merging)
        token_map, skips, maps = encoding.token_map, encoding.skips, [*encoding.early_maps, encoding.token_map]
        if early:
            token_map, skips = torch.cat(maps), [torch.cat([skip] * len(maps)) for skip in skips]
        logits = crop(self.decoder(token_map, skips), images.shape[2:])
        if early is not None:
            return list(logits.split(len(images))), encoding.record
        return (logits, encoding.record) if return_record else logits

    def looks(
        self, images: Tensor, loops: int, halting: Halting | Tensor | None = None, merging: Merging | None = None
    ) -> Iterator[Look]:
        """Segment a batch with a look after each loop; whoever ends it there has what :meth:`forward` gives at so many loops.

        Args:
            images: As in :meth:`forward`.
            loops: Number of loops if nobody ends them.
            halting: As in :meth:`forward`.
            merging: As in :meth:`forward`, by the schedule ``single``.

        Raises:
            ModelError: If the model cannot do what is asked, or if what its first loops do depends on how many there will be.
        """
        encoder = self.encoder
        if isinstance(encoder, SRet) or self.config.bank is not None:
            raise ModelError(
                f"preset '{self.config.preset}' must know its number of loops beforehand and cannot be ended early",
                hint="a number for --loops, or none, and no --max-seconds",
            )
        if merging is not None and merging.rate and merging.schedule != "single":
            raise ModelError(f"merging schedule '{merging.schedule}' needs a fixed number of loops", hint="schedule single")
        e_BND, skips, grid = encoder.begin(self._padded(images))

        def decode(tokens_BND: Tensor) -> Tensor:
            return crop(self.decoder(encoder.finish(tokens_BND, grid), skips), images.shape[2:])

        loop, halts_B, skip = encoder.recurrence, self._halts(halting, images), not torch.is_grad_enabled()
        for progress in loop.run(e_BND, grid, loops, halts_B, skip=skip, merging=merging):
            yield Look(len(progress.residuals), progress.residuals[-1], partial(loop.record, progress), decode)

    def _padded(self, images: Tensor) -> Tensor:
        expected = self.config.spatial_dims + 2
        if images.ndim != expected or images.shape[1] != self.config.in_channels:
            raise ModelError(
                f"expected images of {expected} axes and {self.config.in_channels} channels, found {tuple(images.shape)}"
            )
        return pad_to_patches(images, self.encoder.patch_size)

    def _halts(self, halting: Halting | Tensor | None, images: Tensor) -> Tensor | None:
        halting = self.config.halting if halting is None else halting
        if isinstance(halting, Tensor):
            return halting.to(images.device, torch.float32)
        return torch.ones(len(images), device=images.device) if halting == "act" else None


def crop(array: Tensor, sizes: tuple[int, ...]) -> Tensor:
    """The first ``sizes`` voxels of the last axes: what undoes :func:`pad_to_patches`."""
    for axis, size in enumerate(sizes, start=array.ndim - len(sizes)):
        array = array.narrow(axis, 0, size)
    return array


def pad_to_patches(images: Tensor, patch_size: tuple[int, ...]) -> Tensor:
    """Images with each axis filled up at its far end to a multiple of the patch, repeating the border."""
    padding = [(-size) % patch for size, patch in zip(images.shape[2:], patch_size, strict=True)]
    if not any(padding):
        return images
    return F.pad(images, [p for pad in reversed(padding) for p in (0, pad)], mode="replicate")
