"""Data sets as lists of cases: what is there, which patients train and which are held out.

Three layouts are understood: an ACDC folder, an nnU-Net or Decathlon folder, and a JSON data list as MONAI uses it.
A folder may also come as one zip archive.
Every split is by patient, because two frames of one heart share their anatomy, and stratified by pathology group.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from rdvit.data import acdc
from rdvit.data.archive import is_archive, unpack
from rdvit.data.volume import read_labels
from rdvit.errors import DataError

SEED = 2018  # of every split; fixed here so that "fold0-val" means the same patients everywhere
FOLDS = 5

NAME_RULE = "cannot hold a slash, a backslash or a control character, or nothing but dots"

_FOLD_NAME = re.compile(r"fold(\d+)-(train|val)")
_IMAGE = re.compile(r"(.+)\.(?:nii(?:\.gz)?|nrrd|nhdr|mha|mhd)", re.IGNORECASE)
_CASE_KEYS = ("id", "patient", "group", "phase", "image", "label")
_log = logging.getLogger("rdvit")


@dataclass(frozen=True)
class Case:
    """One image to segment, and what is known about it.

    Attributes:
        id: Unique in its data set; names the outputs, as in "patient001_ED".
        patient: Whose image it is; cases of one patient never part in a split.
        image: Its file.
        label: A file on the image's grid, None where there is no reference.
        group: Pathology group for stratified splits.
        phase: "ED" or "ES" for cardiac cine, from which ejection fractions are made.
    """

    id: str
    patient: str
    image: Path
    label: Path | None
    group: str | None = None
    phase: str | None = None


@dataclass(frozen=True)
class DataList:
    """A data set.

    Attributes:
        name: For messages and records.
        root: Its folder or archive, or the folder of its list.
        cases: All cases, in a fixed order.
        class_names: Label value to class name, without the background.
        splits: Named splits of a JSON list, name to case ids; empty otherwise.
    """

    name: str
    root: Path
    cases: tuple[Case, ...]
    class_names: dict[int, str]
    splits: dict[str, tuple[str, ...]] = field(default_factory=dict)


def is_plain_name(name: str) -> bool:
    """Whether a name from a file may become a part of a path: `NAME_RULE`."""
    return bool(name.strip(" .")) and not re.search(r"[/\\\x00-\x1f\x7f]", name)


def load_data(path: str | Path, problems: list[str] | None = None) -> DataList:
    """Find out which of the layouts a path has, and list its cases.

    Args:
        path: An ACDC folder (with training/, or training/ or testing/ itself), a folder with imagesTr/ and labelsTr/,
            a zip archive with the content of one of these, or a .json file.
        problems: Where given, what is wrong with single cases is noted here, and they are left out, instead of raised.

    Raises:
        DataError: There is no such layout, or images, labels or classes are missing or contradict each other.
    """
    path = Path(path)
    if path.is_file():
        if is_archive(path):
            return replace(load_data(unpack(path), problems), root=path)
        if path.suffix.lower() != ".json":
            raise DataError("expected a data set folder, a zip archive of one, or a .json data list", file=path)
        return _load_json(path, problems)
    if not path.is_dir():
        raise DataError("no such folder or file", file=path)
    if acdc.find_patients(path):
        cases = tuple(
            Case(f"{frame.patient}_{frame.phase}", frame.patient, frame.image, frame.label, frame.group, frame.phase)
            for frame in acdc.find_frames(path, problems)
        )
        return DataList("ACDC", path, cases, dict(acdc.CLASS_NAMES))
    if (path / "imagesTr").is_dir():
        return _load_nnunet(path, problems)
    there = sorted(entry.name for entry in path.iterdir())
    raise DataError(
        "no data set found: looked for patient folders with Info.cfg (ACDC), here and in training/ or testing/, "
        f"and for imagesTr/ and labelsTr/ (nnU-Net, Decathlon); the folder holds {_some(there) or 'nothing'}",
        file=path,
    )


def select(data: DataList, split: str = "all", fraction: float = 1.0) -> list[Case]:
    """The cases of a split, or of a part of it.

    Args:
        data: The data set.
        split: "all", "fold0-train" to "fold4-val", or a name from the JSON list.
        fraction: Share of the split's patients, in (0, 1]: whole patients, stratified by group and nested, so that 10 %
            lie inside 25 %.

    Returns:
        Cases in the order of the data set.

    Raises:
        DataError: Unknown split, with the names that exist; or a fraction outside (0, 1].
    """
    if not 0 < fraction <= 1:
        raise DataError(f"fraction must lie in (0, 1], got {fraction:g}")
    cases = _split(data, split)
    if fraction < 1:
        order = _stratified_order(_by_group(cases))
        kept = set(order[: max(1, round(fraction * len(order)))])
        cases = [case for case in cases if case.patient in kept]
    return cases


def folds(data: DataList, k: int = FOLDS) -> list[list[str]]:
    """Deal the patients into k disjoint folds, the same on every machine.

    Patients are shuffled inside their group and dealt like cards, one group after the other, so that fold sizes differ
    by at most one, in total and in each group.

    Returns:
        k sorted lists of patients; fold i is what "foldI-val" holds out.

    Raises:
        DataError: There are fewer patients than folds.
    """
    total = len(patients(data.cases))
    if total < k:
        raise DataError(f"{k} folds need at least {k} patients, {data.name} has {total}", file=data.root)
    dealt = [patient for members in _by_group(data.cases).values() for patient in members]
    return [sorted(dealt[start::k]) for start in range(k)]


def patients(cases: Iterable[Case]) -> list[str]:
    """The patients of some cases, each once, sorted."""
    return sorted({case.patient for case in cases})


def digest(cases: Iterable[Case]) -> str:
    """Fingerprint of a selection: SHA-256 over ids, file names and file sizes, not over contents or folders.

    Returns:
        64 hexadecimal digits, the same wherever the same files lie and in whatever order they are listed.
    """
    lines = []
    for case in cases:
        files = [path for path in (case.image, case.label) if path is not None]
        lines.append(json.dumps([case.id, *((path.name, path.stat().st_size) for path in files)]))
    return hashlib.sha256("\n".join(sorted(lines)).encode()).hexdigest()


def _split(data: DataList, split: str) -> list[Case]:
    if split == "all":
        return list(data.cases)
    if split in data.splits:
        chosen = set(data.splits[split])
        return [case for case in data.cases if case.id in chosen]
    match = _FOLD_NAME.fullmatch(split)
    if match is None or int(match[1]) >= FOLDS:
        names = ["all", *data.splits, f"fold0-train to fold{FOLDS - 1}-train", f"fold0-val to fold{FOLDS - 1}-val"]
        raise DataError(f"{data.name} has no split {split!r}", hint=f"there are {', '.join(names)}")
    held_out = set(folds(data)[int(match[1])])
    return [case for case in data.cases if (case.patient in held_out) == (match[2] == "val")]


def _by_group(cases: Iterable[Case]) -> dict[str, list[str]]:
    """Patients of each group, groups sorted by name, patients in their group's seeded order."""
    members: dict[str, set[str]] = defaultdict(set)
    group_of: dict[str, str] = {}
    for case in cases:  # a patient's first case decides, should its cases name different groups
        members[group_of.setdefault(case.patient, case.group or "")].add(case.patient)
    shuffled = {}
    for group in sorted(members):
        # crc32 instead of hash(), which Python salts anew in every process
        order = np.random.default_rng([SEED, zlib.crc32(group.encode())]).permutation(len(members[group]))
        names = sorted(members[group])
        shuffled[group] = [names[i] for i in order]
    return shuffled


def _stratified_order(by_group: dict[str, list[str]]) -> list[str]:
    """One order of all patients of which every beginning holds the groups in their proportions."""
    turn = np.random.default_rng(SEED).permutation(len(by_group))
    places = [
        ((i + 0.5) / len(members), int(turn[g]), patient)
        for g, members in enumerate(by_group.values())
        for i, patient in enumerate(members)
    ]
    return [patient for _, _, patient in sorted(places)]


def _load_nnunet(root: Path, problems: list[str] | None) -> DataList:
    """imagesTr/ and labelsTr/: Decathlon names both files alike, nnU-Net ends images on the channel, _0000."""
    images, labels = _image_files(root / "imagesTr"), _image_files(root / "labelsTr")
    for stem in sorted(images.keys() - labels.keys()):
        case_id, channel = stem[:-5], stem[-5:]
        if case_id not in labels or not re.fullmatch(r"_\d{4}", channel):
            continue
        if channel != "_0000" or case_id in images:
            raise DataError(f"{stem} is a second image of case {case_id}, one with one channel is expected", file=root)
        images[case_id] = images.pop(stem)
    if not images:
        raise DataError("holds no .nii, .nii.gz, .nrrd, .nhdr, .mha or .mhd images", file=root / "imagesTr")
    if unmatched := sorted(images.keys() - labels.keys()):
        _note(DataError(f"{len(unmatched)} images have no label in labelsTr: {_some(unmatched)}", file=root), problems)
    if unmatched := sorted(labels.keys() - images.keys()):
        _note(DataError(f"{len(unmatched)} labels have no image in imagesTr: {_some(unmatched)}", file=root), problems)
    cases = tuple(Case(stem, stem, images[stem], labels[stem]) for stem in sorted(images.keys() & labels.keys()))
    description = root / "dataset.json"
    content = _read_json(description) if description.is_file() else {}
    names = _class_names(content["labels"], description) if "labels" in content else _scan_classes(cases, root, problems)
    return DataList(_data_name(content, root.resolve().name, description), root, cases, names)


def _load_json(path: Path, problems: list[str] | None) -> DataList:
    """{"labels": {...}, "training": [{"image": ..., "label": ...}, ...], "validation": [...], ...}."""
    content = _read_json(path)
    cases: dict[str, Case] = {}
    splits: dict[str, tuple[str, ...]] = {}
    for name, items in content.items():
        if not (isinstance(items, list) and any(isinstance(item, dict) and "image" in item for item in items)):
            continue  # Decathlon's "test" is a list of bare names, "modality" no list at all
        if name == "all" or _FOLD_NAME.fullmatch(name):
            raise DataError(f"a list cannot be called {name!r}, that name is built in", file=path)
        listed = [_json_case(item, path) for item in items]
        for case in listed:
            if cases.setdefault(case.id, case) != case:
                raise DataError(f"two different cases are called {case.id!r}", file=path, hint='give each an "id"')
        splits[name] = tuple(case.id for case in listed)
    if not cases:
        keys = _some(sorted(content))
        raise DataError(f'expected a list of {{"image", "label"}} entries, found only the keys {keys}', file=path)
    files = [file for case in cases.values() for file in (case.image, case.label) if file is not None]
    if missing := [str(file) for file in files if not file.is_file()]:
        _note(DataError(f"{len(missing)} of {len(files)} listed files are missing: {_some(missing)}", file=path), problems)
    found = tuple(case for case in cases.values() if not {str(case.image), str(case.label)} & set(missing))
    names = _class_names(content["labels"], path) if "labels" in content else _scan_classes(found, path, problems)
    return DataList(_data_name(content, path.stem, path), path.parent, found, names, splits)


def _json_case(item: object, path: Path) -> Case:
    """One entry; relative paths start at the list's folder."""
    entry = item if isinstance(item, dict) else {}
    texts = {key: entry[key] for key in _CASE_KEYS if entry.get(key) is not None}
    if "image" not in texts:
        raise DataError(f'expected an entry with an "image", found {item!r}', file=path)
    if wrong := [key for key, text in texts.items() if not isinstance(text, str)]:
        raise DataError(f'"{wrong[0]}" must be a text, got {texts[wrong[0]]!r}', file=path)
    if texts.get("phase") not in (None, "ED", "ES"):
        raise DataError(f'"phase" must be "ED" or "ES", got {texts["phase"]!r}', file=path)
    image = path.parent / texts["image"]
    match = _IMAGE.fullmatch(image.name)
    case_id = texts.get("id") or (match[1] if match else image.stem)
    if not is_plain_name(case_id):
        raise DataError(f"an id becomes a file name and {NAME_RULE}, got {case_id!r}", file=path)
    label = path.parent / texts["label"] if "label" in texts else None
    return Case(case_id, texts.get("patient") or case_id, image, label, texts.get("group"), texts.get("phase"))


def _data_name(content: dict[str, Any], otherwise: str, path: Path) -> str:
    """What a data set calls itself; runs are named after it."""
    name = str(content.get("name") or otherwise)
    if "name" in content and not is_plain_name(name):
        raise DataError(f'its "name" becomes a folder name and {NAME_RULE}, got {name!r}', file=path)
    return name


def _image_files(folder: Path) -> dict[str, Path]:
    """Images of a folder by name without suffix; hidden ones, such as macOS's ._ twins, are passed over."""
    if not folder.is_dir():
        raise DataError("no such folder", file=folder)
    files: dict[str, Path] = {}
    for path in sorted(folder.iterdir()):
        match = None if path.name.startswith(".") else _IMAGE.fullmatch(path.name)
        if match and files.setdefault(match[1], path) != path:
            raise DataError(f"{files[match[1]].name} and {path.name} are two files of one case", file=folder)
    return files


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot be read as JSON: {error}", file=path) from error
    if not isinstance(content, dict):
        raise DataError(f"expected a JSON object, found a {type(content).__name__}", file=path)
    return content


def _class_names(entries: object, path: Path) -> dict[int, str]:
    """Label value to name, from {"1": name} (Decathlon) or {name: 1} (nnU-Net); the background, 0, is left out."""
    if not isinstance(entries, dict) or not entries:
        raise DataError(f'"labels" must map label values and class names, got {entries!r}', file=path)
    pairs = entries.items() if all(key.isdecimal() for key in entries) else [(v, k) for k, v in entries.items()]
    names: dict[int, str] = {}
    for value, name in pairs:
        if not str(value).isdecimal() or not isinstance(name, str):
            raise DataError(f'"labels" pairs {name!r} with {value!r}, a name and one whole number expected', file=path)
        if names.setdefault(int(value), name) != name:
            raise DataError(f'"labels" calls {int(value)} both {names[int(value)]!r} and {name!r}', file=path)
        if not is_plain_name(name):
            raise DataError(f"the name of a class {NAME_RULE}, got {name!r}", file=path)
    if len(set(names.values())) < len(names):
        raise DataError(f'"labels" gives two values one name: {names}', file=path)
    return {value: names[value] for value in sorted(names) if value != 0}


def _scan_classes(cases: Iterable[Case], path: Path, problems: list[str] | None) -> dict[int, str]:
    """Class names made up from the label values that occur."""
    values: set[int] = set()
    for case in cases:
        try:
            values.update([] if case.label is None else np.unique(read_labels(case.label).array).tolist())
        except DataError:
            if problems is None:
                raise  # otherwise whoever looks at the case finds it again
    names = {value: f"label_{value}" for value in sorted(values - {0})}
    _log.warning("%s: no class names given, the label files hold %s", path, _some(list(names.values())) or "none")
    return names


def _note(error: DataError, problems: list[str] | None) -> None:
    """Raise an error, or note it where problems are collected."""
    if problems is None:
        raise error
    problems.append(str(error))


def _some(names: list[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
