"""Charts of what was measured: expert usage, Dice against loops, the course of a training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import MaxNLocator, StrMethodFormatter

from rdvit.analysis.figures import new_figure
from rdvit.errors import DataError

LINE_COLORS = ("#0072B2", "#009E73", "#D55E00", "#B59B00", "#B0568F", "#E69F00", "#56B4E9")  # dark, on white


def expert_usage_figure(usage_CE: np.ndarray, class_labels: Sequence[str], title: str | None = None) -> Figure:
    """Heat map of the share of every expert in the routing of every structure.

    Args:
        usage_CE: Shares, rows sum to 1; a row of NaN (a structure without tokens) is left gray.
        class_labels: Name of every row, background included.
        title: Printed above.

    Raises:
        DataError: If there is not one label per row.
    """
    n_classes, n_experts = usage_CE.shape
    if len(class_labels) != n_classes:
        raise DataError(f"expected one label for each of {n_classes} rows of usage, got {len(class_labels)}")
    fig, ax = _new_chart(2.8 + 0.62 * n_experts, 1.5 + 0.5 * n_classes)
    top = float(np.nanmax(usage_CE, initial=1 / n_experts))
    heat = ax.imshow(usage_CE, cmap="Blues", vmin=0, vmax=top, aspect="auto")
    ax.set_facecolor("0.9")
    for (row, column), share in np.ndenumerate(usage_CE):
        known = np.isfinite(share)
        color = "0.4" if not known else "white" if share > 0.6 * top else "black"
        ax.text(column, row, f"{share:.2f}" if known else "–", ha="center", va="center", color=color, fontsize=10)
    ax.set_xticks(range(n_experts), [str(expert + 1) for expert in range(n_experts)])
    ax.set_yticks(range(n_classes), class_labels)
    ax.tick_params(length=0, labelsize=10)
    ax.spines[:].set_visible(False)
    ax.set_xlabel(f"expert (uniform share {1 / n_experts:.3g})", fontsize=10)
    ax.set_title(title or "Expert usage by structure", fontsize=12, loc="left")
    fig.colorbar(heat, ax=ax, label="share of routing").outline.set_visible(False)
    return fig


def loops_curve(rows: Sequence[Mapping[str, Any]], *, trained_loops: int | None = None, title: str | None = None) -> Figure:
    """Dice against loops at inference, a line per structure and a thick black one for the mean.

    Args:
        rows: One per number of loops: "loops", "dice" (the mean) and "dice_NAME" for every structure. A row may
            name its "halting" ("act" or "none"). Curves with ACT are dashed: they are flat once all tokens have halted,
            so only those without halting show that depth is used. Where "loops" is "auto", the mean is a star at
            "loops_taken".
        trained_loops: Loops in training, marked by a vertical line.
        title: Printed above.
    """
    fig, ax = _new_chart(6.4, 4.2)
    for mode in dict.fromkeys(row.get("halting") for row in rows):
        of_mode = [row for row in rows if row.get("halting") == mode]
        group = sorted((row for row in of_mode if row["loops"] != "auto"), key=lambda row: row["loops"])
        suffix = {None: "", "none": ", no halting", "act": ", ACT"}.get(mode, f", {mode}")
        _dice_lines(ax, group, "loops", suffix=suffix, linestyle="--" if mode == "act" else "-")
        for row in of_mode:
            if row["loops"] == "auto":
                ax.plot(row["loops_taken"], row["dice"], "k*", markersize=14, label=f"mean, auto{suffix}")
    if trained_loops is not None:
        ax.axvline(trained_loops, color="0.5", linewidth=1, linestyle=":", zorder=0)
        ax.annotate(" trained", (trained_loops, 0.02), xycoords=("data", "axes fraction"), fontsize=9, color="0.4")
    _finish(ax, "Dice", "loops at inference")
    ax.set_xticks(sorted({row["loops"] for row in rows} - {"auto"}))
    ax.set_title(title or "Dice against loops", fontsize=12, loc="left")
    return fig


def training_curves(history: Sequence[Mapping[str, Any]], title: str | None = None) -> Figure:
    """Losses, Dice per structure, learning rate and mean ponder over the epochs: a panel for each that was recorded.

    Args:
        history: One row per epoch: "epoch", losses ("train/loss", "val/loss_ce"), "val/dice" (the mean) and
            "val/dice_NAME", "lr", "train/ponder". Any key may be missing in any row, any value None or NaN; other keys
            are not drawn.
        title: Printed above.
    """
    labels = {"loss": "loss", "dice": "Dice", "lr": "learning rate", "ponder": "mean ponder (loops)"}
    drawn = {kind: keys for kind in labels if (keys := _keys(history, kind))}
    n_columns = 1 if len(drawn) < 2 else 2
    n_rows = max(1, -(-len(drawn) // n_columns))
    fig = new_figure(5.2 * n_columns, 3.1 * n_rows + 0.3, layout=ConstrainedLayoutEngine(h_pad=0.1, w_pad=0.1))
    axes = fig.subplots(n_rows, n_columns, squeeze=False).ravel()
    for ax, (kind, keys) in zip(axes, drawn.items(), strict=False):
        if kind == "dice":
            _dice_lines(ax, history, "epoch")
        else:
            for i, key in enumerate(keys):
                _line(ax, history, "epoch", key, label=key.replace("/", " "), color=LINE_COLORS[i % len(LINE_COLORS)])
        _finish(ax, labels[kind], "epoch")
        ax.xaxis.set_major_locator(MaxNLocator(integer=True, steps=[1, 2, 5, 10]))
        ax.ticklabel_format(axis="y", scilimits=(-2, 3), useOffset=False)
    for ax in axes[len(drawn) :]:
        ax.set_axis_off()
    if not drawn:
        fig.text(0.5, 0.5, "nothing recorded yet", ha="center", fontsize=12, color="0.4")
    if title:
        fig.suptitle(title, fontsize=12)
    return fig


def seeds_curve(
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    by: str,
    labels: tuple[str, str],
    *,
    log: bool = False,
    mark: float | None = None,
    title: str | None = None,
) -> Figure:
    """A line for each value of ``by``: the mean of ``y`` over the rows at each ``x``, bars from least to largest.

    Args:
        rows: One per training and ``x``; rows that differ in nothing but the seed make a point.
        x: Column of the horizontal axis.
        y: Column of the vertical axis.
        by: Column that names the line.
        labels: Of the horizontal and the vertical axis.
        log: Logarithmic horizontal axis.
        mark: A vertical line here, e.g. the trained depth.
        title: Printed above.
    """
    fig, ax = _new_chart(6.4, 4.2)
    for i, name in enumerate(dict.fromkeys(row[by] for row in rows)):
        groups: dict[float, list[float]] = {}
        for row in rows:
            if row[by] == name and np.isfinite(row[y]):
                groups.setdefault(row[x], []).append(row[y])
        at, color = sorted(groups), LINE_COLORS[i % len(LINE_COLORS)]
        low, middle, high = (np.array([statistic(groups[place]) for place in at]) for statistic in (np.min, np.mean, np.max))
        ax.errorbar(at, middle, np.stack([middle - low, high - middle]), color=color, fmt="none", capsize=3)
        ax.plot(at, middle, marker="o", markersize=4, color=color, label=str(name))
    if log:
        ax.set_xscale("log", base=2 if x == "loops" else 10)
    if log and x == "loops":
        ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    if mark is not None:
        ax.axvline(mark, color="0.5", linewidth=1, linestyle=":", zorder=0)
    _finish(ax, labels[1], labels[0])
    ax.set_title(title or "", fontsize=12, loc="left")
    return fig


def intervals_figure(
    groups: Mapping[str, tuple[float, float, float]], label: str, *, wanted: float | None = None, title: str | None = None
) -> Figure:
    """A dot with a bar for each name, top to bottom: a value between the ends of its interval, or of its seeds.

    Args:
        groups: Name to (value, low, high); a bar without finite ends is left away.
        label: Of the horizontal axis.
        wanted: A vertical line here: the value to reach, or no difference.
        title: Printed above.
    """
    fig, ax = _new_chart(6.4, 1.3 + 0.36 * len(groups))
    for row, (value, low, high) in enumerate(groups.values()):
        color = LINE_COLORS[row % len(LINE_COLORS)]
        if np.isfinite([low, high]).all():
            ax.plot([low, high], [row, row], color=color, linewidth=2)
        ax.plot([value], [row], marker="o", markersize=7, color=color)
        ax.annotate(f"{value:.3f}", (value, row), (0, 6), textcoords="offset points", ha="center", fontsize=9)
    if wanted is not None:
        ax.axvline(wanted, color="0.5", linewidth=1, linestyle=":", zorder=0)
    _finish(ax, "", label)
    ax.set_yticks(range(len(groups)), list(groups))
    ax.set_ylim(len(groups) - 0.5, -0.7)
    ax.set_title(title or "", fontsize=12, loc="left")
    return fig


def similarity_figure(matrices: Mapping[str, np.ndarray], labels: tuple[str, str] = ("step", "step or layer")) -> Figure:
    """Heat maps, side by side, of similarities from 0 to 1, as linear CKA between the steps of networks is.

    Args:
        matrices: Title to matrix (rows, columns).
        labels: Of rows and columns.
    """
    fig = new_figure(0.8 + 3.2 * len(matrices), 3.4, layout="constrained")
    axes = fig.subplots(1, len(matrices), squeeze=False)[0]
    for ax, (title, matrix) in zip(axes, matrices.items(), strict=True):
        heat = ax.imshow(matrix, vmin=0, vmax=1, cmap="viridis", origin="lower")
        ax.set_xticks(range(matrix.shape[1]), [str(i + 1) for i in range(matrix.shape[1])], fontsize=9)
        ax.set_yticks(range(matrix.shape[0]), [str(i + 1) for i in range(matrix.shape[0])], fontsize=9)
        ax.set_ylabel(labels[0], fontsize=10)
        ax.set_xlabel(labels[1], fontsize=10)
        ax.set_title(title, fontsize=11, loc="left")
    fig.colorbar(heat, ax=list(axes), shrink=0.85)
    return fig


def _new_chart(width: float, height: float) -> tuple[Figure, Axes]:
    fig = new_figure(width, height, layout="constrained")
    return fig, fig.subplots()


def _keys(rows: Sequence[Mapping[str, Any]], kind: str) -> list[str]:
    """Keys of one kind ("val/dice_RV" and "dice" are of the kind "dice"), in order of appearance, each once."""
    return [key for key in dict.fromkeys(key for row in rows for key in row) if _split_key(key)[1] == kind]


def _split_key(key: str) -> tuple[str, str, str]:
    """ "val/dice_RV" as ("val", "dice", "RV"), "lr" as ("", "lr", "")."""
    split, _, rest = key.rpartition("/")
    kind, _, name = rest.partition("_")
    return split, kind, name


def _dice_lines(ax: Axes, rows: Sequence[Mapping[str, Any]], x: str, suffix: str = "", linestyle: str = "-") -> None:
    """A thick black line for the mean ("dice") and a coloured one per structure; training dashed."""
    keys = _keys(rows, "dice")
    names = list(dict.fromkeys(_split_key(key)[2] for key in keys if _split_key(key)[2]))
    for key in keys:
        split, _, name = _split_key(key)
        color = LINE_COLORS[names.index(name) % len(LINE_COLORS)] if name else "black"
        label = (name or "mean") + (" (train)" if split == "train" else "") + suffix
        style = "--" if split == "train" else linestyle
        _line(ax, rows, x, key, label=label, color=color, linestyle=style, linewidth=1.6 if name else 2.6)


def _line(ax: Axes, rows: Sequence[Mapping[str, Any]], x: str, key: str, **style: Any) -> None:
    """One line through the rows that hold a finite number under `key`; rows without an `x` count from 1."""
    points = [(row.get(x, i), row[key]) for i, row in enumerate(rows, start=1) if row.get(key) is not None]
    points = [(at, value) for at, value in points if np.isfinite(value)]
    if points:
        ax.plot(*zip(*points, strict=True), marker="o" if len(points) <= 20 else None, markersize=4, **style)


def _finish(ax: Axes, ylabel: str, xlabel: str) -> None:
    ax.set_ylabel(ylabel, fontsize=11)
    ax.set_xlabel(xlabel, fontsize=11)
    ax.tick_params(labelsize=10)
    ax.grid(color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if ax.get_legend_handles_labels()[0]:
        many = len(ax.get_legend_handles_labels()[0]) > 5  # would lie on the lines
        beside: dict[str, Any] = {"loc": "upper left", "bbox_to_anchor": (1.01, 1)} if many else {}
        ax.legend(fontsize=9, frameon=False, handlelength=2.8, **beside)
