"""Builds what a model lacks from the first batch of `fit`, as Keras does when it traces the first training step."""

import contextlib
import itertools
from collections.abc import Iterator
from typing import Any

import keras

from prunekit.anatomy.targets import unbuilt_layers
from prunekit.training import core


def waits_for_data(model) -> bool:
    """Whether layers of the model get their weights when `fit` traces its first step, after its callbacks began.

    True on TensorFlow alone. On the other backends, and under a distribution strategy, Keras builds the model from a
    batch before it calls any callback.
    """
    if not core.on_tensorflow() or getattr(model, "_distribute_strategy", None) is not None:
        return False
    return any(True for _ in unbuilt_layers(model)) or not (model.built or model.weights)


def build_from_batch(model, batches: Any) -> Any:
    """Builds the layers that the model's training step calls, without training; returns the batches to train on.

    The step is traced on the types and shapes of a batch and never run, so weights, batch statistics and random seeds
    are as they were, and optimizers are not asked to update. A model that runs eagerly and cannot be traced takes its
    step on the first batch inside a `keras.StatelessScope`, which throws away what the step changes.

    Args:
        model: A compiled Keras model on TensorFlow.
        batches: What Keras passes to the model's train function: an iterator of a `tf.data.Dataset`, or any other.

    Returns:
        An iterator with the same batches, the first one included.

    Raises:
        Exception: Whatever the model's own step raises when it is traced.
    """
    import tensorflow as tf

    try:
        if isinstance(batches, tf.data.Iterator):
            _trace(model, batches.element_spec)
            return batches
        batches, copy = itertools.tee(batches)
        for first in itertools.islice(copy, 1):
            _trace(model, first)
        return batches
    except Exception:
        if not model.run_eagerly:
            raise
    # Keras takes any iterator where it runs eagerly, so the first batch can be put back.
    batches, copy = itertools.tee(batches)
    for first in itertools.islice(copy, 1):
        _run_stateless(model, first)
    return batches


def _trace(model, batch: Any) -> None:
    import tensorflow as tf

    @tf.autograph.experimental.do_not_convert
    def step(data: Any) -> None:
        model.distribute_strategy.run(model.train_step, args=(data,))

    with _without_updates(model):
        tf.function(step, autograph=False).get_concrete_function(batch)


def _run_stateless(model, batch: Any) -> None:
    # The step may stop anywhere: variables have no gradients inside the scope. What it reached is built then.
    with contextlib.suppress(Exception), _without_updates(model), keras.StatelessScope():
        model.train_step(batch)


@contextlib.contextmanager
def _without_updates(model) -> Iterator[None]:
    """Inside, the model's optimizers update nothing, and losses that layers add are forgotten at the end."""
    with core.around_updates(core.optimizers_of(model), lambda optimizer, *_: optimizer.iterations):
        try:
            yield
        finally:
            # Tensors of a graph that is gone would be read by the next trace.
            model._clear_losses()
