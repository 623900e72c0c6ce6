"""An ACDC folder in one small file, to train on another machine: a zip archive that `datalist.load_data` reads.

Inside lies an ACDC folder with the labelled frames as NIfTI, so that patients, groups, phases and folds stay what they are.
Labels are exact, the grid is the original one, and the true spacing stands in the affine as well as in pixdim. Only the
intensities lose: they are clipped to the percentiles that training clips them to, and rounded to evenly spaced levels, as
many as the size allows. Zero stays zero and nothing else becomes zero, since training takes its statistics without zeros.

The members are compressed by bzip2: on ACDC it makes 0.85 of what deflate makes, and as little as LZMA.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import nibabel as nib
import numpy as np

from rdvit.atomic import atomic
from rdvit.config import DataConfig
from rdvit.data import acdc
from rdvit.data.files import stem
from rdvit.data.volume import Volume, check_same_grid, read_image, read_labels
from rdvit.errors import DataError

LEVELS = (255, 192, 160, 128, 112, 96, 80, 64, 48, 32)  # of the intensities above zero, tried one after the other

_README = """The labelled frames of an ACDC folder, packed by `rdvit prepare acdc --pack`.

Changed: intensities are clipped to the percentiles {low:g} and {high:g} and rounded to {levels} levels; the true spacing of
pixdim stands in the affine, too. Labels, grids and frame numbers are those of the source. Left out: cines, and of Info.cfg
all but ED, ES and Group.

The licence of the source holds for this file as well. For ACDC that is CC BY-NC-SA 4.0, and one cites O. Bernard et al.,
"Deep Learning Techniques for Automatic MRI Cardiac Multi-structures Segmentation and Diagnosis: Is the Problem Solved?",
IEEE TMI 37(11), 2514-2525, 2018, doi:10.1109/TMI.2018.2837502.
"""


class Pack(NamedTuple):
    """What was written: patients, frames, levels of intensity, bytes."""

    patients: int
    frames: int
    levels: int
    size: int


def write_pack(
    source: Path,
    out: Path,
    max_bytes: int,
    report: Callable[[str, int, int], None] = lambda text, done, total: None,
) -> Pack:
    """Pack the labelled frames of an ACDC folder with the most levels of intensity that fit.

    Args:
        source: As in `acdc.find_patients`.
        out: The file to write, whole or not at all; one that is there is replaced. The same data give the same bytes.
        max_bytes: The largest size.
        report: Called with text, done and total before each frame.

    Raises:
        DataError: There are no frames, one of them cannot be read or has negative intensities, labels lie on another grid,
            the file cannot be written, or it is too large with the fewest levels.
    """
    frames = acdc.find_frames(source)
    if not frames:
        raise DataError("expected patient folders with Info.cfg (ACDC), here or in training/ or testing/", file=source)
    patients = len({frame.patient for frame in frames})
    for levels in LEVELS:
        try:
            with atomic(out) as temporary:
                _write(temporary, frames, levels, max_bytes, report)
            return Pack(patients, len(frames), levels, out.stat().st_size)
        except _TooLargeError:
            continue
        except OSError as error:
            raise DataError(f"cannot be written: {error.strerror or error}", file=out) from error
    message = f"{len(frames)} frames take more than {max_bytes / 1e6:g} MB even with {LEVELS[-1]} levels of intensity"
    raise DataError(message, file=source)


class _TooLargeError(Exception):
    """The file has passed its limit."""


def _write(path: Path, frames: list[acdc.Frame], levels: int, max_bytes: int, report: Callable[[str, int, int], None]) -> None:
    size = 0
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in _members(frames, levels, report):
            member = zipfile.ZipInfo(name)  # without a date
            archive.writestr(member, content, zipfile.ZIP_BZIP2, 9)
            size += member.compress_size
            if size > max_bytes:
                raise _TooLargeError
    if path.stat().st_size > max_bytes:  # with names and the table of contents
        raise _TooLargeError


def _members(frames: list[acdc.Frame], levels: int, report: Callable[[str, int, int], None]) -> Iterator[tuple[str, bytes]]:
    """Name and content of each file."""
    low, high = DataConfig().clip_percentiles
    yield "README.txt", _README.format(low=low, high=high, levels=levels).encode()
    for source in dict.fromkeys(frame.image.parent for frame in frames):
        info = acdc.read_info(source / "Info.cfg")
        group = f"Group: {info.group}\n" if info.group else ""
        yield f"training/{source.name}/Info.cfg", f"ED: {info.ed}\nES: {info.es}\n{group}".encode()
    for done, frame in enumerate(frames):
        report(f"{levels} levels, {frame.patient} {frame.phase}", done, len(frames))
        image, labels = read_image(frame.image), read_labels(frame.label)
        check_same_grid(image, labels)
        folder = f"training/{frame.patient}"
        yield f"{folder}/{stem(frame.image)}.nii", _nifti(*quantize(image, levels), image.affine)
        yield f"{folder}/{stem(frame.label)}.nii", _nifti(labels.array, 1.0, labels.affine)


def quantize(image: Volume, levels: int) -> tuple[np.ndarray, float]:
    """Intensities, clipped to the percentiles of training, as whole numbers from 1 to ``levels``; zero stays 0.

    Returns:
        Numbers (X, Y, Z) uint8, and the intensity of 1.

    Raises:
        DataError: More voxels are negative than the lower percentile clips.
    """
    inside = image.array[image.array != 0]
    if inside.size == 0:
        return np.zeros(image.array.shape, np.uint8), 1.0
    low, high = np.percentile(inside, DataConfig().clip_percentiles)
    if low < 0:
        raise DataError(f"{(inside < 0).mean():.1%} of its voxels are negative, magnitudes were expected", file=image.path)
    step = float(np.float32(high / levels))  # as the header keeps it
    numbers = np.rint(image.array.clip(low, high) / step).clip(1, levels)
    return np.where(image.array == 0, 0, numbers).astype(np.uint8), step


def _nifti(array: np.ndarray, step: float, affine: np.ndarray) -> bytes:
    """An uncompressed NIfTI file with the affine in both of its places."""
    image = nib.Nifti1Image(array, affine)
    image.set_qform(affine, code="aligned")
    image.header.set_xyzt_units("mm")
    image.header.set_slope_inter(step, 0)
    return bytes(image.to_bytes())
