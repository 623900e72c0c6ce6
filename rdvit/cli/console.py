"""What the commands share: messages on standard error, ``--json`` alone on standard output, a look at the output folder."""

from __future__ import annotations

import logging
import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rdvit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rich.console import Console

Report = Callable[[str, int, int], None]


def parse_loops(text: str | None) -> int | Literal["auto"] | None:
    """``--loops``: a number, or ``auto``.

    Raises:
        ConfigError: If it is neither, or less than 1.
    """
    if text is None:
        return None
    if text == "auto":
        return "auto"
    if not text.removeprefix("-").isdecimal():
        raise ConfigError(f"expected a number of loops or auto, found '{text}'")
    if int(text) < 1:
        raise ConfigError(f"expected at least 1 loop, found {text}")
    return int(text)


def console() -> Console:
    """A rich console on standard error, silent under ``--quiet``; file names are not read as markup."""
    from rich.console import Console

    found = Console(stderr=True)
    width = None if found.is_terminal else 160  # a log file has no width; tables should not be cut there
    quiet = logging.getLogger("rdvit").level > logging.INFO
    return Console(stderr=True, markup=False, highlight=False, soft_wrap=True, width=width, quiet=quiet)


def error_line(text: str) -> None:
    """One line on standard error, whatever the message holds."""
    print(f"rdvit: error: {' '.join(text.split())}", file=sys.stderr)


def set_up_logging(quiet: bool) -> None:
    """The package's messages as plain lines on standard error; nibabel's own complaints about headers stay silent."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger = logging.getLogger("rdvit")
    logger.handlers[:] = [handler]
    logger.setLevel(logging.WARNING if quiet else logging.INFO)
    logger.propagate = False
    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL)


@contextmanager
def ends_on_sigterm() -> Iterator[None]:
    """A polite request to stop ends the command as Ctrl-C does: what is half done is cleared away, exit code 143."""

    def end(number: int, frame: object) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():  # only there may handlers be set
        yield
        return
    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress_bar() -> Iterator[Report]:
    """A progress bar on standard error, silent where that is no terminal; call what it gives with text, done and total."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    target = console()
    with Progress(*columns, console=target, disable=not target.is_terminal, transient=True) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda text, done, total: bar.update(task, description=text, completed=done, total=total)


def print_table(title: str, rows: Sequence[dict[str, Any]], digits: dict[str, int] | None = None) -> None:
    """A table on standard error; numbers with the given digits (3 unless said), NaN and None as a dash."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in rows[0] if rows else ():
        table.add_column(column, overflow="fold", justify="left" if isinstance(rows[0][column], str) else "right")
    for row in rows:
        table.add_row(*(_cell(value, (digits or {}).get(column, 3)) for column, value in row.items()))
    console().print(table)


def print_json(text: str) -> None:
    """A result on standard output."""
    sys.stdout.write(text.rstrip() + "\n")


def check_output(out: Path, files: Sequence[Path], overwrite: bool) -> None:
    """Refuse to overwrite, and find out that a folder cannot be written before any work is done; makes the folder.

    Raises:
        DataError: If one of the files exists.
        ConfigError: If the folder cannot be made or written.
    """
    existing = [file for file in files if file.exists()]
    if existing and not overwrite:
        raise DataError(f"{len(existing)} result(s) exist already, such as {existing[0]}", hint="--overwrite replaces them")
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".rdvit-write-test"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise ConfigError(f"the output folder cannot be written: {error.strerror or error}", file=out) from None


def _cell(value: Any, digits: int) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.{digits}f}" if isinstance(value, float) else str(value)
