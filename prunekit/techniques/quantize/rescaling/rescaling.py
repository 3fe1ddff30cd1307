"""Finds the tensors between layers whose channels can be multiplied by positive factors.

Source: Nagel et al. 2019, arXiv:1906.04721, section 4.1 (scaling equivariance of piecewise linear activations).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import GraphCall
from prunekit.anatomy.graph.model_graph import inputs_in, tensors_in
from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.layers import leaves_of
from prunekit.anatomy.layers.linear_kinds import (
    along_inputs,
    channel_axis,
    input_cells,
    is_linear,
    is_linear_kind,
    is_normalization,
    is_table,
    kernel_names,
    label_shape,
    unusual_state,
)
from prunekit.techniques.quantize.placement.form_operations import ChannelAffine
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.rules import activation_name
from prunekit.techniques.quantize.placement.units import Unit
from prunekit.techniques.quantize.rescaling.channel_scaling import (
    ChannelScaling,
    ChannelWeight,
    output_kernel,
)

L = keras.layers
# Activations with f(s x) = s f(x) for s > 0.
_HOMOGENEOUS = ("linear", "relu", "leaky_relu", "prelu")
_ELEMENTWISE = {L.Dropout, L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D, L.GaussianDropout, L.Identity}
_WINDOWS = {
    getattr(L, f"{name}{rank}D")
    for name in ("MaxPooling", "AveragePooling", "ZeroPadding", "Cropping", "UpSampling")
    for rank in (1, 2, 3)
}
_GLOBAL = {getattr(L, f"Global{name}Pooling{rank}D") for name in ("Average", "Max") for rank in (1, 2, 3)}


def rescalable(placement: Placement, wanted: Callable[[ChannelScaling], bool] | None = None) -> list[ChannelScaling]:
    """Returns the tensors of a model whose channels can be multiplied by positive factors, in order of execution.

    Such a tensor is computed by a linear layer with a positively homogeneous activation, by a normalization with a
    factor for each channel, or by a table; only linear layers and the input kernels of recurrent layers read it. A
    recurrent layer computes none: its outputs pass tanh or gates, or its recurrent kernel reads them. Excluded are
    outputs of the model, layers that are called several times, weights that several layers or operations hold or that
    have a constraint, and outputs with an activity regularizer.

    Args:
        placement: The model's calls in units.
        wanted: Returns False for a tensor that is left out; None = all are returned.
    """
    found = _Finder(placement).found()
    return found if wanted is None else [one for one in found if wanted(one)]


@dataclass(frozen=True, eq=False)
class _Layout:
    """Where the channels of a producer are in a tensor.

    Attributes:
        axis: The axis of the channels.
        channels: Channel of each index along this axis.
    """

    axis: int
    channels: np.ndarray


class _Finder:
    """Finds the tensors of one placement; see `rescalable`."""

    def __init__(self, placement: Placement):
        self._placement = placement
        graphs = placement.graphs
        every = [graphs.main, *graphs.nested.values()]
        # id of a layer -> number of its calls, with those by layers around it whose calls are unknown.
        self._uses = Counter(id(call.operation) for graph in every for call in graph.calls)
        opaque = {id(call.operation): call.operation for graph in every for call in graph.calls}
        for operation in opaque.values():
            if isinstance(operation, L.Layer) and id(operation) not in graphs.nested:
                self._uses.update(map(id, operation._flatten_layers(include_self=False)))
        self._holders = _holders(graphs.main.model)
        for graph in every:
            given = keras.tree.flatten([(call.args, call.kwargs) for call in graph.calls])
            self._holders.update(id(leaf) for leaf in given if isinstance(leaf, keras.Variable))
        # id of a tensor -> the units that read it; the tensors that stand for it in and around nested models.
        self._readers: dict[int, list[Unit]] = {}
        self._same: dict[int, list[Any]] = {}
        # ids of tensors that are needed as they are.
        self._needed = {id(tensor) for tensor in tensors_in(graphs.main.outputs)}
        for units in placement.units.values():
            for unit in units:
                self._connect(unit)

    def _connect(self, unit: Unit) -> None:
        call, nested = unit.first, self._placement.graphs.nested.get(id(unit.first.operation))
        if nested is None:
            for key in dict.fromkeys(map(id, call.inputs)):
                self._readers.setdefault(key, []).append(unit)
            return
        pairs = [
            *zip(tensors_in(inputs_in(call.args, call.kwargs)), tensors_in(nested.inputs), strict=True),
            *zip(tensors_in(nested.outputs), unit.outputs, strict=True),
        ]
        for before, after in pairs:
            # A nested model may add or drop an axis of its inputs.
            if self._uses[id(call.operation)] > 1 or len(before.shape) != len(after.shape):
                self._needed.add(id(before))
            else:
                self._same.setdefault(id(before), []).append(after)

    def found(self) -> list[ChannelScaling]:
        """Returns the scalings."""
        scalings = []
        for units in self._placement.units.values():
            for unit in units:
                found = self._scaling(unit)
                scalings += [] if found is None else [found]
        return scalings

    def _scaling(self, unit: Unit) -> ChannelScaling | None:
        tensor = unit.outputs[0]
        if len(unit.outputs) != 1 or id(unit.first.operation) in self._placement.graphs.nested:
            return None
        axis, written = _produced(unit, len(tensor.shape))
        count = tensor.shape[axis]
        if not written or count is None or not all(map(self._is_free, unit.calls)):
            return None
        readers = self._readers_of(tensor, _Layout(axis, np.arange(count)))
        kernels = tuple(kernel for _, kernel in readers)
        if not readers or not all(self._is_writable(one.variable) for one in (*written, *kernels)):
            return None
        return ChannelScaling(unit, tuple(reader for reader, _ in readers), count, tuple(written), kernels)

    def _is_free(self, call: GraphCall) -> bool:
        """Returns True if no loss and no other call depends on the weights and outputs of a call's layer."""
        layer = call.operation
        has_weights = isinstance(layer, L.Layer) and bool(layer.weights)
        shared = has_weights and self._uses[id(layer)] > 1
        return not shared and getattr(layer, "activity_regularizer", None) is None and "call" not in vars(layer)

    def _is_writable(self, variable: Any) -> bool:
        return getattr(variable, "constraint", None) is None and self._holders[id(variable)] == 1

    def _readers_of(self, tensor: Any, layout: _Layout) -> list[tuple[Unit, ChannelWeight]]:
        """Returns the units that multiply a tensor, with each of their kernels; none if anything else reads it."""
        found, pending = [], [(tensor, layout)]
        while pending:
            tensor, layout = pending.pop(0)
            if id(tensor) in self._needed:
                return []
            pending += [(same, layout) for same in self._same.get(id(tensor), [])]
            for unit in self._readers.get(id(tensor), []):
                kernels = _input_kernels(unit.first, tensor, layout)
                if kernels and self._is_called_once(unit.first.operation):
                    found += [(unit, kernel) for kernel in kernels]
                    continue
                if _is_nonzero(unit.first):
                    continue
                moved = _passed(unit, layout)
                if moved is None:
                    return []
                pending.append((unit.outputs[0], moved))
        return found

    def _is_called_once(self, layer: Any) -> bool:
        # Several recurrent layers may run one cell.
        return all(self._uses[id(one)] == 1 for one in (layer, *input_cells(layer)))


def _holders(model: Any) -> Counter[int]:
    """Returns the number of layers that hold each variable, by id."""
    layers = {id(layer): layer for layer in model._flatten_layers()}
    held: Counter[int] = Counter()
    for layer in layers.values():
        held.update({id(found) for value in vars(layer).values() for found, _ in leaves_of(value, keras.Variable)})
    return held


# ---- the weights that compute channels -------------------------------------------------------------------------------


def _produced(unit: Unit, rank: int) -> tuple[int, list[ChannelWeight]]:
    """Returns the axis of the channels in a unit's outputs, and the weights that the outputs are proportional to.

    There are no weights if the channels cannot be multiplied.
    """
    call, layer = unit.first, unit.first.operation
    if not all(is_normalization(one.operation) or _is_homogeneous(one.operation) for one in unit.calls[1:]):
        return 0, []
    if is_table(layer):
        table = None if unusual_state(layer) else output_kernel(call)
        return rank - 1, [] if table is None else [table]
    if not is_linear_kind(layer):
        axis = _normalized_axis(layer, rank)
        return (0, []) if axis is None else (axis, _normalization_weights(layer))
    axis = rank - 1 if isinstance(layer, L.EinsumDense) else channel_axis(layer, rank)
    kernel = output_kernel(call)
    if kernel is None or unusual_state(layer) or not (is_linear(layer.activation) or _is_homogeneous(layer.activation)):
        return axis, []
    if unit.normalization is not None:
        return axis, _normalization_weights(unit.normalization.operation)
    if layer.bias is None:
        return axis, [kernel]
    # The bias of an EinsumDense has length 1 along the axes that it does not have.
    channels = np.arange(call.output.shape[axis])
    return axis, [kernel, ChannelWeight(layer.bias, channels)] if layer.bias.shape[-1] == len(channels) else []


def _is_homogeneous(function: Any) -> bool:
    """Returns True for an activation function, layer or operation of Keras with f(s x) = s f(x) for s > 0."""
    if isinstance(function, keras.Operation) and type(function).__module__.partition(".")[0] != "keras":
        return False
    return activation_name(function) in _HOMOGENEOUS


def _normalized_axis(layer: Any, rank: int) -> int | None:
    """Returns the only axis with factors of a normalization; None for other layers."""
    if isinstance(layer, ChannelAffine):
        return rank - 1
    if is_normalization(layer):
        return int(layer.axis % rank)
    kinds = [kind for kind in (L.LayerNormalization, L.RMSNormalization) if type(layer).call is kind.call]
    if not kinds:
        return None
    axes = [axis % rank for axis in layer.axis]
    return axes[0] if axes == [rank - 1] else None


def _normalization_weights(layer: Any) -> list[ChannelWeight]:
    gamma = layer.scale if isinstance(layer, L.RMSNormalization) else layer.gamma
    if gamma is None:
        return []
    beta = getattr(layer, "beta", None)
    return [ChannelWeight(one, np.arange(gamma.shape[0])) for one in (gamma, beta) if one is not None]


# ---- the weights that read channels, and the layers between ----------------------------------------------------------


def _input_kernels(call: GraphCall, tensor: Any, layout: _Layout) -> list[ChannelWeight]:
    """Returns the kernels of a layer by the channels of a tensor; none if they cannot be divided by factors.

    Args:
        call: A call of the layer, which reads the tensor.
        tensor: The tensor.
        layout: Where its channels are.
    """
    layer, cells = call.operation, input_cells(call.operation)
    if not cells:
        kernel = _input_kernel(call, layout)
        return [] if kernel is None else [kernel]
    # No kernel of the inputs multiplies a tensor that is an initial state.
    is_sequence = bool(call.args) and call.args[0] is tensor
    if not is_sequence or layout.axis != len(tensor.shape) - 1:
        return []
    if any(unusual_state(one) or "call" in vars(one) for one in (layer, *cells)):
        return []
    return [ChannelWeight(cell.kernel, layout.channels[:, None]) for cell in cells]


def _input_kernel(call: GraphCall, layout: _Layout) -> ChannelWeight | None:
    """Returns the kernel of a linear layer by the channels that it reads; None if it cannot be divided by factors."""
    layer = call.operation
    if not is_linear_kind(layer) or unusual_state(layer) or "call" in vars(layer) or call.input is None:
        return None
    rank, channels = len(call.input.shape), layout.channels
    if isinstance(layer, L.EinsumDense):
        data, labels, _ = einsum_labels(layer)
        shape = label_shape(labels, data[-1], layer.kernel.shape) if layout.axis == rank - 1 else ()
        return ChannelWeight(layer.kernel, channels.reshape(shape)) if shape else None
    if layout.axis != channel_axis(layer, rank):
        return None
    kernel = getattr(layer, kernel_names(layer)[0])
    return ChannelWeight(kernel, along_inputs(layer, kernel.shape, channels))


def _is_nonzero(call: GraphCall) -> bool:
    """Returns True for `x != 0`, of which masks are made: positive factors do not change it."""
    if call.kind != "NotEqual" or type(call.operation).__module__.partition(".")[0] != "keras":
        return False
    constants = [one for one in (*call.args, *call.kwargs.values()) if not isinstance(one, keras.KerasTensor)]
    return len(constants) == 1 and isinstance(constants[0], int | float) and constants[0] == 0


def _passed(unit: Unit, layout: _Layout) -> _Layout | None:
    """Returns where the channels are after a layer that commutes with positive factors; None for other layers."""
    call, layer = unit.first, unit.first.operation
    if len(unit.calls) > 1 or call.input is None or call.output is None or "call" in vars(layer):
        return None
    if getattr(layer, "activity_regularizer", None) is not None:
        return None
    rank = len(call.input.shape)
    if _is_homogeneous(layer) or type(layer) in _ELEMENTWISE or (type(layer) is L.Masking and not layer.mask_value):
        return layout
    if type(layer) in _WINDOWS:
        return layout if layout.axis == channel_axis(layer, rank) else None
    if type(layer) in _GLOBAL:
        axis = layout.axis if layer.keepdims else 1
        return _Layout(axis, layout.channels) if layout.axis == channel_axis(layer, rank) else None
    if type(layer) is L.RepeatVector:
        return _Layout(2, layout.channels)
    if type(layer) is L.Permute:
        return _Layout(1 + tuple(layer.dims).index(layout.axis), layout.channels)
    if type(layer) in (L.Flatten, L.Reshape):
        return _reshaped(call, layout)
    return None


def _reshaped(call: GraphCall, layout: _Layout) -> _Layout | None:
    """Returns where the channels are after Flatten or Reshape; None unless one axis tells them."""
    before, after = call.input.shape[1:], call.output.shape[1:]
    if None in (*before, *after) or math.prod(before) == 0:
        return None
    channels = np.broadcast_to(
        layout.channels.reshape([-1 if axis + 1 == layout.axis else 1 for axis in range(len(before))]), before
    )
    if getattr(call.operation, "data_format", "") == "channels_first":
        # Flatten moves the channels to the end, whatever the first axis is.
        channels = np.moveaxis(channels, 0, -1)
    channels = channels.reshape(after)
    for axis in reversed(range(len(after))):
        rows = np.moveaxis(channels, axis, -1).reshape(-1, after[axis])
        if (rows == rows[0]).all():
            return _Layout(axis + 1, rows[0].copy())
    return None
