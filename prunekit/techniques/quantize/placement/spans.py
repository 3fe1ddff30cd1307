"""Tensors of which the calibration data say too little, and tensors that span few steps of a grid that others share."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from prunekit.techniques.quantize.grids.grids import Grid
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.units import SharedGrid, Unit

# Fewer steps between the extremes of a tensor are 3 bits. Inputs of larger values are hardly meant.
_STEPS, _HUGE = 8, 1e6
# Sums, whose result has a grid of its own.
_SUMS = ("Add", "Subtract", "Average")
# Most names in a note.
_LISTED = 5


@dataclass(eq=False)
class Span:
    """The extremes of values over the calibration data: numbers, or arrays with one entry for each channel."""

    low: Any = np.inf
    high: Any = -np.inf

    def add(self, low: Any, high: Any) -> None:
        """Widens the span to further extremes."""
        self.low, self.high = np.minimum(self.low, low), np.maximum(self.high, high)

    @property
    def largest(self) -> float:
        """Largest magnitude."""
        return float(max(abs(self.low), abs(self.high)))

    def steps(self, grid: Grid) -> Any:
        """Returns the number of steps of a grid between the extremes."""
        return (np.float64(self.high) - self.low) / np.float64(grid.scale)


@dataclass(eq=False)
class Spans:
    """The extremes of each tensor that calibration observes.

    Attributes:
        placement: Where tensors are rounded.
        sources: (range, name of what computes a tensor on it) -> its extremes.
        channels: Index of an output of the model -> the extremes of each of its channels.
    """

    placement: Placement
    sources: dict[tuple[SharedGrid, str], Span] = field(default_factory=dict)
    channels: dict[int, Span] = field(default_factory=dict)

    def add_source(self, place: SharedGrid, name: str, low: Any, high: Any) -> None:
        """Counts the extremes of a tensor of one batch."""
        self.sources.setdefault((place, name), Span()).add(float(low), float(high))

    def add_channels(self, output: int, low: np.ndarray, high: np.ndarray) -> None:
        """Counts the extremes of the channels of an output of one batch."""
        self.channels.setdefault(output, Span()).add(low, high)

    def data_problems(self) -> list[str]:
        """Returns what makes ranges of inputs degenerate: a single value, or huge values."""
        inputs = {name: one for name, (one, entered) in self._named().items() if entered}
        alike = [_valued(name, one) for name, one in inputs.items() if one.low == one.high]
        huge = [_valued(name, one) for name, one in inputs.items() if one.low != one.high and one.largest > _HUGE]
        found = [_all_alike(alike)] if alike else []
        if huge:
            found.append(
                f"The calibration data reach huge values at {_listed(huge)}: a step of the grid is as large as most "
                "values. Check the scale of the data, and remove outliers."
            )
        return found

    def notes(self, grids: Mapping[SharedGrid, Grid]) -> list[str]:
        """Returns notes on tensors inside the model of one value, and on those that span few steps of a shared grid."""
        shared = dict(self._shared(grids))
        alike = [
            _valued(name, one) for name, (one, entered) in self._named().items() if one.low == one.high and not entered
        ]
        return [
            *([_all_alike(alike)] if alike else []),
            *shared.values(),
            *self._summed(grids),
            *self._outputs(grids, shared),
        ]

    def _named(self) -> dict[str, tuple[Span, bool]]:
        """Returns {name of what computes a tensor: its extremes, and whether it is an input}."""
        entered = {id(self.placement.written.get(id(one))) for one in keras.tree.flatten(self._graph.inputs)}
        return {name: (one, id(place) in entered and name == place.name) for (place, name), one in self.sources.items()}

    def _shared(self, grids: Mapping[SharedGrid, Grid]) -> Iterator[tuple[SharedGrid, str]]:
        by_range: dict[SharedGrid, list[tuple[str, Span]]] = {}
        for (place, name), span in self.sources.items():
            by_range.setdefault(place, []).append((name, span))
        joints = {id(place): unit.name for unit, place, _ in joined(self.placement)}
        for place, sources in by_range.items():
            narrow = [_counted(name, span.steps(grids[place])) for name, span in sources if _few(span, grids[place])]
            if narrow and id(place) in joints:
                yield (
                    place,
                    _few_steps(narrow, grids[place], f"that they share at {joints[id(place)]!r}", joints[id(place)]),
                )

    def _summed(self, grids: Mapping[SharedGrid, Grid]) -> Iterator[str]:
        on = places_of(self.placement)
        for units in self.placement.units.values():
            for unit in units:
                target = on.get(id(unit.outputs[0])) if unit.first.kind in _SUMS else None
                if target is None or target not in grids or target.signed is not None:
                    continue
                read = dict.fromkeys(filter(None, (on.get(id(tensor)) for tensor in unit.first.inputs)))
                spans = [(place.name, self._of(place)) for place in read if place is not target]
                narrow = [_counted(name, one.steps(grids[target])) for name, one in spans if _few(one, grids[target])]
                if narrow:
                    yield _few_steps(narrow, grids[target], f"of their sum {unit.name!r}", unit.name)

    def _outputs(self, grids: Mapping[SharedGrid, Grid], told: Collection[SharedGrid]) -> Iterator[str]:
        on, symbols = places_of(self.placement), keras.tree.flatten(self._graph.outputs)
        for index, span in self.channels.items():
            place = on.get(id(symbols[index]))
            if place is None or place in told or place not in grids or place.signed is not None:
                continue
            steps = span.steps(grids[place])
            narrow = [_counted(f"channel {at}", steps[at]) for at in np.flatnonzero((steps > 0) & (steps < _STEPS))]
            if narrow:
                yield _few_steps(narrow, grids[place], f"of the output {place.name!r}", place.name)

    def _of(self, place: SharedGrid) -> Span:
        found = Span()
        for (other, _), span in self.sources.items():
            if other is place:
                found.add(span.low, span.high)
        return found

    @property
    def _graph(self) -> Any:
        return self.placement.graphs.main


def joined(placement: Placement) -> Iterator[tuple[Unit, SharedGrid, list[str]]]:
    """Yields operations whose inputs share a grid: the unit, the range, and the names of what computes the inputs."""
    names = {id(one): str(getattr(one, "name", "input")) for one in keras.tree.flatten(placement.graphs.main.inputs)}
    on = places_of(placement)
    for units in placement.units.values():
        for unit in units:
            names |= {id(tensor): unit.name for tensor in unit.outputs}
            place = on.get(id(unit.outputs[0]))
            inputs = {
                id(one): one for one in unit.first.inputs if "float" in keras.backend.standardize_dtype(one.dtype)
            }
            # The results of one operation in several steps have one name.
            given = list(dict.fromkeys(names.get(one, "input") for one in inputs))
            if unit.rule.output == "shared" and place is not None and len(given) > 1:
                yield unit, place, given


def places_of(placement: Placement) -> dict[int, SharedGrid]:
    """Returns {id of a tensor: the range on whose grid it is}."""
    return {id(tensor): place for place in placement.ranges for tensor in place.tensors}


def _few(span: Span, grid: Grid) -> bool:
    return bool(0 < span.steps(grid) < _STEPS)


def _counted(name: str, steps: float) -> str:
    return f"{name} ({steps:.2g})"


def _few_steps(narrow: Sequence[str], grid: Grid, words: str, joint: str) -> str:
    finer = "use activations of 16 bits, " if grid.format.bits < 16 else ""
    remedies = f"{finer}give the model an output for each of them, or leave {joint!r} in floating point with `exclude`."
    return (
        f"Few steps of the grid {words} lie between the extremes of {_listed(narrow)}, so that few of their values are "
        f"told apart: {remedies}"
    )


def _valued(name: str, span: Span) -> str:
    return f"{name!r} ({span.high + 0.0:.4g})"


def _all_alike(names: Sequence[str]) -> str:
    return (
        f"On the calibration data all values are the same at {_listed(names)}: such a range says nothing about other "
        "data. Check the data."
    )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(names[:_LISTED])}{more}"
