"""Determines which tensors of a symbolic pass get a gradient when the loss depends on every output of the model.

A tensor gets a gradient if it depends on a trained weight and an output of the model depends on it: operations that no
weight's gradient needs are left out, as in a training step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras


@dataclass(frozen=True, eq=False)
class LayerCall:
    """One layer call with its tensors.

    Attributes:
        layer: The layer.
        inputs: Tensors among its arguments; in a symbolic pass, in the order of `call`'s signature.
        outputs: Tensors that it returned.
    """

    layer: Any
    inputs: tuple[Any, ...]
    outputs: tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class SymbolicPass:
    """Record of one symbolic pass.

    Attributes:
        calls: Layer calls of the pass, in the order in which they ended.
        inputs: Input tensors of the pass.
        dependent: For each input, True if it depends on trained weights.
        outputs: Output tensors of the pass.
        trained: The Keras variables that are trained.
        needed: True if the loss depends on the outputs.
        repeated: True if the pass is one of several time steps: all outputs but the first are inputs of the next step,
            in the places of all inputs but the first.
    """

    calls: Sequence[LayerCall]
    inputs: Sequence[Any]
    dependent: Sequence[bool]
    outputs: Sequence[Any]
    trained: Sequence[Any]
    needed: bool = True
    repeated: bool = False


class Flow(Protocol):
    """Gradient flow through the layer calls of one pass."""

    def depends(self, call: LayerCall) -> tuple[bool, ...]:
        """Returns, for each input of the call, True if the input depends on a trained weight."""

    def receives(self, call: LayerCall) -> tuple[bool, ...]:
        """Returns, for each output of the call, True if the output gets a gradient."""


def gradient_flow(seen: SymbolicPass) -> Flow:
    """Returns the gradient flow of a pass: exact on TensorFlow, elsewhere an upper bound from the order of calls."""
    graph = getattr(seen.inputs[0], "graph", None) if seen.inputs else None
    return _InOrder(seen) if graph is None else _InGraph(seen, graph)


def _differentiable(tensor: Any) -> bool:
    name = getattr(tensor.dtype, "name", str(tensor.dtype))
    return "float" in name or "complex" in name


# ---------------------------------------------------------------- TensorFlow: in the graph of the pass


class _InGraph:
    """Gradient flow through the operations of the pass's graph, which a gradient tape follows in the same way."""

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

    def depends(self, call: LayerCall) -> tuple[bool, ...]:
        return tuple(self._is_in(self._dependent, tensor) for tensor in call.inputs)

    def receives(self, call: LayerCall) -> tuple[bool, ...]:
        return tuple(self._is_in(self._received, tensor) for tensor in call.outputs)

    def _is_in(self, names: set[str], tensor: Any) -> bool:
        if isinstance(tensor, keras.Variable):
            return id(tensor) in self._trained
        graph = getattr(tensor, "graph", None)
        if graph is None or not _differentiable(tensor):  # arrays and eager tensors are constants
            return False
        # A branch or a user's function has a graph of its own: its tensors are assumed to carry a gradient.
        return graph is not self._graph or getattr(tensor, "name", None) in names

    def _reads(self, trained: Sequence[Any]) -> set[str]:
        """Returns the names that the trained variables have inside the graph."""
        handles = {id(handle) for variable in trained for handle in _handles(variable)}
        return {inside.name for outside, inside in self._graph.captures if id(outside) in handles}

    def _onwards(self, begins: set[str]) -> set[str]:
        names = set(begins)
        for operation in self._graph.get_operations():  # in the order of their creation
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
    # Under a distribution strategy a variable has one component per device.
    return [part.handle for part in getattr(variable.value, "values", [variable.value])]


def _carries(tensor: Any) -> bool:
    """Returns True if gradients pass through the tensor: numbers, and the variables and lists of a loop."""
    return _differentiable(tensor) or tensor.dtype.name in ("resource", "variant")


# ---------------------------------------------------------------- other backends: in the order of the calls


class _InOrder:
    """Gradient flow by call order: unseen tensors after the first use of a trained weight count as dependent."""

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

    def depends(self, call: LayerCall) -> tuple[bool, ...]:
        return self._answers[id(call)][0]

    def receives(self, call: LayerCall) -> tuple[bool, ...]:
        return self._answers[id(call)][1]
