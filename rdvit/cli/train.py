"""``rdvit train``."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rdvit.cli.console import console, print_json, print_table, progress_bar
from rdvit.errors import ConfigError
from rdvit.training.signals import Interrupted, stop_signals

if TYPE_CHECKING:
    from rdvit.config import Config


def train(
    dim: Annotated[Literal["2d", "3d"] | None, typer.Option(help="Slices or volumes; slices where not given.")] = None,
    moe: Annotated[bool, typer.Option("--moe/--no-moe", help="Mixture of experts in the block (preset rdvit-moe).")] = False,
    preset: Annotated[str | None, typer.Option(help="vit, bvit, rdvit, rdvit-moe, revit, softmor or sret.")] = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with what differs from the preset.")] = None,
    data: Annotated[Path | None, typer.Option(help="ACDC, nnU-Net or Decathlon folder, a zip of one, or JSON list.")] = None,
    fraction: Annotated[float, typer.Option(help="Share of the training patients, in (0, 1].")] = 1.0,
    fold: Annotated[str, typer.Option(help="Fold that validates, 0 to 4; all: every patient trains.")] = "0",
    epochs: Annotated[int | None, typer.Option(help="Epochs; the learning rate is planned over them.")] = None,
    max_minutes: Annotated[
        float | None,
        typer.Option(help="Stop after so many minutes. Without --epochs the learning rate is planned over them."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Run folder; runs/NAME where not given.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Run folder to continue; --epochs and --max-minutes may grow.")] = None,
    finetune: Annotated[
        str | None,
        typer.Option(help="Model folder or name of a run to start from; its network is kept, or grows: --dim 3d, --moe."),
    ] = None,
    train_only: Annotated[
        Literal["lora", "norms", "head"] | None,
        typer.Option(help="With --finetune, train only low-rank updates, norms or the head (which is always trained)."),
    ] = None,
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
    if fold not in ("0", "1", "2", "3", "4", "all"):
        raise ConfigError(f"expected --fold 0 to 4 or all, found {fold}")
    begin = {
        **{"--dim": dim, "--preset": preset, "--config": config, "--out": out, "--seed": seed, "--set": settings or None},
        **{"--finetune": finetune, "--train-only": train_only, "--moe": moe or None},
        **{"--fraction": None if fraction == 1 else fraction, "--fold": None if fold == "0" else fold},
    }
    given = [name for name, value in begin.items() if value is not None]
    if resume is not None and given:
        raise ConfigError(f"--resume continues a run as it began; {' and '.join(given)} begin a new one")
    if train_only is not None and finetune is None:
        raise ConfigError("--train-only freezes the rest of a trained model, which --finetune MODEL names")
    with _stoppable():
        from rdvit.checkpoint import find_model
        from rdvit.config import resolve_config
        from rdvit.data.default import default_data
        from rdvit.evaluation.summary import dice_table, to_json
        from rdvit.training.run import make_split, resume_run, start_run

        flags = _flags(epochs=epochs, max_minutes=max_minutes, device=device, precision=precision)
        if resume is None:
            flags["training"] |= _flags(seed=seed, train_only=train_only)["training"]
            if max_minutes is not None and epochs is None:
                flags["training"]["epochs"] = None
        with progress_bar() as report:
            if resume is not None:
                summary = resume_run(resume, flags, data, runs, mlflow, report)
            else:
                wanted = (dim, _preset(preset, moe))
                if finetune is None:
                    resolved = resolve_config(wanted[0] or "2d", wanted[1] or "rdvit", config, settings, flags)
                else:
                    resolved = _of_model(find_model(finetune, runs), wanted, config, settings, flags)
                source, why = (data, "") if data is not None else default_data()
                if why:
                    console().print(f"data: {source} ({why})")
                summary = start_run(
                    resolved, make_split(source, "all" if fold == "all" else int(fold), fraction), out, runs, mlflow, report
                )
        run = summary["run"]
        print_table(f"validation, best weights (epoch {run['model']['epoch']})", dice_table(summary))
        console().print(f"run folder: {run['folder']}")
        if as_json:
            print_json(to_json(summary))


@contextmanager
def _stoppable() -> Iterator[None]:
    """Ends the command in order where SIGINT or SIGTERM comes: one line on how to go on, and the exit code of a shell."""
    try:
        with stop_signals():
            yield
    except Interrupted as stop:
        go_on = " before the training began" if stop.folder is None else f"; `rdvit train --resume {stop.folder}` continues"
        logging.getLogger("rdvit").warning("stopped by %s%s", stop, go_on)
        raise typer.Exit(128 + stop.number) from None


def _preset(preset: str | None, moe: bool) -> str | None:
    if moe and preset not in (None, "rdvit", "rdvit-moe"):
        raise ConfigError(f"--moe is preset rdvit-moe and contradicts --preset {preset}")
    return "rdvit-moe" if moe else preset


def _of_model(
    folder: Path, wanted: tuple[str | None, str | None], file: Path | None, settings: list[str] | None, flags: dict[str, Any]
) -> Config:
    """The configuration that fine-tunes a model; ``wanted`` are the dimensions and the preset, where they were given.

    Slices may become volumes, and rdvit rdvit-moe; everything else is the network of the model.
    """
    from rdvit.checkpoint import load_info
    from rdvit.config import resolve_config
    from rdvit.models.growth import inherited

    network = load_info(folder).config.model
    there = (f"{network.spatial_dims}d", network.preset)
    chosen = (wanted[0] or there[0], wanted[1] or there[1])
    for found, asked in zip(there, chosen, strict=True):
        if asked != found and (found, asked) not in (("2d", "3d"), ("rdvit", "rdvit-moe")):
            raise ConfigError(
                f"fine-tuning keeps the network of its model, {' '.join(there)}; {asked} was asked for", file=folder
            )
    flags["training"]["finetune"] = str(folder)
    model = network.model_dump(mode="json") if chosen == there else inherited(network, int(chosen[0][0]))
    return resolve_config(*chosen, file, settings, flags, {"model": model})


def _flags(**values: Any) -> dict[str, Any]:
    return {"training": {key: value for key, value in values.items() if value is not None}}
