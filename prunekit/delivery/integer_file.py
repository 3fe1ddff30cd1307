"""Turns a LiteRT file that rounds between float operations into one that computes with integers.

The converter is given fake-quantization operations and no order to quantize. It folds and fuses what lies between them,
and writes them as pairs of QUANTIZE and DEQUANTIZE. An operation between such pairs that has an integer kernel is given
the integers themselves here, with scales, zero points and codes of our own. The converter can do this too, but not with
a scale for each output of a Dense layer, with 4 bits, or with weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.delivery.integer_weights import store_weights
from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids import Granularity, Grid, IntegerFormat, grid_between, grid_for_bias
from prunekit.techniques.quantize.ranges import grid_holding
from prunekit.techniques.quantize.rules import fixed_grid


@dataclass(frozen=True)
class _Linear:
    """An operation with weights: the axis of the outputs in them, and the places of its inputs."""

    axis: int
    values: int = 0
    weights: int = 1
    bias: int = 2


_LINEAR = {
    "CONV_2D": _Linear(0),
    "DEPTHWISE_CONV_2D": _Linear(3),
    "FULLY_CONNECTED": _Linear(0),
    "TRANSPOSE_CONV": _Linear(0, values=2, bias=3),
}
# Operations whose integer kernels round their results on a grid of their own.
_COMPUTES = {
    *_LINEAR,
    *(
        "ADD SUB MUL MEAN SUM BATCH_MATMUL RELU RELU6 LEAKY_RELU PRELU ELU GELU HARD_SWISH LOGISTIC TANH SOFTMAX "
        "AVERAGE_POOL_2D"
    ).split(),
}
# Operations whose results are entries of their inputs, on the same grid.
_MOVES = set(
    "RESHAPE TRANSPOSE SQUEEZE EXPAND_DIMS PAD MIRROR_PAD MAX_POOL_2D CONCATENATION SLICE STRIDED_SLICE SPLIT SPLIT_V "
    "PACK UNPACK GATHER TILE RESIZE_NEAREST_NEIGHBOR MAXIMUM MINIMUM REDUCE_MAX REDUCE_MIN REVERSE_V2 BROADCAST_TO "
    "SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND SELECT_V2".split()
)
# Moves that leave the axis of the channels the last one, or divide it into several.
_RESHAPES = {"RESHAPE", "SQUEEZE", "EXPAND_DIMS", "BATCH_TO_SPACE_ND"}
# Operations whose results lie on a prescribed grid, with whether that has a sign.
_PRESCRIBED = {"LOGISTIC": False, "SOFTMAX": False, "TANH": True}
_NO_ACTIVATION = 0
# The first versions with int8; 1 where there is none. From op_version.cc of LiteRT.
_VERSIONS = {
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 3,
    "FULLY_CONNECTED": 4,
    "TRANSPOSE_CONV": 3,
    **dict.fromkeys(("TILE", "REVERSE_V2", "BROADCAST_TO"), 3),
    **dict.fromkeys(("RESHAPE", "SQUEEZE", "EXPAND_DIMS", "SELECT_V2", "PRELU", "ELU", "HARD_SWISH", "LEAKY_RELU"), 1),
}
_VERSION = 2
# The first versions with tensors of more than four axes.
_WIDE_VERSIONS = {
    "PAD": 4,
    "SUB": 3,
    "MUL": 3,
    "SLICE": 5,
    "STRIDED_SLICE": 4,
    "TRANSPOSE": 4,
    "MAXIMUM": 3,
    "MINIMUM": 3,
}
# The versions whose kernels read weights of 4 bits, two in each byte; from op_version.cc too.
_FOUR_BITS = {"CONV_2D": 7, "DEPTHWISE_CONV_2D": 7, "FULLY_CONNECTED": 10}
_CONSTANTS = IntegerFormat(8, symmetric=False)


@dataclass(frozen=True, eq=False)
class IntegerFile:
    """A LiteRT file that computes with integers.

    Attributes:
        content: The file.
        roundings: For each mark its grid, and the index of the tensor of integers that it became; None for one that the
            converter merged with another.
        left_float: Operations that compute in floating point, as "KIND name".
        outputs: Names of its outputs, in the order of the model's flattened output structure.
        batch: The fixed batch size; None permits any.
    """

    content: bytes
    roundings: tuple[tuple[Grid, int | None], ...]
    left_float: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    batch: int | None = None


def with_integers(content: bytes, marks: Mapping[str, Grid], weights: IntegerFormat) -> IntegerFile:
    """Returns a file that computes with integers.

    Args:
        content: A file of the converter.
        marks: Name of a fake-quantization operation -> its grid, in order of execution. No name begins with another.
        weights: Codes of weights.

    Raises:
        ValueError: A tensor that is rounded has the name of no mark.
    """
    graph = LiteRTGraph(content)
    _fold_biases(graph)
    _use_depthwise_convolutions(graph)
    rewriter = _Rewriter(graph, marks, weights)
    rewriter.run()
    store_weights(graph, weights)
    made, places = graph.content()
    found = {name: places[index] for name, index in rewriter.found.items()}
    return IntegerFile(made, tuple((grid, found.get(name)) for name, grid in marks.items()), tuple(rewriter.left_float))


def with_integer_weights(content: bytes, weights: IntegerFormat) -> IntegerFile:
    """Returns a file that computes in floating point, with integers for the weights that lie on grids.

    Args:
        content: A file of the converter.
        weights: Codes of weights.
    """
    graph = LiteRTGraph(content)
    store_weights(graph, weights)
    made, _ = graph.content()
    return IntegerFile(made, (), ())


# ---- sums with constants ---------------------------------------------------------------------------------------------


def _fold_biases(graph: LiteRTGraph) -> None:
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
        places, channels = _LINEAR.get(graph.kind(linear)), graph.shape(int(linear.outputs[0]))[-1]
        if places is None or constant.size != channels or len(readers[tensor]) != 1:
            continue
        if linear.builtinOptions.fusedActivationFunction == _NO_ACTIVATION:
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


def _add_to_bias(graph: LiteRTGraph, linear: Any, places: _Linear, constant: np.ndarray) -> None:
    inputs = [int(index) for index in linear.inputs]
    inputs += [-1] * (places.bias + 1 - len(inputs))
    former = graph.values(inputs[places.bias])
    name = f"{graph.name(int(linear.outputs[0]))}_bias"
    inputs[places.bias] = graph.new_constant(name, constant if former is None else constant + former)
    linear.inputs = np.array(inputs, "int32")


def _use_depthwise_convolutions(graph: LiteRTGraph) -> None:
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
        plain = product.builtinOptions.fusedActivationFunction == _NO_ACTIVATION
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


# ---- integers --------------------------------------------------------------------------------------------------------


class _Rewriter:
    """Rewrites the operations of a graph in order.

    Attributes:
        found: Name of a mark -> index of the tensor of integers that it became.
        left_float: As `IntegerFile.left_float`.
    """

    def __init__(self, graph: LiteRTGraph, marks: Mapping[str, Grid], weights: IntegerFormat):
        self._graph, self._marks, self._weights = graph, marks, weights
        self._readers = graph.readers()
        # Index of a tensor of integers -> its grid.
        self._grids: dict[int, Grid] = {}
        # Index of a tensor -> that of integers which stand for it; a tensor that became integers stands for itself.
        self._integers: dict[int, int] = {}
        # Index of a tensor of integers -> the tensor of floats that DEQUANTIZE makes of it.
        self._floats: dict[int, int] = {}
        self._operators: list[Any] = []
        self.found: dict[str, int] = {}
        self.left_float: list[str] = []

    def run(self) -> None:
        """Rewrites the graph."""
        for operator in self._graph.operators:
            self._rewrite(operator)
        self._graph.map_outputs({index: self._as_floats(index) for index in self._graph.outputs})
        self._graph.operators = self._operators

    def _rewrite(self, operator: Any) -> None:
        kind = self._graph.kind(operator)
        if kind == "DEQUANTIZE":
            self._integers[int(operator.outputs[0])] = self._integers[int(operator.inputs[0])]
        elif kind == "QUANTIZE":
            self._round(operator)
        elif kind in ("SHAPE", "RANK"):
            self._read_integers(operator)
            self._operators.append(operator)
        elif (kind in _MOVES and self._move(operator)) or (kind in _COMPUTES and self._compute(operator, kind)):
            self._graph.need_version(operator, self._version(operator, kind))
            self._operators.append(operator)
        else:
            if any(self._graph.is_float(int(index)) for index in operator.outputs):
                self.left_float.append(f"{kind} {self._graph.name(int(operator.outputs[0]))}")
            operator.inputs = np.array([self._as_floats(int(index)) for index in operator.inputs], "int32")
            self._operators.append(operator)

    def _version(self, operator: Any, kind: str) -> int:
        rank = max(len(self._graph.shape(int(index))) for index in (*operator.inputs, *operator.outputs) if index >= 0)
        version = _VERSIONS.get(kind, _VERSION)
        if kind in _FOUR_BITS and self._weights.bits <= 4:
            return _FOUR_BITS[kind]
        if kind == "FULLY_CONNECTED" and operator.builtinOptions.keepNumDims:
            return 5
        if kind == "TRANSPOSE_CONV" and operator.builtinOptions.fusedActivationFunction != _NO_ACTIVATION:
            return 4
        return max(version, _WIDE_VERSIONS.get(kind, 1)) if rank > 4 else version

    def _round(self, operator: Any) -> None:
        source, target = int(operator.inputs[0]), int(operator.outputs[0])
        name, grid = self._mark(target)
        held = self._integers.get(source)
        if held is not None and _same(self._grids[held], grid):
            self._integers[target] = self.found[name] = held
            return
        if held is not None:
            operator.inputs = np.array([held], "int32")
        self._set_grid(target, grid)
        self.found[name] = target
        self._operators.append(operator)

    def _move(self, operator: Any) -> bool:
        """Gives the results the grid of the inputs; returns False if these differ, or are floats."""
        computed = self._computed(operator)
        held = [self._integers[index] for index in computed if index in self._integers]
        if not held or len(held) < len(computed) or not all(_same(self._grids[held[0]], self._grids[i]) for i in held):
            return False
        if any(self._graph.values(int(index)) is not None for index in operator.inputs):
            return False
        self._read_integers(operator)
        for index in operator.outputs:
            self._set_grid(int(index), self._grids[held[0]])
        return True

    def _compute(self, operator: Any, kind: str) -> bool:
        """Lets an operation read and compute integers; returns False if it reads floats, or is not rounded after."""
        output, computed = int(operator.outputs[0]), self._computed(operator)
        grid = self._grid_behind(output) if self._graph.is_float(output) else None
        if grid is None or not computed or any(index not in self._integers for index in computed):
            return False
        places = _LINEAR.get(kind)
        if places is not None and self._graph.values(int(operator.inputs[places.weights])) is None:
            return False
        if places is None:
            self._round_constants(operator)
        else:
            self._round_weights(operator, places)
        self._read_integers(operator)
        # Where the grid behind is another one, the values are rounded again there.
        if kind in _PRESCRIBED:
            grid = fixed_grid(_PRESCRIBED[kind], grid.format)
        elif kind == "AVERAGE_POOL_2D":
            grid = self._grids[int(operator.inputs[0])]
        self._set_grid(output, grid)
        return True

    def _grid_behind(self, index: int) -> Grid | None:
        """Returns the grid on which a tensor is rounded, at once or after it was moved."""
        while len(self._readers.get(index, ())) == 1:
            (reader,) = self._readers[index]
            kind = "" if reader is self._graph else self._graph.kind(reader)
            if kind == "QUANTIZE":
                return self._mark(int(reader.outputs[0]))[1]
            if kind not in _MOVES or len(reader.outputs) != 1:
                return None
            index = int(reader.outputs[0])
        return None

    # ---- constants ---------------------------------------------------------------------------------------------------

    def _round_constants(self, operator: Any) -> None:
        inputs = [int(index) for index in operator.inputs]
        for place, index in enumerate(inputs):
            values = self._graph.values(index)
            if values is not None:
                grid = grid_between(values.min(initial=0.0), values.max(initial=0.0), _CONSTANTS)
                inputs[place] = self._new_integers(index, grid.codes(values), grid)
        operator.inputs = np.array(inputs, "int32")

    def _round_weights(self, operator: Any, places: _Linear) -> None:
        inputs = [int(index) for index in operator.inputs]
        weight = np.asarray(self._graph.values(inputs[places.weights]))
        grid = grid_holding(weight, self._weights, Granularity((places.axis,)))
        bias = self._graph.values(inputs[places.bias]) if len(inputs) > places.bias else None
        if bias is not None:
            step, shape = float(self._grids[self._integers[inputs[places.values]]].scale), grid.scale.shape
            others = tuple(axis for axis in range(weight.ndim) if axis != places.axis)
            used = np.asarray(weight.any(axis=others)).reshape(shape)
            grid = grid_for_bias(grid, used=used, bias=bias.reshape(shape), input_scale=step)
            steps = step * grid.scale.reshape(-1).astype("float64")
            stored = np.round(bias / steps).astype("int32")
            inputs[places.bias] = self._graph.new_constant(self._graph.name(inputs[places.bias]), stored)
            self._graph.set_scales(inputs[places.bias], steps, np.zeros(len(steps)))
        few = grid.format.bits <= 4 and self._graph.kind(operator) in _FOUR_BITS
        codes = grid.codes(weight)
        inputs[places.weights] = self._new_integers(inputs[places.weights], codes, grid, places.axis, few=few)
        operator.inputs = np.array(inputs, "int32")

    def _new_integers(self, former: int, codes: np.ndarray, grid: Grid, axis: int = 0, *, few: bool = False) -> int:
        """Adds a constant in the place of another one, which further operations may read, and returns its index.

        Args:
            former: Index of the other constant.
            codes: The integers.
            grid: Their grid.
            axis: Axis of the scales.
            few: True stores two codes in each byte.
        """
        add = self._graph.new_int4_constant if few else self._graph.new_constant
        index = add(self._graph.name(former), codes.astype("int8"))
        self._set_grid(index, grid, axis)
        if few:
            self._graph.set_dtype(index, "int4")
        return index

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def _computed(self, operator: Any) -> list[int]:
        """Returns the inputs of an operation that are values and no constants."""
        indices = [int(index) for index in operator.inputs]
        return [one for one in indices if one in self._integers or self._is_computed_float(one)]

    def _is_computed_float(self, index: int) -> bool:
        return self._graph.is_float(index) and self._graph.values(index) is None

    def _mark(self, index: int) -> tuple[str, Grid]:
        # The converter writes scopes before a name, counts copies behind it, and joins the names of what it merges.
        names = [one.rsplit("/", 1)[-1] for one in self._graph.name(index).split(";")]
        found = [(key, grid) for key, grid in self._marks.items() if any(name.startswith(key) for name in names)]
        if not found:
            raise ValueError(f"A tensor that is rounded has the name of a mark. Received: {self._graph.name(index)!r}.")
        return found[0]

    def _read_integers(self, operator: Any) -> None:
        operator.inputs = np.array([self._integers.get(int(index), int(index)) for index in operator.inputs], "int32")

    def _set_grid(self, index: int, grid: Grid, axis: int = 0) -> None:
        self._graph.set_dtype(index, "int16" if grid.format.bits == 16 else "int8")
        self._graph.set_scales(index, grid.scale.reshape(-1), grid.zero_point.reshape(-1), axis)
        self._grids[index] = grid
        self._integers[index] = index

    def _as_floats(self, index: int) -> int:
        """Returns a tensor of floats with the values of a tensor; adds a DEQUANTIZE where there is none."""
        held = self._integers.get(index)
        if held is None:
            return index
        if held not in self._floats:
            name, shape = f"{self._graph.name(held)}_float", self._graph.shape(held)
            self._floats[held] = self._graph.new_tensor(name, shape, "float32", like=held)
            self._operators.append(self._graph.new_operator("DEQUANTIZE", [held], [self._floats[held]]))
        return self._floats[held]


def _same(one: Grid, other: Grid) -> bool:
    return bool(one.format == other.format and one.scale == other.scale and one.zero_point == other.zero_point)
