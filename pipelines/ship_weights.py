"""Make a finished run a model of the package: weights in half precision, and a description with its figures.

    python pipelines/ship_weights.py runs/acdc-all acdc-2d --figures evaluation/summary.json

``--figures`` is a ``summary.json`` of ``rdvit evaluate`` of a model of the same recipe on patients that it was not trained on:
what a user may expect. The written model is compared with the run's on a few training images, so that half precision is
known to change nothing that matters.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import save as to_bytes
from scipy.stats import bootstrap

from rdvit.atomic import write
from rdvit.checkpoint import DESCRIPTION, SHIPPED, WEIGHTS, load_model, save_model
from rdvit.config import merge, validate
from rdvit.data.datalist import load_data, select
from rdvit.data.volume import read_image
from rdvit.errors import RdvitError
from rdvit.evaluation.metrics import dice
from rdvit.inference.predictor import Predictor

LARGEST_MB = 8
LEAST_AGREEMENT = 0.998  # Dice between the foregrounds of both precisions
IMAGES = 3


def main() -> None:
    """Write ``rdvit/weights/NAME``; fails if it is too large or segments differently."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="run folder")
    parser.add_argument("name", help="name of the model in the package")
    parser.add_argument("--figures", type=Path, required=True, help="summary.json on patients that were not trained on")
    parser.add_argument("--licence", default="CC BY-NC-SA 4.0, that of the training data (ACDC)", help="of the weights")
    parser.add_argument("--data", type=Path, help="data set of the images to compare on; that of the training where not given")
    given = parser.parse_args()
    model, info = load_model(given.run)
    training = info.training | {
        "figures": figures(given.figures),
        "weights": "float16",
        "commit": commit(),
        "licence": given.licence,
    }
    source = given.data or Path(training.pop("data"))  # where data and other models lie here is nobody's business
    training["dataset"] = load_data(source).name
    training.pop("finetuned_from", None)
    config = validate(merge(info.config.model_dump(), {"training": {"finetune": None, "train_only": "all"}}))
    target = SHIPPED / given.name
    save_model(target, model, replace(info, config=config, training=training))
    tensors = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    write(target / WEIGHTS, to_bytes({name: value.contiguous() for name, value in tensors.items()}))
    megabytes = sum((target / file).stat().st_size for file in (WEIGHTS, DESCRIPTION)) / 1e6
    if megabytes > LARGEST_MB:
        raise RdvitError(f"{megabytes:.1f} MB, more than {LARGEST_MB}", file=target)
    cases = select(load_data(source), "all")
    half, half_info = load_model(target)
    whole_run, shipped = Predictor(model, info, "cpu", "fp32"), Predictor(half, half_info, "cpu", "fp32")
    for case in cases[:: max(1, len(cases) // IMAGES)][:IMAGES]:
        image = read_image(case.image)
        agreement = dice(shipped(image).labels_XYZ, whole_run(image).labels_XYZ)
        print(f"{case.id}: Dice {agreement:.5f} between float16 and float32 weights", file=sys.stderr)
        if not agreement >= LEAST_AGREEMENT:
            raise RdvitError(f"half precision changes {case.id}: Dice {agreement:.4f} with the run's own", file=target)
    print(f"{target}: {megabytes:.2f} MB", file=sys.stderr)


def figures(path: Path) -> dict[str, Any]:
    """What the description says of the accuracy: Dice with its 95 % interval over patients, HD95, and how it was measured."""
    summary = json.loads(path.read_text(encoding="utf-8"))
    structures = {}
    for value, mean in summary["mean"].items():
        low, high = interval(summary, value)
        structures[summary["class_names"][value]] = {
            "Dice": round(mean["Dice"], 4),
            "Dice_95": [round(low, 4), round(high, 4)],
            "HD95_mm": round(mean["HD95"], 2),
        }
    run = {key: summary["run"][key] for key in ("split", "loops", "halting", "precision", "keep_largest")}
    patients = len({case["patient"] for case in summary["metric_per_case"]})
    dice = round(summary["foreground_mean"]["Dice"], 4)
    return {"foreground_dice": dice, "structures": structures, "patients": patients, "measured": run}


def interval(summary: dict[str, Any], value: str) -> tuple[float, float]:
    """95 % bootstrap interval (BCa) of a structure's mean Dice, patients drawn with both of their phases."""
    found: dict[str, list[float]] = {}
    for case in summary["metric_per_case"]:
        dice_of_case = case["metrics"][value]["Dice"]  # null where the structure is in neither mask
        found.setdefault(case["patient"], []).append(np.nan if dice_of_case is None else dice_of_case)
    means = np.array([np.nanmean(values) for values in found.values()])
    ends = bootstrap((means,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    return float(ends.low), float(ends.high)


def commit() -> str:
    """The commit that the weights are made with."""
    return subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    try:
        main()
    except RdvitError as error:
        sys.exit(f"error: {error}")
