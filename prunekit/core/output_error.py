"""How far the outputs of a changed model are from those that it had, as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Probabilities are compared down to this one. Those of a softmax in float32 are above 1 by rounding.
_LEAST, _ROUNDING = 1e-9, 1e-5


def output_error(before: Sequence[np.ndarray], after: Sequence[np.ndarray]) -> float:
    """Returns the change of outputs, relative to how much they differ between examples; infinite if it is not finite.

    The root mean square change of each output, divided by the root mean square deviation from its mean over the
    examples; of several outputs, the largest. Probabilities are compared by their logits: where a model is sure of a
    class, a change of many logits hardly changes a probability.

    Args:
        before: The outputs, arrays of shape (examples, ...).
        after: Those of the changed model.
    """
    return max((_error(*pair) for pair in zip(before, after, strict=True)), default=0.0)


def _error(before: np.ndarray, after: np.ndarray) -> float:
    one, other = before.astype("float64"), after.astype("float64")
    if one.size and one.min() >= 0 and one.max() <= 1 + _ROUNDING:
        classes = one.ndim > 1 and one.shape[-1] > 1 and np.allclose(one.sum(axis=-1), 1, atol=1e-2)
        one, other = (_logits(each, classes=classes) for each in (one, other))
    deviation = float(np.square(one - one.mean(axis=0)).mean()) if one.size else 0.0
    change = float(np.square(other - one).mean()) if one.size else 0.0
    if not math.isfinite(change) or not math.isfinite(deviation):
        return math.inf
    return math.sqrt(change / deviation) if deviation else (math.inf if change else 0.0)


def _logits(values: np.ndarray, *, classes: bool) -> np.ndarray:
    if classes:
        found = np.log(np.maximum(values, _LEAST))
        return found - found.mean(axis=-1, keepdims=True)
    values = np.clip(values, _LEAST, 1 - _LEAST)
    return np.log(values) - np.log1p(-values)
