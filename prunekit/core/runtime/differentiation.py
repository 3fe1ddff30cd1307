"""Gradients and products with the Hessian of a scalar function of tensors, on every backend."""

from collections.abc import Callable, Sequence
from typing import Any

import keras
from keras import ops


def gradient(function: Callable[[list[Any]], Any], values: Sequence[Any]) -> list[Any]:
    """Returns the gradient of the scalar `function(values)`: one tensor per value, zeros where it does not depend.

    Args:
        function: Takes a list of tensors and returns a scalar tensor.
        values: Floating-point tensors at which the gradient is taken.
    """
    return _gradient(function, _detached(values), again=False)


def hessian_product(function: Callable[[list[Any]], Any], values: Sequence[Any], vectors: Sequence[Any]) -> list[Any]:
    """Returns the product of the Hessian of the scalar `function(values)` with vectors: one tensor per value.

    Args:
        function: As for `gradient`.
        values: As for `gradient`.
        vectors: One tensor per value, of the value's shape.
    """

    def directional(at: list[Any]) -> Any:
        products = (ops.sum(g * v) for g, v in zip(_gradient(function, at, again=True), vectors, strict=True))
        return sum(products, start=ops.zeros((), values[0].dtype))

    return _gradient(directional, _detached(values), again=False)


def _detached(values: Sequence[Any]) -> list[Any]:
    if keras.backend.backend() == "torch":
        return [value.detach().requires_grad_(True) for value in values]
    return list(values)


def _gradient(function: Callable[[list[Any]], Any], values: list[Any], *, again: bool) -> list[Any]:
    """Returns the gradient; `again` keeps what a second derivative needs, which only PyTorch must be told."""
    backend = keras.backend.backend()
    if backend == "tensorflow":
        import tensorflow as tf

        with tf.GradientTape(watch_accessed_variables=False) as tape:
            tape.watch(values)
            result = function(values)
        found = tape.gradient(result, values, unconnected_gradients="zero")
        return [tf.convert_to_tensor(one) for one in found]
    if backend == "jax":
        import jax

        return jax.grad(function)(values)
    import torch

    with torch.enable_grad():
        result = function(values)
        if not result.requires_grad:
            return [torch.zeros_like(value) for value in values]
        return list(torch.autograd.grad(result, values, create_graph=again, materialize_grads=True))
