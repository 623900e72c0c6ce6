"""Data sets in one file: a zip archive is unpacked into a temporary folder, once for a process, which removes it at its end.

Nothing that an archive says is believed. Its names may not lead out of the folder, its sizes together may not pass
``RDVIT_MAX_GB``, and what a member holds beyond the size it states is never written.
"""

from __future__ import annotations

import atexit
import lzma
import os
import shutil
import tempfile
import zipfile
import zlib
from pathlib import Path

from rdvit.data.limits import VARIABLE, limit_gb
from rdvit.errors import DataError

_CHUNK_BYTES = 4096  # zipfile takes so much compressed data at once, and bzip2 makes at most 80 MB of that
# What zipfile raises; RuntimeError where a member is encrypted or its method unknown.
_DAMAGE = (zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, ValueError, RuntimeError)

_folders: dict[tuple[Path, int, int], Path] = {}  # of each archive: path, size and time; so that a new one is seen


def is_archive(path: Path) -> bool:
    """Whether a file is a zip archive, whatever it is called."""
    return zipfile.is_zipfile(path)


def unpack(path: Path) -> Path:
    """The folder with the content of a zip archive, unpacked where this process has not done so.

    All its files have the archive's time of change.

    Raises:
        DataError: It is damaged, encrypted or too large, a name in it leads elsewhere, or there is no room for it.
    """
    state = path.stat()
    key = (path.resolve(), state.st_size, state.st_mtime_ns)
    if key not in _folders:
        try:
            temporary = Path(tempfile.mkdtemp(prefix="rdvit-")).resolve()
            atexit.register(_remove, temporary, os.getpid())
            folder = temporary / path.stem  # some data sets are called like their folder
            with zipfile.ZipFile(path) as archive:
                members = [member for member in archive.infolist() if not member.is_dir()]
                _check(members, path)
                for member in members:
                    target = folder / member.filename
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with archive.open(member) as packed, target.open("xb") as unpacked:
                        shutil.copyfileobj(packed, unpacked, _CHUNK_BYTES)
                    os.utime(target, ns=(state.st_mtime_ns, state.st_mtime_ns))
        except _DAMAGE as error:
            raise DataError(f"cannot be unpacked: {error or type(error).__name__}", file=path) from error
        except OSError as error:
            hint = "it is unpacked into the folder for temporary files, which $TMPDIR names"
            raise DataError(f"cannot be unpacked: {error.strerror or error}", file=path, hint=hint) from error
        _folders[key] = folder
    return _folders[key]


def origin(path: Path) -> str:
    """What a file is called in every process: its path, or its place in the archive that it was unpacked from."""
    for (archive, _, _), folder in _folders.items():
        if path.is_relative_to(folder):
            return str(archive / path.relative_to(folder))
    return str(path)


def _check(members: list[zipfile.ZipInfo], path: Path) -> None:
    for member in members:
        name = member.filename
        if any(part in ("", ".", "..") for part in name.split("/")) or any(c in '\\:"' or not c.isprintable() for c in name):
            raise DataError(f"holds {name!r}, a name that could lead out of its folder", file=path)
    promised, limit = sum(member.file_size for member in members), limit_gb()
    if promised > limit * 1e9:
        message = f"unpacks to {promised / 1e9:.3g} GB; the limit is {limit:g} GB"
        raise DataError(message, file=path, hint=f"{VARIABLE} raises it, for files that you trust")


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork of it
        shutil.rmtree(folder, ignore_errors=True)
