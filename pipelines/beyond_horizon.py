"""Dice from 1 to 8 times the trained number of loops: who survives beyond the horizon (after arXiv:2608.04879, 2604.12946)?

    python pipelines/beyond_horizon.py --data path/to/ACDC

The naive loop, and what is said to help, one thing at a time: supervision in stages, a depth drawn anew for each step, LTI
injection; and the last two together. All tokens run all loops; the last state is read.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import study

from rdvit.analysis.charts import seeds_curve
from rdvit.analysis.figures import save_figure


def systems(loops: int) -> dict[str, tuple[dict[str, Any], dict[str, Any]]]:
    """Name to changes of model and training; all are preset bvit otherwise."""
    sampled = {"loop_sampling": {"kind": "uniform", "low": 1, "high": max(2, 3 * loops // 2)}}
    lti = {"injection": "lti"}
    return {
        "naive": ({}, {}),
        "stage-wise": ({}, {"supervision": "stagewise", "stages": min(3, loops)}),
        "sampled depth": ({}, sampled),
        "LTI": (lti, {}),
        "LTI, sampled depth": (lti, sampled),
    }


def depths(loops: int) -> list[int]:
    """Loops at inference, from 1 to 8 T."""
    return sorted({1, 2, 3, loops, 3 * loops // 2, 2 * loops, 3 * loops, 4 * loops, 6 * loops, 8 * loops} - {0})


def main(words: list[str] | None = None) -> None:
    """Train all systems with all seeds, or find them trained, score them at all depths, write table, figure and paragraph."""
    given = study.setting(__doc__, words)
    rows: list[dict[str, Any]] = []
    for name, (model, training) in systems(given.loops).items():
        for seed in given.seeds:
            folder = study.train(given, study.configure(given, "bvit", seed, model, training))
            for loops in depths(given.loops):
                value = float(np.mean([*study.patient_dice(given, folder, loops).values()]))
                rows.append({"system": name, "seed": seed, "loops": loops, "dice": value})
    far = 8 * given.loops
    lines = [f"Trained with {given.loops} loops, {len(given.seeds)} seeds."]
    for name in systems(given.loops):
        at = {n: study.mean_of(rows, system=name, loops=n) for n in depths(given.loops)}
        best = max(at, key=lambda n: at[n])
        lines.append(
            f"{name}: Dice {at[1]:.3f} after 1 loop, {study.spread_of(rows, system=name, loops=given.loops)} after "
            f"{given.loops}, {study.spread_of(rows, system=name, loops=far)} after {far}; best {at[best]:.3f} after {best}."
        )
    study.write_results(given.out / "beyond_horizon", rows, " ".join(lines))
    labels = ("loops at inference", "Dice")
    figure = seeds_curve(rows, "loops", "dice", "system", labels, log=True, mark=given.loops)
    save_figure(figure, given.out / "beyond_horizon.png")


if __name__ == "__main__":
    study.run(main)
