"""A quick start, and memory that is kept: what MONAI imports on sight and no segmentation needs stays out."""

from __future__ import annotations

import ctypes
import os
import sys

# MONAI imports these where they are installed, a third of the time until `rdvit infer` begins its work.
_PARTNERS = ("mlflow", "matplotlib", "pandas", "sklearn", "pydicom")


def import_monai() -> None:
    """Import MONAI without its optional partners, which rdvit itself imports later where it needs them.

    MONAI's own features for them (its MLflow handler, say) then miss them in this process: for commands, not for libraries.
    """
    if "monai" in sys.modules:
        return
    hidden = [name for name in _PARTNERS if name not in sys.modules]
    sys.modules.update(dict.fromkeys(hidden))  # type: ignore[arg-type] # None makes the import fail, as if not installed
    try:
        import monai  # noqa: F401
    finally:
        for name in hidden:
            del sys.modules[name]


def keep_memory() -> None:
    """Let the C library keep memory that was freed, for the next tensor of that size.

    Otherwise every large tensor is fresh memory, whose page faults are a fifth of the time of a segmentation. The peak is the
    same. For commands, since it holds for the whole process; only glibc (Linux) has it, and variables ``MALLOC_*`` win.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    if libc is None or not hasattr(libc, "gnu_get_libc_version") or any(name.startswith("MALLOC_") for name in os.environ):
        return
    trim_threshold, top_pad, mmap_threshold = -1, -2, -3  # as in malloc.h
    libc.mallopt(mmap_threshold, 1 << 30)
    libc.mallopt(trim_threshold, (1 << 31) - 1)
    libc.mallopt(top_pad, 1 << 26)
