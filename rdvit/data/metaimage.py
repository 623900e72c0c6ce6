"""A look over MetaImage files before ITK reads them, because its MetaIO library trusts what they say.

Found by fuzzing SimpleITK 2.5: a header that says ``NDims = 9999`` writes beyond the arrays of the process, voxels whose
compressed stream ends too early are unpacked for ever, and other faults give several lines on standard error.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

from rdvit.errors import DataError

_HEADER_BYTES = 2**16  # a header is text of a few hundred bytes
_LINE = re.compile(rb"\s*(\w+)\s*=[ \t]*([^\x00]{0,500}?)\s*")
_PER_AXIS = ("DimSize", "Offset", "Position", "Origin", "CenterOfRotation", "ElementSpacing", "ElementSize")
_PER_TWO_AXES = ("TransformMatrix", "Rotation", "Orientation")


def check_meta(path: Path) -> None:
    """Refuse a header that is not plain ``Key = value`` with as many numbers as axes, and compressed voxels that are damaged.

    Raises:
        DataError: With what is wrong.
    """
    with path.open("rb") as stream:
        head = stream.read(_HEADER_BYTES)
    found = re.search(rb"^\s*ElementDataFile\s*=[^\r\n]*\r?\n?", head, re.MULTILINE)
    if found is None:
        raise DataError("cannot be read: no MetaImage header that ends in ElementDataFile", file=path)
    entries: dict[str, str] = {}
    for line in head[: found.end()].splitlines():
        match = _LINE.fullmatch(line)
        if match is None or match[1].decode() in entries:
            raise DataError(f"cannot be read: a line of its header is no single 'Key = value', {line[:40]!r}", file=path)
        entries[match[1].decode()] = match[2].decode(errors="replace")
    _check_numbers(entries, path)
    name = entries["ElementDataFile"]
    is_local = name.upper() == "LOCAL"
    if not is_local and (Path(name).name != name or not (path.parent / name).is_file()):
        message = f"its voxels should be in {name!r}, one file in the same folder, which is not there"
        raise DataError(message, file=path)
    if entries.get("CompressedData", "").upper().startswith("T"):
        voxels, start = (path, found.end()) if is_local else (path.parent / name, 0)
        _check_zlib(voxels, start, entries.get("CompressedDataSize"))


def _check_numbers(entries: dict[str, str], path: Path) -> None:
    """Two to four axes, and lists of numbers of that length."""
    axes = entries.get("NDims", "none")
    if axes not in ("2", "3", "4"):
        raise DataError(f"cannot be read: NDims is {axes[:20]}, 2, 3 or 4 was expected", file=path)
    counts = dict.fromkeys(_PER_AXIS, int(axes)) | dict.fromkeys(_PER_TWO_AXES, int(axes) ** 2)
    for key, count in counts.items():
        if key in entries and len(entries[key].split()) != count:
            raise DataError(f"cannot be read: {key} is {entries[key][:40]!r}, {count} numbers were expected", file=path)
    if not all(size.isdecimal() and int(size) > 0 for size in entries.get("DimSize", "none").split()):
        raise DataError(f"cannot be read: DimSize is {entries.get('DimSize', 'missing')[:40]!r}", file=path)


def _check_zlib(path: Path, start: int, stated: str | None) -> None:
    """The stream must be whole and as long as stated; it is unpacked piece by piece and nothing of it is kept."""
    stream = path.read_bytes()[start:]
    if stated is not None and stated != str(len(stream)):
        raise DataError(f"its voxels cannot be read: {stated[:20]} compressed bytes stated, {len(stream)} found", file=path)
    unpack = zlib.decompressobj(32 + zlib.MAX_WBITS)  # zlib or gzip
    try:
        while not unpack.eof and (unpack.decompress(stream, _HEADER_BYTES) or unpack.unconsumed_tail):
            stream = unpack.unconsumed_tail
    except zlib.error as error:
        raise DataError(f"its voxels cannot be read: {error}", file=path) from error
    if not unpack.eof:
        raise DataError("its voxels cannot be read: the compressed data end too early", file=path)
