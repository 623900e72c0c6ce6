"""Results as NIfTI files that lie exactly on the image they were made from.

Geometry is never recomputed: the source's header is copied byte for byte and only what describes the values is
replaced. A header rebuilt from an affine would lose pixdim (on ACDC every voxel would become 1 mm), one of the two
transforms, or their codes. Files appear complete or not at all.
"""

from __future__ import annotations

from pathlib import Path

import nibabel as nib
import numpy as np

from rdvit.data.files import write_image
from rdvit.data.volume import Volume
from rdvit.errors import DataError

# What may name a patient or a study, or speaks of the source's values; NIfTI-2 has only some of these fields.
_SOURCE_FIELDS = {
    *("data_type", "db_name", "aux_file", "extents", "session_error", "unused_str", "glmax", "glmin", "cal_max", "cal_min"),
    *("intent_name", "intent_code", "intent_p1", "intent_p2", "intent_p3", "vox_offset"),
}
_DESCRIP_BYTES = 79  # the field has 80, the last one ends the text


def write_labels(
    path: str | Path, labels_XYZ: np.ndarray, like: Volume, class_names: dict[int, str], overwrite: bool = False
) -> Path:
    """Write a label map as uint8 (uint16 where a label exceeds 255) with slope 1 and intercept 0.

    Args:
        path: Where to, .nii or .nii.gz; missing folders are made.
        labels_XYZ: (X, Y, Z) whole numbers on the grid of `like`.
        like: The image as it was read, before any reorientation; its header is taken over.
        class_names: Label value to name, noted in the file's description.
        overwrite: Replace an existing file.

    Returns:
        The path written.

    Raises:
        DataError: The array does not fit the image or holds no labels, the suffix is wrong, the file exists, or it
            cannot be written.
    """
    labels_XYZ = np.asarray(labels_XYZ)
    if labels_XYZ.dtype.kind not in "iub":
        raise DataError(f"labels must be whole numbers, got {labels_XYZ.dtype}", file=path)
    low, high = int(labels_XYZ.min(initial=0)), int(labels_XYZ.max(initial=0))
    if low < 0 or high > np.iinfo(np.uint16).max:
        raise DataError(f"labels must lie in 0 to {np.iinfo(np.uint16).max}, got {low} to {high}", file=path)
    dtype = np.uint8 if high <= np.iinfo(np.uint8).max else np.uint16
    names = " ".join(f"{value}={name}" for value, name in sorted(class_names.items()))
    return _write(Path(path), labels_XYZ.astype(dtype), like, names, overwrite)


def write_map(path: str | Path, map_XYZ: np.ndarray, like: Volume, description: str, overwrite: bool = False) -> Path:
    """Write a map of real numbers, for instance ponder or uncertainty, as float32.

    Args:
        path: Where to, .nii or .nii.gz; missing folders are made.
        map_XYZ: (X, Y, Z) on the grid of `like`, or (X, Y, Z, T) for all frames of its file.
        like: The image as it was read, before any reorientation; its header is taken over.
        description: What the values mean, noted in the file's description.
        overwrite: Replace an existing file.

    Returns:
        The path written.

    Raises:
        DataError: The array does not fit the image, the suffix is wrong, the file exists, or it cannot be written.
    """
    return _write(Path(path), np.asarray(map_XYZ).astype(np.float32), like, description, overwrite)


def _write(path: Path, array_XYZ: np.ndarray, like: Volume, description: str, overwrite: bool) -> Path:
    suffix = next((end for end in (".nii.gz", ".nii") if path.name.lower().endswith(end)), None)
    if suffix is None:
        raise DataError("results are written as .nii or .nii.gz", file=path)
    if array_XYZ.shape[:3] != like.array.shape or array_XYZ.ndim > 4:
        message = f"the result has shape {array_XYZ.shape}, its image {like.path or ''} has {like.array.shape}"
        raise DataError(message, file=path)
    if path.exists() and not overwrite:
        raise DataError("exists already", file=path, hint="--overwrite replaces it")
    return write_image(_image_like(array_XYZ, like, description), path)


def _image_like(array_XYZ: np.ndarray, like: Volume, description: str) -> nib.Nifti1Image:
    """A single-file NIfTI image with the array's values and the geometry of `like`."""
    is_nifti2 = isinstance(like.header, nib.Nifti2Header)
    image_class = nib.Nifti2Image if is_nifti2 else nib.Nifti1Image
    if like.header is None:
        header = image_class.header_class()
        header.set_data_shape(array_XYZ.shape)
        header.set_sform(like.affine, code="scanner")
        header.set_qform(like.affine, code="scanner")
        header.set_xyzt_units("mm")
    else:
        # Through its bytes, which keeps every field and the byte order, also of the .hdr half of a pair, and leaves the
        # extensions behind: they may hold a whole DICOM header with the patient's name.
        header = image_class.header_class(like.header.binaryblock, like.header.endianness, check=False)
        if array_XYZ.ndim == 3:
            array_XYZ = array_XYZ.reshape(header.get_data_shape()[:3])  # a 2D file stays 2D
        if header.get_data_shape() != array_XYZ.shape:  # one frame of a 4D file
            header.set_data_shape(array_XYZ.shape)
        for field in _SOURCE_FIELDS & set(header.keys()):
            header[field] = np.zeros_like(header[field])
    header.set_data_dtype(array_XYZ.dtype)
    header.set_slope_inter(1, 0)
    text = f"rdvit: {description}".encode()[:_DESCRIP_BYTES]
    header["descrip"] = text.decode(errors="ignore").encode()  # never half a character
    return image_class(array_XYZ, header.get_best_affine(), header)
