"""One block in a loop against a stack of blocks, at equal FLOPs and at equal parameter memory (after arXiv:2608.04879).

    python pipelines/matched_budget.py --data path/to/ACDC

Memory is that of the parameters between stem and decoder, where the systems differ; FLOPs are of a forward pass of one crop.
The states of one training of each are compared, too: linear CKA between steps and layers, attention distance, statistics.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import study
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rdvit.analysis.charts import seeds_curve, similarity_figure
from rdvit.analysis.dynamics import activation_statistics, attention_distance, cka_matrix
from rdvit.analysis.figures import save_figure
from rdvit.checkpoint import load_model
from rdvit.config import ModelConfig
from rdvit.data.datalist import load_data, select
from rdvit.data.transforms import prepare_image, resize_in_plane
from rdvit.data.volume import read_image
from rdvit.models.build import build_segmenter, count_parameters
from rdvit.models.probe import states_and_attention
from rdvit.models.recurrence import Recurrence

VOLUMES = 4  # validation volumes whose states are compared


def loop_parameters(config: ModelConfig) -> int:
    """Parameters between stem and decoder."""
    with torch.device("meta"):
        return count_parameters(Recurrence(config))


def flops(config: ModelConfig, crop: tuple[int, ...]) -> float:
    """Floating-point operations (GFLOP) of a forward pass of one image: matrix products, attention and convolutions."""
    model = build_segmenter(config, seed=0).eval()
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(torch.zeros(1, config.in_channels, *crop), halting="none")
    return counter.get_total_flops() / 1e9


def matched_width(looped: ModelConfig, target: int) -> int:
    """The width, a multiple of 8 per head, at which a loop has as many parameters as the target."""
    step = 8 * looped.num_heads
    widths = range(step, 40 * step, step)
    counts = {w: loop_parameters(ModelConfig.model_validate(looped.model_dump() | {"embed_dim": w})) for w in widths}
    return min(widths, key=lambda width: abs(np.log(counts[width] / target)))


def systems(given: study.Setting) -> dict[str, tuple[str, dict[str, Any]]]:
    """Name to preset and changes of the model: the stack, and the loop at its FLOPs and at its memory."""
    stack, loop = (study.configure(given, preset, 0, {}).model for preset in ("vit", "bvit"))
    wide = matched_width(loop, loop_parameters(stack))
    return {
        "ViT": ("vit", {}),
        "bViT, equal FLOPs": ("bvit", {}),
        "bViT, equal memory": ("bvit", {"embed_dim": wide}),
    }


def compare_states(runs: dict[str, Path], given: study.Setting) -> None:
    """Similarity of steps and layers, attention distance and statistics: two figures and a table."""
    states: dict[str, list[np.ndarray]] = {}
    rows: list[dict[str, Any]] = []
    for name, folder in runs.items():
        model, info = load_model(folder)
        crop, patch = info.config.data.crop_size, model.encoder.patch_size
        assert crop != "auto"
        slices = []
        for case in select(load_data(given.data), "validation")[:VOLUMES]:
            image_1XYZ, _ = prepare_image(read_image(case.image), 1.5, info.config.data.clip_percentiles)
            slices += list(resize_in_plane(image_1XYZ, (crop[0], crop[1])).movedim(-1, 0))
        found, attention = states_and_attention(model, torch.stack(slices))
        states[name] = [state.flatten(0, 1).numpy() for state in found]
        grid = [size // p for size, p in zip(crop, patch, strict=True)]
        for row, weights_BHNN in zip(activation_statistics(np.stack(states[name])), attention, strict=True):
            millimetres = [1.5 * p for p in patch]
            heads = np.mean([attention_distance(w_HNN.numpy(), grid, millimetres) for w_HNN in weights_BHNN], axis=0)
            rows += [{"system": name, **row, "head": h + 1, "attention_mm": float(d)} for h, d in enumerate(heads)]
    stack, *loops = states
    matrices = {name: cka_matrix(states[name], states[name]) for name in states}
    matrices |= {f"{name} against {stack}": cka_matrix(states[name], states[stack]) for name in loops}
    save_figure(similarity_figure(matrices), given.out / "matched_budget_cka.png")
    labels = ("step or layer", "attention distance (mm), bars over heads")
    save_figure(seeds_curve(rows, "step", "attention_mm", "system", labels), given.out / "matched_budget_attention.png")
    last = {name: row["relative_step"] for name in states for row in rows if row["system"] == name}
    text = f"Relative size of the last step: {', '.join(f'{name} {value:.3f}' for name, value in last.items())}."
    study.write_results(given.out / "matched_budget_states", rows, text)


def main(words: list[str] | None = None) -> None:
    """Train all systems with all seeds, or find them trained, and write table, figures and paragraph."""
    given = study.setting(__doc__, words)
    rows, scores = [], {}
    compared: dict[str, Path] = {}
    for name, (preset, changes) in systems(given).items():
        scores[name] = []
        for seed in given.seeds:
            config = study.configure(given, preset, seed, changes)
            folder = study.train(given, config)
            compared.setdefault(name, folder)
            scores[name].append(study.patient_dice(given, folder))
            info = load_model(folder)[1].config.model
            size = {"loop_parameters": loop_parameters(info), "parameters": count_parameters(build_segmenter(info, seed=0))}
            row = {"system": name, "seed": seed, "width": info.embed_dim, "dice": float(np.mean([*scores[name][-1].values()]))}
            rows.append(row | size | {"gflops": flops(info, study.CROP)})
    lines = []
    for name, found in scores.items():
        first = next(row for row in rows if row["system"] == name)
        text = (
            f"{name}: Dice {study.spread_of(rows, system=name)}, {first['loop_parameters'] / 1e6:.3f} M parameters in the loop"
        )
        text += f" ({first['parameters'] / 1e6:.3f} M in all), {first['gflops']:.2f} GFLOP"
        if name != "ViT":
            difference, p = study.paired(found, scores["ViT"])
            text += f"; {difference:+.3f} against the ViT (Wilcoxon over {len(found[0])} patients, p = {p:.2g})"
        lines.append(text + ".")
    study.write_results(given.out / "matched_budget", rows, " ".join(lines))
    for x, label in (("loop_parameters", "parameters between stem and decoder"), ("gflops", "GFLOP of one crop")):
        figure = seeds_curve(rows, x, "dice", "system", (label, "Dice"), log=True)
        save_figure(figure, given.out / f"matched_budget_{x}.png")
    compare_states(compared, given)


if __name__ == "__main__":
    study.run(main)
