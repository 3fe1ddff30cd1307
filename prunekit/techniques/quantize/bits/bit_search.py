"""Searches bits for each weight: the least error under a budget of bytes, or the fewest bytes above a floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from prunekit.core.layerwise.layerwise import Progress
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.bits.bit_allocation import hull_path, least_error
from prunekit.techniques.quantize.bits.bit_choice import BitChoice, Trial
from prunekit.techniques.quantize.bits.bit_scan import (
    WeightLevels,
    costs_of,
    other_bytes,
    weight_levels,
)
from prunekit.techniques.quantize.grids.grids import FEW_BITS
from prunekit.techniques.quantize.options import Bits
from prunekit.techniques.quantize.preparation import Preparation


def budget_problem(preparation: Preparation, levels: Sequence[int | None], budget: int) -> str | None:
    """Returns why the fewest bits exceed a budget, and what to do; None if they do not.

    Args:
        preparation: Model and options; neither its data nor the values of the weights are read.
        levels: Numbers of bits, ascending; None = floating point.
        budget: Largest number of bytes of all weights.
    """
    options, fixed = costs_of(weight_levels(preparation, levels, {}))
    others = other_bytes(preparation)
    least = others + fixed + sum(int(one.costs.min()) for one in options)
    if budget >= least:
        return None
    # A file stores fewer than 4 bits as 4.
    remedy = ", allow 4 among `bits`," if min(bits or 32 for bits in levels) > FEW_BITS else ""
    return (
        f"With the fewest bits the weights of {preparation.model.name!r} have {least:,} bytes, {others:,} of them "
        f"biases and what else has no integers. Received: budget={budget}. Allow more bytes{remedy} or shrink the "
        "model first."
    )


def _evaluated(evaluate: Callable[[Any], float], model: Any) -> float:
    return metric_value("What `evaluate` returns", evaluate(model))


def metric_value(name: str, value: Any) -> float:
    """Returns a metric as a number.

    Raises:
        TypeError: The value is no number.
        ValueError: It is NaN.
    """
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a metric, a number such as 0.98. Received: {value!r}.") from error
    if math.isnan(found):
        raise ValueError(f"{name} is a metric, a number such as 0.98. Received: NaN. Check the model and the data.")
    return found


class BitSearch:
    """Chooses among the levels of the weights of a model."""

    def __init__(self, preparation: Preparation, data: Any, weights: Sequence[WeightLevels], progress: Progress):
        self._model, self._options, self._data = preparation.model, preparation.options, data
        self._weights, self._tell = tuple(weights), progress
        self._entries, self._fixed = costs_of(weights)
        self._path = hull_path(self._entries)
        self._empty = BitChoice(self._model.name, self._weights, (), other_bytes(preparation), ())

    def within(self, budget: int) -> BitChoice:
        """Returns the choice with the least error within a budget."""
        rest = budget - self._empty.other_bytes - self._fixed
        return self._choice(least_error(self._entries, rest), budget=budget)

    def reaching(self, floor: float, evaluate: Callable[[Any], float]) -> BitChoice:
        """Returns the first choice on the path that reaches a floor, by bisection; it was evaluated."""
        # A weight that bits do not change has no step to floating point on the path.
        whole = [len(one.bits) - 1 for one in self._weights]
        path = self._path if self._path[-1] == whole else [*self._path, whole]
        last = len(path) - 1
        floats = Trial(self._bytes(whole), _evaluated(evaluate, self._model))
        if not floats.metric >= floor:
            raise ValueError(
                f"The metric of {self._model.name!r} in floating point is {floats.metric:.6g}. Received: "
                f"floor={floor}. Lower the floor."
            )
        trials, total = [floats], 2 + last.bit_length()

        def holds(place: int) -> bool:
            choice = self._choice(path[place])
            self._tell(len(trials), total, f"choice of {choice.bytes:,} bytes")
            trials.append(Trial(choice.bytes, self._metric(choice.bits, evaluate)))
            return trials[-1].metric >= floor

        # The choice before the first is none. The last one counts as one that holds until it is the only one left.
        below, least, middle = -1, last, 0
        while least - below > 1:
            if holds(middle):
                least = middle
            else:
                below = middle
            middle = (below + least) // 2
        if least == last and not holds(last):
            raise self._out_of_reach(trials[-1].metric, floor)
        return self._choice(path[least], floor=floor, trials=tuple(trials))

    def _out_of_reach(self, metric: float, floor: float) -> ValueError:
        """Returns the error for a floor that is not reached with all weights in floating point."""
        bits = self._options.activation_width
        integers = "" if bits is None else f" and activations of {bits} bits"
        others = {None: "", 8: '=16 or activation_bits="float"', 16: '="float"'}[bits]
        finer = f", or pass activation_bits{others}" if others else ""
        return ValueError(
            f"With all weights in floating point{integers} the metric of {self._model.name!r} is {metric:.6g}. "
            f"Received: floor={floor}. Lower the floor (in a recipe: allow a larger drop){finer}."
        )

    def _choice(self, chosen: Sequence[int], **known: Any) -> BitChoice:
        path = tuple((self._bytes(one), self._error(one)) for one in self._path) if known else ()
        return replace(self._empty, chosen=tuple(chosen), path=path, **known)

    def _bytes(self, chosen: Sequence[int]) -> int:
        return replace(self._empty, chosen=tuple(chosen)).bytes

    def _error(self, chosen: Sequence[int]) -> float:
        return sum(one.errors[at] for one, at in zip(self._weights, chosen, strict=True))

    def _metric(self, bits: Bits, evaluate: Callable[[Any], float]) -> float:
        """Returns the metric of the model on integers; its weights are its own again afterwards."""
        model = self._model
        before = [(variable, array_of(variable).copy()) for variable in model.variables]
        try:
            found = quantize_model(model, replace(self._options, bits=bits), self._data)
            with found.simulating():
                return _evaluated(evaluate, model)
        finally:
            for variable, value in before:
                variable.assign(value)
