"""The layer that reduces one dimension of a tensor, and the layer that restores it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from prunekit.techniques.factorize.dimension.modes import Mode

# The new dimension is "z"; no tensor has so many others.
_LETTERS, _NEW = "abcdefghij", "z"


def reduction(mode: Mode, axis: int, size: int, shape: Sequence[int | None], name: str, dtype: Any = None) -> Any:
    """Returns a built EinsumDense: (x - means) times the first directions, along one dimension.

    Args:
        mode: The directions.
        axis: The dimension, from 1.
        size: Number of directions.
        shape: Shape of the inputs, with the batch; None where a length is not fixed.
        name: Name of the layer.
        dtype: Dtype or policy; None = Keras's.
    """
    vectors = mode.vectors[:, :size]
    old = _LETTERS[: len(shape)]
    new = old.replace(old[axis], _NEW)
    equation = f"{old},{old[axis]}{_NEW}->{new}"
    return _layer(equation, shape, axis, vectors, -mode.means @ vectors, name, dtype)


def restoration(mode: Mode, axis: int, size: int, shape: Sequence[int | None], name: str, dtype: Any = None) -> Any:
    """Returns a built EinsumDense: the first directions transposed, plus the means; arguments as for `reduction`."""
    old = _LETTERS[: len(shape)]
    new = old.replace(old[axis], _NEW)
    given = [size if place == axis else length for place, length in enumerate(shape)]
    equation = f"{new},{_NEW}{old[axis]}->{old}"
    return _layer(equation, given, axis, mode.vectors[:, :size].T, mode.means, name, dtype)


def _layer(
    equation: str, shape: Sequence[int | None], axis: int, kernel: np.ndarray, bias: np.ndarray, name: str, dtype: Any
) -> Any:
    after = [kernel.shape[1] if place == axis else length for place, length in enumerate(shape)]
    layer = keras.layers.EinsumDense(
        equation, tuple(after[1:]), bias_axes=equation.rpartition(">")[2][axis], name=name, dtype=dtype
    )
    layer.build(tuple(shape))
    layer.kernel.assign(kernel.astype("float32"))
    layer.bias.assign(bias.astype("float32").reshape(layer.bias.shape))
    return layer
