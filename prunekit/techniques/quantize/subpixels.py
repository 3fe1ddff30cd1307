"""Transposed convolutions as convolutions that compute the pixels of a block as channels.

LiteRT's TRANSPOSE_CONV needs the shape of its results. For an open batch size the file has to compute it, and then the
fast kernels are not used.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.linear_kinds import L, kind_of

# Most entries that a kernel may grow by: windows that are no multiple of the stride have zeros in the larger one.
_GROWTH = 4096


@dataclass(frozen=True)
class Subpixels:
    """One spatial axis of such a convolution.

    Attributes:
        before: Pixels of the inputs before its own one that an output pixel reads.
        after: Pixels behind it.
        taps: For each position of the window and each pixel of a block: the index in the kernel of the transposed
            convolution; None for a zero.
    """

    before: int
    after: int
    taps: tuple[tuple[int | None, ...], ...]


def subpixels(layer: Any, activations: int | None) -> tuple[Subpixels, ...] | None:
    """Returns the axes of a transposed convolution that files compute in this form; None for another layer.

    Args:
        layer: The layer.
        activations: Bits of the tensors between layers. Only with 8 LiteRT has a kernel that moves channels to pixels.
    """
    if activations != 8 or kind_of(layer) is not L.Conv2DTranspose or layer.data_format != "channels_last":
        return None
    stride, *others = set(layer.strides)
    if others or stride == 1 or max(layer.dilation_rate) > 1 or layer.output_padding is not None:
        return None
    if layer.padding != "same" and max(layer.kernel_size) > stride:
        return None
    found = tuple(_axis(size, stride) for size in layer.kernel_size)
    entries = math.prod(len(one.taps) * stride for one in found) - math.prod(layer.kernel_size)
    channels = math.prod(tuple(layer.kernel.shape)[-2:])
    return found if entries * channels <= _GROWTH else None


def _axis(size: int, stride: int) -> Subpixels:
    # Output pixel o is the sum over input pixels i of x[i] * kernel[o + first - i * stride].
    first = max(size - stride, 0) // 2
    low, high = math.ceil((first - size + 1) / stride), (stride - 1 + first) // stride
    taps = [[pixel + first - stride * shift for pixel in range(stride)] for shift in range(low, high + 1)]
    return Subpixels(-low, high, tuple(tuple(one if 0 <= one < size else None for one in row) for row in taps))
