"""Runs a model as its integer file will compute: unit by unit, with rounded weights and tensors between the units."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
from keras import ops
from keras.src.backend.common.masking import get_keras_mask, set_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph, GraphCall
from prunekit.anatomy.graph.model_graph import graph_of
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime.patching import shadowed
from prunekit.core.runtime.variable_values import full_value, with_values
from prunekit.core.training.train_function import fresh_forward_functions, fresh_functions
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.placement.form_operations import FusedLstm
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.units import SharedGrid, Unit, divisor, is_constant
from prunekit.techniques.quantize.rounding.linear_units import linear_results
from prunekit.techniques.quantize.rounding.lstm_units import lstm_results
from prunekit.techniques.quantize.rounding.rounding import Rounding, activated, rounds_inside

# Operations that kernels compute as products.
_AS_PRODUCTS: dict[str, Callable[[Any], Any]] = {"Negative": lambda x: x * -1.0, "Square": lambda x: x * x}


@contextlib.contextmanager
def simulating(placement: Placement, rounding: Rounding) -> Iterator[None]:
    """Inside the scope, calls of the model run its units, in any loop and on any backend.

    Layers are called as always: masks, dtypes, losses, moving statistics and random seeds are those of the model.
    `fit`, `evaluate`, `predict` and the functions of prunekit are traced again. Functions of your own that were traced
    before have to be traced again inside, and those from inside afterwards.

    Args:
        placement: Where tensors are rounded.
        rounding: What is done there.
    """
    model = placement.graphs.main.model
    with fresh_functions(model), fresh_forward_functions(model), simulated_calls(placement, lambda: rounding):
        yield


@contextlib.contextmanager
def simulated_calls(placement: Placement, rounding: Callable[[], Rounding], *, frozen: bool = False) -> Iterator[None]:
    """Inside the scope, calls of the model run its units; functions that were traced before stay as they are.

    Args:
        placement: Where tensors are rounded.
        rounding: Returns what is done there in one forward pass, and in that of each model inside.
        frozen: True: batch normalizations compute with their moving statistics in training, too, and do not move them;
            their factors and offsets are trained.
    """
    graphs = placement.graphs
    with contextlib.ExitStack() as scope:
        for graph in (graphs.main, *graphs.nested.values()):
            scope.enter_context(shadowed(graph.model, "call", _GraphCall(graph, placement, rounding, frozen=frozen)))
        yield


def check_computes_in_floats(model: Any) -> None:
    """Raises for anything but a model with weights that computes in floating point, as each operation needs it.

    Raises:
        TypeError, ValueError: As `check_built`.
        RuntimeError: It is called inside a scope of this module for the model, or for one inside it.
    """
    check_built(model)
    if any(isinstance(vars(one).get("call"), _GraphCall) for one in model._flatten_layers()):
        raise RuntimeError(
            "An operation begins with a model that computes in floating point. Received: "
            f"{model.name!r} inside `simulating()`, or between the creation and `finish()` of a pk.Quantizer. End that "
            "first."
        )


class _GraphCall:
    """Replaces the `call` of a model."""

    def __init__(self, graph: Graph, placement: Placement, rounding: Callable[[], Rounding], *, frozen: bool = False):
        self._graph, self._placement, self._rounding, self._frozen = graph, placement, rounding, frozen

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        inputs, training, mask, context = self._bound(args, kwargs)
        if training is None:
            # A `call` without this argument is not given it.
            training = self._graph.model._get_call_context().get_value("training")
        rounding = self._rounding()
        written = functools.partial(self._written, rounding)
        values = self._entered(inputs, mask, written)
        for unit in self._placement.units[id(self._graph)]:
            now = False if self._frozen and unit.has_normalization else training
            run = _UnitRun(unit, values, {**context, "training": now}, self._placement, rounding)
            with rounding.running(unit):
                results = keras.tree.flatten(run.results())
            values |= {
                id(symbol): written(symbol, result) for symbol, result in zip(unit.outputs, results, strict=True)
            }
        # In the order that a functional model gives to the entries of a dictionary: `fit` reports losses in it.
        flat = [values[id(symbol)] for symbol in keras.tree.flatten(self._graph.outputs)]
        outputs = keras.tree.pack_sequence_as(self._graph.outputs, flat)
        # As functional models unpack lists of one output.
        alone = isinstance(outputs, list | tuple) and len(outputs) == 1 and graph_of(self._graph.model) is not None
        return outputs[0] if alone else outputs

    def _bound(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any, Any, dict[str, Any]]:
        """Returns the inputs, `training`, `mask` and other context of a call.

        Raises:
            ValueError: Another argument than these is given: the calls inside were recorded with its default.
        """
        model = self._graph.model
        bound = model._call_signature.bind(*args, **kwargs)
        named = dict(bound.arguments)
        context = named.pop("kwargs", {}) if graph_of(model) is not None else {}
        inputs = named.pop(next(iter(model._call_signature.parameters)))
        training, mask = named.pop("training", None), named.pop("mask", None)
        defaults = model._call_signature.parameters
        others = [name for name, value in named.items() if value is not defaults[name].default]
        if others:
            raise ValueError(
                f"In a simulation the model {model.name!r} takes its inputs, `training` and `mask`. Received: "
                f"{', '.join(others)}."
            )
        return inputs, training, mask, context

    def _entered(self, inputs: Any, mask: Any, written: Callable[[Any, Any], Any]) -> dict[int, Any]:
        """Returns {id of a symbolic input: its value}."""
        functional = graph_of(self._graph.model)
        flat = keras.tree.flatten(inputs) if functional is None else functional._standardize_inputs(inputs)
        for one, of_one in zip(flat, keras.tree.flatten(mask), strict=True) if mask is not None else ():
            if of_one is not None:
                set_keras_mask(one, of_one)
        symbols = keras.tree.flatten(self._graph.inputs)
        return {id(symbol): written(symbol, value) for symbol, value in zip(symbols, flat, strict=True)}

    def _written(self, rounding: Rounding, symbol: Any, value: Any) -> Any:
        return _rounded(rounding.tensor, value, self._placement.written.get(id(symbol)))


def _rounded(rounded: Callable[[Any, SharedGrid], Any], value: Any, place: SharedGrid | None) -> Any:
    if place is None or value is None:
        return value
    result = rounded(value, place)
    mask = get_keras_mask(value)
    if mask is not None:
        set_keras_mask(result, mask)
    return result


class _UnitRun:
    """One run of a unit.

    Args:
        unit: The unit.
        values: id of a symbolic tensor -> its value.
        context: `training` and other arguments that the model was called with.
        placement: Where tensors are rounded.
        rounding: What is done there.
    """

    def __init__(
        self, unit: Unit, values: dict[int, Any], context: dict[str, Any], placement: Placement, rounding: Rounding
    ):
        self._unit, self._values, self._context = unit, values, context
        self._placement, self._rounding = placement, rounding

    def results(self) -> Any:
        """Returns the results of the last call, before they are rounded."""
        first, *others = self._unit.calls
        result = self._first(first, *self._arguments(first))
        for call in others:
            # A folded batch normalization is part of the first call.
            if call is not self._unit.normalization:
                result = call.operation(result)
        return result

    def _first(self, call: GraphCall, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unit, operation = self._unit, call.operation
        if isinstance(operation, FusedLstm):
            return lstm_results(unit, self._rounding, args[0], self._placement.written[id(unit.outputs[0])])
        if unit.is_linear:
            return linear_results(unit, self._rounding, args, kwargs, self._context)
        if unit.weights:
            pairs = [(one.variable, self._rounding.weight(full_value(one.variable), one)) for one in unit.weights]
            with with_values(pairs, operation):
                return operation(*args, **kwargs)
        call_inside = self._call_inside(call)
        if call_inside is None:
            return operation(*args, **kwargs)
        with shadowed(operation, "call", call_inside):
            return operation(*args, **kwargs)

    def _call_inside(self, call: GraphCall) -> Any:
        """Returns what a layer or operation calls in the place of its `call`; None if it stays as it is."""
        unit, operation = self._unit, call.operation
        if unit.between is not None:
            return functools.partial(self._rescaled, operation, operation.call, unit.between)
        if unit.rule.output == "float":
            return None
        if call.kind in _AS_PRODUCTS:
            return _AS_PRODUCTS[call.kind]
        if call.kind == "Rsqrt":
            return self._rounding.reciprocal_root
        if divisor(call) is not None:
            return functools.partial(self._divided, divisor(call))
        rounds = rounds_inside(operation)
        return functools.partial(activated, operation, rounding=self._rounding) if rounds else None

    def _arguments(self, call: GraphCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
        rounds_constants = self._unit.rule.output == "own"

        def filled(leaf: Any) -> Any:
            if isinstance(leaf, keras.KerasTensor):
                place = self._placement.read.get((id(self._unit), id(leaf)))
                return _rounded(self._rounding.argument, self._values[id(leaf)], place)
            return self._rounding.constant(leaf) if rounds_constants and is_constant(leaf) else leaf

        args, kwargs = keras.tree.map_structure(filled, (call.args, call.kwargs))
        known = getattr(call.operation, "_call_context_args", ())
        return args, kwargs | {name: v for name, v in self._context.items() if name in known and v is not None}

    def _divided(self, divisor: Any, x1: Any, x2: Any) -> Any:
        reciprocal = np.asarray(1 / array_of(divisor).astype("float64"), "float32")
        return x1 * ops.cast(self._rounding.constant(reciprocal), x1.dtype)

    def _rescaled(self, layer: Any, call: Any, between: SharedGrid, inputs: Any) -> Any:
        with shadowed(layer, "offset", 0.0):
            product = call(inputs)
        with shadowed(layer, "scale", 1.0):
            return call(self._rounding.tensor(product, between))
