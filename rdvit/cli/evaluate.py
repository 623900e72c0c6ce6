"""``rdvit evaluate``."""

from __future__ import annotations

import logging
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rdvit.cli.console import check_output, console, error_line, parse_loops, print_json, print_table, progress_bar
from rdvit.cli.startup import keep_memory
from rdvit.errors import ConfigError, DataError

if TYPE_CHECKING:
    from rdvit.data.datalist import Case, DataList

_log = logging.getLogger("rdvit")


def evaluate(
    data: Annotated[Path | None, typer.Option(help="Labelled data set to segment and score.")] = None,
    split: Annotated[str, typer.Option(help="all, fold0-train, fold0-val, ..., or a name from the JSON list.")] = "fold0-val",
    model: Annotated[
        str | None, typer.Option(help="Model folder, run or model of the package; the newest finished run, else acdc-2d.")
    ] = None,
    loops: Annotated[str | None, typer.Option(help="Loops, several with commas: 1,2,4,auto. As in infer.")] = None,
    halting: Annotated[Literal["act", "none"] | None, typer.Option(help="Stop tokens by ACT, or run all loops.")] = None,
    merge: Annotated[str, typer.Option(help="Share of similar tokens to merge, several with commas: 0,0.1,0.25.")] = "0",
    pred: Annotated[Path | None, typer.Option(help="Folder of predictions to score against --ref.")] = None,
    ref: Annotated[Path | None, typer.Option(help="Folder of reference labels, or a data set.")] = None,
    labels: Annotated[str | None, typer.Option(help='Class names for --ref, "1=RV,2=MYO,3=LV".')] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for summary.json, the table and the figure.")] = None,
    keep_largest: Annotated[
        bool | None, typer.Option(help="Keep the largest piece of the foreground only; as the model says.", show_default=False)
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], typer.Option(help="Number format.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that exist in --out.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON on standard output.")] = False,
) -> None:
    """Score a model on labelled data, or predictions against references: Dice, HD95, ASSD, volumes, EF, mass.

    \f
    Raises:
        RdvitError: On wrong input. Failed cases are counted and exit code 1 given.
    """
    from rdvit.evaluation.summary import to_json

    if (pred is None) != (ref is None) or (pred is not None and data is not None):
        raise ConfigError("expected either --data, or --pred and --ref together")
    numbers, rates = _numbers(loops), _rates(merge)
    if out is not None:
        tables = ["merging.csv"] if len(rates) > 1 else ["loops.csv", "loops.png"] if len(numbers) > 1 else []
        names = ["summary.json", *tables]
        check_output(out, [out / name for name in names], overwrite)
    if pred is not None and ref is not None:
        summaries = [_score_folder(pred, ref, labels)]
    else:
        how = (numbers, rates, halting, device, precision, keep_largest)
        summaries = _score_model(data, split, model, how, runs)
    rows = [_row(summary) for summary in summaries]
    _tell(summaries, rows)
    result: dict[str, Any] = summaries[0] if len(summaries) == 1 else {"table": rows, "summaries": summaries}
    if out is not None:
        _write(out, result, rows)
    if as_json:
        print_json(to_json(result))
    if any(summary["failures"] for summary in summaries):
        raise typer.Exit(1)


def _score_model(data: Path | None, split: str, model: str | None, how: tuple[Any, ...], runs: Path) -> list[dict[str, Any]]:
    keep_memory()
    from rdvit.checkpoint import find_model, load_model, shown_name
    from rdvit.data.datalist import load_data, select
    from rdvit.data.default import default_data
    from rdvit.evaluation.summary import summarize
    from rdvit.inference.cases import score_cases
    from rdvit.inference.predictor import Predictor
    from rdvit.models.merging import Merging

    loops, rates, halting, device, precision, keep_largest = how
    mergings = [Merging(rate) for rate in rates]
    folder = find_model(model, runs)
    network, info = load_model(folder)
    source, why = (data, "as asked") if data is not None else default_data()
    dataset = load_data(source)
    if dataset.class_names != info.class_names:
        raise DataError(f"classes {dataset.class_names} of the data are not the model's {info.class_names}", file=source)
    cases = select(dataset, split)
    predictor = Predictor(network, info, device, precision, keep_largest)
    console().print(f"model: {shown_name(folder)}; data: {source} ({why}), split {split}, {len(cases)} cases")
    _warn_of_training_cases(info.training, dataset, cases)
    summaries = []
    with progress_bar() as report:
        for number, merging in product(loops or [info.config.model.loops], mergings):
            predictor.merging = merging
            results = score_cases(predictor, cases, info.class_names, number, halting, report)
            run = {
                "model": str(folder),
                "data": str(source),
                "split": split,
                "loops": number,
                "loops_taken": _mean([result.loops for result in results]),
                "seconds_per_case": _mean([result.seconds for result in results]),
                "halting": halting or info.config.model.halting,
                "merge": merging.rate,
                "precision": predictor.precision.name,
                "keep_largest": predictor.keep_largest,
            }
            summaries.append({"run": run, **summarize(results, info.class_names)})
    return summaries


def _warn_of_training_cases(training: dict[str, Any], data: DataList, cases: list[Case]) -> None:
    """Say so where cases are scored that the model was trained on: those of the split it names, in the data set it names."""
    from rdvit.data.datalist import select

    name = training.get("train")
    if name is None or training.get("dataset") != data.name:
        return
    seen = {case.patient for case in select(data, name, training.get("fraction", 1.0))}
    known = sorted({case.patient for case in cases} & seen)
    if known:
        _log.warning("warning: %d of these patients were in the training of this model", len(known))


def _score_folder(pred: Path, ref: Path, labels: str | None) -> dict[str, Any]:
    from rdvit.cli.measure import parse_labels
    from rdvit.data.datalist import Case, load_data
    from rdvit.evaluation.summary import summarize
    from rdvit.inference.cases import score_folder

    for folder in (pred, ref):
        if not folder.is_dir():
            raise DataError("no such folder", file=folder)
    files = sorted(p for p in ref.iterdir() if p.name.endswith((".nii", ".nii.gz")) and not p.name.startswith("."))
    if files:
        cases = [Case(p.name.split(".nii")[0], p.name.split(".nii")[0], p, p) for p in files]
        names = parse_labels(labels) if labels else _names_in(files)
    else:
        dataset = load_data(ref)
        cases, names = list(dataset.cases), parse_labels(labels) if labels else dataset.class_names
    summary = summarize(score_folder(pred, cases, names), names)
    return {"run": {"pred": str(pred), "ref": str(ref)}, **summary}


def _names_in(files: list[Path]) -> dict[int, str]:
    import numpy as np

    from rdvit.data.volume import read_labels

    values = sorted({int(v) for path in files for v in np.unique(read_labels(path).array)} - {0})
    return {value: f"label_{value}" for value in values}


def _mean(values: list[float | None]) -> float | None:
    """Mean over the cases that did not fail."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _numbers(text: str | None) -> list[int | Literal["auto"]]:
    if text is None:
        return []
    return [number for part in text.split(",") if (number := parse_loops(part.strip())) is not None]


def _rates(text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ConfigError(f"expected --merge like 0,0.1,0.25, found '{text}'") from None


def _row(summary: dict[str, Any]) -> dict[str, Any]:
    """One line for a run of all cases: loops, halting, merging, time, mean Dice, Dice per structure, HD95, EF error."""
    from rdvit.evaluation.summary import dice_table

    table = {row["structure"]: row for row in dice_table(summary)}
    run = summary["run"]
    row = {key: run[key] for key in ("loops", "loops_taken", "halting", "merge", "seconds_per_case") if key in run}
    row |= {"dice": table["mean"]["Dice"]} | {f"dice_{n}": r["Dice"] for n, r in table.items() if n != "mean"}
    row["hd95_mm"] = table["mean"]["HD95"]
    agreement = summary.get("cardiac", {}).get("agreement", {})
    for measure, key in (("LV_EF_percent", "lv_ef_error"), ("RV_EF_percent", "rv_ef_error")):
        if measure in agreement:
            row[key] = agreement[measure]["mean_absolute_error"]
    return row


def _tell(summaries: list[dict[str, Any]], rows: list[dict[str, Any]]) -> None:
    from rdvit.evaluation.summary import dice_table

    if len(summaries) == 1:
        print_table("per structure", dice_table(summaries[0]))
        agreement = summaries[0].get("cardiac", {}).get("agreement", {})
        if agreement:
            print_table("clinical measures against the reference", [{"measure": name} | a for name, a in agreement.items()])
    else:
        print_table("Dice against loops and merging" if len({row["merge"] for row in rows}) > 1 else "Dice against loops", rows)
    for failure in summaries[0]["failures"]:
        error_line(f"{failure['case']}: {failure['reason']}")


def _write(out: Path, result: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    from rdvit.atomic import atomic
    from rdvit.evaluation.summary import to_json

    with atomic(out / "summary.json") as path:
        path.write_text(to_json(result), encoding="utf-8")
    if len(rows) > 1:
        from rdvit.analysis.charts import loops_curve
        from rdvit.analysis.figures import save_figure

        merges = len({row["merge"] for row in rows}) > 1
        with atomic(out / ("merging.csv" if merges else "loops.csv")) as path:
            lines = [",".join(rows[0]), *(",".join(str(value) for value in row.values()) for row in rows)]
            path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        if not merges:
            save_figure(loops_curve(rows), out / "loops.png")
    console().print(f"written to {out}")
