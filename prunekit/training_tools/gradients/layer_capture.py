"""Runs a model as a function from or to a layer's activations, without rewriting the model."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.graph.watching import watching
from prunekit.anatomy.layers.layer_names import Site
from prunekit.core.runtime import backend, patching

_SUBSTITUTED: ContextVar[Mapping[int, tuple[Any, Any]]] = ContextVar("_SUBSTITUTED", default=MappingProxyType({}))


@contextmanager
def substituted_variables(pairs: Iterable[tuple[Any, Any]] = ()) -> Iterator[None]:
    """Makes each paired Keras variable read as its tensor and discards assignments, in the scope; scopes can nest."""
    standing = {**_SUBSTITUTED.get(), **{id(variable): (variable, tensor) for variable, tensor in pairs}}
    token = _SUBSTITUTED.set(standing)
    try:
        # Keras reads only the innermost scope, so each scope repeats the pairs of the outer scopes.
        with keras.StatelessScope(list(standing.values())):
            yield
    finally:
        _SUBSTITUTED.reset(token)


_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def exact_moments() -> Iterator[None]:
    """Corrects second derivatives of normalisation layers: TensorFlow's variance treats its mean as a constant."""
    thread = threading.get_ident()

    def moments(x: Any, axes: Any, shift: Any = None, keepdims: bool = False, name: str | None = None) -> Any:
        x = tf.convert_to_tensor(x)
        if threading.get_ident() != thread or x.dtype not in (tf.float32, tf.float64):
            return original(x, axes, shift, keepdims, name)
        mean = tf.reduce_mean(x, axes, keepdims=True)
        variance = tf.reduce_mean(tf.math.squared_difference(x, mean), axes, keepdims=keepdims)
        return mean if keepdims else tf.squeeze(mean, axes), variance

    # Keras looks `tf.nn.moments` up in every call. The former function is restored, so threads must take turns.
    with _ONE_AT_A_TIME:
        original = tf.nn.moments
        with patching.shadowed(tf.nn, "moments", moments):
            yield


def run(
    model: Any,
    x: Any,
    *,
    training: bool = False,
    of: Any = None,
    at: Site | None = None,
    through: Callable[[Any], Any] | None = None,
) -> Any:
    """Returns the model's output, or the part that `of` selects; the model's state stays unchanged.

    Args:
        model: A built Keras model.
        x: Inputs of the model.
        training: The `training` argument of the model's call.
        of: None returns the model's output, a `Site` its layer's output, a function the function of the model's output.
        at: Layer call to which `through` is applied.
        through: Function of the outputs of the layer at `at`; its result replaces the outputs in the model.

    Raises:
        ValueError: A layer is not called, is called several times, or is called where calls cannot be observed.
    """
    watched = [site for site in (of if isinstance(of, Site) else None, at) if site is not None]
    calls: dict[int, list[Any]] = {id(site.layer): [] for site in watched}
    graph = graph_in_scope()

    def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        outputs = original(layer, *args, **kwargs)
        if id(layer) not in calls:
            return outputs
        number = len(calls[id(layer)])
        if at is not None and through is not None and layer is at.layer and number == (at.call or 0):
            outputs = through(outputs)
        calls[id(layer)].append(outputs if graph_in_scope() is graph else None)
        return outputs

    with watching(see) if watched else nullcontext(), substituted_variables():
        prediction = model(x, training=training)
    shown = [_chosen(site, calls[id(site.layer)]) for site in watched]
    if isinstance(of, Site):
        return shown[0]
    return prediction if of is None else of(prediction)


def _chosen(site: Site, calls: list[Any]) -> Any:
    if not calls or (site.call is not None and not 0 <= site.call < len(calls)):
        raise ValueError(
            f"The layer {site.label!r} is called {len(calls)} times in a pass of the model. Received: "
            f"{f'call {site.call}' if calls else 'its name'}. Name a call that takes place; they count from 0."
        )
    if site.call is None and len(calls) > 1:
        raise ValueError(
            f"The layer {site.label!r} is called {len(calls)} times in a pass of the model, so its name is ambiguous. "
            f"Say which call, counted from 0: ({site.label!r}, 0)."
        )
    if calls[site.call or 0] is None:
        raise ValueError(
            f"The layer {site.label!r} is called inside a loop, where its activations cannot be captured. Name the "
            "layer around it."
        )
    return calls[site.call or 0]


def own_tensors(structure: Any, see: Callable[[Any], None] | None = None) -> Any:
    """Returns copies of the tensors and passes each to `see`: a layer may return its input tensors themselves."""

    def own(leaf: Any) -> Any:
        if not is_differentiable(leaf):
            return leaf
        copy = like(tf.identity(leaf), leaf)
        if see is not None:
            see(copy)
        return copy

    return keras.tree.map_structure(own, structure)


def like(tensor: Any, model_of: Any) -> Any:
    """Returns `tensor` with the Keras mask of `model_of`."""
    mask = getattr(model_of, "_keras_mask", None)
    if mask is not None:
        tensor._keras_mask = mask
    return tensor


def is_differentiable(leaf: Any) -> bool:
    """Returns True if `leaf` is a tensor of floating-point numbers."""
    return tf.is_tensor(leaf) and leaf.dtype.is_floating


def graph_in_scope() -> Any:
    """Returns the graph to which operations are added, or None in eager execution."""
    return None if tf.executing_eagerly() else tf.compat.v1.get_default_graph()


def tensors(model: Any, structure: Any) -> Any:
    """Converts arrays to tensors, floating-point arrays to the dtype of the model's weights; keeps tensors as is."""
    weights = [weight.dtype for weight in model.weights if backend.native(weight).dtype.is_floating]
    precision = weights[0] if weights else keras.config.floatx()

    def one(leaf: Any) -> Any:
        if tf.is_tensor(leaf):
            return leaf
        tensor = tf.convert_to_tensor(leaf)
        return tf.cast(tensor, precision) if tensor.dtype.is_floating else tensor

    return keras.tree.map_structure(one, structure)
