"""Kinds of layers that multiply what they read by a kernel, tables, and batch normalization.

Batch normalization is linear in inference.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.sparsity.array_ops import ops_for

L = keras.layers
CONVOLUTIONS = (L.Conv1D, L.Conv2D, L.Conv3D)
TRANSPOSED = (L.Conv1DTranspose, L.Conv2DTranspose, L.Conv3DTranspose)
DEPTHWISE = (L.DepthwiseConv1D, L.DepthwiseConv2D)
SEPARABLE = (L.SeparableConv1D, L.SeparableConv2D)
KINDS = (*CONVOLUTIONS, *TRANSPOSED, *DEPTHWISE, *SEPARABLE, L.Dense, L.EinsumDense)
RECURRENT = (L.SimpleRNN, L.LSTM, L.GRU, L.RNN)
CELLS = (L.SimpleRNNCell, L.LSTMCell, L.GRUCell)


def is_linear_kind(layer: Any) -> bool:
    """Returns True for a Dense or convolution layer whose `call` is Keras's own."""
    return kind_of(layer) is not None


def kind_of(layer: Any) -> type | None:
    """Returns the layer type in `KINDS` whose `call` the layer has, or None."""
    # DepthwiseConv and others share the call of their base class.
    found = [kind for kind in KINDS if isinstance(layer, kind) and type(layer).call is kind.call]
    return found[0] if found else None


def is_table(layer: Any) -> bool:
    """Returns True for an Embedding, which looks up rows and computes nothing else; not for its subclasses."""
    return type(layer) is L.Embedding


def input_cells(layer: Any) -> list[Any]:
    """Returns the cells that multiply a recurrent layer's inputs by their attribute `kernel`, of shape (inputs, n).

    Of stacked cells the first one, of a Bidirectional one for each direction; [] for other layers, for subclasses of
    recurrent layers, and if a cell is not Keras's own.
    """
    if type(layer) is L.Bidirectional:
        directions = [input_cells(one) for one in (layer.forward_layer, layer.backward_layer)]
        return sum(directions, []) if all(directions) else []
    if type(layer) not in RECURRENT:
        return []
    cell = layer.cell
    while type(cell) is L.StackedRNNCells:
        cell = cell.cells[0]
    return [cell] if type(cell) in CELLS else []


def unusual_state(layer: Any) -> str:
    """Returns why a layer multiplies its inputs by more than its kernel, as in "has LoRA weights", or ""."""
    if getattr(layer, "quantization_mode", None) is not None:
        return "is quantized"
    return "has LoRA weights" if getattr(layer, "lora_enabled", False) else ""


def is_linear(activation: Any) -> bool:
    """Returns True for None and the linear activation."""
    return activation is None or activation is keras.activations.linear


def channel_axis(layer: Any, rank: int) -> int:
    """Returns the axis of the channels in the inputs and outputs of a Dense or convolution layer."""
    return 1 if getattr(layer, "data_format", "") == "channels_first" else rank - 1


def kernel_names(layer: Any) -> tuple[str, str]:
    """Returns the attributes of a linear layer's first and last kernel, which are the same except in `SEPARABLE`."""
    return ("depthwise_kernel", "pointwise_kernel") if isinstance(layer, SEPARABLE) else ("kernel", "kernel")


def outputs_shape(layer: Any, kernel: Sequence[int]) -> tuple[int, ...]:
    """Returns the shape in which one number for each output channel of a linear layer broadcasts against its kernel.

    Args:
        layer: The layer. The channels of an EinsumDense are the last axis of its outputs.
        kernel: Shape of the last kernel.

    Returns:
        The shape; () if the kernel of an EinsumDense does not have the axis.
    """
    if isinstance(layer, L.EinsumDense):
        _, labels, output = einsum_labels(layer)
        return label_shape(labels, output[-1], kernel)
    if isinstance(layer, TRANSPOSED):
        return (kernel[-2], 1)
    return tuple(kernel[-2:] if isinstance(layer, DEPTHWISE) else kernel[-1:])


def label_shape(labels: str, label: str, kernel: Sequence[int]) -> tuple[int, ...]:
    """Returns `outputs_shape` for any of the `labels` of a kernel's axes; () if the label is not among them."""
    return tuple(n if one == label else 1 for one, n in zip(labels, kernel, strict=True)) if label in labels else ()


def along_inputs(layer: Any, kernel: Sequence[int], numbers: np.ndarray) -> np.ndarray:
    """Returns one number for each input channel of a Dense or convolution layer so that it broadcasts against a kernel.

    Args:
        layer: The layer.
        kernel: Shape of the first kernel.
        numbers: Shape (channels,).
    """
    if isinstance(layer, TRANSPOSED):
        return numbers
    groups = getattr(layer, "groups", 1)
    if groups == 1:
        return numbers[:, None]
    group = np.repeat(np.arange(groups), kernel[-1] // groups)
    return numbers.reshape(groups, kernel[-2])[group].T


def is_normalization(layer: Any) -> bool:
    """Returns True for a batch normalization whose `call` is Keras's own."""
    kind = keras.layers.BatchNormalization
    return isinstance(layer, kind) and type(layer).call is kind.call


def is_fixed_normalization(layer: Any) -> bool:
    """Returns True for a normalization with the mean and variance of data, whose `call` is Keras's own."""
    kind = keras.layers.Normalization
    return isinstance(layer, kind) and type(layer).call is kind.call


def scale_and_shift(layer: Any, value: Callable[[str], Any]) -> tuple[Any, Any]:
    """Returns the factor of each channel in a batch normalization in inference, and what is added after that.

    Args:
        layer: The layer.
        value: Returns the value of a weight, by attribute.
    """
    variance = value("moving_variance")
    scale = 1 / ops_for(variance).sqrt(variance + layer.epsilon)
    if layer.scale:
        scale = scale * value("gamma")
    shift = -value("moving_mean") * scale
    return scale, shift + value("beta") if layer.center else shift
