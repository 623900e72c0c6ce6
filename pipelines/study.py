"""What the studies share: a setting that fits two CPU cores, crops around the heart, trainings that are made once, tables.

Reduced setting: 10 % of the training patients of fold 0, crops of 168 mm around the heart found without labels, slices, and a
network of width 96 whose small decoder sees the image but no convolutional pyramid, so that the tokens carry the structure.
Every training is kept under ``OUT/models/`` by a digest of its configuration and data: a study that is started again goes on
where it was stopped, and studies share what they have in common.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
from scipy import ndimage
from scipy.stats import wilcoxon

from rdvit.atomic import atomic, write
from rdvit.checkpoint import load_model
from rdvit.config import Config, merge, resolve_config
from rdvit.data.datalist import Case, digest, load_data, select
from rdvit.data.default import default_data
from rdvit.data.volume import Volume, read_image, read_labels, to_canonical
from rdvit.errors import RdvitError
from rdvit.evaluation.intervals import Interval, bootstrap
from rdvit.evaluation.metrics import dice
from rdvit.inference.predictor import Predictor
from rdvit.training.run import Split, make_split, resume_run, start_run
from rdvit.training.signals import Interrupted, stop_signals

CROP_MM = 168.0  # holds 99.9 % of the labelled voxels of the 28 ACDC patients of the default setting, 99.4 % of the worst
CROP = (112, 112)  # pixels of 1.5 mm
REDUCED: dict[str, Any] = {
    "model": {"stem": "patch", "patch_size": [8, 8], "skips": "image", "stem_channels": 8, "halting": "none"},
    "data": {"spacing": 1.5, "crop_size": CROP},
    "training": {"batch_size": 8, "validate_every": 1_000_000},
}
_log = logging.getLogger("rdvit")


@dataclass(frozen=True)
class Setting:
    """What the command line of a study decides."""

    data: Path
    out: Path
    seeds: tuple[int, ...]
    steps: int
    fraction: float
    width: int
    heads: int
    loops: int
    device: str

    def network(self, **changes: Any) -> dict[str, Any]:
        """The model section of the setting, with changes."""
        return {"embed_dim": self.width, "num_heads": self.heads, "loops": self.loops} | changes


def setting(description: str | None, words: Sequence[str] | None = None) -> Setting:
    """Read the command line of a study and make the crops it works on."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    parser.add_argument("--data", type=Path, help="ACDC, or another data set; as for rdvit train where not given")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of tables, figures and trainings")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each system")
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of a training")
    parser.add_argument("--fraction", type=float, default=0.1, help="share of the training patients")
    parser.add_argument("--width", type=int, default=96, help="token width of the reference")
    parser.add_argument("--heads", type=int, default=3, help="attention heads")
    parser.add_argument("--loops", type=int, default=6, help="loops, and blocks of a stack")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda, mps")
    given = parser.parse_args(words)
    source = given.data or default_data()[0]
    crops = heart_crops(make_split(source, fraction=given.fraction), given.out)
    sizes = (given.steps, given.fraction, given.width, given.heads, given.loops)
    return Setting(crops, given.out, tuple(range(given.seeds)), *sizes, given.device)


def recipe_options(description: str | None) -> argparse.ArgumentParser:
    """What the command lines of studies of the whole recipe, on whole images, share."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="ACDC, or another data set; as for rdvit train where not given")
    parser.add_argument("--out", type=Path, default=Path("runs/studies"), help="folder of table, figures and trainings")
    parser.add_argument("--dim", choices=("2d", "3d"), default="2d")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each system")
    parser.add_argument("--steps", type=int, default=800, help="optimiser steps of a training")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for rdvit train, for all systems")
    return parser


def run(main: Callable[[], None]) -> None:
    """Run a study from the command line: messages on standard error, exit code 2 on wrong input, 130 or 143 when stopped."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        with stop_signals():
            main()
    except RdvitError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except Interrupted as stop:
        print(f"stopped by {stop}; start it again to go on", file=sys.stderr)
        sys.exit(128 + stop.number)


# Crops


def heart_crops(split: Split, out: Path, size_mm: float = CROP_MM) -> Path:
    """Cut every image of a split around the heart, labels not looked at; returns a data list with the same split.

    The heart is what moves: :func:`heart_centre` of ED and ES. Without both phases it is the middle of the image.
    """
    key = hashlib.sha256(f"{digest(split.train)} {digest(split.validation)} {size_mm}".encode()).hexdigest()[:12]
    folder = out / "crops" / key
    listed = folder / "crops.json"
    if listed.is_file():
        return listed
    content: dict[str, Any] = {"name": split.data.name, "labels": {str(v): n for v, n in split.data.class_names.items()}}
    kept = total = 0
    for name, cases in (("training", split.train), ("validation", split.validation)):
        content[name] = []
        for patient in dict.fromkeys(case.patient for case in cases):
            own = [case for case in cases if case.patient == patient]
            images = [to_canonical(read_image(case.image))[0] for case in own]
            centre = heart_centre([image.array for image in images], images[0].spacing)
            for case, image in zip(own, images, strict=True):
                assert case.label is not None
                labels = to_canonical(read_labels(case.label))[0]
                entry, inside = _write_crop(folder, case, image, labels, centre, size_mm)
                content[name].append(entry)
                kept, total = kept + inside, total + int((labels.array > 0).sum())
    content["labelled_voxels_inside"] = kept / max(total, 1)
    _log.info("crops of %g mm hold %.2f %% of the labelled voxels", size_mm, 100 * kept / max(total, 1))
    write(listed, json.dumps(content, indent=1))
    return listed


def heart_centre(frames_XYZ: Sequence[np.ndarray], spacing: Sequence[float]) -> tuple[float, float]:
    """The middle of what differs between two frames of a heart, in voxels of the plane; the middle of a single frame.

    The difference is the mean over the slices, smoothed by 12 mm, and weighted down away from the middle of the image (60 mm),
    since the chest wall moves, too. What is below 30 % of the largest counts as still: the largest alone would lie in the LV.
    """
    shape = frames_XYZ[0].shape
    middle = ((shape[0] - 1) / 2, (shape[1] - 1) / 2)
    if len(frames_XYZ) != 2 or frames_XYZ[1].shape != shape:
        return middle
    change_XY = np.abs(frames_XYZ[0] - frames_XYZ[1]).mean(axis=2)
    change_XY = ndimage.gaussian_filter(change_XY, [12 / s for s in spacing[:2]])
    x, y = np.meshgrid(*((np.arange(n) - m) * s for n, m, s in zip(shape, middle, spacing, strict=False)), indexing="ij")
    change_XY = change_XY * np.exp(-(x**2 + y**2) / (2 * 60.0**2))
    if not change_XY.any():
        return middle
    at = ndimage.center_of_mass(np.where(change_XY > 0.3 * change_XY.max(), change_XY, 0))
    return float(at[0]), float(at[1])


def _write_crop(
    folder: Path, case: Case, image: Volume, labels: Volume, centre: tuple[float, float], size_mm: float
) -> tuple[dict[str, str], int]:
    """Write image and labels inside the square around the centre; the entry of the list and the labelled voxels inside."""
    sizes = [min(n, round(size_mm / s)) for n, s in zip(image.array.shape[:2], image.spacing[:2], strict=True)]
    starts = [min(max(round(c - m / 2), 0), n - m) for c, m, n in zip(centre, sizes, image.array.shape[:2], strict=True)]
    window = tuple(slice(start, start + size) for start, size in zip(starts, sizes, strict=True))
    affine = image.affine.copy()
    affine[:3, 3] = (image.affine @ [*starts, 0, 1])[:3]
    entry = {"id": case.id, "patient": case.patient, "image": f"{case.id}.nii.gz", "label": f"{case.id}_gt.nii.gz"}
    for key, volume in (("image", image), ("label", labels)):
        with atomic(folder / entry[key]) as path:
            nib.save(nib.Nifti1Image(np.ascontiguousarray(volume.array[window]), affine), path)
    known = {"group": case.group, "phase": case.phase}
    return entry | {k: v for k, v in known.items() if v is not None}, int((labels.array[window] > 0).sum())


# Trainings


def configure(given: Setting, preset: str, seed: int, model: dict[str, Any], training: dict[str, Any] | None = None) -> Config:
    """The configuration of one training of a study."""
    per_epoch = min(50, given.steps)
    length = {"steps_per_epoch": per_epoch, "epochs": max(1, given.steps // per_epoch), "seed": seed, "device": given.device}
    flags = merge(REDUCED, {"model": given.network(**model), "training": length | (training or {})})
    return resolve_config("2d", preset, flags=flags)


def train(given: Setting, config: Config) -> Path:
    """The run folder of a finished training of a study."""
    return train_once(make_split(given.data), config, given.out)


def train_once(split: Split, config: Config, out: Path) -> Path:
    """The run folder of a finished training; it is made, or continued, where there is none yet."""
    folder = run_folder(split, config, out, config.model.preset)
    if (folder / "summary.json").is_file():
        return folder
    if (folder / "state.pt").is_file():
        resume_run(folder, {}, None, folder.parent, False, _silent)
    else:
        shutil.rmtree(folder, ignore_errors=True)  # stopped before its first epoch was saved
        start_run(config, split, folder, folder.parent, False, _silent)
    return folder


def run_folder(split: Split, config: Config, out: Path, name: str, *more: Any) -> Path:
    """Where a training is kept: under a digest of its configuration and data, and of what more decides it."""
    described = config.model_dump(mode="json")
    described["training"] = {k: v for k, v in described["training"].items() if k not in ("device", "figures_every")}
    key = json.dumps([described, digest(split.train), digest(split.validation), *more], sort_keys=True)
    return out / "models" / f"{name}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


def patient_dice(given: Setting, folder: Path, loops: int | None = None) -> dict[str, float]:
    """Mean Dice per validation patient over structures and phases, all loops run, last state; kept beside the model."""
    kept = folder / f"dice_{'trained' if loops is None else loops}.json"
    if kept.is_file():
        return json.loads(kept.read_text(encoding="utf-8"))
    model, info = load_model(folder)
    scores = score(given, Predictor(model, info, given.device), loops)
    write(kept, json.dumps(scores))
    return scores


def score(given: Setting, predictor: Predictor, loops: int | None = None, share: float = 1.0) -> dict[str, float]:
    """Mean Dice per validation patient of a network, over structures and phases, of a share of the patients."""
    scores: dict[str, list[float]] = {}
    for case in select(load_data(given.data), "validation", share):
        assert case.label is not None
        reference = read_labels(case.label).array
        labels = predictor(read_image(case.image), loops, "none").labels_XYZ
        values = [dice(labels == value, reference == value) for value in predictor.info.class_names]
        scores.setdefault(case.patient, []).extend(v for v in values if np.isfinite(v))
    return {patient: float(np.mean(values)) for patient, values in scores.items() if values}


# Results


def scores(summary: Mapping[str, Any]) -> dict[str, float]:
    """Columns of a table from a summary: mean Dice, Dice of each structure, mean HD95 in mm."""
    names = summary["class_names"]
    each = {f"dice_{names[value]}": mean["Dice"] for value, mean in summary["mean"].items()}
    mean = summary["foreground_mean"]
    return {"dice": mean["Dice"], **each, "hd95": mean["HD95"]}


def dice_of_patients(summary: Mapping[str, Any]) -> dict[str, float]:
    """Mean Dice of each patient of a summary, over phases and structures."""
    found: dict[str, list[float]] = {}
    for case in summary["metric_per_case"]:
        values = [metrics["Dice"] for metrics in case["metrics"].values() if metrics["Dice"] is not None]
        found.setdefault(case["patient"], []).extend(value for value in values if np.isfinite(value))
    return {patient: float(np.mean(values)) for patient, values in found.items() if values}


def difference(first: Mapping[str, float], second: Mapping[str, float]) -> Interval:
    """Mean over patients of first minus second, with its interval."""
    return bootstrap(np.array([first[patient] - second[patient] for patient in sorted(first)]))


def paired(first: Sequence[Mapping[str, float]], second: Sequence[Mapping[str, float]]) -> tuple[float, float]:
    """Mean difference over patients, first minus second, each the mean of its seeds; and the p of Wilcoxon's signed ranks."""
    patients = sorted(first[0])
    a, b = (np.array([np.mean([seed[p] for seed in scores]) for p in patients]) for scores in (first, second))
    p = float(wilcoxon(a, b).pvalue) if np.any(a != b) else 1.0
    return float((a - b).mean()), p


def mean_of(rows: Sequence[Mapping[str, Any]], key: str = "dice", **wanted: Any) -> float:
    """Mean of a column over the rows with the wanted values."""
    return float(np.mean([row[key] for row in rows if all(row[k] == v for k, v in wanted.items())]))


def spread_of(rows: Sequence[Mapping[str, Any]], **wanted: Any) -> str:
    """ "0.812 (0.804 to 0.819)": mean, least and largest Dice of the seeds of the rows with the wanted values."""
    values = [row["dice"] for row in rows if all(row[k] == v for k, v in wanted.items())]
    return f"{np.mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def wanted_row(model: str, what: str, found: Interval, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    """A row of a table of what is wanted; without limits it is there to compare with."""
    limits = ("" if least is None else f">= {least:g}", "" if most is None else f"<= {most:g}")
    met = (least is None or found.value >= least) and (most is None or found.value <= most)
    wanted = " and ".join(limit for limit in limits if limit)
    ends = {"value": found.value, "low": found.low, "high": found.high}
    return {"model": model, "what": what, **ends, "wanted": wanted, "met": ("yes" if met else "no") if wanted else ""}


def wanted_paragraph(rows: Sequence[Mapping[str, Any]]) -> str:
    """A table of what is wanted in words."""
    parts = ["In brackets 95 % bootstrap intervals over patients."]
    for row in rows:
        found = Interval(row["value"], row["low"], row["high"])
        limits = f", wanted {row['wanted']}: {row['met']}" if row["wanted"] else ""
        parts.append(f"{row['model']}: {row['what']} {found}{limits}.")
    return " ".join(parts)


def write_results(path: Path, rows: Sequence[Mapping[str, Any]], paragraph: str) -> None:
    """The table as ``path.csv``, and a paragraph made from its numbers as ``path.md``."""
    write_table(path.with_suffix(".csv"), rows)
    write(path.with_suffix(".md"), paragraph + "\n")
    print(paragraph)


def write_table(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows as a CSV file; a column that a row lacks stays empty there."""
    with atomic(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


def _silent(text: str, done: int, total: int) -> None:
    """A study says what it does by its own messages."""
