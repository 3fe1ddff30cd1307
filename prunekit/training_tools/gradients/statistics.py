"""Statistics of gradients over a training, accumulated on the device without storing any gradient."""

import functools
from dataclasses import dataclass
from typing import Any

import tensorflow as tf

from prunekit.core.runtime import backend
from prunekit.core.statistics.layer_observer import wide


@dataclass(frozen=True)
class GradientFigures:
    """Statistics of gradients, computed over the finite entries.

    Attributes:
        gradients: Number of gradients.
        numbers: Number of entries of all gradients.
        not_finite: Number of entries that were NaN or infinite.
        zeros: Fraction of entries that were exactly zero.
        mean: Mean.
        standard_deviation: Population standard deviation (divided by the count).
        root_mean_square: Root mean square.
        largest: Largest magnitude.
        example_norm: Mean over examples (rows of the first axis) of the L2 norm over all other axes.
        largest_example_norm: The largest L2 norm of an example.
    """

    gradients: int
    numbers: int
    not_finite: int
    zeros: float
    mean: float
    standard_deviation: float
    root_mean_square: float
    largest: float
    example_norm: float
    largest_example_norm: float


# Index of each figure in the state of a GradientStatistics.
_FIELDS = (
    "gradients numbers finite zeros mean squared_deviations largest examples example_norm largest_example_norm"
).split()


class GradientStatistics:
    """A function gradient -> the same gradient, for `intercepting`, that accumulates statistics of the gradients.

    The state is ten numbers on the device, updated inside the compiled step and copied to the host only by `read`.
    Means and deviations of a gradient are computed in at least float32, scaled so that squares neither overflow nor
    underflow; gradients are merged in float64. One object used at several layers accumulates over all of them.

    Raises:
        RuntimeError: Keras does not run on TensorFlow; the scope of a strategy with several replicas is active.

    Source: Chan, Golub and LeVeque 1979, "Updating formulae and a pairwise algorithm for computing sample variances",
        section 2, for the merging.
    """

    def __init__(self) -> None:
        backend.require_tensorflow("GradientStatistics")
        # In a strategy's scope the state would be created once per replica.
        backend.require_one_replica("GradientStatistics()", "Make it outside of the scope, and use it in the training.")
        self._state = tf.Variable(tf.zeros(len(_FIELDS), "float64"), trainable=False, name="gradient_statistics")

    def __call__(self, gradient: Any) -> Any:
        """Adds the gradient to the statistics and returns the gradient unchanged."""
        gradient = tf.convert_to_tensor(gradient)
        merged = _merged(self._state.read_value(), _figures_of(gradient))
        # Control dependency: inside a custom gradient TensorFlow would otherwise not run the assignment.
        with tf.control_dependencies([self._state.assign(merged)]):
            return tf.identity(gradient)

    def reset(self) -> None:
        """Resets the statistics to zero gradients."""
        self._state.assign(tf.zeros_like(self._state))

    def read(self) -> GradientFigures:
        """The statistics of all gradients since construction or the last `reset`.

        Raises:
            RuntimeError: There was no gradient yet.
        """
        state = dict(zip(_FIELDS, map(float, self._state.numpy()), strict=True))
        if not state["gradients"]:
            raise RuntimeError(
                "No statistics are available: no gradient has passed since the GradientStatistics was created or reset."
            )
        finite = max(state["finite"], 1.0)
        variance = state["squared_deviations"] / finite
        return GradientFigures(
            gradients=int(state["gradients"]),
            numbers=int(state["numbers"]),
            not_finite=int(state["numbers"] - state["finite"]),
            zeros=state["zeros"] / finite,
            mean=state["mean"],
            standard_deviation=variance**0.5,
            root_mean_square=(variance + state["mean"] ** 2) ** 0.5,
            largest=state["largest"],
            example_norm=state["example_norm"],
            largest_example_norm=state["largest_example_norm"],
        )


# Arithmetic ---------------------------------------------------------------------------------------------------------


def norms(values: Any, axes: Any) -> Any:
    """L2 norms over `axes`, kept with length 1; scaled so that squares neither overflow nor underflow."""
    scale = _scale(tf.reduce_max(tf.abs(values), axes, keepdims=True))
    return scale * tf.sqrt(tf.reduce_sum(tf.square(values / scale), axes, keepdims=True))


def _scale(largest: Any) -> Any:
    # The maximum over an empty gradient is -inf.
    return tf.where(largest > 0, largest, tf.ones_like(largest))


def _figures_of(gradient: Any) -> Any:
    """The state of a GradientStatistics after only this gradient."""
    values = wide(gradient)
    finite = tf.math.is_finite(values)
    # Select, not multiply: 0 * inf is NaN.
    values = tf.where(finite, values, tf.zeros_like(values))
    rows = tf.reshape(values, (-1, 1)) if values.shape.rank == 0 else values
    lengths = norms(rows, tuple(range(1, len(rows.shape))))
    largest = tf.reduce_max(tf.abs(values))
    scale = _scale(largest)
    scaled = values / scale
    one = functools.partial(tf.cast, dtype="float64")
    count, factor = one(tf.math.count_nonzero(finite)), one(scale)
    mean = tf.math.divide_no_nan(one(tf.reduce_sum(scaled)), count)
    deviations = tf.where(finite, scaled - tf.cast(mean, scaled.dtype), tf.zeros_like(scaled))
    figures = {
        "gradients": tf.ones((), "float64"),
        "numbers": one(tf.size(values, tf.int64)),
        "finite": count,
        "zeros": count - one(tf.math.count_nonzero(values)),
        "mean": mean * factor,
        "squared_deviations": one(tf.reduce_sum(tf.square(deviations))) * factor * factor,
        "largest": one(largest),
        "examples": one(tf.size(lengths, tf.int64)),
        "example_norm": tf.math.divide_no_nan(one(tf.reduce_sum(lengths)), one(tf.size(lengths, tf.int64))),
        "largest_example_norm": one(tf.reduce_max(lengths)),
    }
    return tf.stack([figures[name] for name in _FIELDS])


def _merged(state: Any, more: Any) -> Any:
    """The combined state of `state` and `more`."""
    a, b = (dict(zip(_FIELDS, tf.unstack(each), strict=True)) for each in (state, more))
    merged = {name: a[name] + b[name] for name in ("gradients", "numbers", "finite", "zeros", "examples")}
    apart = b["mean"] - a["mean"]
    share = tf.math.divide_no_nan(b["finite"], merged["finite"])
    merged["mean"] = a["mean"] + apart * share
    merged["squared_deviations"] = (
        a["squared_deviations"] + b["squared_deviations"] + tf.square(apart) * a["finite"] * share
    )
    share = tf.math.divide_no_nan(b["examples"], merged["examples"])
    merged["example_norm"] = a["example_norm"] + (b["example_norm"] - a["example_norm"]) * share
    for name in ("largest", "largest_example_norm"):
        # The maximum over an empty batch is -inf.
        merged[name] = tf.maximum(a[name], b[name])
    return tf.stack([merged[name] for name in _FIELDS])
