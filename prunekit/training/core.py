"""The one place that knows the backend, where optimizers hide in models, and how `fit` runs its train function."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, a pure function of tensors, compiled for the backend: traced once per shape and type.

    PyTorch runs it as it is: its operations are dispatched eagerly, and a compiler would cost more than it saves here.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        return tf.function(function, autograph=False)
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


def require_masks_in_steps() -> None:
    """Refuses the backend on which a mask would be a constant of the compiled step, and so never change.

    Raises:
        RuntimeError: Keras runs on JAX.
    """
    if keras.backend.backend() == "jax":
        raise RuntimeError(
            "Pruning during training needs Keras's TensorFlow backend. Received: the JAX backend, which takes "
            "variables that are not part of the model for constants. Train with KERAS_BACKEND=tensorflow, or prune "
            "after training with pk.prune."
        )


def inside_graph() -> bool:
    """Whether the caller is being traced into a graph, where Python runs once and not at every step."""
    if keras.backend.backend() != "tensorflow":
        return False
    import tensorflow as tf

    return tf.inside_function()


def variable_scope(model) -> contextlib.AbstractContextManager:
    """Where variables that live beside the model's must be created: under its distribution strategy, if it has one."""
    strategy = getattr(model, "distribute_strategy", None)
    return strategy.scope() if strategy is not None else contextlib.nullcontext()


def native(variable) -> Any:
    """The backend's own variable under a Keras one (itself if it is one already): the identity both kinds share."""
    return getattr(variable, "_value", variable)


def optimizers_of(model) -> list[keras.optimizers.Optimizer]:
    """The optimizer the model was compiled with, and others that it holds as attributes (as a GAN does)."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in held:
        if isinstance(value, keras.optimizers.Optimizer):
            found.setdefault(id(value), value)
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def parts_of(optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that do the updates: those inside a LossScaleOptimizer or a MultiOptimizer, or itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return parts_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, list | tuple) and inner:
        return [part for one in inner for part in parts_of(one)]
    return [optimizer]


class ScopedTrainFunction:
    """The model's train function compiled anew, and run inside a scope for one batch at a time.

    `fit` reads `model.train_function` before each batch, and builds it before any callback runs; on a model that was
    fitted before it is already traced, so whatever a callback changes then is ignored. A second function, traced only
    inside the scope, cures that. It stands in the model's place from `arm()` until its one call begins, so that
    between batches, when other callbacks save, evaluate, raise or are interrupted, the model is the user's own.
    """

    def __init__(self, model, scope: Callable[[], contextlib.AbstractContextManager]):
        self._model = model
        self._scope = scope
        self._original = model.train_function
        model.make_train_function(force=True)
        self._scoped = model.train_function
        model.train_function = self._original

    def arm(self) -> None:
        """The next call of the model's train function is this one."""
        if self._model.train_function is not self._run_once:
            self._original = self._model.train_function
            self._model.train_function = self._run_once

    def disarm(self) -> None:
        """The model's own train function is back; nothing happens where it already is."""
        if self._model.train_function is self._run_once:
            self._model.train_function = self._original

    @property
    def _run_once(self):
        # One object for `is`: a bound method is made anew at each access.
        return self.__dict__.setdefault("_bound", self._call)

    def _call(self, *args):
        self.disarm()
        # Two callbacks in one fit: the one that was armed first runs inside the scope of the other, traced in both.
        nested = isinstance(getattr(self._original, "__self__", None), ScopedTrainFunction)
        with self._scope():
            return self._original(*args) if nested else self._scoped(*args)


@contextlib.contextmanager
def fresh_train_function(model) -> Iterator[None]:
    """Inside, the model traces a new train function; at the end it has its former one back.

    For loops of `train_on_batch`: a function traced earlier would not see what is attached now.
    """
    if not hasattr(model, "train_function"):
        yield
        return
    former, model.train_function = model.train_function, None
    try:
        yield
    finally:
        model.train_function = former


def after_all_callbacks(model, function: Callable[[], None]) -> bool:
    """Has `function` called once when the `fit` that is ending has called every callback; False where it cannot.

    Callbacks listed after ours write weights after us (EarlyStopping restores its best ones in on_train_end). Keras
    appends its own History to the end of the list, so that is where the last word is spoken.
    """
    history = getattr(model, "history", None)
    if not isinstance(history, keras.callbacks.History):
        return False

    def on_train_end(logs=None):
        del vars(history)["on_train_end"]
        history.on_train_end(logs)
        function()

    vars(history)["on_train_end"] = on_train_end
    return True
