"""Volumes: one array with the place of its voxels in the patient, read from a file and turned into a common orientation.

Spacing. NIfTI stores it twice, in ``pixdim`` and as the norms of the affine's columns, and files exist where the two
disagree. The rule here, applied by `true_affine` to every file: the column norms are the spacing, except where all
three are 1 and pixdim is not. There pixdim is the truth and the affine's columns are stretched to it; every volume of
ACDC is such a file (qform_code 0, sform diag(-1, -1, 1), pixdim 1.5625 x 1.5625 x 10 mm).

Shear. Rounded or resampled transforms are sometimes not quite perpendicular. Below 1e-2 (the largest cosine between two
axes) the nearest rotation takes their place for all work, which is said with the angle; results get the transform of the
file, as it was. More shear than that is refused: spacing and slices would have no plain meaning.

Frames. A cine is 4D, (X, Y, Z, T), and T is never a channel: one frame is asked for by its number, which counts from 1
as in ACDC's Info.cfg.

Coordinates are RAS millimetres inside the package, arrays are (X, Y, Z) in the order that nibabel gives.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import nibabel as nib
import numpy as np
from nibabel import orientations
from scipy.linalg import polar

from rdvit.data.files import open_image
from rdvit.errors import DataError

SPACING_RANGE_MM = (0.05, 50.0)
MAX_LABELS = 64  # distinct values of a label map; a file with more is an image, most often swapped files
MAX_NON_FINITE = 0.05  # share of the voxels
MAX_SHEAR, ROUNDING_SHEAR = 1e-2, 1e-5  # cosine between two axes: refused above, not worth a word below (NIfTI's float32)

_log = logging.getLogger("rdvit")
_told: set[str] = set()  # which spacing disagreements this process has already reported


@dataclass(frozen=True, eq=False)
class Volume:
    """A 3D array and where its voxels lie.

    Attributes:
        array: (X, Y, Z); float32 for images, uint8 or uint16 for labels.
        affine: (4, 4) float64, voxel indices to RAS mm, with the true spacing (see the module's rule).
        path: The file it was read from.
        header: The file's NIfTI header as stored, for writing in the same geometry; made from the geometry for other
            kinds of file; None once the array was reoriented.
    """

    array: np.ndarray
    affine: np.ndarray
    path: Path | None = None
    header: nib.Nifti1Header | None = None

    @property
    def spacing(self) -> tuple[float, float, float]:
        """Voxel size in mm along X, Y, Z: the norms of the affine's columns."""
        x, y, z = _column_norms(self.affine)
        return float(x), float(y), float(z)


def read_image(path: str | Path, frame: int | None = None, series: str | None = None) -> Volume:
    """Read an image as float32, with slope and intercept applied.

    Non-finite voxels are replaced by the median of the finite ones and reported: one NaN would spoil a whole z-score.

    Args:
        path: NIfTI (.nii, .nii.gz, or either half of an .hdr/.img pair), NRRD, MHA or MHD, or a folder with a DICOM
            series; 2D, 3D or 4D. A 2D file becomes (X, Y, 1).
        frame: Which frame of a 4D file, counted from 1.
        series: Which series of a DICOM folder, where it holds several.

    Raises:
        DataError: The file cannot be read, holds no real numbers, needs a frame number, has an impossible spacing or
            too much shear, or more than 5 % of its voxels are not finite.
    """
    path = Path(path)
    return _image_of(open_image(path, series), frame, path)


def read_frames(path: str | Path, series: str | None = None) -> Iterator[Volume]:
    """Every frame of an image one after the other, each as `read_image` gives it; the file is opened once.

    Raises:
        DataError: As in `read_image`.
    """
    path = Path(path)
    image = open_image(path, series)
    for number in range(1, _frames_in(image, path) + 1):
        yield _image_of(image, number, path)


def _image_of(image: nib.Nifti1Pair, frame: int | None, path: Path) -> Volume:
    with np.errstate(over="ignore"):  # float64 beyond float32 becomes inf and is counted below
        array = _read_frame(image, frame, path).astype(np.float32)
    finite = np.isfinite(array)
    bad = array.size - int(np.count_nonzero(finite))
    if bad > MAX_NON_FINITE * array.size:
        share = f"{bad} of {array.size} voxels ({bad / array.size:.1%})"
        raise DataError(f"{share} are NaN or infinite, at most {MAX_NON_FINITE:.0%} can be repaired", file=path)
    if bad:
        median = np.median(array[finite])
        array[~finite] = median
        _log.warning("%s: %d voxels are NaN or infinite, replaced by the median %g", path, bad, median)
    return Volume(array, _affine_of(image, path), path, image.header)


def read_labels(path: str | Path, frame: int | None = None) -> Volume:
    """Read a label map as uint8, or uint16 where a label exceeds 255.

    Args:
        path: As in `read_image`.
        frame: Which frame of a 4D file, counted from 1.

    Raises:
        DataError: As in `read_image`; or a value is negative, further than 1e-3 from a whole number (scaled floats
            come back as 2.9999999, which is rounded), or there are more than 64 distinct values.
    """
    path = Path(path)
    image = open_image(path)
    values = _read_frame(image, frame, path)
    if values.dtype.kind == "f":
        if not np.isfinite(values).all():
            raise DataError("a label map cannot hold NaN or infinite values", file=path)
        rounded = np.rint(values)
        worst = float(np.abs(values - rounded).max())
        if worst > 1e-3:
            raise DataError(f"looks like an image, not like labels: a value is {worst:.3g} off a whole number", file=path)
        values = rounded
    low, high = int(values.min()), int(values.max())
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise DataError(f"looks like an image, not like labels: values run from {low} to {high}", file=path)
    labels = values.astype(np.uint8 if high <= np.iinfo(np.uint8).max else np.uint16)
    present = np.zeros(high + 1, dtype=bool)  # a table instead of np.unique: no sort of a whole volume
    present[labels] = True
    if (count := int(present.sum())) > MAX_LABELS:
        message = f"looks like an image, not like labels: {count} distinct values, at most {MAX_LABELS} expected"
        raise DataError(message, file=path)
    return Volume(labels, _affine_of(image, path), path, image.header)


def frame_count(path: str | Path, series: str | None = None) -> int:
    """Number of time frames in a file, 1 for 2D and 3D.

    Raises:
        DataError: The file cannot be read.
    """
    path = Path(path)
    return _frames_in(open_image(path, series), path)


def canonical_geometry(path: str | Path) -> tuple[tuple[int, int, int], tuple[float, float, float]]:
    """Shape (X, Y, Z) and spacing in mm of a file in canonical orientation, from its header alone.

    Raises:
        DataError: The header cannot be read.
    """
    path = Path(path)
    image = open_image(path)
    _frames_in(image, path)
    x, y, z = (*image.shape[:3], 1)[:3]
    voxels = np.broadcast_to(np.uint8(0), (x, y, z))
    canonical, _ = to_canonical(Volume(voxels, _affine_of(image, path), path))
    return canonical.array.shape, canonical.spacing


def true_affine(header: nib.Nifti1Header, affine: np.ndarray) -> np.ndarray:
    """Apply the module's spacing rule.

    Args:
        header: Its pixdim is read; entries that are 0 or not finite say nothing and are passed over.
        affine: (4, 4), the file's affine as nibabel gives it. With qform and sform both 0 that is nibabel's fallback,
            which is built from pixdim.

    Returns:
        (4, 4) float64 affine. Where all column norms are 1 (to 1e-3) and pixdim is not, the columns are multiplied by
        pixdim and the origin is kept; otherwise it is the affine given.
    """
    affine = np.array(affine, dtype=np.float64)
    norms = _column_norms(affine)
    pixdim = _stated_spacing(header, norms)
    if np.allclose(norms, 1, rtol=0, atol=1e-3) and not np.allclose(pixdim, 1, rtol=0, atol=1e-3):
        affine[:3, :3] *= pixdim
    return affine


def to_canonical(volume: Volume) -> tuple[Volume, np.ndarray]:
    """Turn a volume so that its axes point as closely as possible to right, anterior and superior.

    A stack of slices keeps its slice axis last. Short-axis cardiac stacks are double-oblique: their slice normal runs
    from the base to the apex, between all three body axes, so the plain closest-RAS rule would call it x in one patient
    and z in the next and mix 1.5 mm rows with 10 mm steps. The slice axis is the one axis whose spacing is at least
    1.5 times both others, these being within a factor of 1.5 of each other, or else the only axis of length 1. It
    becomes axis 2; the other two follow in the order of the body axes they run along (x before y before z), and all
    three are flipped to point to the positive side. Without such an axis this is `nibabel.io_orientation`.

    Returns:
        The volume (X, Y, Z) with its new affine and without a header, and the (3, 2) orientation that was applied, in
        nibabel's convention (row: input axis; columns: output axis and flip), which `from_canonical` undoes.
    """
    orientation = orientations.io_orientation(volume.affine)
    slice_axis = _slice_axis(volume)
    if slice_axis is not None:
        in_plane = sorted({0, 1, 2} - {slice_axis}, key=lambda axis: orientation[axis, 0])
        orientation[[*in_plane, slice_axis], 0] = (0, 1, 2)
    array = np.ascontiguousarray(orientations.apply_orientation(volume.array, orientation))
    affine = volume.affine @ orientations.inv_ornt_aff(orientation, volume.array.shape)
    return Volume(array, affine, volume.path), orientation


def from_canonical(array: np.ndarray, orientation: np.ndarray) -> np.ndarray:
    """Undo `to_canonical` on the last three axes.

    Args:
        array: (..., X, Y, Z) in canonical orientation, for instance logits (C, X, Y, Z).
        orientation: (3, 2) from `to_canonical`.

    Returns:
        (..., X, Y, Z) in the orientation of the file; the same values, only moved.
    """
    identity = np.array([[0, 1], [1, 1], [2, 1]])
    inverse = orientations.ornt_transform(identity, orientation)
    space_first = np.moveaxis(array, (-3, -2, -1), (0, 1, 2))
    moved = orientations.apply_orientation(space_first, inverse)
    return np.ascontiguousarray(np.moveaxis(moved, (0, 1, 2), (-3, -2, -1)))


def check_same_grid(image: Volume, labels: Volume) -> None:
    """Make sure that two volumes describe the same voxels, in millimetres and not by matrix entries.

    The measure is the largest distance between corresponding corner voxels: up to 0.01 mm is rounding, up to half the
    smallest voxel is reported and accepted, more means that the labels were drawn on another grid.

    Raises:
        DataError: The shapes differ, or the corners lie half a voxel or more apart.
    """
    if image.array.shape != labels.array.shape:
        message = f"labels have shape {labels.array.shape}, their image {image.path} has {image.array.shape}"
        raise DataError(message, file=labels.path)
    gap_mm = corner_distance(image, labels)
    limit_mm = min(image.spacing) / 2
    if gap_mm >= limit_mm:
        message = f"labels lie up to {gap_mm:.3g} mm off their image {image.path}, less than {limit_mm:.3g} mm expected"
        raise DataError(message, file=labels.path, hint="resample the labels into the image's grid")
    if gap_mm > 0.01:
        _log.warning("%s: labels lie up to %.3g mm off their image %s, taken as equal", labels.path, gap_mm, image.path)


def corner_distance(one: Volume, other: Volume) -> float:
    """The largest distance in mm between corresponding corner voxels of two volumes of the same shape."""
    ends = [(0, size - 1) for size in one.array.shape]
    corners = np.array([(*corner, 1) for corner in itertools.product(*ends)]).T  # (4, 8) homogeneous voxel indices
    return float(np.linalg.norm(((one.affine - other.affine) @ corners)[:3], axis=0).max())


def _frames_in(image: nib.Nifti1Pair, path: Path) -> int:
    shape = image.shape
    if len(shape) not in (2, 3, 4) or min(shape) < 1:
        raise DataError(f"shape {shape} is neither an image nor a series of images (2D, 3D or 4D)", file=path)
    return int(shape[3]) if len(shape) == 4 else 1


def _read_frame(image: nib.Nifti1Pair, frame: int | None, path: Path) -> np.ndarray:
    """(X, Y, Z) voxels of one frame, scaled, in whatever dtype nibabel gives."""
    dtype = image.get_data_dtype()
    if dtype.kind not in "iuf":
        kind = "colours" if dtype.fields else f"{dtype} values"
        raise DataError(f"holds {kind}, one real number per voxel was expected", file=path)
    frames = _frames_in(image, path)
    if frame is None and frames > 1:
        raise DataError(f"holds {frames} time frames", file=path, hint="pick one with --frame K or take --all-frames")
    number = 1 if frame is None else frame
    if not 1 <= number <= frames:
        raise DataError(f"has no frame {number}, its frames run from 1 to {frames}", file=path)
    try:
        array = np.asanyarray(image.dataobj[..., number - 1] if image.ndim == 4 else image.dataobj)
    except Exception as error:  # as above
        raise DataError(f"its voxels cannot be read: {str(error) or type(error).__name__}", file=path) from error
    return array.reshape(*array.shape[:2], -1)


def _affine_of(image: nib.Nifti1Pair, path: Path) -> np.ndarray:
    """True affine (4, 4) of a file, checked, with a word once per process where pixdim and affine disagree."""
    affine = true_affine(image.header, image.affine)
    spacing, norms = _column_norms(affine), _column_norms(image.affine)
    pixdim = _stated_spacing(image.header, norms)
    winner = "the affine" if np.array_equal(spacing, norms) else "pixdim"
    if not np.allclose(pixdim, norms, rtol=1e-3) and winner not in _told:
        _told.add(winner)
        said = "%s: pixdim says %s mm, the affine %s mm; %s is taken, here and in every file like it (said once)"
        _log.warning(said, path, _times(pixdim), _times(norms), winner)
    low, high = SPACING_RANGE_MM
    if not np.isfinite(affine).all() or spacing.min() < low or spacing.max() > high:
        message = f"spacing {_times(spacing)} mm, expected {low:g} to {high:g} mm on every axis"
        raise DataError(message, file=path, hint=f"xyzt_units is {int(image.header['xyzt_units'])}, 2 means mm")
    if abs(np.linalg.det(affine[:3, :3] / spacing)) < 1e-3:
        raise DataError("its affine is singular: two axes run in the same direction", file=path)
    return _without_shear(affine, path)


def _without_shear(affine: np.ndarray, path: Path) -> np.ndarray:
    """The affine with perpendicular axes of the same lengths, by the polar decomposition; see the module's rule."""
    spacing = _column_norms(affine)
    directions = affine[:3, :3] / spacing
    shear = float(np.abs(directions.T @ directions - np.eye(3)).max())
    if shear < ROUNDING_SHEAR:
        return affine
    said = f"its axes are {np.degrees(np.arcsin(min(shear, 1))):.2g} degrees off perpendicular (shear {shear:.2g})"
    if shear >= MAX_SHEAR:
        raise DataError(f"{said}, less than {MAX_SHEAR:g} was expected", file=path, hint="resample it to a regular grid")
    _log.warning("%s: %s, the nearest rotation is used; results keep the file's own transform", path, said)
    rotation, _ = polar(directions)
    straight = affine.copy()
    straight[:3, :3] = rotation * spacing
    return straight


def _slice_axis(volume: Volume) -> int | None:
    """The axis across the slices of a stack, or None where no axis stands out."""
    order = np.argsort(volume.spacing)
    fine, middle, coarse = np.asarray(volume.spacing)[order]
    if coarse >= 1.5 * middle and middle <= 1.5 * fine:
        return int(order[2])
    single = [axis for axis, size in enumerate(volume.array.shape) if size == 1]
    return single[0] if len(single) == 1 else None


def _column_norms(affine: np.ndarray) -> np.ndarray:
    return np.hypot.reduce(np.asarray(affine, dtype=np.float64)[:3, :3], axis=0)


def _stated_spacing(header: nib.Nifti1Header, norms: np.ndarray) -> np.ndarray:
    """pixdim of X, Y, Z (3,), with the affine's norm where pixdim is empty."""
    pixdim = np.abs(np.asarray(header["pixdim"][1:4], dtype=np.float64))
    return np.where(np.isfinite(pixdim) & (pixdim > 0), pixdim, norms)


def _times(spacing: np.ndarray) -> str:
    return " x ".join(f"{size:g}" for size in spacing)
