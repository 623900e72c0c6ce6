"""``rdvit prepare``: data sets from downloads, or from nothing."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

import typer

from rdvit.cli.console import Report, check_output, console, error_line, print_json, print_table, progress_bar
from rdvit.errors import ConfigError, DataError

app = typer.Typer(help="Make a data set folder.", no_args_is_help=True)


@app.callback()
def prepare() -> None:
    """Make a data set folder."""


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="Folder to make.")],
    patients: Annotated[int, typer.Option(min=5, help="Number of patients; five groups take turns.")] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Fixes every patient.")] = 0,
    cines: Annotated[int, typer.Option(min=0, help="Patients that also get a 4D cine.")] = 2,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a phantom that is there.")] = False,
) -> None:
    """A synthetic beating heart as an ACDC folder, with volumes, EF and mass known in closed form (phantom.json).

    \f
    Raises:
        RdvitError: If the folder holds something else.
    """
    from rdvit.data.phantom import write_phantom

    folder = write_phantom(out, patients, seed, cines=cines, overwrite=overwrite)
    console().print(f"{patients} patients written to {folder}")


@app.command()
def acdc(
    source: Annotated[Path, typer.Argument(help="ACDC folder: that with training/, or the one with the patients.")],
    out: Annotated[Path, typer.Argument(help="File to make; --data of the other commands takes it.")],
    pack: Annotated[bool, typer.Option("--pack", help="One file with the labelled frames.")] = False,
    max_mb: Annotated[
        float, typer.Option(min=0.001, help="Largest size in MB; it settles how finely intensities are kept.")
    ] = 48.0,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a file that exists.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print what was written as JSON on standard output.")] = False,
) -> None:
    """ACDC in one small file, to train on another machine: labels and grids exact, intensities rounded until it fits.

    \f
    Raises:
        RdvitError: On wrong input, or where the size cannot be met.
    """
    from rdvit.data.pack import write_pack
    from rdvit.evaluation.summary import to_json

    if not pack:
        raise ConfigError("an ACDC folder needs no preparing, every command reads it; --pack makes one file of it")
    if out.is_dir():
        raise ConfigError("is a folder, the name of a file was expected", file=out)
    check_output(out.parent, [out], overwrite)
    start = time.perf_counter()
    with progress_bar() as report:
        made = write_pack(source, out, int(max_mb * 1e6), report)
        seconds = time.perf_counter() - start
        kept = _fidelity(source, out, report)
    console().print(
        f"{made.frames} frames of {made.patients} patients packed into {out}: {made.size / 1e6:.1f} MB in {seconds:.0f} s\n"
        f"read back: Dice of the labels {kept['label_dice']:.4f}, voxels at most {kept['voxel_shift_mm']:.2g} mm off, "
        f"intensities in {made.levels} levels, {kept['intensity_error']:.3f} standard deviations off (root mean square)"
    )
    if as_json:
        print_json(to_json({"file": str(out), **made._asdict(), "seconds": seconds, **kept}))


def _fidelity(source: Path, packed: Path, report: Report) -> dict[str, float]:
    """What a pack kept, read back and compared case by case, as training sees it before resampling."""
    import numpy as np
    import torch

    from rdvit.config import DataConfig
    from rdvit.data.datalist import load_data
    from rdvit.data.transforms import normalize
    from rdvit.data.volume import corner_distance, read_image, read_labels
    from rdvit.evaluation.metrics import dice

    pairs = list(zip(load_data(source).cases, load_data(packed).cases, strict=True))
    scores, errors, shifts = [], [], []
    for done, (before, after) in enumerate(pairs):
        report(f"reading back {before.id}", done, len(pairs))
        images = [read_image(case.image) for case in (before, after)]
        labels = [read_labels(case.label) for case in (before, after) if case.label is not None]
        scores += [dice(labels[1].array == value, labels[0].array == value) for value in np.unique(labels[0].array) if value]
        a, b = (normalize(torch.from_numpy(image.array), DataConfig().clip_percentiles) for image in images)
        errors.append(float(((a - b) ** 2).mean().sqrt()))
        shifts += [corner_distance(images[0], images[1]), corner_distance(labels[0], labels[1])]
    return {
        "label_dice": float(np.mean(scores)),
        "intensity_error": float(np.mean(errors)),
        "voxel_shift_mm": float(np.max(shifts)),
    }


@app.command()
def dicom(
    inputs: Annotated[list[Path], typer.Argument(metavar="FOLDER...", help="Folders with DICOM files, also in subfolders.")],
    out: Annotated[Path, typer.Option(help="Folder for scan001.nii.gz, scan002.nii.gz, ...")] = Path("nifti"),
    series: Annotated[str | None, typer.Option(help="Only series with this UID, end of it, or description.")] = None,
    only_list: Annotated[bool, typer.Option("--list", help="List the series and write nothing.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace files that exist.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the list as JSON on standard output.")] = False,
) -> None:
    """DICOM series as NIfTI files, cines as 4D; numbered, and with nothing of the patient in them.

    \f
    Raises:
        RdvitError: On wrong input. A series that cannot be stacked is reported and exit code 1 given.
    """
    from rdvit.data.dicom import dicom_folders, is_called, list_series, stack_series
    from rdvit.data.files import write_image
    from rdvit.evaluation.summary import to_json

    found = [(folder, one) for folder in dicom_folders(inputs) for one in list_series(folder)]
    # Numbered before the choice, so that a series keeps its number whichever are chosen.
    chosen = {f"scan{n:03d}": pair for n, pair in enumerate(found, start=1) if series is None or is_called(pair[1], series)}
    if not chosen:
        raise DataError(f"none of {len(found)} series is called {series!r}", hint="--list shows them")
    files = {name: out / f"{name}.nii.gz" for name in chosen}
    if not only_list:
        check_output(out, list(files.values()), overwrite)
    rows: list[dict[str, Any]] = []
    failed = 0
    with progress_bar() as report:
        for done, (name, (folder, one)) in enumerate(chosen.items()):
            row = {
                "file": "-",
                "folder": str(folder),
                "uid": one.uid,
                "description": one.description,
                "images": len(one.slices),
            }
            report(str(folder), done, len(chosen))
            try:
                if not only_list:
                    image = stack_series(one, folder)
                    row |= {"file": str(write_image(image, files[name])), "shape": "x".join(map(str, image.shape))}
            except DataError as error:
                failed += 1
                row |= {"shape": "failed"}
                error_line(str(error))
            rows.append(row)
    print_table(f"{len(rows)} series" + ("" if only_list else f", {failed} failed"), rows)
    if as_json:
        print_json(to_json({"series": rows, "failed": failed}))
    if failed:
        raise typer.Exit(1)
