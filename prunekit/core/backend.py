"""Backend-specific access: identity of the backend, and creation, reading and writing of its variables."""

import contextlib
from typing import Any

import keras
import numpy as np


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
    return native(variable).read_value()


def array_of(value) -> np.ndarray:
    """Returns a tensor as a NumPy array to read from; on a CPU without a copy where the backend allows it."""
    if isinstance(value, np.ndarray):
        return value
    # Keras's convert_to_numpy copies TensorFlow's tensors.
    return np.asarray(value if keras.backend.backend() == "tensorflow" else keras.ops.convert_to_numpy(value))


def is_on_cpu(tensor) -> bool:
    """Returns True if an eager tensor of TensorFlow or JAX lies in the memory of a CPU."""
    if keras.backend.backend() == "tensorflow":
        return "CPU" in tensor.device
    return all(device.platform == "cpu" for device in tensor.devices())


def select(mask, value, rest: float = 0.0) -> Any:
    """Returns `value` where the mask is True and `rest` elsewhere, in the dtype of `value`."""
    # Select, not multiply: 0 * inf is nan and 0 * -3 is -0.
    value = keras.ops.convert_to_tensor(value)
    return keras.ops.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype))


def fill_outside(mask, variable, rest: float = 0.0) -> None:
    """Writes `rest` into a variable wherever the mask is False."""
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Keras's operations would convert and cast each argument first: several times as many operations to trace.
        value = tf.convert_to_tensor(variable.value)
        keep = mask.value if isinstance(mask, keras.Variable) else mask
        variable.assign(tf.where(keep, value, tf.constant(rest, value.dtype)))
        return
    value = keras.ops.convert_to_tensor(variable)
    if keras.backend.backend() == "torch" and value is native(variable):
        import torch

        # In place: allocating a new array and copying it would take twice as long as the selection. Inside a
        # StatelessScope the value is another tensor, which must not be changed in place.
        with torch.no_grad():
            torch.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype), out=value)
    else:
        variable.assign(select(mask, value, rest))


def number(scalar) -> float | int:
    """Returns the value of a scalar variable or tensor as a Python number."""
    # Keras's convert_to_numpy makes NumPy 2 emit a warning for TensorFlow variables.
    return np.asarray(scalar.numpy() if hasattr(scalar, "numpy") else scalar).item()
