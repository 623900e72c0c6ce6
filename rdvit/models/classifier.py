"""Image and volume labels: the encoder, the mean over its tokens, one linear layer."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.encoder import RecurrentViT
from rdvit.models.segmenter import Halting, pad_to_patches


class Classifier(nn.Module):
    """A recurrent vision transformer that gives one of ``out_channels`` classes to a whole image or volume.

    Args:
        config: The model's configuration, with a settled ``patch_size`` and ``skips`` none: nothing reads them.

    Example:
        >>> model = Classifier(ModelConfig(patch_size=(2, 2), stem="patch", skips="none", out_channels=10, halting="none"))
        >>> model(torch.zeros(3, 1, 8, 8), loops=12).shape
        torch.Size([3, 10])
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = RecurrentViT(config)
        self.head = nn.Linear(config.embed_dim, config.out_channels)
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor, loops: int | None = None, halting: Halting | None = None) -> Tensor:
        """Logits (B, classes) of a batch.

        Args:
            images: (B, C, X, Y) or (B, C, X, Y, Z), any size; padded to whole patches by repeating the border.
            loops: Number of loops; the trained depth where None.
            halting: ``act`` or ``none``; the configured one where None.

        Raises:
            ModelError: If the dimensions or channels are not the model's.
        """
        expected = self.config.spatial_dims + 2
        if images.ndim != expected or images.shape[1] != self.config.in_channels:
            raise ModelError(
                f"expected images of {expected} axes and {self.config.in_channels} channels, found {tuple(images.shape)}"
            )
        halts = (self.config.halting if halting is None else halting) == "act"
        halts_B = torch.ones(len(images), device=images.device) if halts else None
        encoding = self.encoder.encode(pad_to_patches(images, self.encoder.patch_size), loops, halts_B)
        return self.head(encoding.token_map.flatten(2).mean(-1))
