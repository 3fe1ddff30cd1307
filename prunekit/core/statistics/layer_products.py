"""The matrix product behind a kernel: a layer's inputs as rows, and its kernel as a matrix that the rows multiply.

The arithmetic of calibration works on this form: X for the rows of all calibration data, W for the matrix, and X W for
the layer's outputs before bias and activation. Each formula restates one `call` method, so formulas are looked up by
that method: a subclass with its own `call` has none.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.layers import refusal
from prunekit.anatomy.layers.linear_kinds import CONVOLUTIONS, DEPTHWISE, SEPARABLE, TRANSPOSED
from prunekit.anatomy.layers.targets import Target
from prunekit.core.runtime import backend
from prunekit.sparsity.array_ops import ops_for

# Rows of a call of a layer, those that a `Choice` names; arguments of both.
Rows = Callable[[Any, tuple, "Choice"], Any]
# Returns the indices of the rows that are formed, from the number of rows of each group; None = all.
Choice = Callable[[int], "np.ndarray | None"]
# Bytes for each entry of a layer's Hessian while the layer is fitted, and the most of them.
_SOLVED, _MOST_OF_A_LAYER = 40, 4 << 30
# Windows of a depthwise convolution that are copied at once.
_COPIED = 64


def every_row(count: int) -> None:
    """Chooses all rows."""


@dataclass(frozen=True, eq=False)
class LayerProduct:
    """The product that a kernel takes part in, for each group: outputs = rows @ matrix.

    Attributes:
        target: The kernel.
        groups: Number of products that share no inputs and no outputs: the groups of a convolution, the channels of a
            depthwise convolution, the parallel axes of an EinsumDense; usually 1.
        inputs: Inputs of each output, K: for a convolution, window positions times input channels.
        outputs: Outputs of each group, O.
        window: Number of window positions among the inputs, 1 for other layers; input p * inputs / window + i is input
            channel i at position p.
        diagonal: True for an embedding: its rows are one-hot, so that their products form a diagonal matrix.
    """

    target: Target
    groups: int
    inputs: int
    outputs: int
    window: int
    _order: tuple[int, ...]
    _rows: Rows

    @property
    def diagonal(self) -> bool:
        return self.target.role == "embedding"

    def matrix(self, kernel: Any) -> Any:
        """Returns an array or tensor of the kernel's shape as matrices of shape (groups, inputs, outputs)."""
        operations = ops_for(kernel)
        ordered = operations.transpose(kernel, self._order)
        if self.target.groups == 1:
            return operations.reshape(ordered, (self.groups, self.inputs, self.outputs))
        # The groups divide the last output axis, so they are not an axis of the kernel.
        split = operations.reshape(ordered, (self.inputs, self.groups, self.outputs))
        return operations.transpose(split, (1, 0, 2))

    def kernel(self, matrix: Any) -> Any:
        """Returns matrices of shape (groups, inputs, outputs) in the kernel's shape; the inverse of `matrix`."""
        operations = ops_for(matrix)
        if self.target.groups > 1:
            matrix = operations.transpose(matrix, (1, 0, 2))
        ordered = operations.reshape(matrix, tuple(self.target.shape[axis] for axis in self._order))
        return operations.transpose(ordered, tuple(int(axis) for axis in np.argsort(self._order)))

    def rows(self, args: tuple, choice: Choice = every_row) -> Any:
        """Returns the rows of one call of the layer.

        Args:
            args: Positional arguments of the call, eager tensors.
            choice: Chooses rows by their number; not asked for an embedding.

        Returns:
            Tensor or NumPy array of shape (groups, rows, inputs) in the layer's compute dtype; for an embedding the
            indices, shape (lookups,).
        """
        return self._rows(self.target.layer, args, choice)

    def bias(self, outputs: np.ndarray) -> np.ndarray | None:
        """Returns one number per output as an array of the shape of the layer's bias; None without a bias.

        Args:
            outputs: Shape (groups, outputs). Averaged over output axes that the bias does not have.
        """
        layer = self.target.layer
        variable = getattr(layer, "bias", None)
        if variable is None:
            return None
        shape = tuple(variable.shape)
        if isinstance(layer, keras.layers.EinsumDense):
            return _einsum_bias(layer, outputs, shape)
        if len(shape) == 2:
            # A GRU that resets after the product has one bias for inputs and one for the state.
            row = np.zeros(shape, outputs.dtype)
            row[1 if self.target.role == "recurrent_kernel" else 0] = outputs.reshape(-1)
            return row
        return outputs.reshape(shape) if outputs.size == math.prod(shape) else None


def product_of(target: Target) -> LayerProduct:
    """Returns the product that a target takes part in.

    Raises:
        ValueError: The target takes part in no product that prunekit can state; the message gives the reason.
    """
    rows = _rows_of(target)
    if isinstance(rows, str):
        raise ValueError(
            f"The inputs of {target.name} cannot be stated as rows of a matrix product: {rows}. Leave the weight out "
            "with `exclude`, or choose a criterion that reads no inputs."
        )
    shape = target.shape
    if target.role == "embedding":
        return LayerProduct(target, 1, shape[0], shape[1], 1, (0, 1), rows)
    parallel = target.parallel_axes
    outs = tuple(axis for axis in target.out_axes if axis not in parallel)
    window = tuple(axis for axis in range(len(shape)) if axis not in (*parallel, *target.in_axes, *outs))
    order = (*parallel, *window, *target.in_axes, *outs)
    groups = math.prod(shape[axis] for axis in parallel) * target.groups
    positions = math.prod(shape[axis] for axis in window)
    inputs = positions * math.prod(shape[axis] for axis in target.in_axes)
    return LayerProduct(target, groups, inputs, math.prod(shape) // groups // inputs, positions, order, rows)


def unfitted(targets: Iterable[Target]) -> dict[str, str]:
    """Returns {name: reason} of the targets whose weights cannot be fitted to the outputs of their layer.

    A target takes part in no product that prunekit can state, or the fit of its layer needs more than 4 GiB.
    """
    found = {}
    for target in targets:
        try:
            product = product_of(target)
        except ValueError as error:
            found[target.name] = str(error).partition(". Leave")[0]
            continue
        size = 0 if product.diagonal else _SOLVED * product.groups * product.inputs**2
        if size > _MOST_OF_A_LAYER:
            found[target.name] = f"a layer of {product.inputs:,} inputs needs {size / 2**30:.1f} GiB to be fitted"
    return found


def _rows_of(target: Target) -> Rows | str:
    """Returns the function of a layer and the arguments of its call, or the reason why there is none."""
    layer = target.layer
    reason = refusal(layer)
    if reason:
        return reason
    attribute = target.name.rsplit("/", 1)[-1]
    for method, name, rows in _RULES:
        if "call" not in vars(layer) and type(layer).call is method and name == attribute:
            return rows
    if type(layer).call is keras.layers.GRUCell.call and target.role == "recurrent_kernel":
        return (
            _state
            if layer.reset_after
            else "a GRU with reset_after=False multiplies one part of its recurrent kernel by the reset state"
        )
    return f"prunekit has no formula for the call of {type(layer).__name__}"


# ---------------------------------------------------------------- rows of each layer type


def _chosen(rows: Any, choice: Choice) -> Any:
    """Returns the chosen ones of rows of shape (groups, rows, inputs)."""
    at = choice(rows.shape[1])
    return rows if at is None else ops_for(rows).take(rows, at, axis=1)


def _flat(tensor: Any, choice: Choice) -> Any:
    """Returns (..., features) as (1, rows, features)."""
    return _chosen(ops.reshape(tensor, (1, -1, tensor.shape[-1])), choice)


def _dense(layer: Any, args: tuple, choice: Choice) -> Any:
    return _flat(args[0], choice)


def _state(layer: Any, args: tuple, choice: Choice) -> Any:
    states = args[1]
    return _flat(states[0] if isinstance(states, list | tuple) else states, choice)


def _lookups(layer: Any, args: tuple, choice: Choice) -> Any:
    indices = ops.reshape(ops.cast(args[0], "int32"), (-1,))
    return ops.where(indices < 0, indices + layer.input_dim, indices)


def _einsum(layer: Any, args: tuple, choice: Choice) -> Any:
    data, kernel, output = full_labels(layer, len(args[0].shape))
    parallel = "".join(label for label in kernel if label in data and label in output)
    ins = "".join(label for label in kernel if label in data and label not in output)
    free = "".join(label for label in data if label in output and label not in kernel)
    sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
    # Labels that neither the kernel nor the outputs have are summed, as the layer sums them.
    arranged = ops.einsum(f"{data}->{parallel}{free}{ins}", args[0])
    groups, inputs = (math.prod(sizes[label] for label in labels) for labels in (parallel, ins))
    return _chosen(ops.reshape(arranged, (groups, -1, inputs)), choice)


def full_labels(layer: Any, rank: int) -> tuple[str, str, str]:
    """Returns the labels of input, kernel and output with the ellipsis written out."""
    data, kernel, output = einsum_labels(layer)
    free = (label for label in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if label not in data + kernel + output)
    more = "".join(itertools.islice(free, rank - len(data.replace("...", ""))))
    return data.replace("...", more), kernel, output.replace("...", more)


def _einsum_bias(layer: Any, outputs: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
    data, kernel, output = einsum_labels(layer)
    labels = "".join(label for label in kernel if label in data and label in output)
    labels += "".join(label for label in kernel if label in output and label not in data)
    sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
    named = outputs.reshape([sizes[label] for label in labels])
    # The bias is broadcast against the last axes of the outputs; its length is 1 along axes that it does not have.
    kept = [label if length > 1 else "" for label, length in zip(output[-len(shape) :], shape, strict=True)]
    if any(label and label not in labels for label in kept):
        return None
    gone = tuple(axis for axis, label in enumerate(labels) if label not in kept)
    left = [label for label in labels if label in kept]
    order = [left.index(label) for label in kept if label]
    return named.mean(axis=gone).transpose(order).reshape(shape)


def channels_last(layer: Any, tensor: Any) -> Any:
    """Returns the inputs or outputs of a convolution with their channels as the last axis."""
    if layer.data_format == "channels_last":
        return tensor
    return ops.transpose(tensor, (0, *range(2, len(tensor.shape)), 1))


def patches(layer: Any, inputs: Any, choice: Choice = every_row) -> Any:
    """Returns the window of each output position of a convolution.

    Args:
        layer: A convolution or a depthwise convolution.
        inputs: Tensor or NumPy array of shape (batch, lengths ..., channels).
        choice: Chooses output positions by their number in the batch.

    Returns:
        Tensor or array of shape (output positions, window positions, channels).
    """
    extents = [(size - 1) * dilation for size, dilation in zip(layer.kernel_size, layer.dilation_rate, strict=True)]
    lengths, padding = [], []
    for length, extent, stride in zip(inputs.shape[1:-1], extents, layer.strides, strict=True):
        out = -(-length // stride) if layer.padding in ("same", "causal") else (length - extent - 1) // stride + 1
        lacking = max((out - 1) * stride + extent + 1 - length, 0)
        # An odd position of padding is at the end.
        padding.append((extent, 0) if layer.padding == "causal" else (lacking // 2, lacking - lacking // 2))
        lengths.append(out)
    if any(map(any, padding)):
        inputs = ops_for(inputs).pad(inputs, ((0, 0), *padding, (0, 0)))
    if isinstance(inputs, np.ndarray):
        return _windows(layer, inputs, lengths, extents, choice)
    seen = []
    for offsets in itertools.product(*(range(size) for size in layer.kernel_size)):
        window = [slice(None)]
        for offset, out, stride, dilation in zip(offsets, lengths, layer.strides, layer.dilation_rate, strict=True):
            window.append(slice(offset * dilation, offset * dilation + (out - 1) * stride + 1, stride))
        seen.append(inputs[tuple(window)])
    stacked = ops.stack(seen, axis=-2)
    return _chosen(ops.reshape(stacked, (1, -1, *stacked.shape[-2:])), choice)[0]


def _windows(
    layer: Any, padded: np.ndarray, lengths: Sequence[int], extents: Sequence[int], choice: Choice
) -> np.ndarray:
    """Returns `patches` of an array in one copy, of the chosen windows alone; a tensor of slices takes several."""
    axes = tuple(range(1, len(lengths) + 1))
    seen = np.lib.stride_tricks.sliding_window_view(padded, [extent + 1 for extent in extents], axes)
    positions = [slice(None, (n - 1) * stride + 1, stride) for n, stride in zip(lengths, layer.strides, strict=True)]
    offsets = [slice(None, None, dilation) for dilation in layer.dilation_rate]
    seen = np.moveaxis(seen[(slice(None), *positions, slice(None), *offsets)], len(lengths) + 1, -1)
    shape = (len(padded), *lengths)
    at = choice(math.prod(shape))
    if at is not None:
        seen = seen[np.unravel_index(at, shape)]
    return seen.reshape(-1, math.prod(layer.kernel_size), padded.shape[-1])


def _convolution(layer: Any, args: tuple, choice: Choice) -> Any:
    seen = patches(layer, backend.on_host(channels_last(layer, args[0])), choice)
    operations, (window, channels) = ops_for(seen), seen.shape[-2:]
    if layer.groups == 1:
        return operations.reshape(seen, (1, -1, window * channels))
    width = channels // layer.groups
    split = operations.reshape(seen, (-1, window, layer.groups, width))
    return operations.reshape(operations.transpose(split, (2, 0, 1, 3)), (layer.groups, -1, window * width))


def _depthwise(layer: Any, args: tuple, choice: Choice) -> Any:
    seen = patches(layer, backend.on_host(channels_last(layer, args[0])), choice)
    window, channels = seen.shape[-2:]
    if isinstance(seen, np.ndarray):
        # BLAS multiplies no matrices whose entries lie apart, as those of one channel do in the windows. In parts that
        # fit into the processor's cache, the copy takes half the time.
        found = np.empty((channels, window, len(seen)), seen.dtype)
        for start in range(0, len(seen), _COPIED):
            part = slice(start, start + _COPIED)
            found[:, :, part] = seen[part].transpose(2, 1, 0)
        return found.transpose(0, 2, 1)
    return ops.transpose(seen, (2, 0, 1))


def _pointwise(layer: Any, args: tuple, choice: Choice) -> Any:
    between = ops.depthwise_conv(
        args[0],
        layer.depthwise_kernel,
        strides=layer.strides,
        padding=layer.padding,
        dilation_rate=layer.dilation_rate,
        data_format=layer.data_format,
    )
    return _flat(channels_last(layer, between), choice)


def _transposed_convolution(layer: Any, args: tuple, choice: Choice) -> Any:
    """The layer's own operation on each channel alone, with a kernel that moves each window position to an output."""
    inputs = channels_last(layer, args[0])
    lengths, channels = inputs.shape[1:-1], inputs.shape[-1]
    window = math.prod(layer.kernel_size)
    rank = len(lengths)
    alone = ops.reshape(ops.transpose(inputs, (0, rank + 1, *range(1, rank + 1))), (-1, *lengths, 1))
    moves = ops.reshape(ops.eye(window, dtype=inputs.dtype), (*layer.kernel_size, window, 1))
    moved = ops.conv_transpose(
        alone,
        moves,
        strides=list(layer.strides),
        padding=layer.padding,
        output_padding=layer.output_padding,
        dilation_rate=layer.dilation_rate,
        data_format="channels_last",
    )
    positions = math.prod(moved.shape[1:-1])
    split = ops.reshape(moved, (-1, channels, positions, window))
    return _chosen(ops.reshape(ops.transpose(split, (0, 2, 3, 1)), (1, -1, window * channels)), choice)


def _first_rules() -> list[tuple[Any, str, Rows]]:
    layers = keras.layers
    rules: list[tuple[Any, str, Rows]] = [
        (layers.Dense.call, "kernel", _dense),
        (layers.EinsumDense.call, "kernel", _einsum),
        (layers.Embedding.call, "embeddings", _lookups),
        (layers.SimpleRNNCell.call, "kernel", _dense),
        (layers.SimpleRNNCell.call, "recurrent_kernel", _state),
        (layers.LSTMCell.call, "kernel", _dense),
        (layers.LSTMCell.call, "recurrent_kernel", _state),
        (layers.GRUCell.call, "kernel", _dense),
    ]
    rules += [(layer.call, "kernel", _convolution) for layer in CONVOLUTIONS]
    rules += [(layer.call, "kernel", _depthwise) for layer in DEPTHWISE]
    rules += [(layer.call, "kernel", _transposed_convolution) for layer in TRANSPOSED]
    for layer in SEPARABLE:
        rules += [(layer.call, "depthwise_kernel", _depthwise), (layer.call, "pointwise_kernel", _pointwise)]
    return rules


_RULES = _first_rules()
