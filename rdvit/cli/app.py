"""The ``rdvit`` command: one file per sub-command, errors as one line, exit codes 0 (done), 1 (some failed), 2 (wrong input).

Heavy libraries are imported inside the commands, so that ``rdvit --help`` answers at once.
"""

from __future__ import annotations

import sys
import traceback
from typing import Annotated

import typer

from rdvit import __version__
from rdvit.cli import check, demo, evaluate, infer, info, measure, prepare, train
from rdvit.cli.console import error_line, set_up_logging
from rdvit.errors import RdvitError

app = typer.Typer(
    name="rdvit",
    help="Recurrent-depth vision transformers for cardiac MRI and other labelled volumes.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command()(train.train)
app.command()(infer.infer)
app.command()(evaluate.evaluate)
app.command()(measure.measure)
app.command()(check.check)
app.command()(info.info)
app.command()(demo.demo)
app.add_typer(prepare.app, name="prepare")

_debug = False


@app.callback(invoke_without_command=True)
def options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Warnings and errors only.")] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")] = False,
) -> None:
    """Options before the command."""
    global _debug  # noqa: PLW0603 - read by `main` after typer has parsed it
    _debug = debug
    if version:
        typer.echo(__version__)
        raise typer.Exit
    set_up_logging(quiet)


def main() -> None:
    """Run the command line; the entry point of the package."""
    try:
        app()
    except RdvitError as error:
        _fail(error, 2)
    except KeyboardInterrupt as error:
        _fail(error, 130, "interrupted")
    except Exception as error:  # a full disk, too little memory, or a fault of ours
        _fail(error, 2, f"{type(error).__name__}: {error} (rdvit --debug COMMAND shows where)")


def _fail(error: BaseException, code: int, text: str | None = None) -> None:
    if _debug:
        traceback.print_exception(error)
    error_line(text or str(error))
    sys.exit(code)
