"""The one place that knows the backend, its devices and compilers, and where optimizers hide in models."""

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from numbers import Real
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers import leaves_of


def compiled(function: Callable[..., Any], *, open_shapes: bool = False) -> Callable[..., Any]:
    """`function`, a pure function of tensors, compiled for the backend: traced once per shape and type.

    PyTorch runs it as it is: its operations are dispatched eagerly, and a compiler would cost more than it saves here.

    Args:
        function: Works on the backend's tensors.
        open_shapes: On TensorFlow, one trace serves all lengths of each axis; what the function returns may have no
            static shape then.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Where one compiled function calls another twenty times, TensorFlow would copy it as often into the caller, and
        # optimise each copy: a second, for a small network.
        options: dict[str, Any] = {"experimental_attributes": {"_noinline": True}}
        if open_shapes:
            return OpenFunction(function, closed_from=None, pure=True, **options)
        traced = tf.function(function, autograph=False, **options)
        # TensorFlow counts traces by line of code, so one function per shape looks to it like one that is traced again
        # and again, and it warns. There is no public way to tell it.
        traced._omit_frequent_tracing_warning = True
        return traced
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


class _Tracing:
    """What was traced under the same circumstances."""


class _Circumstances:
    """What holds until a scope is left, with the traces made while it does."""

    def __init__(self) -> None:
        self.tracing = _Tracing()


_CIRCUMSTANCES = [_Circumstances()]


@contextlib.contextmanager
def traced_anew() -> Iterator[None]:
    """Every `OpenFunction` has traces of its own inside, which go with it: the place for what a step is traced with.

    Scopes may be left in any order: those entered later trace anew then, without what was left.
    """
    mine = _Circumstances()
    _CIRCUMSTANCES.append(mine)
    try:
        yield
    finally:
        place = _CIRCUMSTANCES.index(mine)
        del _CIRCUMSTANCES[place]
        for later in _CIRCUMSTANCES[place:]:
            later.tracing = _Tracing()


class OpenFunction:
    """A function compiled by TensorFlow with one trace for all lengths of its arguments' open axes.

    Args:
        function: Takes and returns structures of tensors; None is allowed among its arguments.
        closed_from: Axes from this one on have a static length in the trace. 1 leaves the number of examples open, so
            that the last, smaller batch of an epoch costs no second trace; None leaves every axis open.
        xla: Whether XLA compiles it (then once per shape).
        pure: Whether it depends on its arguments alone, so that `traced_anew` does not concern it.
        **options: For `tf.function`.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        closed_from: int | None = 1,
        xla: bool = False,
        pure: bool = False,
        **options: Any,
    ):
        self._python_function = function
        self._closed_from = closed_from
        self._pure = pure
        self._options = {"autograph": False, "jit_compile": xla or None, **options}
        self._traced: weakref.WeakKeyDictionary[_Tracing, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()

    @property
    def traces(self) -> int:
        """How often the function was traced."""
        return self._function.experimental_get_tracing_count()

    @property
    def graphs(self) -> list[Any]:
        """The graph of each trace, the first one first."""
        function, signatures = self._now()
        return [function.get_concrete_function(*specs).graph for specs in signatures.values()]

    def __call__(self, *arguments: Any) -> Any:
        arguments = keras.tree.map_structure(_tensor, arguments)
        specs = keras.tree.map_structure(self._open, arguments)
        signature = repr(specs)
        function, signatures = self._now()
        if signature not in signatures:
            signatures[signature] = specs
            function.get_concrete_function(*specs)
        # TensorFlow finds the trace whose specification these tensors meet.
        return function(*arguments)

    @property
    def _function(self) -> Any:
        return self._now()[0]

    def _now(self) -> tuple[Any, dict[str, Any]]:
        import tensorflow as tf

        tracing = _CIRCUMSTANCES[0 if self._pure else -1].tracing
        if tracing not in self._traced:
            self._traced[tracing] = tf.function(self._python_function, **self._options), {}
        return self._traced[tracing]

    def _open(self, leaf: Any) -> Any:
        import tensorflow as tf

        if leaf is None:
            return None
        closed = leaf.shape[self._closed_from :] if self._closed_from is not None else []
        return tf.TensorSpec([None] * (leaf.shape.rank - len(closed)) + list(closed), leaf.dtype)


def _tensor(value: Any) -> Any:
    import tensorflow as tf

    if isinstance(value, keras.Variable):
        return value_now(value)
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)


@contextlib.contextmanager
def shadowed(owner: Any, name: str, value: Any) -> Iterator[None]:
    """An instance attribute over a method or a property's value, and whatever was in the instance before put back."""
    # Through __dict__: Keras objects track what is assigned to them, and this is not theirs to track.
    attributes = vars(owner)
    missing = object()
    former = attributes.get(name, missing)
    attributes[name] = value
    try:
        yield
    finally:
        if former is missing:
            del attributes[name]
        else:
            attributes[name] = former


@contextlib.contextmanager
def wrapped(owner: Any, name: str, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """A method of one instance as `wrap(method)`. Who wraps it several times may leave in any order."""
    attributes = vars(owner)
    wrapping = attributes.get(name)
    if not isinstance(wrapping, _Wrapping):
        wrapping = _Wrapping(owner, name)
    mine = wrapping.enter(wrap)
    try:
        yield
    finally:
        wrapping.leave(mine)


class _Wrapping:
    """Stands in an instance before a method that is wrapped, while it is."""

    def __init__(self, owner: Any, name: str):
        functools.update_wrapper(self, getattr(owner, name))
        self._method = self._outermost = getattr(owner, name)
        self._wraps: list[tuple[Callable[..., Any]]] = []
        self._shadow = contextlib.ExitStack()
        self._shadow.enter_context(shadowed(owner, name, self))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._outermost(*args, **kwargs)

    def enter(self, wrap: Callable[..., Any]) -> Any:
        self._wraps.append((wrap,))
        self._outermost = wrap(self._outermost)
        return self._wraps[-1]

    def leave(self, one: Any) -> None:
        self._wraps = [other for other in self._wraps if other is not one]
        self._outermost = functools.reduce(lambda inner, each: each[0](inner), self._wraps, self._method)
        if not self._wraps:
            self._shadow.close()


@contextlib.contextmanager
def around_updates(optimizers: Sequence[Any], around: Callable[..., Any]) -> Iterator[None]:
    """Inside, every `apply` of the optimizers is `around(optimizer, update, gradients, variables)`, also when traced.

    `apply` is the one method through which `fit`, `apply_gradients` and tape loops pass. It is shadowed on the
    instance, so the optimizer's class, config and saved state are untouched. `update(gradients)` is its own `apply`.
    """
    with contextlib.ExitStack() as stack:
        for optimizer in optimizers:
            reached = _reached(optimizer)
            stack.enter_context(wrapped(reached, "apply", functools.partial(_Apply, reached, around)))
        yield


def _reached(optimizer) -> Any:
    """The one whose `apply` is called: on JAX, a LossScaleOptimizer goes around its own."""
    while keras.backend.backend() == "jax" and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    return optimizer


class _Apply:
    """Stands before `optimizer.apply`, with its signature."""

    def __init__(self, optimizer: Any, around: Callable[..., Any], inner: Callable[..., Any]):
        self._optimizer = optimizer
        self._around = around
        self._inner = inner

    def __call__(self, grads, trainable_variables=None):
        if trainable_variables is None:
            variables = list(self._optimizer._trainable_variables) if self._optimizer.built else []
            if len(variables) != len(grads):
                return self._inner(grads)  # Keras says what is wrong.
        else:
            variables = trainable_variables = list(trainable_variables)
        return self._around(
            self._optimizer, lambda gradients: self._inner(gradients, trainable_variables), grads, variables
        )


def on_tensorflow() -> bool:
    """Whether Keras runs on TensorFlow, the home of what is collected inside training steps."""
    return keras.backend.backend() == "tensorflow"


def compiled_effect(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function`, which takes nothing, and reads or assigns variables, compiled where the backend can compile that."""
    return compiled(function) if keras.backend.backend() == "tensorflow" else function


def require_tensorflow(name: str) -> None:
    """Refuses another backend in one line.

    Raises:
        RuntimeError: Keras runs on another backend.
    """
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"{name} is made of tf.GradientTape and TensorFlow variables. Received: the {keras.backend.backend()} "
            "backend. Run with KERAS_BACKEND=tensorflow."
        )


def examples_in(**arrays: Any) -> int:
    """The number of examples in arrays, or structures of them, that lie along their first axes; None counts nothing.

    Raises:
        ValueError: There are none, or the lengths differ.
    """
    found = {
        name: sorted({len(leaf) for leaf in keras.tree.flatten(array) if leaf is not None})
        for name, array in arrays.items()
    }
    lengths = {length for each in found.values() for length in each}
    if len(lengths) != 1 or 0 in lengths:
        listed = ", ".join(f"{name} with {' and '.join(map(str, each))}" for name, each in found.items() if each)
        raise ValueError(f"Arrays have one row per example, and at least one. Received: {listed}.")
    return lengths.pop()


def require_positive(**numbers: int | None) -> None:
    """Refuses counts that are not whole numbers above zero; None passes.

    Raises:
        ValueError: One is not.
    """
    for name, value in numbers.items():
        whole = isinstance(value, Real) and not isinstance(value, bool) and value == value // 1
        if value is not None and not (whole and value >= 1):
            raise ValueError(f"`{name}` is a whole number above zero. Received: {name}={value!r}.")


def require_one_replica(name: str, remedy: str) -> None:
    """Refuses a distribution strategy of several replicas.

    Raises:
        RuntimeError: One is in scope; the message ends in `remedy`.
    """
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    if strategy.num_replicas_in_sync > 1:
        raise RuntimeError(
            f"{name} works on one replica. Received: {type(strategy).__name__} with "
            f"{strategy.num_replicas_in_sync} replicas. {remedy}"
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
    """The backend's own variable under a Keras one (itself if it is one already): the identity both kinds share.

    JAX has none: a Keras variable is given another array by every update, and is itself what stays.
    """
    return variable if keras.backend.backend() == "jax" else getattr(variable, "_value", variable)


def value_now(variable) -> Any:
    """A tensor with what a variable holds at this moment, whatever is assigned to it later.

    On TensorFlow `keras.ops.convert_to_tensor` returns the Keras variable itself: it is read where it is used, and a
    `tf.function` that is given one takes it through NumPy and back, which costs more than choosing masks does.
    """
    if keras.backend.backend() != "tensorflow":
        return keras.ops.convert_to_tensor(variable)
    return native(variable).read_value()


def select(mask, value, rest: float = 0.0) -> Any:
    """`value` where the mask is True, elsewhere `rest`, in the type of `value`."""
    # Select, not multiply: 0 * inf is nan and 0 * -3 is -0.
    value = keras.ops.convert_to_tensor(value)
    return keras.ops.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype))


def fill_outside(mask, variable, rest: float = 0.0) -> None:
    """Writes `rest` into a variable wherever the mask is False."""
    value = keras.ops.convert_to_tensor(variable)
    if keras.backend.backend() == "torch" and value is native(variable):
        import torch

        # In place: a new array of the size, and copying it, would take twice as long as the rest. Inside a
        # StatelessScope the value is another, which is not ours to change.
        with torch.no_grad():
            torch.where(keras.ops.convert_to_tensor(mask), value, keras.ops.cast(rest, value.dtype), out=value)
    else:
        variable.assign(select(mask, value, rest))


def number(scalar) -> float | int:
    """What a scalar variable or tensor holds, as a Python number."""
    # Keras's convert_to_numpy makes NumPy 2 warn of TensorFlow's variables.
    return np.asarray(scalar.numpy() if hasattr(scalar, "numpy") else scalar).item()


def optimizers_of(model) -> list[keras.optimizers.Optimizer]:
    """The optimizer the model was compiled with, and others that it holds (as a GAN does), also in lists and dicts."""
    held = [getattr(model, "optimizer", None), *vars(model).values()]
    found: dict[int, keras.optimizers.Optimizer] = {}
    for value in held:
        for optimizer, _ in leaves_of(value, keras.optimizers.Optimizer):
            found.setdefault(id(optimizer), optimizer)
    inner = {id(part) for optimizer in found.values() for part in parts_of(optimizer) if part is not optimizer}
    return [optimizer for key, optimizer in found.items() if key not in inner]


def optimizers_for(model, optimizer: Any, remedy: str = "") -> list[keras.optimizers.Optimizer]:
    """The optimizer given, or several, as a list; those of the model where it is None.

    Raises:
        TypeError: It is none; the message ends in `remedy`.
    """
    if optimizer is None:
        return optimizers_of(model)
    optimizers = list(optimizer) if isinstance(optimizer, list | tuple) else [optimizer]
    for one in optimizers or [optimizer]:
        if not isinstance(one, keras.optimizers.Optimizer):
            raise TypeError(f"`optimizer` is a Keras optimizer, or a list of them{remedy}. Received: {one!r}.")
    return optimizers


def parts_of(optimizer) -> list[keras.optimizers.Optimizer]:
    """The optimizers that do the updates: those inside a LossScaleOptimizer or a MultiOptimizer, or itself."""
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        return parts_of(optimizer.inner_optimizer)
    inner = getattr(optimizer, "optimizers", None)
    if isinstance(inner, list | tuple) and inner:
        return [part for one in inner for part in parts_of(one)]
    return [optimizer]


def updates_in(batches: int, optimizers: Sequence[keras.optimizers.Optimizer]) -> int:
    """How many updates the optimizers make in so many batches: fewer where they accumulate gradients."""
    parts = [part for optimizer in optimizers for part in parts_of(optimizer)]
    return batches // max((part.gradient_accumulation_steps or 1 for part in parts), default=1)
