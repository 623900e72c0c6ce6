"""Euler, midpoint and Runge-Kutta steps of F(z) - z, at equal steps and at equal evaluations of the block (arXiv:2608.04879).

    python pipelines/solver_order.py --data path/to/ACDC

The horizon is S = 4 where the evaluations are matched: 8 Euler steps of 1/2, 4 midpoint steps of 1, 2 Runge-Kutta steps of 2.
At equal steps a higher order costs more: its gain may be one of FLOPs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import study

from rdvit.analysis.charts import seeds_curve
from rdvit.analysis.figures import save_figure

EVALUATIONS = {"euler": 1, "midpoint": 2, "rk4": 4}
SYSTEMS = [("euler", 4, 1.0), ("midpoint", 4, 1.0), ("rk4", 4, 1.0), ("euler", 8, 0.5), ("rk4", 2, 2.0)]  # steps, step size


def main(words: list[str] | None = None) -> None:
    """Train all solvers with all seeds, or find them trained, and write table, figure and paragraph."""
    given = study.setting(__doc__, words)
    rows: list[dict[str, Any]] = []
    scores: dict[tuple[str, int], list[dict[str, float]]] = {}
    for solver, steps, size in SYSTEMS:
        for seed in given.seeds:
            changes = {"solver": solver, "loops": steps, "step_size": size}
            folder = study.train(given, study.configure(given, "bvit", seed, changes))
            found = study.patient_dice(given, folder)
            scores.setdefault((solver, steps), []).append(found)
            row = {"solver": solver, "steps": steps, "step_size": size, "evaluations": steps * EVALUATIONS[solver]}
            rows.append(row | {"seed": seed, "dice": float(np.mean([*found.values()]))})

    def against(one: tuple[str, int], other: tuple[str, int]) -> str:
        difference, p = study.paired(scores[one], scores[other])
        return f"{one[0]} {difference:+.3f} (p = {p:.2g})"

    lines = [f"{s}, {n} steps of {size:g}: Dice {study.spread_of(rows, solver=s, steps=n)}." for s, n, size in SYSTEMS]
    equal_steps = [against((solver, 4), ("euler", 4)) for solver in ("midpoint", "rk4")]
    equal_evaluations = [against(one, ("euler", 8)) for one in (("midpoint", 4), ("rk4", 2))]
    lines.append(f"Against Euler at 4 steps: {', '.join(equal_steps)}; at 8 evaluations: {', '.join(equal_evaluations)}.")
    study.write_results(given.out / "solver_order", rows, " ".join(lines))
    labels = ("evaluations of the block", "Dice")
    save_figure(seeds_curve(rows, "evaluations", "dice", "solver", labels), given.out / "solver_order.png")


if __name__ == "__main__":
    study.run(main)
