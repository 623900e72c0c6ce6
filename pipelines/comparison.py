"""RD-ViT against stacked ViTs at equal steps, and against MONAI's UNETR and DynUNet at equal training time, over several seeds.

    python pipelines/comparison.py --data path/to/ACDC --fraction 0.1 --seeds 3 --steps 800

All train on the same samples with the same augmentation, loss, optimiser schedule, averaging and validation; the transformers
of rdvit share stem and decoder, too:

    vit         as many different blocks as the loop has steps, of the same width: equal FLOPs
    vit-narrow  the same, narrower: equal parameters
    UNETR       MONAI's, of the same width and heads, twelve layers
    DynUNet     in nnU-Net's manner, of equal parameters
    nnU-Net     DynUNet with the channels of nnU-Net's plan for ACDC (not among the defaults)

Outside networks get as many steps as fit into the reference's time. Seconds of a step, its samples included, are measured once,
all systems in turn in every round, and kept beside the results: what else the machine does changes no result.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import outside
import study
import torch
from benchmark import gigaflops

from rdvit.analysis.charts import intervals_figure
from rdvit.analysis.figures import save_figure
from rdvit.atomic import write
from rdvit.config import Config, merge, resolve_config, validate
from rdvit.data.default import default_data
from rdvit.data.loaders import training_batches
from rdvit.data.planning import settle
from rdvit.errors import ConfigError
from rdvit.models.build import build_segmenter, count_parameters
from rdvit.training.run import Split, make_split
from rdvit.training.schedule import training_loops
from rdvit.training.trainer import Trainer

_log = logging.getLogger("rdvit")
STACKS, OUTSIDE = ("vit", "vit-narrow"), ("UNETR", "DynUNet", "nnU-Net")
STEPS_PER_EPOCH = 50
Row = dict[str, Any]


@dataclass(frozen=True)
class System:
    """One of the networks: its configuration, the outside network where it is one, and its steps."""

    name: str
    config: Config
    recipe: outside.Recipe | None = None

    @property
    def steps(self) -> int:
        """Optimiser steps of its training."""
        training = self.config.training
        assert training.epochs is not None
        return training.epochs * training.steps_per_epoch

    def with_training(self, **changes: Any) -> System:
        """The same with other training settings."""
        return replace(self, config=validate(merge(self.config.model_dump(), {"training": changes})))

    def build(self) -> torch.nn.Module:
        """The network with fresh weights."""
        if self.recipe is not None:
            return outside.build(self.recipe, self.config)
        return build_segmenter(self.config.model, seed=0)


def main(words: list[str] | None = None) -> None:
    """Measure what a step takes, train what is not trained yet, write table, figures and paragraph."""
    given = options(words)
    split = make_split(given.data or default_data()[0], fraction=given.fraction)
    found = systems(given, split)
    seconds = step_seconds(found, split, given)
    reference = found[0]
    for i, system in enumerate(found):
        if system.recipe is not None:
            found[i] = system.with_training(**length(reference.steps * seconds[reference.name] / seconds[system.name]))
    rows: list[Row] = []
    patients: dict[str, list[dict[str, float]]] = {}
    for system in found:
        size = sizes(system)
        for seed in range(given.seeds):
            summary = trained(system.with_training(seed=seed), split, given.out)
            patients.setdefault(system.name, []).append(study.dice_of_patients(summary))
            known = {"system": system.name, "fraction": given.fraction, "seed": seed, **size, "steps": system.steps}
            minutes = {"step_seconds": seconds[system.name], "minutes": system.steps * seconds[system.name] / 60}
            rows.append(known | minutes | study.scores(summary))
    name = f"comparison_{given.dim}_{100 * given.fraction:g}"
    study.write_results(given.out / name, rows, paragraph(rows, patients, given.fraction))
    figures(rows, patients, given.out / name)


def options(words: list[str] | None) -> argparse.Namespace:
    """The command line; the steps are those of the reference and the stacks."""
    parser = study.recipe_options(__doc__)
    parser.add_argument("--preset", default="rdvit", help="the reference, which all others are compared with")
    parser.add_argument("--systems", nargs="*", choices=STACKS + OUTSIDE, default=[*STACKS, *OUTSIDE[:2]], help="the others")
    parser.add_argument("--fraction", type=float, default=0.1, help="share of the training patients")
    parser.add_argument("--rounds", type=int, default=5, help="rounds in which the seconds of a step are measured")
    return parser.parse_args(words)


# Systems


def systems(given: argparse.Namespace, split: Split) -> list[System]:
    """The reference and what it is compared with; the steps of the outside networks are those of the reference still."""
    training = length(given.steps) | {"validate_every": 10**6}

    def configured(preset: str, **model: Any) -> Config:
        config = resolve_config(given.dim, preset, settings=given.set, flags={"training": training, "model": model})
        return settle(config, split.train, split.data.class_names)

    reference = System(given.preset, configured(given.preset))
    loops, parameters = reference.config.model.loops, count_parameters(reference.build())
    one_loop = configured("vit", loops=1)  # what trainer and predictor ask of an outside network
    makers: dict[str, Callable[[str], System]] = {
        "vit": lambda name: System(name, configured("vit", loops=loops)),
        "vit-narrow": lambda name: System(name, narrowed(configured("vit", loops=loops), parameters)),
        "UNETR": lambda name: System(name, one_loop, outside.Recipe("UNETR", (16,))),
        "DynUNet": lambda name: System(name, one_loop, outside.matched_dynunet(one_loop, parameters)),
        "nnU-Net": lambda name: System(
            name, one_loop, outside.Recipe("DynUNet", outside.NNUNET_FILTERS[one_loop.model.spatial_dims])
        ),
    }
    if given.preset in given.systems:
        raise ConfigError(f"'{given.preset}' is the reference and among the others, too")
    return [reference, *(makers[name](name) for name in given.systems)]


def length(steps: float) -> dict[str, int]:
    """So many steps, to the nearest that even epochs of about :data:`STEPS_PER_EPOCH` allow; a stopped training loses one."""
    epochs = max(1, round(steps / STEPS_PER_EPOCH))
    return {"epochs": epochs, "steps_per_epoch": max(1, round(steps / epochs))}


def narrowed(config: Config, parameters: int) -> Config:
    """The stack of the width at which it has as nearly so many parameters as there is; all other sizes stay."""
    step = 4 * config.model.num_heads
    widths = [width for width in range(step, config.model.embed_dim + 1, step) if width >= 16]
    configs = [validate(merge(config.model_dump(), {"model": {"embed_dim": width}})) for width in widths]
    with torch.device("meta"):
        counts = [count_parameters(build_segmenter(narrow.model)) for narrow in configs]
    return configs[min(range(len(configs)), key=lambda i: abs(np.log(counts[i] / parameters)))]


def sizes(system: System) -> Row:
    """Parameters, and floating-point operations (1e9) of a forward pass of one training crop at the trained depth."""
    model, config = system.build().eval(), system.config
    assert config.data.crop_size != "auto"
    image = torch.zeros(1, config.model.in_channels, *config.data.crop_size)
    return {"parameters": count_parameters(model), "gflops": gigaflops(lambda: model(image, None, "none"))}


def trained(system: System, split: Split, out: Path) -> Row:
    """The summary of a training, which is made where it is not there yet."""
    if system.recipe is None:
        folder = study.train_once(split, system.config, out)
    else:
        folder = outside.train_once(split, system.config, system.name, system.recipe, out)
    return json.loads((folder / "summary.json").read_text(encoding="utf-8"))


# Time


def step_seconds(found: list[System], split: Split, given: argparse.Namespace) -> dict[str, float]:
    """Seconds of a training step of each system, measured once and kept for these systems and steps."""
    described = [[s.name, s.config.model_dump(mode="json"), repr(s.recipe)] for s in found]
    key = hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()[:12]
    kept = given.out / f"comparison_step_seconds_{key}.json"
    if not kept.is_file():
        seconds = measured(found, split, given)
        machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
        write(kept, json.dumps({"seconds": seconds, "rounds": given.rounds, "machine": machine}, indent=2))
    return json.loads(kept.read_text(encoding="utf-8"))["seconds"]


def measured(found: list[System], split: Split, given: argparse.Namespace) -> dict[str, float]:
    """Seconds of the mean step: at each depth that is drawn the median over the rounds; a first round does not count."""
    samples = outside.read_samples(found[0].config, split, given.out)
    nobody = replace(split, validation=[])
    with tempfile.TemporaryDirectory() as folder:
        trainers = {
            s.name: outside.trainer(s.config, nobody, Path(folder) / s.name, samples, None if s.recipe is None else s.build())
            for s in found
        }
        turns = {name: depths_drawn(trainer) for name, trainer in trainers.items()}
        times: dict[str, dict[int, list[float]]] = {name: {step: [] for step in steps} for name, steps in turns.items()}
        for done in range(given.rounds + 1):
            _log.info("seconds of a step: round %d of %d", done, given.rounds)
            for turn in range(max(map(len, turns.values()))):
                for name, shares in turns.items():
                    step = list(shares)[turn % len(shares)]
                    elapsed = seconds_of(trainers[name], step)
                    if done:
                        times[name][step].append(elapsed)
    return {name: sum(share * statistics.median(times[name][step]) for step, share in turns[name].items()) for name in turns}


def depths_drawn(trainer: Trainer) -> dict[int, float]:
    """The first step at which the training draws each number of loops, and the share of its steps that draw that number."""
    training = trainer.config.training
    assert training.epochs is not None
    drawn = [training_loops(step, trainer.config.model, training) for step in range(training.epochs * training.steps_per_epoch)]
    return {drawn.index(loops): drawn.count(loops) / len(drawn) for loops in sorted(set(drawn))}


def seconds_of(trainer: Trainer, step: int) -> float:
    """Seconds of one training step, samples and augmentation included."""
    trainer.model.train()
    trainer.progress.step = step
    start = time.perf_counter()
    batch = next(training_batches(trainer.samples, trainer.config, step))
    trainer._step(batch)  # waits for the device: it reads the loss
    return time.perf_counter() - start


# Results


def seed_means(scores: list[dict[str, float]]) -> dict[str, float]:
    """Dice of each patient, the mean over the seeds."""
    return {patient: float(np.mean([seed[patient] for seed in scores])) for patient in scores[0]}


def mean_and_spread(values: list[float]) -> str:
    """ "0.812 ± 0.004": mean and standard deviation."""
    return f"{np.mean(values):.4f}" + (f" ± {np.std(values, ddof=1):.4f}" if len(values) > 1 else "")


def paragraph(rows: list[Row], patients: dict[str, list[dict[str, float]]], fraction: float) -> str:
    """What the numbers say."""
    reference = next(iter(patients))
    count, seeds = len(patients[reference][0]), len(patients[reference])
    lines = [
        f"{100 * fraction:g} % of the training patients, {seeds} seed{'s' if seeds > 1 else ''} (mean ± standard deviation); "
        f"differences over {count} validation patients, 95 % bootstrap intervals, p of Wilcoxon's signed ranks."
    ]
    for name, scores in patients.items():
        own = [row for row in rows if row["system"] == name]
        size = f"{own[0]['parameters'] / 1e6:.2f} M parameters, {own[0]['gflops']:.2f} GFLOP, {own[0]['steps']} steps"
        text = f"{name} ({size}, {own[0]['minutes']:.1f} min): Dice {mean_and_spread([row['dice'] for row in own])}"
        text += f", HD95 {np.mean([row['hd95'] for row in own]):.1f} mm"
        if name != reference:
            _, p = study.paired(patients[reference], scores)
            gap = study.difference(seed_means(patients[reference]), seed_means(scores))
            text += f"; {reference} less this {gap}, p = {p:.2g}"
        lines.append(text + ".")
    return " ".join(lines)


def figures(rows: list[Row], patients: dict[str, list[dict[str, float]]], path: Path) -> None:
    """Dice of each system, and how far the reference lies above each other one."""
    reference, *others = patients
    dice = {name: [row["dice"] for row in rows if row["system"] == name] for name in patients}
    spans = {name: (float(np.mean(values)), min(values), max(values)) for name, values in dice.items()}
    save_figure(intervals_figure(spans, "Dice, least to largest of the seeds"), path.with_name(f"{path.name}_dice.png"))
    if others:
        gaps = {name: study.difference(seed_means(patients[reference]), seed_means(patients[name])) for name in others}
        groups = {f"less {name}": (gap.value, gap.low, gap.high) for name, gap in gaps.items()}
        figure = intervals_figure(groups, "difference in Dice, 95 % over patients", wanted=0.0, title=reference)
        save_figure(figure, path.with_name(f"{path.name}_difference.png"))


if __name__ == "__main__":
    study.run(main)
