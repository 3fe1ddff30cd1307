"""Draws the models of a run: the main metric against latency or bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from prunekit.delivery.formatting import clean, is_number, latency, shorten, size
from prunekit.delivery.plot_labels import PointLabel, box_around, place_labels
from prunekit.delivery.plots import COLOURS, new_figure, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 11.0
# Ratio of the largest to the smallest figure above which the axis is logarithmic.
_FAR = 8.0
_NARROW = 500
_AROUND = (45, 135, 90, -45, -135, -90, 0, 180)
# Points that are nearer to one another than this, in CSS pixels, have one label.
_NEAR = 9.0
# Kind of a model -> colour, marker and name; the marker differs, so that no reader needs the colour.
_KINDS = {
    "before": ("muted", "s", "before"),
    "step": ("after", "o", "after a step"),
    "file": ("zero", "^", "exported file"),
}
_AXES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "latency": ("latency of one call, one thread", latency),
    "bytes": ("size of the LiteRT file", size),
}


def stages_figure(
    points: Sequence[Mapping[str, Any]], figure: str, *, metric: str, better: str = "", width: int = 560
) -> Figure:
    """Returns a chart of a metric against latency or bytes, one numbered point for each model of a run.

    Args:
        points: `number`, `kind` ("before", "step" or "file"), `value` of the metric, `figure` (seconds or bytes) and
            `second` (bytes after gzip, or None) of each model.
        figure: "latency" or "bytes".
        metric: Name of the metric.
        better: Whether higher or lower values are better, in words; "" if not known.
        width: Width of the figure in CSS pixels.
    """
    drawn = new_figure(width, 330 if width >= _NARROW else 310)
    axes = drawn.add_subplot()
    title, text = _AXES[figure]
    _scale(axes, points, text, narrow=width < _NARROW)
    axes.set_xlabel(title, color=COLOURS["muted"], fontsize=_TEXT)
    metric = shorten(clean(metric), 30)
    axes.set_ylabel(
        f"{metric} ({better})" if better == "lower is better" else metric,
        color=COLOURS["muted"], fontsize=_TEXT, parse_math=False,
    )  # fmt: skip
    _mark(axes, points)
    handles, _ = axes.get_legend_handles_labels()
    drawn.legend(
        handles=handles, loc="outside upper left", ncols=len(handles), frameon=False, fontsize=_TEXT,
        labelcolor=COLOURS["ink"], handletextpad=0.2, columnspacing=1.0,
    )  # fmt: skip
    _label(drawn, axes, points)
    return drawn


def _scale(axes: Axes, points: Sequence[Mapping[str, Any]], text: Callable[[Any], str], *, narrow: bool) -> None:
    plain_axes(axes)
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    figures = [point[key] for point in points for key in ("figure", "second") if is_number(point[key])]
    low, high = min(figures), max(figures)
    if low > 0 and high / low > _FAR:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 3.0) if narrow else (1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        margin = (high / low) ** 0.12
        axes.set_xlim(low / margin, high * margin)
    else:
        # From zero, so that the distance from the left edge shows the ratio.
        axes.set_xlim(0, high * 1.12 or 1.0)
        axes.xaxis.set_major_locator(MaxNLocator(4 if narrow else 6))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value) if value else "0"))
    values = [point["value"] for point in points]
    low, high = min(values), max(values)
    # The axis spans at least 5 % of the largest value, so that a change of 0.1 % does not look like a large drop.
    margin = max((high - low) * 0.16, (0.05 * max(abs(low), abs(high)) - (high - low)) / 2) or 0.5
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5))


def _mark(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    steps = [point for point in points if point["kind"] != "file"]
    path = [point["figure"] for point in steps], [point["value"] for point in steps]
    axes.plot(*path, color=COLOURS["before"], linewidth=1.2, linestyle=(0, (4, 3)), zorder=2)
    for kind, (colour, marker, name) in _KINDS.items():
        found = [point for point in points if point["kind"] == kind]
        if not found:
            continue
        style: dict[str, Any] = {"linestyle": "", "marker": marker, "color": COLOURS[colour], "zorder": 4}
        values = [point["value"] for point in found]
        axes.plot([point["figure"] for point in found], values, markersize=8, markeredgewidth=0, label=name, **style)
        for point in found:
            if is_number(point["second"]):
                ring = {**style, "markersize": 7, "markerfacecolor": "none", "markeredgewidth": 1.3}
                axes.plot([point["second"]], [point["value"]], **ring)
                ends = [point["second"], point["figure"]], [point["value"]] * 2
                axes.plot(*ends, color=COLOURS[colour], linewidth=0.8, alpha=0.55, zorder=3)


def _label(drawn: Figure, axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    # The position of the axes is known only after the layout.
    FigureCanvasAgg(drawn)
    drawn.draw_without_rendering()
    marks = [(point[key], point["value"]) for point in points for key in ("figure", "second") if is_number(point[key])]
    taken = [box_around(axes, *mark, 4) for mark in marks]
    labels = [
        PointLabel(x, y, ", ".join(map(str, numbers)), COLOURS[colour], _AROUND)
        for key, colour in (("figure", "ink"), ("second", "muted"))
        for numbers, (x, y) in _together(axes, points, key)
    ]
    place_labels(drawn, axes, labels, taken, fontsize=_TEXT, distances=(6.0, 12.0, 20.0, 30.0))


def _together(axes: Axes, points: Sequence[Mapping[str, Any]], key: str) -> list[tuple[list[int], tuple[float, float]]]:
    """Returns the numbers of the points that lie at one place, with the place; `key` is their horizontal figure."""
    found: list[tuple[list[int], tuple[float, float]]] = []
    for point in points:
        if not is_number(point[key]):
            continue
        place = (point[key], point["value"])
        x, y = axes.transData.transform(place)
        for numbers, other in found:
            if max(abs(one - two) for one, two in zip(axes.transData.transform(other), (x, y), strict=True)) < _NEAR:
                numbers.append(point["number"])
                break
        else:
            found.append(([point["number"]], place))
    return found
