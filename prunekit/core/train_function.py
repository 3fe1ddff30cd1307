"""Temporary replacements for a model's train function, and lookup of the calling callback list."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import keras

from prunekit.core import compilation, jax_state


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
        self._build()

    def _build(self) -> None:
        self._original = self._model.train_function
        # Inside the scope: on JAX, how a step's state is laid out over devices is settled here.
        with self._scope(), jax_state.fresh_step(self._model):
            self._model.make_train_function(force=True)
        self._scoped, self._model.train_function = self._model.train_function, self._original

    def fits(self, model) -> bool:
        """Whether the model would still run the train function that this one was made beside: then so may this one."""
        return model is self._model and model.train_function is self._original

    def arm(self) -> None:
        """Makes the next call of the model's train function run the scoped function."""
        current = self._model.train_function
        if current is self._run_once:
            return
        if current is not self._original and not _is_scoped(current):
            # A callback built it anew, as one that unfreezes layers does: what it changed is to be traced.
            self._build()
        self._original, self._model.train_function = current, self._run_once

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
        state = jax_state.StateOfFit(self._model)
        with self._scope():
            return state.call(self._original if _is_scoped(self._original) else self._scoped, *args)


class _PreparedCall:
    """Stands in for the model's train function for one call, which first prepares what is to be called."""

    def __init__(self, model, prepare: Callable[[Any], Any]):
        self._model, self._prepare = model, prepare
        self._original = model.train_function

    def call(self, batches):
        self._model.train_function = self._original
        batches = self._prepare(batches)
        return self._model.train_function(batches)


def prepare_next_call(model, prepare: Callable[[Any], Any]) -> None:
    """When the model's train function is called next, calls `prepare(batches)` first.

    Then the train function that the model has by that time is called with the batches that `prepare` returned.
    """
    model.train_function = _PreparedCall(model, prepare).call


def _is_scoped(train_function) -> bool:
    return isinstance(getattr(train_function, "__self__", None), ScopedTrainFunction | _PreparedCall)


@contextlib.contextmanager
def fresh_train_function(model) -> Iterator[None]:
    """Inside, the model traces a new train function; at the end it has its former one back.

    For loops of `train_on_batch`: a function traced earlier would not see what is attached now. Scopes may be left in
    any order: those entered later trace anew then, without what was left.
    """
    if not hasattr(model, "train_function"):
        yield
        return
    # In the instance for as long as a scope is open, and not in a table of ours, which would keep the model alive.
    opened = vars(model).setdefault(_OPENED, [])
    mine = _FormerFunction(model)
    opened.append(mine)
    model.train_function = None
    try:
        with jax_state.fresh_step(model):
            yield
    finally:
        later = opened[opened.index(mine) + 1 :]
        opened.remove(mine)
        for one in reversed(later):
            # What later scopes found was traced in this one. The next one gives back what this one found instead.
            same = one is later[0] and one.compiled_as is mine.compiled_as
            one.function = mine.function if same else None
        # A model that was compiled anew meanwhile has no use for a function that updates with its old optimizer.
        keep = not later and getattr(model, "_compile_config", None) is mine.compiled_as
        model.train_function = mine.function if keep else None
        if not opened:
            del vars(model)[_OPENED]


_OPENED = "_train_functions_before_scopes"


class _FormerFunction:
    """The train function that a scope found, and what the model was compiled with then."""

    def __init__(self, model):
        self.function = model.train_function
        self.compiled_as = getattr(model, "_compile_config", None)


@contextlib.contextmanager
def fresh_functions(model) -> Iterator[None]:
    """Inside, whatever the model and the loops on the core compile is traced anew; at the end its former state is back.

    For what is to be traced into steps, and to leave no trace.
    """
    forward = {name: getattr(model, name) for name in ("test_function", "predict_function") if hasattr(model, name)}
    with compilation.fresh_traces(), fresh_train_function(model):
        try:
            yield
        finally:
            for name, former in forward.items():
                if getattr(model, name) is not former:
                    setattr(model, name, None)


def callback_list_above() -> keras.callbacks.CallbackList | None:
    """The list that is calling the callback from which this is called; None where something else calls it.

    Keras does not tell a callback what list it is in, and only the list has an end: callbacks listed after ours write
    weights after us (EarlyStopping restores its best ones in on_train_end) and raise after us.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None
