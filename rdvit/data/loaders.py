"""Cached cases and endless, reproducible training batches."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from monai.data import CacheDataset, set_track_meta
from torch.utils.data import DataLoader, Dataset

from rdvit.config import Config
from rdvit.data.archive import origin
from rdvit.data.datalist import Case
from rdvit.data.transforms import PrepareCase, training_transform
from rdvit.errors import DataError, RdvitError
from rdvit.tensorfile import load_tensors, save_tensors

_log = logging.getLogger("rdvit")
_WORKERS_FAILED = (
    "loading in %d processes failed (%s: %s): this process loads from here on. Is there too little shared memory "
    "(in Docker: --shm-size=1g)? data.num_workers=0 asks for none"
)


def cached_cases(cases: Sequence[Case], config: Config, class_values: tuple[int, ...], folder: Path) -> Dataset:
    """The prepared cases, each read once: kept in memory, or on disk under ``folder`` where a later run finds them again.

    Says what the cache holds and costs. On disk a case's key covers its files (name, size, time) and the preprocessing.
    """
    set_track_meta(False)  # plain tensors: our own frame leads back, and MetaTensor would triple the time of small transforms
    spacing = config.data.working_spacing
    prepare = PrepareCase(spacing, config.data.clip_percentiles, class_values)
    if config.data.cache == "disk":
        key = json.dumps([spacing, config.data.clip_percentiles, class_values])
        dataset: Dataset = DiskCache(cases, prepare, [folder / f"{_case_key(case, key)}.pt" for case in cases])
    else:
        try:
            dataset = CacheDataset(list(cases), prepare, num_workers=None, progress=False, copy_cache=False)
        except RuntimeError as error:  # MONAI's "applying transform PrepareCase" around our own word on the file
            raise error.__cause__ if isinstance(error.__cause__, RdvitError) else error from None
    megabytes = sum(_nbytes(dataset[i]) for i in range(len(cases))) / 1e6
    place = f"on disk in {folder}" if config.data.cache == "disk" else "in memory"
    _log.info("cached %d cases %s: %.0f MB", len(cases), place, megabytes)
    return dataset


def _nbytes(item: dict[str, Any]) -> int:
    return sum(value.nbytes for value in item.values() if isinstance(value, torch.Tensor))


def _case_key(case: Case, preprocessing: str) -> str:
    try:
        files = [(origin(p), p.stat().st_size, p.stat().st_mtime_ns) for p in (case.image, case.label) if p is not None]
    except OSError as error:
        raise DataError(f"a file of case {case.id} cannot be read: {error.strerror}", file=error.filename) from error
    return hashlib.sha256(json.dumps([files, preprocessing]).encode()).hexdigest()


class DiskCache(Dataset):
    """Prepared cases, each in a file of its own; one that is missing or damaged is made anew from its case.

    MONAI's PersistentDataset does the same, but moves its files across disks, so that a kill leaves halves, which it refuses.

    Args:
        cases: The cases.
        prepare: Reads and preprocesses one.
        files: Where each is kept.
    """

    def __init__(self, cases: Sequence[Case], prepare: PrepareCase, files: Sequence[Path]) -> None:
        self.cases, self.prepare, self.files = cases, prepare, files

    def __len__(self) -> int:
        return len(self.cases)

    def __getitem__(self, number: int) -> dict[str, Any]:
        """What ``prepare`` makes of a case."""
        case, file = self.cases[number], self.files[number]
        if file.exists():
            try:
                kept: dict[str, Any] = load_tensors(file)
                return kept
            except DataError as error:
                _log.warning("%s; case %s is read again", error, case.id)
        item = self.prepare(case)
        save_tensors(file, item, hint="data.cache=memory needs no disk")
        return item


class TrainingSamples(Dataset):
    """Sample number i of an endless sequence that a seed fixes: which case, which crop, which augmentation.

    Nothing depends on what was drawn before, so that a resumed training, or one with other workers, sees the same samples.
    Each case comes once in every pass over the cases, in a new order.
    """

    def __init__(self, cases: Dataset, config: Config) -> None:
        self.cases, self.seed, self.num_workers = cases, config.training.seed, config.data.num_workers
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
    """Batches of one epoch, from optimiser step ``first_step`` on; each process of a distributed run takes its share.

    Where worker processes fail, for want of shared memory say, this process loads the rest itself: the samples are the same,
    and an error that is the data's own is raised as such.
    """
    size, steps = config.training.batch_size, config.training.steps_per_epoch
    numbers = [(step * size + i) * world + rank for step in range(first_step, first_step + steps) for i in range(size)]
    loaded = 0
    if samples.num_workers:
        try:
            for batch in DataLoader(samples, batch_size=size, sampler=numbers, num_workers=samples.num_workers):
                loaded += 1
                yield batch
        except Exception as error:
            samples.num_workers = 0
            if not isinstance(error, RdvitError):  # one of those comes again below, without the worker's traceback around it
                reason = str(error).partition("\n")[0]
                _log.warning(_WORKERS_FAILED, config.data.num_workers, type(error).__name__, reason)
    yield from DataLoader(samples, batch_size=size, sampler=numbers[loaded * size :])


@contextmanager
def naming_lost_workers() -> Iterator[None]:
    """Says what to do where a worker process dies while the network computes: torch raises that wherever the main thread is.

    Raises:
        DataError: In the place of torch's RuntimeError.
    """
    try:
        yield
    except RuntimeError as error:
        if "DataLoader worker" not in str(error):
            raise
        reason = str(error).partition("\n")[0]
        hint = "set data.num_workers to 0 in the run's config.yaml, or give it more shared memory, then --resume"
        raise DataError(reason, hint=hint) from error
