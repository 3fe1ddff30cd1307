"""Folds batch normalization into the layer before it, or into the layer after it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.layers.linear_kinds import is_normalization, scale_and_shift
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.graph.linear_layers import Affine, Written, after, before
from prunekit.techniques.shrink.graph.simplify_report import Rewrite

FOLDED = "batch normalization folded"


@dataclass(frozen=True)
class _Place:
    """A layer into which a batch normalization would be folded."""

    call: GraphCall
    written: Written


def fold_normalization(graph: LayerGraph) -> tuple[list[Rewrite], list[Skipped]]:
    """Folds every batch normalization that can be folded.

    Returns:
        The rewrites, and the batch normalizations that are left, with reasons.
    """
    done: list[Rewrite] = []
    left: list[Skipped] = []
    for level in graph.graphs():
        for call in [one for one in level.calls if is_normalization(one.operation)]:
            result = _folded(graph, level, call)
            if isinstance(result, str):
                left.append(Skipped(call.name, result))
                continue
            graph.change(result.call.operation, result.written[1], result.written[0])
            level.replace(call.output, call.input)
            done.append(Rewrite(FOLDED, (call.name,), f"into {result.call.name}"))
    return done, left


def affine_of(graph: LayerGraph, call: GraphCall) -> Affine:
    """Returns what a batch normalization computes in inference."""
    layer = call.operation
    scale, shift = scale_and_shift(layer, lambda name: np.asarray(graph.value(layer, name), "float64"))
    return Affine(layer.axis % len(call.output.shape), scale, shift)


def _folded(graph: LayerGraph, level: Graph, call: GraphCall) -> _Place | str:
    """Returns the layer into which a batch normalization can be folded, or why there is none."""
    if call.fixed_training:
        return "it is called with training=True"
    if graph.calls_of(call.operation) > 1:
        return "it is called several times"
    if call.input is None or not level.can_replace(call.output, call.input):
        return "its input is an input or another output of the model"
    with np.errstate(invalid="ignore", divide="ignore"):
        affine = affine_of(graph, call)
    if not (np.isfinite(affine.scale).all() and np.isfinite(affine.shift).all()):
        return "its scale or its shift is not finite"
    reasons = []
    for place in (_into_former, _into_next):
        found = place(graph, level, call, affine)
        if isinstance(found, _Place):
            return found
        reasons.append(found)
    return "; ".join(dict.fromkeys(reasons))


def _into_former(graph: LayerGraph, level: Graph, call: GraphCall, affine: Affine) -> _Place | str:
    tensor, former = call.input, level.producer(call.input)
    if former is None:
        return "it reads an input of the model"
    reason = _alone(graph, level, former, call, tensor)
    if reason:
        return reason
    written = after(graph, former, affine)
    return written if isinstance(written, str) else _Place(former, written)


def _into_next(graph: LayerGraph, level: Graph, call: GraphCall, affine: Affine) -> _Place | str:
    readers = level.readers(call.output)
    if level.is_output(call.output):
        return "its output is an output of the model"
    if len(readers) != 1:
        return "several layers read its output"
    (reader,) = readers
    if reader.input is not call.output:
        return f"{reader.name} reads other tensors too"
    if graph.calls_of(reader.operation) > 1:
        return f"{reader.name} is called several times"
    if reader.output is None or reader.output.dtype != call.output.dtype or call.input.dtype != call.output.dtype:
        return f"{reader.name} computes in another dtype"
    written = before(graph, reader, affine)
    return written if isinstance(written, str) else _Place(reader, written)


def _alone(graph: LayerGraph, level: Graph, former: GraphCall, call: GraphCall, tensor: Any) -> str:
    """Returns why the call before a batch normalization must keep its output, or ""."""
    if level.is_output(tensor):
        return f"the output of {former.name} is an output of the model"
    if level.readers(tensor) != [call]:
        return f"other layers read the output of {former.name} too"
    if graph.calls_of(former.operation) > 1:
        return f"{former.name} is called several times"
    if tensor.dtype != call.output.dtype:
        return f"{former.name} computes in another dtype"
    return ""
