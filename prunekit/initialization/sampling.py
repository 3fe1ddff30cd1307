"""Draws values for one weight from an initializer's distribution, with fans counted over the kept weights."""

from __future__ import annotations

import math
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.fans import UnitMatrices, fans, unit_matrices
from prunekit.anatomy.layers.targets import Target
from prunekit.sparsity.array_ops import array_of

# Standard deviation of the standard normal distribution truncated to [-2, 2].
CUT_DEVIATION = 0.87962566103423978


def draw(initializer: Any, target: Target, mask: np.ndarray | None, seed: int) -> Any:
    """A tensor of the target's shape and type, exactly zero where the mask is False.

    Args:
        initializer: A Keras initializer. Variance-scaling and orthogonal initializers are evaluated on the target's
            axes, all others are called. `initializer` is not modified, so many targets can share it.
        target: The weight.
        mask: Boolean, the target's shape, True = kept; None keeps all entries.
        seed: Seed of the random numbers.
    """
    variable_type = keras.backend.standardize_dtype(target.variable.dtype)
    # At least float32: half precision has no QR decomposition, and its sums are not exact enough.
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
    """Standard deviation of the kept weights; 0 if the mask keeps no weight."""
    values = np.asarray(array_of(variable), np.float64)
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
    """sqrt(scale / n) for each weight, where n is its fan in, its fan out or their mean."""
    fan_in, fan_out = fans(target, mask)
    counts = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[initializer.mode]
    # maximum: avoids a division by zero for a unit without kept weights.
    return np.sqrt(initializer.scale / np.maximum(counts, 1.0)).astype(_numpy_type(target))


def _numpy_type(target: Target) -> str:
    return "float64" if keras.backend.standardize_dtype(target.variable.dtype) == "float64" else "float32"


def _orthogonal(matrices: UnitMatrices, dtype: str, seed: int) -> Any:
    """A tensor of the matrices' shape with orthonormal columns along `summed` x `outputs`, or rows if fewer."""
    batch, rows, columns = (
        [matrices.shape[axis] for axis in axes] for axes in (matrices.parallel, matrices.summed, matrices.outputs)
    )
    lengths = math.prod(rows), math.prod(columns)
    noise = keras.random.normal((*batch, max(lengths), min(lengths)), dtype=dtype, seed=seed)
    q, r = ops.qr(noise)
    # Without the signs, q is not uniform over the orthogonal matrices (Mezzadri 2007, arXiv:math-ph/0609050).
    q = q * ops.expand_dims(ops.sign(ops.diagonal(r, axis1=-2, axis2=-1)), -2)
    if lengths[0] < lengths[1]:
        q = ops.swapaxes(q, -2, -1)
    order = matrices.parallel + matrices.summed + matrices.outputs
    return ops.transpose(ops.reshape(q, (*batch, *rows, *columns)), np.argsort(order).tolist())


def _restored(values: Any, target: Target, mask: np.ndarray | None) -> Any:
    """The values in the target's shape; rescales each output unit's kept weights to the norm of all its weights."""
    if mask is None:
        return ops.reshape(values, target.shape)
    matrices = unit_matrices(target)
    squares, kept = ops.square(values), mask.reshape(matrices.shape)
    whole = ops.sum(squares, axis=matrices.summed, keepdims=True)
    left = ops.sum(ops.where(kept, squares, ops.zeros_like(squares)), axis=matrices.summed, keepdims=True)
    factor = ops.where(left > 0, ops.sqrt(whole / ops.where(left > 0, left, ops.ones_like(left))), 0.0)
    return ops.reshape(values * factor, target.shape)


def _with_seed(initializer: Any, seed: int) -> Any:
    """A copy of the initializer with the seed `seed`; the initializer itself if it has no seed."""
    config = initializer.get_config() if isinstance(initializer, keras.initializers.Initializer) else {}
    return type(initializer).from_config(config | {"seed": seed}) if "seed" in config else initializer
