"""Folds the constant values of removed channels into the biases of the layers that read them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.channels.channel_links import WeightAxes
from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.channels.weight_entries import masked, zeroed
from prunekit.anatomy.layers.linear_kinds import channel_axis, is_linear, is_linear_kind, is_normalization
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.core.statistics.layer_inputs import observing_inputs, rows_in_parts
from prunekit.core.statistics.layer_products import LayerProduct, product_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.adjustments import Adjustment
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

# Largest variation of what a layer reads, relative to its largest output, that is rounding.
ROUNDING = 1e-5


@dataclass(frozen=True, eq=False)
class Constants:
    """What takes over the constants of removed channels.

    Attributes:
        values: id of a variable -> its new value, of the former shape.
        biases: id of a layer without a bias -> the bias that it gets, for the kept outputs.
        adjustments: What was changed where, with errors.
    """

    values: dict[int, np.ndarray]
    biases: dict[int, np.ndarray]
    adjustments: tuple[Adjustment, ...]


NO_CONSTANTS = Constants({}, {}, ())


def fold_constants(channels: Channels, removed: np.ndarray, constant: np.ndarray, inputs: Any) -> Constants:
    """Returns what the layers that read constant channels need without these channels.

    The model runs on the inputs, and each layer's product with the constant channels is observed. Where it is the same
    for all examples and positions, it is added to the bias, or subtracted from the moving mean of a batch normalization
    that alone reads the layer, or becomes a new bias: the outputs stay equal. Otherwise its mean is added, which has
    the smallest squared error.

    Args:
        channels: The channels of the model.
        removed: All removed channels.
        constant: Those of them that no input reaches.
        inputs: Some inputs of the model, which differ.
    """
    kept = channels.kept_numbers(removed)
    others = channels.kept_numbers(np.setdiff1d(removed, constant))
    reference = {id(variable): (variable, value) for variable, value in zeroed(channels, others)}
    readers = _readers(channels, kept, channels.kept_numbers(constant), reference)
    if not readers:
        return NO_CONSTANTS
    by_layer: dict[int, list[_Reader]] = {}
    for reader in readers:
        by_layer.setdefault(id(reader.layer), []).append(reader)

    def see(layer: Any, args: tuple) -> None:
        for reader in by_layer[id(layer)]:
            reader.observe(args)

    values = [(variable, ops.convert_to_tensor(value, variable.dtype)) for variable, value in reference.values()]
    with observing_inputs([reader.layer for reader in readers], see, values):
        channels.model(inputs, training=False)
    return _folded(channels, [reader for reader in readers if reader.reads_constants], kept)


# ---- what the layers read --------------------------------------------------------------------------------------------


class _Reader:
    """The product of one kernel with the constant channels.

    Args:
        product: The product of the kernel.
        kernel: Its values.
        reading: The same values with zeros everywhere but at the constant channels.
        count: Number of entries of the input axis that are constant.
    """

    def __init__(self, product: LayerProduct, kernel: np.ndarray, reading: np.ndarray, count: int):
        self.product, self.layer, self.count = product, product.target.layer, count
        self._matrix, self._reading = (product.matrix(one.astype("float32")) for one in (kernel, reading))
        self._places = np.flatnonzero(self._reading.any(axis=(0, 2)))
        self._sum, self._rows, self._size = np.zeros(self._matrix[:, 0].shape), 0, 0.0
        self._low, self._high = np.full(self._sum.shape, np.inf), np.full(self._sum.shape, -np.inf)

    def observe(self, args: tuple) -> None:
        """Adds one call of the layer."""
        # A copy has no mask: masked positions would look like constants that differ.
        for part in rows_in_parts(self.product, (ops.copy(args[0]), *args[1:])):
            rows = array_of(part)
            self._size = max(self._size, float(np.abs(rows @ self._matrix).max(initial=0.0)))
            read = rows[:, :, self._places] @ self._reading[:, self._places]
            self._sum += read.sum(axis=1, dtype="float64")
            self._rows += read.shape[1]
            self._low = np.minimum(self._low, read.min(axis=1))
            self._high = np.maximum(self._high, read.max(axis=1))

    @property
    def reads_constants(self) -> bool:
        """True if a constant is not zero."""
        return self._rows > 0 and bool(np.any(self._low != 0) or np.any(self._high != 0))

    @property
    def shift(self) -> np.ndarray:
        """The mean of what is read, shape (groups, outputs)."""
        return self._sum / self._rows

    def error(self, shift: np.ndarray | float) -> float | None:
        """Returns the largest change of the outputs if `shift` is what is added; None if it is rounding."""
        change = max(float(np.max(self._high - shift)), float(np.max(shift - self._low)))
        error = change / self._size if self._size else 0.0
        return None if error <= ROUNDING else error


def _readers(
    channels: Channels, kept: np.ndarray, varying: np.ndarray, reference: dict[int, tuple[Any, np.ndarray]]
) -> list[_Reader]:
    """Returns the kernels that read constant channels and compute kept ones."""
    found = []
    for target in find_targets(channels.model)[0]:
        axes = channels.links.weights.get(id(target.variable))
        product = None if axes is None else _product(target)
        if axes is None or product is None:
            continue
        inputs: dict[int, np.ndarray] = {}
        outputs: dict[int, np.ndarray] = {}
        for axis, numbers in axes.channels.items():
            (inputs if axis in target.in_axes and axis not in target.parallel_axes else outputs)[axis] = numbers
        count = sum(int(np.count_nonzero(~varying[numbers])) for numbers in inputs.values())
        if not count:
            continue
        _, kernel = reference.get(id(target.variable), (None, array_of(target.variable)))
        reading = kernel - masked(kernel, replace(axes, channels=inputs), varying)
        reading = masked(reading, WeightAxes(axes.variable, axes.name, outputs), kept)
        if reading.any():
            found.append(_Reader(product, kernel, reading, count))
    return found


def _product(target: Target) -> LayerProduct | None:
    try:
        product = product_of(target)
    except ValueError:
        return None
    return None if product.diagonal or not target.in_axes else product


# ---- where the constants go ------------------------------------------------------------------------------------------


def _folded(channels: Channels, readers: Sequence[_Reader], kept: np.ndarray) -> Constants:
    values: dict[int, np.ndarray] = {}
    biases: dict[int, np.ndarray] = {}
    adjustments = []
    means = _MovingMeans(channels.model)
    inner = {id(layer) for layers in channels.links.inner.values() for layer in layers.values()}
    for reader in readers:
        layer, shift = reader.layer, reader.shift
        bias, mean = reader.product.bias(shift), means.after(layer)
        error = reader.error(shift)
        if bias is not None:
            _add(values, layer.bias, bias)
            where = "the bias"
        elif mean is not None:
            _add(values, mean.moving_mean, -shift.reshape(-1))
            where = f"the moving mean of {mean.name}"
        elif is_linear_kind(layer) and "use_bias" in layer.get_config() and id(layer) not in inner:
            (axis,) = reader.product.target.out_axes
            numbers = channels.links.weights[id(reader.product.target.variable)].channels.get(axis)
            biases[id(layer)] = shift.reshape(-1) if numbers is None else shift.reshape(-1)[kept[numbers]]
            where = "a new bias"
        else:
            error, where = reader.error(0.0), ""
        adjustments.append(Adjustment(reader.product.target.name, _change(reader.count, where, error), error))
    return Constants(values, biases, tuple(adjustments))


def _change(count: int, where: str, error: float | None) -> str:
    some = f"{count} constant inputs" if count > 1 else "1 constant input"
    if not where:
        return f"{some} dropped: the layer has no bias"
    if error is None:
        return f"{some} folded into {where}"
    return f"mean of {some} folded into {where}: not the same at all positions"


def _add(values: dict[int, np.ndarray], variable: Any, more: np.ndarray) -> None:
    values[id(variable)] = values.get(id(variable), array_of(variable).astype("float64")) + more


class _MovingMeans:
    """Finds the batch normalization that alone reads the output of a layer.

    Its mean takes over a constant without an effect on training, where it subtracts the mean of the batch.
    """

    def __init__(self, model: Any):
        self._places: dict[int, tuple[Graph, GraphCall]] = {}
        try:
            graph = LayerGraph(model)
        except ValueError:
            return
        calls = [(level, call) for level in graph.graphs() for call in level.calls]
        self._places = {
            id(call.operation): (level, call) for level, call in calls if graph.calls_of(call.operation) == 1
        }

    def after(self, layer: Any) -> keras.layers.BatchNormalization | None:
        """Returns the batch normalization after a layer; None without one."""
        level, call = self._places.get(id(layer), (None, None))
        # The outputs of an EinsumDense may have several axes of channels.
        known = is_linear_kind(layer) and not isinstance(layer, keras.layers.EinsumDense)
        if level is None or call is None or not known or not is_linear(layer.activation):
            return None
        readers = level.readers(call.output)
        if call.output is None or level.is_output(call.output) or len(readers) != 1:
            return None
        found = readers[0]
        norm, axis = found.operation, channel_axis(layer, len(call.output.shape))
        once = id(norm) in self._places and not found.fixed_training
        own_axis = is_normalization(norm) and norm.axis % len(call.output.shape) == axis
        return norm if once and own_axis else None
