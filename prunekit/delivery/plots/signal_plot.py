"""Draws a signal report: output standard deviation and gradient norm per layer, on logarithmic axes."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from prunekit.core.runtime.arguments import writable_file
from prunekit.core.runtime.partial_files import replace_file
from prunekit.delivery.plots.plots import COLOURS
from prunekit.delivery.reports.formatting import clean, shorten
from prunekit.initialization.signal_report import FAR, LayerSignal, SignalReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Status -> colour and marker shape; shapes differ for readers who cannot tell the colours apart.
_MARKS = {
    "healthy": (COLOURS["after"], "o"),
    "vanishing": (COLOURS["metric"], "v"),
    "exploding": (COLOURS["zero"], "^"),
    "saturated": (COLOURS["ink"], "s"),
    "dead": (COLOURS["ink"], "X"),
}
_TEXT = 10.0
_FORMATS = (".png", ".svg")


def signal_picture(report: SignalReport, path: str | Path) -> Path:
    """Writes the report as a PNG or SVG picture, chosen by the path's suffix; returns the path.

    Layers run from top to bottom in call order. The left panel shows the standard deviation of the outputs, the right
    panel the norm of the gradients. Shaded bands mark exploding and vanishing signals.

    Args:
        report: Result of `pk.initializers.signal_report`.
        path: Path of the picture. Missing folders are made.

    Raises:
        ValueError: The suffix is neither .png nor .svg; the file cannot be written.
    """
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise ValueError(f"A picture is written as .png or .svg. Received: {str(path)!r}.")
    writable_file(path)
    figure, picture = _figure(report), io.BytesIO()
    kind = target.suffix.lower()[1:]
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "prunekit"}):
        # Omit the date and the version, so that equal reports give equal bytes.
        metadata: dict[str, Any] = {"Date": None} if kind == "svg" else {"Software": None}
        figure.savefig(picture, format=kind, dpi=144, metadata=metadata)
    target.parent.mkdir(parents=True, exist_ok=True)
    replace_file(target, picture.getvalue())
    return target


def _figure(report: SignalReport) -> Figure:
    rows = report.layers
    figure = Figure(figsize=(11, 1.6 + 0.27 * max(len(rows), 3)), layout="constrained", facecolor="white")
    left, right = figure.subplots(1, 2, sharey=True)
    first = next((row.std for row in rows if row.ratio == 1), None)
    last = next((row.gradient_norm for row in reversed(rows) if row.gradient_ratio == 1), None)
    _panel(left, rows, [row.std for row in rows], first)
    _panel(right, rows, [row.gradient_norm for row in rows], last)
    left.set_xlabel("standard deviation of the outputs", color=COLOURS["muted"], fontsize=_TEXT)
    right.set_xlabel("norm of the gradient per example", color=COLOURS["muted"], fontsize=_TEXT)
    # Names are user input: matplotlib would read a `$` as the start of a formula.
    names = [shorten(clean(row.layer), 34) for row in rows]
    left.set_yticks(range(len(rows)), names, parse_math=False, color=COLOURS["ink"], fontsize=_TEXT)
    left.set_ylim(len(rows) - 0.4, -0.6)
    worst = report.first_trouble
    title = f"{shorten(clean(report.model_name), 40)}: {report.status}"
    title += f", first at {shorten(clean(worst.layer), 40)}" if worst else ""
    figure.suptitle(title, fontsize=_TEXT + 3, fontweight="bold", color=COLOURS["ink"], parse_math=False)
    _legend(figure, rows)
    return figure


def _drawable(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and value > 0


def _panel(axes: Axes, rows: Sequence[LayerSignal], values: Sequence[float | None], reference: float | None) -> None:
    axes.set_xscale("log")
    axes.grid(axis="x", color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.minorticks_off()
    axes.tick_params(axis="y", length=0)
    axes.tick_params(axis="x", labelsize=_TEXT, labelcolor=COLOURS["muted"], color=COLOURS["grid"])
    for spine in axes.spines.values():
        spine.set_visible(False)
    points = [(value, index) for index, value in enumerate(values) if _drawable(value)]
    low, high = _limits([value for value, _ in points], reference)
    axes.set_xlim(low, high)
    if reference is not None and _drawable(reference):
        axes.axvline(reference, color=COLOURS["before"], linewidth=1.2, linestyle=(0, (4, 3)))
        for start, end in ((low, reference / FAR), (reference * FAR, high)):
            if start < end:
                axes.axvspan(start, end, color=COLOURS["grid"], alpha=0.55, linewidth=0)
    if points:
        axes.plot(*zip(*points, strict=True), color=COLOURS["before"], linewidth=1.2, zorder=2)
    for index, value in enumerate(values):
        colour, marker = _MARKS[rows[index].status]
        if value is not None and _drawable(value):
            axes.plot([value], [index], marker=marker, markersize=8, color=colour, markeredgecolor="white", zorder=3)
        else:
            # Logarithmic axes cannot show zero and infinity: write these values as text at the edge.
            text = "no gradient" if value is None else ("0" if value == 0 else str(value))
            right = value is not None and value > 0
            axes.annotate(
                text,
                (high if right else low, index),
                (-4 if right else 4, 0),
                textcoords="offset points",
                va="center",
                ha="right" if right else "left",
                fontsize=_TEXT,
                color=colour,
            )


def _limits(values: Sequence[float | None], reference: float | None) -> tuple[float, float]:
    """Returns axis limits that span at least three powers of ten, include the reference, and leave a margin."""
    known = [value for value in (*values, reference) if value is not None and _drawable(value)] or [1.0]
    low, high = min(known) / 4, max(known) * 4
    middle = math.sqrt(low) * math.sqrt(high)
    return min(low, middle / 40), max(high, middle * 40)


def _legend(figure: Figure, rows: Sequence[LayerSignal]) -> None:
    seen = [status for status in _MARKS if any(row.status == status for row in rows)]
    handles: list[Any] = [
        Line2D([], [], linestyle="", marker=_MARKS[status][1], color=_MARKS[status][0], markersize=7, label=status)
        for status in seen
    ]
    reference: dict[str, Any] = {"color": COLOURS["before"], "linewidth": 1.2, "linestyle": (0, (4, 3))}
    handles.append(Line2D([], [], label="reference for ratios: first and last layer", **reference))
    handles.append(Patch(color=COLOURS["grid"], alpha=0.55, linewidth=0, label=f"more than {FAR:g} times away"))
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles),
        frameon=False,
        fontsize=_TEXT,
        labelcolor=COLOURS["ink"],
    )
