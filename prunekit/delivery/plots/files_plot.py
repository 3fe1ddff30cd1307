"""Draws files by their bytes and by what they lose: those of a search, and the one that it delivered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from matplotlib.ticker import FuncFormatter, MaxNLocator

from prunekit.delivery.plots.plots import COLOURS, new_figure, plain_axes
from prunekit.delivery.reports.formatting import clean, shorten, size

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = 11.0
_HEIGHT = 250


def files_figure(data: Mapping[str, Any], *, width: int = 560) -> Figure:
    """Returns a chart of the drop against bytes: dots for files, a line for the drop that was allowed.

    Args:
        data: `files`, each with `bytes`, `drop`, `held` and `delivered`; `allowed`, a drop or None; `metric`, its name.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, _HEIGHT)
    axes = figure.add_subplot()
    plain_axes(axes)
    axes.grid(color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    groups = (
        ("too much is lost", "before", lambda one: not one["held"]),
        ("made and measured", "metric", lambda one: one["held"] and not one["delivered"]),
        ("delivered", "after", lambda one: one["delivered"]),
    )
    for label, colour, belongs in groups:
        found = [(one["bytes"], one["drop"]) for one in data["files"] if belongs(one)]
        if found:
            sizes, drops = zip(*found, strict=True)
            axes.scatter(sizes, drops, s=56, color=COLOURS[colour], label=label, zorder=3)
    if data.get("allowed") is not None:
        axes.axhline(data["allowed"], color=COLOURS["zero"], linewidth=1.2, linestyle=(0, (4, 3)), label="allowed")
    axes.margins(0.08, 0.14)
    axes.xaxis.set_major_locator(MaxNLocator(5))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: size(round(value))))
    axes.yaxis.set_major_locator(MaxNLocator(5))
    axes.set_xlabel("bytes of the file", color=COLOURS["muted"], fontsize=_TEXT)
    named = shorten(clean(str(data["metric"])), 30)
    axes.set_ylabel(f"drop of {named}", color=COLOURS["muted"], fontsize=_TEXT, parse_math=False)
    handles, _ = axes.get_legend_handles_labels()
    figure.legend(
        handles=handles,
        loc="outside lower center",
        ncols=len(handles) if width >= 500 else 2,
        frameon=False,
        fontsize=_TEXT,
        labelcolor=COLOURS["ink"],
    )
    return figure
