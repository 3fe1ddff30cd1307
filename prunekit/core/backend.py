"""The one place that knows the backend: which it is, where variables live, what they hold, and how they are written."""

import contextlib
from typing import Any

import keras
import numpy as np


def on_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow, the home of what is collected inside training steps."""
    return keras.backend.backend() == "tensorflow"


def require_tensorflow(name: str) -> None:
    """Refuses another backend in one line.

    Raises:
        RuntimeError: Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"{name} is made of tf.GradientTape and TensorFlow variables. Received: the {keras.backend.backend()} "
            "backend. Run with KERAS_BACKEND=tensorflow."
        )


def require_one_replica(name: str, remedy: str) -> None:
    """Refuses a distribution strategy of several replicas.

    Raises:
        RuntimeError: One is in scope; the message ends in `remedy`.
    """
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{name} works on one replica. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. {remedy}"
        )


def inside_graph() -> bool:
    """Whether the caller is being traced into a graph, where Python runs once and not at every step."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.inside_function()


def variable_scope(model) -> contextlib.AbstractContextManager:
    """Where variables that live beside the model's must be created: under its distribution strategy, if it has one."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def native(variable) -> Any:
    """The backend's own variable under a Keras one (itself if it is one already): the identity both kinds share.

    JAX has none: a Keras variable is given another array by every update, and is itself what stays.
    """
    return variable if keras.backend.backend() == "jax" else getattr(variable, "_value", variable)


def value_now(variable) -> Any:
    """A tensor with what a variable holds at this moment, whatever is assigned to it later.

    On TensorFlow `keras.ops.convert_to_tensor` returns the Keras variable itself: it is read where it is used, and a
    `tf.function` that is given one takes it through NumPy and back, which costs more than choosing masks does.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.ops.convert_to_tensor(variable)
    return native(variable).read_value()


def select(mask, value, rest: float = 0.0) -> Any:
    """`value` where the mask is True, elsewhere `rest`, in the type of `value`."""
    # Select, not multiply: 0 * inf is nan and 0 * -3 is -0.
    value = keras.ops.convert_to_tensor(value)
    return keras.ops.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype))


def fill_outside(mask, variable, rest: float = 0.0) -> None:
    """Writes `rest` into a variable wherever the mask is False."""
    value = keras.ops.convert_to_tensor(variable)
    if keras.backend.backend() == "torch" and value is native(variable):
        import torch

        # In place: a new array of the size, and copying it, would take twice as long as the rest. Inside a
        # StatelessScope the value is another, which is not ours to change.
        with torch.no_grad():
            torch.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype), out=value)
    else:
        variable.assign(select(mask, value, rest))


def number(scalar) -> float | int:
    """What a scalar variable or tensor holds, as a Python number."""
    # Keras's convert_to_numpy makes NumPy 2 warn of TensorFlow's variables.
    return np.asarray(scalar.numpy() if hasattr(scalar, "numpy") else scalar).item()
