"""Which data a command takes when none is named."""

from __future__ import annotations

import os
from pathlib import Path

from rdvit.errors import DataError

PHANTOM_FOLDER = Path("data/phantom")


def default_data() -> tuple[Path, str]:
    """``$RDVIT_DATA``, then ``data/ACDC``, then a phantom under ``data/phantom``, made if need be; and a word on the choice.

    Raises:
        DataError: If ``$RDVIT_DATA`` names nothing.
    """
    named = os.environ.get("RDVIT_DATA")
    if named:
        if not Path(named).exists():
            raise DataError("no such folder or file", file=named, hint="it is what $RDVIT_DATA says")
        return Path(named), "from $RDVIT_DATA"
    if Path("data/ACDC").is_dir():
        return Path("data/ACDC"), "the default; --data or $RDVIT_DATA choose another"
    if not (PHANTOM_FOLDER / "phantom.json").is_file():
        from rdvit.data.phantom import write_phantom

        write_phantom(PHANTOM_FOLDER)
    return PHANTOM_FOLDER, "a synthetic beating heart, since neither --data, $RDVIT_DATA nor data/ACDC is there"
