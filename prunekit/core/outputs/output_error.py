"""How far the outputs of a changed model are from those that it had, as one number."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Least probability that is told from zero. Those of a softmax in float32 are above 1 by rounding.
_LEAST, _ROUNDING = 1e-9, 1e-5
# Least squared deviation of an example, relative to the mean over the examples.
_LEAST_DEVIATION = 0.1


def output_error(before: Sequence[np.ndarray], after: Sequence[np.ndarray], *, least: float = _LEAST) -> float:
    """Returns the change of outputs, relative to how they differ between examples; infinite if it is not finite.

    The mean square change of each example's output is divided by its mean square deviation from the mean output, so
    that examples of large outputs do not decide alone; the error is the root of the mean over the examples, and of
    several outputs the largest. Probabilities are compared by their logits: where a model is sure of a class, a change
    of many logits hardly changes a probability.

    Args:
        before: The outputs, arrays of shape (examples, ...).
        after: Those of the changed model.
        least: Probability from which smaller ones are not told apart.
    """
    return max((_error(*pair, least) for pair in zip(before, after, strict=True)), default=0.0)


def _error(before: np.ndarray, after: np.ndarray, least: float) -> float:
    if not before.size:
        return 0.0
    one, other = before.astype("float64"), after.astype("float64")
    if one.min() >= 0 and one.max() <= 1 + _ROUNDING:
        classes = one.ndim > 1 and one.shape[-1] > 1 and np.allclose(one.sum(axis=-1), 1, atol=1e-2)
        one, other = (_logits(each, least, classes=classes) for each in (one, other))
    axes = tuple(range(1, one.ndim))
    change = np.square(other - one).mean(axis=axes)
    deviation = np.square(one - one.mean(axis=0)).mean(axis=axes)
    floor = _LEAST_DEVIATION * float(deviation.mean())
    if not np.isfinite(change).all() or not math.isfinite(floor):
        return math.inf
    if not floor:
        return math.inf if change.any() else 0.0
    return math.sqrt(float((change / np.maximum(deviation, floor)).mean()))


def _logits(values: np.ndarray, least: float, *, classes: bool) -> np.ndarray:
    if classes:
        found = np.log(np.maximum(values, least))
        return found - found.mean(axis=-1, keepdims=True)
    values = np.clip(values, least, 1 - least)
    return np.log(values) - np.log1p(-values)
