"""Rules of the operations that move blocks of pixels to channels and back."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from keras import ops

from prunekit.anatomy.channels.channel_axes import Axes
from prunekit.anatomy.channels.channel_calls import ChannelCall, Walk, channel_axis, keep_other_axes


def depth_to_space(walk: Walk, call: ChannelCall) -> list[Axes]:
    """Returns the axes of the results: all pixels of a block are one channel of these."""
    x, axis = call.x, channel_axis(call.operation, len(call.x.shape))
    keep_other_axes(walk, x, axis)
    numbers = x.channels[axis]
    if numbers is not None:
        pixels = numbers[_moved(call, axis, numbers.size)].reshape(-1, call.outputs[0][axis] or 1)
        walk.links.tie(np.tile(pixels[0], len(pixels)), pixels)
        numbers = pixels[0]
    return [replace(x.with_axis(axis, call.outputs[0][axis], numbers), shape=call.outputs[0])]


def space_to_depth(walk: Walk, call: ChannelCall) -> list[Axes]:
    """Returns the axes of the results: each pixel of a block has the channels of what is read."""
    x, axis = call.x, channel_axis(call.operation, len(call.x.shape))
    keep_other_axes(walk, x, axis)
    numbers = x.channels[axis]
    if numbers is not None:
        numbers = numbers[_moved(call, axis, numbers.size, call.operation.block_size).reshape(-1)]
    return [replace(x.with_axis(axis, call.outputs[0][axis], numbers), shape=call.outputs[0])]


def _moved(call: ChannelCall, axis: int, length: int, side: int = 1) -> np.ndarray:
    """Returns where in the axis of channels each result of one block comes from, shape (rows, columns, channels).

    Backends order the channels of a block differently for `channels_first`, so the operation itself moves the numbers.

    Args:
        call: The call.
        axis: The axis of the channels.
        length: Its length in what is read.
        side: Rows and columns that are read.
    """
    block = np.broadcast_to(np.arange(length, dtype="float32"), (1, side, side, length))
    moved = call.operation.call(ops.convert_to_tensor(np.moveaxis(block, -1, axis)))
    return np.moveaxis(ops.convert_to_numpy(moved), axis, -1)[0].astype(int)
