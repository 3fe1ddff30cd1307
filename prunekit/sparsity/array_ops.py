"""The same array operations on NumPy arrays and on tensors, so that arithmetic is written once for both.

NumPy needs no trace and no compilation for each shape, so small weights are processed there; the elementwise results
are equal to the bit.
"""

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
from keras import ops

# Most entries of a tensor in the memory of the CPU that NumPy, on one core, reads as fast as a backend.
SMALL = 1 << 18


def array_of(value: Any) -> np.ndarray:
    """Returns a tensor or variable as a NumPy array to read from; without a copy where backend and device allow it."""
    if isinstance(value, np.ndarray):
        return value
    if keras.backend.backend() == "tensorflow":
        # Keras's convert_to_numpy copies TensorFlow's tensors.
        return np.asarray(value)
    # NumPy 2 emits a warning for Keras's variables.
    return np.asarray(ops.convert_to_numpy(value.value if isinstance(value, keras.Variable) else value))


def ops_for(array: Any) -> Any:
    """Returns `keras.ops`, or for an array or scalar of NumPy the functions of NumPy under the names of `keras.ops`."""
    return _NumpyOps if isinstance(array, np.ndarray | np.generic) else ops


class _NumpyOps:
    """NumPy's functions under the names and with the arguments of `keras.ops`."""

    all, any, argmax, max, sum = np.all, np.any, np.argmax, np.max, np.sum
    arange, greater, minimum = np.arange, np.greater, np.minimum
    round, split, sqrt, take = np.round, np.split, np.sqrt, np.take
    broadcast_to, concatenate, pad, reshape, squeeze = np.broadcast_to, np.concatenate, np.pad, np.reshape, np.squeeze
    cumsum, sort, stack, transpose, where, zeros_like = (
        np.cumsum,
        np.sort,
        np.stack,
        np.transpose,
        np.where,
        np.zeros_like,
    )
    equal, isnan, matmul = np.equal, np.isnan, np.matmul
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


def split_at(tensor: Any, ends: Sequence[int]) -> list[Any]:
    """Returns the parts of a vector, given the end of each."""
    # On TensorFlow, a vector cannot be split into one part.
    return list(ops.split(tensor, ends[:-1])) if len(ends) > 1 else [tensor][: len(ends)]
