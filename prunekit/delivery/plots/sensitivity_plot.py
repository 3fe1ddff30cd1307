"""Draws a sensitivity scan as a heat map: a row for each weight, a column for each level."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize

from prunekit.delivery.plots.plots import COLOURS, new_figure
from prunekit.delivery.reports.formatting import clean, is_number, number, shorten
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.sensitivity import OUTPUT_ERROR, SensitivityReport

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_TEXT = 10.0
_ROW = 19
# From no damage to most damage; readable in grey too.
_SCALE = LinearSegmentedColormap.from_list("damage", ["#f4f7fa", "#f6c9a8", COLOURS["zero"], "#5e2403"])
_DONE = {"prune": "pruned", "quantize": "rounded"}
# Damage, as a fraction of the largest one, from which a cell's text is white.
_DARK = 0.55


def sensitivity_figure(report: SensitivityReport, *, width: int = 900) -> Figure:
    """Returns a heat map of the main metric and one of the output error.

    Cells show the values. Colours show the damage: the loss of the metric against the dense model, linear, and the
    output error, logarithmic.

    Args:
        report: A scan; weights that are not measured yet stay white.
        width: Width of the figure in CSS pixels.
    """
    main = next((metric for metric in report.measures if metric.direction is not None), None)
    figure = new_figure(width, 96 + _ROW * max(len(report.targets), 2))
    panels = figure.subplots(1, 2 if main else 1, sharey=True, squeeze=False)[0]
    if main is not None:
        values = report.values(main.name)
        _panel(panels[0], report, values, _drops(values, main, report.dense[main.name]), main.text)
        panels[0].set_title(f"{main.title} (dense {main.text(report.dense[main.name])})", **_heading())
    errors = report.values(OUTPUT_ERROR)
    _panel(panels[-1], report, errors, _array(errors), lambda value: number(value, 2), logarithmic=True)
    panels[-1].set_title("output error", **_heading())
    names = [shorten(clean(name), 34) for name in errors]
    # Names are user input: matplotlib would read a `$` as the start of a formula.
    panels[0].set_yticks(range(len(names)), names, parse_math=False, color=COLOURS["ink"], fontsize=_TEXT)
    figure.suptitle(
        f"{shorten(clean(report.model_name), 40)}: one weight {_DONE[report.technique]} at a time", fontsize=_TEXT + 3,
        fontweight="bold", color=COLOURS["ink"], parse_math=False,
    )  # fmt: skip
    return figure


def _heading() -> dict[str, object]:
    return {"fontsize": _TEXT + 1, "color": COLOURS["ink"], "parse_math": False}


def _array(values: Mapping[str, Sequence[float | None]]) -> np.ndarray:
    """Returns the values, shape (weights, levels); nan for what is not known."""
    return np.array([[value if is_number(value) else math.nan for value in row] for row in values.values()], "float64")


def _drops(values: Mapping[str, Sequence[float | None]], metric: Metric, dense: float) -> np.ndarray:
    found = _array(values)
    return np.maximum(dense - found if metric.direction == "max" else found - dense, 0.0)


def _panel(axes: Axes, report: SensitivityReport, values, damage, text, *, logarithmic: bool = False) -> None:
    known = damage[np.isfinite(damage) & (damage > 0)]
    top = float(known.max()) if known.size else 1.0
    # Below a thousandth of the largest error all colours are the same.
    norm = LogNorm(max(float(known.min()), top / 1e3) * 0.999, top) if logarithmic and known.size else Normalize(0, top)
    shades = np.ma.filled(norm(np.ma.masked_invalid(np.clip(damage, norm.vmin, None))), math.nan)
    image = _SCALE(shades)
    image[~np.isfinite(damage)] = (1, 1, 1, 1)
    axes.imshow(image, aspect="auto", interpolation="nearest")
    for row, cells in enumerate(values.values()):
        for column, value in enumerate(cells):
            colour = "white" if np.isfinite(shades[row, column]) and shades[row, column] > _DARK else COLOURS["ink"]
            axes.text(column, row, text(value), ha="center", va="center", fontsize=_TEXT - 1, color=colour)
    axes.set_xticks(range(len(report.levels)), [f"{level:g}" for level in report.levels], color=COLOURS["ink"])
    axes.set_xlabel(f"{report.level} of the weight", color=COLOURS["muted"], fontsize=_TEXT)
    axes.tick_params(length=0, labelsize=_TEXT)
    for spine in axes.spines.values():
        spine.set_visible(False)
