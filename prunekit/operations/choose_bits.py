"""choose_bits: chooses bits for each weight under a budget of bytes, or for a floor of a metric."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from numbers import Integral
from typing import Any, Literal, Unpack

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.layerwise.layerwise import Progress
from prunekit.keyword_options import keyword_options
from prunekit.sparsity.arguments import MEMORY, check_functions, number_of_bytes, whole
from prunekit.techniques.quantize.bits.bit_choice import BitChoice
from prunekit.techniques.quantize.bits.bit_scan import (
    measured_errors,
    scanned_errors,
    weight_levels,
)
from prunekit.techniques.quantize.bits.bit_search import BitSearch, budget_problem, metric_value
from prunekit.techniques.quantize.options import FLOAT, FORMER, QuantizationOptions, RoundingKeywords
from prunekit.techniques.quantize.preparation import Preparation


@keyword_options(QuantizationOptions, RoundingKeywords, FORMER)
def choose_bits(  # noqa: PLR0913
    model: Any,
    data: Any,
    *,
    budget: int | None = None,
    evaluate: Callable[[Any], float] | None = None,
    floor: float | None = None,
    bits: int | Sequence[int | Literal["float"]] = (4, 8),
    scan: Any = None,
    memory: float | str = MEMORY,
    progress: Progress | None = None,
    **options: Unpack[RoundingKeywords],
) -> BitChoice:
    """Chooses bits for each weight of a trained model, for `pk.quantize(model, data, bits=choice.bits)`.

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
        bits: Numbers of bits to choose from, 2 to 8, or one of them; with "float" a weight may stay in floating point
            under a budget. LiteRT stores up to 4 bits as 4, and up to 8 as 8, so that 2 and 3 bits save no bytes of a
            file.
        scan: A sensitivity.json file, a `SensitivityReport`, or its `to_dict()`, of a scan at these numbers of bits;
            None measures the errors on `data`.
        memory: Largest number of bytes of activations that are kept while weights are measured.
        progress: Told of each measured weight: (done, total, name).
        **options: As for `pk.quantize`, without `bits`.

    Raises:
        ValueError: Neither or both of budget and floor are given; the budget is below the bytes of the fewest bits; the
            model does not reach the floor in floating point, or with its activations alone rounded; the scan is not of
            these weights and numbers of bits; an option has a wrong value.
        TypeError: `model` is not a Keras 3 model; an option is unknown; `floor`, or what `evaluate` returns, is no
            number.

    Source: Shoham & Gersho 1988 (bits of several quantizers under a budget).
    """
    check_functions(evaluate=evaluate, progress=progress)
    levels = _levels(bits, float_too=budget is None)
    if (budget is None) == (floor is None) or (floor is None) != (evaluate is None):
        raise ValueError(
            "Bits are chosen for a budget of bytes, or for a floor of what `evaluate` returns. Received: "
            f"budget={budget}, floor={floor} and evaluate={evaluate}."
        )
    most = None if budget is None else whole("budget", budget, 1, largest=None)
    least = None if floor is None else metric_value("`floor`", floor)
    check_built(model)
    if data is None:
        raise ValueError("The errors of fewer bits are measured on calibration data. Received: data=None.")
    chosen, tell = QuantizationOptions(**options), progress or (lambda done, total, name: None)
    if chosen.full_integer and None in levels:
        raise ValueError(
            'With full_integer=True no weight stays in floating point, as it may for a floor or with "float" among '
            f"the bits. Received: floor={floor} and bits={bits}. Pass a budget and bits."
        )
    preparation = Preparation(model, chosen, data)
    problem = None if most is None else budget_problem(preparation, levels, most)
    if problem is not None:
        raise ValueError(problem)
    numbers, most_memory = [level for level in levels if level is not None], number_of_bytes("memory", memory)
    if scan is None:
        errors = measured_errors(preparation, numbers, most_memory, tell)
    else:
        errors = scanned_errors(preparation, numbers, scan)
    weights = weight_levels(preparation, levels, errors)
    search = BitSearch(preparation, data, weights, tell)
    return search.within(most) if most is not None else search.reaching(least, evaluate)  # type: ignore[arg-type]


def _levels(bits: Any, *, float_too: bool) -> tuple[int | None, ...]:
    """Returns the numbers of bits in ascending order, and None if a weight may stay in floating point."""
    bits = (int(bits),) if isinstance(bits, Integral) else bits
    if isinstance(bits, str) or not isinstance(bits, Iterable):
        raise TypeError(f'`bits` are numbers of bits, such as (4, 8), or "float". Received: {bits!r}.')
    bits = tuple(bits)
    if None in bits:
        raise TypeError(f'A weight that may stay in floating point has "float" among its `bits`. Received: {bits!r}.')
    numbers = sorted({whole("bits", one) for one in bits if one != FLOAT})
    if not numbers or not all(2 <= one <= 8 for one in numbers):
        raise ValueError(f'`bits` are numbers of bits, 2 to 8, or "float". Received: {bits!r}.')
    return (*numbers, None) if float_too or FLOAT in bits else tuple(numbers)
