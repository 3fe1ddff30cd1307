"""choose_bits: chooses bits for each weight under a budget of bytes, or for a floor of a metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Unpack

from prunekit.anatomy.model_weights import check_built
from prunekit.core.layerwise import Progress
from prunekit.sparsity.arguments import positive, whole
from prunekit.sparsity.array_ops import array_of
from prunekit.suggestions import check_names
from prunekit.techniques.quantize.after_training import quantized
from prunekit.techniques.quantize.bit_allocation import hull_path, least_error
from prunekit.techniques.quantize.bit_choice import BitChoice, Trial
from prunekit.techniques.quantize.bit_scan import WeightLevels, weight_levels
from prunekit.techniques.quantize.options import Options, QuantizationOptions
from prunekit.techniques.quantize.preparation import Preparation

_FLOAT_BYTES = 4


def choose_bits(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    budget: int | None = None,
    evaluate: Callable[[Any], float] | None = None,
    floor: float | None = None,
    candidates: Sequence[int | None] = (4, 8),
    memory: float = 1e9,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> BitChoice:
    """Chooses bits for each weight of a trained model, for `pk.quantize(model, data, weights=choice.bits)`.

    One weight at a time is rounded to each number of bits, and the change of the model's outputs is measured. With a
    budget, the bits are those whose summed errors are least, exactly. With a floor, the weights with the largest errors
    for their bytes are given more bits, and floating point at last, until the quantized model reaches the floor: the
    returned choice was quantized with these options and evaluated. The model is not changed.

    Args:
        model: A built Keras model.
        data: Calibration data, as for `pk.quantize`: some hundred examples of the training data.
        budget: Largest number of bytes of all weights of the model, those in floating point included.
        evaluate: Returns a metric of a model, larger = better; called while the model computes on integers. Measure on
            data that are neither trained nor tested on.
        floor: Least metric.
        candidates: Numbers of bits, 2 to 8; with None a weight may stay in floating point under a budget. LiteRT stores
            up to 4 bits as 4, and up to 8 as 8, so that 2 and 3 bits save no bytes of a file.
        memory: Largest number of bytes of activations that are kept while weights are measured.
        progress: Told of each measured weight: (done, total, name).
        **options: As for `pk.quantize`, without `weights`.

    Raises:
        ValueError: Neither or both of budget and floor are given; the budget is below the bytes of the fewest bits; the
            model in floating point does not reach the floor; an option has a wrong value.
        TypeError: `model` is not a Keras 3 model; an option is unknown.

    Source: Shoham & Gersho 1988 (bits of several quantizers under a budget).
    """
    check_names(options, [name for name in Options.__annotations__ if name != "weights"])
    levels = _levels(candidates, float_too=budget is None)
    if (budget is None) == (floor is None) or (floor is None) != (evaluate is None):
        raise ValueError(
            "Bits are chosen for a budget of bytes, or for a floor of what `evaluate` returns. Received: "
            f"budget={budget}, floor={floor} and evaluate={evaluate}."
        )
    check_built(model)
    if data is None:
        raise ValueError("The errors of fewer bits are measured on calibration data. Received: data=None.")
    chosen = QuantizationOptions(**options)
    preparation = Preparation(model, chosen, data)
    weights = weight_levels(preparation, levels, positive("memory", memory), progress)
    search = _Search(model, data, chosen, weights)
    if budget is not None:
        return search.within(whole("budget", budget, 1, largest=None))
    return search.reaching(float(floor), evaluate)  # type: ignore[arg-type]


def _levels(candidates: Sequence[int | None], *, float_too: bool) -> tuple[int | None, ...]:
    numbers = sorted({whole("candidates", bits) for bits in candidates if bits is not None})
    if not numbers or not all(2 <= bits <= 8 for bits in numbers):
        raise ValueError(f"`candidates` are numbers of bits, 2 to 8, or None. Received: {candidates!r}.")
    return (*numbers, None) if float_too or None in candidates else tuple(numbers)


class _Search:
    """Chooses among the levels of the weights of a model."""

    def __init__(self, model: Any, data: Any, options: QuantizationOptions, weights: Sequence[WeightLevels]):
        self._model, self._data, self._options, self._weights = model, data, options, tuple(weights)
        self._entries = [one.options for one in weights]
        self._path = hull_path(self._entries)
        others = int(model.count_params()) - sum(math.prod(one.shape) for one in weights)
        self._empty = BitChoice(model.name, self._weights, (), _FLOAT_BYTES * others, ())

    def within(self, budget: int) -> BitChoice:
        """Returns the choice with the least error within a budget."""
        least, others = self._choice(self._path[0]).bytes, self._empty.other_bytes
        if budget < least:
            raise ValueError(
                f"With the fewest bits the weights of {self._model.name!r} have {least:,} bytes, {others:,} of them in "
                f"floating point. Received: budget={budget}. Prune or shrink the model first, or allow fewer bits with "
                "`candidates`."
            )
        return self._choice(least_error(self._entries, budget - others), budget=budget)

    def reaching(self, floor: float, evaluate: Callable[[Any], float]) -> BitChoice:
        """Returns the first choice on the path that reaches a floor, by bisection; it was evaluated."""
        found: dict[int, Trial] = {}

        def reaches(at: int) -> bool:
            choice = self._choice(self._path[at])
            found[at] = Trial(choice.bytes, self._metric(choice.bits, evaluate))
            return found[at].metric >= floor

        fails, holds = 0, len(self._path) - 1
        if not reaches(holds):
            raise ValueError(
                f"The metric of {self._model.name!r} in floating point is {found[holds].metric:.6g}. Received: "
                f"floor={floor}. Lower the floor."
            )
        if holds and reaches(fails):
            holds = fails
        while holds - fails > 1:
            middle = (fails + holds) // 2
            if reaches(middle):
                holds = middle
            else:
                fails = middle
        return self._choice(self._path[holds], floor=floor, trials=tuple(found.values()))

    def _choice(self, chosen: Sequence[int], **known: Any) -> BitChoice:
        path = tuple((self._bytes(one), self._error(one)) for one in self._path) if known else ()
        return replace(self._empty, chosen=tuple(chosen), path=path, **known)

    def _bytes(self, chosen: Sequence[int]) -> int:
        return self._empty.other_bytes + sum(one.bytes[at] for one, at in zip(self._weights, chosen, strict=True))

    def _error(self, chosen: Sequence[int]) -> float:
        return sum(one.errors[at] for one, at in zip(self._weights, chosen, strict=True))

    def _metric(self, bits: dict[str, int | None], evaluate: Callable[[Any], float]) -> float:
        """Returns the metric of the model on integers; its weights are its own again afterwards."""
        model = self._model
        if all(one is None for one in bits.values()):
            return float(evaluate(model))
        before = [(variable, array_of(variable).copy()) for variable in model.variables]
        try:
            found = quantized(model, replace(self._options, weights=bits), self._data)
            with found.simulating():
                return float(evaluate(model))
        finally:
            for variable, value in before:
                variable.assign(value)
