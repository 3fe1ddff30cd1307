"""Creates the variables that Keras on TensorFlow creates only while it traces the first training step."""

from typing import Any

import keras

from prunekit.core.runtime import backend


def create_step_state(model: Any, batches: Any) -> None:
    """Creates slots of the optimizer and variables of metrics and losses, unless they exist.

    A `tf.function` that creates variables is traced twice, which takes most of the time before the first step of a
    large model. Nothing is done for a model with a training step of its own, whose variables only that step knows, nor
    where Keras has created the variables before `fit` calls its callbacks.

    Args:
        model: A compiled, built Keras model.
        batches: The iterator that Keras passes to the train function; none of its batches is taken.
    """
    if not backend.on_tensorflow() or getattr(model, "_distribute_strategy", None) is not None:
        return
    if model.run_eagerly or type(model).train_step is not keras.Model.train_step or not model.trainable_variables:
        return
    spec = getattr(batches, "element_spec", None)
    if spec is not None and _makes_metrics(model):
        try:
            model._symbolic_build(data_batch=spec)
        except Exception:  # noqa: BLE001, S110 (a metric that reads values: Keras builds it while it traces the step)
            pass
    if not model.optimizer.built:
        model.optimizer.build(model.trainable_variables)


def _makes_metrics(model: Any) -> bool:
    """Returns True if the first step creates variables of metrics: the loss has some only for several outputs."""
    metrics, loss = model._compile_metrics, model._compile_loss
    if metrics is not None and not metrics.built:
        return True
    return loss is not None and not loss.built and len(getattr(model, "outputs", None) or ()) != 1
