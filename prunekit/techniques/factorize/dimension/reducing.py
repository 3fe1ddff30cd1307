"""Finds the directions of a dimension in data or in the inputs of a model's layer, and puts layers into the model."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.graph.watching import watching
from prunekit.sparsity.array_ops import array_of
from prunekit.suggestions import did_you_mean
from prunekit.techniques.factorize.dimension.dimension_layers import reduction, restoration
from prunekit.techniques.factorize.dimension.dimension_options import DimensionOptions
from prunekit.techniques.factorize.dimension.dimension_report import DimensionReport, DimensionSize
from prunekit.techniques.factorize.dimension.modes import Mode, ModeMoments
from prunekit.techniques.factorize.layer_parts import insert_before
from prunekit.techniques.factorize.new_model import free_name
from prunekit.techniques.shrink.channels.optimizer_state import carry_over, class_notes
from prunekit.techniques.shrink.graph.graph_builder import build
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph


def of_data(batches: Iterable[Any], options: DimensionOptions) -> tuple[tuple[Any, Any], DimensionReport]:
    """Returns ((layer that reduces, layer that restores), report) for tensors of data.

    Args:
        batches: Tensors of shape (batch, ..., length, ...).
        options: Which dimension, and how many entries are left.

    Raises:
        ValueError: A tensor has fewer than three dimensions, or no such one; numbers are not finite.
    """
    seen = _Seen(options)
    for batch in batches:
        leaves = keras.tree.flatten(batch)
        if len(leaves) != 1:
            raise ValueError(
                f"Data without a model are one tensor. Received: {len(leaves)} inputs. Pass the one whose dimension is "
                "reduced."
            )
        seen.add(np.asarray(array_of(leaves[0])))
    mode, axis, size = seen.found("the data")
    shape = [None, *seen.lengths]
    layers = reduction(mode, axis, size, shape, "reduce"), restoration(mode, axis, size, shape, "restore")
    return layers, _report(seen, mode, axis, size)


def in_model(model: Any, name: str, batches: Iterable[Any], options: DimensionOptions) -> tuple[Any, DimensionReport]:
    """Returns (a new model with the layers before a layer, report). The given model is not changed.

    Args:
        model: A built model.
        name: Name of the layer.
        batches: Inputs of the model.
        options: As for `of_data`.

    Raises:
        ValueError: There is no such layer, or the model's graph does not call it; its input has a mask, fewer than
            three dimensions, or no such one; without `restore`, weights do not fit the reduced dimension.
    """
    layer, graph = _layer(model, name), LayerGraph(model)
    calls = [(level, call) for level in graph.graphs() for call in level.calls if call.operation is layer]
    if not calls:
        raise ValueError(
            "The layers are put before a layer that the model's own graph calls. Received: "
            f"{name!r}, which is called inside another layer. Name the layer around it."
        )
    _check_masks(calls, name)
    # Before the model runs: Keras would add lines of its own to these errors.
    shape = _declared(calls, options.axis_of(len(calls[0][1].inputs[0].shape)), name)
    seen = _Seen(options)

    def watched(call: Callable[..., Any], one: Any, args: tuple, kwargs: dict) -> Any:
        if one is layer:
            seen.add(np.asarray(array_of(keras.tree.flatten((args, kwargs))[0])))
        return call(one, *args, **kwargs)

    with watching(watched), keras.StatelessScope(collect_losses=True):
        for batch in batches:
            model(batch, training=False)
    mode, axis, size = seen.found(f"the inputs of {name!r}")
    taken = {one.name for one in model._flatten_layers()}
    added = [reduction(mode, axis, size, shape, free_name(f"{name}_reduce", taken), layer.dtype_policy)]
    if options.restore:
        added.append(restoration(mode, axis, size, shape, free_name(f"{name}_restore", taken), layer.dtype_policy))
    for level, call in calls:
        insert_before(level, call, added)
        level.sweep()
    made, variables = _built(graph, name, options)
    for one in added:
        for variable in one.variables:
            variables.pop(id(variable))
    notes = (*class_notes(model, made), *carry_over(model, made, variables))
    return made, _report(seen, mode, axis, size, model.name, name, notes)


class _Seen:
    """The tensors that were read.

    Attributes:
        lengths: Lengths of all dimensions but the batch; None where they differ, apart from the reduced one.
    """

    def __init__(self, options: DimensionOptions):
        self._options, self._axis = options, 0
        self.moments: ModeMoments | None = None
        self.lengths: list[int | None] = []

    def add(self, tensor: np.ndarray) -> None:
        if self.moments is None:
            self._axis = self._options.axis_of(tensor.ndim)
            self.moments, self.lengths = ModeMoments(self._axis), list(tensor.shape[1:])
        self.moments.add(tensor)
        pairs = zip(self.lengths, tensor.shape[1:], strict=True)
        self.lengths = [one if one == other else None for one, other in pairs]

    def found(self, place: str) -> tuple[Mode, int, int]:
        """Returns (the directions, the dimension, the number of entries that are left)."""
        if self.moments is None:
            raise ValueError(f"Directions are found from {place}. Received: no data.")
        mode = self.moments.mode() if np.isfinite(self.moments.sums).all() else None
        if mode is None:
            raise ValueError(f"Directions are found from finite numbers. Received: NaN or infinity in {place}.")
        return mode, self._axis, self._options.size_of(mode)


def _report(
    seen: _Seen,
    mode: Mode,
    axis: int,
    size: int,
    model_name: str | None = None,
    layer: str | None = None,
    notes: Sequence[str] = (),
) -> DimensionReport:
    errors = mode.errors()
    sizes = tuple(DimensionSize(place + 1, float(error)) for place, error in enumerate(errors))
    examples = 0 if seen.moments is None else seen.moments.examples
    return DimensionReport(
        model_name, layer, axis, len(errors), size, float(errors[size - 1]), sizes, examples, tuple(notes)
    )


def _layer(model: Any, name: str) -> Any:
    layers = {one.name: one for one in model._flatten_layers(include_self=False)}
    if name not in layers:
        raise ValueError(
            f"`layer` is the name of a layer of the model {model.name!r}. Received: {name!r}."
            f"{did_you_mean(str(name), layers)}"
        )
    return layers[name]


def _check_masks(calls: Sequence[tuple[Graph, GraphCall]], name: str) -> None:
    if any(get_keras_mask(call.inputs[0]) is not None for _, call in calls):
        raise ValueError(
            f"A reduced dimension passes no mask on. Received: {name!r}, whose input has one. Put the reduction before "
            "the layer that makes the mask, or name a layer behind those that read it."
        )


def _declared(calls: Sequence[tuple[Graph, GraphCall]], axis: int, name: str) -> tuple[int | None, ...]:
    """Returns the shape of the layer's input; None where a length is not fixed or differs between calls."""
    shapes = [tuple(call.inputs[0].shape) for _, call in calls]
    if any(len(shape) != len(shapes[0]) for shape in shapes) or len({shape[axis] for shape in shapes}) > 1:
        raise ValueError(f"A layer is called on one shape. Received: {name!r} on the shapes {shapes}.")
    found = tuple(lengths[0] if len(set(lengths)) == 1 else None for lengths in zip(*shapes, strict=True))
    if found[axis] is None:
        raise ValueError(
            f"The dimension that is reduced has a fixed length. Received: inputs of {name!r} of shape {found}, where "
            f"dimension {axis} is open. Reduce another one, or build the model for one length."
        )
    return found


def _built(graph: LayerGraph, name: str, options: DimensionOptions) -> tuple[Any, Any]:
    try:
        return build(graph)
    except ValueError as error:
        if options.restore:
            raise
        raise ValueError(
            f"Without `restore`, {name!r} and what follows read the reduced dimension. Received: layers whose weights "
            f"have another shape then: {str(error).splitlines()[0]} Pass restore=True."
        ) from error
