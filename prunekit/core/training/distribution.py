"""Training on several replicas: the chief process, and `fit` across replicas. Public as `pk.distribution`."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras

from prunekit.core.runtime import backend, patching
from prunekit.core.training import train_function

__all__ = ["across_replicas", "is_chief"]


def is_chief(strategy: Any = None) -> bool:
    """Returns True in the one process that writes files and emits warnings for all replicas.

    Args:
        strategy: A `tf.distribute` strategy; None uses the strategy in scope. Ignored on JAX, where process 0 is the
            chief, and on PyTorch, where every process is the chief.
    """
    if keras.backend.backend() == "jax":
        import jax

        return jax.process_index() == 0
    if not backend.on_tensorflow():
        return True
    import tensorflow as tf

    resolver = getattr(strategy or tf.distribute.get_strategy(), "cluster_resolver", None)
    if resolver is None or not resolver.task_type:
        return True
    if resolver.task_type == "worker" and "chief" not in resolver.cluster_spec().jobs:
        return resolver.task_id == 0
    return resolver.task_type == "chief"


def speaks_for(model: Any) -> bool:
    """Returns True if this process is the chief of the processes that train the model."""
    return is_chief(getattr(model, "distribute_strategy", None))


@contextlib.contextmanager
def across_replicas(model: Any) -> Iterator[None]:
    """In the scope, `fit` and `evaluate` under a `tf.distribute` strategy read the same data as on one replica.

    Keras 3.15 draws a batch before the first epoch to build the model, which advances a data set that reshuffles in
    each iteration by one; in the scope, Keras draws no batch for a model that is already built. Under
    MultiWorkerMirroredStrategy, Keras fails: it expects a batch of all workers, which no process has, and averages the
    scalar logs of a step along an axis. In the scope, the batch of this process is used, and logs have one axis.

    The model's methods are restored at the end of the scope. Without a strategy, the scope changes nothing.

    Args:
        model: A Keras model made in the strategy's scope; it need not be compiled yet.
    """
    with contextlib.ExitStack() as undo:
        if getattr(model, "_distribute_strategy", None) is not None:
            undo.enter_context(patching.shadowed(model, "_maybe_symbolic_build", functools.partial(_build, model)))
        if _has_workers(model):
            undo.enter_context(train_function.fresh_functions(model))
            # A failed `evaluate` leaves its compiled function in this attribute.
            model.test_function = None
            for name in ("train_step", "test_step"):
                undo.enter_context(patching.wrapped(model, name, _with_an_axis))
        yield


def _has_workers(model: Any) -> bool:
    if not backend.on_tensorflow():
        return False
    import tensorflow as tf

    strategy = model.distribute_strategy
    resolver = getattr(strategy, "cluster_resolver", None)
    return isinstance(strategy, tf.distribute.MultiWorkerMirroredStrategy) and bool(resolver and resolver.task_type)


def _with_an_axis(step: Callable[..., Any]) -> Callable[..., Any]:
    def logs_of(data: Any) -> Any:
        return keras.tree.map_structure(lambda log: keras.ops.expand_dims(log, 0), step(data))

    return logs_of


def _build(model: Any, iterator: Any = None, data_batch: Any = None) -> None:
    strategy = model.distribute_strategy
    parts = (model._compile_metrics, model._compile_loss, *model._flatten_layers())
    if iterator is not None and not all(part is None or part.built for part in parts):
        _, _, batches = next(iter(iterator))
        data_batch = next(batches)
    data_batch = keras.tree.map_structure(
        lambda part: part if part is None else strategy.experimental_local_results(part)[0], data_batch
    )
    with strategy.scope():
        model._symbolic_build(data_batch=data_batch)
