"""Batches that can be stopped at any moment and continued: the files of a case appear together, with a record of how.

The files of a case are written into a hidden folder, ``.NAME.partial``, and moved out of it when all are complete: the record
``NAME_result.json`` first, which lists the others. So a case is finished if and only if its record and all files that the
record lists are there; whatever moment a process was killed in, the next one can tell, and clean up.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rdvit.atomic import atomic
from rdvit.data.files import companions
from rdvit.errors import DataError
from rdvit.evaluation.summary import to_json

RECORD = "result.json"


def named(target: Path, end: str) -> Path:
    """The result of a case that ends so: ``out/scan`` and ``seg.nii.gz`` give ``out/scan_seg.nii.gz``."""
    return target.with_name(f"{target.name}_{end}")


def digest(files: Iterable[Path]) -> str:
    """SHA-256 of the names and contents of files.

    Raises:
        DataError: If one cannot be read.
    """
    total = hashlib.sha256()
    for file in files:
        content = hashlib.sha256()
        try:
            with file.open("rb") as stream:
                while block := stream.read(2**20):
                    content.update(block)
        except FileNotFoundError:
            raise DataError("no such file", file=file) from None
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", file=file) from error
        total.update(file.name.encode(errors="surrogateescape") + b"\0" + content.digest())
    return total.hexdigest()


def finished(target: Path, file: Path, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The record of a case that is done, from the same input with the same settings; None if there is work to do.

    Args:
        target: Folder and name of the case.
        file: The input, a file or a DICOM folder.
        settings: Model and options, whatever else decides the result; plain values.

    Raises:
        DataError: The case has a record, and its results were made from or with something else.
    """
    record = _read(target)
    if record is None:
        return None
    before, now = record["made_with"], made_with(file, settings)
    if different := [key for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)]:
        raise DataError(
            f"these results exist already and were made with a different {', '.join(different)}",
            file=named(target, RECORD),
            hint="--overwrite replaces them, another --out keeps both",
        )
    return record if all(path.exists() for path in listed(target)) else None


def made_with(file: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and input, as a record holds them."""
    return json.loads(to_json({**settings, "input": digest(companions(file))}))


def listed(target: Path) -> list[Path]:
    """The files that the record of a case lists, there or not, the record among them; none without a record."""
    record = _read(target)
    return [] if record is None else [target.with_name(name) for name in record["files"]]


def clear(target: Path, ends: Iterable[str]) -> None:
    """Remove the files that the record of a case lists, and those with the given ends; the record last, so that a process
    that is killed meanwhile leaves nothing that looks like someone else's."""
    record = named(target, RECORD)
    for path in {*listed(target), *(named(target, end) for end in ends)} - {record}:
        path.unlink(missing_ok=True)
    if ends or _read(target) is not None:
        record.unlink(missing_ok=True)


@contextmanager
def staged(target: Path) -> Iterator[Path]:
    """Folder and name for the files of a case; when the block ends well they take their places, the record first.

    Example:
        >>> with staged(out / "scan") as stage:
        ...     write_labels(named(stage, "seg.nii.gz"), labels_XYZ, image, names)
        ...     write_record(stage, result, made_with(file, settings))

    Raises:
        DataError: A file of one of the names is there already, or the files cannot be written.
    """
    folder = target.with_name(f".{target.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)  # of a process that was killed
    try:
        folder.mkdir()
        yield folder / target.name
        files = sorted(folder.iterdir(), key=lambda file: file.name != named(target, RECORD).name)
        if existing := [target.with_name(file.name) for file in files if target.with_name(file.name).exists()]:
            raise DataError("exists already", file=existing[0], hint="--overwrite replaces it")
        for file in files:
            file.replace(target.with_name(file.name))
    except OSError as error:
        raise DataError(f"results cannot be written: {error.strerror or error}", file=target.parent) from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_record(stage: Path, result: Mapping[str, Any], made_with: Mapping[str, Any]) -> None:
    """Note what was done with what, beside the staged files of a case; the last of them to be written."""
    files = sorted(file.name for file in stage.parent.iterdir())
    with atomic(named(stage, RECORD)) as path:
        content = {**result, "made_with": made_with, "files": [*files, named(stage, RECORD).name]}
        path.write_text(to_json(content), encoding="utf-8")


def _read(target: Path) -> dict[str, Any] | None:
    """The record of a case; None where there is none, or a file of its name that is something else."""
    try:
        record = json.loads(named(target, RECORD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(record, dict) or not isinstance(record.get("made_with"), dict):
        return None
    files = record.get("files")
    # Files that a record lists may be replaced: a name that is not this case's own is no record of ours.
    own = isinstance(files, list) and all(isinstance(n, str) and _is_own(n, target) for n in files)
    return record if own else None


def _is_own(name: str, target: Path) -> bool:
    return name.startswith(f"{target.name}_") and not {"/", "\\"} & set(name)
