"""The command as a whole: quick to answer, one line for an error, and the exit codes that scripts rely on."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from subprocess import CompletedProcess

import pytest
from typer.testing import CliRunner

from rdvit import __version__
from rdvit.cli import info
from rdvit.cli.app import app

Rdvit = Callable[..., CompletedProcess[str]]
COMMANDS = ("train", "infer", "evaluate", "measure", "info", "demo", "prepare")
HEAVY = ("torch", "monai", "mlflow", "matplotlib", "nibabel", "scipy", "pandas")


def in_a_new_process(code: str) -> CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)


def test_help_answers_at_once() -> None:
    """Half a second of processor time, which a machine with other work to do does not stretch."""

    def processor_seconds() -> float:
        before = os.times()
        outcome = in_a_new_process("import sys; sys.argv = ['rdvit', '--help']; from rdvit.cli.app import main; main()")
        after = os.times()
        assert outcome.returncode == 0 and "train" in outcome.stdout
        return after.children_user - before.children_user + after.children_system - before.children_system

    assert min(processor_seconds() for _ in range(3)) < 0.5


def test_no_command_is_heavy_before_it_runs() -> None:
    code = f"""
import sys
from typer.testing import CliRunner
from rdvit.cli.app import app
calls = [['--version'], ['--help'], ['info'], *([name, '--help'] for name in {COMMANDS!r})]
assert all(CliRunner().invoke(app, call).exit_code == 0 for call in calls)
print([name for name in {HEAVY!r} if name in sys.modules])
"""
    outcome = in_a_new_process(code)
    assert (outcome.stdout.strip(), outcome.returncode) == ("[]", 0), outcome.stderr


def test_help_is_for_users() -> None:
    for name in COMMANDS:
        text = CliRunner().invoke(app, [name, "--help"]).stdout
        assert "Usage" in text and "Raises" not in text


def test_version(rdvit: Rdvit) -> None:
    assert rdvit("--version").stdout.strip() == __version__


def test_an_error_is_one_line_and_exit_code_2(rdvit: Rdvit, tmp_path: Path) -> None:
    outcome = rdvit("info", tmp_path / "no such model")
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert outcome.stderr.startswith("rdvit: error: no model '") and outcome.stderr.count("\n") == 1


def test_debug_shows_the_traceback_and_keeps_the_exit_code(rdvit: Rdvit, tmp_path: Path) -> None:
    outcome = rdvit("--debug", "info", tmp_path / "no such model")
    assert outcome.returncode == 2 and outcome.stdout == ""
    assert "Traceback" in outcome.stderr and "ModelError" in outcome.stderr and "find_model" in outcome.stderr
    assert "Traceback" not in rdvit("info", tmp_path / "no such model").stderr  # only for the call that asked


def test_a_fault_of_ours_is_one_line_too(rdvit: Rdvit, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(runs: Path) -> dict[str, str]:
        raise RuntimeError("out of memory\ntried to allocate 3 GiB")

    monkeypatch.setattr(info, "_installation", broken)
    outcome = rdvit("info")
    assert outcome.returncode == 2
    line = "rdvit: error: RuntimeError: out of memory tried to allocate 3 GiB (rdvit --debug COMMAND shows where)\n"
    assert outcome.stderr == line
    assert "Traceback" in rdvit("--debug", "info").stderr


@pytest.mark.parametrize("words", [["segment"], ["infer"], ["infer", "--bogus", "x"], ["train", "--epochs", "many"]])
def test_wrong_usage_is_exit_code_2(rdvit: Rdvit, words: list[str]) -> None:
    outcome = rdvit(*words)
    assert (outcome.returncode, outcome.stdout) == (2, "")
    assert "Traceback" not in outcome.stderr and "Usage" in outcome.stderr


def test_quiet_leaves_only_warnings_and_errors(rdvit: Rdvit) -> None:
    assert "python" in rdvit("info").stderr
    quiet = rdvit("-q", "info", "--json")
    assert quiet.stderr == "" and "python" in json.loads(quiet.stdout)
    assert "rdvit: error" in rdvit("-q", "info", "no such model").stderr


def test_broken_pipe_is_no_error_message() -> None:
    """``rdvit info --json | head`` closes standard output early."""
    read, write = os.pipe()
    os.close(read)
    code = "import sys; sys.argv = ['rdvit', 'info', '--json']; from rdvit.cli.app import main; main()"
    with os.fdopen(write, "wb") as closed:
        outcome = subprocess.run([sys.executable, "-c", code], stdout=closed, stderr=subprocess.PIPE, text=True, check=False)
    assert "Traceback" not in outcome.stderr and "rdvit: error" not in outcome.stderr
