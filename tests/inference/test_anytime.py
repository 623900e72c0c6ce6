"""Where a loop ends that may end by itself: on looks with known residuals, labels and costs, and on networks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from rdvit.config import InferenceConfig
from rdvit.inference import anytime
from rdvit.inference.anytime import Pace, label_change
from rdvit.models.recurrence import LoopRecord
from rdvit.models.segmenter import Look

VOXELS = 10


class Clock:
    """Time that passes only where it is said to."""

    def __init__(self) -> None:
        self.now = 100.0

    def perf_counter(self) -> float:
        """Seconds."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock that a pace looks at."""
    ours = Clock()
    monkeypatch.setattr(anytime, "time", ours)
    return ours


class Network:
    """Looks that cost a second for a loop and three for decoding.

    Args:
        clock: Is put forward.
        residuals: Of each loop.
        foreground: Foreground voxels after each loop, the first so many of the image.
    """

    def __init__(self, clock: Clock, residuals: Sequence[float] = (), foreground: Sequence[int] = ()) -> None:
        self.clock, self.residuals, self.foreground = clock, residuals, foreground
        self.decoded: list[int] = []

    def looks(self, images: Tensor, loops: int, halting: None, merging: None) -> Iterator[Look]:
        """As a segmenter's; a read-out holds the number of its loop."""
        for t in range(1, loops + 1):
            self.clock.now += 1
            residual = self.residuals[t - 1] if self.residuals else 1.0
            tokens = torch.full((len(images), 1, 1), float(t))
            record = LoopRecord(tokens, t, torch.zeros(t, len(images)))
            yield Look(t, torch.tensor([0.0, residual])[-len(images) :], lambda record=record: record, self.decode)

    def decode(self, tokens: Tensor) -> Tensor:
        """Logits (B, 2, VOXELS) of as much foreground as there is after the loop that the tokens name."""
        self.clock.now += 3
        t = int(tokens.flatten()[0])
        self.decoded.append(t)
        count = self.foreground[t - 1] if self.foreground else 0
        score = (torch.arange(VOXELS) < count).float()
        return torch.stack([1 - score, score]).expand(len(tokens), 2, VOXELS)


def run(network: Any, pace: Pace, loops: int, images: int = 1) -> int:
    """Loops that a batch takes."""
    logits, record = pace(network, torch.zeros(images, VOXELS), loops, None, None)
    assert logits.shape == (images, 2, VOXELS)
    return record.loops


# Settled


def test_label_change_is_relative_to_the_foreground() -> None:
    before, after = torch.zeros(2, 6, 6, dtype=torch.long), torch.zeros(2, 6, 6, dtype=torch.long)
    assert label_change(before, after) == 0  # no foreground, nothing changed
    before[0, :2, :4] = 1
    after[0, 1:3, :4] = 1
    assert label_change(before, after) == pytest.approx(8 / 12)  # of 12 voxels that were or are foreground
    assert label_change(before, torch.where(before == 1, 2, 0)) == 1
    assert label_change(after, after.clone()) == 0


@pytest.mark.parametrize(
    ("residuals", "foreground", "looked_at", "ends_at"),
    [
        ([0.9, 0.5, 0.3, 0.08, 0.05, 0.01], [1, 9, 2, 5, 5, 5], [4, 5], 5),  # looks begin where the state is calm
        ([0.09, 0.09, 0.09, 0.09, 0.09, 0.09], [1, 3, 5, 7, 7, 9], [1, 2, 3, 4, 5], 5),
        ([0.9, 0.08, 0.4, 0.08, 0.4, 0.01], [1, 6, 9, 6, 9, 9], [2, 4], 4),  # the last look counts, not the last loop
        ([0.9, 0.8, 0.7, 0.6, 0.5, 0.4], [5, 5, 5, 5, 5, 5], [6], 6),  # calm labels of a state that moves
        ([0.09, 0.09, 0.09, 0.09, 0.09, 0.09], [1, 2, 3, 4, 5, 6], [1, 2, 3, 4, 5, 6], 6),
    ],
)
def test_a_batch_ends_where_state_and_labels_are_calm(
    clock: Clock, residuals: list[float], foreground: list[int], looked_at: list[int], ends_at: int
) -> None:
    network, pace = (
        Network(clock, residuals, foreground),
        Pace(InferenceConfig(state_residual=0.1, label_change=0.1), settle=True),
    )
    assert run(network, pace, 6) == ends_at
    assert network.decoded == looked_at  # nowhere else, and the result is not decoded a second time
    assert pace.taken == [ends_at]


def test_without_a_label_threshold_the_state_alone_decides(clock: Clock) -> None:
    network = Network(clock, [0.9, 0.4, 0.09, 0.05], [1, 4, 9, 9])
    assert run(network, Pace(InferenceConfig(state_residual=0.1, label_change=None), settle=True), 4) == 3
    assert network.decoded == [3]


def test_the_image_that_moves_most_decides_for_its_batch(clock: Clock) -> None:
    pace = Pace(InferenceConfig(state_residual=0.1, label_change=None), settle=True)
    assert run(Network(clock, [0.9, 0.4, 0.09, 0.05]), pace, 4, images=2) == 3  # the first image has a residual of 0
    assert pace.taken == [3, 3]


# Time


@pytest.mark.parametrize(
    ("seconds", "rate", "loops", "decoded"),
    [
        (10, None, 4, [1, 4]),  # decoding is measured after loop 1, at second 4; the fourth loop ends at 7
        (9.9, None, 3, [1, 3]),
        (10, 3 / VOXELS, 7, [7]),  # measured before
        (4, 3 / VOXELS, 1, [1]),
        (0.5, None, 1, [1]),
        (-3, 3 / VOXELS, 1, [1]),
        (1000, 3 / VOXELS, 12, [12]),
    ],
)
def test_loops_go_on_while_another_and_the_decoding_fit(
    clock: Clock, seconds: float, rate: float | None, loops: int, decoded: list[int]
) -> None:
    network, start = Network(clock), clock.now
    pace = Pace(InferenceConfig(), seconds=seconds, decode_rate=rate)
    assert run(network, pace, 12) == loops
    assert network.decoded == decoded
    assert pace.decode_rate == pytest.approx(3 / VOXELS)
    assert clock.now - start <= max(seconds, 4)


def test_batches_share_the_time(clock: Clock) -> None:
    """What one leaves goes to the others: a second one that settles early gives the third more."""
    start = clock.now
    pace = Pace(InferenceConfig(state_residual=0.1, label_change=None), True, 30, 3 / VOXELS)
    pace.batches = 3
    assert run(Network(clock), pace, 99) == 7  # 10 s
    assert run(Network(clock, [0.5, 0.01]), pace, 99) == 2  # 5 of 10 s
    assert run(Network(clock), pace, 99) == 12  # 15 s
    assert clock.now - start == 30
    assert pace.taken == [7, 2, 12]
