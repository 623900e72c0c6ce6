"""``rdvit infer``."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rdvit.cli.console import check_output, console, error_line, print_json, print_table, progress_bar
from rdvit.cli.startup import import_monai
from rdvit.errors import ConfigError, DataError, RdvitError

if TYPE_CHECKING:
    import numpy as np

    from rdvit.data.volume import Volume
    from rdvit.inference.predictor import Predictor


def infer(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Images, folders of images, DICOM folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("segmentations"),
    model: Annotated[str | None, typer.Option(help="Model folder or name of a run; the newest finished run.")] = None,
    loops: Annotated[int | None, typer.Option(help="Number of loops; as trained where not given.")] = None,
    halting: Annotated[Literal["act", "none"] | None, typer.Option(help="Stop tokens by ACT, or run all loops.")] = None,
    frame: Annotated[int | None, typer.Option(help="Frame of a 4D file, from 1.")] = None,
    all_frames: Annotated[
        bool, typer.Option("--all-frames", help="All frames of 4D files: 4D masks, volume curve, EF.")
    ] = False,
    series: Annotated[str | None, typer.Option(help="Series of a DICOM folder: UID, its end, or description.")] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Write the halting map and the entropy map.")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="Write a PNG with the slices and their contours.")] = False,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[Literal["auto", "fp32", "bf16", "fp16"], typer.Option(help="Number format.")] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace results that exist.")] = False,
    runs: Annotated[Path, typer.Option(help="Folder of all runs.")] = Path("runs"),
    as_json: Annotated[bool, typer.Option("--json", help="Print what was done as JSON on standard output.")] = False,
) -> None:
    """Segment images; each result lies on its image's grid, in its geometry.

    \f
    Raises:
        RdvitError: On wrong input. One bad case among several is reported and exit code 1 given.
    """
    if frame is not None and all_frames:
        raise ConfigError("expected --frame or --all-frames, found both")
    files = _files(inputs)
    targets = _targets(files, out)
    wishes = Wishes(loops, halting, frame, all_frames, series, maps, preview, overwrite)
    ends = ["seg.nii.gz", *(["halting.nii.gz", "entropy.nii.gz"] if maps else []), *(["preview.png"] if preview else [])]
    ends += ["volumes.csv"] if all_frames else []
    check_output(out, [_named(out / stem, end) for stem in targets.values() for end in ends], overwrite)

    import_monai()
    from rdvit.checkpoint import find_model, load_model
    from rdvit.inference.predictor import Predictor

    folder = find_model(model, runs)
    network, info = load_model(folder)
    predictor = Predictor(network, info, device, precision)
    precision_used = predictor.precision
    console().print(f"model: {folder} ({precision_used.name}: {precision_used.reason})")
    done: list[dict[str, Any]] = []
    failures: list[dict[str, str]] = []
    with progress_bar() as report:
        for number, (file, stem) in enumerate(targets.items(), start=1):
            report(file.name, number - 1, len(targets))
            try:
                done.append(_segment(predictor, file, out / stem, wishes))
            except RdvitError as error:
                if len(targets) == 1:
                    raise
                failures.append({"file": str(file), "reason": str(error)})
                error_line(str(error))
    _write_record(out, folder, done, failures)
    _tell(done, failures, info.class_names)
    if as_json:
        from rdvit.evaluation.summary import to_json

        print_json(to_json({"model": str(folder), "cases": done, "failures": failures}))
    if failures:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Wishes:
    """What the user wants of every file."""

    loops: int | None
    halting: Literal["act", "none"] | None
    frame: int | None
    all_frames: bool
    series: str | None
    maps: bool
    preview: bool
    overwrite: bool


def _segment(predictor: Predictor, file: Path, target: Path, wishes: Wishes) -> dict[str, Any]:
    """Segment one file and write its results beside each other; returns what was written and measured."""
    import numpy as np

    from rdvit.data.volume import read_frames, read_image
    from rdvit.evaluation.cardiac import cine_measures, structure_volumes_ml
    from rdvit.inference.writer import write_labels, write_map

    names, overwrite = predictor.info.class_names, wishes.overwrite
    for end in ("seg.nii.gz", "halting.nii.gz", "entropy.nii.gz", "volumes.csv", "preview.png") if overwrite else ():
        _named(target, end).unlink(missing_ok=True)  # if this case fails, no older result must pass for its own
    predictions, volumes_T = [], []
    images = read_frames(file, wishes.series) if wishes.all_frames else [read_image(file, wishes.frame, wishes.series)]
    for image in images:
        predictions.append(predictor(image, wishes.loops, wishes.halting, wishes.maps))
        volumes_T.append(structure_volumes_ml(predictions[-1].labels_XYZ, image.spacing, names))

    def joined(arrays: list[Any]) -> np.ndarray:
        return np.stack(arrays, axis=-1) if len(arrays) > 1 else arrays[0]

    labels = joined([p.labels_XYZ for p in predictions])
    written = {"mask": write_labels(_named(target, "seg.nii.gz"), labels, image, names, overwrite)}
    if wishes.maps:
        steps, entropy = joined([p.steps_XYZ for p in predictions]), joined([p.entropy_XYZ for p in predictions])
        written["halting"] = write_map(_named(target, "halting.nii.gz"), steps, image, "loops until halt", overwrite)
        written["entropy"] = write_map(_named(target, "entropy.nii.gz"), entropy, image, "entropy in nats", overwrite)
    result: dict[str, Any] = {"volumes_ml": volumes_T[0]}
    shown = 0
    if len(predictions) > 1:
        measures = cine_measures(volumes_T)
        shown = int(measures.get("ED_frame", 1)) - 1
        result = {"volumes_ml": volumes_T[shown], "volumes_per_frame_ml": volumes_T, "measures": measures}
        written["volumes"] = _write_curve(_named(target, "volumes.csv"), volumes_T)
    if wishes.preview:
        image = read_image(file, shown + 1, wishes.series) if len(predictions) > 1 else image
        written["preview"] = _preview(image, predictions[shown].labels_XYZ, names, file, _named(target, "preview.png"))
    return {
        "file": str(file),
        **{kind: str(path) for kind, path in written.items()},
        **result,
        "loops": predictions[0].loops,
        "mean_loops": float(np.mean([p.mean_steps for p in predictions])),
        "seconds": sum(sum(p.seconds.values()) for p in predictions),
    }


def _preview(image: Volume, labels_XYZ: np.ndarray, names: dict[int, str], file: Path, path: Path) -> Path:
    import nibabel as nib

    from rdvit.analysis.figures import overlay_montage, save_figure

    axcodes, spacing = nib.aff2axcodes(image.affine), image.spacing[:2]
    figure = overlay_montage(image.array, labels_XYZ, names, spacing=spacing, title=file.name, axcodes=axcodes)
    return save_figure(figure, path)


def _write_curve(path: Path, volumes_T: list[dict[str, float]]) -> Path:
    """Volumes in mL of every frame as CSV."""
    from rdvit.atomic import atomic

    lines = [",".join(["frame", *(f"{name}_ml" for name in volumes_T[0])])]
    lines += [",".join([str(t), *(f"{v:.3f}" for v in volumes.values())]) for t, volumes in enumerate(volumes_T, start=1)]
    with atomic(path) as temporary:
        temporary.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def _files(inputs: list[Path]) -> list[Path]:
    """The images named, and those in the folders named, where a folder of DICOM files is one; hidden files are passed over."""
    from rdvit.data.files import SUFFIXES, is_dicom_folder

    files: list[Path] = []
    for path in inputs:
        if not path.is_dir():
            files.append(path)
            continue
        found = sorted(f for f in path.iterdir() if f.name.lower().endswith(SUFFIXES) and not f.name.startswith("."))
        found = [f for f in found if not f.name.lower().endswith((".img", ".img.gz"))]  # the .hdr stands for the pair
        if not found and not is_dicom_folder(path):
            raise DataError(f"holds no image, looked for {', '.join(SUFFIXES)} and for DICOM files", file=path)
        files += found or [path]
    return list(dict.fromkeys(files))


def _targets(files: list[Path], out: Path) -> dict[Path, str]:
    """A name for the results of each file; two files of one name are told apart by their folders."""
    from rdvit.data.files import stem as stem_of

    stems = {file: stem_of(file) for file in files}
    names = list(stems.values())
    for file, stem in list(stems.items()):
        if names.count(stem) > 1:
            stems[file] = f"{file.resolve().parent.name}_{stem}"
    if len(set(stems.values())) < len(stems):
        raise DataError(
            f"several inputs would be written under one name in {out}", hint="segment them into folders of their own"
        )
    return stems


def _named(target: Path, end: str) -> Path:
    return target.with_name(f"{target.name}_{end}")


def _write_record(out: Path, model: Path, done: list[dict[str, Any]], failures: list[dict[str, str]]) -> None:
    """``run.json`` says what was done with what; ``failures.json`` is there if and only if something failed."""
    import platform

    import torch

    from rdvit import __version__
    from rdvit.atomic import atomic
    from rdvit.evaluation.summary import to_json

    record = {
        "rdvit": __version__,
        "torch": torch.__version__,
        "machine": platform.machine(),
        "model": str(model),
        "cases": done,
    }
    with atomic(out / "run.json") as path:
        path.write_text(to_json(record), encoding="utf-8")
    (out / "failures.json").unlink(missing_ok=True)
    if failures:
        with atomic(out / "failures.json") as path:
            path.write_text(to_json({"failures": failures}), encoding="utf-8")


def _tell(done: list[dict[str, Any]], failures: list[dict[str, str]], class_names: dict[int, str]) -> None:
    rows = [
        {
            "mask": case["mask"],
            **{f"{name} (mL)": case["volumes_ml"][name] for name in class_names.values()},
            "loops": f"{case['mean_loops']:.2f} of {case['loops']}",
            "seconds": case["seconds"],
        }
        for case in done
    ]
    if rows:
        print_table(f"{len(done)} segmented, {len(failures)} failed", rows, dict.fromkeys(rows[0], 1))
    for case in done:
        extra = [case[kind] for kind in ("halting", "entropy", "volumes", "preview") if kind in case]
        if extra:
            console().print("\n".join(extra))
        if case.get("measures"):
            print_table(f"{case['file']}, over {len(case['volumes_per_frame_ml'])} frames", [case["measures"]], digits={})
