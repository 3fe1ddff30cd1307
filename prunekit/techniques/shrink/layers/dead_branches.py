"""Drops from sums the branches whose values are zero, whatever the model reads."""

from __future__ import annotations

from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.layers.linear_kinds import is_linear_kind, is_normalization
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.shrink.graph.folding import affine_of
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.graph.simplify_report import Rewrite

L = keras.layers
ZERO = "zero branch dropped"
# Layers and functions of keras.ops that return zeros for zeros.
_ZERO_FOR_ZERO = (
    "Activation ReLU LeakyReLU PReLU ELU Relu Relu6 Silu Gelu Tanh Dropout SpatialDropout1D SpatialDropout2D "
    "MaxPooling1D MaxPooling2D AveragePooling1D AveragePooling2D GlobalAveragePooling1D GlobalAveragePooling2D "
    "GlobalMaxPooling1D GlobalMaxPooling2D UpSampling1D UpSampling2D ZeroPadding1D ZeroPadding2D Reshape Permute "
    "Flatten Transpose"
).split()


def drop_dead_branches(graph: LayerGraph) -> tuple[list[Rewrite], list[Skipped]]:
    """Drops from every sum the summands that are exactly zero, with the calls that only they need."""
    done: list[Rewrite] = []
    for level in graph.graphs():
        for call in list(level.calls):
            if call not in level.calls or not is_sum(call):
                continue
            zeros = [one for one in summands(call) if _is_zero(graph, level, one)]
            before = list(level.calls)
            if zeros and _dropped(level, call, zeros):
                names = tuple(one.name for one in before if one not in level.calls and one.output is not call.output)
                done.append(Rewrite(ZERO, names, f"from {call.name}"))
    return done, []


def is_sum(call: GraphCall) -> bool:
    """Returns True for an Add layer, and for the addition of keras.ops."""
    if isinstance(call.operation, L.Add):
        return type(call.operation).call is L.Add.call
    return call.kind == "Add" and type(call.operation).__module__.startswith("keras.src.ops.")


def summands(call: GraphCall) -> list[Any]:
    """Returns the tensors that a sum adds; [] if it adds numbers too."""
    leaves = keras.tree.flatten(call.args)
    return leaves if all(isinstance(leaf, keras.KerasTensor) for leaf in leaves) else []


def _dropped(level: Graph, call: GraphCall, zeros: list[Any]) -> bool:
    kept = [one for one in summands(call) if not any(one is zero for zero in zeros)]
    whole = [one for one in kept if tuple(one.shape) == tuple(call.output.shape) and one.dtype == call.output.dtype]
    if len(kept) == 1 and whole and level.can_replace(call.output, kept[0]):
        level.replace(call.output, kept[0])
        return True
    if len(kept) > 1 and whole and isinstance(call.operation, L.Add):
        # The Add layer has no weights, so that it is called on fewer tensors without being made otherwise.
        call.args = (kept,)
        call.map_inputs(lambda tensor: tensor)
        level.sweep()
        return True
    return False


def _is_zero(graph: LayerGraph, level: Graph, tensor: Any) -> bool:
    call = level.producer(tensor)
    if call is None or call.output is None or call.fixed_training:
        return False
    layer = call.operation
    if is_linear_kind(layer):
        return _has_zero_weights(graph, layer)
    if is_normalization(layer):
        affine = affine_of(graph, call)
        return not affine.scale.any() and not affine.shift.any()
    if call.kind in _ZERO_FOR_ZERO and type(layer).__module__.startswith("keras."):
        return call.input is not None and _keeps_zero(layer) and _is_zero(graph, level, call.input)
    return False


def _has_zero_weights(graph: LayerGraph, layer: Any) -> bool:
    if getattr(layer, "quantization_mode", None) is not None or getattr(layer, "lora_enabled", False):
        return False
    bias = graph.value(layer, "bias")
    names = ("pointwise_kernel",) if hasattr(layer, "pointwise_kernel") else ("kernel",)
    values = [graph.value(layer, name) for name in names]
    if any(value is None or np.any(value) for value in values) or (bias is not None and np.any(bias)):
        return False
    return _keeps_zero(layer)


def _keeps_zero(layer: Any) -> bool:
    """Returns True if the layer's activation, if it has one, returns 0 for 0."""
    if isinstance(layer, L.ReLU) and layer.threshold:
        return not layer.negative_slope
    activation = getattr(layer, "activation", None)
    if activation is None:
        return True
    return not np.any(keras.ops.convert_to_numpy(activation(keras.ops.zeros((1, 4)))))
