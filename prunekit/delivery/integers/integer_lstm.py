"""Writes the LSTM of LiteRT with integers: one operation for all steps, and those that clear its states before."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from prunekit.core.runtime.variable_values import full_value
from prunekit.delivery.integers.integer_kernels import Kernels
from prunekit.delivery.integers.integer_tensors import IntegerTensors
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import Grid, IntegerFormat, grid_for_bias
from prunekit.techniques.quantize.grids.ranges import narrowest_grid
from prunekit.techniques.quantize.placement.units import Unit

KIND = "UNIDIRECTIONAL_SEQUENCE_LSTM"
# The first version with weights of integers.
_VERSION = 2
# Of the kernel's optional inputs: peepholes, a projection and its bias, layer normalization.
_ABSENT = {"peepholes": 3, "projection": 2, "normalizations": 4}
_TANH = 4
# Largest code of a bias, in bits: that of other kernels of 8 bits.
_BIAS_BITS = 30
# Scale of the sums of each gate, which the kernel prescribes.
_SUMS = 2.0**-12


class LstmWriter:
    """Writes the operations of an LSTM.

    LiteRT keeps the states of the kernel in two tensors from one call of an interpreter to the next. Files that leave
    that to whoever runs them give other outputs in the second call. So operations before the kernel write zeros to
    these tensors, and give them the number of examples of the inputs, too.

    Args:
        graph: The file; changed.
        tensors: Its tensors of integers.
        weights: Codes of weights, those with the fewest bits first.
        kernels: The kernels of 8 bits.
    """

    def __init__(self, graph: LiteRTGraph, tensors: IntegerTensors, weights: Sequence[IntegerFormat], kernels: Kernels):
        self._graph, self._tensors, self._weights, self._kernels = graph, tensors, weights, kernels
        # (id of a weight, number of a gate, scale) -> the constant, which all calls of a layer read.
        self._kernels_of: dict[tuple[int, int, float], int] = {}

    def operators(self, unit: Unit, source: int, target: int, *, cell: Grid, outputs: Grid) -> list[Any]:
        """Returns the operations, in order.

        Args:
            unit: The unit of a `FusedLstm`.
            source: Index of the sequences, of integers.
            target: Index of the outputs of all steps.
            cell: Grid of the cell state.
            outputs: Grid of the outputs, and of the state that the next step reads.
        """
        layer, name = unit.first.operation.cell, self._graph.name(target)
        self._tensors.set_grid(target, outputs)
        state = self._tensor(f"{name}_state", (-1, layer.units), outputs)
        memory = self._tensor(f"{name}_cell", (-1, layer.units), cell)
        added = self._cleared(source, state, memory, layer.units)
        absent = {key: [-1] * count for key, count in _ABSENT.items()}
        kernels, recurrent, biases = self._constants(unit, name, self._tensors.grids[source])
        inputs = [source, *kernels, *recurrent, *absent["peepholes"], *biases, *absent["projection"], state, memory]
        options = self._graph.new_options("UnidirectionalSequenceLSTMOptions", fusedActivationFunction=_TANH)
        operator = self._graph.new_operator(KIND, [*inputs, *absent["normalizations"]], [target], options)
        operator.intermediates = np.array(
            [*(self._intermediate(f"{name}_sums_{gate}") for gate in range(4)), self._hidden(name, outputs)], "int32"
        )
        self._graph.require_op_version(operator, _VERSION)
        for index in (state, memory):
            self._graph.tensor(index).isVariable = True
        return [*added, operator]

    def _cleared(self, source: int, state: int, memory: int, units: int) -> list[Any]:
        """Returns operations that write zeros to the states: products of a feature and zeros."""
        graph, name = self._graph, self._graph.name(state)
        feature = self._tensor(f"{name}_example", (-1, 1), self._tensors.grids[source])
        places = [graph.new_constant(f"{name}_{one}", np.array(one, "int32")) for one in ([0] * 3, [0, 1, 1], [1] * 3)]
        options = graph.new_options("StridedSliceOptions", beginMask=1, endMask=1, shrinkAxisMask=2)
        sliced = graph.new_operator("STRIDED_SLICE", [source, *places], [feature], options)
        zeros = graph.new_constant(f"{name}_zeros", np.zeros((1, units), "int8"))
        graph.set_scales(zeros, np.ones(1), np.zeros(1))
        product = graph.new_operator("MUL", [feature, zeros], [state], graph.new_options("MulOptions"))
        wider = graph.new_operator("QUANTIZE", [state], [memory])
        found = [sliced, product, wider]
        for one in found:
            graph.require_op_version(one, self._kernels.version_of(graph, one))
        # The first version of QUANTIZE that computes 16 bits of 8.
        graph.require_op_version(wider, 2)
        return found

    def _constants(self, unit: Unit, name: str, given: Grid) -> tuple[list[int], list[int], list[int]]:
        """Returns the kernels of the four gates for the inputs, those for the state, and the biases."""
        layer, units = unit.first.operation.cell, unit.first.operation.cell.units
        bias = np.zeros(4 * units) if layer.bias is None else array_of(full_value(layer.bias)).astype("float64")
        found: list[list[int]] = []
        for weight in unit.weights:
            value = array_of(full_value(weight.variable)).astype("float32")
            grid = narrowest_grid(value, self._weights, weight.granularity)
            if weight.variable is layer.kernel:
                largest = np.abs(bias).reshape(4, -1).max(axis=1)[None]
                used = (value != 0.0).any(axis=0).reshape(4, -1).any(axis=1)[None]
                grid = grid_for_bias(grid, used=used, bias=largest, input_scale=float(given.scale), bits=_BIAS_BITS)
                steps = float(given.scale) * grid.scale.reshape(-1).astype("float64")
            found.append(self._gates(weight.variable, grid, np.asarray(grid.codes(value))))
        stored = [np.round(part / step).astype("int32") for part, step in zip(np.split(bias, 4), steps, strict=True)]
        biases = [
            self._constant(f"{name}_bias_{gate}", part, step)
            for gate, (part, step) in enumerate(zip(stored, steps, strict=True))
        ]
        return found[0], found[1], biases

    def _gates(self, variable: Any, grid: Grid, codes: np.ndarray) -> list[int]:
        """Returns the constants of a kernel, one for each gate."""
        parts = zip(np.split(codes, 4, axis=1), grid.scale.reshape(-1), strict=True)
        found = []
        for gate, (part, scale) in enumerate(parts):
            key = id(variable), gate, float(scale)
            if key not in self._kernels_of:
                self._kernels_of[key] = self._constant(f"{variable.path}_{gate}", part.T.astype("int8"), scale)
            found.append(self._kernels_of[key])
        return found

    def _constant(self, name: str, codes: np.ndarray, scale: float) -> int:
        index = self._graph.new_constant(name, codes)
        self._graph.set_scales(index, np.array([scale]), np.zeros(1))
        return index

    def _tensor(self, name: str, shape: tuple[int, ...], grid: Grid) -> int:
        index = self._graph.new_tensor(name, shape, grid.format.dtype)
        self._tensors.set_grid(index, grid)
        return index

    def _intermediate(self, name: str) -> int:
        index = self._graph.new_tensor(name, (0,), "int16")
        self._graph.set_scales(index, np.array([_SUMS]), np.zeros(1))
        return index

    def _hidden(self, name: str, outputs: Grid) -> int:
        return self._tensor(f"{name}_hidden", (0,), outputs)
