"""Places labels beside points of a plot, where they cover neither points nor one another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.transforms import Bbox

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation


@dataclass(frozen=True)
class PointLabel:
    """A label of one point.

    Attributes:
        x: Place of the point, in data coordinates.
        y: Likewise.
        text: The label.
        colour: Its colour.
        directions: Places to try around the point, as degrees, 0 at the right.
    """

    x: float
    y: float
    text: str
    colour: str
    directions: Sequence[int]


def place_labels(
    figure: Figure,
    axes: Axes,
    labels: Sequence[PointLabel],
    taken: Sequence[Bbox],
    *,
    fontsize: float,
    distances: Sequence[float] = (7.0, 14.0),
    gap: float = 0.0,
) -> None:
    """Draws each label at the first place that is free; a label that fits nowhere is left out.

    A place that is nearer to the point of another label is taken only if no other place is free.

    Args:
        figure: The figure, whose layout is final.
        axes: The axes of the points.
        labels: The labels, the most important one first.
        taken: Boxes that no label may cover, in pixels.
        fontsize: Size of the letters.
        distances: Distances from the point to try, in units of the figure.
        gap: Least distance between two labels, in pixels.
    """
    renderer = FigureCanvasAgg(figure).get_renderer()
    inside, taken = axes.get_window_extent(renderer), list(taken)
    for label in labels:
        free = []
        for place in _candidates(label.directions, distances):
            text = _drawn(axes, label, place, fontsize)
            box = text.get_window_extent(renderer)
            text.remove()
            if inside.x0 <= box.x0 and box.x1 <= inside.x1 and not any(box.overlaps(other) for other in taken):
                free.append((place, box))
                if _is_nearest(axes, box, label, labels):
                    free = free[-1:]
                    break
        if free:
            place, box = free[0]
            _drawn(axes, label, place, fontsize)
            taken.append(box.padded(gap))


def _drawn(axes: Axes, label: PointLabel, place: Mapping[str, Any], fontsize: float) -> Annotation:
    text = axes.annotate(
        label.text, (label.x, label.y), textcoords="offset points", fontsize=fontsize, color=label.colour,
        parse_math=False, zorder=6, **place,
    )  # fmt: skip
    # Exclude labels from the layout: they would move the axes again.
    text.set_in_layout(False)
    return text


def _is_nearest(axes: Axes, box: Bbox, label: PointLabel, labels: Sequence[PointLabel]) -> bool:
    """Returns True if no other label's point is nearer to the box of a label than its own point, up to two pixels."""
    own = _distance(axes, box, label)
    return all(own <= _distance(axes, box, other) + 2 for other in labels)


def _distance(axes: Axes, box: Bbox, label: PointLabel) -> float:
    """Returns the distance of a label's point from a box, in pixels."""
    across, up = axes.transData.transform((label.x, label.y))
    return math.hypot(max(box.x0 - across, across - box.x1, 0), max(box.y0 - up, up - box.y1, 0))


def box_around(axes: Axes, x: float, y: float, padding: float) -> Bbox:
    """Returns the box around a point, in pixels; the layout of the figure must be final."""
    across, up = axes.transData.transform((x, y))
    return Bbox.from_extents(across, up, across, up).padded(padding)


def _candidates(directions: Sequence[int], distances: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields label positions around a point, nearest first."""
    for away in distances:
        for degrees in directions:
            x, y = (round(f(math.radians(degrees)), 3) for f in (math.cos, math.sin))
            yield {
                "xytext": (x * away, y * away),
                "ha": "left" if x > 0 else "right" if x < 0 else "center",
                "va": "bottom" if y > 0 else "top" if y < 0 else "center",
            }
