"""The shape of the zeros: which weights go together, and what importance each such unit has.

A unit is what a pattern removes or keeps as a whole: a weight, a block, a channel. `pool` turns the importance of
weights into that of units, the caller selects units, and `expand` turns the selection back into a mask over weights. A
kernel of any rank is seen as matrices (inputs, outputs), one per remaining position, through its input and output axes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Integral
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.shorthands import PATTERNS, parse_pattern
from prunekit.sparsity.sums import sum_in_order

Axes = Sequence[int]
_INFINITY = float("inf")


class Pattern(ABC):
    """What is pruned together. Subclasses are frozen dataclasses; `str(pattern)` is the name `get_pattern` reads.

    The methods take the shape of a weight and its input and output axes, tuples of ints; the remaining axes are
    positions (of a convolution window, say). Several input or output axes are flattened in the order given.
    """

    @abstractmethod
    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises ValueError, naming the weight, where the pattern does not fit it or cannot end at `final_sparsity`."""

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """How many units a weight of this shape has; where units are weights, their number."""
        return math.prod(shape)

    @abstractmethod
    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """The importance of each unit.

        Args:
            importance: Floating-point tensor, the shape of the weight. -inf marks a weight that is pruned already: it
                counts as 0 where importances are averaged, and a unit of nothing else is -inf itself. NaN stays NaN.
            in_axes: Input axes of the weight.
            out_axes: Output axes of the weight.

        Returns:
            Floating-point tensor with `units` entries. Averages are float32, or float64 for float64.
        """

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """The mask over a weight of this shape, True where its unit is; `unit_mask` has `units` entries, any shape."""
        return ops.reshape(unit_mask, tuple(shape))


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Each weight on its own. Source: Han et al. 2015, arXiv:1506.02626."""

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Fits every weight."""

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """The importance itself."""
        return importance

    def __str__(self) -> str:
        return "unstructured"


@dataclass(frozen=True)
class Block(Pattern):
    """Blocks of `inputs` x `outputs` weights, from the first weight on; the last ones may be cut off by the edge.

    On a kernel with positions (a convolution's window) each position has its own blocks.

    Args:
        inputs: Length along the input axis, at least 1.
        outputs: Length along the output axis, at least 1.
        pooling: A block's importance is the "average" or the "max" of its weights'; a cut block averages over the
            weights it has.

    Source: Narang et al. 2017, arXiv:1711.02782, section 3.1 (max); block_size and block_pooling_type of
        tensorflow-model-optimization (both).
    """

    inputs: int
    outputs: int
    pooling: str = "average"

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
            if getattr(self, name) < 1:
                raise ValueError(f"A block has at least one weight. Received: {name}={getattr(self, name)}.")
        if self.pooling not in ("average", "max"):
            raise ValueError(f'pooling is "average" or "max". Received: pooling={self.pooling!r}.')

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Needs input and output axes, and enough blocks for one to be left."""
        _need(in_axes and out_axes, self, "input and output axes", shape, name)
        _check_leaves_some(self, "blocks", self.units(shape, in_axes, out_axes), final_sparsity, shape, name)

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of blocks, cut ones included."""
        return math.prod(self._grid(Layout(shape, in_axes, out_axes)))

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Average or maximum of each block, shape (positions, blocks of inputs, blocks of outputs)."""
        layout = Layout(importance.shape, in_axes, out_axes)
        matrix = layout.matrix(importance)
        if self.pooling == "max":
            highest = self._reduce(ops.max, self._padded(matrix, layout, -_INFINITY), layout)
            # XLA's maximum forgets a NaN.
            unknown = self._reduce(ops.any, self._padded(ops.isnan(matrix), layout, False), layout)
            return _where(unknown, math.nan, highest)
        gone = self._reduce(ops.all, self._padded(ops.equal(matrix, -_INFINITY), layout, True), layout)
        total = self._reduce(sum_in_order, self._padded(_live(matrix), layout, 0), layout)
        # Multiplied, because graph optimisation turns the division by a constant into that, and then rounds otherwise.
        return _where(gone, -_INFINITY, total * ops.convert_to_tensor(1.0 / self._sizes(layout), dtype=total.dtype))

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """Every weight of a kept block."""
        layout = Layout(shape, in_axes, out_axes)
        positions, rows, columns = self._grid(layout)
        blocks = ops.reshape(unit_mask, (positions, rows, 1, columns, 1))
        inputs, outputs = self._lengths(layout)
        blocks = ops.broadcast_to(blocks, (positions, rows, inputs, columns, outputs))
        matrix = ops.reshape(blocks, (positions, rows * inputs, columns * outputs))
        return layout.tensor(matrix[:, : layout.inputs, : layout.outputs])

    def _lengths(self, layout: "Layout") -> tuple[int, int]:
        # What a block is padded to; a block larger than the weight would be padded far beyond it.
        return min(self.inputs, layout.inputs), min(self.outputs, layout.outputs)

    def _grid(self, layout: "Layout") -> tuple[int, int, int]:
        inputs, outputs = self._lengths(layout)
        return layout.positions, -(-layout.inputs // inputs), -(-layout.outputs // outputs)

    def _padded(self, matrix, layout: "Layout", value: float | bool):
        _, rows, columns = self._grid(layout)
        inputs, outputs = self._lengths(layout)
        missing = rows * inputs - layout.inputs, columns * outputs - layout.outputs
        return (
            ops.pad(matrix, ((0, 0), (0, missing[0]), (0, missing[1])), constant_values=value)
            if any(missing)
            else matrix
        )

    def _reduce(self, reduction, padded, layout: "Layout"):
        positions, rows, columns = self._grid(layout)
        inputs, outputs = self._lengths(layout)
        blocks = ops.reshape(padded, (positions, rows, inputs, columns, outputs))
        # One axis after the other: both at once is up to four times slower in TensorFlow on a CPU.
        return reduction(reduction(blocks, axis=2), axis=3)

    def _sizes(self, layout: "Layout") -> np.ndarray:
        """Weights in each block, shape (blocks of inputs, blocks of outputs)."""
        _, rows, columns = self._grid(layout)
        heights = np.minimum(self.inputs, layout.inputs - self.inputs * np.arange(rows))
        widths = np.minimum(self.outputs, layout.outputs - self.outputs * np.arange(columns))
        return np.outer(heights, widths)

    def __str__(self) -> str:
        return f"block:{self.inputs}x{self.outputs}" + (":max" if self.pooling == "max" else "")


@dataclass(frozen=True)
class NM(Pattern):
    """Keeps n of every m consecutive weights along the input axis, so that it ends at sparsity 1 - n / m.

    Units are weights. The n most important of every group are never removed, and the others as any schedule asks, so a
    gradual schedule ends in the pattern.

    Args:
        n: Weights kept in each group, at least 1.
        m: Length of a group, more than n.

    Source: Mishra et al. 2021, arXiv:2104.08378, section 3.1 (2:4).
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        for name in ("n", "m"):
            object.__setattr__(self, name, _whole(name, getattr(self, name)))
        if not 0 < self.n < self.m:
            raise ValueError(
                f"N:M keeps n of every m weights, so it needs 0 < n < m. Received: n={self.n}, m={self.m}."
            )

    @property
    def sparsity(self) -> float:
        """1 - n / m, the one sparsity this pattern can end at."""
        return 1.0 - self.n / self.m

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Needs an input length that m divides, and a final sparsity of 1 - n / m."""
        _need(in_axes, self, "an input axis", shape, name)
        inputs = Layout(shape, in_axes, out_axes).inputs
        if inputs % self.m:
            raise ValueError(
                f"{self} sparsity needs an input axis whose length is a multiple of {self.m}. Received: {name} of "
                f"shape {tuple(shape)}, input axes {tuple(in_axes)} (length {inputs}). Leave this weight out with "
                "`exclude`, or choose another pattern."
            )
        # Written so that NaN is refused as well.
        if not abs(final_sparsity - self.sparsity) <= 1e-6:
            raise ValueError(
                f"{self} keeps {self.n} of every {self.m} weights, so it ends at sparsity {self.sparsity!r}. Received: "
                f"final sparsity {final_sparsity!r} for {name}. Pass a final sparsity of {self.sparsity!r}, or choose "
                "another pattern."
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """The importance, with +inf for the n largest of every group; among equals the lower index is kept.

        In a group with fewer than n weights left, pruned ones are among those n and become +inf too: they count as the
        kept ones, and another group need not give more than m - n in their place. So the mask that `expand` gives is to
        be combined with the one before it.
        """
        layout = Layout(importance.shape, in_axes, out_axes)
        shape = layout.positions, layout.inputs // self.m, self.m, layout.outputs
        groups = ops.reshape(layout.matrix(importance), shape)
        spared = layout.tensor(self._spared_by_rank(groups) if self.m <= 16 else self._spared_by_sort(groups))
        # NaN must stay visible to whoever counts it.
        spared = ops.logical_and(spared, ops.logical_not(ops.isnan(importance)))
        # An infinite weight that is not spared must not pass for one that is.
        # Not by `ops.minimum`: of float64 numbers Keras on PyTorch makes float32.
        largest = ops.convert_to_tensor(_largest(importance.dtype), importance.dtype)
        finite = _where(ops.equal(importance, _INFINITY), largest, importance)
        return _where(spared, _INFINITY, finite)

    def _spared_by_rank(self, groups):
        """Rank inside each group from its m (m - 1) / 2 comparisons, each over all groups at once.

        For 2:4 these are six passes over a quarter of the weight, with nothing to gather or scatter: a 2048 x 2048
        kernel takes 12 ms on two CPU cores, where sorting each group takes 66 ms and the whole weight 700 ms.
        """
        members = ops.unstack(groups, axis=2)
        beaten_by = [ops.zeros_like(member, dtype="int8") for member in members]
        for later in range(self.m):
            for earlier in range(later):
                earlier_wins = ops.cast(members[earlier] >= members[later], "int8")
                beaten_by[later] = beaten_by[later] + earlier_wins
                beaten_by[earlier] = beaten_by[earlier] + (1 - earlier_wins)
        return ops.stack([rank < self.n for rank in beaten_by], axis=2)

    def _spared_by_sort(self, groups):
        """The n-th largest of each group from a sort along its m entries: comparisons grow with the square of m."""
        threshold = ops.sort(groups, axis=2)[:, :, self.m - self.n : self.m - self.n + 1, :]
        above, tied = groups > threshold, ops.equal(groups, threshold)
        wanted = self.n - ops.sum(ops.cast(above, "int32"), axis=2, keepdims=True)
        first = ops.cumsum(ops.cast(tied, "int32"), axis=2) <= wanted
        return ops.logical_or(above, ops.logical_and(tied, first))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@dataclass(frozen=True)
class Channel(Pattern):
    """Output units of a layer: all weights that lead to one output, ranked by their mean importance.

    Source: Li et al. 2017, arXiv:1608.08710, section 3.1 (sum of |w| per filter; the filters of a layer have one size,
        so the mean ranks them alike, and it also compares layers of different sizes).
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Needs an output axis, and enough channels for one to be left."""
        _need(out_axes, self, "an output axis", shape, name)
        _check_leaves_some(self, "channels", self.units(shape, in_axes, out_axes), final_sparsity, shape, name)

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of output units."""
        return Layout(shape, in_axes, out_axes).outputs

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Mean importance per output unit, shape (channels,)."""
        layout = Layout(importance.shape, in_axes, out_axes)
        matrix = ops.reshape(layout.matrix(importance), (layout.positions * layout.inputs, layout.outputs))
        mean = sum_in_order(_live(matrix), axis=0) * (1.0 / (layout.positions * layout.inputs))
        return _where(ops.all(ops.equal(matrix, -_INFINITY), axis=0), -_INFINITY, mean)

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """Every weight of a kept output unit."""
        layout = Layout(shape, in_axes, out_axes)
        row = ops.reshape(unit_mask, (1, 1, layout.outputs))
        return layout.tensor(ops.broadcast_to(row, (layout.positions, layout.inputs, layout.outputs)))

    def __str__(self) -> str:
        return "channel"


def get_pattern(pattern: str | Pattern) -> Pattern:
    """The pattern that a name stands for; a `Pattern` is returned as it is.

    Names: "unstructured", "channel", "2:4" and every other n:m, "block:4x1" (inputs x outputs), "block:4x1:max".

    Raises:
        ValueError: An unknown name, or numbers that make no pattern.
        TypeError: Neither a name nor a pattern; a class instead of an instance.
    """
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise TypeError(
            f'A pattern is a name such as "2:4", or a Pattern such as NM(2, 4). Received: {pattern!r} of type '
            f"{type(pattern).__name__}."
        )
    parsed = parse_pattern(pattern)
    if parsed is None:
        raise ValueError(f"Unknown pattern. Received: {pattern[:60]!r}. Valid are: {PATTERNS}.")
    if not parsed.numbers:
        return Unstructured() if parsed.kind == "unstructured" else Channel()
    first, second = parsed.numbers
    return NM(first, second) if parsed.kind == "nm" else Block(first, second, parsed.pooling or "average")


class Layout:
    """A weight as matrices (positions, inputs, outputs), and back."""

    def __init__(self, shape: Axes, in_axes: Axes, out_axes: Axes):
        self.shape = tuple(int(length) for length in shape)
        ins, outs = (tuple(axis % len(self.shape) for axis in axes) for axes in (in_axes, out_axes))
        rest = tuple(axis for axis in range(len(self.shape)) if axis not in ins + outs)
        self.permutation = rest + ins + outs
        if len(self.permutation) != len(self.shape):
            raise ValueError(
                "Input and output axes are different axes of the weight. Received: "
                f"in_axes={tuple(in_axes)}, out_axes={tuple(out_axes)} for shape {self.shape}."
            )
        self.positions, self.inputs, self.outputs = (
            math.prod(self.shape[axis] for axis in axes) for axes in (rest, ins, outs)
        )

    @cached_property
    def _in_order(self) -> bool:
        return self.permutation == tuple(range(len(self.shape)))

    def matrix(self, x):
        """x of the weight's shape, as (positions, inputs, outputs)."""
        x = x if self._in_order else ops.transpose(x, self.permutation)
        return ops.reshape(x, (self.positions, self.inputs, self.outputs))

    def tensor(self, x):
        """x of positions * inputs * outputs entries in that order, in the weight's shape."""
        x = ops.reshape(x, tuple(self.shape[axis] for axis in self.permutation))
        return x if self._in_order else ops.transpose(x, tuple(int(axis) for axis in np.argsort(self.permutation)))


def _live(importance):
    """In at least float32, with 0 for what is pruned already."""
    if keras.backend.standardize_dtype(importance.dtype) in ("float16", "bfloat16"):
        importance = ops.cast(importance, "float32")
    return ops.where(ops.equal(importance, -_INFINITY), ops.zeros_like(importance), importance)


def _largest(kind) -> float:
    """The largest finite number of a type."""
    kind = keras.backend.standardize_dtype(kind)
    # NumPy does not know bfloat16.
    return (2 - 2**-7) * 2.0**127 if kind == "bfloat16" else float(np.finfo(kind).max)


def _where(mask, value, otherwise):
    """`value` where the mask is True, in the type of `otherwise`."""
    return ops.where(mask, ops.cast(value, otherwise.dtype), otherwise)


def _whole(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an int. Received: {name}={value!r} of type {type(value).__name__}.")
    return int(value)


def _need(present: Any, pattern: Pattern, what: str, shape: Axes, name: str) -> None:
    if not present:
        raise ValueError(
            f"The pattern {pattern} needs {what}. Received: {name} of shape {tuple(shape)}, which has none. Leave this "
            "weight out with `exclude`, or choose another pattern."
        )


def _check_leaves_some(pattern: Pattern, what: str, units: int, sparsity: float, shape: Axes, name: str) -> None:
    if pruned_count(sparsity, units) >= units:
        raise ValueError(
            f"The pattern {pattern} would remove every weight of {name}: its shape {tuple(shape)} has {units} {what}, "
            f"and {sparsity:g} of them is {units}. Leave this weight out with `exclude`, or ask for less sparsity."
        )
