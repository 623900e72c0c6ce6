"""``rdvit train``."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from rdvit.cli.console import console, print_json, print_table, progress_bar
from rdvit.errors import ConfigError


def train(
    dim: Annotated[Literal["2d", "3d"], typer.Option(help="Slices or volumes.")] = "2d",
    moe: Annotated[bool, typer.Option("--moe/--no-moe", help="Mixture of experts in the block (preset rdvit-moe).")] = False,
    preset: Annotated[str | None, typer.Option(help="vit, bvit, rdvit, rdvit-moe, revit, softmor or sret.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with what differs from the preset.")] = None,
    data: Annotated[Path | None, typer.Option(help="ACDC, nnU-Net or Decathlon folder, or JSON list.")] = None,
    fraction: Annotated[float, typer.Option(help="Share of the training patients, in (0, 1].")] = 1.0,
    fold: Annotated[int, typer.Option(help="Fold that validates, 0 to 4.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Epochs; the learning rate is planned over them.")] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so many minutes. Without --epochs the learning rate is planned over them."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME where not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to continue; --epochs and --max-minutes may grow.")] = None,
    seed: Annotated[int | None, typer.Option(help="Fixes every random choice.")] = None,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, bf16 or fp16.")] = None,
    settings: Annotated[list[str] | None, typer.Option("--set", help="key.sub=value, any number of times.")] = None,
    runs: Annotated[Path, typer.Option(help="Folder of all runs and of MLflow's store.")] = Path("runs"),
    mlflow: Annotated[bool, typer.Option("--mlflow/--no-mlflow", help="Track with MLflow.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON on standard output.")] = False,
) -> None:
    """Train a model; the run folder holds the weights, the configuration, metrics.csv, figures and summary.json.

    \f
    Raises:
        RdvitError: On wrong input; a finite loss that is lost; a run that exists.
    """
    from rdvit.config import resolve_config
    from rdvit.data.default import default_data
    from rdvit.evaluation.summary import dice_table, to_json
    from rdvit.training.run import make_split, resume_run, start_run
    from rdvit.training.trainer import Interrupted

    if not 0 <= fold <= 4:
        raise ConfigError(f"expected --fold 0 to 4, found {fold}")
    if resume is not None:
        flags = _flags(epochs=epochs, max_minutes=max_minutes, device=device, precision=precision)
    else:
        flags = _flags(epochs=epochs, max_minutes=max_minutes, seed=seed, device=device, precision=precision)
        if max_minutes is not None and epochs is None:
            flags["training"]["epochs"] = None
    try:
        with progress_bar() as report:
            if resume is not None:
                summary = resume_run(resume, flags, data, runs, mlflow, report)
            else:
                resolved = resolve_config(dim, _preset(preset, moe), config, settings, flags)
                source, why = (data, "") if data is not None else default_data()
                if why:
                    console().print(f"data: {source} ({why})")
                summary = start_run(resolved, make_split(source, fold, fraction), out, runs, mlflow, report)
    except Interrupted as signal:
        console().print(f"stopped by {signal}; the last complete epoch is saved, `rdvit train --resume RUN` continues")
        raise typer.Exit(130) from None
    run = summary["run"]
    print_table(f"validation, best weights (epoch {run['model']['epoch']})", dice_table(summary))
    console().print(f"run folder: {run['folder']}")
    if as_json:
        print_json(to_json(summary))


def _preset(preset: str | None, moe: bool) -> str:
    if moe and preset not in (None, "rdvit", "rdvit-moe"):
        raise ConfigError(f"--moe is preset rdvit-moe and contradicts --preset {preset}")
    return "rdvit-moe" if moe else preset or "rdvit"


def _flags(**values: Any) -> dict[str, Any]:
    return {"training": {key: value for key, value in values.items() if value is not None}}
