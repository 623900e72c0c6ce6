"""One process at a time: SQLite's own lock is portable, and ends with its process, however that ends."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rdvit.errors import ConfigError

LOCK = "run.lock"


@contextlib.contextmanager
def locked(file: Path, timeout: float) -> Iterator[None]:
    """Lock a file, an empty one that is made for it, until the block ends.

    Args:
        file: The file; it stays.
        timeout: Seconds to wait for another process.

    Raises:
        sqlite3.OperationalError: If another process holds it still, or the file cannot be opened.
    """
    with contextlib.closing(sqlite3.connect(file, timeout=timeout)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        yield


@contextlib.contextmanager
def sole_training(folder: Path) -> Iterator[None]:
    """Holds a run's folder against other processes.

    The lock's file goes with it, or stays after a kill and hinders nobody. Of several processes of one training the first
    holds it.

    Raises:
        ConfigError: If another process trains there.
    """
    with contextlib.ExitStack() as stack:
        if os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                stack.enter_context(locked(folder / LOCK, timeout=0))
                stack.callback(_remove, folder / LOCK)
            except sqlite3.OperationalError as error:
                if "locked" in str(error):  # a folder that cannot be written, or has no locks, is told of by what writes there
                    hint = "wait for it, or --out another folder"
                    raise ConfigError("another process is training in this folder", file=folder, hint=hint) from None
        yield


def _remove(file: Path) -> None:
    with contextlib.suppress(OSError):  # Windows does not delete an open file
        file.unlink()
