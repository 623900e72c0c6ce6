"""The loss is the sum that its docstring writes down, and its gradient reaches what it should teach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rdvit.config import Config, LossConfig
from rdvit.models.build import build_segmenter
from rdvit.models.recurrence import LoopRecord
from rdvit.training.losses import SegmentationLoss, halting_images

CLASSES = 4
ALL_ON = LossConfig(dice=2.0, cross_entropy=3.0, ponder=0.5, balance=0.25)
ALL_HALT, RAMPED = torch.ones(2), 1.0


def batch() -> tuple[Tensor, Tensor]:
    """Logits (2, 4, 8, 8) and labels (2, 1, 8, 8)."""
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(2, CLASSES, 8, 8, generator=generator)
    return logits, torch.randint(CLASSES, (2, 1, 8, 8), generator=generator, dtype=torch.uint8)


def record(ponder_BN: Tensor | None = None, balance: Tensor | None = None) -> LoopRecord:
    return LoopRecord(torch.zeros(2, 4, 8), 2, torch.zeros(2, 2), ponder_BN=ponder_BN, balance=balance)


def ponder_part(progress: float) -> float:
    """What a ponder cost of 1 adds to the loss at weight 1."""
    loss = SegmentationLoss(LossConfig(dice=0, cross_entropy=0, ponder=1, balance=0))
    return float(loss(*batch(), record(torch.ones(2, 4)), ALL_HALT, progress)[0])


def test_parts_are_what_the_formulas_say() -> None:
    logits, labels = batch()
    _, parts = SegmentationLoss(ALL_ON)(logits, labels, record(), None, RAMPED)
    p_BCXY = logits.softmax(1)
    g_BCXY = torch.nn.functional.one_hot(labels[:, 0].long(), CLASSES).movedim(-1, 1).float()
    axes = (0, 2, 3)  # one Dice per structure over the whole batch, none for the background
    dice_C = 2 * (p_BCXY * g_BCXY).sum(axes) / (p_BCXY.sum(axes) + g_BCXY.sum(axes))
    assert float(parts["dice"]) == pytest.approx(1 - float(dice_C[1:].mean()), abs=1e-5)
    entropy = -(g_BCXY * p_BCXY.log()).sum(1).mean()
    assert float(parts["cross_entropy"]) == pytest.approx(float(entropy), abs=1e-5)


def test_a_perfect_segmentation_costs_nothing() -> None:
    _, labels = batch()
    logits = 50.0 * torch.nn.functional.one_hot(labels[:, 0].long(), CLASSES).movedim(-1, 1).float()
    loss, _ = SegmentationLoss(LossConfig())(logits, labels, record(), None, RAMPED)
    assert float(loss) == pytest.approx(0.0, abs=1e-4)


def test_loss_is_the_weighted_sum_of_its_parts() -> None:
    ponder_BN, balance = torch.rand(2, 4), torch.tensor(1.3)
    loss, parts = SegmentationLoss(ALL_ON)(*batch(), record(ponder_BN, balance), ALL_HALT, RAMPED)
    assert parts.keys() == {"dice", "cross_entropy", "ponder", "balance", "loss"}
    expected = 2.0 * parts["dice"] + 3.0 * parts["cross_entropy"] + 0.5 * ponder_BN.mean() + 0.25 * balance
    assert float(loss) == pytest.approx(float(expected), rel=1e-5)
    assert float(parts["loss"]) == float(loss)
    assert not any(part.requires_grad for part in parts.values())


def test_terms_that_a_network_lacks_are_left_out() -> None:
    _, parts = SegmentationLoss(ALL_ON)(*batch(), record(), None, RAMPED)
    assert parts.keys() == {"dice", "cross_entropy", "loss"}


def test_one_stage_is_the_ordinary_loss() -> None:
    """TC-5, bit for bit."""
    logits, labels = batch()
    runs = [SegmentationLoss(ALL_ON)(x, labels, record(torch.ones(2, 4)), ALL_HALT, RAMPED) for x in (logits, [logits])]
    assert torch.equal(runs[0][0], runs[1][0])
    assert runs[0][1] == runs[1][1]


def test_stages_count_alike_and_ponder_once() -> None:
    """Mean of Dice and cross-entropy over the stages, with gradient for each."""
    logits, labels = batch()
    stages = [(scale * logits).detach().requires_grad_() for scale in (0.0, 1.0, 3.0)]
    loss, parts = SegmentationLoss(ALL_ON)(stages, labels, record(torch.ones(2, 4)), ALL_HALT, RAMPED)
    singles = [SegmentationLoss(ALL_ON)(stage, labels, record(torch.ones(2, 4)), ALL_HALT, RAMPED) for stage in stages]
    for name in ("dice", "cross_entropy", "ponder", "loss"):
        expected = torch.stack([single[1][name] for single in singles]).mean()
        torch.testing.assert_close(parts[name], expected)
    loss.backward()
    assert all(stage.grad is not None and stage.grad.abs().sum() > 0 for stage in stages)


def test_ponder_waits_rises_and_stays() -> None:
    assert [ponder_part(progress) for progress in (0.0, 0.1, 0.2)] == [0.0, 0.0, 0.0]
    assert ponder_part(0.3) == pytest.approx(0.5)
    assert [ponder_part(progress) for progress in (0.4, 0.7, 1.0)] == pytest.approx([1.0, 1.0, 1.0])


def test_ponder_counts_the_halting_images_only() -> None:
    ponder_BN = torch.tensor([[2.0, 4.0], [100.0, 100.0]])
    loss = SegmentationLoss(ALL_ON)
    _, parts = loss(*batch(), record(ponder_BN), torch.tensor([1.0, 0.0]), RAMPED)
    assert float(parts["ponder"]) == pytest.approx(3.0)
    _, none = loss(*batch(), record(ponder_BN), torch.zeros(2), RAMPED)
    assert "ponder" not in none and torch.isfinite(none["loss"])  # no division by no image


def test_half_precision_logits_are_summed_in_float32() -> None:
    logits, labels = batch()
    loss, _ = SegmentationLoss(ALL_ON)(logits.bfloat16(), labels, record(), None, RAMPED)
    expected, _ = SegmentationLoss(ALL_ON)(logits.bfloat16().float(), labels, record(), None, RAMPED)
    assert loss.dtype == torch.float32 and float(loss) == float(expected)


@pytest.mark.parametrize(
    ("config", "progress", "learns"),
    [
        (LossConfig(dice=0, cross_entropy=0, ponder=1), 1.0, True),
        (LossConfig(dice=0, cross_entropy=0, ponder=1), 0.1, False),
        (LossConfig(dice=1, cross_entropy=0, ponder=0), 1.0, True),
        (LossConfig(dice=0, cross_entropy=1, ponder=0), 1.0, True),
    ],
    ids=["ponder", "ponder before its ramp", "dice", "cross entropy"],
)
def test_gradient_reaches_the_halting_head(
    tiny_config: Callable[..., Config], config: LossConfig, progress: float, learns: bool
) -> None:
    model = build_segmenter(tiny_config().model, seed=0)
    head = model.encoder.recurrence.halting
    assert head is not None
    logits, loop_record = model(torch.randn(2, 1, 16, 16), 3, torch.tensor([1.0, 0.0]), return_record=True)
    labels = torch.ones(2, 1, 16, 16, dtype=torch.uint8)
    loss, _ = SegmentationLoss(config)(logits, labels, loop_record, torch.tensor([1.0, 0.0]), progress)
    loss.backward()
    gradient = head.proj.bias.grad
    assert gradient is not None
    assert bool(gradient.abs() > 1e-8) == learns


@pytest.mark.parametrize(("size", "share"), [(2, 0.5), (3, 0.5), (4, 0.3), (1, 0.25)])
def test_halting_images_are_the_share_on_average(size: int, share: float) -> None:
    generator = torch.Generator().manual_seed(0)
    draws = torch.stack([halting_images(size, share, generator) for _ in range(2000)])
    counts = draws.sum(1)
    assert draws.shape == (2000, size) and set(draws.unique().tolist()) <= {0.0, 1.0}
    assert float(counts.max() - counts.min()) <= 1  # the two whole numbers around share x size
    assert float(counts.mean()) == pytest.approx(share * size, abs=0.05)
    assert draws.mean(0).tolist() == pytest.approx([share] * size, abs=0.05)  # no image is preferred


def test_halting_images_at_the_ends_and_again() -> None:
    def draw(share: float, seed: int = 0) -> list[float]:
        return halting_images(16, share, torch.Generator().manual_seed(seed)).tolist()

    assert draw(0.0) == [0.0] * 16
    assert draw(1.0) == [1.0] * 16
    assert draw(0.5) == draw(0.5)
    assert draw(0.5) != draw(0.5, seed=1)
