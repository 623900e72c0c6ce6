"""Figures of images, masks, halting and entropy maps: arrays in, matplotlib figures out (charts: charts.py).

Figures are built on `matplotlib.figure.Figure` with the Agg canvas, never on pyplot: no window, no global state, safe
in threads and on machines without a display.

Orientation. Arrays are (X, Y, Z). Every image figure shows slices of the last axis as a radiologist sees a short axis:
the patient's left on the right, anterior (or superior) up, so that the RV lies left of the LV and the diaphragm below.
In canonical RAS order, the default, X grows to the patient's right: on screen X runs to the LEFT and Y up. Arrays in
another order say so by `axcodes=nibabel.aff2axcodes(affine)`: ACDC's files as stored are "LPS", X right and Y down.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from rdvit.atomic import atomic
from rdvit.errors import DataError

# After Okabe and Ito, for colour-blind readers too. One per label value: in ACDC RV blue, MYO green, LV red.
LABEL_COLORS = ("#3F9BFF", "#19C98D", "#F2602B", "#F0E442", "#D98AC0", "#E69F00", "#8CE0FF")  # bright, on black
DASHES = (0, (3, 2))
PANEL_INCHES = 2.2
MIN_INCHES = 4.4  # least width of an image figure: room for the legend and a short title
DPI = 150


def label_color(value: int) -> str:
    """Colour of a label value (1, 2, ...), the same in every image figure."""
    return LABEL_COLORS[(value - 1) % len(LABEL_COLORS)]


def save_figure(fig: Figure, path: str | Path) -> Path:
    """Write a figure as PNG, atomically: the file appears whole or not at all.

    Args:
        fig: The figure.
        path: Where to; folders are made, an existing file is replaced.

    Returns:
        The path written.
    """
    path = Path(path)
    with atomic(path) as temporary:
        fig.savefig(temporary, format="png", dpi=DPI)
    return path


def overlay_montage(
    image_XYZ: np.ndarray,
    labels_XYZ: np.ndarray,
    class_names: Mapping[int, str],
    reference_XYZ: np.ndarray | None = None,
    *,
    spacing: Sequence[float] = (1.0, 1.0),
    title: str | None = None,
    max_slices: int = 12,
    crop: bool = True,
    axcodes: Sequence[str] = "RAS",
) -> Figure:
    """Slices of an image with its structures as coloured contours, and a reference as thin white dashes.

    Args:
        image_XYZ: Image, shown in gray between its 1st and 99th percentile.
        labels_XYZ: Label map, 0 is background; may be empty.
        class_names: Label value to name, for the legend, which lists the structures present.
        reference_XYZ: Label map to compare with.
        spacing: Voxel size in mm along X and Y.
        title: Printed above.
        max_slices: If there are more slices, as many are taken evenly from those with labels.
        crop: Show only the region of the labels (and the reference) with a margin.
        axcodes: Directions to which X and Y grow; see the module's docstring.

    Raises:
        DataError: If the arrays differ in shape or are not 3D.
    """
    _check_same_shape(image_XYZ, labels_XYZ, reference_XYZ)
    marked_XYZ = labels_XYZ != 0 if reference_XYZ is None else (labels_XYZ != 0) | (reference_XYZ != 0)
    region = _region(marked_XYZ) if crop else (slice(None), slice(None))
    slices = _chosen_slices(marked_XYZ, max_slices)
    fig, panels = _slice_grid(image_XYZ[region], slices, spacing, axcodes=axcodes, title=title, bottom_inches=0.35)
    values = [int(value) for value in np.unique(labels_XYZ) if value != 0]
    for ax, z in zip(panels, slices, strict=True):
        labels_RC = to_screen(labels_XYZ[region][..., z], axcodes)
        fill_RC4 = np.zeros((*labels_RC.shape, 4))
        for value in values:
            fill_RC4[labels_RC == value] = to_rgba(label_color(value), alpha=0.22)
        ax.imshow(fill_RC4, interpolation="nearest", aspect=ax.get_aspect())
        outline(ax, labels_RC, linewidths=1.6)
        if reference_XYZ is not None:
            reference_RC = to_screen(reference_XYZ[region][..., z], axcodes)
            outline(ax, reference_RC, "white", linewidths=0.9, linestyles=[DASHES])

    legend: list[Any] = [Patch(facecolor=label_color(v), label=class_names.get(v, f"label {v}")) for v in values]
    if reference_XYZ is not None:
        legend.append(Line2D([], [], color="white", linewidth=1, linestyle=DASHES, label="reference"))
    if legend:
        fig.legend(handles=legend, loc="lower center", ncols=len(legend), frameon=False, labelcolor="white", fontsize=10)
    return fig


def map_figure(
    image_XYZ: np.ndarray,
    map_XYZ: np.ndarray,
    label: str,
    vmax: float,
    *,
    vmin: float = 0.0,
    labels_XYZ: np.ndarray | None = None,
    spacing: Sequence[float] = (1.0, 1.0),
    title: str | None = None,
    max_slices: int = 8,
    axcodes: Sequence[str] = "RAS",
) -> Figure:
    """Slices of an image under a map of values; low values are clear, high values glow.

    Args:
        image_XYZ: Image, in gray.
        map_XYZ: Values on the same grid; NaN is not drawn.
        label: Name of the values and their unit, beside the colour bar.
        vmax: Value of the brightest colour; fixed by the caller, so that figures compare.
        vmin: Value that leaves the image as it is.
        labels_XYZ: Structures to outline thinly; the figure is then cropped to them.
        spacing: Voxel size in mm along X and Y.
        title: Printed above.
        max_slices: If there are more slices, as many are taken evenly, from those with labels if labels are given.
        axcodes: Directions to which X and Y grow; see the module's docstring.

    Raises:
        DataError: If the arrays differ in shape or are not 3D.
    """
    _check_same_shape(image_XYZ, map_XYZ, labels_XYZ)
    outlined_XYZ = np.zeros(image_XYZ.shape, dtype=np.uint8) if labels_XYZ is None else labels_XYZ
    region = _region(outlined_XYZ != 0)
    slices = _chosen_slices(outlined_XYZ != 0, max_slices)
    fig, panels = _slice_grid(image_XYZ[region], slices, spacing, axcodes=axcodes, title=title, right_inches=0.95)
    # The colours of "inferno" with an opacity that rises with the value.
    colors_N4 = colormaps["inferno"](np.linspace(0.3, 1, 256))
    colors_N4[:, 3] = 0.9 * np.linspace(0, 1, 256) ** 0.6
    norm, glow = Normalize(vmin, vmax), ListedColormap(colors_N4)
    for ax, z in zip(panels, slices, strict=True):
        map_RC = to_screen(map_XYZ[region][..., z], axcodes)
        ax.imshow(map_RC, cmap=glow, norm=norm, interpolation="nearest", aspect=ax.get_aspect())
        outline(ax, to_screen(outlined_XYZ[region][..., z], axcodes), "white", linewidths=0.6)

    width = fig.get_figwidth()
    bar_ax = fig.add_axes((1 - 0.83 / width, 0.1, 0.16 / width, 0.75), facecolor="0.35")
    beyond = "max" if np.nanmax(map_XYZ, initial=vmin) > vmax else "neither"
    bar = fig.colorbar(ScalarMappable(norm, glow), cax=bar_ax, extend=beyond)
    bar.set_label(label, color="white", fontsize=10)
    bar.ax.tick_params(colors="white", labelsize=9)
    return fig


def halting_figure(
    image_XYZ: np.ndarray, steps_XYZ: np.ndarray, max_loops: int, title: str | None = None, **view: Any
) -> Figure:
    """Slices of an image under its loops until halt: clear where one loop was enough, bright at the cap.

    Args:
        image_XYZ: Image, in gray.
        steps_XYZ: Loops per voxel, 1 to `max_loops`; fractions where windows were averaged.
        max_loops: The cap, the end of the colour bar.
        title: Printed above.
        **view: `labels_XYZ`, `spacing`, `max_slices` and `axcodes` of `map_figure`.
    """
    # With a cap of 1 a scale from 1 to 1 would be empty.
    fig = map_figure(image_XYZ, steps_XYZ, "loops until halt", max(max_loops, 2), vmin=1, title=title, **view)
    fig.axes[-1].yaxis.set_major_locator(MaxNLocator(integer=True))
    return fig


def entropy_figure(image_XYZ: np.ndarray, entropy_XYZ: np.ndarray, title: str | None = None, **view: Any) -> Figure:
    """Slices of an image under the entropy of its class probabilities: clear where the model is sure.

    The scale ends at log 2, two classes equally likely: doubt is nearly always between two neighbours, so that the
    maximum of log(classes) would leave the figure dark.

    Args:
        image_XYZ: Image, in gray.
        entropy_XYZ: Entropy per voxel in nats.
        title: Printed above.
        **view: `labels_XYZ`, `spacing`, `max_slices` and `axcodes` of `map_figure`.
    """
    return map_figure(image_XYZ, entropy_XYZ, "entropy (nats)", float(np.log(2)), title=title, **view)


def new_figure(width: float, height: float, **options: Any) -> Figure:
    fig = Figure(figsize=(width, height), dpi=DPI, **options)
    FigureCanvasAgg(fig)
    return fig


def _check_same_shape(image_XYZ: np.ndarray, *others: np.ndarray | None) -> None:
    shapes = [image_XYZ.shape, *(other.shape for other in others if other is not None)]
    if len(set(shapes)) > 1 or image_XYZ.ndim != 3:
        raise DataError(f"expected arrays of one shape (X, Y, Z), got {', '.join(map(str, shapes))}")


def to_screen(slice_XY: np.ndarray, axcodes: Sequence[str]) -> np.ndarray:
    """A slice as rows and columns, row 0 at the top: left and posterior to the right, anterior and superior up."""
    slice_RC = slice_XY.T
    if axcodes[1] in "AS":
        slice_RC = slice_RC[::-1]
    return slice_RC[:, ::-1] if axcodes[0] in "RA" else slice_RC


def _region(marked_XYZ: np.ndarray) -> tuple[slice, slice]:
    """In-plane bounding box of the marked voxels with a fifth of its size around it; everything if none is marked."""
    region = []
    for other_axes in ((1, 2), (0, 2)):
        indices = np.flatnonzero(marked_XYZ.any(axis=other_axes))
        if not len(indices):
            return slice(None), slice(None)
        margin = max(4, (indices[-1] - indices[0]) // 5)
        region.append(slice(max(0, indices[0] - margin), indices[-1] + margin + 1))
    return region[0], region[1]


def _chosen_slices(marked_XYZ: np.ndarray, max_slices: int) -> list[int]:
    """All slices if they are few, otherwise evenly from those with marks (or from all if there is none)."""
    candidates = np.arange(marked_XYZ.shape[2])
    if len(candidates) > max_slices and marked_XYZ.any():
        candidates = np.flatnonzero(marked_XYZ.any(axis=(0, 1)))
    picks = np.linspace(0, len(candidates) - 1, min(max_slices, len(candidates)))
    return [int(z) for z in candidates[picks.round().astype(int)]]


def _slice_grid(
    image_XYZ: np.ndarray,
    slices: Sequence[int],
    spacing: Sequence[float],
    *,
    axcodes: Sequence[str],
    title: str | None,
    bottom_inches: float = 0.0,
    right_inches: float = 0.0,
) -> tuple[Figure, list[Axes]]:
    """A black figure with the slices in gray, edge to edge, numbered from 1, in their true proportions."""
    n_rows, n_columns = grid_shape(len(slices))
    size_mm = np.array(image_XYZ.shape[:2]) * spacing[:2]
    # A single row of few panels is drawn larger, and never narrower than its legend.
    panel_width, panel_height = max(PANEL_INCHES, MIN_INCHES / n_columns) * size_mm / size_mm.max()
    width = max(MIN_INCHES, n_columns * panel_width + right_inches)
    height = n_rows * panel_height + bottom_inches + (top_inches := 0.4 if title else 0.0)
    fig = new_figure(width, height, facecolor="black")
    axes = fig.subplots(n_rows, n_columns, squeeze=False).ravel()
    fig.subplots_adjust(0, bottom_inches / height, 1 - right_inches / width, 1 - top_inches / height, 0.02, 0.02)
    window = dict(zip(("vmin", "vmax"), np.nanpercentile(image_XYZ[..., slices], (1, 99)), strict=True))
    for ax in axes:
        ax.set_axis_off()
    for ax, z in zip(axes, slices, strict=False):
        image_RC = to_screen(image_XYZ[..., z], axcodes)
        ax.imshow(image_RC, cmap="gray", interpolation="bilinear", aspect=float(spacing[1] / spacing[0]), **window)
        ax.set_autoscale_on(False)  # outlines must not widen the view
        number = ax.text(0.03, 0.97, f"{z + 1}/{image_XYZ.shape[2]}", transform=ax.transAxes, va="top", fontsize=9)
        number.set(color="white", path_effects=[withStroke(linewidth=2, foreground="black")])
    if title:
        fig.text(0.1 / width, 1 - 0.2 / height, title, color="white", fontsize=12, va="center")
    return fig, list(axes[: len(slices)])


def grid_shape(n_panels: int) -> tuple[int, int]:
    """Rows and columns with the fewest gaps, at least square and at most about twice as wide as high."""
    columns = range(int(np.ceil(np.sqrt(n_panels))), int(np.ceil(np.sqrt(2 * n_panels))) + 1)
    best = min(columns, key=lambda n: -n_panels % n)
    return -(-n_panels // best), best


def outline(ax: Axes, labels_RC: np.ndarray, color: str | None = None, **style: Any) -> None:
    """Contours of all labels of a slice, in one colour or each in its own, closed also where they touch the edge."""
    columns, rows = (np.arange(-1, size + 1) for size in labels_RC.shape[::-1])
    for value in np.unique(labels_RC[labels_RC != 0]):
        mask_RC = np.pad((labels_RC == value).astype(float), 1)
        ax.contour(columns, rows, mask_RC, levels=[0.5], colors=[color or label_color(int(value))], **style)
