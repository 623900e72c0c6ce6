"""Opening a file of any kind as a nibabel image: NIfTI by nibabel, NRRD and MetaImage by ITK, a folder as a DICOM series.

Everything after this module sees one kind of object, with a shape, an affine to RAS mm, and the header that results are
written like. A NIfTI file's voxels are read when they are asked for, the others at once.
"""

from __future__ import annotations

import gzip
import re
from io import BufferedReader
from pathlib import Path

import nibabel as nib
import numpy as np

from rdvit.atomic import atomic
from rdvit.data import itk, limits
from rdvit.errors import DataError, RdvitError

NIFTI_SUFFIXES = (".nii", ".nii.gz", ".hdr", ".img", ".hdr.gz", ".img.gz")
SUFFIXES = (*NIFTI_SUFFIXES, *itk.SUFFIXES)
_HEADERS = (".hdr", ".img", ".hdr.gz", ".img.gz", ".nhdr", ".mhd")
_GZIP = b"\x1f\x8b"


def stem(path: Path) -> str:
    """The name of an image without its suffix, which may have two parts; of a DICOM folder, the folder's name."""
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if path.name.lower().endswith(suffix):
            return path.name[: -len(suffix)]
    return path.resolve().name if path.is_dir() else path.stem


def companions(path: Path) -> list[Path]:
    """All files that an image is made of, sorted: the files of a DICOM folder; of a header with its voxels in a file of their
    own, the files of the same name; otherwise the file alone."""
    if path.is_dir():
        return sorted(file for file in path.iterdir() if file.is_file())
    if not path.name.lower().endswith(_HEADERS):
        return [path]
    begin = f"{stem(path)}."
    return sorted(file for file in path.parent.iterdir() if file.name.startswith(begin) and file.is_file())


def is_dicom(path: Path) -> bool:
    """Whether a file begins as DICOM files do: "DICM" after 128 bytes of anything."""
    try:
        with path.open("rb") as stream:
            return stream.read(132)[128:] == b"DICM"
    except OSError:
        return False


def is_dicom_folder(path: Path) -> bool:
    """Whether a folder holds DICOM files, whatever they are called."""
    return path.is_dir() and any(is_dicom(file) for file in path.iterdir() if file.is_file())


def open_image(path: Path, series: str | None = None) -> nib.Nifti1Pair:
    """Open an image file, or a folder with a DICOM series.

    Args:
        path: A file with one of `SUFFIXES` in any case, also gzip under .nii or a plain file under .nii.gz; or a folder.
        series: Which series of a DICOM folder: its UID, the end of it, or its description.

    Raises:
        DataError: It is not there, cannot be read, or is refused by `limits`.
    """
    name = path.name.lower()
    if path.is_dir():
        if not is_dicom_folder(path):
            raise DataError("is a folder without DICOM files; one image file or a DICOM folder was expected", file=path)
        from rdvit.data.dicom import open_series  # needs the extra of that name

        return open_series(path, series)
    if not path.exists():
        raise DataError("no such file", file=path)
    if not name.endswith(SUFFIXES):
        if is_dicom(path):
            raise DataError("is one DICOM file; name the folder that holds its whole series", file=path)
        raise DataError(f"not the name of an image, it should end in {', '.join(SUFFIXES)}", file=path)
    if path.stat().st_size == 0:
        raise DataError("cannot be read as an image: the file is empty", file=path)
    return itk.open_itk(path) if name.endswith(itk.SUFFIXES) else _open_nifti(path)


def write_image(image: nib.Nifti1Image, path: Path) -> Path:
    """Write an image that was made here as .nii or .nii.gz, whole or not at all; real numbers as float32.

    Raises:
        DataError: It cannot be written.
    """
    array = np.asanyarray(image.dataobj)
    if array.dtype.kind == "f":
        image.set_data_dtype(np.float32)
    try:
        with atomic(path) as temporary:
            image.to_filename(temporary)
    except OSError as error:
        raise DataError(f"cannot be written: {error.strerror or error}", file=path) from error
    return path


def _open_nifti(path: Path) -> nib.Nifti1Pair:
    """The nibabel image, NIfTI-1 or NIfTI-2, voxels not yet read."""
    try:
        image = _load(path)
    except RdvitError:
        raise
    except Exception as error:  # damaged bytes make nibabel raise nearly anything, from zlib.error to OverflowError
        raise DataError(f"cannot be read as NIfTI: {str(error) or type(error).__name__}", file=path) from error
    if not isinstance(image, nib.Nifti1Pair):
        raise DataError("is Analyze, not NIfTI: it does not say where left and right are", file=path)
    return image


def _load(path: Path) -> nib.Nifti1Pair:
    """nibabel.load, and also gzip under the suffix .nii or a plain file under .nii.gz, as users rename them."""
    name = path.name.lower()
    zipped = _is_zipped(path)
    if (partner := _other_half(path)) is not None and not partner.is_file():
        raise DataError(f"is one half of a pair, and {partner.name} is not there", file=path)
    if zipped == name.endswith(".gz") or not name.endswith((".nii", ".nii.gz")):
        image = nib.load(path, mmap=False)  # mapped files would change under us when someone overwrites them
        voxels = Path(image.file_map["image"].filename)
        end = limits.check_promise(image.shape, image.get_data_dtype().itemsize, path, int(image.dataobj.offset))
        limits.check_content(voxels, end, _is_zipped(voxels))
        return image
    with gzip.GzipFile(path) if zipped else path.open("rb") as stream:
        image_class = _nifti_class(stream)
        header = image_class.header_class.from_fileobj(stream)
        end = limits.check_promise(header.get_data_shape(), header.get_data_dtype().itemsize, path, header.get_data_offset())
        limits.check_content(path, end, zipped)
        stream.seek(0)
        return image_class.from_bytes(stream.read(end))


def _other_half(path: Path) -> Path | None:
    """The .img of an .hdr and the other way round, in the same letters; None for the single files."""
    found = re.search(r"\.(hdr|img)(?=(\.gz)?$)", path.name, re.IGNORECASE)
    if found is None:
        return None
    other = "img" if found[1].lower() == "hdr" else "hdr"
    other = other.upper() if found[1].isupper() else other
    return path.with_name(f"{path.name[: found.start(1)]}{other}{path.name[found.end(1) :]}")


def _is_zipped(path: Path) -> bool:
    with path.open("rb") as stream:
        return stream.read(2) == _GZIP


def _nifti_class(stream: gzip.GzipFile | BufferedReader) -> type[nib.Nifti1Image]:
    """NIfTI-2 where the first field, the size of the header, is 540 in either byte order; else NIfTI-1."""
    first = stream.read(4)
    stream.seek(0)
    return nib.Nifti2Image if 540 in (int.from_bytes(first, "little"), int.from_bytes(first, "big")) else nib.Nifti1Image
