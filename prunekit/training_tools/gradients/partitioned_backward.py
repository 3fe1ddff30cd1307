"""Gradient of a whole network, computed part by part: only tensors that pass between parts stay in memory."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.graph.model_graph import calls_of
from prunekit.anatomy.layers.layer_names import as_names, find_site
from prunekit.anatomy.layers.model_weights import check_built
from prunekit.core.runtime import backend, patching
from prunekit.core.runtime.arguments import examples_in
from prunekit.core.runtime.losses import loss_of
from prunekit.training_tools.gradients.layer_capture import tensors
from prunekit.training_tools.gradients.repeated_run import Run, differentiable, replaced


def in_parts(
    model: Any,
    loss: Any,
    x: Any,
    y: Any,
    boundary: Sequence[Any] | str,
    *,
    training: bool = False,
    scale_loss: Callable[[Any], Any] | None = None,
) -> tuple[Any, list[Any]]:
    """Returns the batch's loss and its gradients, computed from the loss to a boundary and then branch by branch.

    Layers before the boundary run forward without a tape: only the outputs of the boundary's layers are kept. The
    gradient is computed from the loss to the boundary; then each branch runs again, backpropagates its share to its
    weights, and is freed before the next branch. Layers shared by branches form a separate part, which follows them.
    Peak memory is that of the largest part, not of all parts, for a second forward pass of the layers before it.

    The result is that of one training pass: with `training=True` moving averages move once, and layers draw the random
    numbers of a single pass, the same in both runs. In a `tf.function` the parts run one after another, too.

    Args:
        model: A built Functional or Sequential model.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of these. Losses that layers add (regularizers) are added to the loss, as `fit` does.
        x: Inputs of shape (batch, ...), or a structure of inputs.
        y: Targets of the loss, of shape (batch, ...).
        boundary: Names of layers of the model's own graph, not of nested models; every path from weights to the outputs
            must pass through one of them. For a layer with several calls, ("shared", 1) is its second call. Layers
            that follow one another are allowed: they cut a chain into pieces.
        training: The `training` argument of the model's call.
        scale_loss: Function applied to the loss before differentiation, such as a `LossScaleOptimizer`'s `scale_loss`.

    Returns:
        (loss, gradients): the unscaled scalar loss, and the gradients of `model.trainable_variables` as from a tape:
        tensors or `tf.IndexedSlices`, None for a variable without influence on the loss. They equal those of a single
        pass except for rounding, and bit for bit if no sum of gradients, for a weight or an activation, has more than
        two terms and the graph optimizer fuses the same operations in both computations.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: `model` is not a Keras 3 model, or `boundary` holds a value that is not a name.
        ValueError: The model is not built, or has no graph; no layer has that name; a path bypasses the boundary; a
            layer with a state would be called in another order; x and y differ in length; `hvp` would refuse the loss.

    Source: recomputation is that of Chen et al. 2016, arXiv:1604.06174, section 3, cut by branches instead of by depth.
    """
    backend.require_tensorflow("pk.gradients.in_parts")
    check_built(model)
    passage = _Passage(model, _Plan(model, boundary, training=training))
    if tf.executing_eagerly():
        examples_in(x=x, y=y)
    x, y = tensors(model, x), tensors(model, y)
    weights = [backend.native(variable) for variable in model.trainable_variables]
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(weights)
        prediction = passage.forward(tape, x, training=training)
        value = loss_of(loss, y, prediction)
        value = sum([tf.cast(extra, value.dtype) for extra in [*model.losses, *passage.losses]], value)
        scaled = value if scale_loss is None else scale_loss(value)
    return value, passage.backward(tape.gradient(scaled, [*passage.cuts, *weights]))


# ---------------------------------------------------------------- where the graph is cut


@dataclass(eq=False)
class _Part:
    """Calls that feed the same layers of the boundary, and their symbolic input and output tensors."""

    nodes: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def run(self, call: Callable[[Any], Any], *inputs: Any) -> list[Any]:
        """Runs the calls and returns the outputs; each tensor is freed after its last use."""
        values = dict(zip(map(id, self.inputs), inputs, strict=True))
        kept = {id(tensor) for tensor in self.outputs}
        last = {id(tensor): number for number, node in enumerate(self.nodes) for tensor in node.input_tensors}
        for number, node in enumerate(self.nodes):
            _call(node, call, values)
            for tensor in [*node.input_tensors, *node.outputs]:
                if last.get(id(tensor), number) == number and id(tensor) not in kept:
                    values.pop(id(tensor), None)
        return [values[id(tensor)] for tensor in self.outputs]


def _call(node: Any, call: Callable[[Any], Any], values: dict[int, Any]) -> None:
    args, kwargs = node.arguments.fill_in(values)
    outputs = call(node.operation)(*args, **kwargs)
    values.update(zip(map(id, node.outputs), keras.tree.flatten(outputs), strict=False))


class _Plan:
    """A model's graph, cut at a boundary.

    Attributes:
        graph: The keras.Function that holds the graph.
        parts: The parts before the boundary, in an order in which they can run.
        head: The part after the boundary.
    """

    def __init__(self, model: Any, boundary: Sequence[Any] | str, *, training: bool):
        self.graph = _graph_of(model)
        self._nodes = calls_of(self.graph)
        self._maker = {id(tensor): node for node in self._nodes for tensor in node.outputs}
        self._cut = _named(model, self._nodes, as_names(boundary, "boundary"))
        self._feeds = self._what_feeds_what()
        parts: dict[frozenset[int], _Part] = {}
        for node in self._nodes:
            if self._feeds[id(node)]:
                parts.setdefault(self._feeds[id(node)], _Part()).nodes.append(node)
        # A call feeds all boundary layers that its users feed, and more unless both are in one part: large sets first.
        self.parts = [parts[fed] for fed in sorted(parts, key=len, reverse=True)]
        self.head = _Part([node for node in self._nodes if not self._feeds[id(node)]], outputs=list(self.graph.outputs))
        self._check_nothing_passes_by()
        self._find_ends()
        if training:
            self._check_order()

    def _what_feeds_what(self) -> dict[int, frozenset[int]]:
        """Returns a map from the id of a node to the ids of the boundary's nodes that depend on it or are the node."""
        feeds = {id(node): {id(node)} if id(node) in self._cut else set() for node in self._nodes}
        for node in reversed(self._nodes):
            for maker in self._makers(node):
                feeds[id(maker)] |= feeds[id(node)]
        return {key: frozenset(fed) for key, fed in feeds.items()}

    def _makers(self, node: Any) -> Iterator[Any]:
        return (self._maker[id(tensor)] for tensor in node.input_tensors if id(tensor) in self._maker)

    def _check_nothing_passes_by(self) -> None:
        behind: set[int] = set(self._cut)
        for node in self.head.nodes:
            if any(id(maker) in behind for maker in self._makers(node)):
                behind.add(id(node))
        wanted = [tensor for node in self.head.nodes if id(node) in behind for tensor in node.input_tensors]
        # No gradient flows through masks and integers.
        wanted = [tensor for tensor in [*wanted, *self.graph.outputs] if tf.as_dtype(tensor.dtype).is_floating]
        makers = [self._maker[id(tensor)] for tensor in wanted if id(tensor) in self._maker]
        around = dict.fromkeys(node.operation.name for node in makers if id(node) not in behind)
        if around:
            raise ValueError(
                "All paths to the outputs must pass through the boundary. Received: "
                f"boundary={[self._cut[key] for key in self._cut]}, bypassed by {', '.join(map(repr, around))}. Add "
                "these layers to the boundary."
            )

    def _check_order(self) -> None:
        """Raises if layers with averages or random numbers would run in another order than in a single pass."""
        calls: dict[int, list[Any]] = {}
        for node in [node for part in [*self.parts, self.head] for node in part.nodes]:
            calls.setdefault(id(node.operation), []).append(node)
        for nodes in calls.values():
            layer = nodes[0].operation
            stateful = getattr(layer, "trainable", False) and layer.non_trainable_variables
            if stateful and nodes != [node for node in self._nodes if node.operation is layer]:
                raise ValueError(
                    "A layer that updates averages or draws random numbers must be called in the order of a single "
                    f"pass. Received: the layer {layer.name!r}, whose calls in several branches alternate. Give each "
                    "branch its own layer, or leave `training` at False."
                )

    def _find_ends(self) -> None:
        for part in [*self.parts, self.head]:
            made = {id(tensor) for node in part.nodes for tensor in node.outputs}
            used = {id(tensor): tensor for node in part.nodes for tensor in node.input_tensors}
            used.update((id(tensor), tensor) for tensor in part.outputs)
            part.inputs = [tensor for key, tensor in used.items() if key not in made]
        needed = {id(tensor) for part in [*self.parts, self.head] for tensor in part.inputs}
        for part in self.parts:
            part.outputs = [tensor for node in part.nodes for tensor in node.outputs if id(tensor) in needed]


def _graph_of(model: Any) -> Any:
    graph = getattr(model, "_functional", None) or model
    if not isinstance(graph, keras.Function):
        raise ValueError(
            f"A boundary cuts the graph of a Functional or Sequential model. Received: {type(model).__name__}, which "
            "has none. Use pk.gradients.recomputing(model, layers) with the names of its blocks."
        )
    return graph


def _named(model: Any, nodes: list[Any], boundary: list[Any]) -> dict[int, Any]:
    """Returns a map from the id of each boundary node to the name that the user gave."""
    found: dict[int, Any] = {}
    for name in boundary:
        label, call = name if isinstance(name, tuple) and len(name) == 2 else (name, None)
        calls = [node for node in nodes if node.operation.name == label]
        if not calls:
            find_site(model, name, "boundary")
            raise ValueError(
                f"A boundary must be a layer of the model's own graph. Received: boundary={name!r}, which is inside "
                "another model or layer. Name the layer that contains it, or use pk.gradients.recomputing."
            )
        if (call is None and len(calls) > 1) or (call is not None and call not in range(len(calls))):
            raise ValueError(
                f"The layer {label!r} is called {len(calls)} times in a pass of the model. Received: boundary={name!r}."
                f" Say which call, counted from 0: ({label!r}, 0)."
            )
        found[id(calls[call or 0])] = name
    if not found:
        raise ValueError(
            "A boundary needs at least one layer. Received: boundary=[]. Name the layers where branches end."
        )
    return found


# ---------------------------------------------------------------- forwards and backwards


class _Passage:
    """One forward and backward pass through a plan.

    Attributes:
        cuts: The tensors between parts, and between parts and head, whose gradients are computed.
        losses: Losses that layers before the boundary added.
    """

    def __init__(self, model: Any, plan: _Plan):
        self.cuts: list[Any] = []
        self.losses: list[Any] = []
        self._model, self._plan = model, plan
        self._trainable = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
        self._runs: list[tuple[Run, list[Any], list[Any]]] = []

    def forward(self, tape: Any, x: Any, *, training: bool) -> Any:
        """Returns the model's output; the tape records only the head."""
        taken = []

        def through(inputs: Any, operation_fn: Callable[[Any], Any], **_: Any) -> Any:
            taken.append(True)
            return self._through(tape, keras.tree.flatten(inputs), operation_fn)

        with patching.shadowed(self._plan.graph, "_run_through_graph", through):
            prediction = self._model(x, training=training)
        if not taken:
            raise ValueError(
                f"A boundary cuts the graph of a model. Received: {type(self._model).__name__}, whose own `call` does "
                "not run its graph. Use pk.gradients.recomputing(model, layers)."
            )
        return prediction

    def _through(self, tape: Any, inputs: list[Any], call: Callable[[Any], Any]) -> Any:
        graph, head = self._plan.graph, self._plan.head
        done: list[Any] = []
        values = dict(zip(map(id, graph.inputs), inputs, strict=True))
        needed: set[int] = set()
        for part in self._plan.parts:
            run, entering = Run(partial(part.run, call)), [values[id(tensor)] for tensor in part.inputs]
            # Otherwise branches of a graph would run in parallel, with all their activations in memory at once.
            with tf.control_dependencies(done):
                outputs, losses = run.first(entering)
                leaving = [tf.identity(tensor) for tensor in differentiable(outputs, losses)]
            outputs, losses = replaced(outputs, leaving)
            values.update(zip(map(id, part.outputs), outputs, strict=True))
            self.losses += losses
            if any(id(one) in self._trainable for one in run.variables) or any(id(one) in needed for one in entering):
                tape.watch(leaving)
                needed.update(map(id, leaving))
                self.cuts += leaving
                self._runs.append((run, entering, leaving))
            done = leaving or done
        with tf.control_dependencies(done):
            outputs = head.run(call, *(values[id(tensor)] for tensor in head.inputs))
        return keras.tree.pack_sequence_as(graph._outputs_struct, outputs)

    def backward(self, slopes: Sequence[Any]) -> list[Any]:
        """Returns the gradient of each trainable variable, from the gradients of the cuts and those from the head."""
        upstream = {id(cut): slope for cut, slope in zip(self.cuts, slopes, strict=False)}
        totals = list(slopes[len(self.cuts) :])
        done = list(slopes)
        self.cuts.clear()
        while self._runs:
            run, entering, leaving = self._runs.pop()
            own = [upstream.pop(id(tensor)) for tensor in leaving]
            read = [
                (value, one) for value, one in zip(run.values, run.variables, strict=True) if id(one) in self._trainable
            ]
            entered = [tensor for tensor in {id(one): one for one in entering}.values() if id(tensor) in upstream]
            if all(slope is None for slope in own):
                continue
            with tf.control_dependencies([getattr(slope, "values", slope) for slope in done if slope is not None]):
                done = run.again(entering, [*entered, *(value for value, _ in read)], own)
            for tensor, slope in zip(entered, done, strict=False):
                upstream[id(tensor)] = _sum(upstream[id(tensor)], slope)
            for (_, variable), slope in zip(read, done[len(entered) :], strict=True):
                place = self._trainable[id(variable)]
                totals[place] = _sum(totals[place], slope)
        return totals


def _sum(one: Any, other: Any) -> Any:
    if one is None or other is None:
        return other if one is None else one
    return tf.convert_to_tensor(one) + tf.convert_to_tensor(other)
