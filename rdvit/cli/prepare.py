"""``rdvit prepare``: data sets from downloads, or from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rdvit.cli.console import console

app = typer.Typer(help="Make a data set folder.", no_args_is_help=True)


@app.callback()
def prepare() -> None:
    """Make a data set folder."""


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    patients: Annotated[int, typer.Option(min=5, help="Number of patients; five groups take turns.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every patient.")] = 0,
    cines: Annotated[int, typer.Option(min=0, help="Patients that also get a 4D cine.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a phantom that is there.")] = False,
) -> None:
    """A synthetic beating heart as an ACDC folder, with volumes, EF and mass known in closed form (phantom.json).

    \f
    Raises:
        RdvitError: If the folder holds something else.
    """
    from rdvit.data.phantom import write_phantom

    folder = write_phantom(out, patients, seed, cines=cines, overwrite=overwrite)
    console().print(f"{patients} patients written to {folder}")
