"""Scales and shifts of the channels of a linear layer's inputs and outputs, written into the layer's weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.graph_calls import Call
from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.linear_kinds import (
    DEPTHWISE,
    SEPARABLE,
    TRANSPOSED,
    channel_axis,
    is_linear,
    is_linear_kind,
    unusual_state,
)
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph

L = keras.layers

# What is left of a layer's weights: values by attribute, and the entries of its config that differ.
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


def after(graph: LayerGraph, call: Call, affine: Affine) -> Written | str:
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
    name = "pointwise_kernel" if isinstance(layer, SEPARABLE) else "kernel"
    kernel, bias = _wide(graph.value(layer, name)), graph.value(layer, "bias")
    scale = affine.scale
    if isinstance(layer, TRANSPOSED):
        kernel = kernel * scale[:, None]
    elif isinstance(layer, DEPTHWISE):
        kernel = kernel * scale.reshape(kernel.shape[-2:])
    else:
        kernel = kernel * scale
    values = {name: kernel, "bias": (0 if bias is None else _wide(bias) * scale) + affine.shift}
    return values, {"use_bias": True}


def _after_einsum(graph: LayerGraph, layer: Any, affine: Affine, rank: int) -> Written | str:
    _, kernel_letters, output = einsum_labels(layer)
    from_end = rank - affine.axis
    letter = output[-from_end] if from_end <= len(output.replace("...", "")) else ""
    if not letter or letter not in kernel_letters:
        return f"its axis {affine.axis} is not an axis of the kernel of {layer.name}"
    kernel, bias = _wide(graph.value(layer, "kernel")), graph.value(layer, "bias")
    shape = [1] * kernel.ndim
    shape[kernel_letters.index(letter)] = -1
    # The bias has the axes of the outputs from its first letter on.
    with_bias = {*(layer.bias_axes or ""), letter}
    axes = "".join(one for one in output.replace("...", "") if one in with_bias)
    first = output.index(axes[0])
    length = len(output) - first
    scale, shift = (one.reshape([-1, *[1] * (from_end - 1)]) for one in (affine.scale, affine.shift))
    scale, shift = (one.reshape([*[1] * (length - from_end), *one.shape]) for one in (scale, shift))
    values = {
        "kernel": kernel * affine.scale.reshape(shape),
        "bias": shift if bias is None else _wide(bias) * scale + shift,
    }
    return values, {"bias_axes": axes}


# ---- an affine map of the inputs -------------------------------------------------------------------------------------


def before(graph: LayerGraph, call: Call, affine: Affine) -> Written | str:
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
    written = _rule(layer)(graph, layer, affine)
    added = written.pop("added")
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


def _rule(layer: Any) -> Callable[..., dict[str, np.ndarray]]:
    if isinstance(layer, TRANSPOSED):
        return _before_transposed
    if isinstance(layer, DEPTHWISE):
        return _before_depthwise
    return _before_separable if isinstance(layer, SEPARABLE) else _before_convolution


def _before_convolution(graph: LayerGraph, layer: Any, affine: Affine) -> dict[str, np.ndarray]:
    kernel = _wide(graph.value(layer, "kernel"))
    inputs, outputs = kernel.shape[-2:]
    groups = getattr(layer, "groups", 1)
    group = np.repeat(np.arange(groups), outputs // groups)
    scale, shift = (one.reshape(groups, inputs)[group].T for one in (affine.scale, affine.shift))
    return {"kernel": kernel * scale, "added": (kernel * shift).reshape(-1, outputs).sum(0)}


def _before_transposed(graph: LayerGraph, layer: Any, affine: Affine) -> dict[str, np.ndarray]:
    kernel = _wide(graph.value(layer, "kernel"))
    return {"kernel": kernel * affine.scale, "added": np.zeros(kernel.shape[-2])}


def _before_depthwise(graph: LayerGraph, layer: Any, affine: Affine) -> dict[str, np.ndarray]:
    kernel = _wide(graph.value(layer, "kernel"))
    added = (kernel * affine.shift[:, None]).reshape(-1, kernel.shape[-2] * kernel.shape[-1]).sum(0)
    return {"kernel": kernel * affine.scale[:, None], "added": added}


def _before_separable(graph: LayerGraph, layer: Any, affine: Affine) -> dict[str, np.ndarray]:
    depthwise = _wide(graph.value(layer, "depthwise_kernel"))
    pointwise = _wide(graph.value(layer, "pointwise_kernel"))
    inner = (depthwise * affine.shift[:, None]).reshape(-1, depthwise.shape[-2] * depthwise.shape[-1]).sum(0)
    added = inner @ pointwise.reshape(-1, pointwise.shape[-1])
    return {"depthwise_kernel": depthwise * affine.scale[:, None], "added": added}


def _wide(value: Any) -> np.ndarray:
    return np.asarray(value, "float64")
