"""The phantom's heart: ventricles whose volumes are known in closed form at every phase of the beat.

Lengths in mm; z runs from the base plane (z = 0) to the apex; polar coordinates (r, phi) about the axis of the left
ventricle (LV), phi = 0 in the middle of the septum.

LV pool.  Half an ellipsoid, r < R sqrt(1 - (z/L)^2). Its sections pi R^2 (1 - (z/L)^2) add up to
          V_LV = (2/3) pi R^2 L.
MYO.      The shell from there to the half ellipsoid of radius R + w and length L + w:
          V_MYO = (2/3) pi [(R+w)^2 (L+w) - R^2 L].
RV.       A crescent on the epicardium. With r_e(z) the radius of the outer ellipsoid, Z = q (L+w), q < 1, u = z/Z:
          r_e < r < r_e [1 + k (1 - u^2) f(phi)],   f = cos(t) (1 + s sin(t)),   t = pi phi / (2 P),   |phi| < P.
          It starts where MYO ends, so they cannot overlap; f is 0 at both insertion points; s makes one side fuller.
          A section has the area  int (r_out^2 - r_e^2)/2 dphi = r_e^2 [k (1-u^2) F1 + k^2 (1-u^2)^2 F2 / 2]  with
          F1 = int f dphi = 4 P / pi  and  F2 = int f^2 dphi = P (1 + s^2 / 4).
          With r_e^2 = (R+w)^2 (1 - a u^2), a = q^2, and the integrals over u in [0, 1] of (1 - a u^2)(1 - u^2), which
          is 2/3 - 2a/15, and of (1 - a u^2)(1 - u^2)^2, which is 8/15 - 8a/105:
          V_RV = (R+w)^2 Z [k F1 (2/3 - 2a/15) + k^2 F2 (4/15 - 4a/105)].
          For a wanted volume this is a quadratic equation in k.
Beat.     phase runs from 0 (ED) to 1 (ES). A ventricle holds EDV (1 - phase EF). The LV shortens to
          L = L_ED (1 - phase g), which gives R. The wall thickens so that V_MYO never changes, as muscle is
          incompressible: w is the one positive root of (R+w)^2 (L+w) = R^2 L + 3 V_MYO / (2 pi).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from scipy.optimize import brentq

RV, MYO, LV = 1, 2, 3  # ACDC's label values
MYOCARDIAL_DENSITY = 1.05  # g/mL


@dataclass(frozen=True)
class Heart:
    """What fixes a heart at every phase: mL, mm, radians and fractions; the letters are those of the module's text."""

    lv_edv: float
    lv_ef: float
    lv_length: float  # L at ED
    lv_shortening: float  # g
    wall: float  # w at ED
    rv_edv: float
    rv_ef: float
    rv_angle: float  # P
    rv_skew: float  # s
    rv_reach: float  # q


@dataclass(frozen=True)
class HeartShape:
    """A heart at one phase: R, L, w and Z in mm, and the bulge k of the RV, a pure number."""

    radius: float
    length: float
    wall: float
    rv_length: float
    rv_bulge: float


def _rv_terms(heart: Heart, epi_radius: float, rv_length: float) -> tuple[float, float]:
    """The factors of k and k^2 in V_RV (mm^3)."""
    a, scale = heart.rv_reach**2, epi_radius**2 * rv_length
    linear = scale * 4 * heart.rv_angle / math.pi * (2 / 3 - 2 * a / 15)
    return linear, scale * heart.rv_angle * (1 + heart.rv_skew**2 / 4) * (4 / 15 - 4 * a / 105)


def heart_shape(heart: Heart, phase: float) -> HeartShape:
    """Solve for the shape that has the heart's volumes at a phase (0 = ED, 1 = ES) and the muscle of ED."""
    length = heart.lv_length * (1 - phase * heart.lv_shortening)
    radius = math.sqrt(1500 * heart.lv_edv * (1 - phase * heart.lv_ef) / (math.pi * length))
    ed_radius = math.sqrt(1500 * heart.lv_edv / (math.pi * heart.lv_length))
    muscle = (ed_radius + heart.wall) ** 2 * (heart.lv_length + heart.wall) - ed_radius**2 * heart.lv_length
    wall = brentq(lambda w: (radius + w) ** 2 * (length + w) - radius**2 * length - muscle, 0, muscle ** (1 / 3))
    rv_length = heart.rv_reach * (length + wall)
    linear, square = _rv_terms(heart, radius + wall, rv_length)
    rv_volume = 1000 * heart.rv_edv * (1 - phase * heart.rv_ef)
    bulge = (math.sqrt(linear**2 + 4 * square * rv_volume) - linear) / (2 * square)
    return HeartShape(radius, length, wall, rv_length, bulge)


def heart_volumes(heart: Heart, phase: float) -> dict[int, float]:
    """Closed-form volumes in mL of RV, MYO and LV, keyed by label value, at a phase (0 = ED, 1 = ES)."""
    s = heart_shape(heart, phase)
    linear, square = _rv_terms(heart, s.radius + s.wall, s.rv_length)
    pool = 2 / 3 * math.pi * s.radius**2 * s.length
    epicardium = 2 / 3 * math.pi * (s.radius + s.wall) ** 2 * (s.length + s.wall)
    volumes = {RV: linear * s.rv_bulge + square * s.rv_bulge**2, MYO: epicardium - pool, LV: pool}
    return {label: volume / 1000 for label, volume in volumes.items()}


def heart_measures(heart: Heart) -> dict[str, float]:
    """Closed-form clinical measures: volumes in mL, EF in %, LV mass in g (MYO at ED times 1.05 g/mL)."""
    ed, es = heart_volumes(heart, 0), heart_volumes(heart, 1)
    measures: dict[str, float] = {}
    for name, label in (("lv", LV), ("rv", RV)):
        measures[f"{name}_edv_ml"], measures[f"{name}_esv_ml"] = ed[label], es[label]
        measures[f"{name}_ef_percent"] = 100 * (ed[label] - es[label]) / ed[label]
    return {**measures, "myo_ed_ml": ed[MYO], "myo_es_ml": es[MYO], "lv_mass_g": MYOCARDIAL_DENSITY * ed[MYO]}


def boundaries(
    heart: Heart, shape: HeartShape, u: np.ndarray, v: np.ndarray, z: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Where the tissues end, seen from the axis of the LV.

    Args:
        heart: The heart.
        shape: Its shape at the phase wanted.
        u: mm from the axis towards the middle of the septum, (X, Y, 1).
        v: mm from the axis across u, (X, Y, 1).
        z: mm from the base plane towards the apex, (Z,).

    Returns:
        In mm: distance r from the axis (X, Y, 1), and the r at which end the LV pool (Z,), MYO (Z,) and, in the
        direction of each point, the RV (X, Y, Z). All three are 0 above the base and below the apex.
    """

    def ellipsoid(radius: float, length: float) -> np.ndarray:
        return radius * np.sqrt(np.clip(1 - (z / length) ** 2, 0, 1)) * (z >= 0)

    endo, epi = ellipsoid(shape.radius, shape.length), ellipsoid(shape.radius + shape.wall, shape.length + shape.wall)
    t = np.clip(np.arctan2(v, u) * (math.pi / 2 / heart.rv_angle), -math.pi / 2, math.pi / 2)
    bulge = shape.rv_bulge * np.clip(1 - (z / shape.rv_length) ** 2, 0, 1)
    rv = epi * (1 + bulge * np.cos(t) * (1 + heart.rv_skew * np.sin(t)))
    return np.hypot(u, v), endo, epi, rv
