"""Custom gradients for functions whose derivative is zero or missing, on every Keras backend."""

import functools
from collections.abc import Callable
from typing import Any

from keras import ops


def straight_through(function: Callable[[Any], Any], *, window: float | None = None) -> Callable[[Any], Any]:
    """Returns `function` with the gradient of the identity: the forward pass is unchanged.

    Without `window`, `straight_through` can be used as a decorator.

    Args:
        function: One tensor -> one tensor of the same shape, such as `keras.ops.sign` or `keras.ops.round`.
        window: The gradient is zero where |input| > window; None: the gradient passes everywhere.

    Raises:
        ValueError: `window` is not above zero; at the call: `function` changes the shape.

    Source: Bengio et al. 2013, arXiv:1308.3432, section 4; for `window` Hubara et al. 2016, arXiv:1602.02830, eq. 4.
    """
    if window is not None and not window > 0:
        raise ValueError(
            f"Gradients pass where |input| <= window, so `window` is above zero. Received: window={window!r}."
        )

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
                f"straight_through passes each gradient to the input at the same position. Received: {name}, which "
                f"turns shape {tuple(x.shape)} into {tuple(output.shape)}. Define its gradient with with_gradient()."
            )
        return output

    return same_shape


def with_gradient(gradient: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Returns a decorator that replaces the gradient of a function by `gradient`.

    Args:
        gradient: (upstream, *inputs) -> the gradients with respect to the inputs, in the inputs' shapes: one tensor for
            one input, a tuple for several inputs. `upstream` is the gradient with respect to the output.

    Returns:
        A decorator of functions: tensors -> one tensor. Variables read inside the function get no gradient.

    Raises:
        ValueError: In the backward pass: `gradient` returns a wrong number of tensors or wrong shapes.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def derived(*inputs: Any) -> Any:
            tensors = [ops.convert_to_tensor(one) for one in inputs]

            # Computed outside the custom gradient: TensorFlow requires gradients of variables read inside.
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
