"""Draws a quantization: ranges of tensors and errors of weights, a row for each, and bytes against errors."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from prunekit.delivery.plots.plots import COLOURS, name_rows, new_figure, plain_axes
from prunekit.delivery.reports.formatting import is_number, number, size

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 11.0
_ROW = 20
# Rows for which a picture has room at least.
_LEAST = 2
# Ratio of the largest to the smallest range above which the axis is logarithmic on both sides of zero.
_FAR = 8.0
# Most decades on each side of zero, and of an axis of errors; smaller values are drawn at its end.
_DECADES = 5
_ERROR_DECADES = 10
# Width of a character of a tick, as a fraction of its height.
_CHARACTER = 0.65
# Bits -> colour and marker: both, so that no reader needs the colour. Few bits have warm colours.
_BITS = {
    2: ("zero", "v"),
    3: ("zero", "^"),
    4: ("metric", "s"),
    5: ("metric", "D"),
    6: ("muted", "P"),
    7: ("muted", "X"),
    8: ("after", "o"),
}
_OTHER_BITS = ("ink", "*")


def ranges_figure(ranges: Sequence[Mapping[str, Any]], *, width: int = 560) -> Figure:
    """Returns a chart of ranges: a bar from the lowest to the highest value, hollow if the kernel prescribes them.

    The axis is linear for ranges of similar size; else it is logarithmic on both sides of zero.

    Args:
        ranges: `name`, `low`, `high` and `chosen` ("data" or "kernel") of each range, from top to bottom.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 74 + _ROW * max(len(ranges), _LEAST))
    axes = figure.add_subplot()
    name_rows(axes, [one["name"] for one in ranges], width, least=_LEAST)
    choices = _scale_ranges(axes, ranges)
    axes.axvline(0, color=COLOURS["before"], linewidth=1.0, zorder=1)
    for row, one in enumerate(ranges):
        axes.barh(row, one["high"] - one["low"], left=one["low"], height=0.6, zorder=2, **_bar(one["chosen"]))
        _tell(axes, row, f"{_figure(one['low'])} to {_figure(one['high'])}")
    both = ", logarithmic on both sides of 0" if axes.get_xscale() == "symlog" else ""
    axes.set_xlabel(f"range{both}", color=COLOURS["muted"], fontsize=_TEXT)
    kinds = (("data", "chosen from data"), ("kernel", "prescribed by the kernel"))
    present = {one["chosen"] for one in ranges}
    _legend(figure, [Patch(**_bar(kind), label=text) for kind, text in kinds if kind in present])
    _set_ticks(figure, axes, choices)
    return figure


def errors_figure(errors: Sequence[Mapping[str, Any]], *, width: int = 560) -> Figure:
    """Returns a chart of errors on a logarithmic axis: a point for each weight, with its bits as colour and marker.

    Errors of zero, and those that are too small for the axis, are hollow points at its left end.

    Args:
        errors: `name`, `error` and `bits` of each weight, from top to bottom.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 74 + _ROW * max(len(errors), _LEAST))
    axes = figure.add_subplot()
    name_rows(axes, [one["name"] for one in errors], width, least=_LEAST)
    # Room for a point at the end of the axis.
    axes.tick_params(axis="y", pad=8)
    low, choices = _scale_errors(axes, [one["error"] for one in errors])
    end = axes.get_xlim()[0]
    for row, one in enumerate(errors):
        error = one["error"]
        _tell(axes, row, _figure(error, 2))
        if not is_number(error):
            continue
        colour, marker = _mark(one["bits"])
        inside = error >= low
        axes.plot([end, error if inside else end], [row, row], color=COLOURS["grid"], linewidth=2, zorder=2)
        face = COLOURS[colour] if inside else "none"
        axes.plot(
            [error if inside else end], [row], marker=marker, markersize=7, markerfacecolor=face,
            markeredgecolor=COLOURS[colour], markeredgewidth=0 if inside else 1.3, clip_on=False, zorder=3,
        )  # fmt: skip
    axes.set_xlabel("relative squared error, logarithmic", color=COLOURS["muted"], fontsize=_TEXT)
    _legend(figure, [_handle(bits) for bits in sorted({one["bits"] for one in errors})])
    _set_ticks(figure, axes, choices)
    return figure


def _bar(chosen: str) -> dict[str, Any]:
    if chosen == "kernel":
        return {"facecolor": "none", "edgecolor": COLOURS["muted"], "linewidth": 1.3}
    # With an edge, so that a bar of no width is visible.
    return {"facecolor": COLOURS["after"], "edgecolor": COLOURS["after"], "linewidth": 0.8}


def _mark(bits: int) -> tuple[str, str]:
    return _BITS.get(bits, _OTHER_BITS)


def _handle(bits: int) -> Line2D:
    colour, marker = _mark(bits)
    style: dict[str, Any] = {"linestyle": "", "marker": marker, "color": COLOURS[colour], "markeredgewidth": 0}
    return Line2D([], [], markersize=7, label=f"{bits} bits", **style)


def _legend(figure: Figure, handles: Sequence[Any]) -> None:
    if handles:
        figure.legend(
            handles=handles, loc="outside upper left", ncols=4, frameon=False, fontsize=_TEXT,
            labelcolor=COLOURS["ink"], handlelength=1.2, handletextpad=0.5, columnspacing=1.2,
        )  # fmt: skip


def _tell(axes: Axes, row: int, text: str) -> None:
    """Writes a figure at the right of a row."""
    axes.annotate(
        text, (1, row), (8, 0), xycoords=axes.get_yaxis_transform(), textcoords="offset points", va="center_baseline",
        color=COLOURS["ink"], fontsize=_TEXT - 1, annotation_clip=False,
    )  # fmt: skip


def _figure(value: float | None, digits: int = 3) -> str:
    return number(value, digits).replace("-", "−")


# ---- axes ------------------------------------------------------------------------------------------------------------


def _scale_ranges(axes: Axes, ranges: Sequence[Mapping[str, Any]]) -> list[list[float]]:
    """Sets scale and limits of an axis of ranges; returns choices of ticks for `_set_ticks`."""
    low, high = (bound([0.0, *(one[key] for one in ranges)]) for bound, key in ((min, "low"), (max, "high")))
    sizes = [size for size in (max(-one["low"], one["high"]) for one in ranges) if size > 0]
    if not sizes or max(sizes) / min(sizes) <= _FAR:
        margin = 0.03 * (high - low) or 0.5
        axes.set_xlim(low - margin, high + margin)
        locators = (MaxNLocator(count, steps=[1, 2, 5, 10]) for count in (7, 5, 4, 3, 2, 1))
        return [list(locator.tick_values(*axes.get_xlim())) for locator in locators]
    lowest = round(math.log10(max(min(sizes), max(sizes) * 10.0**-_DECADES)))
    axes.set_xscale("symlog", linthresh=10.0**lowest)
    axes.set_xlim(low * 1.3, high * 1.3)
    return list(_both_sides(-low, high, lowest))


def _both_sides(below: float, above: float, lowest: int) -> Iterator[list[float]]:
    """Yields choices of ticks: zero with powers of ten of both signs, then of the longer side alone."""
    sides = [
        [(sign, power) for power in range(math.floor(math.log10(bound)), lowest - 1, -1)]
        for sign, bound in ((-1, below), (1, above))
        if bound >= 10.0**lowest
    ]
    for chosen in (sides, [max(sides, key=len, default=[])]):
        for step in range(1, 1 + max(map(len, chosen), default=0)):
            yield [0.0, *(sign * 10.0**power for side in chosen for sign, power in side[::step])]


def _scale_errors(axes: Axes, errors: Sequence[float | None]) -> tuple[float, list[list[float]]]:
    """Sets scale and limits of an axis of errors.

    Returns:
        The smallest error that has its place on the axis, and choices of ticks for `_set_ticks`.
    """
    found = [float(one) for one in errors if one is not None and is_number(one) and one > 0] or [1.0]
    low, high = max(min(found), max(found) * 10.0**-_ERROR_DECADES), max(found)
    decades = math.log10(high / low)
    # At least one decade, and room at the left for the points of errors that are zero.
    more = max(0.0, 1 - decades) / 2
    start, end = low / 10.0 ** (0.12 * decades + more), high * 10.0 ** (0.06 * decades + more)
    axes.set_xscale("log")
    axes.set_xlim(start, end)
    powers = [10.0**power for power in range(math.floor(math.log10(start)), math.ceil(math.log10(end)) + 1)]
    fine = [[factor * power for power in powers for factor in factors] for factors in ((1, 2, 5), (1, 3))]
    return low, [*fine, *(powers[::-step] for step in range(1, len(powers) + 1))]


def _set_ticks(figure: Figure, axes: Axes, choices: Sequence[Sequence[float]]) -> None:
    """Sets the first choice of ticks whose labels stay apart, or the last one.

    Args:
        figure: The figure, complete besides these ticks.
        axes: Its axes.
        choices: Places of the ticks; those outside the axis are left out.
    """
    # The width of the axes is known only after the layout.
    FigureCanvasAgg(figure)
    figure.draw_without_rendering()
    start, end = axes.get_xlim()
    width = _CHARACTER * _TEXT * figure.dpi / 72
    ticks: list[float] = []
    for choice in choices:
        ticks = sorted(tick for tick in choice if start <= tick <= end)
        places = [axes.transData.transform((tick, 0))[0] for tick in ticks]
        lengths = [len(_tick(tick)) for tick in ticks]
        pairs = zip(pairwise(places), pairwise(lengths), strict=True)
        if ticks and all(right - left >= width * (1 + sum(both) / 2) for (left, right), both in pairs):
            break
    axes.set_xticks(ticks, [_tick(tick) for tick in ticks])
    axes.minorticks_off()
    axes.xaxis.grid(True, color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)


def _tick(value: float) -> str:
    return f"{value:g}".replace("-", "−")


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
    x, y = ([one[i] for one in points] for i in (0, 1))
    axes.plot(x, y, marker="o", markersize=4, linewidth=1.4, color=COLOURS["after"], label="choices")
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
