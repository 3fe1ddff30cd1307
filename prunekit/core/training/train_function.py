"""Temporary replacements for a model's train function, and lookup of the calling callback list."""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from prunekit.core.runtime import backend, compilation, jax_state, patching
from prunekit.core.runtime.optimizers import optimizers_of, parts_of


class ScopedFunction:
    """A second compilation of the model's train or test function, which runs inside a scope, one batch at a time.

    `fit` builds `model.train_function` before any callback runs and reads it before each batch; on a model that was
    fitted before, it is already traced, so changes by a callback have no effect. This second function is traced only
    inside the scope. It replaces `model.train_function` from `arm()` until its single call begins, so between
    batches, when other callbacks save, evaluate, raise or are interrupted, the model has its own train function. The
    same holds for `model.test_function`.

    Args:
        model: The compiled model.
        scope: Returns the context in which the function is traced and runs.
        kind: "train" or "test".
    """

    def __init__(self, model, scope: Callable[[], contextlib.AbstractContextManager], kind: str = "train"):
        self._model = model
        self._scope = scope
        self._kind = kind
        # What a trace contains, once there is one.
        self._contents: tuple[list[Any], list[Any]] | None = None
        # Whether this object's function was only ever called, and so traced, in its own scope.
        self._alone = True
        # The functions in whose scopes it was traced, besides its own.
        self._around: tuple[ScopedFunction, ...] | None = None
        self._build()

    @property
    def _current(self) -> Any:
        return getattr(self._model, f"{self._kind}_function")

    @_current.setter
    def _current(self, function: Any) -> None:
        setattr(self._model, f"{self._kind}_function", function)

    def _build(self) -> None:
        self._original = self._current
        self._contents, self._optimizers = None, optimizers_of(self._model)
        # Inside the scope: on JAX, building fixes the layout of the step's state over devices.
        with self._scope(), jax_state.fresh_step(self._model, f"{self._kind}_step"):
            getattr(self._model, f"make_{self._kind}_function")(force=True)
        self._scoped, self._current = self._current, self._original
        self._around = None

    def fits(self, model) -> bool:
        """Returns True if the model's function is unchanged since this object was built: the object is reusable."""
        return model is self._model and self._current is self._original

    def use(self, scope: Callable[[], contextlib.AbstractContextManager]) -> None:
        """Replaces the scope, by one in which a trace would contain the same."""
        self._scope = scope

    def keep(self, scope: Callable[[], contextlib.AbstractContextManager], owner: Any, name: str) -> None:
        """Keeps this object with the model's function, for `kept`; what was traced is not traced again.

        Nothing is kept if the trace may contain more than the model's step and this object's own scope, or if what it
        contains has changed since.

        Args:
            scope: Replaces this object's scope and has the same effect, but keeps fewer objects alive.
            owner: What the next user of this object needs to know.
            name: The kind of scope; one object of each is kept.
        """
        if backend.on_tensorflow() and self._alone and self.fits(self._model) and hasattr(self._original, "__dict__"):
            if self._contents is not None and _are_same(self._contents, _contents(self._model)):
                self._scope = scope
                vars(self._original).setdefault(_KEPT, {})[name] = self, owner

    def arm(self) -> None:
        """Makes the next call of the model's function run the scoped function."""
        current = self._current
        if current is self._run_once:
            return
        if current is not self._original and not _is_scoped(current):
            # A callback, for example one that unfreezes layers, rebuilt it: trace the callback's changes.
            self._build()
        self._original, self._current = current, self._run_once

    def disarm(self) -> None:
        """Restores the model's own function; does nothing if it is already in place."""
        if self._current is self._run_once:
            self._current = self._original

    @property
    def _run_once(self):
        # Cached for comparisons with `is`: each access to a method creates a new bound method.
        return self.__dict__.setdefault("_bound", self._call)

    def _call(self, *args):
        self.disarm()
        if self._kind == "train":
            create_step_state(self._model, *args[-1:])
        if self._contents is None:
            # Read here, where the function is traced, and after variables of metrics were created.
            self._contents = _contents(self._model)
        # Two callbacks in one fit: the function armed first runs inside the scope of the other, traced in both scopes.
        inner = _is_scoped(self._original)
        if not inner:
            self._trace_around()
        state = jax_state.StateOfFit(self._model)
        self._alone = self._alone and _are_unwrapped(self._optimizers)
        _running.append(self)
        try:
            with self._scope():
                return state.call(self._original if inner else self._scoped, *args)
        finally:
            _running.pop()

    def _trace_around(self) -> None:
        """Builds the function again if it was traced in other scopes than those of the functions that call it now."""
        around = tuple(_running)
        if self._around is not None and self._around != around:
            self._build()
        self._around = around


# The functions that run now, the outermost first.
_running: list[ScopedFunction] = []


_KEPT = "_prunekit_scoped_functions"


def kept(model, name: str, kind: str = "train") -> tuple[Any, Any]:
    """Takes the `ScopedFunction` that was kept with the model's function: it and its owner, or twice None.

    Keras discards its functions, and what is kept with them, when the model is compiled again.
    """
    if not backend.on_tensorflow():
        return None, None
    places = getattr(getattr(model, f"{kind}_function", None), "__dict__", {}).get(_KEPT, {})
    function, owner = places.pop(name, (None, None))
    if function is None or not _are_unwrapped(function._optimizers):
        return None, None
    return (function, owner) if _are_same(function._contents, _contents(model)) else (None, None)


def _are_unwrapped(optimizers: Sequence[Any]) -> bool:
    """Returns True outside every scope that observes or changes updates."""
    return not any("apply" in vars(part) for one in optimizers for part in (one, *parts_of(one)))


# Attributes that Keras's loops write, in `evaluate` and `predict` too; no step reads them.
_OF_LOOPS = {"built", "stop_training", "stop_evaluating", "stop_predicting"} | {
    f"{kind}_function" for kind in ("train", "test", "predict")
}


def _contents(model) -> tuple[list[Any], list[Any]]:
    """Returns what a trace of the model's train step contains besides variables' values: objects, and plain values."""
    optimizers = [part for one in optimizers_of(model) for part in (one, *parts_of(one))]
    layers = list(model._flatten_layers())
    objects = [*layers, *optimizers, vars(model).get("train_step"), getattr(model, "_compile_config", None)]
    plain: list[Any] = [getattr(model, name, None) for name in ("run_eagerly", "jit_compile", "steps_per_execution")]
    for variable in model.variables:
        objects += [variable, getattr(variable, "constraint", None), getattr(variable, "regularizer", None)]
        plain += [variable.trainable, tuple(variable.shape)]
    for owner in (*layers, *optimizers):
        public = {name: value for name, value in vars(owner).items() if name[0] != "_" and name not in _OF_LOOPS}
        plain += [(name, value) for name, value in public.items() if isinstance(value, bool | int | float | str)]
        objects += [value for value in public.values() if callable(value)]
        plain.append(getattr(owner, "trainable", None))
    return objects, plain


def _are_same(first: tuple[list[Any], list[Any]], second: tuple[list[Any], list[Any]]) -> bool:
    same = len(first[0]) == len(second[0]) and all(one is other for one, other in zip(first[0], second[0], strict=True))
    return same and first[1] == second[1]


class _PreparedCall:
    """Replaces the model's train function for one call, which runs `prepare` before the model's train function."""

    def __init__(self, model, prepare: Callable[[Any], Any]):
        self._model, self._prepare = model, prepare
        self._original = model.train_function

    def call(self, batches):
        self._model.train_function = self._original
        batches = self._prepare(batches)
        return self._model.train_function(batches)


def prepare_next_call(model, prepare: Callable[[Any], Any]) -> None:
    """Makes the next call of the model's train function call `prepare(batches)` first.

    The call then runs the model's current train function, which `prepare` may replace, on the batches it returned.
    """
    model.train_function = _PreparedCall(model, prepare).call


def _is_scoped(train_function) -> bool:
    return isinstance(getattr(train_function, "__self__", None), ScopedFunction | _PreparedCall)


@contextlib.contextmanager
def fresh_train_function(model) -> Iterator[None]:
    """Makes the model trace a new train function inside the scope, and restores the former one at the end.

    For loops of `train_on_batch`: a function traced earlier would not contain what is attached now. Scopes may close
    in any order: scopes entered later then trace again, without the changes of the closed scope.
    """
    if not hasattr(model, "train_function"):
        yield
        return
    # Stored in the instance while a scope is open; a module-level table would keep the model alive.
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
            # Later scopes hold functions traced in this scope. The next scope restores this scope's function instead.
            same = one is later[0] and one.compiled_as is mine.compiled_as
            one.function = mine.function if same else None
        # If the model was compiled again meanwhile, the former function would update with the old optimizer.
        keep = not later and getattr(model, "_compile_config", None) is mine.compiled_as
        model.train_function = mine.function if keep else None
        if not opened:
            del vars(model)[_OPENED]


_OPENED = "_train_functions_before_scopes"


class _FormerFunction:
    """The train function and compile configuration that a model had when a scope began."""

    def __init__(self, model):
        self.function = model.train_function
        self.compiled_as = getattr(model, "_compile_config", None)


@contextlib.contextmanager
def fresh_functions(model) -> Iterator[None]:
    """Makes the compiled functions of the model and of core loops trace again in the scope; then restores the old ones.

    For scopes whose changes must be part of the traced steps and must not remain afterwards.
    """
    forward = {name: getattr(model, name) for name in ("test_function", "predict_function") if hasattr(model, name)}
    with compilation.fresh_traces(), fresh_train_function(model):
        try:
            yield
        finally:
            for name, former in forward.items():
                if getattr(model, name) is not former:
                    setattr(model, name, None)


@contextlib.contextmanager
def fresh_forward_functions(model) -> Iterator[None]:
    """Makes `evaluate` and `predict` trace new functions inside the scope, and restores the former ones at the end.

    For scopes that change what the model computes, with `fresh_functions`.
    """
    names = [name for name in ("test_function", "predict_function") if hasattr(model, name)]
    former = {name: getattr(model, name) for name in names}
    compiled_as = getattr(model, "_compile_config", None)
    with contextlib.ExitStack() as steps:
        for name in names:
            setattr(model, name, None)
            step = name.replace("function", "step")
            # As in `jax_state.fresh_step`: JAX would use the former trace for an equal bound method.
            steps.enter_context(patching.shadowed(model, step, functools.partial(getattr(model, step))))
        try:
            yield
        finally:
            same = getattr(model, "_compile_config", None) is compiled_as
            for name in names:
                setattr(model, name, former[name] if same else None)


def callback_list_above() -> keras.callbacks.CallbackList | None:
    """Returns the callback list that runs the calling callback; None if something else calls the callback.

    Keras gives a callback no reference to its list, and only the list knows when all callbacks have ended: callbacks
    after this one write weights later (EarlyStopping restores the best weights in on_train_end) and may raise later.
    """
    frame = sys._getframe(1)
    while frame is not None:
        owner = frame.f_locals.get("self")
        if isinstance(owner, keras.callbacks.CallbackList):
            return owner
        frame = frame.f_back  # type: ignore[assignment]
    return None


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
