"""Folds sums and products with constants in a LiteRT file, which the converter leaves between float operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.delivery.litert_graph import LiteRTGraph


@dataclass(frozen=True)
class Linear:
    """An operation with weights: the axis of the outputs in them, and the places of its inputs."""

    axis: int
    values: int = 0
    weights: int = 1
    bias: int = 2


LINEAR = {
    "CONV_2D": Linear(0),
    "DEPTHWISE_CONV_2D": Linear(3),
    "FULLY_CONNECTED": Linear(0),
    "TRANSPOSE_CONV": Linear(0, values=2, bias=3),
}
# Moves that leave the axis of the channels the last one, or divide it into several.
_RESHAPES = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "BATCH_TO_SPACE_ND"}
# Activations that kernels apply to their results.
NO_ACTIVATION, RELU, RELU6 = 0, 1, 3


def fold_biases(graph: LiteRTGraph) -> None:
    """Puts the sum of a linear operation's outputs and a constant for each channel into its bias.

    Between the two are reshapes, of convolutions with one spatial axis and of products with several output axes, which
    the converter does not look behind.
    """
    made = {int(index): one for one in graph.operators for index in one.outputs}
    readers = graph.readers()
    for operator in [one for one in graph.operators if graph.kind(one) == "ADD"]:
        tensor, constant = _with_constant(graph, operator)
        linear = made.get(tensor)
        while linear is not None and graph.kind(linear) in _RESHAPES and len(readers[int(linear.outputs[0])]) == 1:
            linear = made.get(int(linear.inputs[0]))
        if constant is None or linear is None or len(readers[int(linear.outputs[0])]) != 1:
            continue
        places, channels = LINEAR.get(graph.kind(linear)), graph.shape(int(linear.outputs[0]))[-1]
        if places is None or constant.size != channels or len(readers[tensor]) != 1:
            continue
        if linear.builtinOptions.fusedActivationFunction == NO_ACTIVATION:
            _add_to_bias(graph, linear, places, constant.reshape(-1))
            linear.builtinOptions.fusedActivationFunction = operator.builtinOptions.fusedActivationFunction
            graph.operators.remove(operator)
            graph.replace(int(operator.outputs[0]), tensor)
            readers = graph.readers()


def _with_constant(graph: LiteRTGraph, operator: Any) -> tuple[int, np.ndarray | None]:
    """Returns the computed operand of an operation, and the other if it is a constant along the last axes."""
    first, second = (int(index) for index in operator.inputs)
    if graph.values(first) is not None:
        first, second = second, first
    values = graph.values(second)
    if values is None:
        return first, None
    shape = values.shape[next((axis for axis, length in enumerate(values.shape) if length != 1), values.ndim) :]
    fits = bool(shape) and graph.shape(first)[-len(shape) :] == shape
    return first, values.reshape(shape) if fits else None


def _add_to_bias(graph: LiteRTGraph, linear: Any, places: Linear, constant: np.ndarray) -> None:
    inputs = [int(index) for index in linear.inputs]
    inputs += [-1] * (places.bias + 1 - len(inputs))
    former = graph.values(inputs[places.bias])
    name = f"{graph.name(int(linear.outputs[0]))}_bias"
    inputs[places.bias] = graph.new_constant(name, constant if former is None else constant + former)
    linear.inputs = np.array(inputs, "int32")


def use_depthwise_convolutions(graph: LiteRTGraph) -> None:
    """Replaces a product and a sum with constants for each channel, as of a batch normalization that is not folded.

    A depthwise convolution with kernels of one entry computes both and rounds once, with a scale for each channel.
    """
    readers = graph.readers()
    for product in [one for one in graph.operators if graph.kind(one) == "MUL"]:
        tensor, factor = _with_constant(graph, product)
        following = readers[int(product.outputs[0])]
        if factor is None or len(following) != 1 or following[0] is graph or graph.kind(following[0]) != "ADD":
            continue
        total = following[0]
        other, shift = _with_constant(graph, total)
        channels = graph.shape(tensor)[-1:]
        plain = product.builtinOptions.fusedActivationFunction == NO_ACTIVATION
        if len(graph.shape(tensor)) != 4 or shift is None or not plain or not factor.shape == channels == shift.shape:
            continue
        name = graph.name(int(product.outputs[0]))
        options = graph.new_options(
            "DepthwiseConv2DOptions",
            padding=1,
            strideW=1,
            strideH=1,
            depthMultiplier=1,
            dilationWFactor=1,
            dilationHFactor=1,
            fusedActivationFunction=total.builtinOptions.fusedActivationFunction,
        )
        weights = graph.new_constant(f"{name}_factor", factor.reshape(1, 1, 1, -1))
        inputs = [tensor, weights, graph.new_constant(f"{name}_shift", shift)]
        place = graph.operators.index(total)
        graph.operators[place] = graph.new_operator("DEPTHWISE_CONV_2D", inputs, [int(total.outputs[0])], options)
        graph.operators.remove(product)
        readers = graph.readers()
