"""Rules of recurrent layers and of the wrappers around layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    NotFollowedError,
    Rule,
    Walk,
    channel_axis,
    concatenated,
    elementwise,
    keep_other_axes,
    maps_zero_to_zero,
)
from prunekit.anatomy.graph.model_graph import graph_of

_GATES = {"SimpleRNNCell": 1, "GRUCell": 3, "LSTMCell": 4, "ConvLSTMCell": 4}


def _recurrent(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x, links = call.operation, call.x, walk.links
    cell = layer.cell
    if type(cell).__name__ not in _GATES or not type(cell).__module__.startswith("keras."):
        raise NotFollowedError(f"its cell {type(cell).__name__} is not known")
    gates = _GATES[type(cell).__name__]
    axis = channel_axis(layer, len(x.shape))
    keep_other_axes(walk, x, axis)
    links.bind(cell.kernel, -2, x.channels[axis])
    units = links.weight(cell.recurrent_kernel, -2)
    for weight in (cell.kernel, cell.recurrent_kernel, cell.bias):
        links.bind(weight, -1, np.tile(units, gates))
    if layer.stateful:
        links.keep(units, "the layer keeps its state between batches")
    links.resize(layer, **{"filters" if gates == 4 and len(x.shape) > 3 else "units": Kept(units)})
    begins = call.inputs[1:] if call.argument("initial_state", 1) is not None else []
    begins = [one for one in begins if len(one.shape) == len(x.shape) - 1]
    for one in begins:
        links.tie(units, one.at(axis - 1), "the initial state has a fixed length")
    zero = not begins and _zero_state(cell)
    return [replace(_with_units(shape, layer, units), zero=zero) for shape in call.outputs]


def _zero_state(cell: Any) -> bool:
    return maps_zero_to_zero(cell.activation)


def _with_units(shape: Sequence[int | None], layer: Any, units: np.ndarray) -> Axes:
    # A sequence has one axis more than a state.
    states = 2 if not hasattr(layer, "filters") and not hasattr(layer.cell, "filters") else layer.cell.rank + 2
    axis = channel_axis(layer, len(shape))
    if axis == 1 and len(shape) > states:
        axis = 2
    return Axes.fixed(shape).with_axis(axis, units.size, units)


def _bidirectional(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    if len(call.inputs) > 1 and call.argument("initial_state", 1) is not None:
        raise NotFollowedError("it is called with an initial state")
    walk.links.contain(layer, layer=layer.forward_layer, backward_layer=layer.backward_layer)
    forward = walk.follow(layer.forward_layer, x)
    backward = walk.follow(layer.backward_layer, x)
    states = [*forward[1:], *backward[1:]]
    one, other = forward[0], backward[0]
    axis = channel_axis(layer.forward_layer, len(one.shape))
    units, others = one.channels[axis], other.channels[axis]
    if units is not None and others is not None:
        # Keras takes the shape of both outputs from the forward layer.
        walk.links.evenly(np.concatenate([units, others]), 2)
        walk.links.name(units, "both directions")
    if layer.merge_mode is None:
        return [one, other, *states]
    if layer.merge_mode == "concat":
        return [concatenated(walk, [one, other], -1, call.outputs[0]), *states]
    return [elementwise(walk, [one, other], call.outputs[0], "any" if layer.merge_mode == "mul" else "all"), *states]


def _time_distributed(walk: Walk, call: ChannelCall) -> list[Axes]:
    layer, x = call.operation, call.x
    if graph_of(layer.layer) is not None:
        raise NotFollowedError("it contains a model")
    walk.links.keep(x.channels[1], "an axis of time steps")
    walk.links.contain(layer, layer=layer.layer)
    inner = Axes((x.shape[0], *x.shape[2:]), (x.channels[0], *x.channels[2:]), x.zero)
    found = []
    for one, shape in zip(walk.follow(layer.layer, inner), call.outputs, strict=True):
        found.append(Axes(shape, (one.channels[0], None, *one.channels[1:]), one.zero))
    return found


RULES: dict[Rule, str] = {
    _recurrent: "SimpleRNN LSTM GRU ConvLSTM1D ConvLSTM2D ConvLSTM3D",
    _bidirectional: "Bidirectional",
    _time_distributed: "TimeDistributed",
}
