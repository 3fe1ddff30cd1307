"""Decides which tensors of a model are rounded, and which of them share a grid, as in LiteRT's integer files."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph_calls import Call, Graph
from prunekit.anatomy.graph_reader import ReadGraphs, read_graphs
from prunekit.anatomy.layers import sublayers, weights_of
from prunekit.anatomy.linear_kinds import SEPARABLE, channel_axis, is_linear, is_linear_kind, is_normalization
from prunekit.anatomy.model_graph import graph_of, inputs_in, tensors_in
from prunekit.anatomy.model_weights import weights_in
from prunekit.anatomy.recorded_calls import RecordedCall, recorded
from prunekit.techniques.quantize.grids import Granularity
from prunekit.techniques.quantize.rules import MOVES, Rule, activation_name, activation_rule, is_relu, rule_of

# Roles of the weights that are rounded. Biases are stored with 32 bits.
WEIGHT_ROLES = ("kernel", "recurrent_kernel", "depthwise_kernel", "embedding")


@dataclass(eq=False)
class Range:
    """Tensors that are rounded on one grid.

    Attributes:
        name: Name of the layer or input that computes the first of them.
        signed: None for a grid that is chosen from data; for one that a kernel prescribes, whether it has a sign.
        tensors: The tensors.
    """

    name: str
    signed: bool | None = None
    tensors: list[Any] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class RoundedWeight:
    """A weight that is rounded, in one unit.

    Attributes:
        variable: The weight.
        name: Path of the weight in the model.
        granularity: Which of its entries share a scale: those of one output unit.
    """

    variable: Any
    name: str
    granularity: Granularity


@dataclass(frozen=True, eq=False)
class Unit:
    """Calls between which no tensor is rounded, because an integer kernel computes them as one.

    Attributes:
        calls: The calls, in order.
        rule: How the results are rounded.
        weights: The weights of the first call that are rounded.
        between: Range of the tensor between the two convolutions of a separable one, or between the factor and the
            offset of a rescaling.
        before_activation: Range of the outputs before an activation of the layer that a kernel of its own computes.
    """

    calls: tuple[Call, ...]
    rule: Rule
    weights: tuple[RoundedWeight, ...] = ()
    between: Range | None = None
    before_activation: Range | None = None

    @property
    def first(self) -> Call:
        """The first call, which may have weights."""
        return self.calls[0]

    @property
    def outputs(self) -> tuple[Any, ...]:
        """The tensors that the last call computes."""
        return self.calls[-1].outputs

    @functools.cached_property
    def is_linear(self) -> bool:
        """True for a Dense or convolution layer with an integer kernel."""
        rule = rule_of(self.first.operation)
        return is_linear_kind(self.first.operation) and rule is not None and rule.output != "float"

    @functools.cached_property
    def is_activation(self) -> bool:
        """True for an activation with an integer kernel."""
        return self.rule.output != "float" and bool(activation_name(self.first.operation))

    @functools.cached_property
    def normalization(self) -> Call | None:
        """The call of a batch normalization that is folded into the first call."""
        return next((call for call in self.calls[1:] if is_normalization(call.operation)), None)


@dataclass(frozen=True, eq=False)
class FloatLayer:
    """A layer or operation that computes in floating point, with the reason."""

    name: str
    reason: str


@dataclass(frozen=True, eq=False)
class Placement:
    """Where tensors are rounded.

    Attributes:
        graphs: The graphs of the model and of its nested models.
        units: id of a graph -> its units in order of execution.
        written: id of a tensor -> the range on whose grid it is rounded when it is computed.
        read: (id of a unit, id of a tensor) -> the range on whose grid a unit reads a tensor that is not on it.
        ranges: All ranges, in order of execution.
        left_float: Layers and operations that compute in floating point.
    """

    graphs: ReadGraphs
    units: dict[int, list[Unit]]
    written: dict[int, Range]
    read: dict[tuple[int, int], Range]
    ranges: list[Range]
    left_float: list[FloatLayer]

    def weights(self) -> Iterator[RoundedWeight]:
        """Yields the weights that are rounded, in each unit that reads them."""
        for units in self.units.values():
            for unit in units:
                yield from unit.weights


def place(model: Any) -> Placement:
    """Returns where the tensors of a model are rounded.

    Layers that are made of others are replaced by the calls inside them, where these do all that the layer does.

    Args:
        model: A built model.

    Raises:
        ValueError: The model has no graph of layers, and its `call` cannot be followed.
    """
    return _Placer(model, read_graphs(model, _Opener())).placed()


class _Opener:
    """Returns the calls inside a layer without a rule, in order to round between them; None if it stays whole."""

    def __init__(self) -> None:
        # With the nodes, because the id of one that is gone is used again.
        self._found: dict[int, tuple[Any, RecordedCall | None]] = {}

    def __call__(self, node: Any) -> RecordedCall | None:
        if id(node) not in self._found:
            self._found[id(node)] = node, self._opened(node)
        return self._found[id(node)][1]

    def _opened(self, node: Any) -> RecordedCall | None:
        layer = getattr(node, "operation", None)
        if not isinstance(layer, keras.layers.Layer) or graph_of(layer) is not None or rule_of(layer) is not None:
            return None
        found = recorded(layer, node.arguments.args, node.arguments.kwargs)
        return found if found is not None and found.repeatable else None


# ---- units -----------------------------------------------------------------------------------------------------------


def _is_float(tensor: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


def _units_of(graph: Graph, calls_of: dict[int, int], names: dict[int, str]) -> list[Unit]:
    """Returns the calls of a graph in units.

    Args:
        graph: The graph.
        calls_of: id of a layer or operation -> how often the graphs call it.
        names: id of a weight -> its path.
    """
    units, taken = [], set[int]()
    for call in graph.calls:
        if id(call) in taken:
            continue
        calls = [call]
        rule = _first_rule(call)
        if rule.fuses_relu:
            calls += _fused(graph, call, calls_of)
        taken.update(map(id, calls))
        weights = _weights_of(call, names)
        units.append(Unit(tuple(calls), _unit_rule(call, rule), weights, _between(call), _before_activation(call)))
    return units


def _first_rule(call: Call) -> Rule:
    if graph_of(call.operation) is not None:
        return MOVES
    return rule_of(call.operation) or Rule("float", reason="its `call` cannot be followed")


def _fused(graph: Graph, call: Call, calls_of: dict[int, int]) -> list[Call]:
    """Returns the calls after one that are computed together with it: batch normalization, then a ReLU."""
    found: list[Call] = []
    if not is_linear(getattr(call.operation, "activation", None)):
        return found
    if is_linear_kind(call.operation):
        reader = _only_reader(graph, call)
        if reader is not None and _can_be_folded(call, reader, calls_of):
            found.append(reader)
    reader = _only_reader(graph, found[-1] if found else call)
    if reader is not None and reader.input is not None and is_relu(reader.operation):
        found.append(reader)
    return found


def _only_reader(graph: Graph, call: Call) -> Call | None:
    """Returns the only call that reads the output of a call, if nothing else needs this output."""
    if call.output is None or graph.is_output(call.output):
        return None
    readers = graph.readers(call.output)
    return readers[0] if len(readers) == 1 else None


def _can_be_folded(call: Call, reader: Call, calls_of: dict[int, int]) -> bool:
    layer, other = call.operation, reader.operation
    if not is_normalization(other) or reader.fixed_training or reader.input is None or reader.output is None:
        return False
    rank = len(call.output.shape)
    if isinstance(layer, keras.layers.EinsumDense):
        last = layer.equation.replace(" ", "").split("->")[1][-1]
        channels = rank - 1 if last in layer.equation.split("->")[0].split(",")[1] else -1
    else:
        channels = channel_axis(layer, rank)
    return other.axis % rank == channels and calls_of[id(layer)] == calls_of[id(other)] == 1


def _unit_rule(call: Call, rule: Rule) -> Rule:
    """Returns the rule of a unit's results: of the activation, if the layer has one."""
    activation = getattr(call.operation, "activation", None)
    if not is_linear_kind(call.operation) or rule.output == "float" or is_linear(activation):
        return rule
    return activation_rule(activation)


def _between(call: Call) -> Range | None:
    layer = call.operation
    separable = isinstance(layer, SEPARABLE) and is_linear_kind(layer)
    if separable or (call.kind == "Rescaling" and np.any(np.asarray(layer.offset))):
        return Range(f"{call.name} (inside)")
    return None


def _before_activation(call: Call) -> Range | None:
    activation = getattr(call.operation, "activation", None)
    if not is_linear_kind(call.operation) or is_linear(activation) or is_relu(activation):
        return None
    return Range(f"{call.name} (before its activation)")


def _weights_of(call: Call, names: dict[int, str]) -> tuple[RoundedWeight, ...]:
    if not isinstance(call.operation, keras.layers.Layer) or graph_of(call.operation) is not None:
        return ()
    found, pending = [], [call.operation]
    while pending:
        layer = pending.pop(0)
        pending += sublayers(layer)
        for variable, label, spec in weights_of(layer):
            if spec.role in WEIGHT_ROLES:
                axes = tuple(sorted({*spec.out_axes, *spec.parallel_axes}))
                name = names.get(id(variable), f"{call.name}/{label}")
                found.append(RoundedWeight(variable, name, Granularity(axes)))
    return tuple(found)


# ---- ranges ----------------------------------------------------------------------------------------------------------


class _Placer:
    """Walks the units of all graphs in order of execution; see `Placement`."""

    def __init__(self, model: Any, graphs: ReadGraphs):
        self._graphs = graphs
        every = [graphs.main, *graphs.nested.values()]
        self._calls_of = Counter(id(call.operation) for graph in every for call in graph.calls)
        names = {id(weight.variable): weight.name for weight in weights_in(model)}
        self._units = {id(graph): _units_of(graph, self._calls_of, names) for graph in every}
        self._ranges: list[Range] = []
        # id of a tensor that is on a grid -> its range.
        self._on: dict[int, Range] = {}
        # id of a tensor in floating point -> the range on whose grid kernels read it.
        self._float: dict[int, Range] = {}
        self._read: dict[tuple[int, int], Range] = {}
        self._written: dict[int, Range] = {}
        self._left: list[FloatLayer] = []

    def placed(self) -> Placement:
        """Returns the placement."""
        self._enter(tensors_in(self._graphs.main.inputs))
        self._walk(self._graphs.main)
        self._release_unread(tensors_in(self._graphs.main.inputs))
        return Placement(self._graphs, self._units, self._written, self._read, self._ranges, self._left)

    def _enter(self, inputs: Sequence[Any]) -> None:
        """Gives each input of a graph in floating point a grid of its own."""
        for tensor in inputs:
            if _is_float(tensor):
                self._write(tensor, self._new(str(getattr(tensor, "name", "input"))))

    def _walk(self, graph: Graph) -> None:
        for unit in self._units[id(graph)]:
            nested = self._graphs.nested.get(id(unit.first.operation))
            if nested is not None:
                self._nested(unit, nested)
            elif unit.rule.output == "shared":
                self._shared(unit)
            elif unit.rule.output != "float" or unit.is_linear:
                self._own(unit)
            if unit.rule.output == "float" and any(map(_is_float, unit.outputs)):
                self._left.append(FloatLayer(unit.first.name, unit.rule.reason))

    def _release_unread(self, inputs: Sequence[Any]) -> None:
        """Leaves inputs in floating point that no integer kernel reads."""
        units = [unit for units in self._units.values() for unit in units]
        kernels = [unit for unit in units if unit.is_linear or unit.rule.output in ("own", "fixed")]
        read = {id(self._on.get(id(tensor))) for unit in kernels for tensor in unit.first.inputs}
        for place in {id(self._on[id(one)]): self._on[id(one)] for one in inputs if id(one) in self._on}.values():
            if id(place) not in read:
                self._ranges.remove(place)
                for tensor in place.tensors:
                    self._on.pop(id(tensor), None)
                    self._written.pop(id(tensor), None)

    def _new(self, name: str, signed: bool | None = None) -> Range:
        self._ranges.append(Range(name, signed))
        return self._ranges[-1]

    def _put(self, tensor: Any, shared: Range) -> None:
        """Says that a tensor is on the grid of a range."""
        self._on[id(tensor)] = shared
        shared.tensors.append(tensor)

    def _write(self, tensor: Any, shared: Range) -> None:
        """Says that a tensor is rounded when it is computed."""
        self._put(tensor, shared)
        self._written[id(tensor)] = shared

    def _reads(self, unit: Unit, tensor: Any) -> Range:
        """Returns the range on whose grid a unit reads a tensor; rounds one in floating point for it."""
        if id(tensor) in self._on:
            return self._on[id(tensor)]
        if id(tensor) not in self._float:
            self._float[id(tensor)] = self._new(f"{unit.first.name} (its input)")
            self._float[id(tensor)].tensors.append(tensor)
        self._read[id(unit), id(tensor)] = self._float[id(tensor)]
        return self._float[id(tensor)]

    def _own(self, unit: Unit) -> None:
        for tensor in unit.first.inputs:
            if _is_float(tensor):
                self._reads(unit, tensor)
        self._ranges += [one for one in (unit.between, unit.before_activation) if one is not None]
        if unit.rule.output == "float":
            return
        signed = unit.rule.signed if unit.rule.output == "fixed" else None
        for tensor in unit.outputs:
            if _is_float(tensor):
                self._write(tensor, self._new(unit.calls[-1].name, signed))

    def _shared(self, unit: Unit) -> None:
        """Gives the inputs and outputs of an operation one grid, if one of the inputs is on a grid."""
        inputs = [tensor for tensor in unit.first.inputs if _is_float(tensor)]
        if not any(id(tensor) in self._on for tensor in inputs):
            return
        given = [self._reads(unit, tensor) for tensor in inputs]
        # What kernels prescribe cannot be shared with others: it is rounded again for this operation.
        target = next((one for one in given if one.signed is None), given[0])
        for tensor, one in zip(inputs, given, strict=True):
            if one.signed is not target.signed:
                self._read[id(unit), id(tensor)] = target
            elif self._on.get(id(tensor), self._float.get(id(tensor))) is not target:
                target = self._join(target, self._reads(unit, tensor))
        for tensor in unit.outputs:
            if not _is_float(tensor):
                continue
            if unit.rule.moves:
                self._put(tensor, target)
            else:
                self._write(tensor, target)

    def _join(self, one: Range, other: Range) -> Range:
        """Makes two ranges one, in the place of the first of them, and returns it."""
        first, last = sorted((one, other), key=self._ranges.index)
        self._ranges.remove(last)
        first.tensors += last.tensors
        places: tuple[dict[Any, Range], ...] = (self._on, self._float, self._written, self._read)
        for place in places:
            place |= {key: first for key, value in place.items() if value is last}
        return first

    def _nested(self, unit: Unit, nested: Graph) -> None:
        """Walks the graph of a nested model when its first call is met."""
        call = unit.first
        inputs, outer = tensors_in(nested.inputs), tensors_in(inputs_in(call.args, call.kwargs))
        outputs = tensors_in(nested.outputs)
        if self._calls_of[id(call.operation)] > 1:
            if not any(id(tensor) in self._on for tensor in inputs):
                self._enter(inputs)
                self._walk(nested)
            for inner, tensor in zip(inputs, outer, strict=True):
                if _is_float(tensor):
                    # Each call reads the tensors of another place.
                    self._read[id(unit), id(tensor)] = self._on[id(inner)]
        else:
            for inner, tensor in zip(inputs, outer, strict=True):
                if id(tensor) in self._on:
                    self._put(inner, self._on[id(tensor)])
            self._walk(nested)
        for inner, tensor in zip(outputs, unit.outputs, strict=True):
            if id(inner) in self._on:
                self._put(tensor, self._on[id(inner)])
