"""A folder of DICOM files as one image: which series, in which order, and what is wrong with it.

Headers are read by pydicom, and only the few tags named here, so that names, dates and numbers of a patient never enter
the program; pixels are read and rescaled by GDCM through SimpleITK, which knows every compressed transfer syntax.

Order. A slice's place is its ImagePositionPatient along the normal of its ImageOrientationPatient, never its file name or
instance number. Where every place was imaged equally often the series is a cine: the images of a place are ordered by
TriggerTime, or by TemporalPositionIdentifier where times are missing, and the result is (X, Y, Z, T).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813 - its customary name

from rdvit.data.files import is_dicom, is_dicom_folder
from rdvit.data.itk import as_nifti, itk_reason, ras_from_lps
from rdvit.data.limits import check_content, check_promise
from rdvit.errors import DataError, RdvitError

SAME_PLACE_MM = 0.01
EVEN, NEARLY_EVEN = 0.01, 0.1  # deviation of a slice distance from the median: nothing to say below, refused above

_REQUIRED = ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "Rows", "Columns", "SeriesInstanceUID")
_OPTIONAL = (
    *("SeriesDescription", "SOPInstanceUID", "SliceThickness", "TriggerTime", "TemporalPositionIdentifier"),
    *("NumberOfFrames", "SamplesPerPixel", "BitsAllocated"),
)
_UNDEFINED_LENGTH = 0xFFFFFFFF  # of an element that an item delimiter ends
_log = logging.getLogger("rdvit")


class Slice(NamedTuple):
    """One file: where it lies in LPS mm, its size, its time, and what it belongs to."""

    file: Path
    uid: str
    position: np.ndarray  # (3,) of the first pixel
    orientation: np.ndarray  # (6,) direction along a row, then down a column
    pixel_mm: tuple[float, float]  # distance of rows, distance of columns, in DICOM's order
    shape: tuple[int, int]  # rows, columns
    thickness_mm: float  # 0 where it is not stated
    times: tuple[float | None, float | None]  # TriggerTime in ms, TemporalPositionIdentifier

    @property
    def normal(self) -> np.ndarray:
        """Direction across the slice (3,)."""
        return np.cross(self.orientation[:3], self.orientation[3:])

    @property
    def place_mm(self) -> float:
        """Where the slice lies along its normal."""
        return float(self.normal @ self.position)


class Series(NamedTuple):
    """One series of a folder."""

    uid: str
    description: str
    slices: list[Slice]

    def __str__(self) -> str:
        return f"{self.uid[-8:]} ({self.description or 'no description'}, {len(self.slices)} images)"


def list_series(folder: Path) -> list[Series]:
    """The series of a folder, its subfolders left alone, in the order of their UIDs.

    Raises:
        DataError: pydicom is not installed, a file is damaged or of a kind that cannot be stacked, or there is no image.
    """
    found: dict[str, Series] = {}
    passed_over: list[str] = []
    for file in sorted(file for file in folder.iterdir() if file.is_file() and is_dicom(file)):
        header = _header(file, folder)
        if header.get("Rows") is None:
            passed_over.append(file.name)  # a DICOMDIR, a report or a presentation state; or a slice cut short
            continue
        uid, read = str(header.get("SeriesInstanceUID", "")), _slice(header, file)
        found.setdefault(uid, Series(uid, str(header.get("SeriesDescription", "")), [])).slices.append(read)
    if not found:
        raise DataError("holds DICOM files, but no image among them", file=folder)
    if passed_over:
        said = "%s: %d DICOM file(s) without an image are passed over: %s"
        _log.warning(said, folder, len(passed_over), ", ".join(passed_over[:5]))
    return [found[uid] for uid in sorted(found)]


def dicom_folders(roots: Iterable[Path]) -> list[Path]:
    """All folders with DICOM files at and below some folders, sorted; links to folders are not followed.

    Raises:
        DataError: One of them is no folder, or there is no DICOM file in it.
    """
    found: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise DataError("no such folder; the folder that holds DICOM files was expected", file=root)
        below = [Path(folder) for folder, _, _ in os.walk(root)]
        there = [folder for folder in below if is_dicom_folder(folder)]
        if not there:
            raise DataError(f"no DICOM file is in it or its {len(below) - 1} subfolders", file=root)
        found.update(there)
    return sorted(found)


def open_series(folder: Path, wanted: str | None = None) -> nib.Nifti1Image:
    """Read one series of a folder as a volume (X, Y, Z), or a cine (X, Y, Z, T).

    Args:
        folder: Holds the files, of any name.
        wanted: UID, its end, or the description of the series; not needed where there is only one.

    Raises:
        DataError: The series is not named where there are several, or is no regular stack: slices missing, doubled,
            unevenly spaced, of different size or direction; or a file is damaged.
    """
    return stack_series(_choose(list_series(folder), wanted, folder), folder)


def stack_series(series: Series, folder: Path) -> nib.Nifti1Image:
    """Read the pixels of a series as a volume (X, Y, Z), or a cine (X, Y, Z, T); its header holds geometry and nothing else.

    Args:
        series: One of `list_series`.
        folder: Where it lies, for messages.

    Raises:
        DataError: It is no regular stack, or a file is damaged.
    """
    slices = _without_copies(series, folder)
    _check_alike(series, folder)
    places = _by_place(slices, folder)
    stacks = [_in_time(images, folder) for images in places]
    affine = _affine([stack[0] for stack in stacks], folder)
    frames, first = len(stacks[0]), stacks[0][0]
    check_promise((*first.shape, len(stacks), frames), 4, folder)
    array_XYZT = np.stack([np.stack([_pixels(image) for image in stack], axis=-1) for stack in stacks], axis=2)
    image = as_nifti(array_XYZT if frames > 1 else array_XYZT[..., 0], affine)
    times = [image.times[0] for image in stacks[0] if image.times[0] is not None]
    if frames > 1 and len(times) == frames:
        image.header["pixdim"][4] = float(np.median(np.diff(times)))  # ms
    return image


def _header(file: Path, folder: Path) -> Any:
    """pydicom's data set with the few tags that are used."""
    try:
        import pydicom
    except ImportError as error:
        message = "is a DICOM folder, and reading it needs pydicom"
        raise DataError(message, file=folder, hint='pip install "rdvit[dicom]", or pip install pydicom') from error
    try:
        return pydicom.dcmread(file, stop_before_pixels=True, specific_tags=[*_REQUIRED, *_OPTIONAL])
    except Exception as error:  # damaged bytes raise anything
        raise DataError(f"cannot be read as DICOM: {error or type(error).__name__}", file=file) from error


def _check_elements(file: Path) -> None:
    """Refuse what makes GDCM take up to 4 GB before it notices that the file is damaged.

    That is an element longer than the file itself, or one of the file's meta information whose type the standard does not
    know (CVE-2026-3650).
    """
    import pydicom
    from pydicom.valuerep import VR

    size = file.stat().st_size
    try:
        dataset = pydicom.dcmread(file, defer_size=1024)  # long values are passed over, not read
        meta = list(dataset.file_meta.values())
        elements = [*meta, *dataset.values()]
    except Exception as error:  # as above
        raise DataError(f"cannot be read as DICOM: {error or type(error).__name__}", file=file) from error
    if unknown := [element for element in meta if str(element.VR) not in set(VR)]:
        what = f"element {unknown[0].tag} has the type {str(unknown[0].VR)!r}, which DICOM does not know"
        raise DataError(f"its meta information is damaged: {what}", file=file)
    for element in elements:
        length = getattr(element, "length", _UNDEFINED_LENGTH)  # a sequence has been read to its end already
        if length != _UNDEFINED_LENGTH and element.value_tell + length > size:
            what = f"element {element.tag} promises {length} bytes at {element.value_tell}"
            raise DataError(f"cannot be true: its {what}, the file has {size}", file=file)


def _slice(header: Any, file: Path) -> Slice:
    """The plain values of a header; refuses what is not one gray picture with a place."""
    try:
        if missing := [tag for tag in _REQUIRED if header.get(tag) in (None, "")]:
            raise DataError(f"does not say where it lies: {', '.join(missing)} is missing", file=file)
        if int(header.get("NumberOfFrames") or 1) > 1:
            raise DataError("is an enhanced multi-frame file", file=file, hint="dcm2niix turns it into NIfTI")
        if int(header.get("SamplesPerPixel") or 1) != 1:
            raise DataError("holds colours, one real number per voxel was expected", file=file)
        rows, columns = int(header.Rows), int(header.Columns)
        promised = check_promise((rows, columns), max(1, int(header.get("BitsAllocated") or 16) // 8), file)
        if not header.file_meta.TransferSyntaxUID.is_compressed:
            check_content(file, promised, zipped=False)
        times = [header.get(tag) for tag in ("TriggerTime", "TemporalPositionIdentifier")]
        return Slice(
            file,
            str(header.get("SOPInstanceUID", file)),
            _floats(header.ImagePositionPatient, 3),
            _floats(header.ImageOrientationPatient, 6),
            (float(header.PixelSpacing[0]), float(header.PixelSpacing[1])),
            (rows, columns),
            float(header.get("SliceThickness") or 0),
            (None if times[0] is None else float(times[0]), None if times[1] is None else float(times[1])),
        )
    except RdvitError:
        raise
    except Exception as error:  # values are converted when they are used, and damaged ones raise anything
        raise DataError(f"cannot be read as DICOM: {error or type(error).__name__}", file=file) from error


def _choose(found: list[Series], wanted: str | None, folder: Path) -> Series:
    listed = "; ".join(map(str, found))
    if wanted is None:
        if len(found) > 1:
            raise DataError(f"holds {len(found)} series: {listed}", file=folder, hint="name one with --series")
        return found[0]
    chosen = [series for series in found if is_called(series, wanted)]
    if len(chosen) != 1:
        raise DataError(f"{len(chosen) or 'no'} series are called {wanted!r}, it holds {listed}", file=folder)
    return chosen[0]


def is_called(series: Series, name: str) -> bool:
    """Whether a name means a series: its UID, the end of it, or its description."""
    return bool(name) and (series.uid.endswith(name) or series.description == name)


def _check_alike(series: Series, folder: Path) -> None:
    """All of one size and direction."""
    sizes = {(*image.shape, *image.pixel_mm) for image in series.slices}
    if len(sizes) > 1:
        raise DataError(f"the images of series {series} differ in size or pixel spacing: {sorted(sizes)}", file=folder)
    directions = np.array([image.orientation for image in series.slices])
    if not np.abs(directions - directions[0]).max() < 1e-3:
        raise DataError(f"the images of series {series} lie in different directions, as a localizer's do", file=folder)


def _without_copies(series: Series, folder: Path) -> list[Slice]:
    """The slices of a series without copies of the same image (the same SOPInstanceUID)."""
    unique = {image.uid: image for image in reversed(series.slices)}
    if copies := len(series.slices) - len(unique):
        _log.warning("%s: %d of %d images are copies of others, passed over", folder, copies, len(series.slices))
    return list(unique.values())


def _by_place(slices: list[Slice], folder: Path) -> list[list[Slice]]:
    """Slices at each place along the normal, in rising order; as many at one place as at any other."""
    places: list[list[Slice]] = []
    for image in sorted(slices, key=lambda image: image.place_mm):
        if not places or image.place_mm - places[-1][0].place_mm > SAME_PLACE_MM:
            places.append([])
        places[-1].append(image)
    usual = int(np.median([len(images) for images in places]))
    odd = [f"{len(images)} at {images[0].place_mm:.2f} mm" for images in places if len(images) != usual]
    if odd:
        what = f"{usual} at most slice positions, but {', '.join(odd)}"
        raise DataError(f"images are missing or doubled: {what}", file=folder)
    return places


def _in_time(images: list[Slice], folder: Path) -> list[Slice]:
    """The images of one place in the order of time."""
    for which in (0, 1):
        moments = [image.times[which] for image in images]
        if len(images) == 1 or (None not in moments and len(set(moments)) == len(images)):
            return sorted(images, key=lambda image: image.times[which] or 0)
    what = f"{len(images)} images lie at {images[0].place_mm:.2f} mm, and no trigger times tell them apart"
    raise DataError(f"slices are doubled: {what}", file=folder)


def _affine(slices: list[Slice], folder: Path) -> np.ndarray:
    """Voxel indices to RAS mm (4, 4), by equation C.7.6.2.1-1 of DICOM PS3.3; `slices` holds one of each place."""
    first, last = slices[0], slices[-1]
    affine = np.eye(4)
    affine[:3, 0] = first.orientation[:3] * first.pixel_mm[1]
    affine[:3, 1] = first.orientation[3:] * first.pixel_mm[0]
    affine[:3, 3] = first.position
    if len(slices) > 1:
        _check_even([image.place_mm for image in slices], folder)
        affine[:3, 2] = (last.position - first.position) / (len(slices) - 1)
    elif first.thickness_mm > 0:
        affine[:3, 2] = first.normal * first.thickness_mm
    else:
        raise DataError("a single slice needs its SliceThickness, which is missing", file=folder)
    return ras_from_lps(affine)


def _check_even(places_mm: list[float], folder: Path) -> None:
    gaps = np.diff(places_mm)
    usual = float(np.median(gaps))
    worst = int(np.argmax(np.abs(gaps - usual)))
    deviation = abs(gaps[worst] / usual - 1)
    where = f"{gaps[worst]:.3g} mm between {places_mm[worst]:.2f} and {places_mm[worst + 1]:.2f} mm, {usual:.3g} mm elsewhere"
    if deviation > NEARLY_EVEN:
        missing = int(np.sum(np.round(gaps / usual) - 1))
        whole = np.allclose(gaps / usual, np.round(gaps / usual), rtol=0, atol=NEARLY_EVEN)
        what = f"{missing} slice(s) are missing" if missing > 0 and whole else "slices are unevenly spaced"
        raise DataError(f"{what}: {where}", file=folder)
    if deviation > EVEN:
        _log.warning("%s: slices are not quite evenly spaced, %s; their mean is used", folder, where)


def _pixels(image: Slice) -> np.ndarray:
    """(X, Y) values of one file, rescaled; each file by itself, because slopes may differ within a series."""
    _check_elements(image.file)
    try:
        pixels_ZYX = sitk.GetArrayFromImage(sitk.ReadImage(str(image.file), imageIO="GDCMImageIO"))
    except RuntimeError as error:
        raise DataError(f"its pixels cannot be read: {itk_reason(error)}", file=image.file) from error
    if pixels_ZYX.shape[-2:] != image.shape or pixels_ZYX.size != np.prod(image.shape):
        message = f"its pixels have shape {pixels_ZYX.shape}, its header says {image.shape}"
        raise DataError(message, file=image.file)
    return pixels_ZYX.reshape(image.shape).T


def _floats(values: Any, count: int) -> np.ndarray:
    numbers = np.array([float(value) for value in values])
    if numbers.shape != (count,) or not np.isfinite(numbers).all():
        raise ValueError(f"{count} numbers expected, {len(numbers)} found")
    return numbers
