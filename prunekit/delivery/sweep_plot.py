"""The picture of a sweep: accuracy against size, with the line of the points that no other beats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from prunekit.delivery.formatting import clean, literal, shorten, size
from prunekit.delivery.plots import COLOURS, new_figure, plain_axes
from prunekit.delivery.sweeps import SMALLEST, WEIGHTS, SweepReport, SweptPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 11.0
_LONGEST_LABEL = 34
# Sizes further apart than this are drawn on a logarithmic axis.
_FAR = 12.0
_ABOVE_THE_STAIRS = (135, 180, 90, -45, 45, 0, -90, -135)
_BELOW_THE_STAIRS = (-45, 0, 45, -90, -135)


def sweep_figure(report: SweepReport, *, width: int = 760, height: int = 460) -> Figure:
    """Accuracy against size: the front as a line of filled dots, the other points as rings, labelled with their values.

    Points of the front get their label first; a label that would cover another, or a point, is left out.

    Args:
        report: With at least one point that has an accuracy and a size.
        width: In CSS pixels.
        height: In CSS pixels.

    Raises:
        ValueError: No point has both.
    """
    front = report.pareto
    if not front:
        raise ValueError("A picture of a sweep needs a point with an accuracy and a size. Received: none.")
    names = {point.name for point in front}
    others = [p for p in report.points if p.accuracy is not None and p.size is not None and p.name not in names]
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    _axes(axes, [*front, *others], _size_label(report))
    _marks(axes, front, others)
    figure.suptitle(
        f"{shorten(clean(report.title), 50)}: accuracy against size", fontsize=_TEXT + 2, fontweight="bold",
        color=COLOURS["ink"], parse_math=False,
    )  # fmt: skip
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(
        handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=_TEXT,
        labelcolor=COLOURS["ink"],
    )  # fmt: skip
    _label(figure, axes, report, others)
    return figure


def _size_label(report: SweepReport) -> str:
    if report.size == SMALLEST:
        kinds = dict.fromkeys(point.size_of for point in report.points if point.size_of)
        return f"bytes of the smallest exported file ({', '.join(kinds)})"
    return "bytes of all weights, each after gzip" if report.size == WEIGHTS else f"bytes, {report.size}"


def _axes(axes: Axes, points: Sequence[SweptPoint], below: str) -> None:
    plain_axes(axes)
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    sizes = [float(point.size or 0) for point in points]
    if min(sizes) > 0 and max(sizes) / min(sizes) > _FAR:
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axes.xaxis.set_minor_locator(NullLocator())
        margin = (max(sizes) / min(sizes)) ** 0.12
        axes.set_xlim(min(sizes) / margin, max(sizes) * margin)
    else:
        # At least a tenth from left to right, for the same reason as below.
        spread = max(sizes) - min(sizes)
        margin = max(spread * 0.12, (0.1 * max(sizes) - spread) / 2) or 1.0
        axes.set_xlim(min(sizes) - margin, max(sizes) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    accuracies = [point.accuracy or 0.0 for point in points]
    low, high = min(accuracies), max(accuracies)
    # At least 0.02 from bottom to top: a tenth of a percent must not look like a fall.
    margin = max((high - low) * 0.14, (0.02 - (high - low)) / 2)
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(below, color=COLOURS["muted"], fontsize=_TEXT, parse_math=False)
    axes.set_ylabel("accuracy", color=COLOURS["muted"], fontsize=_TEXT)


def _marks(axes: Axes, front: Sequence[SweptPoint], others: Sequence[SweptPoint]) -> None:
    # A step: between two points of the front, a limit on bytes buys the accuracy of the smaller one.
    axes.plot(*_places(front), color=COLOURS["after"], linewidth=1.4, drawstyle="steps-post", zorder=2)
    ring: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 7, "zorder": 3}
    dot = {**ring, "markersize": 8, "zorder": 4, "markeredgewidth": 0}
    axes.plot(*_places(front), color=COLOURS["after"], label="no other point beats it", **dot)
    if others:
        style = {**ring, "markerfacecolor": "white", "markeredgecolor": COLOURS["muted"], "markeredgewidth": 1.4}
        axes.plot(*_places(others), label="beaten by another point", **style)
    unmet = [point for point in (*front, *others) if point.outcome == "not met"]
    if unmet:
        cross: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 12, "markeredgewidth": 1.8, "zorder": 5}
        axes.plot(*_places(unmet), color=COLOURS["zero"], label="an expectation was not met", **cross)


def _places(points: Sequence[SweptPoint]) -> tuple[list[float], list[float]]:
    return [float(point.size or 0) for point in points], [point.accuracy or 0.0 for point in points]


# ---- labels ----------------------------------------------------------------------------------------------------------


def _label(figure: Figure, axes: Axes, report: SweepReport, others: Sequence[SweptPoint]) -> None:
    canvas = FigureCanvasAgg(figure)
    # The axes have their place only once the figure was laid out.
    figure.draw_without_rendering()
    renderer = canvas.get_renderer()
    front, inside = report.pareto, axes.get_window_extent(renderer)
    taken = [_around(axes, point) for point in (*front, *others)] + list(_stairs(axes, front))
    varied = [name for name, values in report.over.items() if len(values) > 1] or list(report.over)
    for point in (*front, *others):
        colour = COLOURS["ink" if point in front else "muted"]
        label = ", ".join(f"{name} {literal(point.values[name])}" for name in varied)
        for place in _candidates(_ABOVE_THE_STAIRS if point in front else _BELOW_THE_STAIRS):
            text = axes.annotate(
                shorten(label, _LONGEST_LABEL), (float(point.size or 0), point.accuracy or 0.0),
                textcoords="offset points", fontsize=_TEXT - 1, color=colour, parse_math=False, zorder=6, **place,
            )  # fmt: skip
            # Labels take no part in the layout, which would move the axes again.
            text.set_in_layout(False)
            box = text.get_window_extent(renderer)
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                taken.append(box)
                break
            text.remove()


def _stairs(axes: Axes, front: Sequence[SweptPoint]) -> Iterator[Bbox]:
    """The lines of the front, as boxes around them."""
    corners = [axes.transData.transform((float(point.size or 0), point.accuracy or 0.0)) for point in front]
    for (x0, y0), (x1, y1) in pairwise(corners):
        yield Bbox.from_extents(x0, y0 - 1, x1, y0 + 1)
        yield Bbox.from_extents(x1 - 1, y0, x1 + 1, y1)


def _around(axes: Axes, point: SweptPoint) -> Bbox:
    x, y = axes.transData.transform((float(point.size or 0), point.accuracy or 0.0))
    return Bbox.from_extents(x, y, x, y).padded(8 if point.outcome == "not met" else 5)


def _candidates(directions: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Places beside a point, in degrees from its right, nearest first."""
    for away in (7.0, 14.0):
        for degrees in directions:
            x, y = (round(f(math.radians(degrees)), 3) for f in (math.cos, math.sin))
            yield {
                "xytext": (x * away, y * away),
                "ha": "left" if x > 0 else "right" if x < 0 else "center",
                "va": "bottom" if y > 0 else "top" if y < 0 else "center",
            }
