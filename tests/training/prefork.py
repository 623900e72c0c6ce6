"""Starts real ``rdvit`` processes without their ten seconds of imports: forks them from one that has all modules loaded.

Reads a JSON list from standard input, a line each: log file and words of the command. Answers with the process id at once and
with the exit status, negative for a signal, when it is over. ``test_kills.py`` kills these processes.
"""

from __future__ import annotations

import json
import os
import sys
from importlib import import_module


def preload() -> None:
    """Import what a training imports; nothing is opened, and no thread of ours is started."""
    from rdvit.training import tracking

    tracking._import_mlflow_quietly()
    for name in ("mlflow.data", "mlflow.store.tracking.sqlalchemy_store", "rdvit.cli.app", "rdvit.training.run"):
        import_module(name)


def work(log: str, words: list[str]) -> None:
    """What the forked process does: the command, with its output in a file."""
    from rdvit.cli.app import main

    file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(file, stream)
    sys.argv = ["rdvit", *words]
    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    finally:
        sys.stdout.flush()
        os._exit(code if isinstance(code, int) else 0)


def serve() -> None:
    """One process after the other, until standard input ends."""
    preload()
    print("ready", flush=True)
    for line in sys.stdin:
        log, words = json.loads(line)
        pid = os.fork()
        if pid == 0:
            work(log, words)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    serve()
