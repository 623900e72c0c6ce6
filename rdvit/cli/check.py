"""``rdvit check``."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rdvit.cli.console import console, print_json, print_table, progress_bar

if TYPE_CHECKING:
    from rdvit.data.datalist import Case

MONTAGE_CASES = 40


def check(
    data: Annotated[
        Path, typer.Argument(metavar="DATA", help="ACDC, nnU-Net or Decathlon folder, a zip of one, or JSON list.")
    ],
    montage: Annotated[Path | None, typer.Option(help="PNG of the cases with their labels and L/R marks.")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a montage that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON on standard output.")] = False,
) -> None:
    """Look for what spoils a training: geometry, labels, finite values, pairs, copies, patients in two splits.

    \f
    Raises:
        RdvitError: If there is no data set. Problems in it are listed and exit code 1 given; warnings alone give 0.
    """
    from rdvit.cli.console import check_output
    from rdvit.data.integrity import check_data
    from rdvit.evaluation.summary import to_json

    if montage is not None:
        check_output(montage.parent, [montage], overwrite)
    with progress_bar() as report:
        result = check_data(data, report)
    rows = [{"level": f.level, "kind": f.kind, "case": f.case or "-", "what": f.text} for f in result.findings]
    shown = [row for row in rows if row["level"] != "info"]
    for kind in dict.fromkeys(row["kind"] for row in rows if row["level"] == "info"):  # one line for each kind
        alike = [row for row in rows if row["level"] == "info" and row["kind"] == kind]
        shown.append(alike[0] | {"case": f"{len(alike)} cases", "what": f"such as {alike[0]['case']}: {alike[0]['what']}"})
    if shown:
        print_table(f"{data}", shown)
    counts = {f"{level}s" if level != "info" else level: result.count(level) for level in ("problem", "warning", "info")}
    summary = ", ".join(f"{count} {name}" for name, count in counts.items())
    console().print(f"{result.data.name}: {len(result.data.cases)} cases, {summary}")
    if montage is not None:
        _draw(list(result.data.cases), montage)
    if as_json:
        cases, classes = len(result.data.cases), {str(value): name for value, name in result.data.class_names.items()}
        print_json(to_json({"data": str(data), "cases": cases, "classes": classes, **counts, "findings": rows}))
    if result.count("problem"):
        raise typer.Exit(1)


def _draw(cases: list[Case], path: Path) -> None:
    """The first cases that can be read, evenly taken from all."""
    import nibabel as nib

    from rdvit.analysis.figures import save_figure
    from rdvit.analysis.montage import Panel, data_montage
    from rdvit.data.volume import read_image, read_labels, to_canonical
    from rdvit.errors import RdvitError

    panels = []
    for case in cases[:: -(-len(cases) // MONTAGE_CASES) or 1]:
        try:
            image, _ = to_canonical(read_image(case.image))
            labels = None if case.label is None else to_canonical(read_labels(case.label))[0].array
        except RdvitError:
            continue  # it is among the problems
        fits = labels is not None and labels.shape == image.array.shape
        axcodes = nib.aff2axcodes(image.affine)
        panels.append(Panel(case.id, image.array, labels if fits else None, image.spacing, axcodes))
    console().print(f"montage of {len(panels)} cases: {save_figure(data_montage(panels), path)}")
