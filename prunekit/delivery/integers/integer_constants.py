"""Rounds the constants that the integer operations of a LiteRT file read: weights, biases and operands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from prunekit.delivery.integers.integer_kernels import Kernels
from prunekit.delivery.integers.integer_tensors import IntegerTensors
from prunekit.delivery.litert.litert_folding import Linear
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import (
    FEW_BITS,
    Granularity,
    Grid,
    IntegerFormat,
    grid_between,
    grid_for_bias,
)
from prunekit.techniques.quantize.grids.ranges import narrowest_grid


class IntegerConstants:
    """The constants of a file that became integers.

    Args:
        graph: The file.
        tensors: Its tensors of integers.
        weights: Codes of weights, those with the fewest bits first.
        kernels: The kernels that read the constants.
    """

    def __init__(self, graph: LiteRTGraph, tensors: IntegerTensors, weights: Sequence[IntegerFormat], kernels: Kernels):
        self._graph, self._tensors, self._weights, self._kernels = graph, tensors, weights, kernels
        # (index of a kernel, its codes and scales) -> index of its integers, which all calls of a layer read.
        self._kernel_of: dict[tuple[Any, ...], int] = {}
        # Index of the results of a convolution -> the kernels of all convolutions of its layer, as one.
        self._joined: dict[int, np.ndarray] = {}
        # (index of a kernel, codes and scales of a bias, the outputs' grid) -> index of the bias, which steps read.
        self._bias_of: dict[tuple[Any, ...], int] = {}

    def join_kernels(self) -> None:
        """Gives convolutions that compute the pixels of blocks the scales of one kernel, which the file holds once."""
        graph = self._graph
        made = {int(index): one for one in graph.operators for index in one.outputs}
        for operator in graph.operators:
            joining = made.get(int(operator.inputs[0])) if graph.kind(operator) == "DEPTH_TO_SPACE" else None
            if joining is None or graph.kind(joining) != "CONCATENATION":
                continue
            parts = [one for one in map(made.get, map(int, joining.inputs)) if one and graph.kind(one) == "CONV_2D"]
            kernels = [one for one in (graph.values(int(part.inputs[1])) for part in parts) if one is not None]
            outputs = graph.shape(int(operator.outputs[0]))[-1]
            if len(kernels) == len(joining.inputs) and not any(len(one) % outputs for one in kernels):
                # All pixels of an output, for each of its pixels.
                by_output = [one.reshape(-1, outputs, one[0].size).swapaxes(0, 1) for one in kernels]
                whole = np.concatenate([one.reshape(outputs, 1, 1, -1) for one in by_output], axis=-1)
                for index, one in zip(joining.inputs, kernels, strict=True):
                    self._joined[int(index)] = np.tile(whole, (len(one) // outputs, 1, 1, 1))

    def round(self, operator: Any, given: Grid | None) -> None:
        """Rounds the constants that an operation reads on a grid; None = each on a grid of its own."""
        inputs = [int(index) for index in operator.inputs]
        for place, index in enumerate(inputs):
            values = self._graph.values(index)
            if values is not None:
                low, high = values.min(initial=0.0), values.max(initial=0.0)
                grid = given or grid_between(low, high, self._kernels.constants)
                inputs[place] = self._tensors.new_constant(index, grid.codes(values), grid)
        operator.inputs = np.array(inputs, "int32")

    def round_weights(
        self, operator: Any, places: Linear, readers: Mapping[int, Sequence[Any]], outputs: Grid
    ) -> float:
        """Rounds kernel and bias of a linear operation; returns the largest change of a bias, in steps of its results.

        A bias is stored in steps of the inputs times those of the weights. They are larger than those of the results
        where these are small next to what the sums may be.

        Args:
            operator: The operation, which reads integers.
            places: Where it reads them.
            readers: Index of a tensor -> the operations that read it, before any became integer.
            outputs: Grid of its results.
        """
        inputs, change = [int(index) for index in operator.inputs], 0.0
        weight = np.asarray(self._graph.values(inputs[places.weights]))
        whole = self._joined.get(int(operator.outputs[0]), weight)
        grid = narrowest_grid(whole, self._weights, Granularity((places.axis,)))
        bias = self._bias(inputs, places, readers)
        if bias is not None:
            step, shape = float(self._tensors.grid_of(inputs[places.values]).scale), grid.scale.shape
            others = tuple(axis for axis in range(whole.ndim) if axis != places.axis)
            used = np.asarray(whole.any(axis=others)).reshape(shape)
            grid = grid_for_bias(
                grid, used=used, bias=bias.reshape(shape), input_scale=step, bits=self._kernels.bias_bits
            )
            steps = step * grid.scale.reshape(-1).astype("float64")
            stored = np.round(bias / steps).astype(self._kernels.biases)
            change = float(np.abs(stored * steps - bias).max(initial=0) / outputs.scale)
            former = inputs[places.bias if inputs[places.bias] >= 0 else places.weights]
            same = float(outputs.scale), int(outputs.zero_point)
            shared = inputs[places.weights], stored.tobytes(), steps.tobytes(), same
            if shared not in self._bias_of:
                self._bias_of[shared] = self._graph.new_constant(self._graph.name(former), stored)
                self._graph.set_scales(self._bias_of[shared], steps, np.zeros(len(steps)))
            inputs[places.bias] = self._bias_of[shared]
        few = grid.format.bits <= FEW_BITS and self._graph.kind(operator) in self._kernels.four_bits
        former, codes = inputs[places.weights], grid.codes(weight)
        key = former, few, codes.tobytes(), grid.scale.tobytes(), len(self._kernel_of) if bias is None else None
        if key not in self._kernel_of:
            self._kernel_of[key] = self._tensors.new_constant(former, codes, grid, places.axis, few=few)
        inputs[places.weights] = self._kernel_of[key]
        operator.inputs = np.array(inputs, "int32")
        return change

    def _bias(self, inputs: Sequence[int], places: Linear, readers: Mapping[int, Sequence[Any]]) -> np.ndarray | None:
        """Returns the bias that an operation gets in the file; None without one.

        XNNPACK's cache of packed weights, whose scales depend on the tensors, tells them by the addresses of kernel and
        bias. Operations that share a kernel therefore need biases, which may be zero, or else kernels of their own.
        """
        weights, *bias = inputs[places.weights], *inputs[places.bias :]
        if bias == [-1] and len(readers[weights]) > 1:
            return np.zeros(self._graph.shape(weights)[places.axis], "float32")
        return self._graph.values(bias[0]) if bias else None
