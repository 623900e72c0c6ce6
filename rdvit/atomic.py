"""Files that are either complete or not there: written under a temporary name, then renamed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rdvit.errors import RdvitError

PREFIX = ".tmp-"  # of temporary names: hidden, and found again where a process was killed while it wrote


@contextmanager
def atomic(path: str | Path, keep: Path | None = None) -> Iterator[Path]:
    """A temporary path beside ``path``, with the same suffixes, that takes its place when the block ends well.

    The content is on the disk before the rename; on any error the temporary file goes and an older file stays as it was.

    Args:
        path: The file to write.
        keep: Where an older file at ``path`` is moved at the last moment; it is replaced where not given.

    Example:
        >>> with atomic(folder / "model.json") as temporary:
        ...     temporary.write_text("{}")
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=PREFIX, suffix="".join(path.suffixes[-2:]), dir=path.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with temporary.open("r+b") as written:
            os.fsync(written.fileno())
        temporary.chmod(0o666 & ~_umask())  # mkstemp makes files private; these are ordinary results
        if keep is not None and path.exists():
            path.replace(keep)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def write(path: Path, content: str | bytes | memoryview, *, keep: Path | None = None, hint: str | None = None) -> None:
    """Write a whole file at once, atomically; text as UTF-8.

    Args:
        path: The file.
        content: All of it.
        keep: Where an older file is moved.
        hint: For the error, what the user can do.

    Raises:
        RdvitError: If the disk is full, or the file cannot be written for another reason.
    """
    data = content.encode("utf-8") if isinstance(content, str) else content
    try:
        with atomic(path, keep) as temporary:
            temporary.write_bytes(data)
    except OSError as error:
        raise RdvitError(f"cannot be written: {error.strerror or error}", file=path, hint=hint) from error


def remove_leftovers(folder: Path) -> None:
    """Delete the temporary files that a killed process left in a folder and below; nobody else may be writing there."""
    for leftover in folder.rglob(f"{PREFIX}*"):
        leftover.unlink(missing_ok=True)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
