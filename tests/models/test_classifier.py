"""Labels of whole images: shapes, what is refused, and that it can learn."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from rdvit.config import ModelConfig
from rdvit.errors import ModelError
from rdvit.models.classifier import Classifier


@pytest.mark.parametrize(("dims", "sizes"), [(2, (24, 17)), (3, (24, 17, 3))])
@pytest.mark.parametrize("halting", ["act", "none"])
def test_one_label_per_image(small_config: Callable[..., ModelConfig], dims: int, sizes: tuple[int, ...], halting: str) -> None:
    model = Classifier(small_config(dims, in_channels=2, out_channels=5, halting=halting)).eval()
    images = torch.randn(3, 2, *sizes)
    logits = model(images)
    assert logits.shape == (3, 5)
    torch.testing.assert_close(model(images[1:2]), logits[1:2], rtol=1e-4, atol=1e-5)  # images do not see each other
    assert model(images, loops=7, halting="none").shape == (3, 5)


def test_wrong_channels(small_config: Callable[..., ModelConfig]) -> None:
    with pytest.raises(ModelError, match=r"4 axes and 1 channels, found \(1, 3, 16, 16\)"):
        Classifier(small_config())(torch.zeros(1, 3, 16, 16))


def test_where_a_spot_lies_can_be_learned(small_config: Callable[..., ModelConfig]) -> None:
    torch.manual_seed(0)
    model = Classifier(small_config(out_channels=2, skips="none", stem="patch", halting="none"))
    images = torch.zeros(16, 1, 16, 16)
    labels = torch.arange(16) % 2
    for i, label in enumerate(labels):
        images[i, 0, i // 2, 3 + 8 * int(label)] = 5
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(60):
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert (model.eval()(images).argmax(1) == labels).all()
