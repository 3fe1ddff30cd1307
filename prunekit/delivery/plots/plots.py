"""Draws the pictures of a run as matplotlib figures, and writes figures as inline SVG or PNG.

Uses matplotlib's object interface, so drawing neither changes pyplot's global state nor needs a display.
One figure unit is one CSS pixel, so text appears on the page at its drawn size.
"""

from __future__ import annotations

import html
import io
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FuncFormatter, MaxNLocator

from prunekit.delivery.reports.formatting import clean, count, is_number, short_count, shorten, sparsity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.gridspec import SubplotSpec

    from prunekit.anatomy.records.reports import Event

# Name -> drawn colour. `to_svg` writes the CSS variable of the same name; page.css defines it for both themes.
COLOURS = {
    "ink": "#1b2733",
    "muted": "#56646f",
    "grid": "#d5dde4",
    "before": "#9fb0bf",
    "after": "#0b66c3",
    "zero": "#bf4d08",
    "metric": "#76389f",
}
_TEXT = 11.0
_UNITS_PER_INCH = 72.0
# Below this width, in CSS pixels, texts are shortened.
NARROW = 500
_SVG_SETTINGS = {"svg.fonttype": "none", "svg.hashsalt": "prunekit", "axes.unicode_minus": True}


# ---- the pictures ----------------------------------------------------------------------------------------------------


def sparsity_figure(values: Mapping[str, float], *, width: int = 560, overall: float | None = None) -> Figure:
    """Returns a bar chart of the sparsity of each weight, in the order of `values`, with a line at `overall`.

    Args:
        values: Name of each weight -> its sparsity, such as the `row_sparsities` of the `largest` weights.
        width: Width of the figure in CSS pixels.
        overall: Sparsity over all targets, drawn as a dashed line.
    """
    figure = new_figure(width, 58 + 22 * max(len(values), 1))
    _draw_sparsity(figure.add_subplot(), values, overall, width)
    return figure


def _draw_sparsity(axes: Axes, sparsities: Mapping[str, float], overall: float | None, width: int) -> None:
    name_rows(axes, list(sparsities), width)
    values = list(sparsities.values())
    positions = list(range(len(values)))
    axes.barh(positions, [1.0] * len(values), height=0.62, color=COLOURS["grid"], alpha=0.55, linewidth=0)
    axes.barh(positions, values, height=0.62, color=COLOURS["after"], linewidth=0)
    if overall is not None and is_number(overall):
        axes.axvline(overall, color=COLOURS["zero"], linewidth=1.2, linestyle=(0, (4, 3)))
    for position, value in zip(positions, values, strict=True):
        axes.text(1.02, position, sparsity(value), va="center", ha="left", color=COLOURS["ink"], fontsize=_TEXT)
    axes.set_xlim(0, 1.14)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "0.25", "0.5", "0.75", "1"])
    axes.set_xlabel("sparsity (fraction of exact zeros)", color=COLOURS["muted"], fontsize=_TEXT)


def schedule_figure(
    events: Sequence[Event],
    asked: Sequence[tuple[float, float]],
    curve: Sequence[tuple[float, float]] = (),
    *,
    baseline: float | None = None,
    metric: str = "accuracy",
    width: int = 560,
) -> Figure:
    """Returns a chart of sparsity per step: requested as a line, reached as dots; a metric on a second axis.

    Args:
        events: The mask updates.
        asked: Points of the requested-sparsity line, from `asked_line`.
        curve: (step, value of the metric on the validation data); points that are not finite are left out.
        baseline: The metric before pruning, drawn as a dotted line on the second axis.
        metric: Name of the metric.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 270 if width >= NARROW else 250)
    draw_schedule(figure, events, asked, curve, baseline=baseline, metric=metric)
    return figure


def draw_schedule(
    panel: FigureBase,
    events: Sequence[Event],
    asked: Sequence[tuple[float, float]],
    curve: Sequence[tuple[float, Any]] = (),
    *,
    baseline: float | None = None,
    metric: str = "accuracy",
    legend: str = "outside upper left",
) -> None:
    """Draws the chart of `schedule_figure` into a figure or a part of one; `legend` is matplotlib's place."""
    axes = panel.add_subplot()
    handles = _draw_schedule(axes, events, asked) + _draw_metric(axes, curve, baseline, metric)
    if handles:
        panel.legend(
            handles=handles, loc=legend, ncols=2, frameon=False, fontsize=_TEXT,
            labelcolor=COLOURS["ink"],
        )  # fmt: skip


def _draw_schedule(axes: Axes, events: Sequence[Event], asked: Sequence[tuple[float, float]]) -> list[Any]:
    plain_axes(axes)
    axes.grid(axis="y", color=COLOURS["grid"], linewidth=0.8)
    axes.set_axisbelow(True)
    handles = []
    if asked:
        line = axes.plot(*zip(*asked, strict=True), color=COLOURS["after"], linewidth=1.8, label="requested sparsity")
        handles += line
    reached = [(event.step, event.reached) for event in events if is_number(event.reached)]
    if reached:
        # A mask update in every step gives thousands of dots; about 120 show the same curve.
        reached = reached[:: max(1, len(reached) // 120)] + reached[-1:]
        style: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 4.5, "markeredgewidth": 0}
        handles += axes.plot(*zip(*reached, strict=True), color=COLOURS["zero"], label="reached sparsity", **style)
    axes.set_ylim(0, 1.03)
    axes.set_xlabel("training step (optimizer updates)", color=COLOURS["muted"], fontsize=_TEXT)
    axes.set_ylabel("sparsity", color=COLOURS["muted"], fontsize=_TEXT)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda step, _: count(step)))
    return handles


def _plain(text: str) -> str:
    """Returns a label for a legend, which has no `parse_math=False`."""
    return text.replace("$", "\\$")


def _draw_metric(axes: Axes, curve: Sequence[tuple[float, Any]], baseline: float | None, metric: str) -> list[Any]:
    points = [(step, value) for step, value in curve if is_number(value)]
    if not points:
        return []
    other = axes.twinx()
    plain_axes(other)
    colour, metric = COLOURS["metric"], shorten(clean(metric), 30)
    style: dict[str, Any] = {"linewidth": 1.5, "marker": "D", "markersize": 3.4, "linestyle": (0, (5, 2))}
    handles = other.plot(*zip(*points, strict=True), color=colour, label=_plain(f"validation {metric}"), **style)
    values = [value for _, value in points]
    if baseline is not None and is_number(baseline):
        values.append(baseline)
        handles.append(
            other.axhline(baseline, color=colour, linewidth=1, linestyle=":", label=_plain(f"{metric} before pruning"))
        )
    low, high = min(values), max(values)
    # The axis spans at least 5 % of the largest value, so that a change of 0.1 % does not look like a large drop.
    margin = max((high - low) * 0.12, (0.05 * max(abs(low), abs(high)) - (high - low)) / 2) or 0.5
    other.set_ylim(low - margin, high + margin)
    other.yaxis.set_major_locator(MaxNLocator(5))
    other.set_ylabel(metric, color=colour, fontsize=_TEXT, parse_math=False)
    other.tick_params(axis="y", labelcolor=colour)
    return handles


def histogram_figure(histogram: Mapping[str, Any], *, width: int = 340) -> Figure:
    """Returns a histogram of one weight before and after pruning, with a separate bar for the exact zeros.

    Args:
        histogram: Result of `weight_histogram`.
        width: Width of the figure in CSS pixels.
    """
    figure = new_figure(width, 190)
    _draw_histogram(figure, figure.add_gridspec(1, 1)[0], histogram)
    return figure


def _draw_histogram(figure: FigureBase, place: SubplotSpec, histogram: Mapping[str, Any]) -> None:
    grid = place.subgridspec(1, 2, width_ratios=[1, 2.6], wspace=0.02)
    zeros, values = figure.add_subplot(grid[0]), figure.add_subplot(grid[1])
    _draw_zeros(zeros, histogram)
    plain_axes(values)
    edges = np.asarray(histogram["edges"], dtype=float)
    for name, alpha in (("before", 0.75), ("after", 1.0)):
        counts = np.asarray(histogram[name], dtype=float)
        values.stairs(counts, edges, fill=True, color=COLOURS[name], alpha=alpha, linewidth=0, label=name)
    values.set_title("all other values", fontsize=_TEXT, color=COLOURS["muted"])
    values.set_ylim(0, max([1.0, *map(float, histogram["before"]), *map(float, histogram["after"])]) * 1.06)
    values.xaxis.set_major_locator(MaxNLocator(4))
    values.yaxis.set_major_locator(MaxNLocator(3, integer=True))
    values.yaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))
    values.yaxis.tick_right()
    values.legend(loc="upper right", frameon=False, fontsize=_TEXT, labelcolor=COLOURS["ink"], handlelength=1)


def _draw_zeros(axes: Axes, histogram: Mapping[str, Any]) -> None:
    plain_axes(axes)
    counts = [int(histogram["zeros_before"]), int(histogram["zeros_after"])]
    axes.bar([0, 1], counts, width=0.72, color=[COLOURS["before"], COLOURS["zero"]], linewidth=0)
    total = max(sum(histogram[name]) + zeros for name, zeros in zip(("before", "after"), counts, strict=True))
    for position, zeros in enumerate(counts):
        text = short_count(zeros) if zeros >= 100_000 else count(zeros)
        axes.annotate(
            text,
            (position, zeros),
            (0, 2),
            textcoords="offset points",
            ha="center",
            fontsize=_TEXT - 0.5,
            color=COLOURS["ink"],
        )
    axes.set_xticks([0, 1], ["before", "after"])
    axes.set_yticks([])
    axes.set_xlim(-0.65, 1.65)
    axes.set_ylim(0, max(total, 1) * 1.12)
    axes.set_title("exactly 0", fontsize=_TEXT, color=COLOURS["zero"])
    axes.tick_params(axis="x", length=0)


def new_figure(width: float, height: float) -> Figure:
    """Returns an empty figure of `width` x `height` CSS pixels with a transparent background."""
    return Figure(figsize=(width / _UNITS_PER_INCH, height / _UNITS_PER_INCH), layout="constrained", facecolor="none")


def plain_axes(axes: Axes) -> None:
    """Removes the frame and background of `axes`, and draws ticks in the muted colour."""
    axes.set_facecolor("none")
    axes.tick_params(labelsize=_TEXT, labelcolor=COLOURS["muted"], color=COLOURS["grid"])
    for side, spine in axes.spines.items():
        spine.set_visible(side == "bottom")
        spine.set_color(COLOURS["grid"])


def name_rows(axes: Axes, names: Sequence[str], width: int, *, least: int = 1) -> None:
    """Gives a row to each name, from top to bottom, and removes the frame, the background and the ticks of the rows.

    Args:
        axes: The axes; row 0, 1, 2 ... is at the height 0, 1, 2 ...
        names: Names of the rows, as the user wrote them.
        width: Width of the figure in CSS pixels.
        least: Number of rows for which there is room at least.
    """
    plain_axes(axes)
    shown = [shorten(clean(name), 30 if width >= NARROW else 17) for name in names]
    # Names are user input: matplotlib would read a `$` as the start of a formula.
    axes.set_yticks(range(len(shown)), shown, parse_math=False, color=COLOURS["ink"])
    axes.set_ylim(max(len(shown), least) - 0.4, -0.6)
    axes.tick_params(axis="y", length=0)
    axes.spines["bottom"].set_visible(False)


def count_axis(axes: Axes, most: float, room: float, label: str) -> None:
    """Names the counts below bars up to the largest one.

    Args:
        axes: Axes with horizontal bars.
        most: The largest count, at least 1.
        room: Width of the axes by that of the longest bar: figures are at its right.
        label: What is counted.
    """
    axes.set_xlim(0, most * room)
    axes.xaxis.set_major_locator(MaxNLocator(4, integer=True, steps=[1, 2, 5, 10]))
    axes.set_xticks([tick for tick in axes.get_xticks() if tick <= most])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axes.set_xlabel(label, color=COLOURS["muted"], fontsize=11.0)


# ---- the files -------------------------------------------------------------------------------------------------------


def to_png(figure: Figure, scale: float = 2.0) -> bytes:
    """Returns the figure as PNG bytes on a white background, with `scale` pixels per CSS pixel."""
    with _drawing():
        figure.set_dpi(_UNITS_PER_INCH * scale)
        stream = io.BytesIO()
        canvas = FigureCanvasAgg(figure)
        canvas.print_figure(
            stream, format="png", facecolor="white", dpi=_UNITS_PER_INCH * scale, metadata={"Software": None}
        )
    return stream.getvalue()


def to_svg(figure: Figure, label: str, *, prefix: str, css_class: str = "") -> str:
    """Returns the figure as an inline `<svg>` element for an HTML page.

    Text remains text in the page's font. Colours are CSS variables, so the picture follows the page's theme;
    the drawn colours are the fallback. Equal figures give equal SVG text.

    Args:
        figure: A figure of this module.
        label: Text alternative for screen readers (`aria-label`).
        prefix: Prefix of every id; must differ between the pictures of a page.
        css_class: CSS class of the `<svg>` element.
    """
    stream = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    with _drawing():
        FigureCanvasSVG(figure).print_svg(stream, metadata=metadata)
    text = stream.getvalue()
    # Remove comments first: matplotlib repeats each text in a comment. Text has `<` escaped, so only comments match.
    text = re.sub(r"<!--.*?-->\s*", "", text, flags=re.DOTALL)
    root = re.search(r"<svg [^>]*>", text)
    if root is None:
        raise RuntimeError("matplotlib wrote a picture without an <svg> element. This is a defect in prunekit.")
    body = text[root.end() :]
    body = re.sub(r"<metadata>.*?</metadata>\s*|<style .*?</style>\s*", "", body, flags=re.DOTALL)
    body = re.sub(r'style="[^"]*"', _themed, body.replace("xlink:href", "href"))
    body = _with_ids(body, prefix)
    width, height = (round(inches * _UNITS_PER_INCH, 2) for inches in figure.get_size_inches())
    opening = (
        f'<svg role="img" class="{f"picture {css_class}".strip()}" aria-label="{html.escape(clean(label))}"'
        f' viewBox="0 0 {width:g} {height:g}" style="max-width:{width:g}px">'
    )
    return re.sub(r"\n\s*", "\n", opening + body).strip()


def _themed(style: re.Match[str]) -> str:
    text = style.group(0)
    for name, colour in COLOURS.items():
        text = text.replace(f": {colour}", f": var(--{name}, {colour})")
    return text


def _with_ids(body: str, prefix: str) -> str:
    """Prefixes the referenced ids in `body`, and removes all other ids."""
    used = set(re.findall(r"url\(#([^)]+)\)", body)) | set(re.findall(r'href="#([^"]+)"', body))
    body = re.sub(r' id="([^"]*)"', lambda found: f' id="{prefix}-{found[1]}"' if found[1] in used else "", body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)


@contextmanager
def _drawing() -> Iterator[None]:
    """Applies the drawing settings temporarily. Hides warnings about letters missing in matplotlib's font: the
    page's font has them."""
    with matplotlib.rc_context(_SVG_SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"Glyph .* missing from font")
        yield
