"""Products of linear layers in the forms that LiteRT computes with one operation.

Keras writes dilated convolutions as convolutions of interleaved parts of the image, computes lengths for the products
of a Dense layer with tensors of more than two axes, and lets the converter choose the products of an EinsumDense:
several operations, of which some read or compute what no range describes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from keras import ops

from prunekit.anatomy.layers.counting import EinsumAxes, einsum_axes
from prunekit.anatomy.layers.linear_kinds import CONVOLUTIONS, DEPTHWISE, L, kind_of
from prunekit.techniques.quantize.placement.subpixels import Blocks, subpixels


def product(layer: Any, inputs: Any, kernel: Any, bias: Any, activations: int) -> Any:
    """Returns the outputs of a layer before its activation; None for one that Keras writes as one operation.

    Args:
        layer: A Dense or convolution layer.
        inputs: What it reads, inside a TensorFlow function.
        kernel: The kernel.
        bias: Added to the products, in a shape that broadcasts against the outputs; None without one.
        activations: Bits of the tensors between layers.
    """
    kind, blocks = kind_of(layer), subpixels(layer, activations)
    if blocks is not None:
        return _in_blocks(inputs, kernel, bias, blocks)
    if kind is L.EinsumDense:
        return _einsum(layer, inputs, kernel, bias)
    if kind is L.Dense and len(inputs.shape) > 2:
        return _dense(inputs, kernel, bias)
    is_depthwise = kind in DEPTHWISE
    if not (is_depthwise or kind in CONVOLUTIONS) or getattr(layer, "data_format", "") != "channels_last":
        return None
    if max(layer.dilation_rate) == 1 or max(layer.strides) > 1 or layer.rank > 2:
        return None
    return _dilated(layer, inputs, kernel, bias, is_depthwise=is_depthwise)


# ---- convolutions ----------------------------------------------------------------------------------------------------


def _dilated(layer: Any, inputs: Any, kernel: Any, bias: Any, *, is_depthwise: bool) -> Any:
    import tensorflow as tf

    padding, dilation = layer.padding, [1, *layer.dilation_rate]
    if padding == "causal":
        inputs, padding = ops.pad(inputs, layer._compute_causal_padding()), "valid"
    kernel = tf.cast(kernel, inputs.dtype)
    if layer.rank == 1:
        # One row of an image.
        inputs, kernel, dilation = tf.expand_dims(inputs, 1), tf.expand_dims(kernel, 0), [1, *dilation]
    convolve = tf.raw_ops.DepthwiseConv2dNative if is_depthwise else tf.raw_ops.Conv2D
    found = convolve(input=inputs, filter=kernel, strides=[1] * 4, padding=padding.upper(), dilations=[*dilation, 1])
    found = found if bias is None else tf.nn.bias_add(found, bias)
    return tf.squeeze(found, [1]) if layer.rank == 1 else found


def _in_blocks(inputs: Any, kernel: Any, bias: Any, blocks: Blocks) -> Any:
    """Returns the outputs of a transposed convolution, each block of pixels computed as channels of one."""
    import tensorflow as tf

    # The kernel of a transposed convolution ends with (outputs, inputs).
    kernel = tf.transpose(tf.cast(kernel, inputs.dtype), (0, 1, 3, 2))
    zeros, padded, found = tf.zeros(kernel.shape[2:], inputs.dtype), {}, []
    for part in blocks.parts:
        window = [
            tf.stack([tf.concat([zeros if at is None else kernel[at] for at in pixels], -1) for pixels in row])
            for row in part.taps
        ]
        margins = part.margins
        if margins not in padded:
            padded[margins] = tf.pad(inputs, [(0, 0), *margins, (0, 0)]) if any(map(any, margins)) else inputs
        pixels = tf.nn.conv2d(padded[margins], tf.stack(window), 1, "VALID")
        if bias is not None:
            pixels = tf.nn.bias_add(pixels, tf.tile(tf.reshape(bias, (-1,)), [part.pixels]))
        found.append(pixels)
    outputs = found[0] if len(found) == 1 else tf.concat(found, -1)
    if blocks.side > 1:
        outputs = tf.nn.depth_to_space(outputs, blocks.side)
    rows, columns = (slice(-one if one else None) for one in blocks.cut)
    return outputs[:, rows, columns] if any(blocks.cut) else outputs


# ---- Dense and EinsumDense -------------------------------------------------------------------------------------------


def _einsum(layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
    """Returns the products as those of a matrix with rows, or of one matrix for each group of channels."""
    import tensorflow as tf

    axes = einsum_axes(layer, len(inputs.shape))
    if axes is None:
        return None
    lengths = dict(zip(axes.data, inputs.shape, strict=True)) | dict(zip(axes.kernel, kernel.shape, strict=True))
    if sum(lengths[one] is None for one in axes.rows) == 1:
        lengths = {one: -1 if length is None else length for one, length in lengths.items()}
    else:
        sizes = tf.shape(inputs)
        lengths = {one: sizes[axes.data.index(one)] if n is None else n for one, n in lengths.items()}
    groups, width = (math.prod(lengths[one] for one in part) for part in (axes.groups, axes.inputs))
    rows, parts = [lengths[one] for one in axes.rows], [lengths[one] for one in axes.groups + axes.outputs]
    read = _in_order(inputs, axes.data, axes.rows + axes.groups + axes.inputs)
    matrix = _in_order(kernel, axes.kernel, axes.inputs + axes.groups + axes.outputs)
    matrix = tf.cast(tf.reshape(matrix, (width, -1)), inputs.dtype)
    if groups == 1:
        found = tf.matmul(tf.reshape(read, [*rows, width]) if len(axes.inputs) > 1 else read, matrix)
    else:
        # A convolution with one group of channels for each kernel, on images of one entry.
        image = tf.reshape(read, (-1, 1, 1, groups * width))
        found = tf.raw_ops.Conv2D(input=image, filter=matrix[None, None], strides=[1] * 4, padding="VALID")
    if bias is not None:
        found = tf.nn.bias_add(found, _of_outputs(axes, parts, bias))
    if groups > 1 or len(parts) > 1:
        found = tf.reshape(found, [*rows, *parts])
    return _in_order(found, axes.rows + axes.groups + axes.outputs, axes.output)


def _dense(inputs: Any, kernel: Any, bias: Any) -> Any:
    """Returns the products of a matrix with the rows of a tensor of several axes, which Keras makes one of two axes."""
    import tensorflow as tf

    found = tf.matmul(inputs, tf.cast(kernel, inputs.dtype))
    return found if bias is None else tf.nn.bias_add(found, tf.reshape(bias, (-1,)))


def _of_outputs(axes: EinsumAxes, parts: Sequence[int], bias: Any) -> Any:
    """Returns the bias for each entry of groups and outputs, in one row."""
    labels = axes.groups + axes.outputs
    bias = ops.reshape(bias, [1] * (len(axes.output) - len(bias.shape)) + list(bias.shape))
    bias = _in_order(bias, axes.output, axes.rows + labels)
    return ops.reshape(ops.broadcast_to(bias, [1] * len(axes.rows) + list(parts)), (-1,))


def _in_order(values: Any, labels: str, wanted: str) -> Any:
    """Returns a tensor with its axes in another order."""
    return values if labels == wanted else ops.transpose(values, [labels.index(one) for one in wanted])
