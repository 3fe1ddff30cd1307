"""Draws the models of a run: the main metric against latency or bytes, and beside the schedule."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from prunekit.delivery.plots.plot_labels import PointLabel, box_around, place_labels
from prunekit.delivery.plots.plots import COLOURS, NARROW, draw_schedule, new_figure, plain_axes
from prunekit.delivery.reports.formatting import clean, is_number, latency, names, shorten, size
from prunekit.delivery.reports.plot_data import asked_line

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure, FigureBase

    from prunekit.anatomy.records.sections import Picture
    from prunekit.delivery.reports.run_report import RunReport

_TEXT = 11.0
# Ratio of the largest to the smallest figure above which the axis is logarithmic.
_FAR = 8.0
_AROUND = (45, 135, 90, -45, -135, -90, 0, 180)
# Points that are nearer to one another than this, in CSS pixels, have one label.
_NEAR = 9.0
# Kind of a model -> colour, marker and name; the marker differs, so that no reader needs the colour.
_KINDS = {
    "before": ("muted", "s", "before"),
    "step": ("after", "o", "after a step"),
    "file": ("zero", "^", "exported file"),
    "integer": ("metric", "D", "integer file"),
}
_AXES: dict[str, tuple[str, Callable[[Any], str]]] = {
    "latency": ("latency of one call, one thread", latency),
    "bytes": ("size of the LiteRT file", size),
}


def stages_figure(data: Mapping[str, Any], *, width: int = 560) -> Figure:
    """Returns a chart of a metric against latency or bytes, one numbered point for each model of a run.

    Args:
        data: The `points`, each with `number`, `name`, `kind` ("before", "step", "file" or "integer"), `value` of
            the metric, `figure` (seconds or bytes) and `second` (bytes after gzip, or None); `figure`, "latency" or
            "bytes"; `metric`, its name; `better`, whether higher or lower values are better, in words; `fraction`,
            True if its values are in [0, 1].
        width: Width of the figure in CSS pixels.
    """
    drawn = new_figure(width, 330 if width >= NARROW else 310)
    axes = draw_stages(drawn, data, narrow=width < NARROW)
    # The hollow points of a narrow picture have no labels of their own: they are beside the filled ones.
    label_points(drawn, axes, data["points"], rings=width >= NARROW)
    return drawn


def draw_stages(
    panel: FigureBase, data: Mapping[str, Any], *, narrow: bool = False, legend: str = "outside upper left"
) -> Axes:
    """Draws the chart of `stages_figure` without labels into a figure or a part of one; returns its axes."""
    axes = panel.add_subplot()
    title, text = _AXES[data["figure"]]
    plain_axes(axes)
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    _scale_figures(axes, data["points"], text, narrow=narrow)
    _scale_values(axes, [point["value"] for point in data["points"]], data["fraction"])
    axes.set_xlabel(title, color=COLOURS["muted"], fontsize=_TEXT)
    metric, better = shorten(clean(data["metric"]), 30), data["better"]
    axes.set_ylabel(
        f"{metric} ({better})" if better == "lower is better" else metric,
        color=COLOURS["muted"], fontsize=_TEXT, parse_math=False,
    )  # fmt: skip
    _mark(axes, data["points"])
    handles, _ = axes.get_legend_handles_labels()
    columns = 2 if narrow and len(handles) > 3 else len(handles)
    panel.legend(
        handles=handles, loc=legend, ncols=columns, frameon=False, fontsize=_TEXT,
        labelcolor=COLOURS["ink"], handletextpad=0.2, columnspacing=1.0,
    )  # fmt: skip
    return axes


def _scale_figures(
    axes: Axes, points: Sequence[Mapping[str, Any]], text: Callable[[Any], str], *, narrow: bool
) -> None:
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


def _scale_values(axes: Axes, values: Sequence[float], fraction: bool) -> None:
    low, high = min(values), max(values)
    # The axis spans at least 5 % of the largest value, so that a change of 0.1 % does not look like a large drop.
    margin = max((high - low) * 0.16, (0.05 * max(abs(low), abs(high)) - (high - low)) / 2) or 0.5
    # No accuracy is above 1; the room above it is for labels.
    axes.set_ylim(low - margin, min(high + margin, 1 + margin / 2) if fraction else high + margin)
    axes.yaxis.set_major_locator(MaxNLocator(5))
    if fraction:
        axes.set_yticks([tick for tick in axes.get_yticks() if low - margin <= tick <= 1])


def _mark(axes: Axes, points: Sequence[Mapping[str, Any]]) -> None:
    steps = [point for point in points if point["kind"] in ("before", "step")]
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


def label_points(
    drawn: Figure, axes: Axes, points: Sequence[Mapping[str, Any]], *, by: str = "number", rings: bool = True
) -> None:
    """Writes a label beside each point, or one beside several points at one place.

    Args:
        drawn: The whole figure, complete besides the labels.
        axes: The axes of the points.
        points: As for `stages_figure`.
        by: "number", for all numbers; or "name", for the first name and how many more there are.
        rings: True labels the sizes after gzip too.
    """
    # The position of the axes is known only after the layout.
    FigureCanvasAgg(drawn)
    drawn.draw_without_rendering()
    marks = [(point[key], point["value"]) for point in points for key in ("figure", "second") if is_number(point[key])]
    taken = [box_around(axes, *mark, 4) for mark in marks]
    most = 1 if by == "name" else None
    labels = [
        PointLabel(x, y, names([clean(point[by]) for point in _named_first(found, by)], most), COLOURS[colour], _AROUND)
        for key, colour in (("figure", "ink"), ("second", "muted"))[: 2 if rings else 1]
        for found, (x, y) in _together(axes, points, key)
    ]
    place_labels(drawn, axes, labels, taken, fontsize=_TEXT, distances=(6.0, 12.0, 20.0, 30.0), gap=5.0)


def _named_first(points: Sequence[Mapping[str, Any]], by: str) -> Sequence[Mapping[str, Any]]:
    """Returns points at one place in the order of their labels: of names, that of an integer file comes first."""
    return points if by == "number" else sorted(points, key=lambda point: point["kind"] != "integer")


def _together(
    axes: Axes, points: Sequence[Mapping[str, Any]], key: str
) -> list[tuple[list[Mapping[str, Any]], tuple[float, float]]]:
    """Returns the points that lie at one place, with the place; `key` is their horizontal figure."""
    found: list[tuple[list[Mapping[str, Any]], tuple[float, float]]] = []
    for point in points:
        if not is_number(point[key]):
            continue
        place = (point[key], point["value"])
        x, y = axes.transData.transform(place)
        for others, other in found:
            if max(abs(one - two) for one, two in zip(axes.transData.transform(other), (x, y), strict=True)) < _NEAR:
                others.append(point)
                break
        else:
            found.append(([point], place))
    return found


def overview_figure(report: RunReport, pictures: Sequence[Picture]) -> Figure:
    """Returns one figure, 1200 pixels wide, with the schedule of a run and two pictures of its models.

    Args:
        report: A run that pruned and measured a main metric.
        pictures: The pictures of `stages.stage_section`: the main metric against latency and against size.
    """
    figure = new_figure(1200, 340)
    panels: Any = figure.subfigures(1, 1 + len(pictures), wspace=0.03)
    schedule, *others = panels
    titles = ["Sparsity schedule", *(picture.title for picture in pictures)]
    for panel, title in zip(panels, titles, strict=True):
        panel.set_facecolor("none")
        panel.suptitle(title, fontsize=13, fontweight="bold", color=COLOURS["ink"], parse_math=False)
    name = "accuracy" if report.main is None else report.main.title
    before = None if report.main is None else report.metric_values(report.main)[0]
    asked = asked_line(report.schedule, report.events)
    below: Any = {"legend": "outside lower center"}
    draw_schedule(schedule, report.events, asked, report.curve, baseline=before, metric=name, **below)
    drawn = [draw_stages(panel, one.data, narrow=True, **below) for panel, one in zip(others, pictures, strict=True)]
    # The labels come last: they need the final layout.
    for axes, picture in zip(drawn, pictures, strict=True):
        points = [point | {"name": _short(point["name"])} for point in picture.data["points"]]
        label_points(figure, axes, points, by="name", rings=False)
    return figure


def _short(name: str) -> str:
    """Returns "2. shrink" for "after 2. shrink", and "sparse" for "litert-sparse"."""
    return name.removeprefix("after ").removeprefix("litert-")
