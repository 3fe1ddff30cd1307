"""A model's forward pass in inference as a flat list of steps, which can be run from any step on."""

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras import ops

from prunekit.anatomy.graph.model_graph import filled, graph_of, inputs_in, nested_graph, nodes_of, reads_inputs_alone

# Identity of a symbolic tensor of the model's graph.
Key = int


@dataclass(frozen=True, eq=False)
class GraphStep:
    """One call of a layer or operation, or the entry into a nested model or the exit from it.

    Attributes:
        reads: Keys of the tensors that the step reads.
        writes: Keys of the tensors that it computes.
        run: Function of the tensors that the step reads; returns the tensors that it writes.
        variables: Variables that the step may read.
        layer: The layer or operation; None for the entry into a nested model, the exit from it, and a whole model.
        arguments: Function of the tensors that the step reads; returns (args, kwargs) of the layer's call.
    """

    reads: tuple[Key, ...]
    writes: tuple[Key, ...]
    run: Callable[[Sequence[Any]], Sequence[Any]]
    variables: tuple[Any, ...] = ()
    layer: Any = None
    arguments: Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]] | None = None

    def compute(self, values: dict[Key, Any]) -> None:
        """Adds the tensors that the step computes to those that it reads."""
        values.update(zip(self.writes, self.run([values[key] for key in self.reads]), strict=True))


@dataclass(frozen=True, eq=False)
class ForwardPass:
    """The forward pass of a model.

    Attributes:
        steps: The steps in order of execution.
        inputs: Keys of the model's inputs.
        outputs: Keys of the model's outputs.
        flat_inputs: Function of a batch of inputs; returns the tensors of `inputs`.
        packed: Function of the tensors of `outputs`; returns the structure that the model's call returns.
        whole: True for a model without a graph of layers, whose only step is the whole model.
    """

    steps: tuple[GraphStep, ...]
    inputs: tuple[Key, ...]
    outputs: tuple[Key, ...]
    flat_inputs: Callable[[Any], list[Any]]
    packed: Callable[[Sequence[Any]], Any]
    whole: bool = False

    def first_readers(self) -> dict[int, int]:
        """Returns {id of a variable: index of the first step that may read it}."""
        found: dict[int, int] = {}
        for index, step in enumerate(self.steps):
            for variable in step.variables:
                found.setdefault(id(variable), index)
        return found

    def live_before(self, index: int) -> tuple[Key, ...]:
        """Returns the keys of the tensors that exist before step `index` and that it, or a later step, reads."""
        before = [*self.inputs, *(key for step in self.steps[:index] for key in step.writes)]
        needed = {key for step in self.steps[index:] for key in step.reads} | set(self.outputs)
        return tuple(key for key in dict.fromkeys(before) if key in needed)


def steps_of(model: Any, example: Any) -> ForwardPass:
    """Returns the forward pass of a built model in inference.

    Models that are called once inside the model contribute their own calls. One step for each call are models that are
    called several times, models without a graph of layers, and models whose symbolic tensors are also in the graph
    around them, unless they are called on their own inputs.

    Args:
        model: A built Keras model.
        example: A batch of inputs; only a model without a graph runs on it, for the structure of its outputs.
    """
    graph = graph_of(model)
    if graph is None:
        return _whole(model, example)
    structure = graph.output
    keys = [id(tensor) for tensor in keras.tree.flatten(structure)]

    def packed(tensors: Sequence[Any]) -> Any:
        values = dict(zip(keys, tensors, strict=True))
        found = keras.tree.map_structure(lambda tensor: values[id(tensor)], structure)
        # Keras unpacks lists of one output in the same way.
        return found[0] if isinstance(found, list | tuple) and len(found) == 1 else found

    inputs = tuple(id(tensor) for tensor in graph.inputs)

    def flat(batch: Any) -> list[Any]:
        return list(graph._standardize_inputs(keras.tree.map_structure(ops.convert_to_tensor, batch)))

    return ForwardPass(tuple(_steps_in(model, set())), inputs, tuple(keys), flat, packed)


def run_released(model: Any, inputs: Any) -> None:
    """Runs a model in inference, for observers of its layers; each tensor is freed when no later call reads it.

    The call of a functional model that is not compiled keeps all tensors until it ends.

    Args:
        model: A built Keras model. One without a graph is called as a whole.
        inputs: A batch of inputs.
    """
    if graph_of(model) is None:
        model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
        return
    found = steps_of(model, inputs)
    last = {key: index for index, step in enumerate(found.steps) for key in step.reads}
    values = dict(zip(found.inputs, found.flat_inputs(inputs), strict=True))
    with _without_gradients():
        for index, step in enumerate(found.steps):
            step.compute(values)
            for key in (*step.reads, *step.writes):
                if last.get(key, index) <= index:
                    values.pop(key, None)


def _without_gradients() -> contextlib.AbstractContextManager[Any]:
    """Returns the scope in which PyTorch keeps no tensors for a gradient."""
    if keras.backend.backend() != "torch":
        return contextlib.nullcontext()
    import torch

    return torch.no_grad()


def _steps_in(model: Any, taken: set[Key]) -> Iterator[GraphStep]:
    """Yields the steps of a model with a graph, those of nested models included.

    Args:
        model: The model.
        taken: Keys of the graphs that were read before, to which those of the model are added.
    """
    nodes = nodes_of(model)
    taken.update(id(tensor) for node in nodes for tensor in node.outputs)
    for node in nodes:
        if node.is_input:
            continue
        reads, writes = tuple(map(id, node.input_tensors)), tuple(map(id, node.outputs))
        inner = nested_graph(node, nodes)
        if inner is None or not reads_inputs_alone(node) or _clashes(inner, reads, taken):
            layer = node.operation
            own = tuple(getattr(layer, "variables", ()))
            yield GraphStep(reads, writes, _call(node, layer), own, layer, _arguments(node))
            continue
        yield GraphStep(reads, tuple(map(id, inner.inputs)), _call(node, functools.partial(_entered, inner)))
        yield from _steps_in(node.operation, taken)
        yield GraphStep(tuple(map(id, inner.outputs)), writes, list)


def _clashes(inner: Any, reads: Sequence[Key], taken: set[Key]) -> bool:
    """Returns True if a tensor of a nested graph is also in a graph in `taken`, where it has another value."""
    return list(reads) != list(map(id, inner.inputs)) and any(
        id(tensor) in taken for node in nodes_of(inner) for tensor in node.outputs
    )


def _entered(inner: Any, *args: Any, **kwargs: Any) -> list[Any]:
    return list(inner._standardize_inputs(inputs_in(args, kwargs)))


def _call(node: Any, function: Callable[..., Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what a step of a node runs: a function of the node's arguments."""
    arguments = _arguments(node)

    def run(tensors: Sequence[Any]) -> Sequence[Any]:
        args, kwargs = arguments(tensors)
        return keras.tree.flatten(function(*args, **kwargs))

    return run


def _arguments(node: Any) -> Callable[[Sequence[Any]], tuple[tuple[Any, ...], dict[str, Any]]]:
    keys = [id(tensor) for tensor in node.input_tensors]
    return lambda tensors: filled(node, dict(zip(keys, tensors, strict=True)))


def _whole(model: Any, example: Any) -> ForwardPass:
    """Returns the forward pass of a model without a graph: one step."""
    structure = keras.tree.map_structure(lambda leaf: None, example)
    outputs = model(keras.tree.map_structure(ops.convert_to_tensor, example), training=False)
    count, made = len(keras.tree.flatten(example)), keras.tree.map_structure(lambda leaf: None, outputs)
    reads, writes = tuple(range(count)), tuple(range(count, count + len(keras.tree.flatten(outputs))))

    def run(tensors: Sequence[Any]) -> Sequence[Any]:
        return keras.tree.flatten(model(keras.tree.pack_sequence_as(structure, list(tensors)), training=False))

    def flat(batch: Any) -> list[Any]:
        return [ops.convert_to_tensor(leaf) for leaf in keras.tree.flatten(batch)]

    def packed(tensors: Sequence[Any]) -> Any:
        return keras.tree.pack_sequence_as(made, list(tensors))

    step = GraphStep(reads, writes, run, tuple(model.variables))
    return ForwardPass((step,), reads, writes, flat, packed, whole=True)
