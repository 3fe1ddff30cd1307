"""Plots by name: what the pictures of sections refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.records.reports import Event
from prunekit.delivery.plots.channels_plot import channels_figure
from prunekit.delivery.plots.files_plot import files_figure
from prunekit.delivery.plots.plots import histogram_figure, schedule_figure, sparsity_figure
from prunekit.delivery.plots.quantization_plot import bits_figure, errors_figure, ranges_figure
from prunekit.delivery.plots.sizes_plot import sizes_figure
from prunekit.delivery.plots.stage_plot import stages_figure
from prunekit.delivery.reports.plot_data import asked_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _sparsity_plot(data: Mapping[str, Any], width: int) -> Figure:
    return sparsity_figure(data["sparsities"], width=width, overall=data.get("overall"))


def _schedule_plot(data: Mapping[str, Any], width: int) -> Figure:
    events = [Event(**event) for event in data["events"]]
    curve = [(step, value) for step, value in data.get("curve", ())]
    asked = asked_line(data.get("schedule"), events, max((step for step, _ in curve), default=0))
    metric = str(data.get("metric", "accuracy"))
    return schedule_figure(events, asked, curve, baseline=data.get("baseline"), metric=metric, width=width)


def _plot_of(figure: Callable[..., Figure], key: str = "") -> Callable[[Mapping[str, Any], int], Figure]:
    """Returns a plot that draws `figure` from the data, or from what they have under a key."""
    return lambda data, width: figure(data[key] if key else data, width=width)


# Name in `Picture.plot` -> function of the picture's data and its width in CSS pixels.
PLOTS: dict[str, Callable[[Mapping[str, Any], int], Figure]] = {
    "sparsity": _sparsity_plot,
    "schedule": _schedule_plot,
    "histogram": _plot_of(histogram_figure),
    "channels": _plot_of(channels_figure, "groups"),
    "ranges": _plot_of(ranges_figure, "ranges"),
    "errors": _plot_of(errors_figure, "errors"),
    "bits": _plot_of(bits_figure),
    "files": _plot_of(files_figure),
    "sizes": _plot_of(sizes_figure, "sizes"),
    "stages": _plot_of(stages_figure),
}
