"""Which tensors of a symbolic pass get a gradient when the loss depends on every output of the model.

A tensor gets one if a trained weight was used on the way to it and an output depends on it: what is left of a training
step once everything that no weight's gradient needs is cut away.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras


@dataclass(frozen=True, eq=False)
class Seen:
    """One layer call of a symbolic pass, with the tensors themselves: inputs in the order of `call`'s signature."""

    layer: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class SymbolicPass:
    """What one symbolic pass did.

    Attributes:
        calls: Its layer calls, in the order in which they ended.
        inputs: The tensors that it started from.
        dependent: For each of these, whether trained weights were used on the way to it.
        outputs: What came out of it.
        trained: The Keras variables that are trained.
        needed: Whether the loss depends on what came out.
        repeated: Whether the pass is one step of many: all outputs but the first are inputs of the next one, in the
            places of all inputs but the first.
    """

    calls: Sequence[Seen]
    inputs: Sequence[Any]
    dependent: Sequence[bool]
    outputs: Sequence[Any]
    trained: Sequence[Any]
    needed: bool = True
    repeated: bool = False


class Flow(Protocol):
    """Answers for the calls of one pass."""

    def depends(self, call: Seen) -> tuple[bool, ...]:
        """For each input of the call: whether a trained weight was used on the way to it."""

    def receives(self, call: Seen) -> tuple[bool, ...]:
        """For each output of the call: whether it gets a gradient."""


def gradient_flow(seen: SymbolicPass) -> Flow:
    """The flow of gradients in a pass: exact on TensorFlow, elsewhere an upper bound from the order of the calls."""
    graph = getattr(seen.inputs[0], "graph", None) if seen.inputs else None
    return _InOrder(seen) if graph is None else _InGraph(seen, graph)


def _differentiable(tensor: Any) -> bool:
    name = getattr(tensor.dtype, "name", str(tensor.dtype))
    return "float" in name or "complex" in name


# ---------------------------------------------------------------- TensorFlow: in the graph of the pass


class _InGraph:
    """The pass is a graph, and a tape follows its operations in just this way."""

    def __init__(self, seen: SymbolicPass, graph: Any) -> None:
        self._graph = graph
        self._trained = frozenset(map(id, seen.trained))
        begins = {tensor.name for tensor, is_one in zip(seen.inputs, seen.dependent, strict=True) if is_one}
        begins |= self._reads(seen.trained)
        outputs = [tensor for tensor in seen.outputs if getattr(tensor, "graph", None) is graph]
        self._dependent = self._onwards(begins)
        while seen.repeated:
            state = zip(seen.inputs[1:], seen.outputs[1:], strict=False)
            begins |= {start.name for start, end in state if self._is_in(self._dependent, end)}
            if begins <= self._dependent:
                break
            self._dependent = self._onwards(begins)
        self._received = self._dependent & self._backwards(outputs if seen.needed else [])

    def depends(self, call: Seen) -> tuple[bool, ...]:
        return tuple(self._is_in(self._dependent, tensor) for tensor in call.inputs)

    def receives(self, call: Seen) -> tuple[bool, ...]:
        return tuple(self._is_in(self._received, tensor) for tensor in call.outputs)

    def _is_in(self, names: set[str], tensor: Any) -> bool:
        if isinstance(tensor, keras.Variable):
            return id(tensor) in self._trained
        graph = getattr(tensor, "graph", None)
        if graph is None or not _differentiable(tensor):  # arrays and eager tensors are constants
            return False
        # A branch or a function of the user's own has a graph of its own: what happens there is taken to count.
        return graph is not self._graph or getattr(tensor, "name", None) in names

    def _reads(self, trained: Sequence[Any]) -> set[str]:
        """Names that the trained variables have inside the graph."""
        handles = {id(handle) for variable in trained for handle in _handles(variable)}
        return {inside.name for outside, inside in self._graph.captures if id(outside) in handles}

    def _onwards(self, begins: set[str]) -> set[str]:
        names = set(begins)
        for operation in self._graph.get_operations():  # in the order in which they were made
            if operation.type != "StopGradient" and any(tensor.name in names for tensor in operation.inputs):
                names.update(tensor.name for tensor in operation.outputs if _carries(tensor))
        return names

    def _backwards(self, pending: list[Any]) -> set[str]:
        names: set[str] = set()
        while pending:
            tensor = pending.pop()
            if tensor.name not in names and _carries(tensor):
                names.add(tensor.name)
                if tensor.op.type != "StopGradient":
                    pending.extend(tensor.op.inputs)
        return names


def _handles(variable: Any) -> list[Any]:
    # A variable of a distribution strategy is one per device.
    return [part.handle for part in getattr(variable.value, "values", [variable.value])]


def _carries(tensor: Any) -> bool:
    """Whether gradients pass through it: numbers, and the variables and lists of a loop."""
    return _differentiable(tensor) or tensor.dtype.name in ("resource", "variant")


# ---------------------------------------------------------------- other backends: in the order of the calls


class _InOrder:
    """The inputs depend on no trained weight; what follows the first call that uses one is taken to depend on it."""

    def __init__(self, seen: SymbolicPass) -> None:
        self._answers: dict[int, tuple[tuple[bool, ...], tuple[bool, ...]]] = {}
        trained = frozenset(map(id, seen.trained))
        known = {id(tensor): is_one for tensor, is_one in zip(seen.inputs, seen.dependent, strict=True)}
        known |= dict.fromkeys(trained, True)
        begun = any(seen.dependent)
        if seen.repeated:
            known |= dict.fromkeys(map(id, seen.inputs[1:]), True)
        for call in seen.calls:
            inputs = tuple(known.get(id(tensor), begun) and _differentiable(tensor) for tensor in call.inputs)
            uses_any = any(inputs) or any(id(variable) in trained for variable in call.layer.variables)
            begun = begun or uses_any
            for tensor in call.outputs:
                known.setdefault(id(tensor), uses_any)
            outputs = (known[id(tensor)] and _differentiable(tensor) and seen.needed for tensor in call.outputs)
            self._answers[id(call)] = inputs, tuple(outputs)

    def depends(self, call: Seen) -> tuple[bool, ...]:
        return self._answers[id(call)][0]

    def receives(self, call: Seen) -> tuple[bool, ...]:
        return self._answers[id(call)][1]
