"""Values for one weight: an initializer's distribution on the axes of its target, counted over the weights kept."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.fans import UnitMatrices, fans, unit_matrices
from prunekit.anatomy.targets import Target

# Standard deviation of a standard normal number given that it lies within [-2, 2].
CUT_DEVIATION = 0.87962566103423978


def draw(initializer: Any, target: Target, mask: np.ndarray | None, seed: int) -> Any:
    """A tensor of the target's shape and type, exactly zero where the mask is False.

    Args:
        initializer: A Keras initializer. Variance scaling and orthogonal ones are drawn on the target's axes, others
            are called; only its numbers are read, so it may serve many targets.
        target: The weight.
        mask: Boolean, the target's shape, True = kept; None keeps all.
        seed: Makes the values repeatable.
    """
    variable_type = keras.backend.standardize_dtype(target.variable.dtype)
    # Neither the decomposition nor the sums below exist, or are exact enough, in half precision.
    dtype = keras.backend.result_type(variable_type, "float32")
    call = type(initializer).__call__
    if call is keras.initializers.VarianceScaling.__call__:
        values = _noise(initializer.distribution, target.shape, dtype, seed) * _deviations(initializer, target, mask)
    elif call is keras.initializers.Orthogonal.__call__:
        values = initializer.gain * _restored(_orthogonal(unit_matrices(target), dtype, seed), target, mask)
    else:
        values = _with_seed(initializer, seed)(target.shape, dtype=dtype)
    if mask is not None:
        # Select, not multiply: 0 * -3 is -0.
        values = ops.where(mask, values, ops.zeros((), dtype=dtype))
    return ops.cast(values, variable_type)


def deviation(variable: Any, mask: np.ndarray | None) -> float:
    """Standard deviation of the weights kept; 0 where none is."""
    values = np.asarray(ops.convert_to_numpy(variable), np.float64)
    kept = values if mask is None else values[mask]
    return float(kept.std()) if kept.size else 0.0


def _noise(distribution: str, shape: tuple[int, ...], dtype: str, seed: int) -> Any:
    """Random numbers of mean 0 and standard deviation 1."""
    if distribution == "uniform":
        return keras.random.uniform(shape, -math.sqrt(3), math.sqrt(3), dtype=dtype, seed=seed)
    if distribution == "truncated_normal":
        return keras.random.truncated_normal(shape, stddev=1 / CUT_DEVIATION, dtype=dtype, seed=seed)
    return keras.random.normal(shape, dtype=dtype, seed=seed)


def _deviations(initializer: Any, target: Target, mask: np.ndarray | None) -> Any:
    """sqrt(scale / n) for each weight, n its fan in, its fan out or their mean."""
    fan_in, fan_out = fans(target, mask)
    counts = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
    # A unit of which nothing is kept has nothing to draw, and nothing to divide by.
    return np.sqrt(initializer.scale / np.maximum(counts, 1.0)).astype(_numpy_type(target))


def _numpy_type(target: Target) -> str:
    return "float64" if keras.backend.standardize_dtype(target.variable.dtype) == "float64" else "float32"


def _orthogonal(matrices: UnitMatrices, dtype: str, seed: int) -> Any:
    """A tensor of the matrices' shape: along `summed` and `outputs` orthonormal columns, or rows if those are fewer."""
    batch, rows, columns = (
        [matrices.shape[axis] for axis in axes] for axes in (matrices.parallel, matrices.summed, matrices.outputs)
    )
    lengths = math.prod(rows), math.prod(columns)
    noise = keras.random.normal((*batch, max(lengths), min(lengths)), dtype=dtype, seed=seed)
    q, r = ops.qr(noise)
    # Without the signs, q would not be uniform over the orthogonal matrices (Mezzadri 2007, arXiv:math-ph/0609050).
    q = q * ops.expand_dims(ops.sign(ops.diagonal(r, axis1=-2, axis2=-1)), -2)
    if lengths[0] < lengths[1]:
        q = ops.swapaxes(q, -2, -1)
    order = matrices.parallel + matrices.summed + matrices.outputs
    return ops.transpose(ops.reshape(q, (*batch, *rows, *columns)), np.argsort(order).tolist())


def _restored(values: Any, target: Target, mask: np.ndarray | None) -> Any:
    """The values in the target's shape; under a mask, each output unit's kept weights with the norm that all had."""
    if mask is None:
        return ops.reshape(values, target.shape)
    matrices = unit_matrices(target)
    squares, kept = ops.square(values), mask.reshape(matrices.shape)
    whole = ops.sum(squares, axis=matrices.summed, keepdims=True)
    left = ops.sum(ops.where(kept, squares, ops.zeros_like(squares)), axis=matrices.summed, keepdims=True)
    factor = ops.where(left > 0, ops.sqrt(whole / ops.where(left > 0, left, ops.ones_like(left))), 0.0)
    return ops.reshape(values * factor, target.shape)


def _with_seed(initializer: Any, seed: int) -> Any:
    """The same initializer with another seed; itself where it has none."""
    config = initializer.get_config() if isinstance(initializer, keras.initializers.Initializer) else {}
    return type(initializer).from_config(config | {"seed": seed}) if "seed" in config else initializer
