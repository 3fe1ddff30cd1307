"""The tensors of a LiteRT file that became integers, with their grids."""

from __future__ import annotations

from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import Grid


class IntegerTensors:
    """Tensors of integers, the tensors of floats that they stand for, and the conversions between the two.

    Args:
        graph: The file.
        operators: The operations of the new file, in order; a DEQUANTIZE is added where floats are needed.
        dequantize: Version of DEQUANTIZE that reads these integers.

    Attributes:
        grids: Index of a tensor of integers -> its grid.
    """

    def __init__(self, graph: LiteRTGraph, operators: list[Any], dequantize: int):
        self._graph, self._operators, self._dequantize = graph, operators, dequantize
        self.grids: dict[int, Grid] = {}
        # Index of a tensor -> that of integers which stand for it; a tensor that became integers stands for itself.
        self._integers: dict[int, int] = {}
        # Index of a tensor of integers -> the tensor of floats that DEQUANTIZE makes of it.
        self._floats: dict[int, int] = {}

    def standing_for(self, index: int) -> int | None:
        """Returns the index of the integers that stand for a tensor; None if there are none."""
        return self._integers.get(index)

    def grid_of(self, index: int) -> Grid:
        """Returns the grid of the integers that stand for a tensor."""
        return self.grids[self._integers[index]]

    def share(self, index: int, other: int) -> None:
        """Lets the integers that stand for one tensor stand for another one, too.

        Args:
            index: The tensor that gets them.
            other: The tensor that has them.
        """
        self._integers[index] = self._integers[other]

    def set_grid(self, index: int, grid: Grid, axis: int = 0) -> None:
        """Makes a tensor one of integers.

        Args:
            index: The tensor.
            grid: Its grid.
            axis: Axis of the scales, if there are several.
        """
        self._graph.set_dtype(index, grid.format.dtype)
        self._graph.set_scales(index, grid.scale.reshape(-1), grid.zero_point.reshape(-1), axis)
        self.grids[index] = grid
        self._integers[index] = index

    def new_constant(self, former: int, codes: np.ndarray, grid: Grid, axis: int = 0, *, few: bool = False) -> int:
        """Adds a constant in the place of another one, which further operations may read, and returns its index.

        Args:
            former: Index of the other constant.
            codes: The integers.
            grid: Their grid.
            axis: Axis of the scales.
            few: True stores two codes in each byte.
        """
        add = self._graph.new_int4_constant if few else self._graph.new_constant
        index = add(self._graph.name(former), codes.astype(grid.format.dtype))
        self.set_grid(index, grid, axis)
        if few:
            self._graph.set_dtype(index, "int4")
        return index

    def computed_inputs(self, operator: Any) -> list[int]:
        """Returns the inputs of an operation that are values and no constants."""
        indices = [int(index) for index in operator.inputs]
        return [
            one
            for one in indices
            if one in self._integers or (self._graph.is_float(one) and self._graph.values(one) is None)
        ]

    def read_integers(self, operator: Any) -> None:
        """Lets an operation read the integers that stand for its inputs."""
        operator.inputs = np.array([self._integers.get(int(index), int(index)) for index in operator.inputs], "int32")

    def read_floats(self, operator: Any) -> None:
        """Lets an operation read floats."""
        operator.inputs = np.array([self.as_floats(int(index)) for index in operator.inputs], "int32")

    def as_floats(self, index: int) -> int:
        """Returns a tensor of floats with the values of a tensor; adds a DEQUANTIZE where there is none."""
        held = self._integers.get(index)
        if held is None:
            return index
        if held not in self._floats:
            name, shape = f"{self._graph.name(held)}_float", self._graph.open_shape(held)
            self._floats[held] = self._graph.new_tensor(name, shape, "float32")
            operator = self._graph.new_operator("DEQUANTIZE", [held], [self._floats[held]])
            self._graph.require_op_version(operator, self._dequantize)
            self._operators.append(operator)
        return self._floats[held]
