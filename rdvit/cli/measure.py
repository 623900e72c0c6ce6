"""`rdvit measure`: volumes of a segmentation, and with both phases ejection fractions and the myocardial mass."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rdvit.cli.console import console
from rdvit.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

    from rdvit.data.volume import Volume

ACDC_CLASS_NAMES = {1: "RV", 2: "MYO", 3: "LV"}


def measure(
    seg: Annotated[Path | None, typer.Argument(metavar="SEG", help="A segmentation (NIfTI).")] = None,
    ed: Annotated[Path | None, typer.Option("--ed", help="The segmentation at end-diastole.")] = None,
    es: Annotated[Path | None, typer.Option("--es", help="The segmentation at end-systole of the same heart.")] = None,
    labels: Annotated[
        str | None,
        typer.Option("--labels", help='Class names, as "1=RV,2=MYO,3=LV". Default: from the file, else ACDC\'s.'),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Write the results as JSON to standard output.")] = False,
) -> None:
    """Measure volumes (mL); with --ed and --es also LV and RV ejection fraction (%) and LV mass (g).

    \f
    Raises:
        ConfigError: Neither SEG alone nor the pair --ed and --es was given, or --labels cannot be read.
        DataError: A file cannot be read as a label map.
    """
    from rdvit.evaluation.cardiac import cardiac_measures
    from rdvit.evaluation.summary import to_json

    target = console()
    names = None if labels is None else parse_labels(labels)
    if seg is not None and ed is None and es is None:
        measured = _measure_file(seg, names, target)
        _print_volumes(target, {seg.name: measured})
    elif seg is None and ed is not None and es is not None:
        phases = {"ED": _measure_file(ed, names, target), "ES": _measure_file(es, names, target)}
        measures = cardiac_measures(phases["ED"]["volumes_ml"], phases["ES"]["volumes_ml"])
        measured = {**phases, "measures": measures}
        _print_volumes(target, phases)
        _print_measures(target, measures)
    else:
        raise ConfigError(
            "expected one segmentation, or both --ed and --es",
            hint="rdvit measure SEG, or rdvit measure --ed SEG --es SEG",
        )
    if as_json:
        typer.echo(to_json(measured))


def parse_labels(text: str) -> dict[int, str]:
    """Read class names from "1=RV,2=MYO,3=LV".

    Args:
        text: Pairs of a label value above 0 and a name, separated by commas.

    Returns:
        Label value to name.

    Raises:
        ConfigError: A pair is malformed, or a value or a name comes twice.
    """
    pairs = [re.fullmatch(r"\s*(\d+)\s*=\s*(\S+)\s*", part) for part in text.split(",")]
    names = {int(pair[1]): pair[2] for pair in pairs if pair}
    if len(names) != len(pairs) or len(set(names.values())) != len(pairs) or 0 in names:
        raise ConfigError(f'expected --labels like "1=RV,2=MYO,3=LV", each value above 0 and name once, got {text!r}')
    return names


def _measure_file(path: Path, names: dict[int, str] | None, target: Console) -> dict[str, Any]:
    """Spacing, class names and volumes of one file; a label value without a name is measured as "label N"."""
    import numpy as np

    from rdvit.data.volume import read_labels
    from rdvit.evaluation.cardiac import structure_volumes_ml

    volume = read_labels(path)
    if names is None:
        names = _stored_class_names(volume)
    if names is None:
        names = ACDC_CLASS_NAMES
        target.print(f"{path}: holds no class names, taking ACDC's 1=RV 2=MYO 3=LV (--labels sets others)")
    unnamed = [int(value) for value in np.unique(volume.array) if value != 0 and int(value) not in names]
    names = {**names, **{value: f"label {value}" for value in unnamed}}
    return {
        "file": str(path),
        "spacing_mm": list(volume.spacing),
        "class_names": names,
        "volumes_ml": structure_volumes_ml(volume.array, volume.spacing, names),
    }


def _stored_class_names(volume: Volume) -> dict[int, str] | None:
    """The names that rdvit's writer puts into the NIfTI description, "rdvit: 1=RV 2=MYO 3=LV"; None in other files."""
    if volume.header is None:
        return None
    description = volume.header["descrip"].item().decode("utf-8", errors="replace")
    if not description.startswith("rdvit:"):
        return None
    return {int(value): name for value, name in re.findall(r"(\d+)=(\S+)", description)} or None


def _print_volumes(target: Console, files: dict[str, dict[str, Any]]) -> None:
    from rich.table import Table

    table = Table("volume (mL)", *files)
    for name in dict.fromkeys(name for measured in files.values() for name in measured["volumes_ml"]):
        volumes = [measured["volumes_ml"].get(name) for measured in files.values()]
        table.add_row(name, *("-" if volume is None else f"{volume:.1f}" for volume in volumes))
    spacings = [" x ".join(f"{size:.4g}" for size in measured["spacing_mm"]) for measured in files.values()]
    table.add_row("voxel (mm)", *spacings, style="dim")
    target.print(table)


def _print_measures(target: Console, measures: dict[str, float]) -> None:
    from rich.table import Table

    if not measures:
        target.print("no structure is named LV, RV or MYO, so there is no ejection fraction (name them with --labels)")
        return
    table = Table("measure", "value")
    for name, value in measures.items():
        quantity, unit = name.rsplit("_", 1)
        unit = {"ml": "mL", "percent": "%"}.get(unit, unit)
        table.add_row(quantity.replace("_", " "), f"{value:.1f} {unit}")
    target.print(table)
    if any(value < 0 for name, value in measures.items() if name.endswith("EF_percent")):
        target.print("an ejection fraction is negative: were --ed and --es swapped?")
