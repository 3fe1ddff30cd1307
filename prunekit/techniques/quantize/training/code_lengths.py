"""Bits that entropy coding takes for weights on grids, as a loss that is differentiable."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from keras import ops

from prunekit.techniques.quantize.grids.grids import IntegerFormat

# Up to this largest code, one sum for each code is faster than sums by segments.
_FEW = 7


def mean_bits(steps: Any, form: IntegerFormat) -> Any:
    """Returns the bits that an ideal coder takes for each of some codes on average, a scalar tensor.

    A weight between two codes counts to both, by its nearness: for weights on their grids this is the entropy of the
    codes, and between them its slope is the difference of the lengths of the codes.

    Args:
        steps: Weights divided by their scales, float32, any shape; those beyond the last codes count to these.
        form: The codes, symmetric.

    Source: the rate term of Oktay et al. 2020, arXiv:1906.06624, with the frequencies of the weights themselves.
    """
    last = form.highest
    steps = ops.clip(ops.reshape(steps, (-1,)), -last, last)
    values = ops.stop_gradient(steps)
    below = ops.clip(ops.floor(values), -last, last - 1)
    places = ops.cast(below, "int32") + last
    if last <= _FEW:
        counts = ops.stack([ops.sum(ops.relu(1.0 - ops.abs(values - code))) for code in range(-last, last + 1)])
    else:
        share, count = values - below, 2 * last + 1
        counts = ops.segment_sum(1.0 - share, places, count) + ops.segment_sum(share, places + 1, count)
    shares = counts / ops.sum(counts)
    # The limit of p log p is 0; a code that no weight is near has no slope.
    logarithms = ops.log2(ops.where(shares > 0, shares, 1.0))
    # The slopes by hand: differentiated, the counts would take four times as long.
    line = ops.mean(steps * ops.take(logarithms[:-1] - logarithms[1:], places))
    return line - ops.stop_gradient(line) - ops.sum(shares * logarithms)


class BitPrice:
    """A regularizer of Keras: what the bits of a weight on its grid cost, beside what its own regularizer does.

    Args:
        price: Loss for one bit more in each entry.
        steps_of: Returns the weight divided by its scales.
        form: Its codes.
        inner: The weight's own regularizer, or None.
    """

    def __init__(self, price: float, steps_of: Callable[[Any], Any], form: IntegerFormat, inner: Any):
        self._price, self._steps_of, self._form, self._inner = price, steps_of, form, inner

    def __call__(self, value: Any) -> Any:
        """Returns the loss of a value of the weight, a scalar tensor."""
        steps = self._steps_of(ops.cast(ops.convert_to_tensor(value), "float32"))
        bits = self._price * mean_bits(steps, self._form)
        return bits if self._inner is None else bits + ops.cast(self._inner(value), bits.dtype)
