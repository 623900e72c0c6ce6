"""One training in a folder at a time."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator
from pathlib import Path

from rdvit.errors import ConfigError

LOCK = "run.lock"


@contextlib.contextmanager
def sole_training(folder: Path) -> Iterator[None]:
    """Holds a run's folder against other processes; the hold ends with this process, however that ends.

    SQLite's own lock is portable; its empty file goes with it, or stays after a kill and hinders nobody. Of several
    processes of one training the first holds it.

    Raises:
        ConfigError: If another process trains there.
    """
    lock = None
    if os.environ.get("LOCAL_RANK", "0") == "0":
        try:
            lock = sqlite3.connect(folder / LOCK, timeout=0)
            lock.execute("BEGIN EXCLUSIVE")
        except sqlite3.OperationalError as error:
            if "locked" in str(error):  # a folder that cannot be written, or has no locks, is told of by what writes there
                hint = "wait for it, or --out another folder"
                raise ConfigError("another process is training in this folder", file=folder, hint=hint) from None
    try:
        yield
    finally:
        if lock is not None:
            with contextlib.suppress(OSError):  # Windows does not delete an open file
                (folder / LOCK).unlink()
            lock.close()
