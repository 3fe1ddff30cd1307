"""Rounding inside a forward pass, with gradients that training can use."""

from __future__ import annotations

from typing import Any

from keras import ops

from prunekit.techniques.quantize.grids import Grid, IntegerFormat, steps_within


def fake_quantized(values: Any, scale: Any, zero_point: Any, form: IntegerFormat) -> Any:
    """Returns the nearest values of a grid, in the dtype of `values`.

    The rounding counts as the identity in gradients (straight-through estimator). So the gradient of a value is 1
    inside the range and 0 outside; that of the scale is the rounding error inside, in steps, and the first or last
    number of steps outside. This makes scales trainable (LSQ).

    Args:
        values: Tensor of the backend, of a floating dtype.
        scale: Array, tensor or variable that broadcasts against `values`, above 0.
        zero_point: Array or tensor of whole numbers, likewise.
        form: The codes.

    Source: Bengio et al. 2013, arXiv:1308.3432; Esser et al. 2020, arXiv:1902.08153, eq. 3 (LSQ).
    """
    values = ops.convert_to_tensor(values)
    steps = steps_within(values, scale, ops.stop_gradient(ops.convert_to_tensor(zero_point)), form)
    # Exact: the difference of a float32 number and the nearest integer is a float32 number, and so is the sum.
    steps = steps + ops.stop_gradient(ops.round(steps) - steps)
    return ops.cast(steps * ops.cast(ops.convert_to_tensor(scale), steps.dtype), values.dtype)


def on_grid(values: Any, grid: Grid, scale: Any = None) -> Any:
    """Returns the nearest values of a grid, as `fake_quantized`.

    Args:
        values: Tensor of the backend, of a floating dtype.
        grid: The grid.
        scale: Tensor of the shape of the grid's scales, in their place; None = these.
    """
    # Tensors, not arrays: the scales of groups, spread over a weight, would be constants of its size in a graph.
    own = (grid.scale if scale is None else scale, grid.zero_point)
    spread = [grid.granularity.spread(ops.convert_to_tensor(one), tuple(values.shape)) for one in own]
    scales, zero_points = spread
    return fake_quantized(values, scales, zero_points, grid.format)
