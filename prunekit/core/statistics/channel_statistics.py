"""Statistics of output units: scales of batch normalisation, and activations on calibration data."""

import math
from collections.abc import Sequence
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.graph.flow import LayerCall
from prunekit.anatomy.layers.layers import owns_kernels
from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.core.statistics.layer_calls import calls_after, input_of_ones, layer_calls
from prunekit.core.statistics.statistics import Collector, DataCollector


class BatchNormalizationScales(Collector):
    """Reads gamma of the batch normalisation behind each target's layer: one value per output unit."""

    def check(self) -> None:
        """Raises for a target without a scale."""
        self._scales()

    def values(self) -> list[Any]:
        """Returns gamma of each target, tensors of shape (output units,).

        Raises:
            ValueError: No batch normalisation follows a target's layer, or it has no scale.
        """
        return [backend.value_now(scale) for scale in self._scales()]

    def _scales(self) -> list[Any]:
        calls = layer_calls(self.model, *input_of_ones(self.model))
        return [self._scale(target, calls) for target in self.targets]

    def _scale(self, target: Target, calls: Sequence[LayerCall]) -> Any:
        for call in calls:
            if call.layer is not target.layer:
                continue
            for after in calls_after(calls, call):
                layer = after.layer
                if isinstance(layer, keras.layers.BatchNormalization):
                    if layer.gamma is not None and tuple(layer.gamma.shape) == (_units(target),):
                        return layer.gamma
                    break
                if layer.weights:
                    break
        raise ValueError(
            f"The scale of batch normalisation ranks units whose outputs pass into one BatchNormalization with "
            f"scale=True. Received: {target.name}, whose layer's output does not. Leave it out with `exclude`, or "
            "choose another criterion."
        )


class _Activations(DataCollector):
    """Sums a function of the activations of each target's layer, for each output unit, after its activation function.

    The activation function is that of the layer, or else that of the next layer of activations that the output passes
    through, directly or behind batch normalisation and dropout. Without any, the layer's output counts.
    """

    def check(self) -> None:
        """Raises for a target whose layer is not called outside a loop, in models that say which inputs they take."""
        try:
            args, kwargs = input_of_ones(self.model)
        except ValueError:
            return
        calls = layer_calls(self.model, args, kwargs)
        for target in self.targets:
            called = [call for call in calls if call.layer is target.layer]
            if not called:
                raise _unseen(target)
            _by_units(_activated(calls, called[0]), target)

    def reset(self) -> None:
        """Forgets all batches."""
        self._sums: list[Any] = [0.0] * len(self.targets)
        self._counts = [0] * len(self.targets)

    def observe(self, inputs: Any, labels: Any) -> None:
        """Adds a batch."""
        calls = layer_calls(self.model, (keras.tree.map_structure(ops.convert_to_tensor, inputs),))
        for i, target in enumerate(self.targets):
            for call in calls:
                if call.layer is target.layer:
                    units = _by_units(_activated(calls, call), target)
                    self._sums[i] = self._sums[i] + ops.sum(self.of(units), axis=0)
                    self._counts[i] += units.shape[0]

    def of(self, activations: Any) -> Any:
        """Returns the summand of each activation, float32."""
        raise NotImplementedError

    def values(self) -> list[Any]:
        """Returns the mean of each target's units, tensors of shape (output units,).

        Raises:
            ValueError: The layer of a target was not called outside a loop.
        """
        for target, count in zip(self.targets, self._counts, strict=True):
            if not count:
                raise _unseen(target)
        return [total / count for total, count in zip(self._sums, self._counts, strict=True)]


class ZeroShare(_Activations):
    """Collects the share of zeros among each unit's activations (APoZ)."""

    def of(self, activations: Any) -> Any:
        """Returns 1 for each zero."""
        return ops.cast(ops.equal(activations, 0), "float32")


class ActivationMean(_Activations):
    """Collects the mean of each unit's activations."""

    def of(self, activations: Any) -> Any:
        """Returns the activations."""
        return ops.cast(activations, "float32")


def _activated(calls: Sequence[LayerCall], call: LayerCall) -> Any:
    """Returns the output of a layer's call after the activation function that follows."""
    if getattr(call.layer, "activation", None) in (None, keras.activations.linear):
        for after in calls_after(calls, call):
            if not isinstance(after.layer, keras.layers.BatchNormalization):
                # Without weights and with the same shape: an activation, and not another kernel.
                return call.outputs[0] if after.layer.weights else after.outputs[0]
    return call.outputs[0]


def _units(target: Target) -> int:
    return math.prod(target.shape[axis] for axis in target.out_axes)


def _by_units(output: Any, target: Target) -> Any:
    """Returns the output as a matrix of shape (examples x positions, output units)."""
    shape, units = tuple(output.shape), _units(target)
    sizes = tuple(target.shape[axis] for axis in sorted(target.out_axes))
    if getattr(target.layer, "data_format", None) == "channels_first":
        output = ops.moveaxis(output, 1, -1)
        shape = tuple(output.shape)
    # A separable convolution returns the outputs of its pointwise kernel.
    inner = target.role == "depthwise_kernel" and owns_kernels(target.layer)
    if inner or not sizes or (shape[-1:] != (units,) and shape[-len(sizes) :] != sizes):
        raise _unseen(target)
    return ops.reshape(output, (-1, units))


def _unseen(target: Target) -> ValueError:
    return ValueError(
        f"Statistics of activations need a layer whose outputs are those of the weight's output units, called outside "
        f"of loops. Received: {target.name} of {type(target.layer).__name__}. Leave it out with `exclude`, or choose "
        "another criterion."
    )
