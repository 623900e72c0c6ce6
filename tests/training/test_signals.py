"""The first signal ends things in order, wherever they are; a second one is never swallowed for ever."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from rdvit.training import signals
from rdvit.training.signals import Interrupted, held, interruptions_restored, stop_if_told, stop_signals

KINDS = [signal.SIGINT, signal.SIGTERM]


@pytest.fixture(autouse=True)
def handlers_as_they_were() -> Iterator[None]:
    before = [signal.getsignal(kind) for kind in KINDS]
    yield
    assert [signal.getsignal(kind) for kind in KINDS] == before


def send(kind: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_is_raised_at_once(kind: signal.Signals) -> None:
    with pytest.raises(Interrupted, match=kind.name) as caught, stop_signals():
        send(kind)
        pytest.fail("went on")
    assert caught.value.number == kind


def test_it_is_no_exception_that_tolerant_code_would_swallow() -> None:
    with pytest.raises(Interrupted), stop_signals():
        try:
            send()
        except Exception:
            pytest.fail("swallowed")


def test_a_held_block_ends_first() -> None:
    done = []
    with pytest.raises(Interrupted), stop_signals():
        with held():
            with held():
                send()
                done.append("inner")
            done.append("outer")
        done.append("after")
    assert done == ["inner", "outer"]


def test_what_closes_is_not_stopped_by_the_signal_that_made_it_close() -> None:
    closed = []

    def work() -> None:
        try:
            send()
        finally:
            with held():
                closed.append(True)

    with pytest.raises(Interrupted), stop_signals():
        work()
    assert closed == [True]


@pytest.mark.parametrize(("later", "raised"), [(0.5, False), (1.5, True)])
def test_a_second_signal_breaks_a_held_block(later: float, raised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless it follows so closely that it is the same command: timeout(1) sends two."""
    now = 100.0
    monkeypatch.setattr(signals.time, "monotonic", lambda: now)
    passed = []
    with pytest.raises(Interrupted, match="SIGTERM" if not raised else "SIGINT"), stop_signals(), held():
        send()
        now += later
        send(signal.SIGINT)
        passed.append(True)
    assert passed == ([] if raised else [True])


def test_a_third_signal_ends_the_process() -> None:
    code = (
        "import os, signal, time\nfrom rdvit.training import signals\nsignals.SAME_COMMAND = 0\n"
        "with signals.stop_signals(), signals.held():\n"
        "    for _ in range(3):\n"
        "        try:\n            os.kill(os.getpid(), signal.SIGTERM); time.sleep(0.01)\n"
        "        except KeyboardInterrupt:\n            pass\n"
        "    print('survived')\n"
    )
    outcome = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (outcome.returncode, outcome.stdout) == (-signal.SIGTERM, ""), outcome.stderr


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_was_lost_is_raised_again() -> None:
    class Swallows:
        def __del__(self) -> None:
            send()

    with pytest.raises(Interrupted), stop_signals():
        thing: Any = Swallows()
        del thing  # Python reports what a destructor raises, and goes on
        stop_if_told()
        pytest.fail("went on")
    stop_if_told()  # nothing is left of it


def test_outside_the_main_thread_nothing_changes() -> None:
    before, after = signal.getsignal(signal.SIGTERM), []

    def work() -> None:
        with stop_signals():
            after.append(signal.getsignal(signal.SIGTERM))

    run: Callable[[], None] = threading.Thread(target=work).start
    run()
    for thread in threading.enumerate():
        if thread is not threading.main_thread() and not thread.daemon:
            thread.join(5)
    assert after == [before]


def test_what_compiled_code_makes_of_an_interruption_is_one() -> None:
    with stop_signals(), pytest.raises(Interrupted), interruptions_restored():
        try:
            signal.raise_signal(signal.SIGTERM)
        except Interrupted:
            raise TypeError("incompatible function arguments") from None
    with stop_signals(), pytest.raises(TypeError), interruptions_restored():
        raise TypeError("a fault of our own")
