"""Turns a LiteRT file that rounds between float operations into one that computes with integers.

The converter is given fake-quantization operations and no order to quantize. It folds and fuses what lies between them,
and writes them as pairs of QUANTIZE and DEQUANTIZE. An operation between such pairs that has an integer kernel is given
the integers themselves here, with scales, zero points and codes of our own. The converter can do this too, but not with
a scale for each output of a Dense layer, with 4 bits, or with weights alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunekit.delivery.integer_weights import store_weights
from prunekit.delivery.litert_folding import (
    LINEAR,
    NO_ACTIVATION,
    RELU,
    RELU6,
    Linear,
    fold_biases,
    use_depthwise_convolutions,
)
from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids import Granularity, Grid, IntegerFormat, grid_between, grid_for_bias
from prunekit.techniques.quantize.ranges import grid_holding
from prunekit.techniques.quantize.rules import fixed_grid

# Operations whose integer kernels round their results on a grid of their own.
_COMPUTES = {
    *LINEAR,
    *(
        "ADD SUB MUL MEAN SUM BATCH_MATMUL RELU RELU6 LEAKY_RELU PRELU ELU GELU HARD_SWISH LOGISTIC TANH SOFTMAX "
        "AVERAGE_POOL_2D RESIZE_BILINEAR"
    ).split(),
}
# Those whose results lie on the grid of their input.
_ON_INPUT_GRID = ("AVERAGE_POOL_2D", "RESIZE_BILINEAR")
# Operations whose results are entries of their inputs, on the same grid.
_MOVES = set(
    "RESHAPE TRANSPOSE SQUEEZE EXPAND_DIMS PAD MIRROR_PAD MAX_POOL_2D CONCATENATION SLICE STRIDED_SLICE SPLIT SPLIT_V "
    "PACK UNPACK GATHER TILE RESIZE_NEAREST_NEIGHBOR MAXIMUM MINIMUM REDUCE_MAX REDUCE_MIN REVERSE_V2 BROADCAST_TO "
    "SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND SELECT_V2".split()
)
# Operations whose results lie on a prescribed grid, with whether that has a sign.
_PRESCRIBED = {"LOGISTIC": False, "SOFTMAX": False, "TANH": True}
# The first versions with int8; 1 where there is none. From op_version.cc of LiteRT.
_VERSIONS = {
    "CONV_2D": 3,
    "DEPTHWISE_CONV_2D": 3,
    "FULLY_CONNECTED": 4,
    "TRANSPOSE_CONV": 3,
    **dict.fromkeys(("TILE", "REVERSE_V2", "BROADCAST_TO", "RESIZE_BILINEAR"), 3),
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
# Beginning of the names of marks that round what an integer kernel reads. The operation before one computes in floating
# point, or was rounded already.
READING = "reading"
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
        grids: Name of an int8 input or output in the signature -> its grid.
    """

    content: bytes
    roundings: tuple[tuple[Grid, int | None], ...]
    left_float: tuple[str, ...]
    outputs: tuple[str, ...] = ()
    batch: int | None = None
    grids: Mapping[str, Grid] = field(default_factory=dict)


def with_integers(
    content: bytes, marks: Mapping[str, Grid], weights: IntegerFormat, *, integer_io: Sequence[str] = ()
) -> IntegerFile:
    """Returns a file that computes with integers.

    Args:
        content: A file of the converter.
        marks: Name of a fake-quantization operation -> its grid, in order of execution. No name begins with another.
        weights: Codes of weights.
        integer_io: What of "inputs" and "outputs" is int8 instead of float32.

    Raises:
        ValueError: A tensor that is rounded has the name of no mark; an input or output that is to be int8 is read or
            computed in floating point.
    """
    graph = LiteRTGraph(content)
    fold_biases(graph)
    use_depthwise_convolutions(graph)
    rewriter = _Rewriter(graph, marks, weights)
    rewriter.run()
    grids: dict[str, Grid] = {}
    if "inputs" in integer_io:
        grids |= rewriter.take_integers()
    if "outputs" in integer_io:
        grids |= rewriter.give_integers()
    store_weights(graph, weights)
    made, places = graph.content()
    found = {name: places[index] for name, index in rewriter.found.items()}
    roundings = tuple((grid, found.get(name)) for name, grid in marks.items())
    return IntegerFile(made, roundings, tuple(rewriter.left_float), grids=grids)


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

    def take_integers(self) -> dict[str, Grid]:
        """Makes the floating-point inputs integers; returns their grids by name.

        Raises:
            ValueError: An operation reads an input in floating point.
        """
        graph, found, places = self._graph, {}, {}
        names, readers = graph.signature_names(), graph.readers()
        for index in [one for one in graph.inputs if graph.is_float(one)]:
            kinds = ["" if one is graph else graph.kind(one) for one in readers.get(index, ())]
            if kinds != ["QUANTIZE"]:
                raise ValueError(f"int8 inputs are read by integer kernels alone. {_io_hint(names[index], 'read')}")
            (operator,) = readers[index]
            places[index] = int(operator.outputs[0])
            found[names[index]] = self._grids[places[index]]
            graph.operators.remove(operator)
        graph.map_inputs(places)
        return found

    def give_integers(self) -> dict[str, Grid]:
        """Makes the floating-point outputs integers; returns their grids by name.

        Raises:
            ValueError: An output is computed in floating point.
        """
        graph, found, places = self._graph, {}, {}
        names = graph.signature_names()
        made = {int(index): one for one in graph.operators for index in one.outputs}
        for index in dict.fromkeys(one for one in graph.outputs if graph.is_float(one)):
            operator = made.get(index)
            if operator is None or graph.kind(operator) != "DEQUANTIZE":
                raise ValueError(
                    f"int8 outputs are computed by integer kernels alone. {_io_hint(names[index], 'computed')}"
                )
            places[index] = int(operator.inputs[0])
            found[names[index]] = self._grids[places[index]]
        graph.map_outputs(places)
        read = graph.readers()
        graph.operators = [one for one in graph.operators if any(int(index) in read for index in one.outputs)]
        return found

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
        if kind == "TRANSPOSE_CONV" and operator.builtinOptions.fusedActivationFunction != NO_ACTIVATION:
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
        places = LINEAR.get(kind)
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
        elif kind in _ON_INPUT_GRID:
            grid = self._grids[int(operator.inputs[0])]
        options = operator.builtinOptions
        if getattr(options, "fusedActivationFunction", NO_ACTIVATION) == RELU6 and _highest(grid) <= 6.0:
            # The grid ends there. The code of 6 would overflow in grids with very small steps, which kernels refuse.
            options.fusedActivationFunction = RELU
        self._set_grid(output, grid)
        return True

    def _grid_behind(self, index: int) -> Grid | None:
        """Returns the grid on which a tensor is rounded, at once or after it was moved."""
        while len(self._readers.get(index, ())) == 1:
            (reader,) = self._readers[index]
            kind = "" if reader is self._graph else self._graph.kind(reader)
            if kind == "QUANTIZE":
                name, grid = self._mark(int(reader.outputs[0]))
                return None if name.startswith(READING) else grid
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

    def _round_weights(self, operator: Any, places: Linear) -> None:
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


def _highest(grid: Grid) -> float:
    """Returns the highest value of a grid for a whole tensor."""
    return float(grid.scale) * (grid.format.highest - int(grid.zero_point))


def _io_hint(name: str, verb: str) -> str:
    return f"Received: {name!r}, which is {verb} in floating point. Leave it float32."


def _same(one: Grid, other: Grid) -> bool:
    return bool(one.format == other.format and one.scale == other.scale and one.zero_point == other.zero_point)
