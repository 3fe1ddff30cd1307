"""Draws bytes of one file in several forms: one bar for each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from prunekit.delivery.plots.plots import COLOURS, NARROW, count_axis, name_rows, new_figure
from prunekit.delivery.reports.formatting import count

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_TEXT = 11.0
_ROW = 24


def sizes_figure(sizes: Sequence[Mapping[str, Any]], *, width: int = 560) -> Figure:
    """Returns a bar chart of bytes, in which the last bar stands out.

    Args:
        sizes: `name` and `bytes` of each form, from top to bottom; at least one.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 52 + _ROW * max(len(sizes), 2))
    axes = figure.add_subplot()
    name_rows(axes, [one["name"] for one in sizes], width, least=2)
    for row, one in enumerate(sizes):
        last = row == len(sizes) - 1
        axes.barh(
            row, one["bytes"], height=0.66, color=COLOURS["after" if last else "before"], alpha=1 if last else 0.55
        )
        axes.annotate(
            count(one["bytes"]),
            (one["bytes"], row),
            (5, 0),
            textcoords="offset points",
            va="center",
            color=COLOURS["ink"],
            fontsize=_TEXT,
        )
    most = max(1, *(int(one["bytes"]) for one in sizes))
    count_axis(axes, most, 1.22 if width >= NARROW else 1.5, "bytes")
    return figure
