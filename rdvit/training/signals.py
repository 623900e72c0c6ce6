"""SIGINT and SIGTERM: the first ends a training in order, wherever it is; one that follows ends it at once."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

SAME_COMMAND = 1.0  # seconds in which a second signal is taken for the first: timeout(1) and torchrun send theirs twice


class Interrupted(KeyboardInterrupt):
    """Told to stop by a signal. No Exception: what tolerates failures, as the tracker does, must not swallow it.

    Attributes:
        number: The signal.
        folder: The run that was being trained, if there was one.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number
        self.folder: Path | None = None


@dataclass
class _Signals:
    """What came so far. Signals are a matter of the process, so there is one of these."""

    first: int | None = None
    time: float = 0.0
    holds: int = 0
    pending: bool = False


_signals = _Signals()


@contextmanager
def stop_signals() -> Iterator[None]:
    """Raise :class:`Interrupted` at the first SIGINT or SIGTERM within the block; the third has its usual effect.

    Python raises it between two instructions of the main thread. Elsewhere than there nothing is changed.
    """
    previous = {}
    try:
        for number in (signal.SIGINT, signal.SIGTERM):
            previous[number] = signal.signal(number, _receive)
    except ValueError:  # not in the main thread: a notebook's or a test's own business
        pass
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)
        vars(_signals).update(vars(_Signals()))


@contextmanager
def held() -> Iterator[None]:
    """Let a short block end before a first signal takes effect: what it writes is then complete. A second one breaks it."""
    _signals.holds += 1
    try:
        yield
    finally:
        _signals.holds -= 1
    if _signals.pending and not _signals.holds:
        stop_if_told()


def stop_if_told() -> None:
    """Raise what a signal asked for, also where the exception was lost, as within a destructor."""
    if _signals.first is not None:
        _signals.pending = False
        raise Interrupted(_signals.first)


@contextmanager
def interruptions_restored() -> Iterator[None]:
    """Raise :class:`Interrupted` again where it became another error.

    Compiled code does that: pybind11, converting an array for Matplotlib, says that the arguments are of a wrong type.
    """
    try:
        yield
    except Exception:
        stop_if_told()
        raise


def _receive(number: int, frame: FrameType | None) -> None:
    if _signals.first is None:
        _signals.first, _signals.time, _signals.pending = number, time.monotonic(), True
        if not _signals.holds:
            stop_if_told()
    elif time.monotonic() - _signals.time > SAME_COMMAND:
        for each in (signal.SIGINT, signal.SIGTERM):
            signal.signal(each, signal.SIG_DFL)
        raise Interrupted(number)
