"""Cached cases and endless, reproducible training batches."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, PersistentDataset, set_track_meta
from torch.utils.data import DataLoader, Dataset

from rdvit.config import Config
from rdvit.data.datalist import Case
from rdvit.data.transforms import PrepareCase, training_transform

_log = logging.getLogger("rdvit")


def cached_cases(cases: Sequence[Case], config: Config, class_values: tuple[int, ...], folder: Path) -> Dataset:
    """The prepared cases, each read once: kept in memory, or on disk under ``folder`` where a later run finds them again.

    Says what the cache holds and costs. On disk a case's key covers its files (name, size, time) and the preprocessing.
    """
    set_track_meta(False)  # plain tensors: our own frame leads back, and MetaTensor would triple the time of small transforms
    spacing = config.data.working_spacing
    prepare = PrepareCase(spacing, config.data.clip_percentiles, class_values)
    if config.data.cache == "disk":
        key = json.dumps([spacing, config.data.clip_percentiles, class_values])
        dataset: Dataset = PersistentDataset(
            list(cases),
            prepare,
            folder,
            hash_func=lambda case: _case_key(case, key),
            track_meta=False,
            weights_only=True,
        )
    else:
        dataset = CacheDataset(list(cases), prepare, num_workers=None, progress=False, copy_cache=False)
    megabytes = sum(_nbytes(dataset[i]) for i in range(len(cases))) / 1e6
    place = f"on disk in {folder}" if config.data.cache == "disk" else "in memory"
    _log.info("cached %d cases %s: %.0f MB", len(cases), place, megabytes)
    return dataset


def _nbytes(item: dict[str, Any]) -> int:
    return sum(value.nbytes for value in item.values() if isinstance(value, torch.Tensor))


def _case_key(case: Case, preprocessing: str) -> bytes:
    files = [(str(p), p.stat().st_size, p.stat().st_mtime_ns) for p in (case.image, case.label) if p is not None]
    return hashlib.sha256(json.dumps([files, preprocessing]).encode()).hexdigest().encode()


class TrainingSamples(Dataset):
    """Sample number i of an endless sequence that a seed fixes: which case, which crop, which augmentation.

    Nothing depends on what was drawn before, so that a resumed training, or one with other workers, sees the same samples.
    Each case comes once in every pass over the cases, in a new order.
    """

    def __init__(self, cases: Dataset, config: Config) -> None:
        self.cases, self.seed = cases, config.training.seed
        self.transform = training_transform(config)

    def __len__(self) -> int:
        return len(self.cases)  # type: ignore[arg-type]

    def __getitem__(self, number: int) -> dict[str, Any]:
        """``image`` (C, *crop) float32 and ``label`` (1, *crop) uint8 of sample ``number``, and the case's ``id``."""
        turn, place = divmod(number, len(self))
        case = int(np.random.default_rng([self.seed, turn]).permutation(len(self))[place])
        self.transform.set_random_state(seed=int(np.random.SeedSequence([self.seed, number, 1]).generate_state(1)[0]))
        return self.transform(self.cases[case])


def training_batches(
    samples: TrainingSamples, config: Config, first_step: int, rank: int = 0, world: int = 1
) -> Iterator[dict[str, Any]]:
    """Batches of one epoch, from optimiser step ``first_step`` on; each process of a distributed run takes its share."""
    size, steps = config.training.batch_size, config.training.steps_per_epoch
    numbers = [(step * size + i) * world + rank for step in range(first_step, first_step + steps) for i in range(size)]
    yield from DataLoader(samples, batch_size=size, sampler=numbers, num_workers=config.data.num_workers)
