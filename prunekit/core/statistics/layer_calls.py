"""The layer calls of one pass over real tensors, and which of them an output passes through."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.graph.example_inputs import arrays_in, declared_inputs, symbolic_call
from prunekit.anatomy.graph.flow import LayerCall
from prunekit.anatomy.graph.watching import watching_outside_loops
from prunekit.anatomy.layers.layers import is_repeater, sublayers

# Size of an axis whose length the model leaves open.
_OPEN_SIZE = 32


def layer_calls(model: Any, args: Any, kwargs: Any = None) -> list[LayerCall]:
    """Runs the model in inference mode and returns the calls of its layers without sublayers, in order.

    Layers that return their input itself are not among them, nor are layers inside recurrent and time-distributed
    layers: the backend runs these in a loop. The model's state stays unchanged. The calls hold all activations of the
    pass.

    Args:
        model: A built model.
        args: Positional arguments of the call.
        kwargs: Keyword arguments of the call.
    """
    calls: list[LayerCall] = []

    def see(original: Any, layer: Any, args: tuple, kwargs: dict) -> Any:
        outputs = original(layer, *args, **kwargs)
        call = LayerCall(layer, tuple(arrays_in((args, kwargs))), tuple(arrays_in(outputs)))
        # Dropout returns its input itself, which would look like an output that two layers read.
        passes_on = all(any(one is other for other in call.inputs) for one in call.outputs)
        if (is_repeater(layer) or not sublayers(layer)) and not passes_on:
            calls.append(call)
        return outputs

    with watching_outside_loops(see), keras.StatelessScope():
        model(*args, **(kwargs or {}), training=False)
    return calls


def calls_after(calls: Sequence[LayerCall], call: LayerCall) -> Iterator[LayerCall]:
    """Yields the calls that the output of `call` passes through one after another, while its shape stays the same.

    Ends where an output is read by several calls or by none, and where a call reads several tensors.
    """
    while len(call.outputs) == 1:
        output = call.outputs[0]
        readers = [one for one in calls if any(tensor is output for tensor in one.inputs)]
        if len(readers) != 1 or len(readers[0].inputs) != 1 or len(readers[0].outputs) != 1:
            return
        (call,) = readers
        if tuple(call.outputs[0].shape) != tuple(output.shape):
            return
        yield call


def input_of_ones(model: Any) -> tuple[tuple, dict]:
    """Returns (args, kwargs) for a call of the model on one example of ones; axes of open size have the length 32.

    Raises:
        ValueError: The model does not say which inputs it takes.
    """
    declared = declared_inputs(model)
    args: Any
    if declared is None:
        args, kwargs, _ = symbolic_call(model, 1, None)
    else:
        args, kwargs = (declared,), {}

    def ones(leaf: Any) -> Any:
        batch, *sizes = leaf.shape
        return ops.ones((batch or 1, *(size or _OPEN_SIZE for size in sizes)), dtype=leaf.dtype)

    return keras.tree.map_structure(ones, (args, kwargs))
