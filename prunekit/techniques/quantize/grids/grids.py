"""Uniform affine grids: the values that integers of a few bits stand for, value = scale * (code - zero point).

Zero is a value of every grid: the zero point is itself a code, so a weight that is exactly zero, and the padding of a
convolution, stay exactly zero.

Source: Jacob et al. 2018, arXiv:1712.05877, section 2.1; the codes of each kind of tensor as in the 8-bit
    quantization specification of LiteRT.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from keras import ops

from prunekit.sparsity.arguments import whole
from prunekit.sparsity.array_ops import ops_for

# Codes of up to so many bits are stored two in each byte.
FEW_BITS = 4
# LiteRT divides by scales, which underflow to 0 below the smallest normal number.
SMALLEST_SCALE = float(np.finfo(np.float32).tiny)
# Values up to here times the last number of steps count as inside of a range: in float32 the largest weight, divided by
# its scale, may be a little more than the last number of steps.
_END = 1 + 2.0**-20
# Largest distance of a value from the grid that it lies on, in steps: products of float32 numbers are rounded.
_ON_GRID = 1e-3
# Bits of the integers that float32, in which models are trained, holds exactly.
_EXACT_BITS = 24


@dataclass(frozen=True)
class IntegerFormat:
    """The codes of one kind of tensor.

    Args:
        bits: 2 to 8, or 16.
        symmetric: True: codes from -c to c, and the zero point is 0; weights, and every tensor of 16 bits, are stored
            so. False: all 2 ** bits codes, with any of them as the zero point.

    Raises:
        ValueError: The number of bits is another, or 16 bits are not symmetric.
        TypeError: `bits` is no integer.
    """

    bits: int = 8
    symmetric: bool = True

    def __post_init__(self) -> None:
        bits = whole("bits", self.bits)
        if not (2 <= bits <= 8 or bits == 16):
            raise ValueError(f"bits must be 2 to 8, or 16. Received: bits={bits}.")
        if bits == 16 and not self.symmetric:
            raise ValueError("Tensors of 16 bits have the zero point 0. Received: bits=16 and symmetric=False.")
        object.__setattr__(self, "bits", bits)

    @property
    def lowest(self) -> int:
        """The lowest code."""
        return -(2 ** (self.bits - 1)) + int(self.symmetric)

    @property
    def highest(self) -> int:
        """The highest code."""
        return 2 ** (self.bits - 1) - 1

    @property
    def dtype(self) -> str:
        """Type of the integers that hold the codes."""
        return "int16" if self.bits == 16 else "int8"


@dataclass(frozen=True)
class Granularity:
    """Which entries of a tensor share a scale and a zero point.

    Args:
        axes: Axes along which every index has its own, counted from 0; () = all entries share one.
        group_size: Of the entries that `axes` leave together, taken in the order of the array, this many consecutive
            ones have their own; the last group may be shorter. None = no groups.
        run: So many consecutive indices of the only axis share theirs, as the outputs of one gate; without groups.

    Raises:
        ValueError: An axis is negative or listed twice, the groups have no entry, or there are runs of several axes or
            in groups.
    """

    axes: tuple[int, ...] = ()
    group_size: int | None = None
    run: int = 1

    def __post_init__(self) -> None:
        axes = tuple(whole("axes", axis, 0) for axis in self.axes)
        object.__setattr__(self, "axes", axes)
        if self.group_size is not None:
            whole("group_size", self.group_size, 1)
        if len(set(axes)) < len(axes):
            raise ValueError(f"Each axis can be named once. Received: axes={axes}.")
        if whole("run", self.run, 1) > 1 and (len(axes) != 1 or self.group_size is not None):
            raise ValueError(f"Runs are those of one axis, without groups. Received: {self}.")

    def in_groups(self, size: int | None, shape: tuple[int, ...]) -> Granularity:
        """Returns this granularity with groups, for a tensor of this shape; itself where a group would be all entries.

        Args:
            size: Length of a group; None = no groups.
            shape: Shape of the tensor.
        """
        together = math.prod(shape[axis] for axis in self._shared(shape))
        return self if size is None or together <= size else replace(self, group_size=size)

    def parameter_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the shape of the scales of a tensor of this shape: 1 along axes whose entries share a scale.

        Groups are counted along the last of these axes.

        Raises:
            ValueError: The tensor has no such axis.
        """
        missing = [axis for axis in self.axes if axis >= len(shape)]
        if missing:
            raise ValueError(f"The tensor needs an axis {missing[0]}. Received: shape={tuple(shape)}.")
        shared = self._shared(shape)
        found = [-(-length // self.run) if axis in self.axes else 1 for axis, length in enumerate(shape)]
        if self.group_size is not None and shared:
            found[shared[-1]] = -(-math.prod(shape[axis] for axis in shared) // self.group_size)
        return tuple(found)

    def spread(self, parameters: Any, shape: tuple[int, ...]) -> Any:
        """Returns scales or zero points of `parameter_shape` so that they broadcast against a tensor of this shape."""
        shared = self._shared(shape)
        operations = ops_for(parameters)
        if self.run > 1:
            (axis,) = self.axes
            return operations.take(parameters, np.arange(shape[axis]) // self.run, axis=axis)
        if self.group_size is None or not shared:
            return parameters
        lengths = tuple(shape[axis] for axis in shared)
        taken = operations.take(parameters, np.arange(math.prod(lengths)) // self.group_size, axis=shared[-1])
        if len(shared) == 1:
            return taken
        own = self._own()
        order = (*own, *shared)
        entries = operations.reshape(operations.transpose(taken, order), (*(shape[axis] for axis in own), *lengths))
        return operations.transpose(entries, tuple(int(axis) for axis in np.argsort(order)))

    def rows(self, values: Any) -> Any:
        """Returns an array or tensor as one row for each scale, in the order of the flattened scales.

        The row of a shorter group is completed with zeros.
        """
        operations, shape = ops_for(values), tuple(values.shape)
        own, shared = self._own(), self._shared(shape)
        lengths, entries = tuple(shape[axis] for axis in own), math.prod(shape[axis] for axis in shared)
        if self.group_size is None or not shared:
            rows, entries = math.prod(lengths) // self.run, entries * self.run
            return operations.reshape(operations.transpose(values, (*own, *shared)), (rows, entries))
        groups = -(-entries // self.group_size)
        values = operations.reshape(operations.transpose(values, (*shared, *own)), (entries, *lengths))
        lacking = groups * self.group_size - entries
        if lacking:
            values = operations.pad(values, ((0, lacking), *((0, 0) for _ in own)))
        values = operations.reshape(values, (groups, self.group_size, *lengths))
        # Groups are counted along the last axis that they divide.
        before = sum(axis < shared[-1] for axis in own)
        others = tuple(range(2, 2 + len(own)))
        values = operations.transpose(values, (*others[:before], 0, *others[before:], 1))
        return operations.reshape(values, (math.prod(lengths) * groups, self.group_size))

    def _own(self) -> tuple[int, ...]:
        return tuple(sorted(self.axes))

    def _shared(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the axes whose entries share a scale, or a few."""
        return tuple(axis for axis in range(len(shape)) if axis not in self.axes)


PER_TENSOR = Granularity()


@dataclass(frozen=True, eq=False)
class Grid:
    """The values that a tensor can take.

    Attributes:
        format: The codes.
        granularity: Which entries share a scale.
        scale: Distance of neighbouring values, float32, of the shape `Granularity.parameter_shape`.
        zero_point: Code of the value 0, int32, likewise.
    """

    format: IntegerFormat
    granularity: Granularity
    scale: np.ndarray
    zero_point: np.ndarray

    def codes(self, values: Any) -> Any:
        """Returns the nearest codes, int32; of two that are equally near, that of the even number of steps from 0.

        Args:
            values: NumPy array or tensor of the backend.
        """
        operations = ops_for(values)
        scale, zero_point = self.spread(values)
        steps = operations.round(steps_within(values, scale, zero_point, self.format))
        return operations.cast(steps, "int32") + operations.convert_to_tensor(zero_point, dtype="int32")

    def values(self, codes: Any) -> Any:
        """Returns the values of codes, float32."""
        operations = ops_for(codes)
        scale, zero_point = self.spread(codes)
        steps = operations.cast(codes, "int32") - operations.convert_to_tensor(zero_point, dtype="int32")
        return operations.cast(steps, "float32") * operations.convert_to_tensor(scale, dtype="float32")

    def nearest(self, values: Any) -> Any:
        """Returns the nearest values of the grid, float32; zeros stay zero."""
        return self.values(self.codes(values))

    def holds(self, values: np.ndarray, relative: float = 0.0) -> bool:
        """Returns True if all values lie on the grid, up to a thousandth of a step and a relative error.

        Args:
            values: The array.
            relative: The relative error, for values that were rounded to half precision.
        """
        scale, _ = self.spread(values)
        values = np.asarray(values, "float32")
        return bool((np.abs(self.nearest(values) - values) <= _ON_GRID * scale + relative * np.abs(values)).all())

    def spread(self, values: Any) -> tuple[np.ndarray, np.ndarray]:
        """Returns scales and zero points so that they broadcast against an array or tensor."""
        shape = tuple(values.shape)
        return self.granularity.spread(self.scale, shape), self.granularity.spread(self.zero_point, shape)


def steps_within(values: Any, scale: Any, zero_point: Any, form: IntegerFormat) -> Any:
    """Returns values / scale, limited to the steps from zero that the format has.

    Args:
        values: NumPy array or tensor; half-precision values are divided in float32.
        scale: Scales, which broadcast against the values.
        zero_point: Zero points, likewise.
        form: The codes.
    """
    operations = ops_for(values)
    dtype = "float64" if "float64" in str(values.dtype) else "float32"
    zero_point = operations.cast(operations.convert_to_tensor(zero_point), dtype)
    steps = operations.cast(values, dtype) / operations.cast(operations.convert_to_tensor(scale), dtype)
    first, last = form.lowest - zero_point, form.highest - zero_point
    steps = operations.where(operations.greater(first * _END, steps), first, steps)
    return operations.where(operations.greater(steps, last * _END), last, steps)


def nearest_within(steps: Any, zero_point: Any, form: IntegerFormat) -> Any:
    """Returns numbers of steps from zero as the nearest whole numbers that the format has.

    Args:
        steps: Tensor.
        zero_point: Tensor of the same dtype, which broadcasts against the steps.
        form: The codes.
    """
    first, last = form.lowest - zero_point, form.highest - zero_point
    return ops.maximum(ops.minimum(ops.round(steps), last), first)


def are_within(steps: Any, zero_point: Any, form: IntegerFormat) -> Any:
    """Returns True for numbers of steps, not rounded, that `steps_within` does not limit; see `nearest_within`."""
    first, last = form.lowest - zero_point, form.highest - zero_point
    return ops.logical_and(ops.less_equal(first * _END, steps), ops.less_equal(steps, last * _END))


def grid_between(low: Any, high: Any, form: IntegerFormat, granularity: Granularity = PER_TENSOR) -> Grid:
    """Returns the grid over a range of values, which is widened to contain zero.

    A symmetric grid reaches as far below zero as above. Other grids are moved by at most half a step, so that zero is
    one of their values. Where the range is zero alone, the scale is 1.

    Args:
        low: Lowest values, of the shape `Granularity.parameter_shape`.
        high: Highest values, likewise.
        form: The codes.
        granularity: Which entries share a scale.

    Raises:
        ValueError: An end of a range is not finite, or does not fit in float32.
    """
    low, high = np.minimum(np.asarray(low, "float64"), 0.0), np.maximum(np.asarray(high, "float64"), 0.0)
    ends = np.stack([low, high])
    if not (np.abs(ends) <= np.finfo(np.float32).max).all():
        raise ValueError(
            f"A range needs finite ends. Received: {_first_wrong(ends)}. Look for NaN or infinity in the weights, and "
            "in the outputs of the layers on the calibration data."
        )
    width = np.maximum(-low, high) / form.highest if form.symmetric else (high - low) / (form.highest - form.lowest)
    scale = usable_scale(width).astype("float32")
    zero_point = np.zeros(scale.shape, "int32")
    if not form.symmetric:
        # Halves go away from zero, as in LiteRT's converter: a range from -a to a has the zero point -0.5.
        exact = form.lowest - low / scale
        nearest = np.copysign(np.floor(np.abs(exact) + 0.5), exact)
        zero_point = np.clip(nearest, form.lowest, form.highest).astype("int32")
    return Grid(form, granularity, scale, zero_point)


def usable_scale(width: Any) -> Any:
    """Returns the distance of neighbouring values as a scale: 1 for 0, and no number that underflows.

    Args:
        width: NumPy array or tensor.
    """
    operations = ops_for(width)
    smallest = operations.where(operations.greater(SMALLEST_SCALE, width), SMALLEST_SCALE, width)
    return operations.where(operations.equal(width, 0), operations.cast(1, width.dtype), smallest)


def _first_wrong(ends: np.ndarray) -> str:
    low, high = ends.reshape(2, -1)
    wrong = int(np.argmax(~(np.abs(ends) <= np.finfo(np.float32).max).all(axis=0)))
    return f"[{low[wrong]:g}, {high[wrong]:g}]"


def grid_for_bias(grid: Grid, *, used: np.ndarray, bias: np.ndarray, input_scale: float, bits: int) -> Grid:
    """Returns the grid of a weight with scales at which the bias of its layer can be stored.

    A bias is stored as the integer round(bias / (input_scale * scale)). Where all weights of a channel are small, as
    after pruning, this number may be too large for the accumulator: the scale is enlarged. Where all are zero, any
    scale stores them, and the bias is stored best at the scale for which its code has 24 bits.

    Args:
        grid: Grid of the weight, symmetric.
        used: False where all weights that share a scale are zero; broadcasts against `grid.scale`, as `bias` does.
        bias: Biases.
        input_scale: Scale of the layer's input.
        bits: Bits of the largest integer that stores a bias.

    Raises:
        ValueError: A bias is not finite, or so large that no scale in float32 stores it.
    """
    size = np.abs(np.asarray(bias, "float64"))
    smallest = size / input_scale / 2.0**bits
    best = np.where(size == 0.0, 1.0, size / input_scale / 2.0**_EXACT_BITS)
    scale = np.where(used, np.maximum(grid.scale, smallest), np.maximum(best, SMALLEST_SCALE))
    if not (scale <= np.finfo(np.float32).max).all():
        raise ValueError(
            f"A bias must be finite and fit in {bits} bits. Received: biases up to {size.max():g}, for inputs "
            f"in steps of {input_scale:g}."
        )
    return replace(grid, scale=np.broadcast_to(scale, grid.scale.shape).astype("float32"))
