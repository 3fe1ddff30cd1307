"""choose_bits: chooses bits for each weight under a budget of bytes, or for a floor of a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, Unpack

from prunekit.anatomy.model_weights import check_built
from prunekit.core.layerwise import Progress
from prunekit.sparsity.arguments import positive, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.suggestions import check_names
from prunekit.techniques.quantize.after_training import quantized
from prunekit.techniques.quantize.bit_allocation import hull_path, least_error
from prunekit.techniques.quantize.bit_choice import BitChoice, Trial
from prunekit.techniques.quantize.bit_scan import (
    WeightLevels,
    costs_of,
    measured_errors,
    other_bytes,
    scanned_errors,
    weight_levels,
)
from prunekit.techniques.quantize.grids import FEW_BITS
from prunekit.techniques.quantize.options import Options, QuantizationOptions
from prunekit.techniques.quantize.preparation import Preparation

_OWN_OPTIONS = ("budget", "evaluate", "floor", "candidates", "scan", "memory", "progress")


def choose_bits(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    budget: int | None = None,
    evaluate: Callable[[Any], float] | None = None,
    floor: float | None = None,
    candidates: int | Sequence[int | None] = (4, 8),
    scan: Any = None,
    memory: float = 1e9,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> BitChoice:
    """Chooses bits for each weight of a trained model, for `pk.quantize(model, data, weights=choice.bits)`.

    One weight at a time is rounded to each number of bits, and the change of the model's outputs is measured. With a
    budget, the bits are those whose summed errors are least, exactly. With a floor, the weights with the largest errors
    for their bytes are given more bits, and floating point at last, until the quantized model reaches the floor: the
    returned choice was quantized with these options and evaluated. The model is not changed.

    The errors can be those of an earlier `pk.sensitivity(model, data, bits=(4, 8))`: several budgets need one scan.

    Args:
        model: A built Keras model.
        data: Calibration data, as for `pk.quantize`: some hundred examples of the training data.
        budget: Largest number of bytes of all weights of the model, those in floating point included.
        evaluate: Returns a metric of a model, larger = better; called while the model computes on integers. Measure on
            data that are neither trained nor tested on.
        floor: Least metric.
        candidates: Numbers of bits, 2 to 8, or one of them; with None a weight may stay in floating point under a
            budget. LiteRT stores up to 4 bits as 4, and up to 8 as 8, so that 2 and 3 bits save no bytes of a file.
        scan: A sensitivity.json file, a `SensitivityReport`, or its `to_dict()`, of a scan at these numbers of bits;
            None measures the errors on `data`.
        memory: Largest number of bytes of activations that are kept while weights are measured.
        progress: Told of each measured weight: (done, total, name).
        **options: As for `pk.quantize`, without `weights`.

    Raises:
        ValueError: Neither or both of budget and floor are given; the budget is below the bytes of the fewest bits; the
            model does not reach the floor in floating point, or with its activations alone rounded; the scan is not of
            these weights and numbers of bits; an option has a wrong value.
        TypeError: `model` is not a Keras 3 model; an option is unknown; `floor`, or what `evaluate` returns, is no
            number.

    Source: Shoham & Gersho 1988 (bits of several quantizers under a budget).
    """
    check_names(options, [*_OWN_OPTIONS, *(name for name in Options.__annotations__ if name != "weights")])
    levels = _levels(candidates, float_too=budget is None)
    if (budget is None) == (floor is None) or (floor is None) != (evaluate is None):
        raise ValueError(
            "Bits are chosen for a budget of bytes, or for a floor of what `evaluate` returns. Received: "
            f"budget={budget}, floor={floor} and evaluate={evaluate}."
        )
    most = None if budget is None else whole("budget", budget, 1, largest=None)
    least = None if floor is None else _metric_value("`floor`", floor)
    check_built(model)
    if data is None:
        raise ValueError("The errors of fewer bits are measured on calibration data. Received: data=None.")
    chosen, tell = QuantizationOptions(**options), progress or (lambda done, total, name: None)
    if chosen.full_integer and None in levels:
        raise ValueError(
            "With full_integer=True no weight stays in floating point, as it may for a floor or with None among the "
            f"candidates. Received: floor={floor} and candidates={candidates}. Pass a budget and bits."
        )
    preparation = Preparation(model, chosen, data)
    problem = None if most is None else budget_problem(preparation, levels, most)
    if problem is not None:
        raise ValueError(problem)
    numbers, most_memory = [bits for bits in levels if bits is not None], positive("memory", memory)
    if scan is None:
        errors = measured_errors(preparation, numbers, most_memory, tell)
    else:
        errors = scanned_errors(preparation, numbers, scan)
    weights = weight_levels(preparation, levels, errors)
    search = _Search(preparation, data, weights, tell)
    return search.within(most) if most is not None else search.reaching(least, evaluate)  # type: ignore[arg-type]


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
    remedy = ", or allow 4 bits with `candidates`" if min(bits or 32 for bits in levels) > FEW_BITS else ""
    return (
        f"With the fewest bits the weights of {preparation.model.name!r} have {least:,} bytes, {others:,} of them in "
        f"floating point. Received: budget={budget}. Allow more bytes, shrink the model first{remedy}."
    )


def _levels(candidates: int | Sequence[int | None], *, float_too: bool) -> tuple[int | None, ...]:
    candidates = (int(candidates),) if isinstance(candidates, Integral) else candidates
    if isinstance(candidates, str) or not isinstance(candidates, Iterable):
        raise TypeError(f"`candidates` are numbers of bits, such as (4, 8), or None. Received: {candidates!r}.")
    candidates = tuple(candidates)
    numbers = sorted({whole("candidates", bits) for bits in candidates if bits is not None})
    if not numbers or not all(2 <= bits <= 8 for bits in numbers):
        raise ValueError(f"`candidates` are numbers of bits, 2 to 8, or None. Received: {candidates!r}.")
    return (*numbers, None) if float_too or None in candidates else tuple(numbers)


def _evaluated(evaluate: Callable[[Any], float], model: Any) -> float:
    return _metric_value("What `evaluate` returns", evaluate(model))


def _metric_value(name: str, value: Any) -> float:
    try:
        found = float(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{name} is a metric, a number such as 0.98. Received: {value!r}.") from error
    if math.isnan(found):
        raise ValueError(f"{name} is a metric, a number such as 0.98. Received: NaN. Check the model and the data.")
    return found


class _Search:
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
            raise self._missed(trials[-1].metric, floor)
        return self._choice(path[least], floor=floor, trials=tuple(trials))

    def _missed(self, metric: float, floor: float) -> ValueError:
        """Returns the error for a floor that is not reached with all weights in floating point."""
        bits = self._options.activations
        integers = "" if bits is None else f" and activations of {bits} bits"
        finer = {None: "", 8: ", or pass activations=16 or activations=None", 16: ", or pass activations=None"}
        return ValueError(
            f"With all weights in floating point{integers} the metric of {self._model.name!r} is {metric:.6g}. "
            f"Received: floor={floor}. Lower the floor (in a recipe: allow a larger drop){finer[bits]}."
        )

    def _choice(self, chosen: Sequence[int], **known: Any) -> BitChoice:
        path = tuple((self._bytes(one), self._error(one)) for one in self._path) if known else ()
        return replace(self._empty, chosen=tuple(chosen), path=path, **known)

    def _bytes(self, chosen: Sequence[int]) -> int:
        return replace(self._empty, chosen=tuple(chosen)).bytes

    def _error(self, chosen: Sequence[int]) -> float:
        return sum(one.errors[at] for one, at in zip(self._weights, chosen, strict=True))

    def _metric(self, bits: dict[str, int | None], evaluate: Callable[[Any], float]) -> float:
        """Returns the metric of the model on integers; its weights are its own again afterwards."""
        model = self._model
        before = [(variable, array_of(variable).copy()) for variable in model.variables]
        try:
            found = quantized(model, replace(self._options, weights=bits), self._data)
            with found.simulating():
                return _evaluated(evaluate, model)
        finally:
            for variable, value in before:
                variable.assign(value)
