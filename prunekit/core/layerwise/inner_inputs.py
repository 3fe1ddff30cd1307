"""The inputs of the layers inside one call of a model's graph, in the model as it was and as it is."""

from collections.abc import Sequence
from typing import Any

import keras

from prunekit.core.layerwise.calibration_walk import Pair, WalkedCall
from prunekit.core.runtime.backend import bytes_of
from prunekit.core.statistics.layer_inputs import observing_inputs

Arguments = tuple[Any, ...]


class _StopForward(BaseException):
    """Ends a forward pass once the wanted inputs were seen; no Exception, because Keras rewrites those."""


class InnerInputs:
    """Observes the inputs of layers while a call computes its outputs.

    The inputs before any weight was changed are observed in one pass for all layers, those after the changes in one
    pass for each layer, which ends at the layer. A layer that reads what the call itself is given, as the projections
    of an attention do, needs no second pass.

    Args:
        call: The call.
        layers: The layers; one that the call does not reach has no inputs.
        memory: Largest number of bytes of inputs before the changes that are kept; if they have more, they are observed
            in a pass for each layer, too.

    Attributes:
        order: (layer, number of calls) in the order of the first calls.
    """

    def __init__(self, call: WalkedCall, layers: Sequence[Any], memory: float):
        self._call = call
        # Of each batch; of the first alone if those of all are too large.
        self._kept: list[dict[int, list[tuple[Any, Arguments]]]] = [{}]
        if len(layers) == 1 and layers[0] is call.operation:
            self.order = [(layers[0], 1)]
            return
        first = _observed(call.operation, layers, call.arguments[0].before)
        self.order = [(seen[0][0], len(seen)) for seen in first.values()]
        tensors = {id(leaf): leaf for seen in first.values() for leaf in keras.tree.flatten([args for _, args in seen])}
        size = bytes_of(leaf for leaf in tensors.values() if hasattr(leaf, "shape"))
        if size * len(call.arguments) <= memory:
            later = (_observed(call.operation, layers, one.before) for one in list(call.arguments)[1:])
            self._kept = [first, *later]

    def of(self, layer: Any, batch: int, values: Sequence[tuple[Any, Any]]) -> list[Pair]:
        """Returns the arguments of each call of a layer, for one batch.

        Args:
            layer: One of the layers.
            batch: Number of the batch.
            values: New values, as (variable, tensor), of variables that the call reads.
        """
        operation, arguments = self._call.operation, self._call.arguments[batch]
        if layer is operation:
            return [arguments.each(lambda given: given[0] or tuple(given[1].values()))]
        count = dict((id(one), calls) for one, calls in self.order)[id(layer)]
        if len(self._kept) == len(self._call.arguments):
            before = [args for _, args in self._kept[batch].get(id(layer), ())]
        else:
            before = _see(operation, layer, count, arguments.before, ())
        if arguments.same and not values:
            return [Pair(args, args) for args in before]
        after = _given(before, arguments)
        if after is None:
            after = _see(operation, layer, count, arguments.after, values)
        return [Pair(*args) for args in zip(before, after, strict=True)]


def _given(seen: Sequence[Arguments], arguments: Pair) -> list[Arguments] | None:
    """Returns the arguments of a layer after the changes, if they are arguments of the whole call; else None.

    Args:
        seen: Arguments of each call of the layer before the changes.
        arguments: (args, kwargs) of the whole call.
    """
    whole = (keras.tree.flatten(side) for side in (arguments.before, arguments.after))
    later = {id(before): after for before, after in zip(*whole, strict=True)}
    if not all(id(leaf) in later for leaf in keras.tree.flatten(seen)):
        return None
    return keras.tree.map_structure(lambda leaf: later[id(leaf)], list(seen))


def run(operation: Any, given: Any) -> Any:
    """Returns the outputs of an operation for (args, kwargs)."""
    args, kwargs = given
    return operation(*args, **kwargs)


def _observed(operation: Any, layers: Sequence[Any], given: Any) -> dict[int, list[tuple[Any, Arguments]]]:
    """Returns {id of a layer: (layer, arguments) of each call} in the order of the first calls."""
    seen: dict[int, list[tuple[Any, Arguments]]] = {}
    with observing_inputs(layers, lambda layer, args: seen.setdefault(id(layer), []).append((layer, args))):
        run(operation, given)
    return seen


def _see(operation: Any, layer: Any, calls: int, given: Any, values: Sequence[tuple[Any, Any]]) -> list[Arguments]:
    seen: list[Arguments] = []

    def see(_: Any, args: Arguments) -> None:
        seen.append(args)
        if len(seen) == calls:
            raise _StopForward

    try:
        with observing_inputs([layer], see, values):
            run(operation, given)
    except _StopForward:
        pass
    return seen
