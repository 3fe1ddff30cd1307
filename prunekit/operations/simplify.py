"""simplify: an equal model with fewer layers, for inference."""

from __future__ import annotations

from typing import Any

import keras

from prunekit.anatomy.layers.layers import sublayers
from prunekit.anatomy.layers.linear_kinds import is_normalization
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.quantize.rounding.simulation import check_computes_in_floats
from prunekit.techniques.shrink.channels.optimizer_state import class_notes, compile_like, new_optimizer
from prunekit.techniques.shrink.graph.folding import FOLDED, fold_normalization
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.graph.simplify_report import Rewrite, SimplifyReport
from prunekit.techniques.shrink.layers.dead_branches import drop_dead_branches
from prunekit.techniques.shrink.layers.duplicates import merge_duplicates
from prunekit.techniques.shrink.layers.identities import DROPPED, drop_identities


def simplify(model: Any) -> tuple[Any, SimplifyReport]:
    """Returns (an equal model with fewer layers, a report of what was rewritten). The given model is not changed.

    In inference the new model computes the same outputs up to rounding: batch normalization is folded into the layer
    before or after it, layers that change nothing in inference are dropped, as are branches that add zeros, and layers
    that compute the same tensor are merged. Names, compile settings and nested models stay. The new model can be
    trained, but without the batch normalization and the dropout that are gone.

    Args:
        model: A built Keras model: Sequential, functional, or a subclass whose `call` consists of layers and
            operations alone.

    Raises:
        ValueError: The model's calls cannot be followed, or a layer cannot be made again from its config.
        TypeError: `model` is not a Keras 3 model.
    """
    check_computes_in_floats(model)
    graph = LayerGraph(model)
    layers = graph.layer_count()
    rewrites, left = _rewritten(graph)
    made, _ = build(graph)
    notes = [*class_notes(model, made), *_notes(graph, rewrites), *_compiled(model, made)]
    left += _hidden(graph)
    parameters = model.count_params(), made.count_params()
    report = SimplifyReport(
        model.name,
        (layers, graph.layer_count()),
        parameters,
        tuple(rewrites),
        tuple(left),
        tuple(notes),
    )
    return made, report


def _rewritten(graph: LayerGraph) -> tuple[list[Rewrite], list[Skipped]]:
    """Applies the passes until none of them finds anything; returns the rewrites, and what the last round left."""
    rewrites: list[Rewrite] = []
    while True:
        before = len(rewrites)
        left: list[Skipped] = []
        for rewrite in (drop_identities, fold_normalization, drop_dead_branches, merge_duplicates):
            done, kept = rewrite(graph)
            rewrites += done
            left += kept
        if len(rewrites) == before:
            return rewrites, left


def _notes(graph: LayerGraph, rewrites: list[Rewrite]) -> list[str]:
    kinds = {one.kind for one in rewrites}
    notes = []
    if FOLDED in kinds:
        notes.append("The batch normalization that was folded does not act in a later training.")
    if any(one.kind == DROPPED and "training alone" in one.what for one in rewrites):
        notes.append("The dropout, noise and regularization that were dropped do not act in a later training.")
    regularized = [
        call.name
        for level in graph.graphs()
        for call in level.calls
        if id(call.operation) in graph.changes and getattr(call.operation, "kernel_regularizer", None) is not None
    ]
    if regularized:
        notes.append(f"The losses of regularizers change: they act on the folded weights of {', '.join(regularized)}.")
    return notes


def _compiled(model: Any, made: Any) -> list[str]:
    """Compiles the new model as the former one is; returns notes."""
    notes = compile_like(model, made, new_optimizer(model))
    optimizer = getattr(model, "optimizer", None)
    if optimizer is not None and optimizer.built:
        return ["The optimizer starts anew: the weights are not those that its state was computed for.", *notes]
    return notes


def _hidden(graph: LayerGraph) -> list[Skipped]:
    """Returns the batch normalizations inside layers, which the graph does not show."""
    found = []
    called = {id(call.operation): call.operation for level in graph.graphs() for call in level.calls}
    for key, operation in called.items():
        if key in graph.nested or not isinstance(operation, keras.layers.Layer):
            continue
        pending = list(sublayers(operation))
        while pending:
            layer = pending.pop()
            pending += sublayers(layer)
            if is_normalization(layer):
                found.append(Skipped(layer.name, f"it is inside the layer {operation.name!r}"))
    return found
