"""Any-time inference: loops that end when the segmentation has settled, or when the time is up.

It is decided for each batch that goes through the network together: some slices of a case, a window, or a whole volume. Loops
are never computed twice, and what a batch gives is what a run with its number of loops gives. A look at the segmentation costs
a pass of the decoder, as much as two or three loops, so it is taken where the state has settled, if labels are asked about.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

from torch import Tensor

from rdvit.config import InferenceConfig
from rdvit.models.merging import Merging
from rdvit.models.recurrence import LoopRecord
from rdvit.models.segmenter import Halting, Look, Segmenter

Loops = int | Literal["auto"]


class Pace:
    """Decides where the loops of one case end.

    Args:
        config: When a segmentation has settled.
        settle: End a batch that has settled.
        seconds: Time for all batches of the case, from now on; None is no limit.
        decode_rate: Seconds that decoding takes per voxel, as measured before; None where it was not.

    Attributes:
        batches: Batches of the case that have not ended yet; to be set before the first of them.
        taken: Loops that each image, or window, took.
        decode_rate: As measured last.
    """

    def __init__(
        self, config: InferenceConfig, settle: bool = False, seconds: float | None = None, decode_rate: float | None = None
    ) -> None:
        self.config, self.settle, self.decode_rate = config, settle, decode_rate
        self.deadline = None if seconds is None else time.perf_counter() + seconds
        self.batches = 1
        self.taken: list[int] = []

    def __call__(
        self, model: Segmenter, images: Tensor, loops: int, halting: Halting | None, merging: Merging | None
    ) -> tuple[Tensor, LoopRecord]:
        """Segment the next batch; logits and the record of the loop.

        It takes at least one loop and at most so many. Where time is limited, a batch has an equal share of what is left of it,
        and ends when another loop and the decoding would not fit.
        """
        if self.settle or self.deadline is not None:
            look = self._end(model.looks(images, loops, halting, merging), images.numel())
            logits, record = look.logits, look.record
        else:
            logits, record = model(images, loops, halting, merging=merging, return_record=True)
        self.batches -= 1
        self.taken += [record.loops] * len(images)
        return logits, record

    def _end(self, looks: Iterator[Look], voxels: int) -> Look:
        """Go on to where the batch ends, and decode it there."""
        mark = time.perf_counter()
        deadline = None if self.deadline is None else mark + (self.deadline - mark) / self.batches
        labels: Tensor | None = None
        for look in looks:
            residual = float(look.residual_B.max())  # a device works behind the program's back: reading a value waits for it
            loop_seconds = time.perf_counter() - mark
            if self.settle and residual <= self.config.state_residual:
                if self.config.label_change is None:
                    break
                self._decode(look, voxels)
                before, labels = labels, look.logits.argmax(1)
                if before is not None and label_change(before, labels) <= self.config.label_change:
                    break
            if deadline is not None and self._is_last(look, voxels, loop_seconds, deadline):
                break
            mark = time.perf_counter()
        self._decode(look, voxels)
        return look

    def _is_last(self, look: Look, voxels: int, loop_seconds: float, deadline: float) -> bool:
        if self.decode_rate is None:
            self._decode(look, voxels)
        assert self.decode_rate is not None
        return time.perf_counter() + loop_seconds + self.decode_rate * voxels > deadline

    def _decode(self, look: Look, voxels: int) -> None:
        """Make the logits, once, and note how long it takes."""
        if look.decoded:
            return
        start = time.perf_counter()
        float(look.logits.flatten()[0])
        self.decode_rate = (time.perf_counter() - start) / voxels


def label_change(before: Tensor, after: Tensor) -> float:
    """Voxels whose label changed, as a share of those that are foreground before or after; 0 without any."""
    foreground = ((before > 0) | (after > 0)).sum()
    return float((before != after).sum() / foreground.clamp(min=1))
