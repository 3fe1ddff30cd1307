"""Draws groups of channels: one bar for each group, before and after channels were removed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunekit.delivery.plots.plots import COLOURS, NARROW, count_axis, name_rows, new_figure
from prunekit.delivery.reports.formatting import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = 11.0
_ROW = 20


def channels_figure(groups: Sequence[Mapping[str, Any]], *, width: int = 560) -> Figure:
    """Returns a bar chart of groups of channels: the number before as a light bar, the number after on top of it.

    Args:
        groups: `name`, `before` and `after` of each group, from top to bottom.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 52 + _ROW * max(len(groups), 2))
    axes = figure.add_subplot()
    name_rows(axes, [group["name"] for group in groups], width, least=2)
    positions = range(len(groups))
    before, after = ([int(group[key]) for group in groups] for key in ("before", "after"))
    axes.barh(positions, before, height=0.66, color=COLOURS["before"], alpha=0.55, linewidth=0)
    axes.barh(positions, after, height=0.66, color=COLOURS["after"], linewidth=0)
    most = max([1, *before])
    for position, old, new in zip(positions, before, after, strict=True):
        text = count(old) if old == new else f"{count(old)} → {count(new)}"
        axes.annotate(
            text, (old, position), (5, 0), textcoords="offset points", va="center", color=COLOURS["ink"], fontsize=_TEXT
        )
    count_axis(axes, most, 1.32 if width >= NARROW else 1.7, "channels")
    return figure
