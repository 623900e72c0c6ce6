"""NRRD and MetaImage files (MHA, MHD) through SimpleITK, and the one place where LPS becomes RAS.

ITK and DICOM count millimetres to the patient's left, posterior and superior; NIfTI and this package to the right,
anterior and superior. Whatever comes from the former passes `ras_from_lps` once and is RAS from then on.
"""

from __future__ import annotations

import re
import zlib
from pathlib import Path

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813 - its customary name

from rdvit.data.limits import check_promise
from rdvit.errors import DataError

_HEADER_BYTES = 2**16  # a MetaImage header is text of a few hundred bytes
SUFFIXES = (".nrrd", ".nhdr", ".mha", ".mhd")


def ras_from_lps(affine: np.ndarray) -> np.ndarray:
    """Turn an affine (4, 4) from voxels to LPS mm into one to RAS mm; the same matrix turns it back."""
    return np.diag([-1.0, -1.0, 1.0, 1.0]) @ np.asarray(affine, dtype=np.float64)


def as_nifti(array: np.ndarray, affine: np.ndarray) -> nib.Nifti1Image:
    """An array (X, Y[, Z[, T]]) in memory as the NIfTI image that results are written like: RAS affine, mm."""
    image = nib.Nifti1Image(array, affine, dtype=array.dtype)
    image.header.set_qform(affine, code="scanner", strip_shears=True)  # of a sheared affine only the sform is exact
    image.header.set_sform(affine, code="scanner")
    image.header.set_xyzt_units("mm", "msec")
    return image


def open_itk(path: Path) -> nib.Nifti1Image:
    """Read an NRRD or MetaImage file, voxels included.

    Args:
        path: .nrrd, .nhdr, .mha or .mhd; 2D, 3D, or 4D with time as the last axis.

    Raises:
        DataError: The file cannot be read, promises too much (`limits.check_promise`), or has several values per voxel.
    """
    is_nrrd = path.name.lower().endswith((".nrrd", ".nhdr"))
    if not is_nrrd:
        _check_meta(path)
    reader = sitk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.SetImageIO("NrrdImageIO" if is_nrrd else "MetaImageIO")
    try:
        reader.ReadImageInformation()
    except RuntimeError as error:
        raise DataError(f"cannot be read: {itk_reason(error)}", file=path) from error
    kind = sitk.GetPixelIDValueAsString(reader.GetPixelID())
    values = reader.GetNumberOfComponents()
    if values != 1 or "complex" in kind or "vector" in kind:
        what = "complex values" if "complex" in kind else f"{values} values per voxel (colours, vectors or a sequence)"
        raise DataError(f"holds {what}, one real number per voxel was expected", file=path)
    check_promise(reader.GetSize(), 8, path)  # the widest voxel
    try:
        image = reader.Execute()
    except RuntimeError as error:
        raise DataError(f"its voxels cannot be read: {itk_reason(error)}", file=path) from error
    return as_nifti(sitk.GetArrayFromImage(image).T, ras_from_lps(_lps_affine(image)))


def itk_reason(error: RuntimeError) -> str:
    """The last line of an ITK exception, which says what happened; the others say where in its source."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[-1].split("): ")[-1] if lines else type(error).__name__


def _check_meta(path: Path) -> None:
    """Find what ITK complains of in lines of its own, and compressed voxels that are damaged, over which it never ends."""
    with path.open("rb") as stream:
        head = stream.read(_HEADER_BYTES)
    data = re.search(rb"^\s*ElementDataFile\s*=[ \t]*([^\r\n]+)\r?\n?", head, re.MULTILINE)
    if b"NDims" not in head or data is None:
        raise DataError("cannot be read: no MetaImage header with NDims and ElementDataFile", file=path)
    name = data[1].decode(errors="replace").strip()
    is_local = name.upper() == "LOCAL"
    if not is_local and (Path(name).name != name or not (path.parent / name).is_file()):
        message = f"its voxels should be in {name!r}, one file in the same folder, which is not there"
        raise DataError(message, file=path)
    if re.search(rb"CompressedData\s*=\s*T", head[: data.start()], re.IGNORECASE):
        sizes = re.findall(rb"CompressedDataSize\s*=\s*(\d+)", head[: data.start()])
        _check_zlib(path if is_local else path.parent / name, data.end() if is_local else 0, [int(size) for size in sizes])


def _check_zlib(path: Path, start: int, stated: list[int]) -> None:
    """The stream must be whole and as long as stated; it is unpacked piece by piece and nothing of it is kept."""
    stream = path.read_bytes()[start:]
    if any(size != len(stream) for size in stated):
        raise DataError(f"its voxels cannot be read: {stated[0]} compressed bytes stated, {len(stream)} found", file=path)
    unpack = zlib.decompressobj(32 + zlib.MAX_WBITS)  # zlib or gzip
    try:
        while not unpack.eof and (unpack.decompress(stream, _HEADER_BYTES) or unpack.unconsumed_tail):
            stream = unpack.unconsumed_tail
    except zlib.error as error:
        raise DataError(f"its voxels cannot be read: {error}", file=path) from error
    if not unpack.eof:
        raise DataError("its voxels cannot be read: the compressed data end too early", file=path)


def _lps_affine(image: sitk.Image) -> np.ndarray:
    """Voxel indices to LPS mm (4, 4); the third axis of a 2D image is made up, time is left out."""
    space = min(image.GetDimension(), 3)
    direction = np.array(image.GetDirection()).reshape(image.GetDimension(), -1)[:space, :space]
    affine = np.eye(4)
    affine[:space, :space] = direction * np.array(image.GetSpacing()[:space])
    affine[:space, 3] = image.GetOrigin()[:space]
    return affine
