"""Dice, HD95, time and memory of trained models against the share of tokens merged, for each schedule and batch size.

    python pipelines/token_merging.py runs/my_2d runs/my_3d --data path/to/ACDC --out merging

Writes ``token_merging.csv`` and ``token_merging.png`` into ``--out`` and prints the table, the published one beside it. A row
that the CSV holds already is not measured again, so a run that was stopped goes on where it stopped.

Scores are of whole cases, at the trained loops, without halting unless ``--halting act``, which only the schedule ``single``
can have. Time and memory are of one forward pass over a batch: slices of the first case, or windows of it in 3D, as inference
takes them; and of the loop alone (the stages of ``sret``), since stem and decoder see all tokens. Memory on a CPU is the
largest sum of the tensors alive that the pass makes, on a GPU what PyTorch allocated; that of the loop is what it adds.
``--attention explicit`` measures with attention that holds its weights, as published; fused kernels never do.
"""

from __future__ import annotations

import contextlib
import csv
import statistics
import time
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
import typer
from matplotlib.figure import Figure
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from rdvit.analysis.figures import save_figure
from rdvit.atomic import atomic
from rdvit.checkpoint import load_model
from rdvit.cli.console import console, print_table
from rdvit.data.datalist import Case, load_data, select
from rdvit.data.transforms import prepare_image
from rdvit.data.volume import read_image
from rdvit.errors import ConfigError
from rdvit.inference.cases import score_cases
from rdvit.inference.precision import autocast
from rdvit.inference.predictor import Predictor
from rdvit.models.merging import Merging
from rdvit.models.segmenter import Segmenter
from rdvit.models.sret import SRet

KEY = ("model", "schedule", "rate", "batch", "halting", "split", "cases", "device", "precision", "attention")
MEASURES = ("merged", "dice", "hd95_mm", "ms_per_image", "loop_ms", "peak_mb", "loop_mb")
PUBLISHED = [  # MergeOver (arXiv:2608.13141): SReT-T-distill on ImageNet-1K; constant and linear at r = 10 tokens a block
    {"schedule": "none", "rate": 0.0, "top-1": 77.39, "GFLOPs": 1.91},
    *(
        {"schedule": "single", "rate": rate, "top-1": top1, "GFLOPs": gflops}
        for rate, top1, gflops in (
            *((0.05, 77.11, 1.82), (0.10, 76.98, 1.75), (0.15, 76.77, 1.66), (0.20, 76.49, 1.59), (0.25, 75.92, 1.49)),
            *((0.30, 75.32, 1.42), (0.35, 74.37, 1.34), (0.40, 72.36, 1.25), (0.50, 64.85, 1.11)),
        )
    ),
    {"schedule": "exponential, alpha .5", "rate": 0.25, "top-1": 71.94, "GFLOPs": 1.20},
    {"schedule": "constant", "rate": None, "top-1": 70.95, "GFLOPs": 1.32},
    {"schedule": "linear", "rate": None, "top-1": 74.74, "GFLOPs": 1.46},
]


def main(
    models: Annotated[list[Path], typer.Argument(help="Folders of trained models, 2D or 3D.")],
    data: Annotated[Path, typer.Option(help="Labelled data set.")],
    out: Annotated[Path, typer.Option(help="Folder for the table and the figure.")] = Path("token_merging"),
    split: Annotated[str, typer.Option(help="Cases to score.")] = "fold0-val",
    cases: Annotated[int | None, typer.Option(help="Only so many cases, spread over the split.")] = None,
    rates: Annotated[str, typer.Option(help="Shares of tokens to merge.")] = "0.1,0.25,0.4",
    schedules: Annotated[
        str, typer.Option(help="Of single, constant, linear, exponential.")
    ] = "single,constant,linear,exponential",
    batches: Annotated[str, typer.Option(help="Batch sizes that are timed.")] = "1,16",
    halting: Annotated[Literal["act", "none"], typer.Option(help="Stop tokens by ACT, or run all loops.")] = "none",
    repeats: Annotated[int, typer.Option(help="Passes that are timed; the median counts.")] = 5,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, bf16, fp16.")] = "auto",
    attention: Annotated[Literal["fused", "explicit"], typer.Option(help="Explicit attention holds its weights.")] = "fused",
) -> None:
    """Measure every model at every schedule, rate and batch size."""
    dataset = load_data(data)
    chosen = select(dataset, split)
    chosen = (
        chosen if cases is None else [chosen[i] for i in np.linspace(0, len(chosen) - 1, min(cases, len(chosen))).astype(int)]
    )
    names: list[Any] = schedules.split(",")
    if halting == "act" and names != ["single"]:
        raise ConfigError("with --halting act only the schedule single is possible", hint="--schedules single")
    plan = [("none", Merging(0.0)), *((name, Merging(float(rate), name)) for name in names for rate in rates.split(","))]
    table = Table(out / "token_merging.csv")
    for folder in models:
        network, info = load_model(folder)
        predictor = Predictor(network, info, device, precision)
        for schedule, merging in plan:
            predictor.merging = merging
            for batch in map(int, batches.split(",")):
                how = (
                    folder,
                    schedule,
                    merging.rate,
                    batch,
                    halting,
                    split,
                    len(chosen),
                    predictor.device,
                    predictor.precision.name,
                    attention,
                )
                row = dict(zip(KEY, map(str, how), strict=True))
                if table.find(row):
                    continue
                score = table.find({**row, "batch": None, "attention": None}) or _score(
                    predictor, chosen, info.class_names, halting
                )
                with sdpa_kernel(SDPBackend.MATH) if attention == "explicit" else contextlib.nullcontext():
                    cost = _cost(predictor, chosen[0], batch, halting, repeats)
                table.add({**row, **{k: score[k] for k in ("dice", "hd95_mm")}, **cost})
                console().print(f"{folder} {schedule} {merging.rate:g} batch {batch}: done")
    rows = [row for row in table.rows if Path(row["model"]) in models and row["attention"] == attention]
    print_table("measured", [{k: _number(v) for k, v in row.items() if k in (*KEY[:5], *MEASURES)} for row in rows])
    print_table("published: MergeOver, ImageNet-1K, SReT-T-distill", PUBLISHED)
    save_figure(_figure(rows), out / "token_merging.png")
    console().print(f"written to {out}")


class Table:
    """A CSV file that is rewritten, whole, with every row that is added."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, str]] = list(csv.DictReader(path.open(encoding="utf-8"))) if path.exists() else []

    def find(self, key: dict[str, Any]) -> dict[str, str] | None:
        """A row that agrees with all the values of ``key`` that are not None."""
        wanted = {k: v for k, v in key.items() if v is not None}
        return next((row for row in self.rows if wanted.items() <= row.items()), None)

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and write the file."""
        self.rows.append({k: str(row[k]) for k in (*KEY, *MEASURES)})
        with atomic(self.path) as path, path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, [*KEY, *MEASURES])
            writer.writeheader()
            writer.writerows(self.rows)


class PeakMemory(TorchDispatchMode):
    """Bytes of tensors that were made inside: those alive ``now``, and the most that were alive together since ``restart``."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def restart(self) -> None:
        """Forget the peak so far."""
        self.peak = self.now

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operation and count the storages of its results."""
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            storage = leaf.untyped_storage() if isinstance(leaf, Tensor) else None
            if storage is not None and storage._cdata not in self._known:
                self._known.add(storage._cdata)
                self.now += storage.nbytes()
                weakref.finalize(storage, self._forget, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _forget(self, identity: int, size: int) -> None:
        self._known.discard(identity)
        self.now -= size


class CudaMemory(contextlib.AbstractContextManager["CudaMemory"]):
    """The same of a GPU, by PyTorch's allocator."""

    restart = staticmethod(torch.cuda.reset_peak_memory_stats)
    now = property(lambda _: torch.cuda.memory_allocated())
    peak = property(lambda _: torch.cuda.max_memory_allocated())

    def __exit__(self, *_: object) -> None:
        """Nothing to take back."""


class LoopMeter:
    """Seconds of the loop in one forward pass, and the bytes that it needs beyond what it finds.

    Args:
        model: A segmenter.
        memory: What counts bytes; None for time alone.
    """

    def __init__(self, model: Segmenter, memory: PeakMemory | CudaMemory | None = None) -> None:
        self.seconds, self.bytes, self.peak = 0.0, 0, 0
        self._memory, self._start, self._found = memory, 0.0, 0
        encoder: Any = model.encoder
        modules = encoder.stages if isinstance(encoder, SRet) else [encoder.recurrence]
        handles = [
            (module.register_forward_pre_hook(self._begin), module.register_forward_hook(self._end)) for module in modules
        ]
        self._handles = [handle for pair in handles for handle in pair]

    def _begin(self, *_: Any) -> None:
        if self._memory is not None:
            self._found, self.peak = self._memory.now, max(self.peak, self._memory.peak)
            self._memory.restart()
        self._start = _clock()

    def _end(self, *_: Any) -> None:
        self.seconds += _clock() - self._start
        if self._memory is not None:
            self.bytes = max(self.bytes, self._memory.peak - self._found)
            self.peak = max(self.peak, self._memory.peak)

    def close(self) -> LoopMeter:
        """Take the hooks away."""
        for handle in self._handles:
            handle.remove()
        if self._memory is not None:
            self.peak = max(self.peak, self._memory.peak)
        return self


def _clock() -> float:
    """Seconds, with the work that a GPU was given done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def _score(predictor: Predictor, cases: Sequence[Case], class_names: dict[int, str], halting: Any) -> dict[str, Any]:
    """Mean Dice and HD95 over cases and structures."""
    results = score_cases(predictor, cases, class_names, None, halting)
    scores = {name: [m[name] for result in results for m in result.metrics.values()] for name in ("Dice", "HD95")}
    return {"dice": f"{np.nanmean(scores['Dice']):.4f}", "hd95_mm": f"{np.nanmean(scores['HD95']):.2f}"}


@torch.no_grad()
def _cost(predictor: Predictor, case: Case, batch: int, halting: Any, repeats: int) -> dict[str, Any]:
    """Share of tokens merged, milliseconds per image, and peak memory in MB of a forward pass and of its loop."""
    config, device = predictor.config, predictor.device
    image_1XYZ, _ = prepare_image(read_image(case.image), predictor.spacing, config.data.clip_percentiles)
    if config.model.spatial_dims == 2:
        units = image_1XYZ.movedim(-1, 0)
    else:
        window = predictor.window(tuple(image_1XYZ.shape[1:]))
        units = image_1XYZ[(None, slice(None), *(slice(n) for n in window))]
    images = units.repeat(-(-batch // len(units)), *[1] * (units.ndim - 1))[:batch]
    images = images.to(device).contiguous(memory_format=predictor.layout)

    def run(memory: PeakMemory | CudaMemory | None = None) -> tuple[float, float, LoopMeter]:
        """Share merged, seconds of the pass, and what the loop took of it."""
        meter, start = LoopMeter(predictor.model, memory), _clock()
        with autocast(device, predictor.precision):
            _, record = predictor.model(images, None, halting, merging=predictor.merging, return_record=True)
        return record.merged, _clock() - start, meter.close()

    predictor.model.eval()
    merged = run()[0]
    runs = [run() for _ in range(repeats)]
    memory: PeakMemory | CudaMemory = CudaMemory() if device.type == "cuda" else PeakMemory()
    with memory:
        memory.restart()
        before, (_, _, meter) = memory.now, run(memory)
    ms, loop_ms = (
        1000 * statistics.median(seconds) / batch for seconds in zip(*((r[1], r[2].seconds) for r in runs), strict=True)
    )
    times = {"ms_per_image": f"{ms:.2f}", "loop_ms": f"{loop_ms:.2f}"}
    return {
        "merged": f"{merged:.4f}",
        **times,
        "peak_mb": f"{(meter.peak - before) / 1e6:.1f}",
        "loop_mb": f"{meter.bytes / 1e6:.1f}",
    }


def _figure(rows: Sequence[dict[str, str]]) -> Figure:
    """A row of charts for each model: Dice, HD95, times and memory against the share that was merged."""
    models = list(dict.fromkeys(row["model"] for row in rows))
    batches = sorted({int(row["batch"]) for row in rows})
    shown_measures = MEASURES[1:]
    figure = Figure(figsize=(4 * len(shown_measures), 3.6 * len(models)), layout="constrained")
    axes = figure.subplots(len(models), len(shown_measures), squeeze=False)
    for (name, line), measure in ((pair, m) for pair in zip(models, axes, strict=True) for m in range(len(shown_measures))):
        key, ax = shown_measures[measure], line[measure]
        own = [row for row in rows if row["model"] == name]
        shown = batches if measure >= 2 else [int(own[0]["batch"])]
        for schedule in dict.fromkeys(row["schedule"] for row in own if row["schedule"] != "none"):
            for style, batch in zip(("-", "--", ":", "-."), shown, strict=False):
                kept = [r for r in own if r["schedule"] in (schedule, "none") and int(r["batch"]) == batch]
                points = sorted((float(row["merged"]), float(row[key])) for row in kept)
                label = schedule + (f", batch {batch}" if len(shown) > 1 else "")
                ax.plot(*zip(*points, strict=True), style, marker="o", markersize=4, label=label)
        ax.set(xlabel="share of tokens merged", ylabel=key, title=Path(name).name)
        ax.legend(fontsize=8, frameon=False)
    return figure


def _number(text: str) -> Any:
    try:
        return float(text)
    except ValueError:
        return text


if __name__ == "__main__":
    typer.run(main)
