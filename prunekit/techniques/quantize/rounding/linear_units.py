"""Runs a Dense or convolution layer with rounded weights, and the batch normalization that is folded into it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from keras import ops

from prunekit.anatomy.layers.linear_kinds import (
    SEPARABLE,
    channel_axis,
    is_linear,
    kernel_names,
    outputs_shape,
    scale_and_shift,
)
from prunekit.core.runtime.patching import shadowed
from prunekit.core.runtime.variable_values import full_value, with_values
from prunekit.techniques.quantize.placement.form_operations import GateProducts
from prunekit.techniques.quantize.placement.units import Unit
from prunekit.techniques.quantize.rounding.rounding import Rounding, activated


@dataclass(frozen=True, eq=False)
class _Fold:
    """A batch normalization with moving statistics, which is folded into a layer's weights.

    Attributes:
        factor: Factors of the output channels.
        shift: What is added after that.
    """

    factor: Any
    shift: Any


def linear_results(
    unit: Unit, rounding: Rounding, args: tuple[Any, ...], kwargs: dict[str, Any], context: dict[str, Any]
) -> Any:
    """Returns the outputs of a layer after its activation, or after its batch normalization.

    Each output channel of a kernel has a scale of its own, so the file's kernel, which is multiplied by the factor of
    the batch normalization, is the rounded kernel times that factor. With batch statistics the layer computes with the
    rounded kernel alone, and the batch normalization runs as always: the moving statistics stay those of the layer's
    outputs.

    Args:
        unit: A unit whose first call is that of the layer.
        rounding: What is done with tensors and weights.
        args: Arguments of the layer.
        kwargs: Keyword arguments of the layer.
        context: `training` and other arguments of the model's call.

    Source: Krishnamoorthi 2018, arXiv:1806.08342, section 3.2.2 (folding with batch statistics).
    """
    layer, norm = unit.first.operation, unit.normalization
    of_batch = norm is not None and bool(context.get("training")) and norm.operation.trainable
    fold = None if norm is None or of_batch else _fold(norm.operation)
    with shadowed(layer, "call", _Product(unit, rounding, fold, layer.call)):
        result = layer(*args, **kwargs)
    return norm.operation(result, training=True) if norm is not None and of_batch else result


def _fold(layer: Any) -> _Fold:
    return _Fold(*scale_and_shift(layer, lambda name: full_value(getattr(layer, name))))


class _Product:
    """Replaces the `call` of a layer."""

    def __init__(self, unit: Unit, rounding: Rounding, fold: _Fold | None, call: Callable[..., Any]):
        self._layer, self._unit, self._rounding = unit.first.operation, unit, rounding
        self._fold, self._call = fold, call

    def __call__(self, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        bias = self._bias(len(inputs.shape))
        if isinstance(self._layer, SEPARABLE):
            result = _sum(self._separable(inputs), bias)
        else:
            result = self._product(inputs, bias, *args, **kwargs)
        activation = self._layer.activation
        if is_linear(activation):
            return result
        if self._unit.before_activation is not None:
            result = self._rounding.tensor(result, self._unit.before_activation)
        return activated(activation, result, self._rounding)

    def _product(self, inputs: Any, bias: Any, *args: Any, **kwargs: Any) -> Any:
        layer, between, kernel = self._layer, self._unit.between, self._kernel("kernel")
        if isinstance(layer, GateProducts):
            kernel = layer.part(kernel)
        found = self._rounding.product(layer, inputs, kernel, bias if between is None else None)
        if found is not None and between is None:
            return found
        if isinstance(layer, GateProducts):
            return layer.products(inputs, kernel, bias)
        if found is None:
            with contextlib.ExitStack() as scope:
                for name, value in (("use_bias", False), ("bias", None), ("activation", None)):
                    scope.enter_context(shadowed(layer, name, value))
                scope.enter_context(with_values([(layer.kernel, kernel)], layer))
                found = self._call(inputs, *args, **kwargs)
        if between is not None:
            # A kernel of its own adds this bias.
            found, bias = self._rounding.tensor(found, between), self._rounding.constant(bias)
        return _sum(found, bias)

    def _separable(self, inputs: Any) -> Any:
        layer = self._layer
        dtype, options = inputs.dtype, {"data_format": layer.data_format}
        depthwise, pointwise = (ops.cast(self._kernel(name), dtype) for name in kernel_names(layer))
        result = ops.depthwise_conv(
            inputs, depthwise, layer.strides, layer.padding, dilation_rate=layer.dilation_rate, **options
        )
        if self._unit.between is not None:
            result = self._rounding.tensor(result, self._unit.between)
        return ops.conv(result, pointwise, 1, "valid", **options)

    def _kernel(self, name: str) -> Any:
        variable = getattr(self._layer, name)
        value = full_value(variable)
        weight = next((one for one in self._unit.weights if one.variable is variable), None)
        value = value if weight is None else self._rounding.weight(value, weight)
        if self._fold is None or name != kernel_names(self._layer)[1]:
            return value
        return value * ops.reshape(self._fold.factor, outputs_shape(self._layer, value.shape))

    def _bias(self, rank: int) -> Any:
        """Returns the bias, in a shape that broadcasts against outputs of this rank; None without one."""
        layer, fold = self._layer, self._fold
        bias = None if layer.bias is None else full_value(layer.bias)
        if fold is not None:
            bias = fold.shift if bias is None else bias * fold.factor + fold.shift
        if bias is None:
            return None
        if len(bias.shape) == 1:
            bias = ops.reshape(bias, [-1] + [1] * (rank - 1 - channel_axis(layer, rank)))
        return ops.cast(bias, layer.compute_dtype)


def _sum(result: Any, bias: Any) -> Any:
    return result if bias is None else result + bias
