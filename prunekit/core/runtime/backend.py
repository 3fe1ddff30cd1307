"""Backend-specific access: identity of the backend, and creation, reading and writing of its variables."""

import contextlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import keras
import numpy as np
from keras.src.backend.common.stateless_scope import in_stateless_scope

from prunekit.sparsity.array_ops import SMALL, array_of


def on_tensorflow() -> bool:
    """Returns True if Keras runs on TensorFlow; only there, values are collected inside training steps."""
    return keras.backend.backend() == "tensorflow"


def require_tensorflow(name: str) -> None:
    """Raises unless Keras runs on TensorFlow.

    Raises:
        RuntimeError: Keras runs on another backend; the message starts with `name`.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"{name} needs tf.GradientTape and TensorFlow variables. Received: the {keras.backend.backend()} "
            "backend. Run with KERAS_BACKEND=tensorflow."
        )


def require_one_replica(name: str, remedy: str) -> None:
    """Raises under a distribution strategy with more than one replica.

    Raises:
        RuntimeError: A strategy with several replicas is in scope; the message ends with `remedy`.
    """
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{name} works on one replica. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. {remedy}"
        )


def inside_graph() -> bool:
    """Returns True while TensorFlow traces the caller into a graph, where Python code runs once, not at every step."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.inside_function()


def variable_scope(model) -> contextlib.AbstractContextManager:
    """Returns the scope in which to create variables beside the model's: that of its distribution strategy, if any."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def native(variable) -> Any:
    """Returns the backend variable that a Keras variable wraps, or `variable` itself if it is a backend variable.

    Its `id` identifies variables of both kinds. On JAX each update replaces the array, so `variable` is returned.
    """
    return variable if keras.backend.backend() == "jax" else getattr(variable, "_value", variable)


def value_now(variable) -> Any:
    """Returns the variable's current value as a tensor that later assignments do not change.

    On TensorFlow `keras.ops.convert_to_tensor` returns the Keras variable itself, whose value is read at each use; a
    `tf.function` converts a Keras variable argument through NumPy and back, which costs more than mask selection.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.ops.convert_to_tensor(variable)
    import tensorflow as tf

    own = native(variable)
    if tf.executing_eagerly() and _is_on_one_device(own):
        # The raw operation takes a tenth of the time of `read_value`, which matters for small weights.
        return tf.raw_ops.ReadVariableOp(resource=own.handle, dtype=own.dtype)
    return own.read_value()


def bytes_of(tensors: Iterable[Any]) -> int:
    """Returns the number of bytes of tensors or arrays; those of texts, which have no fixed length, count as none."""
    return sum(math.prod(map(int, tensor.shape)) * _width(tensor.dtype) for tensor in tensors)


def _width(dtype: Any) -> int:
    # TensorFlow's name is `size`, None for texts; that of NumPy and PyTorch is `itemsize`.
    return getattr(dtype, "itemsize", None) or getattr(dtype, "size", None) or 0


def is_on_cpu(tensor) -> bool:
    """Returns True if an eager tensor of TensorFlow or JAX lies in the memory of a CPU."""
    if keras.backend.backend() == "tensorflow":
        return "CPU" in tensor.device
    return all(device.platform == "cpu" for device in tensor.devices())


def on_host(tensor) -> Any:
    """Returns a tensor as a NumPy array if NumPy reads it without a copy, else the tensor; arrays stay as they are."""
    if isinstance(tensor, np.ndarray) or keras.backend.backend() == "torch" or not is_on_cpu(tensor):
        return tensor
    return array_of(tensor)


def is_small_on_host(tensor) -> bool:
    """Returns True if NumPy reads the tensor of TensorFlow as fast as TensorFlow does, without a copy."""
    if keras.backend.backend() != "tensorflow" or inside_graph():
        return False
    return math.prod(tensor.shape) <= SMALL and is_on_cpu(tensor)


def select(mask, value, rest: float = 0.0) -> Any:
    """Returns `value` where the mask is True and `rest` elsewhere, in the dtype of `value`."""
    # Select, not multiply: 0 * inf is nan and 0 * -3 is -0.
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Keras's operations convert and cast each argument first: twice as many operations to trace.
        value = tf.convert_to_tensor(getattr(value, "value", value) if isinstance(value, keras.Variable) else value)
        mask = mask.value if isinstance(mask, keras.Variable) else mask
        return tf.where(mask, value, tf.constant(rest, value.dtype))
    value = keras.ops.convert_to_tensor(value)
    return keras.ops.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype))


def assign_same(variable, value) -> None:
    """Assigns a value of the variable's own shape and dtype, eagerly; faster than `variable.assign`, which converts."""
    if keras.backend.backend() != "tensorflow":
        variable.assign(value)
        return
    import tensorflow as tf

    own = native(variable)
    if tf.executing_eagerly() and _is_on_one_device(own):
        tf.raw_ops.AssignVariableOp(resource=own.handle, value=value)
    else:
        own.assign(value, read_value=False)


def fill_outside(mask, variable, rest: float = 0.0) -> None:
    """Writes `rest` into a variable wherever the mask is False; both are Keras variables."""
    if keras.backend.backend() == "torch":
        import torch

        value = keras.ops.convert_to_tensor(variable)
        if value is native(variable):
            # In place: allocating a new array and copying it would take twice as long as the selection. Inside a
            # StatelessScope the value is another tensor, which must not be changed in place.
            with torch.no_grad():
                torch.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype), out=value)
            return
    variable.assign(select(mask, variable, rest))


def fill_all_outside(rows: Sequence[tuple[Any, Any, float]]) -> None:
    """Calls `fill_outside` with each (mask, variable, rest); on TensorFlow quickly, if each `has_own_handle`."""
    if keras.backend.backend() != "tensorflow" or inside_graph():
        for row in rows:
            fill_outside(*row)
        return
    import tensorflow as tf

    masks: dict[int, Any] = {}
    rests: dict[Any, Any] = {}
    for mask, variable, rest in rows:
        if id(mask) not in masks:
            masks[id(mask)] = value_now(mask)
        value = value_now(variable)
        if (value.dtype, rest) not in rests:
            rests[value.dtype, rest] = tf.constant(rest, value.dtype)
        # By its raw name, it starts in a fraction of the time.
        filled = tf.raw_ops.SelectV2(condition=masks[id(mask)], t=value, e=rests[value.dtype, rest])
        assign_same(variable, filled)


def has_own_handle(variable) -> bool:
    """Returns True if a Keras variable is a TensorFlow variable that lies on one device, outside a StatelessScope."""
    if keras.backend.backend() != "tensorflow":
        return False
    return _is_on_one_device(native(variable)) and not in_stateless_scope()


def _is_on_one_device(variable) -> bool:
    """Returns True if a variable of TensorFlow has one value, which its `handle` refers to."""
    # Variables of a distribution strategy consist of several, and raise an error where they are asked for a handle.
    return not hasattr(variable, "values") and hasattr(variable, "handle")


def number(scalar) -> float | int:
    """Returns the value of a scalar variable or tensor as a Python number."""
    if keras.backend.backend() == "tensorflow":
        # Keras's convert_to_numpy makes NumPy 2 emit a warning for TensorFlow variables.
        return np.asarray(scalar.numpy() if hasattr(scalar, "numpy") else scalar).item()
    # With a NumPy array in between, tensors of PyTorch emit a warning, and on a GPU they have none.
    value = scalar.value if isinstance(scalar, keras.Variable) else scalar
    return value.item() if hasattr(value, "item") else value


def counts_at(places: Any, count: Any) -> Any:
    """Returns how often each of the numbers below `count` occurs, float32, shape (count,).

    Args:
        places: Integers from 0, of any shape; those from `count` on are not counted.
        count: How many numbers.
    """
    flat = keras.ops.reshape(places, (-1,))
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Nine times as fast as a sum of segments. With weights it would not be: their sum depends on how threads take
        # turns.
        return tf.cast(tf.math.bincount(flat, minlength=count, maxlength=count), "float32")
    ones = keras.ops.cast(flat < count, "float32")
    return keras.ops.segment_sum(ones, keras.ops.minimum(flat, count - 1), count)
