"""Rules of `keras.ops`: how the axes of an operation's results follow from those of its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_axes import Axes, Kept, KeptSlice, Numbers
from prunekit.anatomy.channels.channel_blocks import depth_to_space, space_to_depth
from prunekit.anatomy.channels.channel_calls import (
    ChannelCall,
    NotFollowedError,
    Rule,
    Walk,
    channel_axis,
    concatenated,
    contracted,
    elementwise,
    keep_other_axes,
    maps_zero_to_zero,
    sizes,
)
from prunekit.sparsity.array_ops import array_of

# ---- entry by entry --------------------------------------------------------------------------------------------------

_UNARY = (
    "Relu Relu6 Silu Gelu Elu Selu Celu LeakyRelu HardSilu HardSigmoid HardTanh HardShrink SoftShrink TanhShrink "
    "Softsign Sigmoid LogSigmoid Softplus Squareplus SparseSigmoid SparsePlus Threshold Absolute Fabs Negative Square "
    "Sqrt Rsqrt "
    "Sign Sin Sinh Sinc Cos Cosh Tan Tanh Arcsin Arcsinh Arccos Arccosh Arctan Arctanh Exp Exp2 Expm1 Log Log1p Log2 "
    "Log10 Erf Erfc Erfinv Cbrt Reciprocal Round Floor Ceil Trunc Clip Cast SaturateCast StopGradient Copy NanToNum "
    "Isnan Isfinite Isinf LogicalNot Real Conjugate OnesLike ZerosLike"
)
_BINARY = (
    "Add Subtract Multiply Divide DivideNoNan TrueDivide FloorDivide Maximum Minimum Fmax Fmin Power Mod Logaddexp "
    "Arctan2 Equal NotEqual Greater GreaterEqual Less LessEqual LogicalAnd LogicalOr LogicalXor Where Hypot"
)


def _unary(walk: Walk, call: ChannelCall) -> list[Axes]:
    x = call.x
    if not x.labelled:
        return [replace(x, shape=call.outputs[0])]
    return [replace(x, zero=x.zero and maps_zero_to_zero(call.operation.call))]


def _binary(walk: Walk, call: ChannelCall) -> list[Axes]:
    kind, given = type(call.operation).__name__, [*call.args, *call.kwargs.values()]
    operands = [one if isinstance(one, Axes) else _constant(one) for one in given if one is not None]
    if kind == "Multiply":
        zero = "any"
    elif kind in ("Divide", "DivideNoNan", "TrueDivide"):
        zero = "first"
    else:
        zero = "all" if kind in ("Add", "Subtract", "Maximum", "Minimum", "Fmax", "Fmin", "Hypot") else "none"
    return [elementwise(walk, operands, call.outputs[0], zero)]


def _constant(value: Any) -> Axes:
    shape = tuple(np.shape(value))
    return Axes(shape, (None,) * len(shape), bool(np.all(array_of(value) == 0)))


# ---- sums of products ------------------------------------------------------------------------------------------------


def _einsum(walk: Walk, call: ChannelCall) -> list[Axes]:
    text = call.operation.subscripts.replace(" ", "")
    if "->" not in text:
        raise NotFollowedError(f"the result of {text!r} is not named")
    left, output = text.split("->")
    operands = left.split(",")
    inputs = [one for one in call.args if isinstance(one, Axes)]
    if len(inputs) != len(operands):
        raise NotFollowedError("an operand is a constant")
    spare = [chr(code) for code in range(ord("A"), ord("Z") + 1) if chr(code) not in text]
    ranks = [len(one.shape) - len(letters.replace("...", "")) for one, letters in zip(inputs, operands, strict=True)]
    filled = [
        letters.replace("...", "".join(spare[-rank:] if rank else []))
        for letters, rank in zip(operands, ranks, strict=True)
    ]
    most = max((rank for rank, letters in zip(ranks, operands, strict=True) if "..." in letters), default=0)
    output = output.replace("...", "".join(spare[-most:] if most else []))
    return [contracted(walk, inputs, filled, output, call.outputs[0])]


def _matmul(walk: Walk, call: ChannelCall) -> list[Axes]:
    inputs = [one for one in call.args if isinstance(one, Axes)]
    if len(inputs) != 2 or min(len(one.shape) for one in inputs) < 2:
        raise NotFollowedError("an operand is a constant or a vector")
    letters = []
    for one, last in zip(inputs, ("mk", "kn"), strict=True):
        batch = len(one.shape) - 2
        letters.append("".join(chr(ord("Z") - batch + i + 1) for i in range(batch)) + last)
    batch = max(len(one.shape) for one in inputs) - 2
    output = "".join(chr(ord("Z") - batch + i + 1) for i in range(batch)) + "mn"
    return [contracted(walk, inputs, letters, output, call.outputs[0])]


def _attention(walk: Walk, call: ChannelCall) -> list[Axes]:
    query, key, value = call.argument("query", 0), call.argument("key", 1), call.argument("value", 2)
    for one in (query, key, value):
        walk.links.keep(one.at(1), "channels at the axis of the sequence")
    # The product over the width is divided by its square root: the width stays. Keras knows one width for all three.
    for one in (query, key, value):
        walk.links.keep(one.at(-1), "the scale of dot_product_attention depends on the width")
    heads = query.at(2)
    for one in (key, value):
        if query.shape[2] == one.shape[2]:
            walk.links.tie(heads, one.at(2))
        else:
            walk.links.keep(heads, "query heads that share key and value heads")
            walk.links.keep(one.at(2), "query heads that share key and value heads")
    made = Axes.fixed(call.outputs[0]).with_axis(2, query.shape[2], heads)
    return [replace(made.with_axis(-1, value.shape[-1], value.at(-1)), zero=value.zero)]


# ---- along an axis ---------------------------------------------------------------------------------------------------


def _softmax(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, axis = call.x, call.operation.axis
    axes = range(len(x.shape)) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    return [_without(walk, x, axes, call.outputs[0], "softmax over the channels")]


def _without(walk: Walk, x: Axes, axes: Any, shape: Sequence[int | None], reason: str) -> Axes:
    for axis in axes:
        walk.links.keep(x.at(axis), reason)
    return replace(x.without(axes), shape=tuple(shape), zero=False)


def _reduction(walk: Walk, call: ChannelCall) -> list[Axes]:
    operation, x = call.operation, call.x
    kind, axis = type(operation).__name__, operation.axis
    axes = range(len(x.shape)) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    gone = {one % len(x.shape) for one in axes}
    for one in gone:
        if kind != "Sum" or not x.zero:
            walk.links.keep(x.at(one), f"{kind.lower()} over the channels")
    if getattr(operation, "keepdims", False):
        kept: list[Numbers] = [None if i in gone else n for i, n in enumerate(x.channels)]
    else:
        kept = [n for i, n in enumerate(x.channels) if i not in gone]
    # The logarithm of a sum of exponentials of zeros is not zero, and neither is a given first value.
    zero = kind != "Logsumexp" and not getattr(operation, "initial", None)
    return [Axes(call.outputs[0], tuple(kept), x.zero and zero)]


def _along(walk: Walk, call: ChannelCall) -> list[Axes]:
    """Operations along one axis that keep its length: sort, cumulative sums, flip, roll."""
    operation, x = call.operation, call.x
    axis = operation.axis
    axes = range(len(x.shape)) if axis is None else axis if isinstance(axis, tuple | list) else (axis,)
    kind = type(operation).__name__
    made = _without(walk, x, axes, call.outputs[0], f"{kind.lower()} along the channels")
    return [replace(made, zero=x.zero and kind != "Argsort")]


# ---- shapes ----------------------------------------------------------------------------------------------------------


def _reshape(walk: Walk, call: ChannelCall) -> list[Axes]:
    operation = call.operation
    made = walk.links.reshaped(call.x, call.outputs[0])
    if not isinstance(operation.newshape, tuple | list):
        raise NotFollowedError("its new shape is not known")
    walk.links.resize(operation, newshape=sizes(operation.newshape, made.channels))
    return [made]


def _squeeze_or_expand(walk: Walk, call: ChannelCall) -> list[Axes]:
    return [walk.links.reshaped(call.x, call.outputs[0])]


def _transpose(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, order = call.x, call.operation.axes
    order = tuple(reversed(range(len(x.shape)))) if order is None else order
    return [Axes(call.outputs[0], tuple(x.channels[axis] for axis in order), x.zero)]


def _swapaxes(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, operation = call.x, call.operation
    order = list(range(len(x.shape)))
    one, other = operation.axis1 % len(order), operation.axis2 % len(order)
    order[one], order[other] = order[other], order[one]
    return [Axes(call.outputs[0], tuple(x.channels[axis] for axis in order), x.zero)]


def _moveaxis(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, operation = call.x, call.operation
    order = np.moveaxis(np.empty((2,) * len(x.shape)), operation.source, operation.destination)
    places = np.moveaxis(np.arange(2 ** len(x.shape)).reshape(order.shape), operation.source, operation.destination)
    strides = [step // places.itemsize for step in places.strides]
    axes = [len(x.shape) - 1 - int(np.log2(step)) for step in strides]
    return [Axes(call.outputs[0], tuple(x.channels[axis] for axis in axes), x.zero)]


def _concatenate(walk: Walk, call: ChannelCall) -> list[Axes]:
    tensors = [one if isinstance(one, Axes) else _constant(one) for one in call.args[0]]
    return [concatenated(walk, tensors, call.operation.axis, call.outputs[0])]


def _stack(walk: Walk, call: ChannelCall) -> list[Axes]:
    axis = call.operation.axis % len(call.outputs[0])
    tensors = [one if isinstance(one, Axes) else _constant(one) for one in call.args[0]]
    shape = (*call.outputs[0][:axis], *call.outputs[0][axis + 1 :])
    made = elementwise(walk, tensors, shape, "all")
    channels = (*made.channels[:axis], None, *made.channels[axis:])
    return [Axes(call.outputs[0], channels, made.zero)]


def _split(walk: Walk, call: ChannelCall) -> list[Axes]:
    operation, x = call.operation, call.x
    axis = operation.axis % len(x.shape)
    numbers = x.channels[axis]
    if numbers is None:
        return [replace(x, shape=shape) for shape in call.outputs]
    given = operation.indices_or_sections
    ends = (
        [int(i) for i in np.cumsum([shape[axis] or 0 for shape in call.outputs])]
        if isinstance(given, int)
        else list(given)
    )
    ends = ends[: len(call.outputs) - 1]
    walk.links.resize(operation, indices_or_sections=tuple(Kept(numbers[:end]) for end in ends))
    pairs = zip([0, *ends], [*ends, numbers.size], call.outputs, strict=True)
    return [x.with_axis(axis, shape[axis], numbers[begin:end]) for begin, end, shape in pairs]


def _get_item(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, key = call.x, call.argument("key", 1)
    key = list(key) if isinstance(key, tuple | list) else [key]
    if any(isinstance(one, Axes) for one in key):
        raise NotFollowedError("it is indexed by a tensor")
    taken = sum(one is not None and one is not Ellipsis for one in key)
    if Ellipsis not in key:
        key.append(Ellipsis)
    place = key.index(Ellipsis)
    key[place : place + 1] = [slice(None)] * (len(x.shape) - taken)
    found: list[Numbers] = []
    asked: list[Any] = []
    axis = 0
    for one in key:
        if one is None:
            found.append(None)
            asked.append(None)
            continue
        numbers, axis = x.channels[axis], axis + 1
        if numbers is None:
            found += [] if isinstance(one, int) else [None]
            asked.append(one)
        elif isinstance(one, int):
            walk.links.keep(numbers[one : one + 1 or None], "taken by its index")
            asked.append(Kept(numbers[: one % numbers.size]))
        else:
            begin, end, step = one.indices(numbers.size)
            if step != 1:
                walk.links.keep(numbers, "taken in steps")
            found.append(numbers[one])
            whole = (begin, end) == (0, numbers.size) or step != 1
            asked.append(one if whole else KeptSlice(Kept(numbers[:begin]), Kept(numbers[: max(begin, end)])))
    walk.links.resize(call.operation, key=tuple(asked))
    return [Axes(call.outputs[0], tuple(found), x.zero)]


def _take(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, axis = call.x, call.operation.axis
    indices = call.argument("indices", 1)
    if axis is None:
        raise NotFollowedError("it takes entries of the flattened tensor")
    axis %= len(x.shape)
    walk.links.keep(x.channels[axis], "taken by index")
    rank = len(indices.shape) if isinstance(indices, Axes) else np.ndim(indices)
    channels = (*x.channels[:axis], *([None] * rank), *x.channels[axis + 1 :])
    return [Axes(call.outputs[0], channels, x.zero)]


def _repeat(walk: Walk, call: ChannelCall) -> list[Axes]:
    operation, x = call.operation, call.x
    if operation.axis is None or not isinstance(operation.repeats, int):
        raise NotFollowedError("it repeats entries by different numbers")
    axis = operation.axis % len(x.shape)
    numbers = x.channels[axis]
    if x.shape[axis] == 1:
        # Copies of one entry: each can be removed, and none is zero.
        copies = walk.links.new(operation.repeats)
        walk.links.resize(operation, repeats=Kept(copies))
        return [replace(x.with_axis(axis, operation.repeats, copies), zero=False)]
    made = None if numbers is None else np.repeat(numbers, operation.repeats)
    return [x.with_axis(axis, call.outputs[0][axis], made)]


def _tile(walk: Walk, call: ChannelCall) -> list[Axes]:
    repeats, x = call.operation.repeats, call.x
    repeats = (repeats,) if isinstance(repeats, int) else tuple(repeats)
    repeats = (1,) * (len(x.shape) - len(repeats)) + repeats
    if len(repeats) != len(x.shape):
        raise NotFollowedError("it adds axes")
    pairs = zip(x.channels, repeats, strict=True)
    channels = tuple(None if numbers is None else np.tile(numbers, times) for numbers, times in pairs)
    return [Axes(call.outputs[0], channels, x.zero)]


def _broadcast_to(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, operation = call.x, call.operation
    made = elementwise(walk, [x], call.outputs[0], "all")
    walk.links.resize(operation, shape=sizes(operation.shape, made.channels))
    return [made]


def _pad(walk: Walk, call: ChannelCall) -> list[Axes]:
    x, width = call.x, call.operation.pad_width
    pairs = np.broadcast_to(np.asarray(width), (len(x.shape), 2))
    for axis in x.labelled:
        if pairs[axis].any():
            walk.links.keep(x.channels[axis], "padded")
    channels = tuple(None if pairs[axis].any() else numbers for axis, numbers in enumerate(x.channels))
    constant = call.argument("constant_values", 1, 0)
    return [Axes(call.outputs[0], channels, x.zero and not isinstance(constant, Axes) and not constant)]


def _pool(walk: Walk, call: ChannelCall) -> list[Axes]:
    x = call.x
    axis = channel_axis(call.operation, len(x.shape))
    keep_other_axes(walk, x, axis)
    return [replace(Axes.fixed(call.outputs[0]).with_axis(axis, x.shape[axis], x.channels[axis]), zero=x.zero)]


def _new(walk: Walk, call: ChannelCall) -> list[Axes]:
    """Operations whose result has a shape that is written in the graph."""
    for one in call.inputs:
        if one.labelled:
            raise NotFollowedError(f"the operation {type(call.operation).__name__} reads channels")
    return [Axes.fixed(shape) for shape in call.outputs]


def _first_table() -> dict[str, Rule]:
    names: dict[Rule, str] = {
        _unary: _UNARY,
        _binary: _BINARY,
        _einsum: "Einsum",
        _matmul: "Matmul",
        _attention: "DotProductAttention",
        _softmax: "Softmax LogSoftmax Sparsemax",
        _reduction: "Sum Mean Max Min Amax Amin Prod Var Std Any All Logsumexp",
        _along: "Sort Argsort Cumsum Cumprod Flip Roll",
        _reshape: "Reshape",
        _squeeze_or_expand: "Squeeze ExpandDims",
        _transpose: "Transpose",
        _swapaxes: "Swapaxes",
        _moveaxis: "Moveaxis",
        _concatenate: "Concatenate",
        _stack: "Stack",
        _split: "Split",
        _get_item: "GetItem",
        _take: "Take",
        _repeat: "Repeat",
        _tile: "Tile",
        _broadcast_to: "BroadcastTo",
        _pad: "Pad",
        _pool: "MaxPool AveragePool",
        depth_to_space: "DepthToSpace",
        space_to_depth: "SpaceToDepth",
        _new: "Arange Full FullLike OneHot Eye",
    }
    return {name: rule for rule, listed in names.items() for name in listed.split()}


_TABLE = _first_table()


def operation_rule(operation: Any) -> Rule | None:
    """Returns the rule of an operation of `keras.ops`; None if it is not known."""
    module = inspect.getmodule(type(operation))
    if module is None or not module.__name__.startswith("keras.src.ops"):
        return None
    return _TABLE.get(type(operation).__name__)
