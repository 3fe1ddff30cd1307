"""Functions whose derivative is zero or missing, with one that a training can use. On every Keras backend."""

import functools
from collections.abc import Callable
from typing import Any

from keras import ops


def straight_through(function: Callable[[Any], Any], *, window: float | None = None) -> Callable[[Any], Any]:
    """`function` forwards, and the identity backwards: the gradient passes as if it were not there.

    Works as a decorator, where it has no window.

    Args:
        function: One tensor -> one tensor of the same shape, such as `keras.ops.sign` or `keras.ops.round`.
        window: Gradients pass only where |input| <= window; None lets all pass.

    Raises:
        ValueError: The window is not above zero; at the call: the function changes the shape.

    Source: Bengio et al. 2013, arXiv:1308.3432, section 4; the window is that of Hubara et al. 2016, arXiv:1602.02830,
        eq. 4.
    """
    if window is not None and not window > 0:
        raise ValueError(f"Gradients pass where |input| <= window, so it is above zero. Received: window={window!r}.")

    def passed(upstream: Any, x: Any) -> Any:
        if window is None:
            return upstream
        return ops.where(ops.abs(x) <= window, upstream, ops.zeros_like(upstream))

    derived = with_gradient(passed)(function)

    @functools.wraps(function)
    def same_shape(x: Any) -> Any:
        x = ops.convert_to_tensor(x)
        output = derived(x)
        if tuple(output.shape) != tuple(x.shape):
            name = getattr(function, "__name__", repr(function))
            raise ValueError(
                f"straight_through hands each gradient on to the input at its place. Received: {name}, which turns "
                f"shape {tuple(x.shape)} into {tuple(output.shape)}. Say with_gradient() what its gradient is."
            )
        return output

    return same_shape


def with_gradient(gradient: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that gives a function the gradient you name, whatever happens inside it.

    Args:
        gradient: (upstream, *inputs) -> the gradient of each input: one tensor for one input, a tuple for several, of
            the inputs' shapes. `upstream` is the gradient at the output.

    Returns:
        A decorator of functions: tensors -> one tensor. Variables that the function reads get no gradient through it.

    Raises:
        ValueError: When gradients are taken: their number or shapes are not those of the inputs.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def derived(*inputs: Any) -> Any:
            tensors = [ops.convert_to_tensor(one) for one in inputs]

            # Computed outside: TensorFlow would ask for the gradients of variables that are read inside.
            value = ops.stop_gradient(function(*tensors))

            @ops.custom_gradient
            def joined(value: Any, *values: Any) -> Any:
                def backward(*arguments: Any, upstream: Any = None) -> Any:
                    upstream = arguments[0] if upstream is None else upstream
                    return ops.zeros_like(value), *_checked(gradient(upstream, *values), values, function)

                return ops.multiply(value, 1), backward

            return joined(value, *tensors)

        return derived

    return decorate


def _checked(found: Any, inputs: tuple[Any, ...], function: Callable[..., Any]) -> tuple[Any, ...]:
    gradients = found if isinstance(found, tuple | list) else (found,)
    shapes, wanted = ([tuple(one.shape) for one in each] for each in (gradients, inputs))
    if shapes != wanted:
        name = getattr(function, "__name__", repr(function))
        raise ValueError(
            f"The gradient given for {name} has one part for each input, of its shape: {wanted}. Received: {shapes}."
        )
    return tuple(gradients)
