"""Sparsity patterns: how weights are grouped into units that are pruned together, and the importance of each unit.

A unit is a weight, a block or a channel; a pattern removes or keeps a unit as a whole. `pool` computes the importance
of units from the importance of weights, the caller selects units, and `expand` turns the selection into a mask over
weights. A kernel of any rank is treated as matrices (inputs, outputs), one matrix per position along the other axes.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import keras
import numpy as np

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.array_ops import ops_for
from prunekit.sparsity.selection import pruned_count
from prunekit.sparsity.shorthands import PATTERNS, parse_pattern
from prunekit.sparsity.sums import sum_in_order

Axes = Sequence[int]
_INFINITY = float("inf")


class Pattern(ABC):
    """Groups weights into units. Subclasses are frozen dataclasses; `get_pattern` accepts the name `str(pattern)`.

    The methods take the shape of a weight and its input and output axes, as tuples of ints; the remaining axes are
    positions (for example of a convolution window). Several input or output axes are flattened in the given order.
    """

    @abstractmethod
    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises ValueError if the pattern does not fit the weight `name` or cannot reach `final_sparsity`."""

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of units of a weight of this shape; by default each weight is a unit."""
        return math.prod(shape)

    @abstractmethod
    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """The importance of each unit.

        Args:
            importance: Floating-point tensor, the shape of the weight. -inf marks a weight that is already pruned. In
                averages -inf counts as 0, and a unit whose entries are all -inf is -inf. NaN stays NaN.
            in_axes: Input axes of the weight.
            out_axes: Output axes of the weight.

        Returns:
            Floating-point tensor with `units` entries. Averages are float32, or float64 for float64.
        """

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """The mask over a weight of this shape: each entry is its unit's entry in `unit_mask` (`units` entries)."""
        ops = ops_for(unit_mask)
        return ops.reshape(unit_mask, tuple(shape))


@dataclass(frozen=True)
class Unstructured(Pattern):
    """Prunes each weight individually. Source: Han et al. 2015, arXiv:1506.02626."""

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Does nothing: the pattern fits every weight."""

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """`importance`, unchanged."""
        return importance

    def __str__(self) -> str:
        return "unstructured"


@dataclass(frozen=True)
class Block(Pattern):
    """Prunes blocks of `inputs` x `outputs` weights; the grid starts at index 0, and the kernel's edge may cut blocks.

    In a kernel with positions (a convolution's window) each position has its own blocks.

    Args:
        inputs: Length along the input axis, at least 1.
        outputs: Length along the output axis, at least 1.
        pooling: "average" or "max": the reduction from the importances of a block's weights to the importance of the
            block. The average of a cut block is over the weights inside the kernel.

    Source: Narang et al. 2017, arXiv:1711.02782, section 3.1 (max); block_size and block_pooling_type of
        tensorflow-model-optimization (both).
    """

    inputs: int
    outputs: int
    pooling: str = "average"

    def __post_init__(self) -> None:
        for name in ("inputs", "outputs"):
            object.__setattr__(self, name, whole(name, getattr(self, name), 1, largest=None))
        if self.pooling not in ("average", "max"):
            raise ValueError(f'pooling is "average" or "max". Received: pooling={self.pooling!r}.')

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises ValueError if the weight lacks input or output axes, or `final_sparsity` would remove all blocks."""
        _need(in_axes and out_axes, self, "input and output axes", shape, name)
        _check_leaves_some(self, "blocks", self.units(shape, in_axes, out_axes), final_sparsity, shape, name)

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of blocks, including cut blocks."""
        return math.prod(self._grid(MatrixLayout(shape, in_axes, out_axes)))

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Average or maximum of each block, shape (positions, blocks of inputs, blocks of outputs)."""
        ops = ops_for(importance)
        layout = MatrixLayout(importance.shape, in_axes, out_axes)
        matrix = layout.matrix(importance)
        if self.pooling == "max":
            highest = self._reduce(ops.max, self._padded(matrix, layout, -_INFINITY), layout)
            # XLA's maximum drops NaN.
            unknown = self._reduce(ops.any, self._padded(ops.isnan(matrix), layout, False), layout)
            return _where(unknown, math.nan, highest)
        gone = self._reduce(ops.all, self._padded(ops.equal(matrix, -_INFINITY), layout, True), layout)
        total = self._reduce(sum_in_order, self._padded(_live(matrix), layout, 0), layout)
        # Multiplication by the reciprocal: graph optimisation rewrites a division by a constant that way, and a
        # division would therefore round differently in eager mode.
        return _where(gone, -_INFINITY, total * ops.convert_to_tensor(1.0 / self._sizes(layout), dtype=total.dtype))

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """The mask over weights: True for every weight of a kept block."""
        ops = ops_for(unit_mask)
        layout = MatrixLayout(shape, in_axes, out_axes)
        positions, rows, columns = self._grid(layout)
        blocks = ops.reshape(unit_mask, (positions, rows, 1, columns, 1))
        inputs, outputs = self._lengths(layout)
        blocks = ops.broadcast_to(blocks, (positions, rows, inputs, columns, outputs))
        matrix = ops.reshape(blocks, (positions, rows * inputs, columns * outputs))
        return layout.tensor(matrix[:, : layout.inputs, : layout.outputs])

    def _lengths(self, layout: "MatrixLayout") -> tuple[int, int]:
        # Block lengths clipped to the weight: padding to a block larger than the weight would waste memory.
        return min(self.inputs, layout.inputs), min(self.outputs, layout.outputs)

    def _grid(self, layout: "MatrixLayout") -> tuple[int, int, int]:
        inputs, outputs = self._lengths(layout)
        return layout.positions, -(-layout.inputs // inputs), -(-layout.outputs // outputs)

    def _padded(self, matrix, layout: "MatrixLayout", value: float | bool):
        ops = ops_for(matrix)
        _, rows, columns = self._grid(layout)
        inputs, outputs = self._lengths(layout)
        missing = rows * inputs - layout.inputs, columns * outputs - layout.outputs
        return (
            ops.pad(matrix, ((0, 0), (0, missing[0]), (0, missing[1])), constant_values=value)
            if any(missing)
            else matrix
        )

    def _reduce(self, reduction, padded, layout: "MatrixLayout"):
        ops = ops_for(padded)
        positions, rows, columns = self._grid(layout)
        inputs, outputs = self._lengths(layout)
        blocks = ops.reshape(padded, (positions, rows, inputs, columns, outputs))
        # One axis at a time: reducing both axes at once is up to four times slower in TensorFlow on a CPU.
        return reduction(reduction(blocks, axis=2), axis=3)

    def _sizes(self, layout: "MatrixLayout") -> np.ndarray:
        """The number of weights in each block, shape (blocks of inputs, blocks of outputs)."""
        _, rows, columns = self._grid(layout)
        heights = np.minimum(self.inputs, layout.inputs - self.inputs * np.arange(rows))
        widths = np.minimum(self.outputs, layout.outputs - self.outputs * np.arange(columns))
        return np.outer(heights, widths)

    def __str__(self) -> str:
        return f"block:{self.inputs}x{self.outputs}" + (":max" if self.pooling == "max" else "")


@dataclass(frozen=True)
class NM(Pattern):
    """Keeps n of every m consecutive weights along the input axis; the final sparsity is 1 - n / m.

    Units are weights. The n most important weights of every group are never removed; a schedule may remove the other
    m - n gradually.

    Args:
        n: Weights kept in each group, at least 1.
        m: Length of a group, more than n.

    Source: Mishra et al. 2021, arXiv:2104.08378, section 3.1 (2:4).
    """

    n: int
    m: int

    def __post_init__(self) -> None:
        for name in ("n", "m"):
            object.__setattr__(self, name, whole(name, getattr(self, name), largest=None))
        if not 0 < self.n < self.m:
            raise ValueError(
                f"N:M keeps n of every m weights, so it needs 0 < n < m. Received: n={self.n}, m={self.m}."
            )

    @property
    def sparsity(self) -> float:
        """1 - n / m, the only final sparsity of this pattern."""
        return 1.0 - self.n / self.m

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises ValueError unless m divides the input length and `final_sparsity` is 1 - n / m."""
        # `not <=` instead of `>`: NaN must fail the check.
        if not abs(final_sparsity - self.sparsity) <= 1e-6:
            raise ValueError(
                f"{self} keeps {self.n} of every {self.m} weights, so it ends at sparsity {self.sparsity!r}. Received: "
                f"final sparsity {final_sparsity!r} for {name}. Pass a final sparsity of {self.sparsity!r}, or choose "
                "another pattern."
            )
        _need(in_axes, self, "an input axis", shape, name)
        inputs = MatrixLayout(shape, in_axes, out_axes).inputs
        if inputs % self.m:
            raise ValueError(
                f"{self} sparsity needs an input axis whose length is a multiple of {self.m}. Received: {name} of "
                f"shape {tuple(shape)}, input axes {tuple(in_axes)} (length {inputs}). Leave this weight out with "
                "`exclude`, or choose another pattern."
            )

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """The importance, with +inf for the n largest entries of every group; on ties the lower index gets +inf.

        In a group with fewer than n weights left, already pruned weights also get +inf and count as kept, so that no
        other group loses more than m - n weights. The caller must therefore combine the mask from `expand` with the
        previous mask.
        """
        ops = ops_for(importance)
        layout = MatrixLayout(importance.shape, in_axes, out_axes)
        shape = layout.positions, layout.inputs // self.m, self.m, layout.outputs
        groups = ops.reshape(layout.matrix(importance), shape)
        spared = layout.tensor(self._spared_by_rank(groups) if self.m <= 16 else self._spared_by_sort(groups))
        # NaN must stay NaN in the result: callers count NaN.
        spared = ops.logical_and(spared, ops.logical_not(ops.isnan(importance)))
        # An infinite importance that is not spared must stay below +inf, the mark of spared weights.
        # Not `ops.minimum`: Keras on PyTorch converts float64 to float32 there.
        largest = ops.convert_to_tensor(_largest(importance.dtype), importance.dtype)
        finite = _where(ops.equal(importance, _INFINITY), largest, importance)
        return _where(spared, _INFINITY, finite)

    def _spared_by_rank(self, groups):
        """True for the n largest of each group, from m (m - 1) / 2 pairwise comparisons, vectorised over groups.

        2:4 takes six passes over a quarter of the weight, without gather or scatter: a 2048 x 2048 kernel takes 12 ms
        on two CPU cores; sorting each group takes 66 ms and sorting the whole weight 700 ms.
        """
        ops = ops_for(groups)
        members = ops.unstack(groups, axis=2)
        beaten_by = [ops.zeros_like(member, dtype="int8") for member in members]
        for later in range(self.m):
            for earlier in range(later):
                earlier_wins = ops.cast(members[earlier] >= members[later], "int8")
                beaten_by[later] = beaten_by[later] + earlier_wins
                beaten_by[earlier] = beaten_by[earlier] + (1 - earlier_wins)
        return ops.stack([rank < self.n for rank in beaten_by], axis=2)

    def _spared_by_sort(self, groups):
        """True for the n largest of each group, by sorting its m entries; for large m, where m ** 2 pairs are slow."""
        ops = ops_for(groups)
        threshold = ops.sort(groups, axis=2)[:, :, self.m - self.n : self.m - self.n + 1, :]
        above, tied = groups > threshold, ops.equal(groups, threshold)
        wanted = self.n - ops.sum(ops.cast(above, "int32"), axis=2, keepdims=True)
        first = ops.cumsum(ops.cast(tied, "int32"), axis=2) <= wanted
        return ops.logical_or(above, ops.logical_and(tied, first))

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


@dataclass(frozen=True)
class Channel(Pattern):
    """Prunes output units (channels): all weights that lead to one output, ranked by their mean importance.

    Source: Li et al. 2017, arXiv:1608.08710, section 3.1 (sum of |w| per filter; all filters of a layer have the same
        size, so the mean gives the same ranking and is also comparable between layers of different sizes).
    """

    def check(self, shape: Axes, in_axes: Axes, out_axes: Axes, final_sparsity: float, name: str) -> None:
        """Raises ValueError if the weight lacks an output axis, or `final_sparsity` would remove all channels."""
        _need(out_axes, self, "an output axis", shape, name)
        _check_leaves_some(self, "channels", self.units(shape, in_axes, out_axes), final_sparsity, shape, name)

    def units(self, shape: Axes, in_axes: Axes, out_axes: Axes) -> int:
        """The number of output units."""
        return MatrixLayout(shape, in_axes, out_axes).outputs

    def pool(self, importance, in_axes: Axes, out_axes: Axes):
        """Mean importance per output unit, shape (channels,)."""
        ops = ops_for(importance)
        layout = MatrixLayout(importance.shape, in_axes, out_axes)
        matrix = ops.reshape(layout.matrix(importance), (layout.positions * layout.inputs, layout.outputs))
        mean = sum_in_order(_live(matrix), axis=0) * (1.0 / (layout.positions * layout.inputs))
        return _where(ops.all(ops.equal(matrix, -_INFINITY), axis=0), -_INFINITY, mean)

    def expand(self, unit_mask, shape: Axes, in_axes: Axes, out_axes: Axes):
        """The mask over weights: True for every weight of a kept output unit."""
        ops = ops_for(unit_mask)
        layout = MatrixLayout(shape, in_axes, out_axes)
        row = ops.reshape(unit_mask, (1, 1, layout.outputs))
        return layout.tensor(ops.broadcast_to(row, (layout.positions, layout.inputs, layout.outputs)))

    def __str__(self) -> str:
        return "channel"


def get_pattern(pattern: str | Pattern) -> Pattern:
    """Returns the pattern for a name; returns a `Pattern` unchanged.

    Names: "unstructured", "channel", "2:4" and every other n:m, "block:4x1" (inputs x outputs), "block:4x1:max".

    Raises:
        ValueError: `pattern` is an unknown name or contains invalid numbers, such as "4:2".
        TypeError: `pattern` is neither a name nor a `Pattern` instance (a class is not an instance).
    """
    if isinstance(pattern, Pattern):
        return pattern
    if not isinstance(pattern, str):
        raise TypeError(
            f'A pattern is a name such as "2:4", or a Pattern such as pk.patterns.NM(2, 4). Received: {pattern!r} '
            f"of type {type(pattern).__name__}."
        )
    parsed = parse_pattern(pattern)
    if parsed is None:
        raise ValueError(f"Unknown pattern. Received: {pattern[:60]!r}. Valid are: {PATTERNS}.")
    if not parsed.numbers:
        return Unstructured() if parsed.kind == "unstructured" else Channel()
    first, second = parsed.numbers
    return NM(first, second) if parsed.kind == "nm" else Block(first, second, parsed.pooling or "average")


class MatrixLayout:
    """Converts between a weight's shape and matrices (positions, inputs, outputs)."""

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
        """`x`, of the weight's shape, rearranged to shape (positions, inputs, outputs)."""
        ops = ops_for(x)
        x = x if self._in_order else ops.transpose(x, self.permutation)
        return ops.reshape(x, (self.positions, self.inputs, self.outputs))

    def tensor(self, x):
        """`x`, with positions * inputs * outputs entries in that order, rearranged to the weight's shape."""
        ops = ops_for(x)
        x = ops.reshape(x, tuple(self.shape[axis] for axis in self.permutation))
        return x if self._in_order else ops.transpose(x, tuple(int(axis) for axis in np.argsort(self.permutation)))


def _live(importance):
    """The importance in at least float32, with 0 for weights that are already pruned (-inf)."""
    ops = ops_for(importance)
    if keras.backend.standardize_dtype(importance.dtype) in ("float16", "bfloat16"):
        importance = ops.cast(importance, "float32")
    return ops.where(ops.equal(importance, -_INFINITY), ops.zeros_like(importance), importance)


def _largest(kind) -> float:
    """The largest finite number of a floating-point type."""
    kind = keras.backend.standardize_dtype(kind)
    # NumPy does not know bfloat16.
    return (2 - 2**-7) * 2.0**127 if kind == "bfloat16" else float(np.finfo(kind).max)


def _where(mask, value, otherwise):
    """`value` where the mask is True, else `otherwise`; in the type of `otherwise`."""
    ops = ops_for(otherwise)
    return ops.where(mask, ops.cast(value, otherwise.dtype), otherwise)


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
