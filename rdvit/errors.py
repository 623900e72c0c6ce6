"""The one family of errors that a user may meet: what was expected, what came, in which file, what to do."""

from __future__ import annotations

from pathlib import Path


class RdvitError(Exception):
    """Wrong usage or input, told in one line; the command line prints it and exits with 2.

    Args:
        message: What was expected and what was found, with numbers.
        file: The file at fault, put in front of the message.
        hint: What the user can do about it, put behind the message.
    """

    def __init__(self, message: str, *, file: str | Path | None = None, hint: str | None = None) -> None:
        self.file = None if file is None else str(file)
        self.hint = hint
        parts = [f"{self.file}: " if self.file else "", message, f" ({hint})" if hint else ""]
        super().__init__("".join(parts))


class ConfigError(RdvitError):
    """A configuration that names an unknown key or holds a value that cannot work."""


class DataError(RdvitError):
    """A file or data set that cannot be read, or whose parts do not fit together."""


class ModelError(RdvitError):
    """A model folder that is incomplete or does not match its own configuration."""
