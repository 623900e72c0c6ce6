"""The training loss: Dice and cross-entropy on the logits, ponder and balance terms on the loop."""

from __future__ import annotations

import torch
from monai.losses import DiceLoss
from torch import Tensor, nn

from rdvit.config import LossConfig
from rdvit.models.recurrence import LoopRecord

PONDER_RAMP = (0.2, 0.4)  # shares of the training between which the ponder weight rises from 0: first learn, then save


class SegmentationLoss(nn.Module):
    """``dice * Dice + cross_entropy * CE + ponder * ramp * mean(n + R) + balance * Switch``.

    Dice is MONAI's over the batch without the background (slices without a structure would otherwise punish each voxel);
    everything in float32. With logits of several stages (deep supervision) both are means over the stages.

    Args:
        config: The weights.
    """

    def __init__(self, config: LossConfig) -> None:
        super().__init__()
        self.config = config
        self.dice = DiceLoss(include_background=False, to_onehot_y=True, softmax=True, batch=True)

    def forward(
        self, logits: Tensor | list[Tensor], labels: Tensor, record: LoopRecord, halts_B: Tensor | None, progress: float
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss and its parts.

        Args:
            logits: (B, classes, *space), or a list of those, one for each stage.
            labels: (B, 1, *space), class indices.
            record: The loop's record of this batch.
            halts_B: 1 for images that halt by ACT; the ponder cost is theirs.
            progress: Share of the training done, for the ponder ramp.
        """
        stages = [stage.float() for stage in (logits if isinstance(logits, list) else [logits])]
        cross_entropy = [nn.functional.cross_entropy(stage, labels[:, 0].long()) for stage in stages]
        parts = {
            "dice": torch.stack([self.dice(stage, labels) for stage in stages]).mean(),
            "cross_entropy": torch.stack(cross_entropy).mean(),
        }
        loss = self.config.dice * parts["dice"] + self.config.cross_entropy * parts["cross_entropy"]
        if record.ponder_BN is not None and halts_B is not None and bool(halts_B.any()):
            parts["ponder"] = (record.ponder_BN.mean(1) * halts_B).sum() / halts_B.sum()
            low, high = PONDER_RAMP
            loss = loss + self.config.ponder * min(max((progress - low) / (high - low), 0.0), 1.0) * parts["ponder"]
        if record.balance is not None:
            parts["balance"] = record.balance
            loss = loss + self.config.balance * parts["balance"]
        return loss, {name: part.detach() for name, part in parts.items()} | {"loss": loss.detach()}


def halting_images(batch_size: int, share: float, generator: torch.Generator) -> Tensor:
    """Which images of a batch halt, (B,) of 0 and 1: a share of them, drawn anew each step.

    The others run all loops and are read from their last state, so that one model is trained for both read-outs and the
    late loops keep learning when ACT stops early.
    """
    count = int(share * batch_size + torch.rand(1, generator=generator).item())
    return (torch.randperm(batch_size, generator=generator) < count).float()
