"""Normalizations whose statistics are those of the kept channels: what they compute, and the error of that."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.channels.channel_links import Approximated
from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.weight_entries import zeroed
from prunekit.core.runtime.patching import shadowed
from prunekit.core.statistics.layer_inputs import observing_inputs
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.shrink.graph.adjustments import Adjustment


def affected(channels: Channels, kept: np.ndarray) -> list[Approximated]:
    """Returns the approximated normalizations that lose channels."""
    return [one for one in channels.links.approximated if not kept[one.channels].all()]


@contextmanager
def kept_statistics(channels: Channels, kept: np.ndarray) -> Iterator[None]:
    """Lets the model's normalizations compute as those of the smaller model do, where removed channels have zeros.

    Inside the scope, a call whose gamma or beta is not zero at a removed channel computes as usual: it belongs to the
    model with all channels.

    Args:
        channels: The channels of the model.
        kept: True for each kept number.
    """
    with ExitStack() as stack:
        for layer, one in {id(one.layer): (one.layer, one) for one in affected(channels, kept)}.values():
            stack.enter_context(shadowed(layer, "call", _call(one, kept)))
        yield


def _call(one: Approximated, kept: np.ndarray) -> Callable[[Any], Any]:
    layer, removed = one.layer, np.flatnonzero(~kept[one.channels])
    original = layer.call

    def call(inputs: Any) -> Any:
        scales = [
            array_of(ops.convert_to_tensor(each))[removed] for each in (layer.gamma, layer.beta) if each is not None
        ]
        if any(each.any() for each in scales):
            return original(inputs)
        return _normalized(one, kept, inputs)

    return call


def _normalized(one: Approximated, kept: np.ndarray, inputs: Any) -> Any:
    """Returns the outputs of a normalization with the mean and the variance of the kept channels."""
    layer, rank = one.layer, len(inputs.shape)
    grouped = isinstance(layer, keras.layers.GroupNormalization)
    axes = tuple(range(1, rank)) if grouped else (one.axis,)
    along = [-1 if axis == one.axis else 1 for axis in range(rank)]
    x = ops.cast(inputs, "float32")
    mask = ops.broadcast_to(
        ops.reshape(ops.convert_to_tensor(kept[one.channels].astype("float32")), along), ops.shape(x)
    )
    entries = ops.sum(mask, axis=axes, keepdims=True)
    mean = ops.sum(x * mask, axis=axes, keepdims=True) / entries
    variance = ops.sum(ops.square(x - mean) * mask, axis=axes, keepdims=True) / entries
    outputs = (x - mean) * ops.rsqrt(variance + layer.epsilon)
    if layer.gamma is not None:
        outputs = outputs * ops.reshape(ops.cast(layer.gamma, "float32"), along)
    if layer.beta is not None:
        outputs = outputs + ops.reshape(ops.cast(layer.beta, "float32"), along)
    return ops.cast(outputs, layer.compute_dtype)


def approximation_errors(channels: Channels, kept: np.ndarray, zero: np.ndarray, inputs: Any) -> list[Adjustment]:
    """Returns the approximated normalizations with their errors on some inputs.

    Args:
        channels: The channels of the model.
        kept: True for each kept number.
        zero: The channels that are zero in the model that the normalizations are compared with.
        inputs: Inputs of the model.
    """
    found: dict[int, Approximated] = {id(one.layer): one for one in affected(channels, kept)}
    errors = dict.fromkeys(found, 0.0)

    def see(layer: Any, args: tuple) -> None:
        one = found[id(layer)]
        left = np.flatnonzero(kept[one.channels])
        wanted, made = (
            np.take(array_of(ops.cast(each, "float32")), left, one.axis)
            for each in (layer.call(args[0]), _normalized(one, kept, args[0]))
        )
        size = float(np.abs(wanted).max(initial=0.0))
        error = float(np.abs(wanted - made).max(initial=0.0)) / size if size else 0.0
        errors[id(layer)] = max(errors[id(layer)], error)

    values = zeroed(channels, channels.kept_numbers(zero))
    tensors = [(variable, ops.convert_to_tensor(value, variable.dtype)) for variable, value in values]
    with observing_inputs([one.layer for one in found.values()], see, tensors):
        channels.model(inputs, training=False)
    change = "mean and variance of {} of {} channels in the place of all"
    return [
        Adjustment(one.place, change.format(int(kept[one.channels].sum()), one.channels.size), errors[key])
        for key, one in found.items()
    ]
