"""A synthetic beating heart, written as an ACDC folder, with the true volumes of every patient beside it.

The phantom replaces real data in tests, in the demo and in CI: no licence, no download, a few seconds, and a truth that
no annotator drew. `phantom_heart` holds the heart and its closed-form volumes; here it is put into an image.

Position. The heart is turned and stretched (u e, v / e). These maps of the image plane have determinant 1, so all
          areas, and with them all volumes, stay.
Counting. Counted voxels agree with the closed form to 2 % at the default sizes. A label is what lies at the voxel's
          centre, and the base plane is the edge of a slice, so counting is the midpoint rule in z. With slices h thick
          and the apex m h away from the nearest slice edge, its relative error for half an ellipsoid of length L is
          (1/8 - 3/2 m^2)(h/L)^2: at most (h/2L)^2, 1 % for h = 10 and L = 50. EF is a small difference of volumes, so
          the LV pool gets lengths for which m = 1/sqrt(12), where that error vanishes.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import shutil
import tempfile
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import nibabel as nib
import numpy as np
from scipy.ndimage import gaussian_filter

from rdvit.data.phantom_heart import LV, MYO, RV, Heart, boundaries, heart_measures, heart_shape
from rdvit.errors import ConfigError, DataError

MIN_FOV_MM = 160.0  # room for the largest heart, turned and off centre
MAX_SLICES = 10

# Per group: LV EDV (mL), LV EF, wall at ED (mm), L/R of the LV, RV EDV (mL), RV EF. Near the group means of ACDC's
# training set; the very large DCM and RV hearts are reduced, so that a heart fits into ten slices of 10 mm.
_GROUPS = {
    "NOR": (140.0, 0.60, 8.5, 2.50, 140.0, 0.55),
    "DCM": (240.0, 0.20, 8.5, 2.05, 150.0, 0.40),
    "HCM": (130.0, 0.68, 13.0, 2.45, 130.0, 0.58),
    "MINF": (175.0, 0.32, 8.0, 2.25, 125.0, 0.54),
    "RV": (120.0, 0.55, 8.0, 2.50, 200.0, 0.33),
}
# SSFP contrast: blood and fat bright, muscle dark, air and lung nearly black.
_LV_BLOOD, _RV_BLOOD, _MUSCLE, _RV_WALL = 190.0, 178.0, 62.0, 75.0
# Ellipses painted one over the other: x, y, half width, half height in halves of the field of view; intensity. The
# stomach and the aorta are as bright as blood, so that intensity alone does not solve the task.
_ORGANS = (
    (0.00, 0.00, 0.97, 1.00, 205.0),  # subcutaneous fat
    (0.00, 0.00, 0.87, 0.93, 92.0),  # chest
    (0.08, -0.42, 0.70, 0.44, 20.0),  # lung in front of the heart
    (0.60, 0.02, 0.24, 0.40, 24.0),  # lung beside it
    (-0.30, 0.66, 0.55, 0.24, 84.0),  # liver
    (0.50, 0.56, 0.25, 0.15, 182.0),  # stomach
    (0.12, 0.78, 0.10, 0.09, 186.0),  # descending aorta
    (-0.35, -0.35, 0.05, 0.03, 150.0),  # vessels of the lung
    (0.30, -0.55, 0.03, 0.05, 160.0),
)


@dataclass(frozen=True)
class PhantomPatient:
    """A heart in its image grid.

    `shape` is (X, Y, Z) and `spacing` in mm. `base_slices` slices lie above the base plane and hold no label. `centre`
    is where the LV's axis crosses the slices (mm from the grid's corner), `septum` the angle at which the RV lies,
    `stretch` the letter e. Frames are 1-based and ED is frame 1.
    """

    number: int
    seed: int
    group: str
    heart: Heart
    shape: tuple[int, int, int]
    spacing: tuple[float, float, float]
    base_slices: int
    centre: tuple[float, float]
    septum: float
    stretch: float
    frames: int
    es_frame: int

    @property
    def name(self) -> str:
        """ACDC's name of the patient's folder."""
        return f"patient{self.number:03d}"

    def phase(self, frame: int) -> float:
        """Phase of a frame of the cine: 0 at frame 1 (ED), 1 at `es_frame`, half waves of a cosine between."""
        systole, t = self.es_frame - 1, frame - 1
        if t <= systole:
            return (1 - math.cos(math.pi * t / systole)) / 2
        return (1 + math.cos(math.pi * (t - systole) / (self.frames - systole))) / 2


def _make_heart(group: str, rng: np.random.Generator) -> tuple[Heart, float]:
    """Draw a heart of a group, and the slice thickness (mm) that suits it."""

    def near(value: float, part: float) -> float:
        return value * rng.uniform(1 - part, 1 + part)

    lv_edv, lv_ef, wall, aspect, rv_edv, rv_ef = _GROUPS[group]
    size = rng.uniform(0.65, 1.1)
    lv_edv, rv_edv = near(size * lv_edv, 0.05), near(size * rv_edv, 0.05)
    lv_ef, rv_ef = lv_ef + rng.uniform(-0.04, 0.04), rv_ef + rng.uniform(-0.04, 0.04)
    wall = near(size ** (1 / 3) * wall, 0.05)
    rough_length = (1500 * lv_edv * near(aspect, 0.05) ** 2 / math.pi) ** (1 / 3)  # V = (2/3) pi R^2 L, R = L / aspect
    thicknesses = [h for h in (8.0, 8.5, 9.0, 9.5, 10.0) if rough_length + wall <= (MAX_SLICES - 0.3) * h]
    h = float(rng.choice(thicknesses))

    def exact(length: float) -> float:
        """The nearest length that the midpoint rule measures exactly: m = 1/sqrt(12) from a slice's edge."""
        m = 1 / math.sqrt(12)
        return min((h * (math.floor(length / h) + part) for part in (m, 1 - m)), key=lambda best: abs(best - length))

    length = exact(rough_length)
    shortening = 1 - exact(length * (1 - lv_ef / 4)) / length
    angle = math.radians(rng.uniform(80, 90) + (12 if group == "RV" else 0))
    skew, reach = rng.uniform(-0.3, 0.3), rng.uniform(0.85, 0.92)
    return Heart(lv_edv, lv_ef, length, shortening, wall, rv_edv, rv_ef, angle, skew, reach), h


def make_patient(number: int, seed: int = 0, shape_range: tuple[int, int] = (96, 136)) -> PhantomPatient:
    """Draw a patient; the same number and seed give the same patient, however many others there are.

    Args:
        number: 1-based; the groups NOR, DCM, HCM, MINF, RV take turns.
        seed: Seed of the whole set.
        shape_range: Least and greatest in-plane size in voxels, of which multiples of 8 are made one less. The in-plane
            spacing is 1.3 to 1.8 mm, or more where a smaller image would cut the heart; slices are 8 to 10 mm apart.
    """
    rng = np.random.default_rng([seed, number, 0])
    group = list(_GROUPS)[(number - 1) % len(_GROUPS)]
    heart, thickness = _make_heart(group, rng)
    x_size, y_size = sorted(int(n) - (n % 8 == 0) for n in rng.integers(*shape_range, 2, endpoint=True))
    pixel = round(max(rng.uniform(1.3, 1.8), MIN_FOV_MM / x_size), 4)
    labelled = math.ceil((heart.lv_length + heart.wall) / thickness)
    base_slices = int(rng.random() < 0.3 and labelled < MAX_SLICES)
    apex_slices = int(rng.random() < 0.3 and labelled + base_slices < MAX_SLICES)

    ed = heart_shape(heart, 0)
    septum = math.pi + rng.uniform(-0.45, 0.45)  # the RV lies at low x, as in most of ACDC
    shift = (ed.radius + ed.wall) * ed.rv_bulge / 2  # brings the middle of both ventricles near the middle of the image
    x_centre = x_size * pixel / 2 - shift * math.cos(septum) + rng.uniform(-7, 7)
    y_centre = y_size * pixel / 2 - shift * math.sin(septum) + rng.uniform(-7, 7)
    frames = int(rng.integers(6, 8, endpoint=True))
    return PhantomPatient(
        number=number,
        seed=seed,
        group=group,
        heart=heart,
        shape=(x_size, y_size, base_slices + labelled + apex_slices),
        spacing=(pixel, pixel, thickness),
        base_slices=base_slices,
        centre=(x_centre, y_centre),
        septum=septum,
        stretch=rng.uniform(0.95, 1.05),
        frames=frames,
        es_frame=int(rng.integers(3, frames // 2, endpoint=True)),
    )


def _grid(patient: PhantomPatient, per_voxel: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points in the heart's frame, `per_voxel` along each axis: u (to the septum) and v (X', Y', 1), z (Z',)."""
    x, y, z = (
        ((np.arange(n * per_voxel) + 0.5) * (step / per_voxel)).astype(np.float32)
        for n, step in zip(patient.shape, patient.spacing, strict=True)
    )
    x, y = x[:, None, None] - patient.centre[0], y[None, :, None] - patient.centre[1]
    cos, sin = math.cos(patient.septum), math.sin(patient.septum)
    u, v = patient.stretch * (cos * x + sin * y), (cos * y - sin * x) / patient.stretch
    return u, v, z - patient.base_slices * patient.spacing[2]


def draw_labels(patient: PhantomPatient, phase: float) -> np.ndarray:
    """Label map (X, Y, Z) uint8 at a phase (0 = ED, 1 = ES): what lies at the centre of each voxel."""
    u, v, z = _grid(patient, 1)
    r, endo, epi, rv = boundaries(patient.heart, heart_shape(patient.heart, phase), u, v, z)
    labels = np.zeros(patient.shape, np.uint8)
    labels[r < rv] = RV
    labels[r < epi] = MYO
    labels[r < endo] = LV
    return labels


def _paint_heart(patient: PhantomPatient, phase: float) -> tuple[np.ndarray, np.ndarray]:
    """Coverage by the heart (0 to 1) and intensity times coverage, (X, Y, Z): means over 2 x 2 x 2 points a voxel."""
    u, v, z = _grid(patient, 2)
    shape = heart_shape(patient.heart, phase)
    r, endo, epi, rv = boundaries(patient.heart, shape, u, v, z)
    paint = np.zeros(rv.shape, np.float32)
    np.putmask(paint, (r < rv + 3) & (rv > epi + 0.5), _RV_WALL)  # a free wall of 3 mm, unlabelled as in ACDC
    np.putmask(paint, r < rv, _RV_BLOOD)
    np.putmask(paint, r < epi, _MUSCLE)
    np.putmask(paint, r < endo, _LV_BLOOD)
    trunk = np.where((z > 0.15 * shape.length) & (z < 0.7 * shape.length), endo, 0)
    for side in (-0.42, 0.42):  # papillary muscles: dark, yet labelled as LV, as in ACDC
        np.putmask(paint, (u + 0.5 * trunk) ** 2 + (v - side * trunk) ** 2 < (0.16 * trunk) ** 2, _MUSCLE)
    np.putmask(paint, (r < 0.75 * shape.radius) & (z < 0), _RV_BLOOD)  # the atrium above the base: bright and unlabelled
    corners = [paint[i::2, j::2, k::2] for i, j, k in itertools.product((0, 1), repeat=3)]
    return sum(corner > 0 for corner in corners) / np.float32(8), sum(corners) / np.float32(8)


@lru_cache(maxsize=1)  # the frames of a cine share it
def _paint_scene(patient: PhantomPatient) -> tuple[np.ndarray, np.ndarray, float]:
    """What does not beat: the chest (X, Y, Z), the receiver's gain (X, Y, 1) and the sigma of the noise."""
    rng = np.random.default_rng([patient.seed, patient.number, 1])
    x, y, z = np.meshgrid(*(np.linspace(-1, 1, n) for n in patient.shape), indexing="ij", sparse=True)
    scene = np.full(patient.shape, 5.0)
    for cx, cy, half_width, half_height, value in _ORGANS:
        dx, dy, slope_x, slope_y = rng.normal(0, 0.02, 4)
        distance = np.hypot((x - cx - dx - slope_x * z) / half_width, (y - cy - dy - slope_y * z) / half_height)
        rim = min(patient.shape[:2]) / 2 * min(half_width, half_height)  # makes the edge one voxel wide: partial volume
        scene += np.clip((1 - distance) * rim + 0.5, 0, 1) * (value * rng.uniform(0.92, 1.08) - scene)
    texture = gaussian_filter(rng.normal(size=patient.shape), (3, 3, 0.7))
    a, b, c, d = rng.uniform(-0.18, 0.18, 4)  # the bias field of the coils
    gain = rng.uniform(0.8, 3.0) * np.exp(a * x + b * y + c * x * y + d * (x**2 + y**2))
    return scene * (1 + 0.08 * texture / texture.std()), gain, rng.uniform(5, 9)


def draw_image(patient: PhantomPatient, frame: int) -> np.ndarray:
    """SSFP-like image (X, Y, Z) int16 of a 1-based frame, with partial volume, bias field and Rician noise."""
    scene, gain, sigma = _paint_scene(patient)
    coverage, heart = _paint_heart(patient, patient.phase(frame))
    clean = gaussian_filter(scene * (1 - coverage) + heart, (0.5, 0.5, 0))
    noise = np.random.default_rng([patient.seed, patient.number, 1 + frame]).normal(0, sigma, (2, *patient.shape))
    return np.rint(gain * np.hypot(clean + noise[0], noise[1])).astype(np.int16)


def _save(path: Path, array: np.ndarray, spacing: tuple[float, ...]) -> None:
    """Write NIfTI with ACDC's header: the sform says 1 mm, no qform, and only pixdim holds the true spacing."""
    image = nib.Nifti1Image(array, np.diag([-1.0, -1.0, 1.0, 1.0]))  # nibabel's default: sform_code 2, qform_code 0
    image.header.set_zooms(spacing)
    nib.save(image, path)


def _write_patient(folder: Path, patient: PhantomPatient, cine: bool) -> None:
    """Write one patient's folder: Info.cfg, image and labels at ED and ES, and the cine where it is wanted."""
    folder.mkdir(parents=True)
    height, weight = np.random.default_rng([patient.seed, patient.number, 0, 1]).integers((150, 50), (192, 105))
    info = f"ED: 1\nES: {patient.es_frame}\nGroup: {patient.group}\nHeight: {height:.1f}\n"
    info += f"NbFrame: {patient.frames}\nWeight: {weight:.1f}\n"
    (folder / "Info.cfg").write_text(info, encoding="utf-8")
    frames = range(1, patient.frames + 1) if cine else (1, patient.es_frame)
    images = {frame: draw_image(patient, frame) for frame in frames}
    for frame in (1, patient.es_frame):
        stem = f"{patient.name}_frame{frame:02d}"
        _save(folder / f"{stem}.nii.gz", images[frame], patient.spacing)
        _save(folder / f"{stem}_gt.nii.gz", draw_labels(patient, patient.phase(frame)), patient.spacing)
    if cine:
        _save(folder / f"{patient.name}_4d.nii.gz", np.stack(list(images.values()), -1), (*patient.spacing, 1.0))


def write_phantom(
    out: str | Path,
    patients: int = 20,
    seed: int = 0,
    *,
    cines: int = 2,
    shape_range: tuple[int, int] = (96, 136),
    overwrite: bool = False,
) -> Path:
    """Write a phantom data set laid out as ACDC, and phantom.json with the closed-form measures of every patient.

    Args:
        out: Folder to make; the patients stand in `out/training`, which appears complete or not at all.
        patients: How many; patient i is the same in every set of one seed.
        seed: Not negative.
        cines: The first so many patients also get a 4D cine of 6 to 8 frames.
        shape_range: As in `make_patient`. Below the default, voxels are too large to keep to 2 %.
        overwrite: Replace an earlier phantom in `out`. A folder that holds anything else is never touched.

    Returns:
        `out` as a path.

    Raises:
        ConfigError: If a number is out of range.
        DataError: If `out` is a file, holds files that are no phantom, or holds a phantom and `overwrite` is not given.
    """
    out = Path(out)
    if patients < 1 or seed < 0 or cines < 0:
        raise ConfigError(f"expected patients >= 1, seed >= 0 and cines >= 0, got {patients}, {seed} and {cines}")
    if not 16 <= shape_range[0] <= shape_range[1]:
        raise ConfigError(f"expected 16 <= least <= greatest in-plane size, got {shape_range}")
    if out.exists() and not out.is_dir():
        raise DataError("expected a folder, found a file", file=out, hint="name another folder")
    if out.is_dir() and any(out.iterdir()):
        if not (out / "phantom.json").is_file():
            raise DataError("expected an empty folder, found files that are no phantom", file=out, hint="name another")
        if not overwrite:
            raise DataError("this folder already holds a phantom", file=out, hint="overwrite it or name another")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".phantom-", dir=out) as temporary:
        truth = {}
        for number in range(1, patients + 1):
            patient = make_patient(number, seed, shape_range)
            _write_patient(Path(temporary, "training", patient.name), patient, cine=number <= cines)
            about = {"group": patient.group, "spacing_mm": patient.spacing, "ed_frame": 1, "es_frame": patient.es_frame}
            truth[patient.name] = {**about, **heart_measures(patient.heart)}
        written = Path(temporary, "phantom.json")
        written.write_text(json.dumps({"seed": seed, "patients": truth}, indent=1) + "\n", encoding="utf-8")
        os.replace(written, out / "phantom.json")  # first: only a folder that holds it may be overwritten
        if (out / "training").exists():
            shutil.rmtree(out / "training")
        os.replace(Path(temporary, "training"), out / "training")
    return out
