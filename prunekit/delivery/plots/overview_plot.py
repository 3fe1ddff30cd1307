"""Draws one run in one figure: the schedule, and the main metric against latency and against size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from prunekit.delivery.plots.plots import COLOURS, draw_schedule, new_figure
from prunekit.delivery.plots.stage_plot import draw_stages, label_points
from prunekit.delivery.reports.plot_data import asked_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from prunekit.anatomy.records.sections import Picture
    from prunekit.delivery.reports.run_report import RunReport


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
