"""Compilation of functions for the backend, and control over when they are traced again."""

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras

from prunekit.core.runtime import backend


def compiled(function: Callable[..., Any], *, open_shapes: bool = False) -> Callable[..., Any]:
    """Compiles `function`, a pure function of tensors, for the backend; it is traced once per shape and dtype.

    On PyTorch it returns `function` unchanged: operations run eagerly there, and compiling costs more than it saves.

    Args:
        function: Takes and returns tensors of the backend.
        open_shapes: On TensorFlow, one trace serves all lengths of each axis; tensors that the function returns may
            then have no static shape.
    """
    if keras.backend.backend() == "tensorflow":
        import tensorflow as tf

        # Without "_noinline", a compiled function that calls another one twenty times gets twenty copies of it inlined
        # and optimised by TensorFlow: a second, for a small network.
        options: dict[str, Any] = {"experimental_attributes": {"_noinline": True}}
        if open_shapes:
            return OpenFunction(function, closed_from=None, pure=True, **options)
        traced = tf.function(function, autograph=False, **options)
        # TensorFlow counts traces by line of code, so one function per shape counts as one function traced too often,
        # and TensorFlow warns. No public option disables the warning.
        traced._omit_frequent_tracing_warning = True
        return traced
    if keras.backend.backend() == "jax":
        import jax

        return jax.jit(function)
    return function


def shared_in_traces(function: Callable[..., Any]) -> Callable[..., Any]:
    """On TensorFlow, makes all calls of `function` while others are traced calls of one trace, for all lengths.

    A model of many layers calls the same few operations hundreds of times. Each operation of a trace, and each of its
    gradient, takes a millisecond; a call of a function takes about as long as one operation.

    Args:
        function: Pure function of tensors; its result has the shape of its first argument.
    """
    if keras.backend.backend() != "tensorflow":
        return function
    shared = OpenFunction(function, closed_from=None, pure=True)

    def call(first: Any, *others: Any) -> Any:
        if not backend.inside_graph():
            return function(first, *others)
        result = shared(first, *others)
        result.set_shape(first.shape)
        return result

    return call


def compiled_reader(function: Callable[..., Any], variables: Sequence[Any]) -> Callable[..., Any]:
    """Compiles `function`, which reads variables besides its arguments, for the backend.

    It is traced once for all numbers of examples on TensorFlow, once per shape on JAX, and never on PyTorch.

    Args:
        function: Takes and returns structures of tensors; on JAX, what it assigns to variables is lost.
        variables: The Keras variables that it may read.
    """
    if keras.backend.backend() == "tensorflow":
        return OpenFunction(function)
    if keras.backend.backend() != "jax":
        return function
    import jax

    def pure(values: list[Any], *arguments: Any) -> Any:
        with keras.StatelessScope(state_mapping=list(zip(variables, values, strict=True))):
            return function(*arguments)

    traced = jax.jit(pure)
    # JAX treats values that a compiled function reads outside its arguments as constants.
    return lambda *arguments: traced([variable.value for variable in variables], *arguments)


def compiled_effect(function: Callable[[], Any]) -> Callable[[], Any]:
    """Compiles `function`, which takes no arguments and reads or assigns variables, on TensorFlow only."""
    return compiled(function) if keras.backend.backend() == "tensorflow" else function


class _TraceKey:
    """Cache key of the traces made in one tracing scope."""


class _TracingScope:
    """A tracing scope and the cache key of the traces made in it."""

    def __init__(self) -> None:
        self.tracing = _TraceKey()


_SCOPES = [_TracingScope()]


@contextlib.contextmanager
def fresh_traces() -> Iterator[None]:
    """Makes every `OpenFunction` trace again inside the scope; afterwards, its former traces are used again.

    For scopes that change how a step is traced. Scopes may close in any order: when a scope closes, all scopes that
    were entered later trace again, because their traces contain the changes of the closed scope.
    """
    mine = _TracingScope()
    _SCOPES.append(mine)
    try:
        yield
    finally:
        place = _SCOPES.index(mine)
        del _SCOPES[place]
        for later in _SCOPES[place:]:
            later.tracing = _TraceKey()


class OpenFunction:
    """A function compiled by TensorFlow with one trace for all lengths of its arguments' open axes.

    Args:
        function: Takes and returns structures of tensors; None is allowed among its arguments.
        closed_from: First axis with a static length in the trace; later axes are static as well. 1 leaves the number
            of examples open, so a smaller last batch of an epoch needs no second trace; None leaves every axis open.
        xla: True compiles the function with XLA, once per shape.
        pure: True if the result depends only on the arguments; `fresh_traces` then has no effect on the function.
        **options: Keyword arguments of `tf.function`.
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
        self._traced: weakref.WeakKeyDictionary[_TraceKey, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()

    @property
    def traces(self) -> int:
        """Number of times that the function was traced."""
        return self._function.experimental_get_tracing_count()

    @property
    def graphs(self) -> list[Any]:
        """Graph of each trace, in order of tracing."""
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
        # TensorFlow selects the trace whose input specification matches these tensors.
        return function(*arguments)

    @property
    def _function(self) -> Any:
        return self._now()[0]

    def _now(self) -> tuple[Any, dict[str, Any]]:
        import tensorflow as tf

        tracing = _SCOPES[0 if self._pure else -1].tracing
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
        return backend.value_now(value)
    return value if value is None or tf.is_tensor(value) else tf.convert_to_tensor(value)
