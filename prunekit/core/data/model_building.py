"""Builds a model's unbuilt layers from the first batch of `fit`, as Keras does when it traces the first step."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from prunekit.anatomy.layers.model_weights import unbuilt_layers
from prunekit.core.data.calibration import batches_of
from prunekit.core.runtime.backend import on_tensorflow
from prunekit.core.runtime.optimizers import optimizers_of
from prunekit.core.runtime.patching import around_updates


def waits_for_data(model) -> bool:
    """Returns True if `fit` creates some layers' weights only in its first step, after callbacks have begun.

    Always False outside TensorFlow and under a distribution strategy: there, Keras builds the model from a batch
    before it calls any callback.
    """
    if not on_tensorflow() or getattr(model, "_distribute_strategy", None) is not None:
        return False
    return any(True for _ in unbuilt_layers(model)) or not (model.built or model.weights)


def build_from_data(model: Any, data: Any) -> None:
    """Builds the layers of a model by calling it on one example of calibration data.

    Args:
        model: A Keras model.
        data: Calibration data, as `batches_of` takes them.
    """
    inputs, _ = next(batches_of(data, 1))
    model(keras.tree.map_structure(lambda array: keras.ops.convert_to_tensor(array[:1]), inputs), training=False)


def build_from_batch(model, batches: Any) -> Any:
    """Builds the layers that the model's training step calls, without training, and returns the batches to train on.

    The step is traced on the types and shapes of a batch and never run, so weights, batch statistics and random seeds
    stay unchanged, and optimizers do not update. A step that cannot be traced is run on the first batch inside a
    `keras.StatelessScope`, which discards the step's changes.

    Args:
        model: A compiled Keras model on TensorFlow.
        batches: The iterator that Keras passes to the model's train function, of a `tf.data.Dataset` or any other kind.

    Returns:
        An iterator over the same batches, including the first.

    Raises:
        RuntimeError: The step fails before all layers have their weights.
    """
    import tensorflow as tf

    first = None
    if not isinstance(batches, tf.data.Iterator):
        first, batches = _first(batches)
    try:
        _trace(model, batches.element_spec if first is None else first)
    except Exception as error:  # noqa: BLE001 (the user's own step: reading values while tracing fails in many ways)
        if first is None:
            # A train function of Keras accepts any iterator, so the first batch can be returned to the stream.
            first, batches = _first(batches)
        if not _run_stateless(model, first) and any(True for _ in unbuilt_layers(model)):
            raise RuntimeError(
                f"The model {model.name!r} could not be built from the first batch. Received: {type(error).__name__}: "
                f"{error}. Call the model once on a batch of data before `fit`."
            ) from error
    return batches


def _first(batches: Iterator[Any]) -> tuple[Any, Iterator[Any]]:
    batches, copy = itertools.tee(batches)
    return next(copy, None), batches


def _trace(model, batch: Any) -> None:
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def step(data: Any) -> None:
        model.distribute_strategy.run(model.train_step, args=(data,))

    function = tf.function(step, autograph=False)
    with _without_updates(model):
        function.get_concrete_function(batch)


def _run_stateless(model, batch: Any) -> bool:
    """Returns True if the step completed: it may fail where it uses gradients, which are None inside the scope."""
    with _without_updates(model), keras.StatelessScope():
        try:
            model.train_step(batch)
        except Exception:  # noqa: BLE001 (as above)
            return False
    return True


@contextlib.contextmanager
def _without_updates(model) -> Iterator[None]:
    """Disables the model's optimizer updates and inlines every `tf.function` into its caller, inside the scope."""
    import tensorflow as tf

    # A `tf.function` inside the step would keep a trace without updates, and training would reuse that trace.
    inline = tf.config.functions_run_eagerly()
    tf.config.run_functions_eagerly(True)
    try:
        with around_updates(optimizers_of(model), lambda optimizer, *_: optimizer.iterations):
            yield
    finally:
        tf.config.run_functions_eagerly(inline)
        # Losses added by layers are tensors of the discarded graph; the next trace would read them.
        model._clear_losses()
