"""Transposed convolutions as convolutions that compute the pixels of a block as channels.

LiteRT's TRANSPOSE_CONV needs the shape of its results. For an open batch size the file has to compute it, and then the
fast kernels are not used. Where windows are no multiple of the stride, one convolution for all pixels has zeros in its
kernel. Convolutions for pixels that read the same inputs have none, but each adds operations and tensors to the file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.anatomy.layers.linear_kinds import L, kind_of

# Most entries that a kernel may grow by.
_GROWTH = 4096
# Bytes of a convolution in a file besides its kernel, of joining the results of several, and of a padding. Each pixel
# of a convolution has scales of kernel and bias, a bias and zero points for each output, which convolutions of equally
# many pixels share.
_CONVOLUTION, _JOIN, _PADDING, _PER_OUTPUT = 300, 350, 130, 20

# For each pixel of a block, the index in the kernel that reads an input; None for a pixel that does not read it.
Taps = tuple[int | None, ...]


@dataclass(frozen=True)
class Part:
    """A convolution that computes consecutive pixels of a block.

    Attributes:
        margins: Rows of zeros before and behind the inputs, and columns.
        taps: For each row and column of the window, and each pixel: the place in the kernel of the transposed
            convolution; None for a zero.
    """

    margins: tuple[tuple[int, int], tuple[int, int]]
    taps: tuple[tuple[tuple[tuple[int, int] | None, ...], ...], ...]

    @property
    def pixels(self) -> int:
        """Number of pixels."""
        return len(self.taps[0][0])

    @property
    def entries(self) -> int:
        """Entries of the kernel for one input and one output channel."""
        return len(self.taps) * len(self.taps[0]) * self.pixels


@dataclass(frozen=True)
class Blocks:
    """A transposed convolution as convolutions.

    Attributes:
        side: Pixels of a block along each axis.
        parts: The convolutions, in the order of the pixels.
        cut: Rows and columns at the end that belong to the last blocks, and are no outputs.
    """

    side: int
    parts: tuple[Part, ...]
    cut: tuple[int, int]


@dataclass(frozen=True)
class _Axis:
    """One spatial axis.

    Attributes:
        taps: By the distance of an input from a block's own one, the taps of the pixels of the block.
        more: Blocks behind that of the last input.
        cut: Pixels of the last block that are no outputs.
    """

    taps: dict[int, Taps]
    more: int
    cut: int

    def span(self, pixels: Sequence[int]) -> tuple[int, int]:
        """Returns the distances of the first and the last input that some pixels read; 0 where they read none."""
        read = [shift for shift, taps in self.taps.items() if any(taps[one] is not None for one in pixels)] or [0]
        return min(read), max(read)


def subpixels(layer: Any, activations: int | None) -> Blocks | None:
    """Returns the convolutions of a transposed one in this form; None for another layer.

    Args:
        layer: The layer.
        activations: Bits of the tensors between layers. Only with 8 LiteRT has a kernel that moves channels to pixels.
    """
    if activations != 8 or kind_of(layer) is not L.Conv2DTranspose or layer.data_format != "channels_last":
        return None
    side, *others = set(layer.strides)
    if others or max(layer.dilation_rate) > 1 or layer.output_padding is not None:
        return None
    outputs, inputs = tuple(layer.kernel.shape)[-2:]
    rows, columns = (_axis(size, side, is_same=layer.padding == "same") for size in layer.kernel_size)
    pixels = list(itertools.product(range(side), range(side)))
    alike = [list(same) for _, same in itertools.groupby(pixels, lambda at: (rows.span(at[:1]), columns.span(at[1:])))]
    forms = [tuple(_part(group, rows, columns) for group in groups) for groups in ([pixels], alike)]
    found = min(forms, key=lambda form: _bytes(form, inputs, outputs))
    growth = sum(part.entries for part in found) - math.prod(layer.kernel_size)
    return Blocks(side, found, (rows.cut, columns.cut)) if growth * inputs * outputs <= _GROWTH else None


def _axis(size: int, stride: int, *, is_same: bool) -> _Axis:
    # Output pixel o is the sum over input pixels i of x[i] * kernel[o + first - i * stride].
    behind = max(size - stride, 0)
    first, behind = (behind // 2, 0) if is_same else (0, behind)
    low, high = math.ceil((first - size + 1) / stride), (stride - 1 + first) // stride
    taps = {at: [pixel + first - stride * at for pixel in range(stride)] for at in range(low, high + 1)}
    more = math.ceil(behind / stride)
    read = {at: tuple(one if 0 <= one < size else None for one in row) for at, row in taps.items()}
    return _Axis(read, more, more * stride - behind)


def _part(pixels: Sequence[tuple[int, int]], rows: _Axis, columns: _Axis) -> Part:
    spans = [axis.span([one[place] for one in pixels]) for place, axis in enumerate((rows, columns))]

    def tap(row: int, column: int, pixel: tuple[int, int]) -> tuple[int, int] | None:
        h, w = rows.taps[row][pixel[0]], columns.taps[column][pixel[1]]
        return None if h is None or w is None else (h, w)

    (top, bottom), (left, right) = spans
    return Part(
        ((-top, bottom + rows.more), (-left, right + columns.more)),
        tuple(
            tuple(tuple(tap(row, column, one) for one in pixels) for column in range(left, right + 1))
            for row in range(top, bottom + 1)
        ),
    )


def _bytes(form: Sequence[Part], inputs: int, outputs: int) -> int:
    """Returns the bytes of a form in a file, without what all forms have."""
    kernels = sum(part.entries for part in form) * inputs * outputs
    paddings = {part.margins for part in form if not _pads_itself(part)}
    others = _CONVOLUTION * len(form) + _PADDING * len(paddings) + (_JOIN if len(form) > 1 else 0)
    return kernels + others + _PER_OUTPUT * outputs * sum({part.pixels for part in form})


def _pads_itself(part: Part) -> bool:
    """Returns True for margins of equal widths, or with one input more behind, that leave the size of the inputs."""
    windows = len(part.taps), len(part.taps[0])
    pairs = zip(part.margins, windows, strict=True)
    return all((before, after) == ((size - 1) // 2, size // 2) for (before, after), size in pairs)
