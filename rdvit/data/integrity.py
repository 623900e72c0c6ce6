"""Is a data set what a training takes it for? Every case is looked at, and nothing that is wrong with one stops the rest.

Findings have three levels: a *problem* spoils training or scores and has to be mended; a *warning* is repaired or
tolerated by the readers, or only unusual; *info* is worth knowing.
"""

from __future__ import annotations

import hashlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import nibabel as nib
import numpy as np

from rdvit.data.datalist import Case, DataList, load_data
from rdvit.data.volume import Volume, check_same_grid, read_image, read_labels, to_canonical
from rdvit.errors import DataError

SPACING_FACTOR = 2.5  # off the data set's median on any axis; ACDC's pixels stay within 2.2

Level = Literal["problem", "warning", "info"]
_log = logging.getLogger("rdvit")


@dataclass(frozen=True)
class Finding:
    """What was found: its level, its kind in one word or two, the case (or "" for the data set), and the text."""

    level: Level
    kind: str
    case: str
    text: str


@dataclass(frozen=True)
class Integrity:
    """The outcome for a data set: what it holds, and the findings."""

    data: DataList
    findings: tuple[Finding, ...]

    def count(self, level: Level) -> int:
        """Number of findings of a level."""
        return sum(finding.level == level for finding in self.findings)


@dataclass(frozen=True)
class _Seen:
    """What is kept of an image, to compare it with the others."""

    spacing: tuple[float, float, float]  # mm, canonical
    axcodes: str
    digest: str


def check_data(path: str | Path, report: Callable[[str, int, int], None] = lambda text, done, total: None) -> Integrity:
    """Look at every image and label of a data set.

    Args:
        path: As in `load_data`.
        report: Called with text, done and total after each case.

    Raises:
        DataError: There is no data set at all.
    """
    absent: list[str] = []
    data = load_data(path, absent)
    findings = [Finding("problem", "files", "", text) for text in absent]
    seen: dict[str, _Seen] = {}
    for done, case in enumerate(data.cases, start=1):
        found, image = _check_case(case, data.class_names)
        findings += found
        if image is not None:
            seen[case.id] = image
        report(f"checking {case.id}", done, len(data.cases))
    findings += [*_split_findings(data), *_copies(seen), *_unusual_spacing(seen), *_orientations(seen)]
    return Integrity(data, tuple(findings))


def _check_case(case: Case, class_names: dict[int, str]) -> tuple[list[Finding], _Seen | None]:
    """The findings of one case; what the readers warn of is among them."""
    found: list[Finding] = []
    image = None
    with _collected() as messages:
        try:
            image = read_image(case.image)
            if image.array.min() == image.array.max():
                found.append(Finding("problem", "constant", case.id, f"every voxel of {image.path} is {image.array.flat[0]:g}"))
        except DataError as error:
            found.append(Finding("problem", "image", case.id, str(error)))
        if case.label is None:
            found.append(Finding("info", "no label", case.id, "has no reference"))
        else:
            found += _check_label(case.id, case.label, image, class_names)
    found += [Finding("warning", "repaired", case.id, text) for text in messages]
    return found, None if image is None else _look(image)


def _check_label(case: str, path: Path, image: Volume | None, class_names: dict[int, str]) -> list[Finding]:
    try:
        labels = read_labels(path)
    except DataError as error:
        return [Finding("problem", "labels", case, str(error) + _fractions(path))]
    found = []
    if image is not None:
        try:
            check_same_grid(image, labels)
        except DataError as error:
            found.append(Finding("problem", "geometry", case, str(error)))
    values, counts = np.unique(labels.array, return_counts=True)
    unknown = [f"{v} ({n} voxels)" for v, n in zip(values, counts, strict=True) if v != 0 and int(v) not in class_names]
    if unknown:
        text = f"{path} holds values without a class: {', '.join(unknown)}; known are {', '.join(map(str, class_names))}"
        found.append(Finding("problem", "labels", case, text))
    if not labels.array.any():
        found.append(Finding("warning", "empty", case, f"{path} labels nothing"))
        return found
    canonical, _ = to_canonical(labels)
    bare = int(np.count_nonzero(~canonical.array.any(axis=(0, 1))))
    if bare:
        found.append(Finding("info", "bare slices", case, f"{bare} of {canonical.array.shape[2]} slices have no label"))
    return found


def _fractions(path: Path) -> str:
    """How many voxels of a bad label map are no whole numbers, as the end of a message."""
    try:
        array = read_image(path).array
    except DataError:
        return ""
    count = int(np.count_nonzero(np.abs(array - np.rint(array)) > 1e-3))
    return f"; {count} of {array.size} voxels are no whole numbers" if count else ""


def _look(image: Volume) -> _Seen:
    grid = Volume(np.broadcast_to(np.uint8(0), image.array.shape), image.affine)
    content = hashlib.sha256(str(image.array.shape).encode() + image.array.tobytes()).hexdigest()
    return _Seen(to_canonical(grid)[0].spacing, "".join(nib.aff2axcodes(image.affine)), content)


def _split_findings(data: DataList) -> Iterator[Finding]:
    """A patient who trains must not validate."""
    patient_of = {case.id: case.patient for case in data.cases}
    places: dict[str, set[str]] = defaultdict(set)
    for split, ids in data.splits.items():
        for case in set(ids) & patient_of.keys():
            places[patient_of[case]].add(split)
    for patient, splits in sorted(places.items()):
        if len(splits) > 1:
            yield Finding("problem", "splits", "", f"patient {patient} is in {' and in '.join(sorted(splits))}")


def _copies(seen: dict[str, _Seen]) -> Iterator[Finding]:
    """Images that are the same; of two patients in two folds, one would train for the score of the other."""
    alike: dict[str, list[str]] = defaultdict(list)
    for case, image in seen.items():
        alike[image.digest].append(case)
    for cases in alike.values():
        if len(cases) > 1:
            yield Finding("problem", "copies", cases[0], f"the images of {', '.join(cases)} are the same, voxel for voxel")


def _unusual_spacing(seen: dict[str, _Seen]) -> Iterator[Finding]:
    if not seen:
        return
    usual = np.median([image.spacing for image in seen.values()], axis=0)
    for case, image in seen.items():
        if np.abs(np.log(image.spacing / usual)).max() > np.log(SPACING_FACTOR):
            said, median = (" x ".join(f"{size:.3g}" for size in spacing) for spacing in (image.spacing, usual))
            yield Finding("warning", "spacing", case, f"{said} mm, the data set's median is {median} mm")


def _orientations(seen: dict[str, _Seen]) -> Iterator[Finding]:
    counts = Counter(image.axcodes for image in seen.values())
    for axcodes, count in counts.most_common()[1:]:
        first = next(case for case, image in seen.items() if image.axcodes == axcodes)
        usual = counts.most_common(1)[0][0]
        text = f"{count} of {len(seen)} images are stored as {axcodes}, most as {usual}; the first is {first}"
        yield Finding("info", "orientation", first, text)


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


@contextmanager
def _collected() -> Iterator[list[str]]:
    """The package's warnings as a list, instead of on the screen."""
    collector, handlers, propagate = _Collector(), _log.handlers[:], _log.propagate
    _log.handlers[:], _log.propagate = [collector], False
    try:
        yield collector.messages
    finally:
        _log.handlers[:], _log.propagate = handlers, propagate
