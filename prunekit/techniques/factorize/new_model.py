"""Builds the model with several layers in the place of one, and compares it with the model with weights of low rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.recorded_calls import RecordedCall, recorded
from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime.backend import native
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.fitting import Found
from prunekit.techniques.factorize.forms import Structure, empty_factors
from prunekit.techniques.factorize.layer_parts import Parts, insert, layout_of, parts_of
from prunekit.techniques.factorize.optimizer_slots import Replaced, carry_slots
from prunekit.techniques.shrink.channels.optimizer_state import carry_over
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_copies import Variables
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

# Largest difference of the outputs of the new model from those with the matrices of low rank, relative to the largest,
# and the number of examples on which they are compared.
_ROUNDING, _EXAMPLES = 0.01, 2
# Ends of the names of layers before the last one.
_KINDS = ("reduction", "core")


class UnequalOutputsError(ValueError):
    """A model with factors computes other outputs than the model with weights of low rank."""


def called_layers(model: Any, targets: Sequence[Target]) -> set[int]:
    """Returns the ids of the layers that the model's graph calls once those around the layers of targets are opened."""
    graph = LayerGraph(model, _Opened(model, targets))
    return {id(call.operation) for level in graph.graphs() for call in level.calls}


def with_parts(model: Any, chosen: Sequence[Target], found: Found) -> tuple[Any, dict[str, tuple[str, ...]], list[str]]:
    """Returns the new model, the names of the new layers for each weight, and notes.

    Args:
        model: The model.
        chosen: The weights that are factorized.
        found: Their factors.
    """
    graph = LayerGraph(model, _Opened(model, chosen))
    values = {id(variable): np.array(array_of(value)) for variable, value in found.values}
    inserted = _inserted(graph, chosen, found, values)
    for target in chosen:
        # The graph has the values of its layers.
        values.pop(id(target.variable), None)
    made, variables = build(graph, lambda one: values.get(id(one), array_of(one)))
    # Taken out of the pairs of former and new variables: the model did not have the new layers.
    added = {
        target.name: [variables.pop(id(variable))[1] for layer in parts.added for variable in layer.variables]
        for target, parts in inserted
    }
    notes = _carried(model, made, variables, chosen)
    former = getattr(model, "optimizer", None)
    if former is not None and former.built and made.compiled:
        replaced = []
        for target, parts in inserted:
            own, new = variables[id(target.variable)][1], added[target.name]
            in_order = (own, *new) if parts.follows else (*new, own)
            replaced.append(Replaced(product_of(target), found.factors[target.name], in_order))
        carry_slots(former, made.optimizer, replaced)
    return made, {target.name: tuple(one.name for one in parts.added) for target, parts in inserted}, notes


def with_random_factors(model: Any, chosen: Sequence[Target], structures: Mapping[str, Structure | None]) -> Any:
    """Returns a model with factors without meaning, whose size or latency is measured.

    Args:
        model: The model.
        chosen: The weights that are factorized.
        structures: Name of a weight -> its form and ranks; None = as it is.
    """
    pairs = ((target, structures[target.name]) for target in chosen)
    factors = {
        target.name: empty_factors(layout_of(target), structure, seed)
        for seed, (target, structure) in enumerate(pairs)
        if structure is not None
    }
    return with_parts(model, chosen, Found((), factors, {}, {}))[0]


def _inserted(
    graph: LayerGraph, chosen: Sequence[Target], found: Found, values: dict[int, np.ndarray]
) -> list[tuple[Target, Parts]]:
    """Puts layers into a graph, and returns them."""
    taken = {layer.name for layer in graph.model._flatten_layers()}
    inserted = []
    for target in chosen:
        factors, own = found.factors[target.name], graph.names.get(id(target.layer), target.layer.name)
        kinds = ("projection",) if target.role == "embedding" else _KINDS[: len(factors.arrays) - 1]
        names = [free_name(f"{own}_{kind}", taken) for kind in kinds]
        bias = getattr(target.layer, "bias", None)
        parts = parts_of(target, factors, None if bias is None else values.get(id(bias)), names)
        insert(graph, target, parts)
        inserted.append((target, parts))
    return inserted


def _carried(model: Any, made: Any, variables: Variables, chosen: Sequence[Target]) -> list[str]:
    """Compiles the new model as the former one is, with the optimizer's state of the other weights; returns notes."""
    shapes = {id(native(target.variable)): tuple(variables[id(target.variable)][1].shape) for target in chosen}

    def begun(weight: Any, value: np.ndarray) -> np.ndarray:
        # The state of factors is calculated afterwards.
        shape = shapes.get(id(native(weight)))
        return value if shape is None else np.zeros(shape, value.dtype)

    return carry_over(model, made, variables, begun)


def verify(model: Any, made: Any, found: Found, inputs: Any) -> None:
    """Checks that the new model computes what the model with the weights of low rank computes.

    Raises:
        UnequalOutputsError: The outputs differ.
    """
    few = keras.tree.map_structure(lambda array: array[:_EXAMPLES], inputs)
    with keras.StatelessScope(state_mapping=list(found.values)):
        wanted = model(few, training=False)
    pairs = zip(keras.tree.flatten(wanted), keras.tree.flatten(made(few, training=False)), strict=True)
    for one, other in ((array_of(one).astype("float64"), array_of(other)) for one, other in pairs):
        size, change = np.abs(one).max(initial=0.0), np.abs(one - other).max(initial=0.0)
        if np.isfinite(size) and change > _ROUNDING * size:
            raise UnequalOutputsError(
                f"The new model computes other outputs than the model {model.name!r} with weights of low rank, which "
                f"is a fault of prunekit. Received: a relative difference of {change / size:.2g}. Leave out custom "
                "layers with `exclude`, and report the model."
            )


def free_name(name: str, taken: set[str]) -> str:
    """Returns the name, with a number if it is taken, and adds it to the taken ones."""
    number, found = 1, name
    while found in taken:
        found = f"{name}_{number}"
        number += 1
    taken.add(found)
    return found


class _Opened:
    """Opens the layers and models in which a factorized layer is called, apart from those with a graph."""

    def __init__(self, model: Any, chosen: Sequence[Target]):
        self._wanted = {id(target.layer) for target in chosen}
        self._model = model
        self._found: dict[int, tuple[Any, RecordedCall | None]] = {}

    def __call__(self, node: Any) -> RecordedCall | None:
        if node is self._model:
            return None
        if id(node) not in self._found:
            self._found[id(node)] = node, self._opened(node)
        return self._found[id(node)][1]

    def _opened(self, node: Any) -> RecordedCall | None:
        layer = getattr(node, "operation", None)
        if not isinstance(layer, keras.layers.Layer) or id(layer) in self._wanted or graph_of(layer) is not None:
            return None
        if not any(id(one) in self._wanted for one in layer._flatten_layers()):
            return None
        # The calls inside would not see these masks.
        if any(get_keras_mask(tensor) is not None for tensor in (*node.input_tensors, *node.outputs)):
            return None
        call = recorded(layer, node.arguments.args, node.arguments.kwargs)
        return call if call is not None and call.repeatable else None
