"""Stores constants of floats whose values lie on grids as integers, with operations that convert them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import FEW_BITS, Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import narrowest_grid
from prunekit.techniques.quantize.placement.stored_bytes import ENTRIES, PER_SCALE

# The first versions of DEQUANTIZE with codes of 8 bits, with a scale for each index of an axis, with codes of 4 bits.
_EIGHT_BITS, _PER_CHANNEL, _FOUR_BITS = 2, 5, 6
# Scales that are looked for before all of them.
_TRIED = 64


def store_weights(graph: LiteRTGraph, forms: Sequence[IntegerFormat], group_sizes: Sequence[int] = ()) -> None:
    """Replaces constants of floats whose values lie on grids by integers, with operations that convert them.

    The operations that read the constants compute what they did. With a scale for each index of an axis, an interpreter
    converts the integers when it first runs; with scales of groups, it multiplies by them in each run.

    Args:
        graph: The file; changed.
        forms: Codes of the weights, those with the fewest bits first.
        group_sizes: Numbers of consecutive entries that may share a scale.
    """
    added: list[Any] = []
    for index in sorted({int(index) for one in graph.operators for index in one.inputs}):
        values = graph.values(index)
        found = None if values is None else _grid(values, forms, group_sizes)
        if values is not None and found is not None:
            conversion = _Conversion(graph, graph.name(index))
            convert = conversion.whole if found.granularity.group_size is None else conversion.groups
            graph.replace(index, convert(values, found))
            added += conversion.operators
    graph.operators = [*added, *graph.operators]


def _grid(values: np.ndarray, forms: Sequence[IntegerFormat], group_sizes: Sequence[int]) -> Grid | None:
    """Returns the grid on which the values lie, with scales along one axis; None if there is none."""
    if values.size < ENTRIES or not values.any():
        return None
    for granularity in _granularities(values.shape, group_sizes):
        if values.size < PER_SCALE * math.prod(granularity.parameter_shape(values.shape)):
            continue
        # A constant of floats may have many groups, and each is tried with every code.
        first = granularity.rows(values)[:_TRIED]
        if not narrowest_grid(first, forms[-1:], Granularity((0,))).holds(first):
            continue
        grid = narrowest_grid(values, forms, granularity)
        if grid.holds(values):
            return grid
    return None


def _granularities(shape: tuple[int, ...], group_sizes: Sequence[int]) -> Iterator[Granularity]:
    by_axis = [Granularity((axis,)) for axis in range(len(shape))]
    yield from by_axis
    for size in group_sizes:
        for axis, one in enumerate(by_axis):
            found = one.in_groups(size, shape)
            if found is not one and 1 in (math.prod(shape[:axis]), math.prod(shape[axis + 1 :])):
                yield found


class _Conversion:
    """Operations that compute the floats of one constant from integers.

    Args:
        graph: The file; changed.
        name: Name of the constant.

    Attributes:
        operators: The operations, in order.
    """

    def __init__(self, graph: LiteRTGraph, name: str):
        self._graph, self._name = graph, name
        self.operators: list[Any] = []

    def whole(self, values: np.ndarray, grid: Grid) -> int:
        """Returns the index of the floats, for a grid with a scale for each index of an axis."""
        (axis,), few = grid.granularity.axes, grid.format.bits <= FEW_BITS
        scales, zeros = grid.scale.reshape(-1), grid.zero_point.reshape(-1)
        codes = self._codes(np.asarray(grid.codes(values)), scales, zeros, axis, few=few)
        return self._dequantized(codes, values.shape, _FOUR_BITS if few else _PER_CHANNEL)

    def groups(self, values: np.ndarray, grid: Grid) -> int:
        """Returns the index of the floats, for a grid with a scale for each group of entries of an index of an axis.

        The entries of a group become an axis of their own. A shorter group is completed with zeros, which are cut off
        again.

        LiteRT reads the scales of one axis, and with each of them a zero point of 64 bits, which would be two thirds of
        their bytes. So the integers are converted with the scale 1, and multiplied by a constant of scales.
        `BlockwiseQuantization` of its schema is no way: DEQUANTIZE makes zeros of it without an error, and the kernels
        that read it round the activations to 8 bits.
        """
        (axis,), size, few = grid.granularity.axes, int(grid.granularity.group_size or 1), grid.format.bits <= FEW_BITS
        outputs, by_row = values.shape[axis], math.prod(values.shape[:axis]) == 1
        inputs = values.size // outputs
        groups = -(-inputs // size)
        whole: tuple[int, ...] = (outputs, inputs) if by_row else (inputs, outputs)
        split: tuple[int, ...] = (outputs * groups, size) if by_row else (groups, size, outputs)
        scales = (outputs * groups, 1) if by_row else (groups, 1, outputs)
        lacking = ((0, 0), (0, groups * size - inputs))
        codes = np.pad(np.asarray(grid.codes(values)).reshape(whole), lacking if by_row else lacking[::-1])
        constant = self._codes(codes.reshape(split), np.ones(1), np.zeros(1), 0, few=few)
        steps = self._dequantized(constant, split, _FOUR_BITS if few else _EIGHT_BITS)
        factors = self._graph.new_constant(f"{self._name}_scales", grid.scale.reshape(scales))
        found = self._added("MUL", [steps, factors], split, self._graph.new_options("MulOptions"))
        if codes.shape != whole:
            start, length = (self._numbers(one) for one in ((0, 0), whole))
            found = self._added("SLICE", [self._reshaped(found, codes.shape), start, length], whole)
        return self._reshaped(found, values.shape)

    def _codes(self, codes: np.ndarray, scales: np.ndarray, zeros: np.ndarray, axis: int, *, few: bool) -> int:
        add = self._graph.new_int4_constant if few else self._graph.new_constant
        index = add(self._name, codes.astype("int8"))
        self._graph.set_scales(index, scales, zeros, axis)
        return index

    def _dequantized(self, constant: int, shape: tuple[int, ...], version: int) -> int:
        found = self._added("DEQUANTIZE", [constant], shape)
        self._graph.require_op_version(self.operators[-1], version)
        return found

    def _reshaped(self, index: int, shape: tuple[int, ...]) -> int:
        if self._graph.shape(index) == shape:
            return index
        options = self._graph.new_options("ReshapeOptions", newShape=list(shape))
        return self._added("RESHAPE", [index, self._numbers(shape)], shape, options)

    def _numbers(self, values: Sequence[int]) -> int:
        return self._graph.new_constant(f"{self._name}_shape", np.array(values, "int32"))

    def _added(self, kind: str, inputs: Sequence[int], shape: tuple[int, ...], options: Any = None) -> int:
        """Adds an operation, and returns the index of its result."""
        index = self._graph.new_tensor(f"{self._name}_float{len(self.operators) or ''}", shape, "float32")
        self.operators.append(self._graph.new_operator(kind, inputs, [index], options))
        return index
