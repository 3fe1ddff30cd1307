"""Draws a choice of bits: bytes of a model against its error, or against the evaluated metric."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from prunekit.delivery.plots.plots import COLOURS, new_figure, plain_axes
from prunekit.delivery.reports.formatting import is_number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 11.0


def bits_figure(data: Mapping[str, Any], *, width: int = 560) -> Figure:
    """Returns a chart of a model's bytes against its summed error, or against the metric where choices were evaluated.

    Args:
        data: As for `report_pictures.bits_picture`.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 300)
    axes = figure.add_subplot()
    plain_axes(axes)
    chosen = data["chosen"][0]
    if data["trials"]:
        points = sorted((one for one in data["trials"] if is_number(one[1])), key=lambda one: one[0])
        title = "metric"
        axes.axhline(data["floor"], color=COLOURS["zero"], linestyle="--", linewidth=1.4, label="floor")
    else:
        points = data["path"]
        title = "summed error of the outputs"
        if all(error > 0 for _, error in points) and points[0][1] > 8 * points[-1][1]:
            axes.set_yscale("log")
            axes.yaxis.set_minor_locator(NullLocator())
            title += ", logarithmic"
    if data["budget"] is not None:
        axes.axvline(data["budget"], color=COLOURS["zero"], linestyle="--", linewidth=1.4, label="budget")
    _curve(axes, points)
    here = [value for bytes_, value in [*points, data["chosen"]] if bytes_ == chosen]
    if here:
        axes.plot([chosen], [here[0]], marker="D", markersize=10, color=COLOURS["metric"], linestyle="", label="chosen")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(value)))
    axes.xaxis.set_major_locator(MaxNLocator(4 if width < 500 else 6))
    axes.set_xlabel("bytes of all weights", color=COLOURS["muted"], fontsize=_TEXT)
    axes.set_ylabel(title, color=COLOURS["muted"], fontsize=_TEXT)
    figure.legend(
        loc="outside upper left", ncols=4, frameon=False, fontsize=_TEXT, labelcolor=COLOURS["ink"], handlelength=1.6
    )
    return figure


def _curve(axes: Axes, points: Sequence[Sequence[float]]) -> None:
    axes.plot(
        [one[0] for one in points], [one[1] for one in points],
        marker="o", markersize=4, linewidth=1.4, color=COLOURS["after"],
        label="choices",
    )  # fmt: skip
