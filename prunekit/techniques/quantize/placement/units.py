"""The calls of a model in units, each of which an integer kernel computes as one."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.layers.counting import einsum_axes, einsum_labels
from prunekit.anatomy.layers.layers import sublayers, weights_of
from prunekit.anatomy.layers.linear_kinds import (
    SEPARABLE,
    channel_axis,
    is_fixed_normalization,
    is_linear,
    is_linear_kind,
    is_normalization,
    kind_of,
)
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.placement.form_operations import ChannelAffine, FusedLstm
from prunekit.techniques.quantize.placement.rules import (
    FUSING,
    MOVES,
    OWN,
    RoundingRule,
    activation_rule,
    is_relu,
    rule_of,
)

# Roles of the weights that are rounded. Biases are stored with 32 bits.
WEIGHT_ROLES = ("kernel", "recurrent_kernel", "depthwise_kernel", "embedding")

_DIVISIONS = ("Divide", "TrueDivide")
# Layers that compute something else under a mask.
_MASKED = (keras.layers.GlobalAveragePooling1D, keras.layers.Softmax)


@dataclass(eq=False)
class SharedGrid:
    """Tensors that are rounded on one grid.

    Attributes:
        name: Name of the layer or input that computes the first of them.
        signed: None for a grid that is chosen from data; for one that is prescribed, whether it has a sign.
        tensors: The tensors.
        highest: Upper end of a prescribed grid.
        is_cell: True for the cell state of an LSTM: 16 bits, and a step that is a power of two.
    """

    name: str
    signed: bool | None = None
    tensors: list[Any] = field(default_factory=list)
    highest: float = 1.0
    is_cell: bool = False

    def codes(self, form: IntegerFormat) -> IntegerFormat:
        """Returns the codes of this grid, where those of tensors between layers are `form`."""
        return IntegerFormat(16) if self.is_cell else form


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A weight that is rounded, in one unit.

    Attributes:
        variable: The weight.
        name: Path of the weight in the model.
        granularity: Which of its entries share a scale: those of one output unit, or groups of these.
    """

    variable: Any
    name: str
    granularity: Granularity


@dataclass(frozen=True, eq=False)
class Unit:
    """Calls between which no tensor is rounded, because an integer kernel computes them as one.

    Attributes:
        name: Name of the last layer or operation.
        calls: The calls, in order.
        rule: How the results are rounded.
        is_linear: True for a Dense or convolution layer with an integer kernel.
        weights: The weights of the first call that are rounded.
        between: Range of the tensor between the two convolutions of a separable one, between the factor and the
            offset of a rescaling, or between the products of an EinsumDense and a bias along axes of the inputs.
        before_activation: Range of the outputs before an activation of the layer that a kernel of its own computes.
        cell: Range of the cell state of an LSTM.
    """

    name: str
    calls: tuple[GraphCall, ...]
    rule: RoundingRule
    is_linear: bool = False
    weights: tuple[RoundedWeight, ...] = ()
    between: SharedGrid | None = None
    before_activation: SharedGrid | None = None
    cell: SharedGrid | None = None

    @property
    def first(self) -> GraphCall:
        """The first call, which may have weights."""
        return self.calls[0]

    @property
    def function(self) -> Any:
        """The activation function of a layer with a kernel; else the layer or operation."""
        operation = self.first.operation
        return operation.activation if is_linear_kind(operation) else operation

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The tensors that the last call computes."""
        return self.calls[-1].outputs

    @functools.cached_property
    def adds_constants(self) -> bool:
        """True if results may be numbers other than zero that are no entries of what is read."""
        call = self.first
        leaves = keras.tree.flatten((call.args, call.kwargs))
        if call.kind == "Clip":
            return True
        if call.kind in ("Concatenate", "Stack"):
            leaves = [leaf for leaf in leaves if is_constant(leaf)]
        elif call.kind not in ("Where", "Maximum", "Minimum", "Pad"):
            return False
        constants = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, keras.KerasTensor)]
        return any(bool(np.any(array_of(constant))) for constant in constants)

    @functools.cached_property
    def has_normalization(self) -> bool:
        """True if a batch normalization is among the calls: folded into the first one, or alone."""
        return any(is_normalization(call.operation) for call in self.calls)

    @functools.cached_property
    def normalization(self) -> GraphCall | None:
        """The call of a batch normalization that is folded into the first call."""
        return next((call for call in self.calls[1:] if is_normalization(call.operation)), None)


@dataclass(frozen=True, eq=False)
class DisplayNames:
    """Names for reports.

    Attributes:
        layers: id of a layer or operation -> its name, where that is not its own: inside opened layers.
        weights: id of a weight -> its path.
    """

    layers: Mapping[int, str]
    weights: Mapping[int, str]

    def of(self, call: GraphCall) -> str:
        """Returns the name of a call's layer or operation."""
        return self.layers.get(id(call.operation), call.name)


def units_of(
    graph: Graph,
    calls_of: Mapping[int, int],
    names: DisplayNames,
    kept_float: Mapping[int, str],
    group_size: int | None = None,
) -> list[Unit]:
    """Returns the calls of a graph in units.

    Args:
        graph: The graph.
        calls_of: id of a layer or operation -> how often the graphs of the model call it.
        names: Names for reports.
        kept_float: id of a layer or weight that computes in floating point although it need not -> the reason.
        group_size: So many consecutive inputs of an output share a scale; None = all of them.
    """
    units, taken = [], set[int]()
    for call in graph.calls:
        if id(call) in taken:
            continue
        calls = [call]
        rule = _first_rule(call, kept_float)
        if rule.fuses_relu:
            calls += _fused(graph, call, calls_of, kept_float)
        taken.update(map(id, calls))
        name, last = names.of(call), names.of(calls[-1])
        units.append(
            Unit(
                last,
                tuple(calls),
                _unit_rule(call, rule),
                is_linear_kind(call.operation) and rule.output != "float",
                tuple(one for one in _weights_of(call, name, names, group_size) if id(one.variable) not in kept_float),
                SharedGrid(f"{name} (inside)") if rule.output != "float" and _rounds_inside(call) else None,
                SharedGrid(f"{name} (before its activation)")
                if rule.output != "float" and _rounds_before_activation(call)
                else None,
                SharedGrid(f"{name} (its cell state)", is_cell=True) if isinstance(call.operation, FusedLstm) else None,
            )
        )
    return units


def _first_rule(call: GraphCall, kept_float: Mapping[int, str]) -> RoundingRule:
    operation = call.operation
    if graph_of(operation) is not None:
        return MOVES
    if id(operation) in kept_float:
        return RoundingRule("float", reason=kept_float[id(operation)])
    if is_any_normalization(operation) and not _is_depthwise(call):
        return RoundingRule(
            "float",
            reason="normalizations have an integer kernel for the last axis, if the lengths of all axes are known",
        )
    if isinstance(operation, FusedLstm):
        return OWN
    if isinstance(operation, ChannelAffine):
        return FUSING
    if call.kind in _DIVISIONS and divisor(call) is not None:
        return FUSING
    if _is_einsum(call) and einsum_axes(operation, len(call.inputs[0].shape)) is None:
        return RoundingRule("float", reason="its equation is not that of a product of matrices")
    if isinstance(operation, _MASKED) and any(get_keras_mask(tensor) is not None for tensor in call.inputs):
        return RoundingRule("float", reason="its mask has no integer kernel")
    return rule_of(operation, len(call.inputs)) or RoundingRule("float", reason="its `call` cannot be followed")


def _is_einsum(call: GraphCall) -> bool:
    return kind_of(call.operation) is keras.layers.EinsumDense


def is_any_normalization(layer: Any) -> bool:
    """Returns True for a normalization that multiplies with constants and adds others, in inference."""
    return is_normalization(layer) or is_fixed_normalization(layer) or isinstance(layer, ChannelAffine)


def divisor(call: GraphCall) -> Any:
    """Returns the number or array by which a call divides a tensor in floating point; None for other calls.

    Kernels multiply with its reciprocal.
    """
    named = dict(zip(("x1", "x2"), call.args, strict=False)) | call.kwargs
    first, second = named.get("x1"), named.get("x2")
    if call.kind not in _DIVISIONS or not isinstance(first, keras.KerasTensor) or "float" not in first.dtype:
        return None
    is_known = isinstance(second, int | float) or _is_array(second)
    return second if is_known and bool(np.all(array_of(second))) else None


def is_constant(leaf: Any) -> bool:
    """Returns True for an argument of a call that is an array or tensor of floating-point values."""
    return _is_array(leaf) and "float" in str(getattr(leaf, "dtype", ""))


def _is_array(leaf: Any) -> bool:
    is_tensor = keras.ops.is_tensor(leaf) or hasattr(leaf, "__array__")
    return is_tensor and not isinstance(leaf, keras.Variable | keras.KerasTensor)


def _is_depthwise(call: GraphCall) -> bool:
    """Returns True for a normalization that files compute as a depthwise convolution, if it is not folded."""
    if call.output is None or call.output.shape[-1] is None or None in call.output.shape[1:]:
        return False
    layer, rank = call.operation, len(call.output.shape)
    if isinstance(layer, ChannelAffine):
        return True
    if is_normalization(layer):
        return bool(layer.axis % rank == rank - 1)
    return all(length == 1 for length in tuple(layer.mean.shape)[:-1])


def _fused(
    graph: Graph, call: GraphCall, calls_of: Mapping[int, int], kept_float: Mapping[int, str]
) -> list[GraphCall]:
    """Returns the calls after one that are computed together with it: batch normalization, then a ReLU."""
    found: list[GraphCall] = []
    if not is_linear(getattr(call.operation, "activation", None)):
        return found
    if is_linear_kind(call.operation):
        reader = _only_reader(graph, call)
        if reader is not None and id(reader.operation) not in kept_float and _can_be_folded(call, reader, calls_of):
            found.append(reader)
    reader = _only_reader(graph, found[-1] if found else call)
    if reader is not None and reader.input is not None and is_relu(reader.operation):
        found += [reader] if id(reader.operation) not in kept_float else []
    return found


def _only_reader(graph: Graph, call: GraphCall) -> GraphCall | None:
    """Returns the only call that reads the output of a call, if nothing else needs this output."""
    if call.output is None or graph.is_output(call.output):
        return None
    readers = graph.readers(call.output)
    return readers[0] if len(readers) == 1 else None


def _can_be_folded(call: GraphCall, reader: GraphCall, calls_of: Mapping[int, int]) -> bool:
    layer, other = call.operation, reader.operation
    if not is_normalization(other) or reader.fixed_training or reader.input is None or reader.output is None:
        return False
    if reader.kwargs.get("mask") is not None:
        return False
    if layer.activity_regularizer is not None or other.activity_regularizer is not None:
        return False
    if layer.compute_dtype != other.compute_dtype or other.compute_dtype != reader.output.dtype:
        return False
    rank = len(call.output.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        _, kernel, output = einsum_labels(layer)
        channels = rank - 1 if output[-1] in kernel else -1
    else:
        channels = channel_axis(layer, rank)
    return other.axis % rank == channels and calls_of[id(layer)] == calls_of[id(other)] == 1


def _unit_rule(call: GraphCall, rule: RoundingRule) -> RoundingRule:
    """Returns the rule of a unit's results: of the activation, if the layer has one."""
    activation = getattr(call.operation, "activation", None)
    if not is_linear_kind(call.operation) or rule.output == "float" or is_linear(activation):
        return rule
    return activation_rule(activation)


def _rounds_inside(call: GraphCall) -> bool:
    layer = call.operation
    if _is_einsum(call):
        return not _adds_to_channels(call)
    separable = isinstance(layer, SEPARABLE) and is_linear_kind(layer)
    return separable or (call.kind == "Rescaling" and bool(np.any(np.asarray(layer.offset))))


def _adds_to_channels(call: GraphCall) -> bool:
    """Returns True for an EinsumDense without bias, or with one that depends only on axes that its kernel has."""
    layer, axes = call.operation, einsum_axes(call.operation, len(call.inputs[0].shape))
    if layer.bias is None or axes is None:
        return True
    labels = axes.output[len(axes.output) - len(layer.bias.shape) :]
    return all(length == 1 or one not in axes.rows for one, length in zip(labels, layer.bias.shape, strict=True))


def _rounds_before_activation(call: GraphCall) -> bool:
    activation = getattr(call.operation, "activation", None)
    return is_linear_kind(call.operation) and not is_linear(activation) and not is_relu(activation)


def _weights_of(
    call: GraphCall, layer_name: str, names: DisplayNames, group_size: int | None
) -> tuple[RoundedWeight, ...]:
    if isinstance(call.operation, FusedLstm):
        # Its kernel has one scale for all outputs of a gate.
        cell, gates = call.operation.cell, Granularity((1,), run=call.operation.cell.units)
        return tuple(RoundedWeight(one, names.weights[id(one)], gates) for one in (cell.kernel, cell.recurrent_kernel))
    if not isinstance(call.operation, keras.layers.Layer) or graph_of(call.operation) is not None:
        return ()
    found, pending = [], [call.operation]
    while pending:
        layer = pending.pop(0)
        pending += sublayers(layer)
        for variable, label, spec in weights_of(layer):
            if spec.role in WEIGHT_ROLES:
                # A row of a table is read as a whole. What is left are the inputs of an output: those of all positions
                # of a window, one position after the other.
                axes = spec.parallel_axes if spec.role == "embedding" else {*spec.out_axes, *spec.parallel_axes}
                shared = Granularity(tuple(sorted(axes))).in_groups(group_size, tuple(variable.shape))
                name = names.weights.get(id(variable), f"{layer_name}/{label}")
                found.append(RoundedWeight(variable, name, shared))
    return tuple(found)
