"""Runs a part of a model twice: once without tapes, and again in the backward pass with the same random numbers.

The second run reads the values of the first and updates no state. `recomputing` repeats the calls of layers this way,
`in_parts` the parts of a model's graph.
"""

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state
from tensorflow.compiler.tf2xla.python import xla
from tensorflow.python.eager import record, tape as tapes
from tensorflow.python.ops import control_flow_util

from prunekit.core.runtime import backend
from prunekit.training_tools.gradients.layer_capture import graph_in_scope, is_differentiable, like


class Run:
    """A run of a part of a model that updates the model's state and can be repeated without updating it.

    Attributes:
        variables: The Keras variables that the run read.
        values: Their values before the run, in reads that gradient tapes have recorded.
    """

    def __init__(self, piece: Callable[..., Any]):
        self._piece, self._surroundings = piece, _Surroundings()
        self.variables: list[Any] = []
        self.values: list[Any] = []
        self._masks: dict[int, Any] = {}

    def first(self, inputs: Sequence[Any]) -> tuple[Any, list[Any]]:
        """Runs the part without tapes; returns its outputs and the losses that its layers add."""
        scope = _RecordingScope(_scope(), graph=graph_in_scope())
        # Stored before the run: MultiHeadAttention removes the masks from its inputs.
        self._masks = {id(one): one._keras_mask for one in inputs if getattr(one, "_keras_mask", None) is not None}
        with record.stop_recording(), scope:
            outputs = self._piece(*inputs)
        self.variables = list(scope.read.values())
        self.values = [_shown(variable, scope.taken.get(id(variable))) for variable in self.variables]
        for variable in scope.written.values():
            variable.assign(scope.get_current_value(variable))
        return outputs, scope.losses

    def again(self, inputs: Sequence[Any], sources: Sequence[Any], upstream: Sequence[Any]) -> list[Any]:
        """Runs the part again and returns the gradients of the sources.

        Args:
            inputs: The inputs of the first run.
            sources: Tensors among `inputs` and `values`.
            upstream: The gradient of each tensor that `differentiable` returns; None for tensors without a gradient.

        Returns:
            A gradient for each source: a tensor, `tf.IndexedSlices`, or None if no target depends on the source.
        """
        slopes = [None if slope is None else tf.convert_to_tensor(slope) for slope in upstream]
        known = [slope for slope in slopes if slope is not None]
        tensors = [each for each in {id(one): one for one in [*inputs, *self.values]}.values() if tf.is_tensor(each)]
        with tf.control_dependencies(known):
            again = dict(zip(map(id, tensors), _held_back(tensors, known), strict=True))
            for key, mask in self._masks.items():
                again[key]._keras_mask = mask
            with tf.GradientTape(watch_accessed_variables=False) as tape:
                tape.watch([again[id(source)] for source in sources])
                scope = _RecordingScope(
                    None, zip(self.variables, (again[id(value)] for value in self.values), strict=True)
                )
                with self._surroundings.restored(), scope:
                    outputs = self._piece(*(again.get(id(one), one) for one in inputs))
                targets = differentiable(outputs, scope.losses)
            return tape.gradient(
                [target for target, slope in zip(targets, slopes, strict=True) if slope is not None],
                [again[id(source)] for source in sources],
                output_gradients=known,
            )


def _held_back(tensors: Sequence[Any], until: Sequence[Any]) -> list[Any]:
    """Returns the tensors as copies that a compiled graph can use only after the tensors in `until` are computed."""
    # In a graph only this prevents the compiler from merging the second run with the first or running it too early.
    if tf.executing_eagerly() or not control_flow_util.GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        return [tf.identity(tensor) for tensor in tensors]
    # XLA ignores control dependencies.
    return xla.optimization_barrier(*tensors, *until)[: len(tensors)]


def differentiable(outputs: Any, losses: Sequence[Any]) -> list[Any]:
    """Returns the tensors among a run's outputs and losses through which gradients flow."""
    leaves = [leaf for leaf in keras.tree.flatten(outputs) if is_differentiable(leaf)]
    # Keras's cross-entropies read the logits before a softmax.
    logits = [leaf._keras_logits for leaf in leaves if hasattr(leaf, "_keras_logits")]
    return [*leaves, *logits, *losses]


def replaced(outputs: Any, tensors: Sequence[Any]) -> tuple[Any, list[Any]]:
    """Returns (outputs, losses) with the tensors that `differentiable` finds replaced by `tensors`."""
    leaves, standing = keras.tree.flatten(outputs), iter(tensors)
    fresh = [like(next(standing), leaf) if is_differentiable(leaf) else leaf for leaf in leaves]
    for new, old in zip(fresh, leaves, strict=True):
        if hasattr(old, "_keras_logits"):
            new._keras_logits = next(standing)
    return keras.tree.pack_sequence_as(outputs, fresh), list(standing)


class _RecordingScope(keras.StatelessScope):
    """A scope in which no variable changes; it records the variables read and the values that would be written.

    In a graph each variable is read once, so that the second run uses the same tensors as the first: the loss and the
    updates of the variables depend on these tensors. TensorFlow's graph optimizer has been observed to lose the order
    of an update and another read.
    """

    def __init__(self, outer: Any, values: Iterable[tuple[Any, Any]] = (), *, graph: Any = None):
        super().__init__(collect_losses=True)
        self.read: dict[int, Any] = {}
        self.written: dict[int, Any] = {}
        self.taken: dict[int, Any] = {}
        self._graph = graph
        # Keras reads only the innermost scope.
        self.state_mapping.update(outer.state_mapping if outer is not None else {})
        self.state_mapping.update((id(variable), value) for variable, value in values)

    def get_current_value(self, variable: Any) -> Any:
        if id(variable) not in self.written:
            self.read[id(variable)] = variable
        value = super().get_current_value(variable)
        if value is None and self._graph is not None:
            # Also if a layer reads the variable inside the graph of a loop.
            with self._graph.as_default():
                value = tf.convert_to_tensor(backend.native(variable))
            self.taken[id(variable)] = self.state_mapping[id(variable)] = value
        return value

    def add_update(self, update: tuple[Any, Any]) -> None:
        variable, value = update
        former = self.get_current_value(variable)
        self.written[id(variable)] = variable
        super().add_update((variable, _assigned(value, former)))


def _assigned(value: Any, former: Any) -> Any:
    """Returns `value` as if read from the variable that held `former`: gradients flow to the variable only."""
    if not is_differentiable(former):
        return value

    @tf.custom_gradient
    def read(_: Any) -> Any:
        return tf.stop_gradient(value), lambda upstream: upstream

    return read(former)


def _scope() -> Any:
    return global_state.get_global_attribute("stateless_scope")


def _shown(variable: Any, taken: Any) -> Any:
    """Returns the variable's value in its own precision, recorded on tapes; reuses the earlier read `taken`, if any."""
    scope = _scope()
    standing = None if scope is None else scope.get_current_value(variable)
    if standing is not None:
        return standing
    native = backend.native(variable)
    if taken is None:
        return tf.convert_to_tensor(native)
    tapes.variable_accessed(native)
    record.record_operation("ReadVariableOp", [taken], [native.handle], lambda upstream: [upstream])
    return taken


class _Surroundings:
    """Keras's global call context and autocast scope around a layer's call; holds mainly `training`."""

    def __init__(self) -> None:
        self._held = {name: global_state.get_global_attribute(name) for name in ("current_call_ctx", "autocast_scope")}
        # Copied: layers that are called later write their own `training` into the same object.
        self._held["current_call_ctx"] = copy.copy(self._held["current_call_ctx"])

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restores the stored call context and autocast scope inside the `with` block."""
        former = {name: global_state.get_global_attribute(name) for name in self._held}
        try:
            for name, value in self._held.items():
                global_state.set_global_attribute(name, copy.copy(value))
            yield
        finally:
            for name, value in former.items():
                global_state.set_global_attribute(name, value)
