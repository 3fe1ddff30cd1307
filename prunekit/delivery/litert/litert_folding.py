"""Folds sums and products with constants that the converter leaves in a LiteRT file, and merges equal constants."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.litert_reshapes import reshape


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
# Moves behind which an activation may follow.
_MOVES = {*_RESHAPES, "TRANSPOSE", "DEPTH_TO_SPACE", "STRIDED_SLICE"}
# Activations that kernels apply to their results.
NO_ACTIVATION, RELU, RELU6 = 0, 1, 3
_ACTIVATIONS = {"RELU": RELU, "RELU6": RELU6}


def fold_biases(graph: LiteRTGraph) -> None:
    """Puts the sum of a linear operation's outputs and a constant for each channel into its bias.

    Between the two are reshapes, of convolutions with one spatial axis and of products with several output axes, which
    the converter does not look behind.
    """
    made = {int(index): one for one in graph.operators for index in one.outputs}
    readers = graph.readers()
    for operator in [one for one in graph.operators if graph.kind(one) == "ADD"]:
        tensor, constant = _with_constant(graph, operator)
        linear, *others = _linears_behind(graph, tensor, made, readers, _RESHAPES)
        if constant is None or linear is None or others:
            continue
        places = LINEAR[graph.kind(linear)]
        if constant.size != graph.shape(int(linear.outputs[0]))[-1]:
            continue
        if linear.builtinOptions.fusedActivationFunction == NO_ACTIVATION:
            _add_to_bias(graph, linear, places, constant.reshape(-1))
            linear.builtinOptions.fusedActivationFunction = operator.builtinOptions.fusedActivationFunction
            graph.operators.remove(operator)
            graph.replace(int(operator.outputs[0]), tensor)
            readers = graph.readers()


def fold_activations(graph: LiteRTGraph) -> None:
    """Lets linear operations apply the ReLU behind them, which the converter leaves alone without a bias between.

    Between the two may be reshapes, slices, moves of axes, and a concatenation of results of linear operations alone.
    """
    made = {int(index): one for one in graph.operators for index in one.outputs}
    readers = graph.readers()
    for operator in [one for one in graph.operators if graph.kind(one) in _ACTIVATIONS]:
        tensor = int(operator.inputs[0])
        found = _linears_behind(graph, tensor, made, readers, _MOVES)
        if any(one is None or one.builtinOptions.fusedActivationFunction != NO_ACTIVATION for one in found):
            continue
        for linear in found:
            linear.builtinOptions.fusedActivationFunction = _ACTIVATIONS[graph.kind(operator)]
        graph.operators.remove(operator)
        graph.replace(int(operator.outputs[0]), tensor)
        readers = graph.readers()


def _linears_behind(
    graph: LiteRTGraph,
    tensor: int,
    made: Mapping[int, Any],
    readers: Mapping[int, Sequence[Any]],
    moves: Collection[str],
) -> list[Any]:
    """Returns the linear operations whose moved results are joined to a tensor; None for others, and for results that
    more operations read.
    """
    operator = made.get(tensor)
    if len(readers[tensor]) != 1 or operator is None:
        return [None]
    kind = graph.kind(operator)
    if kind in LINEAR:
        return [operator]
    if kind not in (*moves, "CONCATENATION"):
        return [None]
    parts = operator.inputs if kind == "CONCATENATION" else operator.inputs[:1]
    return [one for part in parts for one in _linears_behind(graph, int(part), made, readers, moves)]


def _with_constant(graph: LiteRTGraph, operator: Any) -> tuple[int, np.ndarray | None]:
    """Returns the computed operand of an operation, and the other if it is one number, or one along the last axes."""
    first, second = (int(index) for index in operator.inputs)
    if graph.values(first) is not None:
        first, second = second, first
    values = graph.values(second)
    if values is None:
        return first, None
    shape = values.shape[next((axis for axis, length in enumerate(values.shape) if length != 1), values.ndim) :]
    fits = not shape or graph.shape(first)[-len(shape) :] == shape
    return first, values.reshape(shape) if fits else None


def _add_to_bias(graph: LiteRTGraph, linear: Any, places: Linear, constant: np.ndarray) -> None:
    inputs = [int(index) for index in linear.inputs]
    inputs += [-1] * (places.bias + 1 - len(inputs))
    former = graph.values(inputs[places.bias])
    name = f"{graph.name(int(linear.outputs[0]))}_bias"
    inputs[places.bias] = graph.new_constant(name, constant if former is None else constant + former)
    linear.inputs = np.array(inputs, "int32")


def fold_normalizations(graph: LiteRTGraph, is_normalization: Callable[[Any], bool]) -> None:
    """Replaces products and sums with constants for each channel by depthwise convolutions.

    A depthwise convolution with kernels of one entry rounds once, with a scale for each channel.

    Args:
        graph: The file; changed.
        is_normalization: Returns True for an operation of a normalization that is not folded.
    """
    for first in [one for one in graph.operators if is_normalization(one)]:
        if first in graph.operators:
            _fold_normalization(graph, first, is_normalization)


def _fold_normalization(graph: LiteRTGraph, first: Any, is_normalization: Callable[[Any], bool]) -> None:
    readers, chain = graph.readers(), [first]
    source = _affine(graph, first)
    if source is None:
        return
    tensor, factor, shift = source
    while chain[-1].builtinOptions.fusedActivationFunction == NO_ACTIVATION:
        following = readers.get(int(chain[-1].outputs[0]), [])
        found = _affine(graph, following[0]) if len(following) == 1 and following[0] is not graph else None
        if found is None or not is_normalization(following[0]):
            break
        chain.append(following[0])
        factor, shift = factor * found[1], shift * found[1] + found[2]
    place = graph.operators.index(chain[-1])
    graph.operators[place : place + 1] = _depthwise(graph, chain[-1], tensor, factor, shift)
    for one in chain[:-1]:
        graph.operators.remove(one)


def _depthwise(graph: LiteRTGraph, last: Any, tensor: int, factor: np.ndarray, shift: np.ndarray) -> list[Any]:
    """Returns operations that compute the result of another one from a tensor, a factor and a shift."""
    weights = graph.new_constant(f"{graph.name(tensor)}_factor", factor.reshape(1, 1, 1, -1))
    bias = graph.new_constant(f"{graph.name(tensor)}_shift", shift)
    options = graph.new_options(
        "DepthwiseConv2DOptions",
        padding=1,
        strideW=1,
        strideH=1,
        depthMultiplier=1,
        dilationWFactor=1,
        dilationHFactor=1,
        fusedActivationFunction=last.builtinOptions.fusedActivationFunction,
    )
    result, lengths = int(last.outputs[0]), graph.open_shape(tensor)
    if len(lengths) == 4:
        return [graph.new_operator("DEPTHWISE_CONV_2D", [tensor, weights, bias], [result], options)]
    # All positions are the columns of one image.
    name, columns = graph.name(result), -1 if min(lengths) < 0 else int(np.prod(lengths[:-1]))
    read, made = (graph.new_tensor(f"{name}_{part}", (1, 1, columns, lengths[-1]), "float32") for part in ("in", "out"))
    return [
        reshape(graph, tensor, read, (1, 1, -1, lengths[-1])),
        graph.new_operator("DEPTHWISE_CONV_2D", [read, weights, bias], [made], options),
        reshape(graph, made, result, (-1, *lengths[1:])),
    ]


def _affine(graph: LiteRTGraph, operator: Any) -> tuple[int, np.ndarray, np.ndarray] | None:
    """Returns what a product or sum with constants reads, with factor and shift of each channel; None for others."""
    kind = graph.kind(operator)
    if kind not in ("MUL", "ADD", "SUB"):
        return None
    first, second = (int(index) for index in operator.inputs)
    if kind != "SUB" and graph.values(first) is not None:
        first, second = second, first
    values, lengths = graph.values(second), graph.open_shape(first)
    if values is None or not lengths or min(lengths[1:], default=1) < 0:
        return None
    if values.size != 1 and (values.size != lengths[-1] or values.shape[-1] != lengths[-1]):
        return None
    values = np.broadcast_to(values.reshape(-1), lengths[-1:]).astype("float32")
    ones, zeros = np.ones_like(values), np.zeros_like(values)
    if kind == "MUL":
        return first, values, zeros
    return first, ones, values if kind == "ADD" else -values


def split_results(graph: LiteRTGraph, grids_behind: Callable[[int], Sequence[Any]]) -> None:
    """Lets each operation compute its results once for each grid on which they are rounded.

    The converter merges equal operations, such as two ReLUs of one tensor.

    Args:
        graph: The file; changed.
        grids_behind: Returns for a tensor the grid on which each reader wants it; None for one that reads floats.
    """
    for operator in graph.operators[::-1]:
        if len(operator.outputs) != 1 or not graph.is_float(int(operator.outputs[0])):
            continue
        index = int(operator.outputs[0])
        readers, wanted = graph.readers().get(index, []), list(grids_behind(index))
        others = [one for one in dict.fromkeys(wanted) if one != wanted[0]]
        if None in wanted:
            continue
        for number, grid in enumerate(others):
            name = f"{graph.name(index)}_{number}"
            copied = graph.new_tensor(name, graph.open_shape(index), "float32")
            for reader, one in zip(readers, wanted, strict=True):
                if one == grid:
                    reader.inputs = np.where(reader.inputs == index, copied, reader.inputs).astype("int32")
            graph.operators.insert(graph.operators.index(operator) + 1, graph.copy_operator(operator, [copied]))


def merge_constants(graph: LiteRTGraph) -> None:
    """Lets operations read one of several equal constants of integers: biases, lengths, amounts of padding.

    Kernels stay apart, and so do the biases of operations that share one: XNNPACK keeps packed weights, whose scales
    depend on the results, by the addresses of kernel and bias.

    Args:
        graph: The file; changed.
    """
    first: dict[Any, int] = {}
    biased: set[tuple[int, int]] = set()
    for operator in graph.operators:
        places, inputs = LINEAR.get(graph.kind(operator)), [int(index) for index in operator.inputs]
        for place, index in enumerate(inputs):
            key = _constant_key(graph, index) if index >= 0 and index not in graph.outputs else None
            if key is None or (places is not None and place == places.weights):
                continue
            if places is not None and place == places.bias:
                # Whether another operation has this kernel with the bias that it would get.
                pair = inputs[places.weights], first.setdefault(key, index)
                inputs[place] = index if pair in biased else pair[1]
                biased.add(pair)
            else:
                inputs[place] = first.setdefault(key, index)
        operator.inputs = np.array(inputs, "int32")


def _constant_key(graph: LiteRTGraph, index: int) -> Any:
    """Returns what equal constants of integers have in common; None for other tensors."""
    if graph.dtype(index) not in ("int32", "int64"):
        return None
    return graph.stored(index)
