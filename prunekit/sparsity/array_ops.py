"""The same array operations on NumPy arrays and on tensors, so that arithmetic is written once for both.

NumPy needs no trace and no compilation for each shape, so small weights are processed there; the elementwise results
are equal to the bit.
"""

from typing import Any

import numpy as np
from keras import ops


def ops_for(array: Any) -> Any:
    """Returns the operations for an array: `keras.ops`, or for a NumPy array NumPy under the names of `keras.ops`."""
    return _NumpyOps if isinstance(array, np.ndarray) else ops


class _NumpyOps:
    """NumPy's functions under the names and with the arguments of `keras.ops`."""

    all, any, argmax, max, sum = np.all, np.any, np.argmax, np.max, np.sum
    arange, greater, minimum, split = np.arange, np.greater, np.minimum, np.split
    broadcast_to, concatenate, pad, reshape, squeeze = np.broadcast_to, np.concatenate, np.pad, np.reshape, np.squeeze
    cumsum, sort, stack, transpose, where, zeros_like = (
        np.cumsum,
        np.sort,
        np.stack,
        np.transpose,
        np.where,
        np.zeros_like,
    )
    equal, isnan = np.equal, np.isnan
    logical_and, logical_not, logical_or = np.logical_and, np.logical_not, np.logical_or

    @staticmethod
    def cast(x: Any, dtype: Any) -> np.ndarray:
        return np.asarray(x).astype(dtype, copy=False)

    @staticmethod
    def convert_to_tensor(x: Any, dtype: Any = None) -> np.ndarray:
        return np.asarray(x, dtype=dtype)

    @staticmethod
    def unstack(x: np.ndarray, axis: int) -> list[np.ndarray]:
        return list(np.moveaxis(x, axis, 0))
