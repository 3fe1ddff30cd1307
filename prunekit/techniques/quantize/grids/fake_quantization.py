"""Rounding inside a forward pass, with gradients that training can use."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from keras import ops

from prunekit.core.runtime.compilation import shared_in_traces
from prunekit.techniques.quantize.grids.grids import Grid, IntegerFormat, are_within, nearest_within


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
    dtype = "float64" if "float64" in str(values.dtype) else "float32"
    scale, zero_point = (ops.cast(ops.convert_to_tensor(one), dtype) for one in (scale, zero_point))
    rank, lengths = len(values.shape), tuple(scale.shape)
    lengths = (1,) * (rank - len(lengths)) + lengths
    if len(scale.shape) not in (0, rank):
        scale = ops.reshape(scale, lengths)
    common = tuple(axis for axis, length in enumerate(lengths) if length == 1)
    rounded = _rounding(form, common)(ops.cast(values, dtype), scale, ops.stop_gradient(zero_point))
    return ops.cast(rounded, values.dtype)


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


@functools.cache
def _rounding(form: IntegerFormat, common: tuple[int, ...]) -> Callable[..., Any]:
    """Returns a function (values, scale, zero point) -> the nearest values, which a model of many layers traces once.

    Args:
        form: The codes.
        common: Axes whose entries share a scale.
    """

    def rounded(values: Any, scale: Any, zero_point: Any) -> tuple[Any, Callable[..., Any]]:
        def gradients(*args: Any, upstream: Any = None) -> tuple[Any, Any, Any]:
            if upstream is None:
                # On PyTorch, the arguments of `rounded` come before it.
                (upstream,) = args
            steps = values / scale
            # Not derived by the backends: JAX and PyTorch halve the gradient at the ends of `minimum` and `maximum`,
            # where the largest weight lies, and TensorFlow needs four times as many operations.
            inside = ops.where(are_within(steps, zero_point, form), upstream, ops.cast(0, upstream.dtype))
            terms = upstream * nearest_within(steps, zero_point, form) - inside * steps
            of_scale = ops.sum(terms, axis=common, keepdims=len(scale.shape) > 0)
            return inside, of_scale, ops.zeros_like(zero_point)

        return nearest_within(values / scale, zero_point, form) * scale, gradients

    return shared_in_traces(ops.custom_gradient(rounded))
