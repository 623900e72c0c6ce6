"""Dice lost when heads, neurons or singular values are taken away at one step only (the analysis of arXiv:2605.10661).

    python pipelines/step_pruning.py --data path/to/ACDC

Of the shared block at one loop, and of the same block of a stack: one attention head at a time, half of the hidden neurons
(drawn once, the same at all steps), and all but a quarter of the singular values of the feed-forward's input matrix.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from torch import Tensor

from rdvit.analysis.charts import seeds_curve
from rdvit.analysis.figures import save_figure
from rdvit.checkpoint import load_model
from rdvit.inference.predictor import Predictor
from rdvit.models.probe import largest_singular_values, weight_at_step, without_heads, without_neurons
from rdvit.models.segmenter import Segmenter

SHARE = 0.25  # of the validation patients, since each of them is segmented many times


def prunings(model: Segmenter, step: int) -> Iterator[tuple[str, str, Tensor]]:
    """What is taken away at a step: its name, the parameter of the block, the matrix that remains."""
    blocks: Any = model.encoder.recurrence.blocks
    block = blocks[0 if model.config.shared_block else step]
    for head in range(model.config.num_heads):
        yield f"head {head + 1}", "attn.proj.weight", without_heads(block.attn.proj.weight.data, [head], model.config.num_heads)
    w_in, w_out = block.ffn.w_in.weight.data, block.ffn.w_out.weight.data
    order = torch.randperm(w_out.shape[1], generator=torch.Generator().manual_seed(0))
    yield "half of the neurons", "ffn.w_out.weight", without_neurons(w_out, order[: len(order) // 2])
    yield "3/4 of the singular values", "ffn.w_in.weight", largest_singular_values(w_in, max(1, min(w_in.shape) // 4))


def losses(given: study.Setting, folder: Path) -> list[dict[str, Any]]:
    """Dice lost by each pruning at each step of one model."""
    model, info = load_model(folder)
    predictor = Predictor(model, info, given.device)
    whole = float(np.mean([*study.score(given, predictor, share=SHARE).values()]))
    rows = []
    for step in range(model.config.loops):
        for what, name, weight in prunings(model, step):
            with weight_at_step(model, name, step, weight):
                left = float(np.mean([*study.score(given, predictor, share=SHARE).values()]))
            rows.append({"step": step + 1, "pruned": what, "lost": whole - left, "dice": left})
    return rows


def main(words: list[str] | None = None) -> None:
    """Prune loops and stacks of all seeds; write table, figures and paragraph."""
    given = study.setting(__doc__, words)
    rows: list[dict[str, Any]] = []
    for preset in ("bvit", "vit"):
        for seed in given.seeds:
            found = losses(given, study.train(given, study.configure(given, preset, seed, {})))
            rows += [{"preset": preset, "seed": seed} | row for row in found]
    lines = []
    for preset in ("bvit", "vit"):
        own = [row for row in rows if row["preset"] == preset]
        for row in own:
            row["kind"] = "one head" if row["pruned"].startswith("head") else row["pruned"]
        figure = seeds_curve(own, "step", "lost", "kind", ("step", "Dice lost, bars over seeds and heads"), title=preset)
        save_figure(figure, given.out / f"step_pruning_{preset}.png")
        for kind in dict.fromkeys(row["kind"] for row in own):
            at = {step: study.mean_of(own, "lost", kind=kind, step=step) for step in sorted({row["step"] for row in own})}
            worst = max(at, key=lambda step: at[step])
            lines.append(
                f"{preset}, {kind}: {np.mean([*at.values()]):.3f} Dice lost on average, most ({at[worst]:.3f}) at {worst}."
            )
    study.write_results(given.out / "step_pruning", rows, " ".join(lines))


if __name__ == "__main__":
    study.run(main)
