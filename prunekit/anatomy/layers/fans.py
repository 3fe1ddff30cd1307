"""Fan in and fan out of a target: the kept weights per output unit and per input unit."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prunekit.anatomy.layers.targets import Target

Axes = tuple[int, ...]


@dataclass(frozen=True)
class UnitMatrices:
    """Axes of a target seen as a batch of matrices (inputs x outputs), with a matrix per entry of the parallel axes.

    Attributes:
        shape: The target's shape, with the axis of its output units split in two, (groups, units), where a grouped
            convolution has groups.
        parallel: Axes that number input and output units alike.
        inputs: Axes that number the input units, without the parallel axes.
        outputs: Axes that number the output units, without the parallel axes.
        positions: All other axes; an output unit sums over these axes and over `inputs`.
    """

    shape: tuple[int, ...]
    parallel: Axes
    inputs: Axes
    outputs: Axes
    positions: Axes

    @property
    def summed(self) -> Axes:
        """The axes over which an output unit sums: the rows of its matrix."""
        return tuple(sorted(self.inputs + self.positions))

    @property
    def spread(self) -> Axes:
        """The axes over which an input unit spreads."""
        return tuple(sorted(self.outputs + self.positions))


def unit_matrices(target: Target) -> UnitMatrices:
    """Returns the target's axes by their function, as the table of layers defines them."""
    shape, parallel, inputs, outputs = target.shape, target.parallel_axes, target.in_axes, target.out_axes
    if target.groups > 1:
        split = outputs[-1]
        shape = (*shape[:split], target.groups, shape[split] // target.groups, *shape[split + 1 :])
        parallel, inputs, outputs = (
            tuple(axis + (axis >= split) for axis in axes) for axes in (parallel, inputs, outputs)
        )
        parallel += (split,)
    inputs, outputs = (tuple(axis for axis in axes if axis not in parallel) for axes in (inputs, outputs))
    named = {*parallel, *inputs, *outputs}
    return UnitMatrices(
        shape, parallel, inputs, outputs, tuple(axis for axis in range(len(shape)) if axis not in named)
    )


def fans(target: Target, mask: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns (fan in, fan out) of each weight, int64, of shapes that broadcast against the target's.

    A weight's fan in is the number of weights that its output unit sums over, and its fan out the number of weights
    that its input unit feeds. Positions count in both, as the receptive field of a convolution does; strides do not.

    Args:
        target: The weight.
        mask: Boolean, the target's shape, True = kept: only kept weights are counted. None counts all weights.
    """
    matrices = unit_matrices(target)
    kept = np.broadcast_to(True, matrices.shape) if mask is None else mask.reshape(matrices.shape)
    into = kept.sum(axis=matrices.summed, keepdims=True, dtype=np.int64)
    out = kept.sum(axis=matrices.spread, keepdims=True, dtype=np.int64)
    if matrices.shape == target.shape:
        return into, out
    whole = (np.broadcast_to(count, matrices.shape).reshape(target.shape) for count in (into, out))
    return next(whole), next(whole)
