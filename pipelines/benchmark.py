"""How fast the loop is, and against what: one command, minutes, ratios from one run.

    python pipelines/benchmark.py [--data DIR] [--only roofline,halting] [--out DIR] [--repeats 5] [--clock cpu]

Repetitions of the things compared are interleaved, so that other load falls on all of them; seconds are medians, ratios are
medians over the rounds. ``--clock cpu`` counts processor time of all threads instead, for a machine that others use too. The
networks have fresh weights: time does not depend on them, except through halting, whose head is set to the wanted mean ponder;
whole volumes and files go through the models of the package (``--model`` and ``--file-model`` take others). Peak memory is that
of a process of its own above what it held before. Writes ``benchmark.json`` and ``benchmark.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import csv
import json
import multiprocessing
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from peers import MULTIPLES, padded_size, peer
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from rdvit.checkpoint import DEFAULT, SHIPPED, load_model
from rdvit.config import resolve_config
from rdvit.data.datalist import load_data, select
from rdvit.data.default import default_data
from rdvit.data.transforms import prepare_image
from rdvit.data.volume import Volume, read_image
from rdvit.inference.predictor import Predictor
from rdvit.inference.writer import write_map
from rdvit.models.build import build_segmenter, count_parameters
from rdvit.models.experts import Experts
from rdvit.models.feedforward import FeedForward
from rdvit.models.segmenter import Segmenter

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
LOOPS = (1, 4, 8, 12, 24)
CROP = (96, 96, 8)  # 1152 tokens, the crop of a 3D training
LOOP_GRID = (16, 16, 8)  # 2048 tokens
Row = dict[str, Any]


class Bench:
    """What the groups share: the options, the example volume, and the rows they add."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.repeats, self.clock, self.out = options.repeats, CLOCKS[options.clock], options.out
        self.tables: dict[str, list[Row]] = {}
        self.targets: list[Row] = []
        self.data, why = (options.data, "as asked") if options.data else default_data()
        self.case = select(load_data(self.data))[0]
        print(f"data: {self.data} ({why}), case {self.case.id}", file=sys.stderr)
        self.model, self.file_model = options.model, options.file_model

    def add(self, table: str, **row: Any) -> None:
        """Add a row to a table."""
        self.tables.setdefault(table, []).append(row)
        print(f"{table}: {row}", file=sys.stderr)

    def target(self, what: str, value: float, limit: float, at_most: bool = True, unit: str = "x") -> None:
        """Add a row to the table of targets."""
        met = value <= limit if at_most else value >= limit
        sign = "<=" if at_most else ">="
        row = {"what": what, "measured": round(value, 3), "target": f"{sign} {limit:g} {unit}", "met": "yes" if met else "no"}
        self.targets.append(row)
        print(f"target: {row}", file=sys.stderr)

    def interleave(self, calls: dict[str, Callable[[], Any]], repeats: int | None = None) -> dict[str, list[float]]:
        """Seconds of each call in each round, after one round that does not count."""
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for round_number in range((repeats or self.repeats) + 1):
            for name, call in calls.items():
                start = self.clock()
                call()
                if round_number:
                    seconds[name].append(self.clock() - start)
        return seconds


def ratio(ours: list[float], theirs: list[float]) -> float:
    """Median over the rounds."""
    return statistics.median(a / b for a, b in zip(ours, theirs, strict=True))


def network(preset: str, loops: int, **changes: Any) -> Segmenter:
    """A 3D segmenter with fresh weights, for thick slices."""
    model = {"patch_size": [8, 8, 1], "loops": loops, **changes}
    return build_segmenter(resolve_config("3d", preset, flags={"model": model}).model, seed=0).eval()


def images(size: tuple[int, ...]) -> Tensor:
    """One random image (1, 1, X, Y, Z)."""
    return torch.randn(1, 1, *size, generator=torch.Generator().manual_seed(0))


def forward(model: nn.Module, x: Tensor, *arguments: Any) -> None:
    """One forward pass as in evaluation."""
    with torch.inference_mode():
        model(x, *arguments)


def train_step(model: nn.Module, x: Tensor) -> None:
    """Forward and backward."""
    model.zero_grad(set_to_none=True)
    model(x).square().mean().backward()


def gigaflops(call: Callable[[], Any]) -> float:
    """Floating-point operations in 1e9, as PyTorch counts them; attention by its two products."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        call()
    return counter.get_total_flops() / 1e9


def roofline(bench: Bench) -> None:
    """The block against the machine's matrix product."""
    a = torch.randn(1024, 1024)
    for preset in ("rdvit", "rdvit-moe"):
        block = network(preset, 1).encoder.recurrence.blocks[0]
        for grid in ((16, 16, 4), LOOP_GRID):
            tokens = grid[0] * grid[1] * grid[2]
            x = torch.randn(1, tokens, 192)
            flops = gigaflops(lambda block=block, x=x, grid=grid: block(x, grid))
            calls = {"block": lambda block=block, x=x, grid=grid: forward(block, x, grid), "product": lambda: a @ a}
            with torch.inference_mode():
                seconds = bench.interleave(calls, 4 * bench.repeats)
            rates = {"block": flops / statistics.median(seconds["block"]), "product": 2.147483648}
            rates["product"] /= statistics.median(seconds["product"])
            share = flops / 2.147483648 / ratio(seconds["block"], seconds["product"])
            bench.add("roofline", block=preset, tokens=tokens, **{f"{k} GFLOP/s": v for k, v in rates.items()}, share=share)
            if preset == "rdvit":
                bench.target(f"block efficiency, {tokens} tokens", share, 0.65, at_most=False)


def set_mean_ponder(model: Segmenter, wanted: float, x: Tensor) -> float:
    """Let tokens halt at random, by the halting head's bias, ``wanted`` loops in the mean; returns the mean there is."""
    head: Any = model.encoder.recurrence.halting
    low, high, mean = -8.0, 8.0, 0.0
    with torch.no_grad():
        head.proj.weight.normal_(std=192**-0.5, generator=torch.Generator().manual_seed(0))
        for _ in range(9):
            head.proj.bias.fill_((low + high) / 2)
            mean = float(model(x, halting="act", return_record=True)[1].steps_BN.mean())
            low, high = (low, (low + high) / 2) if mean < wanted else ((low + high) / 2, high)
    return mean


def halting(bench: Bench) -> None:
    """Loop time with halting against the full loop."""
    loops, x = 12, images((8 * LOOP_GRID[0], 8 * LOOP_GRID[1], LOOP_GRID[2]))
    for preset in ("rdvit", "rdvit-moe"):
        model = network(preset, loops)
        loop, e_BND = model.encoder.recurrence, model.encoder.stem(x)[0].flatten(2).mT.detach()
        e_BND = model.encoder.embed_norm(e_BND).detach()
        for wanted in (2.5, 4.0, 6.0, 9.0):
            ponder = set_mean_ponder(model, wanted, x)
            calls = {
                "halting": lambda loop=loop, e=e_BND: forward(loop, e, LOOP_GRID, loops, torch.ones(1), True),
                "full": lambda loop=loop, e=e_BND: forward(loop, e, LOOP_GRID, loops),
                "one": lambda loop=loop, e=e_BND: forward(loop, e, LOOP_GRID, 1),
            }
            s = bench.interleave(calls)
            of_full, one = ratio(s["halting"], s["full"]), ratio(s["one"], s["full"])
            limit = 1.25 * ponder / loops + one
            row = {"network": preset, "mean ponder": ponder, "seconds": statistics.median(s["halting"])}
            bench.add("halting", **row, **{"of the full loop": of_full, "limit": limit})
            bench.target(f"loop with halting, {preset}, mean ponder {ponder:.1f} of 12, 2048 tokens", of_full, round(limit, 3))


def experts(bench: Bench) -> None:
    """Routed experts against a dense feed-forward of the same active width."""
    routed, dense = Experts(192, 8, 2, 128, 1).eval(), FeedForward(192, 512)
    for tokens in (1024, 2048, 8192):
        x = torch.randn(1, tokens, 192)
        s = bench.interleave(
            {"routed": lambda x=x: forward(routed, x), "dense": lambda x=x: forward(dense, x)}, 4 * bench.repeats
        )
        row = {name: statistics.median(seconds) for name, seconds in s.items()}
        bench.add("experts", tokens=tokens, **row, ratio=ratio(s["routed"], s["dense"]))
        bench.target(f"8 experts, top-2, {tokens} tokens", ratio(s["routed"], s["dense"]), 1.35)


def build(spec: dict[str, Any]) -> tuple[nn.Module, Tensor]:
    """A network and an image for it, from a description that another process can be given."""
    size = tuple(spec["size"])
    if spec["name"] in MULTIPLES:
        size = padded_size(spec["name"], size)
        return peer(spec["name"], size), images(size)
    changes = {"shared_block": False} if spec["name"] == "vit" else {}
    model = network(spec["name"], spec["loops"], halting="none", **changes, **spec.get("changes", {}))
    return model, images(size)


def _status(field: str, pid: int | str = "self") -> float:
    """A memory field of a process in MiB (Linux)."""
    found = re.search(rf"{field}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    return int(found.group(1)) / 1024 if found else 0.0


def _peak(spec: dict[str, Any], train: bool) -> float:
    torch.set_num_threads(spec["threads"])
    model, x = build(spec)
    if train:
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the high-water mark starts anew
    before = _status("VmRSS")
    if train:
        model.train()
        model(x).square().mean().backward()
    else:
        forward(model, x)
    return _status("VmHWM") - before


def peak_memory(spec: dict[str, Any], train: bool) -> float:
    """Peak memory of one step in MiB, above weights and gradients, in a process of its own."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_peak, {**spec, "threads": torch.get_num_threads()}, train).result()


def memory(bench: Bench) -> None:
    """A training step with every loop checkpointed, deep against shallow."""
    spec = {"name": "rdvit", "size": CROP, "changes": {"checkpoint_loops": True}}
    peaks = {loops: peak_memory({**spec, "loops": loops}, train=True) for loops in (4, 24)}
    for loops, peak in peaks.items():
        bench.add("memory of a training step, checkpointed", loops=loops, MiB=peak)
    bench.target("peak memory of a training step, 24 loops over 4, checkpointed", peaks[24] / peaks[4], 1.5)


def networks(bench: Bench) -> None:
    """Every network on a training crop: parameters, operations, time and memory, forward and training."""
    specs = [{"name": name, "loops": n, "size": CROP} for name in ("rdvit", "rdvit-moe", "vit") for n in LOOPS]
    specs += [{"name": name, "size": CROP} for name in MULTIPLES]
    built = {f"{s['name']} {s.get('loops', '')}".strip(): (s, *build(s)) for s in specs}
    inference = bench.interleave({name: lambda m=m, x=x: forward(m, x) for name, (_, m, x) in built.items()})
    training = bench.interleave({name: lambda m=m, x=x: train_step(m, x) for name, (_, m, x) in built.items()}, 1)
    for name, (spec, model, x) in built.items():
        row: Row = {"network": name, "M parameters": count_parameters(model) / 1e6}
        row["GFLOP"] = gigaflops(lambda model=model, x=x: model(x))
        row["forward s"] = statistics.median(inference[name])
        row["of DynUNet"] = ratio(inference[name], inference["DynUNet"])
        row["training step s"] = statistics.median(training[name])
        if sys.platform == "linux":
            row["forward MiB"], row["training MiB"] = (peak_memory(spec, train) for train in (False, True))
        bench.add("networks, " + " x ".join(map(str, CROP)), **row)


def volume(bench: Bench) -> None:
    """One volume: the model as the predictor runs it, against networks on the same grid, padded as each needs it."""
    model, info = load_model(bench.model)
    config = info.config
    image_1XYZ, _ = prepare_image(read_image(bench.case.image), config.data.working_spacing, config.data.clip_percentiles)
    size = tuple(image_1XYZ.shape[1:])
    trained = config.model.loops
    predictor = Predictor(model, info, "cpu", "fp32")
    calls: dict[str, Callable[[], Any]] = {
        f"{config.model.preset}, {trained} loops, as trained": lambda: predictor.run(image_1XYZ),
        f"{config.model.preset}, {trained} loops, no halting": lambda: predictor.run(image_1XYZ, halting="none"),
    }
    ours = next(iter(calls))
    for name in MULTIPLES:
        net, x = build({"name": name, "size": size})
        calls[name] = lambda net=net, x=x: forward(net, x)
    seconds = bench.interleave(calls, max(1, bench.repeats // 2))
    for name, times in seconds.items():
        row = {"network": name, "seconds": statistics.median(times)}
        bench.add(
            "forward of a volume of " + " x ".join(map(str, size)), **row, **{"of DynUNet": ratio(times, seconds["DynUNet"])}
        )
    for name, limit in (("UNETR", 0.5), ("DynUNet", 0.35)):
        bench.target(f"forward of one volume, {ours}, against {name}", ratio(seconds[ours], seconds[name]), limit)


def _run(command: list[str]) -> tuple[float, float]:
    """Seconds of a command, on the wall, and its peak memory in MiB (Linux)."""
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    start, peak = time.perf_counter(), 0.0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment)
    while process.poll() is None:
        with contextlib.suppress(OSError):
            peak = max(peak, _status("VmHWM", process.pid))
        time.sleep(0.02)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - start, peak


def infer_command(model: Path, image: Path, out: str) -> list[str]:
    """``rdvit infer`` of one file, in float32 as the others."""
    rdvit = [sys.executable, "-c", "from rdvit.cli.app import main; main()"]
    return [*rdvit, "infer", str(image), "--out", out, "--model", str(model), "--overwrite", "--precision", "fp32"]


def end_to_end(bench: Bench) -> None:
    """File in, file out, in a process of its own, start-up included."""
    pipeline = [sys.executable, str(Path(__file__).with_name("peers.py")), str(bench.case.image)]
    with tempfile.TemporaryDirectory() as folder:
        commands = {
            f"rdvit infer, {bench.file_model.name}": infer_command(bench.file_model, bench.case.image, folder),
            f"rdvit infer, {bench.model.name}": infer_command(bench.model, bench.case.image, folder),
            "DynUNet pipeline": [*pipeline, f"{folder}/peer.nii.gz"],
            "DynUNet pipeline, mirroring": [*pipeline, f"{folder}/peer.nii.gz", "--mirror"],
        }
        runs = {name: [] for name in commands}
        for _ in range(max(1, bench.repeats // 2)):
            for name, command in commands.items():
                if len(runs[name]) < (1 if "mirroring" in name else bench.repeats):
                    runs[name].append(_run(command))
    for name, measured in runs.items():
        seconds, peaks = zip(*measured, strict=True)
        bench.add("file in, file out", command=name, seconds=statistics.median(seconds), MiB=max(peaks))
    theirs = [seconds for seconds, _ in runs["DynUNet pipeline"]]
    for name in list(runs)[:2]:
        what = f"{name}, of one frame against the DynUNet pipeline without mirroring"
        bench.target(what, ratio([seconds for seconds, _ in runs[name]], theirs), 0.5)


def large(bench: Bench) -> None:
    """Peak memory of ``rdvit infer`` on a large volume."""
    with tempfile.TemporaryDirectory() as folder:
        spacing = read_image(bench.case.image).spacing
        affine = torch.diag(torch.tensor([*spacing, 1.0], dtype=torch.float64)).numpy()
        array = images((512, 512, 40))[0, 0].numpy()
        file = write_map(Path(folder) / "large.nii.gz", array, Volume(array, affine), "noise")
        for model in (bench.file_model, bench.model):
            seconds, peak = _run(infer_command(model, file, folder))
            bench.add("512 x 512 x 40", command=f"rdvit infer, {model.name}", seconds=seconds, MiB=peak)
            bench.target(f"peak memory of rdvit infer, {model.name}, on 512 x 512 x 40", peak / 1024, 2.0, unit="GiB")


def training(bench: Bench) -> None:
    """Share of the training time that is not spent waiting for data, by the training's own account."""
    for dim in ("2d", "3d"):
        with tempfile.TemporaryDirectory() as folder:
            sets = ["training.epochs=2", "training.steps_per_epoch=4", "training.validate_every=9"]
            command = [sys.executable, "-c", "from rdvit.cli.app import main; main()", "train", "--dim", dim]
            command += ["--data", str(bench.data), "--fraction", "0.05", "--out", f"{folder}/run"]
            _run([*command, *(part for text in sets for part in ("--set", text))])
            with (Path(folder) / "run" / "metrics.csv").open(encoding="utf-8") as file:
                share = float(list(csv.DictReader(file))[-1]["train/network_share"])
        bench.target(f"training {dim}: share of the step spent in the network", share, 0.85, at_most=False)


GROUPS = {f.__name__: f for f in (roofline, halting, experts, memory, networks, volume, end_to_end, large, training)}


def markdown(rows: list[Row]) -> str:
    """A table."""
    keys = list(dict.fromkeys(key for row in rows for key in row))

    def cell(value: Any) -> str:
        return (
            f"{value:.3g}"
            if isinstance(value, float) and abs(value) < 1000
            else f"{value:.0f}"
            if isinstance(value, float)
            else str(value)
        )

    lines = ["| " + " | ".join(keys) + " |", "|" + "---|" * len(keys)]
    return "\n".join(lines + ["| " + " | ".join(cell(row.get(key, "")) for key in keys) + " |" for row in rows])


def main() -> None:
    """Run the groups that were asked for and write what they found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, help="data set whose first case is segmented; as `rdvit evaluate`'s default")
    parser.add_argument("--model", type=Path, default=SHIPPED / "acdc-3d-moe", help="model folder, in 3D: a volume, and files")
    parser.add_argument("--file-model", type=Path, default=SHIPPED / DEFAULT, help="model folder: files")
    parser.add_argument("--only", default=",".join(GROUPS), help=f"of {', '.join(GROUPS)}")
    parser.add_argument("--out", type=Path, default=Path("runs/benchmark"))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: processor time over all threads")
    options = parser.parse_args()
    wanted = options.only.split(",")
    if unknown := set(wanted) - set(GROUPS):
        parser.error(f"unknown group {', '.join(sorted(unknown))}; there are {', '.join(GROUPS)}")
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    bench = Bench(options)
    processor = (
        re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        if sys.platform == "linux"
        else None
    )
    machine = {
        "processor": processor.group(1) if processor else platform.processor(),
        "cores": os.cpu_count(),
        "threads": options.threads,
        "torch": torch.__version__,
        "clock": options.clock,
        "repeats": options.repeats,
        "load at the start": os.getloadavg()[0],
        "data": str(bench.data),
        "groups": wanted,
    }
    for name in wanted:
        GROUPS[name](bench)
        result = {"machine": machine, "targets": bench.targets, "tables": bench.tables}
        (options.out / "benchmark.json").write_text(json.dumps(result, indent=2), encoding="utf-8")
        parts = [
            ", ".join(f"{key} {value}" for key, value in machine.items()),
            markdown(bench.targets) if bench.targets else "",
        ]
        parts += [f"## {title}\n\n{markdown(rows)}" for title, rows in bench.tables.items()]
        (options.out / "benchmark.md").write_text("# Benchmark\n\n" + "\n\n".join(parts) + "\n", encoding="utf-8")
    print(f"written to {options.out}", file=sys.stderr)


if __name__ == "__main__":
    main()
