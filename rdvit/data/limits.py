"""Files that promise or hide more than memory should be given for: found out before any of it is taken."""

from __future__ import annotations

import os
from collections.abc import Sequence
from math import prod
from pathlib import Path

from rdvit.errors import ConfigError, DataError

VARIABLE = "RDVIT_MAX_GB"
DEFAULT_GB = 8.0
_MOST_BY_DEFLATE = 1032  # gzip cannot shrink bytes by a larger factor (zlib's technical details)
_SLACK_BYTES = 2**20  # what may follow the voxels: padding, a stray extension


def check_promise(shape: Sequence[int], item_bytes: int, path: Path, start: int = 0) -> int:
    """Refuse a header that promises more voxels than the limit allows.

    Args:
        shape: As the header states it.
        item_bytes: Size of one voxel.
        path: The file, for the message.
        start: Where the voxels begin in it.

    Returns:
        How many bytes the whole content has to have, by its header.

    Raises:
        DataError: It is more than ``RDVIT_MAX_GB`` (8 where that is not set).
        ConfigError: ``RDVIT_MAX_GB`` is not a number above 0.
    """
    promised = prod(int(size) for size in shape) * item_bytes
    limit = limit_gb()
    if promised > limit * 1e9:
        message = f"its header promises {promised / 1e9:.3g} GB of voxels, shape {_times(shape)}; the limit is {limit:g} GB"
        raise DataError(message, file=path, hint=f"{VARIABLE} raises it, for files that you trust")
    return promised + start


def check_content(path: Path, promised: int, zipped: bool) -> None:
    """Compare a file's size with what its header promises, without reading or unpacking it.

    Args:
        path: The file with the voxels.
        promised: From `check_promise`.
        zipped: Whether the content is a gzip stream. Its last four bytes tell the unpacked size.

    Raises:
        DataError: There are too few bytes for the promise, or a gzip stream holds far more.
    """
    there = path.stat().st_size
    if there * (_MOST_BY_DEFLATE if zipped else 1) < promised:
        state = "is cut short: its" if not zipped else "cannot be true: its"
        raise DataError(f"{state} header promises {promised} bytes, {there} are there", file=path)
    if zipped and there >= 4:
        with path.open("rb") as stream:
            stream.seek(-4, os.SEEK_END)
            unpacked = int.from_bytes(stream.read(4), "little")
        if unpacked > promised + max(_SLACK_BYTES, promised // 10):
            message = f"its gzip stream unpacks to {unpacked} bytes, its header promises {promised}"
            raise DataError(message, file=path, hint="the file is damaged, or made to fill memory")


def limit_gb() -> float:
    """The most that a file may promise, in GB: ``RDVIT_MAX_GB``, or 8.

    Raises:
        ConfigError: It is not a number above 0.
    """
    text = os.environ.get(VARIABLE, "")
    try:
        limit = float(text) if text else DEFAULT_GB
    except ValueError:
        limit = 0.0
    if not limit > 0:
        raise ConfigError(f"expected {VARIABLE} to be a number of GB above 0, found {text!r}")
    return limit


def _times(shape: Sequence[int]) -> str:
    return " x ".join(str(int(size)) for size in shape)
