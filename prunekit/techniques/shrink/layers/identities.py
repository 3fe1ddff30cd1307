"""Drops calls that return their input in inference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.graph.model_graph import tensors_in
from prunekit.anatomy.layers.linear_kinds import is_linear, is_linear_kind
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.graph.simplify_report import Rewrite

L = keras.layers
DROPPED = "identity dropped"

_RANDOM = (
    *(L.Dropout, L.SpatialDropout1D, L.SpatialDropout2D, L.SpatialDropout3D),
    *(L.AlphaDropout, L.GaussianDropout, L.GaussianNoise),
)
_MERGES = (L.Add, L.Multiply, L.Average, L.Maximum, L.Minimum, L.Concatenate)
_POOLING = (
    *(L.MaxPooling1D, L.MaxPooling2D, L.MaxPooling3D),
    *(L.AveragePooling1D, L.AveragePooling2D, L.AveragePooling3D),
)
_SIDES = (L.ZeroPadding1D, L.ZeroPadding2D, L.ZeroPadding3D, L.Cropping1D, L.Cropping2D, L.Cropping3D)
# Activations whose values are never negative; relu returns them as they are.
_NOT_NEGATIVE = ("relu", "relu6", "sigmoid", "hard_sigmoid", "softmax", "softplus", "exponential")


def drop_identities(graph: LayerGraph) -> tuple[list[Rewrite], list[Skipped]]:
    """Drops the calls that return their input in inference.

    Returns:
        The rewrites, and the calls that are left although their layer may be dropped in other places.
    """
    done: list[Rewrite] = []
    left: list[Skipped] = []
    for level in graph.graphs():
        for call in list(level.calls):
            what = _identity(level, call)
            if not what:
                continue
            reason = _reason(level, call)
            if reason:
                left.append(Skipped(call.name, reason))
                continue
            level.replace(call.output, call.inputs[0])
            done.append(Rewrite(DROPPED, (call.name,), what))
    return done, left


def _reason(level: Graph, call: GraphCall) -> str:
    """Returns why an identity must stay, or ""."""
    if call.fixed_training:
        return "it is called with training=True"
    if not level.can_replace(call.output, call.inputs[0]):
        return "its input is an input or another output of the model"
    if get_keras_mask(call.inputs[0]) is not get_keras_mask(call.output):
        return "it ends the mask of its input"
    return ""


def _identity(level: Graph, call: GraphCall) -> str:
    """Returns in which way a call returns its input, or ""."""
    if len(_read(call)) != 1 or call.output is None:
        return ""
    read, made = call.inputs[0], call.output
    if read.dtype != made.dtype or tuple(read.shape) != tuple(made.shape):
        return ""
    layer = call.operation
    for kinds, is_identity, what in _RULES:
        if isinstance(layer, kinds) and _own_call(layer, kinds) and is_identity(layer, read):
            return what
    if _operation(call, "Reshape") and sum(length is None for length in read.shape) <= 1:
        return "reshapes to the same shape"
    if _operation(call, "Transpose") and _in_order(getattr(layer, "axes", None)):
        return "keeps the order of the axes"
    if _is_relu(call) and _not_negative(level.producer(read)):
        return "relu of values that are not negative"
    return ""


def _read(call: GraphCall) -> list[Any]:
    return tensors_in((call.args, {name: value for name, value in call.kwargs.items() if name != "mask"}))


def _own_call(layer: Any, kinds: Any) -> bool:
    """Returns True if the layer's `call` is that of a type in `kinds`, not one of the user's subclass."""
    return any(isinstance(layer, kind) and type(layer).call is kind.call for kind in kinds)


def _always(layer: Any, read: Any) -> bool:
    return True


def _same_shape(layer: Any, read: Any) -> bool:
    # With two open axes, the same shape may hold other lengths.
    return sum(length is None for length in read.shape[1:]) <= 1


def _rescales_nothing(layer: Any, read: Any) -> bool:
    return bool(np.all(np.equal(layer.scale, 1)) and np.all(np.equal(layer.offset, 0)))


def _pools_nothing(layer: Any, read: Any) -> bool:
    return all(size == 1 for size in (*_tuple(layer.pool_size), *_tuple(layer.strides)))


def _no_sides(layer: Any, read: Any) -> bool:
    sides = layer.padding if hasattr(layer, "padding") else layer.cropping
    return not np.any(sides)


_RULES: tuple[tuple[Any, Callable[[Any, Any], bool], str], ...] = (
    ((L.Identity,), _always, "returns its input"),
    (_RANDOM, _always, "acts in training alone"),
    ((L.ActivityRegularization,), _always, "acts in training alone"),
    ((L.Activation,), lambda layer, read: is_linear(layer.activation), "linear activation"),
    ((L.Reshape, L.Flatten), _same_shape, "reshapes to the same shape"),
    ((L.Permute,), lambda layer, read: _in_order((0, *layer.dims)), "keeps the order of the axes"),
    (_SIDES, _no_sides, "pads or crops nothing"),
    ((L.UpSampling1D, L.UpSampling2D, L.UpSampling3D), lambda layer, read: _ones(layer.size), "repeats nothing"),
    (_POOLING, _pools_nothing, "pools single values"),
    (_MERGES, _always, "merges a single tensor"),
    ((L.Rescaling,), _rescales_nothing, "scale 1, offset 0"),
)


def _ones(size: Any) -> bool:
    return all(one == 1 for one in _tuple(size))


def _tuple(size: Any) -> tuple[int, ...]:
    return (size,) if isinstance(size, int) else tuple(size)


def _in_order(axes: Any) -> bool:
    return axes is not None and list(axes) == list(range(len(axes)))


def _operation(call: GraphCall, name: str) -> bool:
    """Returns True for a function of keras.ops, by the name of its class."""
    return call.kind == name and type(call.operation).__module__.startswith("keras.src.ops.")


def _is_relu(call: GraphCall) -> bool:
    layer = call.operation
    if isinstance(layer, L.ReLU) and _own_call(layer, (L.ReLU,)):
        return layer.max_value is None and not layer.negative_slope and not layer.threshold
    if isinstance(layer, L.Activation) and _own_call(layer, (L.Activation,)):
        return layer.activation is keras.activations.relu
    return _operation(call, "Relu")


def _not_negative(call: GraphCall | None) -> bool:
    if call is None:
        return False
    layer = call.operation
    if isinstance(layer, L.ReLU) and _own_call(layer, (L.ReLU,)):
        return not layer.negative_slope and layer.threshold >= 0
    if is_linear_kind(layer) or (isinstance(layer, L.Activation) and _own_call(layer, (L.Activation,))):
        return any(layer.activation is getattr(keras.activations, name) for name in _NOT_NEGATIVE)
    return any(_operation(call, name) for name in ("Relu", "Relu6", "Sigmoid", "HardSigmoid", "Softmax"))
