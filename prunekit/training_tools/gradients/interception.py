"""Interception of the gradients at layers' outputs during training, to change, replace or accumulate them."""

import functools
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from numbers import Real
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.layers.layer_names import Site, find_site
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend, patching
from prunekit.core.statistics.layer_observer import wide
from prunekit.core.training import train_function
from prunekit.training_tools.gradients.layer_capture import graph_in_scope, is_differentiable, like
from prunekit.training_tools.gradients.statistics import norms


@contextmanager
def intercepting(model: Any, functions: Mapping[Any, Callable[[Any], Any]]) -> Iterator[None]:
    """Inside the scope, applies functions to the gradients at layers' outputs before backpropagation continues.

    Works in `model.fit` and `train_on_batch` (also for a model that was fitted before, and with `PruningCallback`), in
    `TapeLoop`, and under the user's own tapes, wherever a pass runs through the layer. Earlier layers, and the layer's
    own weights, receive the gradient that the function returns. The forward pass is the same, bit for bit; at the end
    the model, its layers and its compiled functions are restored. A user's own `tf.function` must be traced inside the
    scope and must not be used after it.

    Do not use `per_example` and related functions inside: they split gradients at layers' outputs themselves.

    A layer's name means all its calls, ("name", 1) only its second call in a pass of the model. A function is called
    once per floating-point output and call. If the model ends in a softmax or sigmoid whose logits a Keras loss reads,
    no gradient reaches that output; the function receives the gradient at the logits. Gradients are those of the loss
    as the loop scales it: a mean over the batch includes 1/batch, and a LossScaleOptimizer's loss includes its scale.

    Args:
        model: A built Keras model.
        functions: Layer name, path such as "block/conv_1", or (name, number of the call) -> a function from a gradient
            to a gradient of the same shape and dtype, made of TensorFlow or Keras operations.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `functions` is not a mapping of names to functions; a function does not return a tensor.
        ValueError: No layer has the name, or no call the number; a function returns another shape or dtype; the layer
            runs inside `vectorized_map`, or inside a graph's loop or condition with a function that uses variables.

    Warns:
        UserWarning: At the end, one of the functions has received no gradient.

    Source: Ganin and Lempitsky 2015, arXiv:1409.7495, section 3, for a layer that is the identity in the forward pass
        and another function in the backward pass (there the gradient's reversal).
    """
    backend.require_tensorflow("intercepting")
    check_built(model)
    found = _interceptions(model, functions)
    by_layer: dict[int, list[_Interception]] = {}
    for one in found:
        by_layer.setdefault(id(one.site.layer), []).append(one)
    counter = _CallCounter()
    with ExitStack() as stack:
        stack.enter_context(train_function.fresh_functions(model))
        if any(one.site.call is not None for one in found):
            stack.enter_context(_calling(model, lambda original: counter.counted(original, found)))
        for these in by_layer.values():
            stack.enter_context(_calling(these[0].site.layer, functools.partial(_intercepted, these, counter)))
        yield
    for one in found:
        if not one.reached:
            warnings.warn(
                f"No gradient came back to {one.site.label!r} for its function. Either no training step was traced "
                "inside (a tf.function that was called before keeps its old trace), or the layer was not called, or "
                "no weight up to its output is trained.",
                stacklevel=3,
            )


def clipped_by_norm(limit: Any, *, per_example: bool = True) -> Callable[[Any], Any]:
    """Returns a function that scales a gradient down to the L2 norm `limit` if its norm is larger.

    Norms are computed in at least float32 and neither overflow nor underflow. A gradient with NaN or infinity is
    returned unchanged.

    Args:
        limit: Largest norm, in the gradient's units; above zero. A tensor or variable may change during training.
        per_example: True computes one norm per example (row of the first axis), over all other axes; False computes
            one norm of the whole gradient.

    Raises:
        ValueError: `limit` is not above zero.

    Source: Pascanu et al. 2013, arXiv:1211.5063, algorithm 1.
    """
    changing = tf.is_tensor(limit) or isinstance(limit, keras.Variable)
    if not changing and not (isinstance(limit, Real) and float(limit) > 0):
        raise ValueError(f"A norm is clipped to a limit above zero. Received: limit={limit!r}.")

    def clip(gradient: Any) -> Any:
        values = wide(gradient)
        norm = norms(values, tuple(range(1 if per_example else 0, len(gradient.shape))))
        most = keras.ops.cast(limit, values.dtype)
        shorter = values * (most / tf.where(norm > most, norm, tf.ones_like(norm)))
        return tf.where(norm > most, tf.cast(shorter, gradient.dtype), gradient)

    return clip


# Layers' calls ------------------------------------------------------------------------------------------------------


def _interceptions(model: Any, functions: Any) -> list["_Interception"]:
    if not isinstance(functions, Mapping) or not functions:
        raise TypeError(
            "Interception takes a dictionary of layers' names and functions, and at least one. Received: "
            f"functions={functions!r}."
        )
    found: list[_Interception] = []
    for name, function in functions.items():
        if isinstance(function, type) or not callable(function):
            raise TypeError(f"Each layer needs a function gradient -> gradient. Received: {function!r} for {name!r}.")
        site = find_site(model, name, "functions")
        if site.call is not None and site.call < 0:
            raise ValueError(f"Calls of a layer are counted from 0. Received: functions={name!r}.")
        for other in found:
            calls = (site.call, other.site.call)
            if other.site.layer is site.layer and (None in calls or calls[0] == calls[1]):
                raise ValueError(
                    f"Each call of a layer has one function, and a name without a call number means all calls. "
                    f"Received: two for {site.label!r}. Compose them into one."
                )
        found.append(_Interception(site, function))
    return found


@contextmanager
def _calling(layer: Any, instead: Callable[[Any], Callable[..., Any]]) -> Iterator[None]:
    """Replaces a layer's `call` on the instance, where Keras looks it up in every thread and trace."""
    name = "call" if getattr(layer, "quantization_mode", None) is None else "quantized_call"
    with patching.wrapped(layer, name, instead):
        yield


def _intercepted(these: list["_Interception"], counter: "_CallCounter", original: Any) -> Callable[..., Any]:
    layer = these[0].site.layer

    @functools.wraps(original)
    def call(*args: Any, **kwargs: Any) -> Any:
        number = counter.next_call(layer)
        outputs = original(*args, **kwargs)
        for one in these:
            if one.site.call in (None, number):
                outputs = one.around(outputs)
        return outputs

    return call


class _CallCounter(threading.local):
    """Counts, per thread, the calls of each layer since the innermost pass of the model began."""

    def __init__(self) -> None:
        self._counts: list[Counter[int]] = []

    def next_call(self, layer: Any) -> int:
        """Returns the number of the call that begins, or -1 outside a pass."""
        if not self._counts:
            return -1
        self._counts[-1][id(layer)] += 1
        return self._counts[-1][id(layer)] - 1

    def counted(self, original: Any, found: list["_Interception"]) -> Callable[..., Any]:
        """Returns the model's `call` as one counted pass, which must contain the calls that `found` names."""

        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            self._counts.append(Counter())
            try:
                outputs = original(*args, **kwargs)
            finally:
                counts = self._counts.pop()
            for one in found:
                if one.site.call is not None and one.site.call >= counts[id(one.site.layer)]:
                    raise ValueError(
                        f"The layer {one.site.label!r} is called {counts[id(one.site.layer)]} times in a pass of the "
                        f"model. Received: call {one.site.call}. Name a call that takes place; they count from 0."
                    )
            return outputs

        return call


class _Interception:
    """A function applied to the gradients at the outputs of a layer's calls."""

    def __init__(self, site: Site, function: Callable[[Any], Any]):
        self.site = site
        self.reached = False
        self._function = function

    def around(self, outputs: Any) -> Any:
        """Returns the outputs unchanged, with the function applied to their gradients."""
        return keras.tree.map_structure(self._around_one, outputs)

    def _around_one(self, leaf: Any) -> Any:
        if not is_differentiable(leaf):
            return leaf
        graph = graph_in_scope()
        # vectorized_map rewrites each traced operation and loses custom gradients: raise instead of ignoring that.
        if graph is not None and "loop_body" in graph.get_name_scope().split("/"):
            raise ValueError(
                f"The layer {self.site.label!r} is called inside vectorized_map, where gradients cannot be "
                "intercepted. Name the enclosing layer, or give the enclosing layer a fixed number of steps."
            )
        copy = like(self._identity(leaf), leaf)
        logits = getattr(leaf, "_keras_logits", None)
        if logits is not None:
            copy._keras_logits = self._identity(logits)
        return copy

    def _identity(self, tensor: Any) -> Any:
        @tf.custom_gradient
        def identity(x: Any) -> Any:
            return tf.identity(x), self._passed

        return identity(tensor)

    def _passed(self, gradient: Any) -> Any:
        self.reached = True
        gradient = tf.convert_to_tensor(gradient)  # a later tf.gather gives IndexedSlices
        graph = graph_in_scope()
        before = _variables_in(graph)
        result = self._function(gradient)
        # _WhileBodyGradFuncGraph, _CondGradFuncGraph: TensorFlow refuses variables there too, with an unclear error.
        if "Grad" in type(graph).__name__ and _variables_in(graph) > before:
            raise ValueError(
                f"The function for {self.site.label!r} uses variables (GradientStatistics does), which TensorFlow does "
                "not allow in the gradient of a graph's loop or condition, where this layer is called. Name the layer "
                "around it, or unroll the loop."
            )
        return self._checked(result, gradient)

    def _checked(self, result: Any, gradient: Any) -> Any:
        try:
            tensor = tf.convert_to_tensor(result)
        except (TypeError, ValueError) as error:
            raise TypeError(
                f"The function for {self.site.label!r} returns a gradient. Received: {result!r}. To stop a gradient, "
                "return zeros of its shape."
            ) from error
        if tensor.dtype != gradient.dtype or not tensor.shape.is_compatible_with(gradient.shape):
            raise ValueError(
                f"The function for {self.site.label!r} returns a gradient of the same shape and dtype: "
                f"{tuple(gradient.shape)}, {gradient.dtype.name}. Received: {tuple(tensor.shape)}, {tensor.dtype.name}."
            )
        if tensor.shape.is_fully_defined() and gradient.shape.is_fully_defined():
            return tensor
        same = tf.debugging.assert_equal(
            tf.shape(tensor), tf.shape(gradient), f"The function for {self.site.label!r} returns another shape."
        )
        with tf.control_dependencies([same] if same is not None else []):
            return tf.identity(tensor)


def _variables_in(graph: Any) -> int:
    """Returns the number of outer variables that a graph uses."""
    return sum(tensor.dtype == tf.resource for tensor in getattr(graph, "external_captures", ()))
