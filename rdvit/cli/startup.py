"""A quick start: what MONAI imports on sight and no segmentation needs stays out."""

from __future__ import annotations

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
