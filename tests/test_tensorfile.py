"""A torch file comes back as it was, or is refused: no flipped byte becomes a weight."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from rdvit.errors import DataError, RdvitError
from rdvit.tensorfile import load_tensors, save_tensors


def test_any_flipped_byte_is_seen_or_without_effect(tmp_path: Path) -> None:
    path, rng = tmp_path / "a.pt", random.Random(0)
    weights = torch.arange(64.0)
    save_tensors(path, {"weights": weights, "epoch": 3})
    content = path.read_bytes()
    seen = 0
    for place in rng.sample(range(len(content)), 300):
        path.write_bytes(content[:place] + bytes([content[place] ^ rng.randint(1, 255)]) + content[place + 1 :])
        try:
            loaded = load_tensors(path)
        except DataError:
            seen += 1
            continue
        assert torch.equal(loaded["weights"], weights) and loaded["epoch"] == 3, place  # padding, or a time stamp
    assert seen > 50


def test_a_flipped_bit_of_a_weight_is_seen(tmp_path: Path) -> None:
    """torch alone would load it."""
    path = tmp_path / "a.pt"
    save_tensors(path, {"weights": torch.full((64,), 1.0)})
    content = path.read_bytes()
    place = content.index(torch.full((64,), 1.0).numpy().tobytes()) + 10
    path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
    assert not torch.equal(torch.load(path, weights_only=True)["weights"], torch.full((64,), 1.0))
    with pytest.raises(DataError, match=r"a\.pt: damaged: the checksum of .* is wrong"):
        load_tensors(path)


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.pt").mkdir()
    with pytest.raises(RdvitError, match=r"a\.pt: cannot be written: .*\(try elsewhere\)"):
        save_tensors(tmp_path / "a.pt", {}, hint="try elsewhere")
