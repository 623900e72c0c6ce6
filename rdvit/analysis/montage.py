"""One picture of a whole data set: the middle slice of every case, with its structures and with letters for the sides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from rdvit.analysis.figures import PANEL_INCHES, grid_shape, new_figure, outline, to_screen
from rdvit.errors import DataError

_OPPOSITE = dict(zip("RLAPSI", "LRPAIS", strict=True))


class Panel(NamedTuple):
    """One case: its name, image (X, Y, Z) and labels on the same grid (or None), spacing in mm, directions of X and Y."""

    name: str
    image_XYZ: np.ndarray
    labels_XYZ: np.ndarray | None
    spacing: Sequence[float]
    axcodes: Sequence[str]


def data_montage(panels: Sequence[Panel]) -> Figure:
    """The slice with most labels of each case (the middle one where there are none), with R and L (or A and P) at its sides.

    Args:
        panels: At least one; every panel is scaled by itself, in its true proportions.

    Raises:
        DataError: There is no panel.
    """
    if not panels:
        raise DataError("no case could be read for the montage")
    rows, columns = grid_shape(len(panels))
    fig = new_figure(columns * PANEL_INCHES, rows * PANEL_INCHES, facecolor="black")
    fig.subplots_adjust(0, 0, 1, 1, 0.02, 0.02)
    axes = fig.subplots(rows, columns, squeeze=False).ravel()
    for ax in axes:
        ax.set_axis_off()
    for ax, panel in zip(axes, panels, strict=False):
        z = _slice_of(panel)
        window = dict(zip(("vmin", "vmax"), np.nanpercentile(panel.image_XYZ[..., z], (1, 99)), strict=True))
        aspect = float(panel.spacing[1] / panel.spacing[0])
        ax.imshow(to_screen(panel.image_XYZ[..., z], panel.axcodes), cmap="gray", aspect=aspect, **window)
        if panel.labels_XYZ is not None:
            outline(ax, to_screen(panel.labels_XYZ[..., z], panel.axcodes), linewidths=1.0)
        for x, letter in zip((0.03, 0.97), sides(panel.axcodes[0]), strict=True):
            _write(ax, x, 0.5, letter, ha="left" if x < 0.5 else "right")
        _write(ax, 0.03, 0.97, panel.name, va="top", fontsize=7)
    return fig


def sides(axcode: str) -> tuple[str, str]:
    """The letters at the left and the right edge of the screen, for the direction to which X grows."""
    first = axcode if axcode in "RA" else _OPPOSITE[axcode]
    return first, _OPPOSITE[first]


def _slice_of(panel: Panel) -> int:
    if panel.labels_XYZ is None or not panel.labels_XYZ.any():
        return panel.image_XYZ.shape[2] // 2
    return int((panel.labels_XYZ != 0).sum(axis=(0, 1)).argmax())


def _write(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    written = ax.text(x, y, text, transform=ax.transAxes, **{"va": "center", "fontsize": 9, "color": "white", **style})
    written.set_path_effects([withStroke(linewidth=2, foreground="black")])
