"""Draws a sweep: the main metric against size, with the Pareto front as a line."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from matplotlib.transforms import Bbox

from prunekit.delivery.plots.plot_labels import PointLabel, box_around, place_labels
from prunekit.delivery.plots.plots import COLOURS, new_figure, plain_axes
from prunekit.delivery.reports.formatting import clean, literal, shorten, size
from prunekit.delivery.reports.sweeps import SMALLEST, WEIGHTS, SweepReport, SweptPoint

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 11.0
_LONGEST_LABEL = 34
# Ratio of the largest to the smallest size above which the size axis is logarithmic.
_FAR = 12.0
_ABOVE_THE_STAIRS = (135, 180, 90, -45, 45, 0, -90, -135)
_BELOW_THE_STAIRS = (-45, 0, 45, -90, -135)


def sweep_figure(report: SweepReport, *, width: int = 760, height: int = 460) -> Figure:
    """Returns a chart of the main metric against size: Pareto front as filled dots on a line, other points as rings.

    Points on the front are labelled first; a label that would overlap a label or a point is left out.

    Args:
        report: Sweep with at least one point that has the main metric and a size.
        width: Width of the figure in CSS pixels.
        height: Height of the figure in CSS pixels.

    Raises:
        ValueError: No point has both the main metric and a size.
    """
    front = report.pareto
    if not front:
        raise ValueError(f"A picture of a sweep needs a point with {report.main.title} and size. Received: none.")
    names = {point.name for point in front}
    others = [p for p in report.points if p.main is not None and p.size is not None and p.name not in names]
    figure = new_figure(width, height)
    axes = figure.add_subplot()
    _axes(axes, [*front, *others], report)
    _marks(axes, front, others)
    figure.suptitle(
        f"{shorten(clean(report.title), 50)}: {report.main.title} against size", fontsize=_TEXT + 2, fontweight="bold",
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
        kinds = dict.fromkeys(point.size_of for point in report.points if point.size_of and point.main is not None)
        return f"bytes of the smallest exported file ({', '.join(kinds)})"
    return "bytes of all weights, each after gzip" if report.size == WEIGHTS else f"bytes, {report.size}"


def _metric_label(report: SweepReport) -> str:
    lower = report.main.direction == "min"
    return f"{report.main.title} ({report.main.better})" if lower else report.main.title


def _axes(axes: Axes, points: Sequence[SweptPoint], report: SweepReport) -> None:
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
        # The axis spans at least a tenth of the size, so that a small difference does not look large.
        spread = max(sizes) - min(sizes)
        margin = max(spread * 0.12, (0.1 * max(sizes) - spread) / 2) or 1.0
        axes.set_xlim(min(sizes) - margin, max(sizes) + margin)
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    values = [point.main or 0.0 for point in points]
    low, high = min(values), max(values)
    # The axis spans at least 2 % of the largest value, so that a change of 0.1 % does not look like a large drop.
    margin = max((high - low) * 0.14, (0.02 * max(abs(low), abs(high)) - (high - low)) / 2) or 0.5
    axes.set_ylim(low - margin, high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(6))
    axes.set_xlabel(_size_label(report), color=COLOURS["muted"], fontsize=_TEXT, parse_math=False)
    axes.set_ylabel(_metric_label(report), color=COLOURS["muted"], fontsize=_TEXT, parse_math=False)


def _marks(axes: Axes, front: Sequence[SweptPoint], others: Sequence[SweptPoint]) -> None:
    # Steps, not slopes: a byte limit between two points of the front only allows the smaller point's value.
    axes.plot(*_places(front), color=COLOURS["after"], linewidth=1.4, drawstyle="steps-post", zorder=2)
    ring: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 7, "zorder": 3}
    dot = {**ring, "markersize": 8, "zorder": 4, "markeredgewidth": 0}
    axes.plot(*_places(front), color=COLOURS["after"], label="Pareto-optimal", **dot)
    if others:
        style = {**ring, "markerfacecolor": "white", "markeredgecolor": COLOURS["muted"], "markeredgewidth": 1.4}
        axes.plot(*_places(others), label="dominated by another point", **style)
    unmet = [point for point in (*front, *others) if point.outcome == "not met"]
    if unmet:
        cross: dict[str, Any] = {"linestyle": "", "marker": "x", "markersize": 12, "markeredgewidth": 1.8, "zorder": 5}
        axes.plot(*_places(unmet), color=COLOURS["zero"], label="an expectation was not met", **cross)


def _places(points: Sequence[SweptPoint]) -> tuple[list[float], list[float]]:
    return [float(point.size or 0) for point in points], [point.main or 0.0 for point in points]


# ---- labels ----------------------------------------------------------------------------------------------------------


def _label(figure: Figure, axes: Axes, report: SweepReport, others: Sequence[SweptPoint]) -> None:
    # The position of the axes is known only after the layout.
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    front = report.pareto
    varied = [name for name, values in report.over.items() if len(values) > 1] or list(report.over)
    labels = [
        PointLabel(
            float(point.size or 0),
            point.main or 0.0,
            shorten(", ".join(f"{name} {literal(point.values[name])}" for name in varied), _LONGEST_LABEL),
            COLOURS["ink" if point in front else "muted"],
            _ABOVE_THE_STAIRS if point in front else _BELOW_THE_STAIRS,
        )
        for point in (*front, *others)
    ]
    taken = [_around(axes, point) for point in (*front, *others)] + list(_stairs(axes, front))
    place_labels(figure, axes, labels, taken, fontsize=_TEXT - 1)


def _stairs(axes: Axes, front: Sequence[SweptPoint]) -> Iterator[Bbox]:
    """Yields the bounding boxes of the front's line segments."""
    corners = [axes.transData.transform((float(point.size or 0), point.main or 0.0)) for point in front]
    for (x0, y0), (x1, y1) in pairwise(corners):
        yield Bbox.from_extents(x0, y0 - 1, x1, y0 + 1)
        yield Bbox.from_extents(x1 - 1, y0, x1 + 1, y1)


def _around(axes: Axes, point: SweptPoint) -> Bbox:
    padding = 8 if point.outcome == "not met" else 5
    return box_around(axes, float(point.size or 0), point.main or 0.0, padding)
