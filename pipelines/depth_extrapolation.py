"""Is depth used, and does it hold? Dice and HD95 of trained models against the number of loops, with halting and without.

    python pipelines/depth_extrapolation.py --models fixed=runs/a sampled=runs/b --data path/to/ACDC

Each model is scored on the cases that validated it, one depth at a time; what is scored is kept. Two figures are wanted
without halting: Dice at the trained depth at least 0.02 above Dice at 1 loop, and at most 0.003 lost at 12 and 24 loops
against the best depth. Their intervals are of a paired bootstrap over patients. A stack is no deeper than trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import study
from trained import Trained, models, options, score_once

from rdvit.analysis.charts import loops_curve, seeds_curve
from rdvit.analysis.figures import save_figure
from rdvit.config import ModelConfig
from rdvit.models.segmenter import Halting

DEPTHS = (1, 2, 3, 4, 6, 8, 12, 16, 24)
GAIN, LOSS = 0.02, 0.003
FAR = (12, 24)
Patients = dict[tuple[str, int], dict[str, float]]
"""Halting and loops to the mean Dice of each patient."""


def main(words: list[str] | None = None) -> None:
    """Score what is not scored yet, write tables, figures and paragraph."""
    parser = options(__doc__)
    parser.add_argument("--loops", nargs="+", type=int, default=DEPTHS, help="loops at inference; the trained number is added")
    parser.add_argument("--halting", nargs="+", choices=get_args(Halting), default=get_args(Halting), help="where it has it")
    given = parser.parse_args(words)
    rows: list[dict[str, Any]] = []
    wanted: list[dict[str, Any]] = []
    said: list[str] = []
    for model in models(given):
        own, patients = score_depths(model, given.out, given.loops, given.halting)
        rows += own
        wanted += check(model, patients)
        said.append(paragraph(model, own, patients))
        figure = loops_curve(own, trained_loops=trained_loops(model), title=model.name)
        save_figure(figure, given.out / f"depth_extrapolation_{model.name}.png")
    study.write_results(given.out / "depth_extrapolation_wanted", wanted, "Without halting. " + study.wanted_paragraph(wanted))
    study.write_results(given.out / "depth_extrapolation", rows, " ".join(said))
    curves = [row | {"curve": f"{row['model']}, {'ACT' if row['halting'] == 'act' else 'no halting'}"} for row in rows]
    for column, label in (("dice", "Dice"), ("hd95", "HD95 (mm)")):
        figure = seeds_curve(curves, "loops", column, "curve", ("loops at inference", label), log=True)
        save_figure(figure, given.out / f"depth_extrapolation_{column}.png")


def trained_loops(model: Trained) -> int:
    """The depth the model was trained for."""
    return model.predictor.config.model.loops


def possible(config: ModelConfig, loops: int, halting: Halting) -> bool:
    """Whether a model can run so many loops with this halting."""
    deep_enough = loops == config.loops if config.sret is not None else config.shared_block or loops <= config.loops
    return deep_enough and (halting == "none" or config.halting == "act")


def score_depths(
    model: Trained, out: Path, loops: Sequence[int], modes: Sequence[Halting]
) -> tuple[list[dict[str, Any]], Patients]:
    """A row for each depth and halting that the model can do, and the Dice of each patient."""
    config, rows, patients = model.predictor.config.model, [], {}
    for mode in modes:
        for number in sorted({*loops, config.loops}):
            if possible(config, number, mode):
                summary = score_once(model, out, number, mode)
                patients[mode, number] = study.dice_of_patients(summary)
                named = {"model": model.name, "trained_loops": config.loops, "halting": mode, "loops": number}
                rows.append(named | study.scores(summary) | {"cases": len(model.cases)})
    return rows, patients


def best_depth(patients: Patients) -> int:
    """The number of loops with the highest mean Dice without halting."""
    means = {loops: np.mean([*scores.values()]) for (mode, loops), scores in patients.items() if mode == "none"}
    return max(means, key=lambda loops: means[loops])


def check(model: Trained, patients: Patients) -> list[dict[str, Any]]:
    """The wanted figures without halting, as far as the depths for them were scored."""
    trained = trained_loops(model)
    pairs: list[tuple[str, int, int, float | None, float | None]] = []
    if trained > 1:
        pairs.append((f"Dice at {trained} loops less Dice at 1", trained, 1, GAIN, None))
    if ("none", trained) in patients:
        best = best_depth(patients)
        pairs += [(f"Dice at the best depth ({best}) less Dice at {far}", best, far, None, LOSS) for far in FAR]
    return [
        study.wanted_row(model.name, what, study.difference(patients["none", first], patients["none", second]), least, most)
        for what, first, second, least, most in pairs
        if ("none", first) in patients and ("none", second) in patients
    ]


def paragraph(model: Trained, rows: list[dict[str, Any]], patients: Patients) -> str:
    """What the scores of one model say."""
    trained = trained_loops(model)
    lines = [f"{model.name}: trained with {trained} loops, {len({case.patient for case in model.cases})} patients."]
    for mode, word in (("none", "without halting"), ("act", "with ACT")):
        at = {row["loops"]: row for row in rows if row["halting"] == mode}
        if at:
            curve = ", ".join(f"{row['dice']:.4f} ({row['hd95']:.1f})" for row in at.values())
            lines.append(f"Dice (HD95 in mm) {word} at {', '.join(map(str, at))} loops: {curve}.")
    if {("none", trained), ("act", trained)} <= patients.keys():
        cost = study.difference(patients["none", trained], patients["act", trained])
        lines.append(f"ACT costs {cost} Dice at {trained} loops.")
    return " ".join(lines)


if __name__ == "__main__":
    study.run(main)
