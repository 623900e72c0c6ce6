"""NRRD and MetaImage files (MHA, MHD) through SimpleITK, and the one place where LPS becomes RAS.

ITK and DICOM count millimetres to the patient's left, posterior and superior; NIfTI and this package to the right,
anterior and superior. Whatever comes from the former passes `ras_from_lps` once and is RAS from then on.
"""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np
import SimpleITK as sitk  # noqa: N813 - its customary name

from rdvit.data.limits import check_promise
from rdvit.data.metaimage import check_meta
from rdvit.errors import DataError

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
        check_meta(path)
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


def _lps_affine(image: sitk.Image) -> np.ndarray:
    """Voxel indices to LPS mm (4, 4); the third axis of a 2D image is made up, time is left out."""
    space = min(image.GetDimension(), 3)
    direction = np.array(image.GetDirection()).reshape(image.GetDimension(), -1)[:space, :space]
    affine = np.eye(4)
    affine[:space, :space] = direction * np.array(image.GetSpacing()[:space])
    affine[:space, 3] = image.GetOrigin()[:space]
    return affine
