"""The gradient of a whole network, one part after the other: only what passes from part to part is kept."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.layer_names import as_names, find_site
from prunekit.anatomy.targets import check_built
from prunekit.core import backend, patching
from prunekit.core.arguments import examples_in
from prunekit.core.losses import loss_of
from prunekit.gradients.layer_capture import tensors
from prunekit.gradients.rematerialization import Run, differentiable, replaced


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
    """The batch's loss and its gradients, from the loss to a boundary and then branch by branch.

    Whatever lies in front of the boundary runs forwards without a tape: only what the boundary's layers put out is
    kept. The gradient goes from the loss to there; then each branch runs again, takes its share of the gradient back to
    its weights, and is forgotten before the next. What several branches share is a part of its own, and comes after
    them. So memory peaks at the largest part instead of their sum, for a second forward pass of what lies in front.

    It does what one training pass does: with `training=True` moving averages move once, and layers draw the random
    numbers that they would draw in one go, twice the same. In a `tf.function` parts follow one another as well.

    Args:
        model: A built Functional or Sequential model.
        loss: A Keras loss, its name, or a function (y_true, y_pred) -> one loss per example; for several outputs a list
            or dictionary of these. Losses that layers add (regularizers) are added to it, as `fit` does.
        x: Inputs, of shape (batch, ...), or a structure of these.
        y: What the loss compares the outputs with, of shape (batch, ...).
        boundary: Names of layers of the model's own graph, not of models inside it, through which all that leads from
            weights to the outputs passes. For a layer that is called several times, ("shared", 1) is its second call.
            Layers that follow one another are allowed: they cut a chain into pieces.
        training: As the model is called.
        scale_loss: Applied to the loss before it is differentiated, such as a `LossScaleOptimizer`'s `scale_loss`.

    Returns:
        (loss, gradients): a scalar, not scaled; and what a tape would give for `model.trainable_variables`: tensors or
        `tf.IndexedSlices`, None for a variable that the loss does not depend on. But for rounding they are those of one
        go: bit for bit where no sum of gradients, for a weight or an activation, has more than two terms, and where the
        optimizer of a graph fuses no operations in one way only.

    Raises:
        RuntimeError: Keras does not run on TensorFlow.
        TypeError: It is no Keras 3 model, or a name is none.
        ValueError: The model is not built, or has no graph; no layer has that name; a path passes by the boundary; a
            layer with a state would be called in another order; x and y differ in length; as `hvp` for the loss.

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
    """Calls that feed the same layers of the boundary, and the symbolic tensors that enter and leave them."""

    nodes: list[Any] = field(default_factory=list)
    inputs: list[Any] = field(default_factory=list)
    outputs: list[Any] = field(default_factory=list)

    def run(self, call: Callable[[Any], Any], *inputs: Any) -> list[Any]:
        """The outputs. Each tensor is dropped after its last use."""
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
        graph: The keras.Function that holds it.
        parts: What lies in front of the boundary, in an order in which it can run.
        head: What lies behind.
    """

    def __init__(self, model: Any, boundary: Sequence[Any] | str, *, training: bool):
        self.graph = _graph_of(model)
        depths = sorted(self.graph._nodes_by_depth, reverse=True)
        self._nodes = [node for depth in depths for node in self.graph._nodes_by_depth[depth] if not node.is_input]
        self._maker = {id(tensor): node for node in self._nodes for tensor in node.outputs}
        self._cut = _named(model, self._nodes, as_names(boundary, "boundary"))
        self._feeds = self._what_feeds_what()
        parts: dict[frozenset[int], _Part] = {}
        for node in self._nodes:
            if self._feeds[id(node)]:
                parts.setdefault(self._feeds[id(node)], _Part()).nodes.append(node)
        # A call feeds all that its users feed, and more unless they are of one part: the most feeding part comes first.
        self.parts = [parts[fed] for fed in sorted(parts, key=len, reverse=True)]
        self.head = _Part([node for node in self._nodes if not self._feeds[id(node)]], outputs=list(self.graph.outputs))
        self._check_nothing_passes_by()
        self._find_ends()
        if training:
            self._check_order()

    def _what_feeds_what(self) -> dict[int, frozenset[int]]:
        """id of a node -> ids of the nodes of the boundary that depend on it, itself included."""
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
        # No gradient takes the way of masks and whole numbers.
        wanted = [tensor for tensor in [*wanted, *self.graph.outputs] if tf.as_dtype(tensor.dtype).is_floating]
        makers = [self._maker[id(tensor)] for tensor in wanted if id(tensor) in self._maker]
        around = dict.fromkeys(node.operation.name for node in makers if id(node) not in behind)
        if around:
            raise ValueError(
                "The boundary is what all paths to the outputs pass through. Received: "
                f"boundary={[self._cut[key] for key in self._cut]}, past which {', '.join(map(repr, around))} "
                "leads on. Add it to the boundary."
            )

    def _check_order(self) -> None:
        """Refuses layers that move averages or draw numbers in several parts, in another order than in one go."""
        calls: dict[int, list[Any]] = {}
        for node in [node for part in [*self.parts, self.head] for node in part.nodes]:
            calls.setdefault(id(node.operation), []).append(node)
        for nodes in calls.values():
            layer = nodes[0].operation
            stateful = getattr(layer, "trainable", False) and layer.non_trainable_variables
            if stateful and nodes != [node for node in self._nodes if node.operation is layer]:
                raise ValueError(
                    "A layer that moves averages or draws random numbers is called in the order of a pass in one go. "
                    f"Received: the layer {layer.name!r}, whose calls in several branches alternate. Give each branch "
                    "a layer of its own, or leave `training` at False."
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
    """id of a node -> as the user named it."""
    found: dict[int, Any] = {}
    for name in boundary:
        label, call = name if isinstance(name, tuple) and len(name) == 2 else (name, None)
        calls = [node for node in nodes if node.operation.name == label]
        if not calls:
            find_site(model, name, "boundary")
            raise ValueError(
                f"A boundary lies in the model's own graph. Received: boundary={name!r}, which is inside another model "
                "or layer. Name the one that holds it, or use pk.gradients.recomputing."
            )
        if (call is None and len(calls) > 1) or (call is not None and call not in range(len(calls))):
            raise ValueError(
                f"The layer {label!r} is called {len(calls)} times in a pass of the model. Received: boundary={name!r}."
                f" Say which call, counted from 0: ({label!r}, 0)."
            )
        found[id(calls[call or 0])] = name
    if not found:
        raise ValueError("A boundary is one layer at least. Received: boundary=[]. Name the layers where branches end.")
    return found


# ---------------------------------------------------------------- forwards and backwards


class _Passage:
    """One way through a plan, there and back.

    Attributes:
        cuts: The tensors between parts, and between them and the head, to which gradients come back.
        losses: What layers in front of the boundary added.
    """

    def __init__(self, model: Any, plan: _Plan):
        self.cuts: list[Any] = []
        self.losses: list[Any] = []
        self._model, self._plan = model, plan
        self._trainable = {id(variable): place for place, variable in enumerate(model.trainable_variables)}
        self._runs: list[tuple[Run, list[Any], list[Any]]] = []

    def forward(self, tape: Any, x: Any, *, training: bool) -> Any:
        """The model's output, of which the tape knows the head."""
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
            # In a graph branches would else run side by side, the activations of all of them alive at once.
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
        """The gradient of each trainable variable, from those of the cuts and what the head gave each variable."""
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
