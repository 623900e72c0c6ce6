"""Torch files that are whole or refused: written atomically, read as data only and with their checksums looked at."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path
from typing import Any

import torch

from rdvit.atomic import write
from rdvit.errors import DataError


def save_tensors(path: Path, content: dict[str, Any], *, keep: Path | None = None, hint: str | None = None) -> None:
    """Write tensors, numbers, strings, lists and dictionaries of them with ``torch.save``.

    Args:
        path: The file.
        content: What it holds.
        keep: Where an older file is moved.
        hint: For the error, what the user can do.

    Raises:
        RdvitError: If the disk is full, or the file cannot be written for another reason.
    """
    buffer = io.BytesIO()  # torch's own file writer reports a full disk as "unexpected pos 704 vs 598"
    torch.save(content, buffer)
    write(path, buffer.getbuffer(), keep=keep, hint=hint)


def load_tensors(path: Path) -> Any:
    """Read what ``torch.save`` wrote, without running code that may be in it, onto the CPU.

    torch itself ignores the checksums of its zip files: a flipped byte would become a weight.

    Raises:
        DataError: If the file is damaged, or cannot be read.
    """
    try:
        content = io.BytesIO(path.read_bytes())
        with zipfile.ZipFile(content) as archive:
            spoiled = archive.testzip()
        if spoiled is not None:
            raise ValueError(f"the checksum of {spoiled} is wrong")
        content.seek(0)
        return torch.load(content, map_location="cpu", weights_only=True)
    except MemoryError:
        raise
    except Exception as error:  # damaged bytes make the unpickler raise nearly anything, from UnicodeDecodeError to IndexError
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise DataError(f"damaged: {reason}", file=path) from error
