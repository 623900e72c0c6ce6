"""Dice against the number of training patients, of several systems at equal steps: how much do little data cost?

    python pipelines/data_efficiency.py --data path/to/ACDC --presets rdvit,vit --seeds 3 --steps 800

The whole recipe of ``rdvit train`` on whole images, not the reduced setting of the other studies. Fractions are nested, so
that the 10 % lie inside the 25 %; fold 0 validates. Where there are two systems or more, the first is compared with each of
the others over the validation patients at the smallest fraction.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import study

from rdvit.analysis.charts import seeds_curve
from rdvit.analysis.figures import save_figure
from rdvit.config import resolve_config
from rdvit.data.default import default_data
from rdvit.training.run import make_split


def options(words: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = study.recipe_options(__doc__)
    parser.add_argument("--presets", default="rdvit", help="systems, with commas")
    parser.add_argument("--fractions", default="0.1,0.25,0.5,1", help="shares of the training patients, with commas")
    return parser.parse_args(words)


def main(words: list[str] | None = None) -> None:
    """Train what is not trained yet, read all scores, write table, figure and paragraph."""
    given = options(words)
    source = given.data or default_data()[0]
    fractions = sorted(float(word) for word in given.fractions.split(","))
    presets = given.presets.split(",")
    rows: list[dict[str, Any]] = []
    patients: dict[str, list[dict[str, float]]] = {preset: [] for preset in presets}
    for fraction in fractions:
        split = make_split(source, fraction=fraction)
        for preset in presets:
            for seed in range(given.seeds):
                summary = trained(given, split, preset, seed)
                size = summary["run"]["model"]["patients"]
                rows.append({"system": preset, "fraction": fraction, "seed": seed, "patients": size, **study.scores(summary)})
                if fraction == fractions[0]:
                    patients[preset].append(study.dice_of_patients(summary))
    study.write_results(given.out / "data_efficiency", rows, paragraph(rows, patients, fractions[0]))
    figure = seeds_curve(rows, "patients", "dice", "system", ("training patients", "Dice"), log=True)
    save_figure(figure, given.out / "data_efficiency.png")


def trained(given: argparse.Namespace, split: study.Split, preset: str, seed: int) -> dict[str, Any]:
    """The summary of a training, which is made where it is not there yet; validated once, at its end."""
    per_epoch = min(50, given.steps)
    length = {"steps_per_epoch": per_epoch, "epochs": max(1, given.steps // per_epoch), "seed": seed, "validate_every": 10**6}
    config = resolve_config(given.dim, preset, settings=given.set, flags={"training": length})
    folder = study.train_once(split, config, given.out)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


def paragraph(rows: list[dict[str, Any]], patients: dict[str, list[dict[str, float]]], fraction: float) -> str:
    """What the numbers say."""
    seeds = len(next(iter(patients.values())))
    lines = [f"{seeds} seed{'s' if seeds > 1 else ''}; mean Dice, least and largest in brackets."]
    for system in patients:
        own = dict.fromkeys(row["fraction"] for row in rows)
        parts = [f"{100 * f:g} %: {study.spread_of(rows, system=system, fraction=f)}" for f in own]
        lines.append(f"{system}: {', '.join(parts)}.")
    first, *others = patients
    for other in others:
        difference, p = study.paired(patients[first], patients[other])
        lines.append(f"{first} less {other} at {100 * fraction:g} %: {difference:+.4f}, p {p:.3g} (Wilcoxon, patients).")
    return " ".join(lines)


if __name__ == "__main__":
    study.run(main)
