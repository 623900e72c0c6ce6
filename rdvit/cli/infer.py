"""``rdvit infer``."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from rdvit.cli.console import (
    check_output,
    console,
    ends_on_sigterm,
    error_line,
    parse_loops,
    print_json,
    print_table,
    progress_bar,
)
from rdvit.cli.startup import import_monai, keep_memory
from rdvit.errors import ConfigError, DataError, ModelError, RdvitError

if TYPE_CHECKING:
    import numpy as np

    from rdvit.data.volume import Volume
    from rdvit.inference.predictor import Predictor

KINDS = ("mask", "halting", "entropy", "volumes", "preview")  # keys of a result that hold a path
# How the names of all results end that a case may leave, its record aside.
ENDS = ("seg.nii.gz", "halting.nii.gz", "entropy.nii.gz", "volumes.csv", "preview.png")


def infer(
    inputs: Annotated[list[Path], typer.Argument(metavar="INPUT...", help="Images, folders of images, DICOM folders.")],
    out: Annotated[Path, typer.Option(help="Folder for the results.")] = Path("segmentations"),
    model: Annotated[
        str | None, typer.Option(help="Model folder, run or model of the package; the newest finished run, else acdc-2d.")
    ] = None,
    loops: Annotated[
        str | None, typer.Option(help="Number of loops, or auto: until the segmentation settles; as trained where not given.")
    ] = None,
    max_seconds: Annotated[
        float | None, typer.Option(help="Time for a case: loops go on while it lasts, at most --loops.", show_default=False)
    ] = None,
    halting: Annotated[Literal["act", "none"] | None, typer.Option(help="Stop tokens by ACT, or run all loops.")] = None,
    frame: Annotated[int | None, typer.Option(help="Frame of a 4D file, from 1.")] = None,
    all_frames: Annotated[
        bool, typer.Option("--all-frames", help="All frames of 4D files: 4D masks, volume curve, EF.")
    ] = False,
    series: Annotated[str | None, typer.Option(help="Series of a DICOM folder: UID, its end, or description.")] = None,
    maps: Annotated[bool, typer.Option("--maps", help="Write the halting map and the entropy map.")] = False,
    preview: Annotated[bool, typer.Option("--preview", help="Write a PNG with the slices and their contours.")] = False,
    keep_largest: Annotated[
        bool | None, typer.Option(help="Keep the largest piece of the foreground only; as the model says.", show_default=False)
    ] = None,
    merge: Annotated[float, typer.Option(help="Share of similar tokens to merge: 0.25 is faster, 0 exact.")] = 0.0,
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
    if max_seconds is not None and not max_seconds > 0:
        raise ConfigError(f"expected --max-seconds above 0, found {max_seconds:g}")
    number = parse_loops(loops)
    targets = {file: out / stem for file, stem in _targets(_files(inputs), out).items()}
    check_output(out, [], overwrite)
    wishes = Wishes(number, max_seconds, halting, frame, all_frames, series, maps, preview)

    keep_memory()
    import_monai()
    from rdvit import __version__
    from rdvit.checkpoint import DESCRIPTION, WEIGHTS, find_model, load_model, shown_name
    from rdvit.inference.batch import digest
    from rdvit.inference.predictor import Predictor
    from rdvit.models.merging import Merging

    merging = Merging(merge)
    folder = find_model(model, runs)
    settings = {
        "model": digest([folder / WEIGHTS, folder / DESCRIPTION]),
        "rdvit": __version__,
        "precision": precision,
        "keep_largest": keep_largest,
        "merge": merge,
    }
    settings |= asdict(wishes)
    before = {} if overwrite else _finished(targets, settings, wishes)
    left = {file: target for file, target in targets.items() if file not in before}
    if before:
        console().print(f"{len(before)} of {len(targets)} done before with this model and these options, skipped")
    done, failures = list(before.values()), list[dict[str, str]]()
    try:
        if left:
            network, info = load_model(folder)
            predictor = Predictor(network, info, device, precision, keep_largest, merging)
            console().print(f"model: {shown_name(folder)} ({predictor.precision.name}: {predictor.precision.reason})")
            _segment_all(left, predictor, wishes, settings, overwrite, done, failures)
    finally:  # also of a run that was stopped
        order = {str(file): number for number, file in enumerate(targets)}
        done.sort(key=lambda case: order[case["file"]])
        if done or failures:
            _write_record(out, folder, done, failures)
    _tell(done, len(before), failures)
    if as_json:
        from rdvit.evaluation.summary import to_json

        print_json(to_json({"model": str(folder), "cases": done, "skipped": len(before), "failures": failures}))
    if failures:
        raise typer.Exit(1)


@dataclass(frozen=True)
class Wishes:
    """What the user wants of every file."""

    loops: int | Literal["auto"] | None
    max_seconds: float | None  # for a file; the frames of a cine share it
    halting: Literal["act", "none"] | None
    frame: int | None
    all_frames: bool
    series: str | None
    maps: bool
    preview: bool

    @property
    def ends(self) -> list[str]:
        """How the names of a case's results end."""
        extra = {"halting.nii.gz": self.maps, "entropy.nii.gz": self.maps, "preview.png": self.preview}
        extra["volumes.csv"] = self.all_frames
        return ["seg.nii.gz", *(end for end, wanted in extra.items() if wanted), "result.json"]


def _finished(targets: dict[Path, Path], settings: dict[str, Any], wishes: Wishes) -> dict[Path, dict[str, Any]]:
    """What an earlier run has done of the same; anything else that would be replaced is refused."""
    from rdvit.inference.batch import finished, listed, named

    done, existing = {}, []
    for file, target in targets.items():
        record = finished(target, file, settings)
        if record is None:
            own = listed(target)  # of a case that was stopped between two of its files
            existing += [path for end in wishes.ends if (path := named(target, end)).exists() and path not in own]
            continue
        moved = {kind: str(target.with_name(Path(record[kind]).name)) for kind in KINDS if kind in record}
        done[file] = {k: v for k, v in record.items() if k not in ("files", "made_with")} | moved | {"file": str(file)}
    if existing:
        message = f"{len(existing)} result(s) exist already, such as {existing[0]}"
        raise DataError(message, hint="--overwrite replaces them")
    return done


def _segment_all(
    targets: dict[Path, Path],
    predictor: Predictor,
    wishes: Wishes,
    settings: dict[str, Any],
    overwrite: bool,
    done: list[dict[str, Any]],
    failures: list[dict[str, str]],
) -> None:
    """Segment one file after the other; what comes of them is added to ``done`` and ``failures``."""
    from rdvit.inference.batch import clear, made_with, staged, write_record

    with ends_on_sigterm(), progress_bar() as report:
        for number, (file, target) in enumerate(targets.items()):
            report(file.name, number, len(targets))
            try:
                clear(target, ENDS if overwrite else ())  # if this case fails, no older result must pass for its own
                with staged(target) as stage:
                    written, measured = _results(predictor, file, stage, wishes)
                    paths = {kind: str(target.with_name(path.name)) for kind, path in written.items()}
                    result = {"file": str(file), **paths, **measured}
                    write_record(stage, result, made_with(file, settings))
                done.append(result)
            except Exception as error:
                if isinstance(error, ModelError) or (len(targets) == 1 and not done):  # of no other file could more be said
                    raise
                reason = str(error) if isinstance(error, RdvitError) else f"{type(error).__name__}: {error}"
                failures.append({"file": str(file), "reason": reason})
                error_line(reason if str(file) in reason else f"{file}: {reason}")


def _results(predictor: Predictor, file: Path, target: Path, wishes: Wishes) -> tuple[dict[str, Path], dict[str, Any]]:
    """Segment one file and write its results beside each other; returns what was written and measured."""
    import numpy as np

    from rdvit.data.volume import frame_count, read_frames, read_image
    from rdvit.evaluation.cardiac import cine_measures, structure_volumes_ml
    from rdvit.inference.batch import named
    from rdvit.inference.writer import write_labels, write_map

    names = predictor.info.class_names
    predictions, volumes_T = [], []
    images = read_frames(file, wishes.series) if wishes.all_frames else [read_image(file, wishes.frame, wishes.series)]
    seconds = wishes.max_seconds
    if seconds is not None and wishes.all_frames:
        seconds /= frame_count(file, wishes.series)
    for image in images:
        predictions.append(predictor(image, wishes.loops, wishes.halting, wishes.maps, seconds))
        volumes_T.append(structure_volumes_ml(predictions[-1].labels_XYZ, image.spacing, names))

    def joined(arrays: list[Any]) -> np.ndarray:
        return np.stack(arrays, axis=-1) if len(arrays) > 1 else arrays[0]

    labels = joined([p.labels_XYZ for p in predictions])
    written = {"mask": write_labels(named(target, "seg.nii.gz"), labels, image, names)}
    if wishes.maps:
        steps, entropy = joined([p.steps_XYZ for p in predictions]), joined([p.entropy_XYZ for p in predictions])
        written["halting"] = write_map(named(target, "halting.nii.gz"), steps, image, "loops until halt")
        written["entropy"] = write_map(named(target, "entropy.nii.gz"), entropy, image, "entropy in nats")
    result: dict[str, Any] = {"volumes_ml": volumes_T[0]}
    shown = 0
    if len(predictions) > 1:
        measures = cine_measures(volumes_T)
        shown = int(measures.get("ED_frame", 1)) - 1
        result = {"volumes_ml": volumes_T[shown], "volumes_per_frame_ml": volumes_T, "measures": measures}
        written["volumes"] = _write_curve(named(target, "volumes.csv"), volumes_T)
    if wishes.preview:
        image = read_image(file, shown + 1, wishes.series) if len(predictions) > 1 else image
        written["preview"] = _preview(image, predictions[shown].labels_XYZ, names, file, named(target, "preview.png"))
    result |= {
        "loops": predictions[0].loops,
        "loops_taken": float(np.mean([p.loops_taken for p in predictions])),
        "max_seconds": wishes.max_seconds,
        "merge": predictor.merging.rate if predictor.merging is not None else 0.0,
        "mean_loops": float(np.mean([p.mean_steps for p in predictions])),
        "seconds": sum(sum(p.seconds.values()) for p in predictions),
    }
    return written, result


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
        results = {record.name.removesuffix("result.json") + end for record in path.glob("*_result.json") for end in ENDS}
        found = [f for f in found if f.name not in results]  # of an earlier run into the same folder
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


def _told_loops(case: dict[str, Any]) -> str:
    """Mean loops of a token, those of the slices or windows that were run, and what set them."""
    if case["loops"] == "auto" or case["max_seconds"] is not None:
        asked = "auto" if case["loops"] == "auto" else f"at most {case['loops']}"
        return f"{case['mean_loops']:.2f} of {case['loops_taken']:.2f} ({asked})"
    return f"{case['mean_loops']:.2f} of {case['loops']}"


def _tell(done: list[dict[str, Any]], skipped: int, failures: list[dict[str, str]]) -> None:
    rows = [
        {
            "mask": case["mask"],
            **{f"{name} (mL)": volume for name, volume in case["volumes_ml"].items()},
            "loops": _told_loops(case),
            "seconds": case["seconds"],
        }
        for case in done
    ]
    if rows:
        counts = f"{len(done) - skipped} segmented, {len(failures)} failed" + (f", {skipped} done before" if skipped else "")
        print_table(counts, rows, dict.fromkeys(rows[0], 1))
    for case in done:
        extra = [case[kind] for kind in KINDS[1:] if kind in case]
        if extra:
            console().print("\n".join(extra))
        if case.get("measures"):
            print_table(f"{case['file']}, over {len(case['volumes_per_frame_ml'])} frames", [case["measures"]], digits={})
