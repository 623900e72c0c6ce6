"""Figures by their pixels and their data: what is drawn, where, and in which orientation."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import matplotlib.image
import nibabel as nib
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from rdvit.analysis.charts import expert_usage_figure, intervals_figure, loops_curve, training_curves
from rdvit.analysis.figures import (
    entropy_figure,
    halting_figure,
    label_color,
    map_figure,
    overlay_montage,
    save_figure,
)
from rdvit.errors import DataError

ROOT = Path(__file__).resolve().parents[2]
SHARED = Path(os.environ.get("RDVIT_SHARED", ROOT.parent / "shared" / "data"))
NAMES = {1: "RV", 2: "MYO", 3: "LV"}


@pytest.fixture(autouse=True)
def _warnings_are_errors() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def pixels(fig: Figure) -> np.ndarray:
    """The rendered figure, (rows, columns, 3), row 0 at the top."""
    assert isinstance(fig.canvas, FigureCanvasAgg)
    fig.canvas.draw()
    return np.asarray(fig.canvas.buffer_rgba())[..., :3].astype(int)


def panel(fig: Figure, index: int = 0) -> np.ndarray:
    """The rendered pixels of one panel."""
    rgb = pixels(fig)
    box = fig.axes[index].get_window_extent()
    return rgb[max(0, round(len(rgb) - box.y1)) : round(len(rgb) - box.y0), round(box.x0) : round(box.x1)]


def where(rgb: np.ndarray, color: str) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the pixels in a colour."""
    rows, columns = np.nonzero((np.abs(rgb - 255 * np.array(to_rgb(color))) < 6).all(axis=-1))
    return rows, columns


def image(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(100, 20, shape).astype(np.float32)


def points(line: Line2D) -> np.ndarray:
    return np.asarray(line.get_xydata(), dtype=float)


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


@pytest.mark.parametrize("present", [(), (1, 3), (2,), (9, 3)])
def test_a_colour_occurs_if_and_only_if_its_label_does(present: tuple[int, ...]) -> None:
    labels = np.zeros((30, 30, 1), dtype=np.uint8)
    for i, value in enumerate(present):
        labels[4 + 8 * i : 10 + 8 * i, 10:18] = value
    rgb = pixels(overlay_montage(image(30, 30, 1), labels, NAMES))
    colors = {label_color(value) for value in present}
    for value in (1, 2, 3, 4, 9):
        assert (len(where(rgb, label_color(value))[0]) > 20) == (label_color(value) in colors)


@pytest.mark.parametrize(("axcodes", "left", "top"), [("RAS", True, True), ("LPS", False, False), ("LAS", False, True)])
def test_short_axis_orientation(axcodes: str, left: bool, top: bool) -> None:
    """A label at high X and high Y: of a RAS array it is on the patient's right and in front, so left and up."""
    labels = np.zeros((40, 40, 1), dtype=np.uint8)
    labels[30:36, 30:36] = 1
    rgb = panel(overlay_montage(image(40, 40, 1), labels, NAMES, crop=False, axcodes=axcodes))
    rows, columns = where(rgb, label_color(1))
    assert (columns.max() < rgb.shape[1] / 2) == left
    assert (rows.max() < rgb.shape[0] / 2) == top


def test_acdc_shows_the_right_ventricle_on_the_left() -> None:
    folder = SHARED / "acdc" / "training" / "patient001"
    if not folder.is_dir():
        pytest.skip(f"needs {folder}")
    stored = nib.load(folder / "patient001_frame01_gt.nii.gz")
    for scan in (stored, nib.as_closest_canonical(stored)):
        labels = np.asarray(scan.dataobj).astype(np.uint8)[:, :, 4:5]
        axcodes = nib.aff2axcodes(scan.affine)
        rgb = panel(overlay_montage(image(*labels.shape), labels, NAMES, axcodes=axcodes))
        (rv_rows, rv_columns), (lv_rows, lv_columns) = (where(rgb, label_color(value)) for value in (1, 3))
        assert rv_columns.mean() < lv_columns.mean()
        assert rv_rows.mean() > lv_rows.mean()  # and towards the diaphragm, in this patient


def test_spacing_sets_the_proportions_and_outlines_lie_on_their_voxels() -> None:
    labels = np.zeros((20, 20, 1), dtype=np.uint8)
    labels[5:15, 5:15] = 3  # with a margin of 4 on either side: voxels 4 to 14 of 18
    for spacing in ((1.0, 2.0), (2.0, 1.0)):
        rgb = panel(overlay_montage(image(20, 20, 1), labels, NAMES, spacing=spacing))
        assert rgb.shape[0] / rgb.shape[1] == pytest.approx(spacing[1] / spacing[0], rel=0.02)
        for indices, size in zip(where(rgb, label_color(3)), rgb.shape, strict=False):
            np.testing.assert_allclose((indices.min() / size, indices.max() / size), (4 / 18, 14 / 18), atol=0.015)


def test_crop_enlarges_the_heart() -> None:
    labels = np.zeros((100, 100, 1), dtype=np.uint8)
    labels[40:60, 40:60] = 2
    heights = [
        np.ptp(where(panel(overlay_montage(image(100, 100, 1), labels, NAMES, crop=crop)), label_color(2))[0])
        for crop in (True, False)
    ]
    assert heights[0] == pytest.approx(heights[1] * 100 / 28, rel=0.05)  # 20 voxels and a margin of 4 on either side


def test_reference_is_drawn_dashed_where_it_differs() -> None:
    labels = np.zeros((60, 60, 1), dtype=np.uint8)
    labels[10:20, 20:40] = 1
    reference = np.zeros_like(labels)
    reference[40:50, 20:40] = 1
    dark = np.zeros((60, 60, 1))
    fig = overlay_montage(dark, labels, NAMES, reference, crop=False)
    rgb = panel(fig)
    below_the_number = rgb.shape[0] // 5
    rows, columns = np.nonzero(rgb[below_the_number:].min(axis=-1) > 100)
    assert columns.max() < rgb.shape[1] / 2  # X of 40 to 50 lies on the left
    left_edge_rows = np.unique(rows[columns < columns.min() + 3])
    assert 0.4 < len(left_edge_rows) / np.ptp(left_edge_rows) < 0.9  # dashes and gaps
    without = panel(overlay_montage(dark, labels, NAMES, crop=False))
    assert without[below_the_number:].min(axis=-1).max() < 100
    assert [text.get_text() for text in fig.legends[0].get_texts()] == ["RV", "reference"]


def test_slices_are_taken_from_the_labelled_ones_and_numbered_from_one() -> None:
    labels = np.zeros((12, 12, 30), dtype=np.uint8)
    labels[4:8, 4:8, 10:20] = 1
    fig = overlay_montage(image(12, 12, 30), labels, NAMES, max_slices=4)
    assert [texts(ax)[0] for ax in fig.axes] == ["11/30", "14/30", "17/30", "20/30"]
    few = overlay_montage(image(12, 12, 3), labels[:, :, 9:12], NAMES)
    assert [texts(ax)[0] for ax in few.axes] == ["1/3", "2/3", "3/3"]


def test_labels_that_fill_the_slice_or_a_line_of_voxels_are_outlined_too() -> None:
    for shape in ((8, 8, 1), (1, 9, 1)):
        fig = overlay_montage(image(*shape), np.ones(shape, dtype=np.uint8), NAMES)
        assert len(where(panel(fig), label_color(1))[0]) > 20


def test_shapes_must_agree() -> None:
    with pytest.raises(DataError, match=r"\(4, 4, 2\), \(4, 4, 1\)"):
        overlay_montage(image(4, 4, 2), np.zeros((4, 4, 1)), NAMES)
    with pytest.raises(DataError, match="one shape"):
        map_figure(image(4, 4), np.zeros((4, 4)), "loops", 8)


def test_a_map_changes_the_image_only_where_it_is_above_its_minimum() -> None:
    steps = np.ones((20, 20, 1))
    plain = panel(halting_figure(image(20, 20, 1), steps, 8))
    gray = plain[plain.shape[0] // 5 :]  # below the slice number
    assert (np.ptp(gray, axis=-1) == 0).all()
    steps[2:6, 2:6] = 8
    steps[10:14, 2:6] = np.nan
    rgb = panel(halting_figure(image(20, 20, 1), steps, 8))
    rows, columns = np.nonzero((rgb != plain).any(axis=-1))
    height, width = plain.shape[:2]
    # RAS: X from 2 to 6 of 20 runs leftwards from 0.9 to 0.7 of the width, Y upwards.
    expected = (0.7 * height, 0.9 * height, 0.7 * width, 0.9 * width)
    np.testing.assert_allclose((rows.min(), rows.max() + 1, columns.min(), columns.max() + 1), expected, atol=2)


def test_the_bar_of_a_halting_map_runs_from_one_to_the_cap() -> None:
    fig = halting_figure(image(10, 10, 3), np.full((10, 10, 3), 2.5), 6, title="patient001")
    bar = fig.axes[-1]
    assert bar.get_ylim() == (1, 6)
    fig.canvas.draw()
    assert [label.get_text() for label in bar.get_yticklabels()] == list("123456")
    assert bar.get_ylabel() == "loops until halt"
    assert halting_figure(image(10, 10, 1), np.ones((10, 10, 1)), 1).axes[-1].get_ylim() == (1, 2)


def test_labels_crop_and_outline_a_map() -> None:
    labels = np.zeros((40, 40, 20), dtype=np.uint8)
    labels[10:20, 10:20, 5:8] = 1
    fig = entropy_figure(np.zeros((40, 40, 20)), np.zeros((40, 40, 20)), labels_XYZ=labels)
    panels, bar = fig.axes[:-1], fig.axes[-1]
    assert [texts(ax)[0] for ax in panels if ax.texts] == ["6/20", "7/20", "8/20"]
    assert np.ptp(panels[0].get_xlim()) == 18
    rgb = panel(fig)
    assert rgb[rgb.shape[0] // 5 :].max() > 150
    assert bar.get_ylim() == pytest.approx((0, np.log(2)))


def test_images_and_maps_of_nan_or_a_constant_are_drawn() -> None:
    nan = np.full((6, 6, 2), np.nan)
    some_nan = image(6, 6, 2)
    some_nan[0] = np.nan
    pixels(map_figure(np.ones((6, 6, 2)), nan, "entropy", 1.0))
    pixels(overlay_montage(some_nan, np.zeros((6, 6, 2), dtype=np.uint8), NAMES))


def test_usage_figure_prints_every_share() -> None:
    usage = np.array([[0.9, 0.1], [0.25, 0.75], [np.nan, np.nan]])
    fig = expert_usage_figure(usage, ["background", "RV", "LV"])
    ax = fig.axes[0]
    assert texts(ax) == ["0.90", "0.10", "0.25", "0.75", "–", "–"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["background", "RV", "LV"]
    rgb = panel(fig)
    third, half = rgb.shape[0] // 3, rgb.shape[1] // 2
    corner = (slice(10, third // 4), slice(10, half // 4))
    assert rgb[:third, :half][corner].mean() < rgb[third : 2 * third, :half][corner].mean()  # 0.90 is darker than 0.25
    with pytest.raises(DataError, match="3 rows"):
        expert_usage_figure(usage, ["background", "RV"])
    pixels(expert_usage_figure(usage[2:], ["LV"]))


def test_loops_curve_draws_the_rows_in_order_of_loops() -> None:
    rows = [{"loops": n, "dice": 0.8 + n / 100, "dice_RV": 0.7 + n / 100 if n != 4 else None} for n in (8, 1, 4)]
    lines = {line.get_label(): line for line in loops_curve(rows).axes[0].lines}
    np.testing.assert_allclose(points(lines["mean"]), [[1, 0.81], [4, 0.84], [8, 0.88]])
    np.testing.assert_allclose(points(lines["RV"]), [[1, 0.71], [8, 0.78]])
    assert lines["mean"].get_color() == "black"
    assert lines["RV"].get_color() == "#0072B2"


def test_loops_curve_marks_loops_that_ended_by_themselves_off_the_lines() -> None:
    fixed = [{"loops": n, "loops_taken": float(n), "dice": 0.8 + n / 100, "halting": "none"} for n in (4, 12)]
    rows = [fixed[0], {"loops": "auto", "loops_taken": 5.25, "dice": 0.86, "halting": "none"}, fixed[1]]
    ax = loops_curve(rows).axes[0]
    lines = {line.get_label(): line for line in ax.lines}
    assert list(lines["mean, no halting"].get_xdata()) == [4, 12]
    star = lines["mean, auto, no halting"]
    assert (list(star.get_xdata()), list(star.get_ydata()), star.get_marker()) == ([5.25], [0.86], "*")
    assert list(ax.get_xticks()) == [4, 12]


def test_loops_curve_tells_halting_modes_apart() -> None:
    rows = [{"loops": n, "dice": 0.8, "halting": mode} for mode in ("act", "none") for n in (1, 2)]
    fig = loops_curve(rows, trained_loops=2)
    styles = {line.get_label(): line.get_linestyle() for line in fig.axes[0].lines}
    assert styles["mean, ACT"] == "--"
    assert styles["mean, no halting"] == "-"
    assert texts(fig.axes[0]) == [" trained"]
    pixels(fig)


def test_training_curves_draw_what_is_there() -> None:
    history: list[dict[str, float | None]] = [
        {"epoch": 1, "train/loss": 1.5, "lr": 1e-3},
        {"epoch": 2, "train/loss": float("nan"), "lr": 1e-3, "val/dice": 0.5, "val/dice_RV": 0.4, "seconds": 9},
        {"epoch": 3, "train/loss": 1.1, "val/loss_ce": 0.3, "val/dice": None, "val/dice_RV": 0.6},
    ]
    fig = training_curves(history, "a run")
    panels = {ax.get_ylabel(): {line.get_label(): points(line) for line in ax.lines} for ax in fig.axes if ax.lines}
    assert {name: set(lines) for name, lines in panels.items()} == {
        "loss": {"train loss", "val loss_ce"},
        "Dice": {"mean", "RV"},
        "learning rate": {"lr"},
    }
    np.testing.assert_allclose(panels["loss"]["train loss"], [[1, 1.5], [3, 1.1]])
    np.testing.assert_allclose(panels["Dice"]["mean"], [[2, 0.5]])
    np.testing.assert_allclose(panels["Dice"]["RV"], [[2, 0.4], [3, 0.6]])
    pixels(fig)


def test_training_curves_of_nothing() -> None:
    for n_epochs in (0, 1):
        fig = training_curves([{"epoch": 1}] * n_epochs)
        assert [text.get_text() for text in fig.texts] == ["nothing recorded yet"]
        pixels(fig)


def test_saved_png_opens_and_leaves_nothing_beside(tmp_path: Path) -> None:
    fig = overlay_montage(image(10, 10, 2), np.ones((10, 10, 2), dtype=np.uint8), NAMES)
    path = save_figure(fig, tmp_path / "figures" / "montage.png")
    np.testing.assert_allclose(matplotlib.image.imread(path)[..., :3] * 255, pixels(fig), atol=0.6)
    assert [entry.name for entry in path.parent.iterdir()] == ["montage.png"]

    still_open = path.open("rb")
    save_figure(loops_curve([{"loops": 1, "dice": 0.5}]), path)
    with still_open:  # a reader of the old file keeps it whole
        assert len(still_open.read()) != path.stat().st_size
        assert os.fstat(still_open.fileno()).st_ino != path.stat().st_ino


def test_a_failed_save_keeps_the_old_file_and_no_partial_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "curve.png"
    path.write_bytes(b"old")
    fig = training_curves([])

    def fail(partial: Path, **_: object) -> None:
        partial.write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr(fig, "savefig", fail)
    with pytest.raises(OSError, match="disk full"):
        save_figure(fig, path)
    assert [(entry.name, entry.read_bytes()) for entry in tmp_path.iterdir()] == [("curve.png", b"old")]


def test_drawing_needs_neither_pyplot_nor_torch() -> None:
    code = (
        "import sys, numpy as np; from rdvit.analysis.figures import halting_figure;"
        "halting_figure(np.ones((4, 4, 1)), np.ones((4, 4, 1)), 4).canvas.draw();"
        "sys.exit(', '.join({'matplotlib.pyplot', 'torch', 'nibabel'} & set(sys.modules)) or 0)"
    )
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr


def test_intervals_are_drawn_from_end_to_end() -> None:
    fig = intervals_figure({"a": (0.5, 0.4, 0.7), "b": (0.6, np.nan, np.nan)}, "Dice", wanted=0.55)
    ax = fig.axes[0]
    bars = [line.get_xdata() for line in ax.lines if len(line.get_xdata()) == 2]
    assert [list(bar) for bar in bars] == [[0.4, 0.7], [0.55, 0.55]]  # b has no ends
    assert [label.get_text() for label in ax.get_yticklabels()] == ["a", "b"]
    assert ax.yaxis_inverted()  # the first name on top


def test_a_long_legend_lies_beside_the_lines() -> None:
    rows = [
        {"loops": n, "halting": mode, "dice": 0.9} | {f"dice_{s}": 0.9 for s in "abc"}
        for n in (1, 2)
        for mode in ("act", "none")
    ]
    fig = loops_curve(rows)
    pixels(fig)
    legend = fig.axes[0].get_legend()
    assert legend is not None and len(legend.get_texts()) == 8
    assert legend.get_window_extent().x0 >= fig.axes[0].get_window_extent().x1
    assert legend.get_window_extent().x1 <= fig.bbox.x1
