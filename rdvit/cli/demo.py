"""``rdvit demo``: the main job on the phantom, from data to a segmented case, in a few minutes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rdvit.cli import evaluate, infer, train
from rdvit.cli.console import console


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data, run and results.")] = Path("demo"),
    minutes: Annotated[float, typer.Option(min=0.05, help="Minutes of training.")] = 2.5,
    patients: Annotated[int, typer.Option(min=5, help="Phantom patients.")] = 20,
) -> None:
    """Make a phantom, train on it, evaluate, segment a patient with more loops than in training, show where things are.

    \f
    Raises:
        RdvitError: If the folder holds an earlier demo.
    """
    from rdvit.config import config_folder
    from rdvit.data.phantom import write_phantom

    say = console().print
    data, runs, run = out / "phantom", out / "runs", out / "runs" / "demo"
    if not (data / "phantom.json").is_file():
        write_phantom(data, patients)
    say(f"1. data: {patients} synthetic patients in {data}")
    say(f"2. training for {minutes:g} minutes")
    train.train(config=config_folder() / "demo.yaml", data=data, max_minutes=minutes, out=run, runs=runs)
    say("3. Dice against loops on the validation patients")
    evaluate.evaluate(data=data, model=str(run), loops="1,2,4,6,12", out=out / "evaluation", runs=runs)
    case = data / "training" / "patient001" / "patient001_frame01.nii.gz"
    say(f"4. segmenting {case} with 12 loops")
    infer.infer([case], out / "segmentations", str(run), loops="12", maps=True, preview=True, overwrite=True, runs=runs)
    say(f"5. metrics and figures: mlflow ui --backend-store-uri sqlite:///{(runs / 'mlflow.db').as_posix()}")
