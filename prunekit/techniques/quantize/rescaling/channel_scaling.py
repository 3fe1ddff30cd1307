"""Multiplies the channels of a tensor between layers by positive factors, without a change of the model's outputs.

The weights that compute a channel are multiplied by its factor, and the weights that read the channel are divided by
it. Between the two may be ReLU, pooling and other layers that commute with positive factors of channels.

Source: Nagel et al. 2019, arXiv:1906.04721, section 4.1 (scaling equivariance of piecewise linear activations).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import GraphCall
from prunekit.anatomy.layers.linear_kinds import (
    is_linear_kind,
    is_table,
    kernel_names,
    outputs_shape,
    scale_and_shift,
)
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.placement.units import Unit

# Returns the present values of a variable.
Values = Callable[[Any], np.ndarray]


@dataclass(frozen=True, eq=False)
class ChannelWeight:
    """A weight whose entries belong to channels.

    Attributes:
        variable: The weight.
        channels: Channel of each entry; broadcasts against the weight.
    """

    variable: Any
    channels: np.ndarray

    def spread(self, factors: np.ndarray) -> np.ndarray:
        """Returns one number for each channel so that it broadcasts against the weight."""
        return factors[self.channels]

    def largest(self, values: np.ndarray, count: int) -> np.ndarray:
        """Returns the largest magnitude in each channel, shape (count,); 0 for a channel without entries.

        Args:
            values: Array of the weight's shape.
            count: Number of channels.
        """
        shape = (1,) * (values.ndim - self.channels.ndim) + self.channels.shape
        alone = tuple(axis for axis, length in enumerate(shape) if length == 1)
        found = np.abs(values).max(axis=alone, keepdims=True, initial=0.0)
        result = np.zeros(count)
        np.maximum.at(result, self.channels.ravel(), np.broadcast_to(found, shape).ravel())
        return result


@dataclass(frozen=True, eq=False)
class ChannelScaling:
    """A tensor whose channels can be multiplied by positive factors.

    Attributes:
        producer: The unit that computes the tensor: a linear layer, a normalization or a table.
        readers: The unit of each kernel in `kernels`, which reads the tensor directly or through layers that commute
            with the factors; a Bidirectional is there twice.
        channels: Number of channels.
        written: The weights of the producer that are multiplied by the factors: kernel and bias, gamma and beta of a
            normalization, or a table.
        kernels: The kernels that multiply the tensor, which are divided by the factors.
    """

    producer: Unit
    readers: tuple[Unit, ...]
    channels: int
    written: tuple[ChannelWeight, ...]
    kernels: tuple[ChannelWeight, ...]

    @property
    def is_half(self) -> bool:
        """True if a weight or a computation is in float16, whose numbers end at 65504."""
        layers = [call.operation for unit in (self.producer, *self.readers) for call in unit.calls]
        variables = [one.variable for one in (*self.written, *self.kernels)]
        dtypes = {keras.backend.standardize_dtype(variable.dtype) for variable in variables}
        return "float16" in dtypes | {str(getattr(layer, "compute_dtype", "")) for layer in layers}


def wide_value(variable: Any) -> np.ndarray:
    """Returns the present values of a variable, float64."""
    return np.asarray(array_of(variable), "float64")


def rescale(scaling: ChannelScaling, factors: np.ndarray) -> list[tuple[Any, np.ndarray]]:
    """Returns the weights with which the producer's outputs are multiplied by factors; those of its readers stay.

    Zeros stay zeros. Batch statistics, slopes of PReLU and states of optimizers stay as they are.

    Args:
        scaling: The tensor.
        factors: Finite factors above zero, shape (channels,).

    Returns:
        Pairs (variable, new values), in float32, or in float64 for variables in float64.

    Raises:
        ValueError: The shape differs, or a factor is not finite or not above zero.
    """
    return storable(rescaled(scaling, factors, wide_value))


def rescaled(scaling: ChannelScaling, factors: np.ndarray, value: Values) -> list[tuple[Any, np.ndarray]]:
    """Returns the pairs of `rescale` in float64.

    Args:
        scaling: The tensor.
        factors: Finite factors above zero, shape (channels,).
        value: Returns the values of a variable that are multiplied, for scalings that are applied one after the other.

    Raises:
        ValueError: The shape differs, or a factor is not finite or not above zero.
    """
    factors = np.asarray(factors, "float64")
    if factors.shape != (scaling.channels,) or not (np.isfinite(factors) & (factors > 0)).all():
        raise ValueError(
            f"{scaling.producer.name} needs {scaling.channels} finite factors above zero. Received: factors of shape "
            f"{factors.shape}, from {factors.min(initial=np.inf):g} to {factors.max(initial=-np.inf):g}."
        )
    written = [(one.variable, value(one.variable) * one.spread(factors)) for one in scaling.written]
    return written + [(one.variable, value(one.variable) / one.spread(factors)) for one in scaling.kernels]


def storable(pairs: Sequence[tuple[Any, np.ndarray]]) -> list[tuple[Any, np.ndarray]]:
    """Returns pairs (variable, values) in float32, or in float64 for variables in float64."""
    wide = "float64"
    return [
        (one, values.astype(wide if keras.backend.standardize_dtype(one.dtype) == wide else "float32"))
        for one, values in pairs
    ]


def all_rescaled(scalings: Sequence[ChannelScaling], total: Sequence[np.ndarray]) -> list[tuple[Any, np.ndarray]]:
    """Returns the weights that factors other than 1 change, with their new values in float64.

    Args:
        scalings: Tensors of one model.
        total: Factors of the channels of each tensor.
    """
    found: dict[int, tuple[Any, np.ndarray]] = {}

    def value(variable: Any) -> np.ndarray:
        return found[id(variable)][1] if id(variable) in found else wide_value(variable)

    for scaling, factors in zip(scalings, total, strict=True):
        if (factors != 1.0).any():
            found |= {id(pair[0]): pair for pair in rescaled(scaling, factors, value)}
    return list(found.values())


def output_kernel(call: GraphCall) -> ChannelWeight | None:
    """Returns the kernel of a linear layer, or a table, by output channels.

    None for other layers, and if the last output axis is not in the kernel.
    """
    layer = call.operation
    if is_table(layer):
        return ChannelWeight(layer.embeddings, np.arange(layer.output_dim))
    if not is_linear_kind(layer):
        return None
    kernel = getattr(layer, kernel_names(layer)[1])
    shape = outputs_shape(layer, kernel.shape)
    return ChannelWeight(kernel, np.arange(math.prod(shape)).reshape(shape)) if shape else None


def folded_kernel(unit: Unit, weight: ChannelWeight, value: Values) -> np.ndarray:
    """Returns a kernel of a unit, multiplied by the factors of the batch normalization that is folded into it.

    Args:
        unit: The unit of the kernel.
        weight: The kernel.
        value: Returns the values of a variable.
    """
    values, norm, kernel = value(weight.variable), unit.normalization, output_kernel(unit.first)
    if norm is None or kernel is None or kernel.variable is not weight.variable:
        return values
    scale, _ = scale_and_shift(norm.operation, lambda name: value(getattr(norm.operation, name)))
    return values * kernel.spread(scale)
