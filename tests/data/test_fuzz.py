"""Damaged bytes: every reader answers with a volume or with the package's own error, soon, whatever the bytes."""

from __future__ import annotations

import gzip
import logging
import random
from collections.abc import Callable
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import SimpleITK as sitk  # noqa: N813 - its customary name

from rdvit.checkpoint import load_info
from rdvit.data.datalist import load_data
from rdvit.data.volume import canonical_geometry, frame_count, read_image, read_labels
from rdvit.errors import RdvitError

LABELS = (np.arange(24, dtype=np.int16) % 5).reshape(2, 3, 4)
EDGES = (b"\xff\xff\xff\xff", bytes(4), b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"9999", b"-1  ", b"nan ")
KINDS = ("a.nii", "a.nii.gz", "two.nii", "zipped.nii", "a.nrrd", "packed.nrrd", "a.mha", "packed.mha")


def seed_file(folder: Path, name: str) -> bytes:
    """A sound file of a kind."""
    path = folder / f"seed-{name}"
    if name.endswith((".nrrd", ".mha")):
        sitk.WriteImage(sitk.GetImageFromArray(LABELS.T), str(path), name.startswith("packed"))
        return path.read_bytes()
    kind = nib.Nifti2Image if name == "two.nii" else nib.Nifti1Image
    content = kind(LABELS, np.diag([2.0, 2, 3, 1])).to_bytes()
    return gzip.compress(content) if name in ("a.nii.gz", "zipped.nii") else content


def mutate(content: bytes, dice: random.Random) -> bytes:
    """One to eight faults, most of them near the beginning, where headers are."""
    damaged = bytearray(content)
    for _ in range(dice.choice((1, 1, 2, 4, 8))):
        near, anywhere = dice.randrange(min(len(damaged), 600) or 1), dice.randrange(len(damaged) or 1)
        fault = dice.randrange(5)
        if fault == 0:
            damaged[near : near + 1] = bytes([dice.randrange(256)])
        elif fault == 1 and damaged:
            damaged[anywhere] ^= 1 << dice.randrange(8)
        elif fault == 2:
            del damaged[anywhere:]
        elif fault == 3:
            damaged[anywhere:anywhere] = dice.randbytes(dice.randrange(1, 9))
        else:
            damaged[near : near + 4] = dice.choice(EDGES)
    return bytes(damaged)


def survives(read: Callable[[], object]) -> bool:
    """Whether it was read; anything but a result or our own error fails the test."""
    try:
        read()
    except RdvitError as error:
        assert str(error)
        return False
    return True


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)


def attack_images(folder: Path, kind: str, count: int, seed: int) -> None:
    dice, content = random.Random(f"{kind} {seed}"), seed_file(folder, kind)
    path = folder / kind
    path.write_bytes(content)
    assert survives(lambda: read_image(path)) and survives(lambda: read_labels(path))
    outcomes = set()
    for _ in range(count):
        path.write_bytes(mutate(content, dice))
        outcomes |= {survives(lambda: read_image(path, 1)), survives(lambda: read_labels(path, 1))}
        survives(lambda: canonical_geometry(path)), survives(lambda: frame_count(path))
    assert False in outcomes


def attack_dicom(folder: Path, count: int, seed: int) -> None:
    """One slice of three; a damaged file may also be no DICOM any more, and the other two are a stack."""
    pydicom = pytest.importorskip("pydicom", reason='needs pydicom: pip install "rdvit[dicom]"')
    for z in range(3):
        sitk.WriteImage(sitk.GetImageFromArray(LABELS.T[:1]), str(folder / f"{z}.dcm"))
        header = pydicom.dcmread(folder / f"{z}.dcm")
        header.SeriesInstanceUID, header.SOPInstanceUID = "1.2.3", f"1.2.3.{z}"
        header.ImageOrientationPatient, header.ImagePositionPatient = [1, 0, 0, 0, 1, 0], [0, 0, 8 * z]
        header.PixelSpacing = [1.5, 1.5]
        header.save_as(folder / f"{z}.dcm")
    dice, content = random.Random(seed), (folder / "2.dcm").read_bytes()
    assert survives(lambda: read_image(folder))
    outcomes = set()
    for _ in range(count):
        (folder / "2.dcm").write_bytes(mutate(content, dice))
        outcomes.add(survives(lambda: read_image(folder, 1)))
    assert False in outcomes


def attack_texts(phantom: Path, model: Path, folder: Path, count: int, seed: int) -> None:
    """model.json and a JSON data list."""
    dice = random.Random(seed)
    image = phantom / "training" / "patient001" / "patient001_frame01.nii.gz"
    data = b'{"labels": {"1": "LV"}, "training": [{"image": "%s", "patient": "a"}]}' % str(image).encode()
    path = folder / "list.json"
    path.write_bytes(data)
    assert survives(lambda: load_data(path)) and survives(lambda: load_info(model))
    description = (model / "model.json").read_bytes()
    for _ in range(count):
        (folder / "model.json").write_bytes(mutate(description, dice))
        survives(lambda: load_info(folder))
        path.write_bytes(mutate(data, dice))
        survives(lambda: load_data(path))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_images(tmp_path: Path, kind: str) -> None:
    attack_images(tmp_path, kind, count=40, seed=1)


@pytest.mark.filterwarnings("ignore")
def test_damaged_dicom(tmp_path: Path) -> None:
    attack_dicom(tmp_path, count=20, seed=1)


def test_damaged_descriptions_and_lists(phantom: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    attack_texts(phantom, tiny_model_folder, tmp_path, count=100, seed=1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore")
def test_damaged_images_for_longer(tmp_path: Path, kind: str) -> None:
    attack_images(tmp_path, kind, count=1500, seed=2)


@pytest.mark.slow
def test_damaged_descriptions_and_lists_for_longer(phantom: Path, tiny_model_folder: Path, tmp_path: Path) -> None:
    attack_texts(phantom, tiny_model_folder, tmp_path, count=3000, seed=2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_damaged_dicom_for_longer(tmp_path: Path) -> None:
    attack_dicom(tmp_path, count=400, seed=2)
