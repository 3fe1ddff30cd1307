"""Functions compiled for the backend, and when they are traced again."""

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import keras

from prunekit.core import backend


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


def compiled_effect(function: Callable[[], Any]) -> Callable[[], Any]:
    """`function`, which takes nothing, and reads or assigns variables, compiled where the backend can compile that."""
    return compiled(function) if keras.backend.backend() == "tensorflow" else function


class _TraceKey:
    """Cache key of the traces made in one tracing scope."""


class _TracingScope:
    """One tracing scope, with the key of the traces made in it."""

    def __init__(self) -> None:
        self.tracing = _TraceKey()


_SCOPES = [_TracingScope()]


@contextlib.contextmanager
def fresh_traces() -> Iterator[None]:
    """Inside, every `OpenFunction` is traced anew; its former traces are used again afterwards.

    For scopes that change how a step is traced. Scopes may be left in any order: when one is left, the scopes that were
    entered later trace anew, since their traces contain the one that was left.
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
        closed_from: Axes from this one on have a static length in the trace. 1 leaves the number of examples open, so
            that the last, smaller batch of an epoch costs no second trace; None leaves every axis open.
        xla: Whether XLA compiles it (then once per shape).
        pure: Whether it depends on its arguments alone, so that `fresh_traces` does not concern it.
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
        self._traced: weakref.WeakKeyDictionary[_TraceKey, tuple[Any, dict[str, Any]]] = weakref.WeakKeyDictionary()

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
