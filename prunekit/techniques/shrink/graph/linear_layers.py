"""Scales and shifts of the channels of a linear layer's inputs and outputs, written into the layer's weights."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import GraphCall
from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.linear_kinds import (
    DEPTHWISE,
    SEPARABLE,
    TRANSPOSED,
    along_inputs,
    channel_axis,
    is_linear,
    is_linear_kind,
    kernel_names,
    label_shape,
    outputs_shape,
    unusual_state,
)
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

L = keras.layers

# The new weights of a layer, by attribute, and the entries of its config that change.
Written = tuple[dict[str, np.ndarray], dict[str, Any]]


@dataclass(frozen=True)
class Affine:
    """A scale and a shift for each channel of one axis.

    Attributes:
        axis: The axis, counted from 0.
        scale: Factor of each channel, in float64.
        shift: What is added to each channel after that.
    """

    axis: int
    scale: np.ndarray
    shift: np.ndarray


def refusal(layer: Any) -> str:
    """Returns why values cannot be written into a layer's weights, or ""."""
    if not is_linear_kind(layer):
        return f"{type(layer).__name__} is not a Dense or convolution layer"
    state = unusual_state(layer)
    return f"{layer.name} {state}" if state else ""


# ---- an affine map of the outputs ------------------------------------------------------------------------------------


def after(graph: LayerGraph, call: GraphCall, affine: Affine) -> Written | str:
    """Returns the weights with which a layer computes an affine map of its present outputs; or why there are none.

    Args:
        graph: The graph, for the present values.
        call: The only call of the layer.
        affine: Scale and shift of the outputs' channels.
    """
    layer, rank = call.operation, len(call.output.shape)
    reason = refusal(layer)
    if reason:
        return reason
    if not is_linear(layer.activation):
        return f"{layer.name} has the activation {keras.activations.serialize(layer.activation)!r}"
    if isinstance(layer, L.EinsumDense):
        return _after_einsum(graph, layer, affine, rank)
    if affine.axis != channel_axis(layer, rank):
        return f"its axis {affine.axis} is not the axis of the channels of {layer.name}"
    _, name = kernel_names(layer)
    kernel, bias = _wide(graph.value(layer, name)), graph.value(layer, "bias")
    values = {
        name: kernel * affine.scale.reshape(outputs_shape(layer, kernel.shape)),
        "bias": (0 if bias is None else _wide(bias) * affine.scale) + affine.shift,
    }
    return values, {"use_bias": True}


def _after_einsum(graph: LayerGraph, layer: Any, affine: Affine, rank: int) -> Written | str:
    _, kernel_letters, output = einsum_labels(layer)
    from_end = rank - affine.axis
    letter = output[-from_end] if from_end <= len(output.replace("...", "")) else ""
    if not letter or letter not in kernel_letters:
        return f"its axis {affine.axis} is not an axis of the kernel of {layer.name}"
    kernel, bias = _wide(graph.value(layer, "kernel")), graph.value(layer, "bias")
    # The bias has the axes of the outputs from its first letter on.
    with_bias = {*(layer.bias_axes or ""), letter}
    axes = "".join(one for one in output.replace("...", "") if one in with_bias)
    first = output.index(axes[0])
    length = len(output) - first
    scale, shift = (one.reshape([-1, *[1] * (from_end - 1)]) for one in (affine.scale, affine.shift))
    scale, shift = (one.reshape([*[1] * (length - from_end), *one.shape]) for one in (scale, shift))
    values = {
        "kernel": kernel * affine.scale.reshape(label_shape(kernel_letters, letter, kernel.shape)),
        "bias": shift if bias is None else _wide(bias) * scale + shift,
    }
    return values, {"bias_axes": axes}


# ---- an affine map of the inputs -------------------------------------------------------------------------------------


def before(graph: LayerGraph, call: GraphCall, affine: Affine) -> Written | str:
    """Returns the weights with which a layer computes its present outputs from inputs before an affine map.

    Args:
        graph: The graph, for the present values.
        call: The only call of the layer.
        affine: Scale and shift of the inputs' channels.

    Returns:
        The weights, or the reason why there are none.
    """
    layer, rank = call.operation, len(call.input.shape)
    reason = refusal(layer)
    if reason:
        return reason
    if isinstance(layer, L.EinsumDense):
        return f"{layer.name} is an EinsumDense layer"
    if affine.axis != channel_axis(layer, rank):
        return f"its axis {affine.axis} is not the axis of the channels of {layer.name}"
    if affine.shift.any() and not _sees_no_border(layer):
        return f"{layer.name} pads its inputs with zeros, which the shift would change at the borders"
    written, added = _before(graph, layer, affine)
    config: dict[str, Any] = {}
    bias = graph.value(layer, "bias")
    if bias is not None or affine.shift.any():
        written["bias"] = (0 if bias is None else _wide(bias)) + added
        config = {"use_bias": True}
    return written, config


def _sees_no_border(layer: Any) -> bool:
    if isinstance(layer, L.Dense):
        return True
    if isinstance(layer, TRANSPOSED):
        return False
    return layer.padding == "valid" or all(size == 1 for size in layer.kernel_size)


def _before(graph: LayerGraph, layer: Any, affine: Affine) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Returns the kernel that reads the inputs, by its name, and what the shift adds to each output channel."""
    name, _ = kernel_names(layer)
    kernel = _wide(graph.value(layer, name))
    scale, shift = (along_inputs(layer, kernel.shape, one) for one in (affine.scale, affine.shift))
    if isinstance(layer, TRANSPOSED):  # without a shift; see `_sees_no_border`
        return {name: kernel * scale}, np.zeros(kernel.shape[-2])
    outputs = math.prod(kernel.shape[-2:]) if isinstance(layer, (*DEPTHWISE, *SEPARABLE)) else kernel.shape[-1]
    added = (kernel * shift).reshape(-1, outputs).sum(0)
    if isinstance(layer, SEPARABLE):
        pointwise = _wide(graph.value(layer, "pointwise_kernel"))
        added = added @ pointwise.reshape(-1, pointwise.shape[-1])
    return {name: kernel * scale}, added


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value, "float64")
