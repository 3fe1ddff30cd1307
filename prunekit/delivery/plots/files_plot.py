"""Draws files by what they cost and what they lose: those of a search, the one that it delivered, and the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from prunekit.delivery.plots.plots import COLOURS, new_figure, plain_axes
from prunekit.delivery.reports.formatting import clean, latency, shorten, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT, _SMALL = 11.0, 9.0
_HEIGHT = 250
# Factor of the costs at both ends, left free.
_ROOM = 1.3
# Range of costs that has marks at 2 and 5 as well.
_FEW = 50.0
# Label, colour, marker, whether a file belongs there.
_GROUPS: tuple[tuple[str, str, Callable[[Any], bool]], ...] = (
    ("too much is lost", "before", lambda one: not one["held"]),
    ("made and measured", "metric", lambda one: one["held"] and not one["delivered"]),
    ("delivered", "after", lambda one: one["delivered"]),
)
# Heights of the names of techniques alone, so that near ones do not cover each other, in points above the axis.
_LEVELS = (6, 18, 30)


def files_figure(data: Mapping[str, Any], *, width: int = 560) -> Figure:
    """Returns charts of the drop against bytes and, where it was measured, against the time of a call.

    Dots are files, diamonds files of trained mixtures, a line is the drop that was allowed, the square is the model in
    float32. Triangles on the axis are what each technique alone would cost for the error of the file that was
    delivered: counted, so that their drop is not known.

    Args:
        data: `files`, each with `bytes`, `seconds` (or None), `drop`, `held`, `delivered` and `trained`; `alone`, each
            with `techniques`, `bytes` and `seconds`; `model`, with `bytes` and `seconds`; `allowed`, a drop or None;
            `metric`, its name.
        width: Width of the figure in CSS pixels.
    """
    timed = any(one["seconds"] is not None for one in data["files"])
    wide = width >= 500
    figure = new_figure(width, _HEIGHT if wide or not timed else 2 * _HEIGHT)
    panels = figure.subplots(*((1, 2) if wide else (2, 1))) if timed else [figure.add_subplot()]
    for axes, cost in zip(panels, ("bytes", "seconds"), strict=False):
        _draw(axes, data, cost)
    metric = shorten(clean(str(data["metric"])), 30)
    panels[0].set_ylabel(f"drop of {metric}", color=COLOURS["muted"], fontsize=_TEXT, parse_math=False)
    named: dict[str, Any] = {}
    for handle, label in zip(*panels[0].get_legend_handles_labels(), strict=True):
        named.setdefault(label, handle)
    if any(one["trained"] for one in data["files"]):
        named["diamonds: trained"] = Line2D([], [], linestyle="", marker="D", color=COLOURS["muted"])
    figure.legend(
        named.values(),
        named.keys(),
        loc="outside lower center",
        ncols=3 if wide else 2,
        frameon=False,
        fontsize=_TEXT if wide else _SMALL,
        labelcolor=COLOURS["ink"],
    )
    return figure


def _draw(axes: Axes, data: Mapping[str, Any], cost: str) -> None:
    plain_axes(axes)
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    for label, colour, belongs in _GROUPS:
        for trained, marker in ((False, "o"), (True, "D")):
            files = [one for one in data["files"] if belongs(one) and one["trained"] is trained]
            if files:
                points = [one[cost] for one in files], [one["drop"] for one in files]
                axes.scatter(*points, s=56, color=COLOURS[colour], marker=marker, label=label, zorder=3)
    whole = data["model"][cost]
    axes.scatter([whole], [0.0], s=56, color=COLOURS["ink"], marker="s", label="the model in float32", zorder=3)
    if data.get("allowed") is not None:
        axes.axhline(data["allowed"], color=COLOURS["zero"], linewidth=1.2, linestyle=(0, (4, 3)), label="allowed")
    axes.margins(0.08, 0.14)
    axes.set_xscale("log")
    costs = [one[cost] for one in (*data["files"], *data["alone"], data["model"]) if one[cost]]
    axes.set_xlim(min(costs) / _ROOM, max(costs) * _ROOM)
    bottom = axes.get_xaxis_transform()
    alone = [one for one in data["alone"] if one[cost]]
    if alone:
        places = [one[cost] for one in alone]
        axes.scatter(
            places, [0.03] * len(places), s=30, color=COLOURS["muted"], marker="^", transform=bottom,
            label="one alone, counted", zorder=2,
        )  # fmt: skip
    for number, one in enumerate(sorted(alone, key=lambda one: one[cost])):
        name = axes.annotate(
            one["techniques"], (one[cost], 0.03), xycoords=bottom, xytext=(0, _LEVELS[number % len(_LEVELS)]),
            textcoords="offset points", ha="center", fontsize=_SMALL, color=COLOURS["muted"],
        )  # fmt: skip
        # Text beside the axes would take their room.
        name.set_in_layout(False)
    written = size if cost == "bytes" else latency
    low, high = axes.get_xlim()
    axes.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0) if high < _FEW * low else (1.0,), numticks=6))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: written(round(value) if cost == "bytes" else value)))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    title = "bytes of the file" if cost == "bytes" else "time of a call"
    axes.set_xlabel(title, color=COLOURS["muted"], fontsize=_TEXT)
