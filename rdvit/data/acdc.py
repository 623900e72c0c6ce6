"""The ACDC data set: short-axis cine MRI with the end-diastolic and end-systolic frame labelled.

Bernard et al., "Deep Learning Techniques for Automatic MRI Cardiac Multi-structures Segmentation and Diagnosis: Is the
Problem Solved?", IEEE TMI 37(11), 2018. A patient folder holds ``Info.cfg``, which names the two frames and the
pathology group, and per frame ``patientNNN_frameKK.nii.gz`` and ``patientNNN_frameKK_gt.nii.gz``.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from rdvit.errors import DataError

CLASS_NAMES = {1: "RV", 2: "MYO", 3: "LV"}
GROUPS = ("DCM", "HCM", "MINF", "NOR", "RV")

# Where the patient folders may lie below the folder the user names; the first that has any is taken, so training comes
# before testing. "database" is the folder inside the official archive.
_PLACES = (".", "training", "database/training", "testing", "database/testing")


class Info(NamedTuple):
    """What a patient's Info.cfg says about frames and group.

    Attributes:
        ed: End-diastolic frame, counted from 1.
        es: End-systolic frame, counted from 1.
        group: Pathology group, one of `GROUPS` in the official data; None where the file names none.
    """

    ed: int
    es: int
    group: str | None


class Frame(NamedTuple):
    """One labelled frame: patient and group, phase "ED" or "ES", and its two files."""

    patient: str
    group: str | None
    phase: str
    image: Path
    label: Path


def find_patients(root: Path) -> list[Path]:
    """Patient folders, sorted, of an ACDC folder; empty if it is none.

    Args:
        root: The folder above training/ (and testing/, which is then left alone), or one of the two.
    """
    for place in _PLACES:
        folders = sorted(info.parent for info in (root / place).glob("*/Info.cfg"))
        if folders:
            return folders
    return []


def read_info(path: Path) -> Info:
    """Read an Info.cfg, line by line as ``Key: value``, in any order.

    Raises:
        DataError: The file cannot be read, or ED or ES is missing or not a frame number.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig", errors="replace").splitlines()
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror}", file=path) from error
    entries = {key.strip(): value.strip() for key, colon, value in (line.partition(":") for line in lines) if colon}
    numbers = []
    for key in ("ED", "ES"):
        value = entries.get(key, "")
        if not value.isdecimal() or int(value) < 1:
            raise DataError(f"expected a line '{key}: frame number, from 1', found {value!r}", file=path)
        numbers.append(int(value))
    return Info(numbers[0], numbers[1], entries.get("Group") or None)


def find_frames(root: Path, problems: list[str] | None = None) -> list[Frame]:
    """The ED and ES frame of every patient, in the order of the patient folders.

    Args:
        root: As in `find_patients`.
        problems: Where given, what is wrong with a patient is noted here and its frames are left out.

    Raises:
        DataError: An Info.cfg is broken, or a frame it names lacks its image or label; all missing files are named.
    """
    frames, missing = [], []
    for folder in find_patients(root):
        try:
            info = read_info(folder / "Info.cfg")
        except DataError as error:
            if problems is None:
                raise
            problems.append(str(error))
            continue
        for phase, number in (("ED", info.ed), ("ES", info.es)):
            image, label = (_nifti(folder / f"{folder.name}_frame{number:02d}{end}") for end in ("", "_gt"))
            absent = [path.name for path in (image, label) if not path.is_file()]
            missing += absent
            if not absent or problems is None:
                frames.append(Frame(folder.name, info.group, phase, image, label))
    if missing:
        names = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        absence = DataError(f"Info.cfg names {len(missing)} frame files that are missing: {names}", file=root)
        if problems is None:
            raise absence
        problems.append(str(absence))
    return frames


def _nifti(stem: Path) -> Path:
    """The file as distributed (.nii.gz), or unpacked (.nii) where only that is there."""
    packed, plain = stem.with_name(f"{stem.name}.nii.gz"), stem.with_name(f"{stem.name}.nii")
    return plain if plain.is_file() and not packed.is_file() else packed
