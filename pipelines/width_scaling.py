"""Dice of a loop and of a stack against their width: narrow loops are said to lose most (arXiv:2605.10661).

python pipelines/width_scaling.py --data path/to/ACDC
"""

from __future__ import annotations

from typing import Any

import numpy as np
import study

from rdvit.analysis.charts import seeds_curve
from rdvit.analysis.figures import save_figure

SHARES = (0.5, 1.0, 2.0)  # of --width


def main(words: list[str] | None = None) -> None:
    """Train loops and stacks of all widths with all seeds, or find them trained; write table, figure and paragraph."""
    given = study.setting(__doc__, words)
    widths = [round(given.width * share / (8 * given.heads)) * 8 * given.heads for share in SHARES]
    rows: list[dict[str, Any]] = []
    scores: dict[tuple[str, int], list[dict[str, float]]] = {}
    for width in dict.fromkeys(widths):
        for preset in ("vit", "bvit"):
            for seed in given.seeds:
                folder = study.train(given, study.configure(given, preset, seed, {"embed_dim": width}))
                found = study.patient_dice(given, folder)
                scores.setdefault((preset, width), []).append(found)
                rows.append({"preset": preset, "width": width, "seed": seed, "dice": float(np.mean([*found.values()]))})
    lines = []
    for width in dict.fromkeys(widths):
        difference, p = study.paired(scores["bvit", width], scores["vit", width])
        both = [f"{preset} {study.spread_of(rows, preset=preset, width=width)}" for preset in ("vit", "bvit")]
        lines.append(f"Width {width}: Dice {', '.join(both)}; the loop {difference:+.3f} (p = {p:.2g}).")
    study.write_results(given.out / "width_scaling", rows, " ".join(lines))
    figure = seeds_curve(rows, "width", "dice", "preset", ("token width", "Dice"))
    save_figure(figure, given.out / "width_scaling.png")


if __name__ == "__main__":
    study.run(main)
