"""Plots by name: what the pictures of sections refer to."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.records.reports import Event
from prunekit.delivery.plots.bits_plot import bits_figure
from prunekit.delivery.plots.channels_plot import channels_figure
from prunekit.delivery.plots.plots import histogram_figure, schedule_figure, sparsity_figure
from prunekit.delivery.plots.quantization_plot import errors_figure, ranges_figure
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


def _histogram_plot(data: Mapping[str, Any], width: int) -> Figure:
    return histogram_figure(data, width=width)


def _channels_plot(data: Mapping[str, Any], width: int) -> Figure:
    return channels_figure(data["groups"], width=width)


def _ranges_plot(data: Mapping[str, Any], width: int) -> Figure:
    return ranges_figure(data["ranges"], width=width)


def _errors_plot(data: Mapping[str, Any], width: int) -> Figure:
    return errors_figure(data["errors"], width=width)


def _bits_plot(data: Mapping[str, Any], width: int) -> Figure:
    return bits_figure(data, width=width)


def _stages_plot(data: Mapping[str, Any], width: int) -> Figure:
    return stages_figure(data, width=width)


# Name in `Picture.plot` -> function of the picture's data and its width in CSS pixels.
PLOTS: dict[str, Callable[[Mapping[str, Any], int], Figure]] = {
    "sparsity": _sparsity_plot,
    "schedule": _schedule_plot,
    "histogram": _histogram_plot,
    "channels": _channels_plot,
    "ranges": _ranges_plot,
    "errors": _errors_plot,
    "bits": _bits_plot,
    "stages": _stages_plot,
}
