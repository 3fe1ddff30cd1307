"""Decides which tensors of a model are rounded, and which of them share a grid, as in LiteRT's integer files."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
from keras.src.backend.common.masking import get_keras_mask

from prunekit.anatomy.channels.graph_calls import Graph
from prunekit.anatomy.channels.graph_reader import ReadGraphs, read_graphs
from prunekit.anatomy.channels.recorded_calls import RecordedCall, recorded
from prunekit.anatomy.graph.model_graph import graph_of, inputs_in, tensors_in
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.reports import Skipped
from prunekit.techniques.quantize.placement.form_operations import NoIntegerForm
from prunekit.techniques.quantize.placement.integer_forms import MASKED, integer_form
from prunekit.techniques.quantize.placement.rules import rule_of, without_16_bits
from prunekit.techniques.quantize.placement.units import DisplayNames, RoundedWeight, SharedGrid, Unit, units_of


@dataclass(frozen=True, eq=False)
class Placement:
    """Where tensors are rounded.

    Attributes:
        graphs: The graphs of the model and of its nested models.
        units: id of a graph -> its units in order of execution.
        written: id of a tensor -> the range on whose grid it is rounded when it is computed.
        read: (id of a unit, id of a tensor) -> the range on whose grid a unit reads a tensor that is not on it.
        ranges: All ranges, in order of execution.
        skipped: Layers and operations that compute in floating point.
        integer_tables: ids of the layers whose tables 8-bit files store on the grid on which other layers read them.
    """

    graphs: ReadGraphs
    units: dict[int, list[Unit]]
    written: dict[int, SharedGrid]
    read: dict[tuple[int, int], SharedGrid]
    ranges: list[SharedGrid]
    skipped: list[Skipped]
    integer_tables: frozenset[int]

    @functools.cached_property
    def readers(self) -> dict[int, list[Unit]]:
        """Returns {id of a weight that is rounded: the units that read it}."""
        found: dict[int, list[Unit]] = {}
        for units in self.units.values():
            for unit in units:
                for weight in unit.weights:
                    found.setdefault(id(weight.variable), []).append(unit)
        return found

    def float_layers(self, activations: int | None) -> list[Skipped]:
        """Returns the layers and operations that compute in floating point with tensors of so many bits.

        Args:
            activations: 8 or 16; None for tensors in floating point, which gives the layers without integer kernels.
        """
        if activations != 16:
            return self.skipped
        found = list(self.skipped)
        for unit in (
            unit for units in self.units.values() for unit in units if unit.rule.output in ("own", "fixed", "shared")
        ):
            reason = without_16_bits(unit.function, unit.outputs[0].shape)
            found += [Skipped(unit.name, reason)] if reason else []
        return found

    def weights(self) -> Iterator[RoundedWeight]:
        """Yields the weights that are rounded, in each unit that reads them."""
        for units in self.units.values():
            for unit in units:
                yield from unit.weights


def place(
    model: Any,
    kept_float: Mapping[int, str] | None = None,
    group_size: int | None = None,
    *,
    full_integer: bool = False,
    fused_lstm: bool = False,
    plain: Collection[int] = (),
) -> Placement:
    """Returns where the tensors of a model are rounded.

    Layers that are made of others are replaced by the calls inside them, where these do all that the layer does.

    Args:
        model: A built model.
        kept_float: id of a layer or weight that computes in floating point although it need not -> the reason.
        group_size: So many consecutive inputs of an output share a scale of the weights; None = all of them.
        full_integer: True: layers without an integer kernel are replaced by operations with some, where these are
            known.
        fused_lstm: True: one of these computes all steps of an LSTM, as with tensors of 8 bits.
        plain: ids of the factors of normalizations that compute without factors and offsets.

    Raises:
        ValueError: The model has no graph of layers, and its `call` cannot be followed.
    """
    kept_float = kept_float or {}
    opener = LayerOpener(kept_float, full_integer=full_integer, fused_lstm=fused_lstm, plain=plain)
    graphs = read_graphs(model, opener, names_operations=full_integer)
    return _Placer(model, graphs, {**opener.reasons, **kept_float}, group_size, opener.repeated).placed()


class LayerOpener:
    """Returns the calls inside a layer without a rule, in order to round between them; None if it stays whole.

    Args:
        kept_float: id of a layer that stays whole -> the reason.
        full_integer: True: also the operations of `integer_form` in the place of a layer or operation.
        fused_lstm: As for `place`.
        plain: As for `place`.

    Attributes:
        reasons: id of a layer or operation that has no integer form as it is called -> the reason.
        repeated: ids of the operations that an integer form calls several times.
    """

    def __init__(
        self,
        kept_float: Mapping[int, str],
        *,
        full_integer: bool = False,
        fused_lstm: bool = False,
        plain: Collection[int] = (),
    ) -> None:
        self._kept_float, self._full_integer, self._fused_lstm = kept_float, full_integer, fused_lstm
        self._plain = plain
        self.reasons: dict[int, str] = {}
        self.repeated: set[int] = set()
        # With the nodes, because the id of one that is gone is used again.
        self._found: dict[int, tuple[Any, RecordedCall | None]] = {}

    def __call__(self, node: Any) -> RecordedCall | None:
        if id(node) not in self._found:
            self._found[id(node)] = node, self._opened(node)
        return self._found[id(node)][1]

    def _opened(self, node: Any) -> RecordedCall | None:
        layer = getattr(node, "operation", None)
        if layer is None or id(layer) in self._kept_float:
            return None
        try:
            form = None
            if self._full_integer:
                form = integer_form(node, fused_lstm=self._fused_lstm, plain=self._plain)
        except NoIntegerForm as error:
            self.reasons[id(layer)] = str(error)
            return None
        if form is not None:
            calls = Counter(id(one.operation) for one in form.nodes)
            self.repeated |= {key for key, count in calls.items() if count > 1}
        if form is not None or not isinstance(layer, keras.layers.Layer):
            return form
        if graph_of(layer) is not None or rule_of(layer, len(node.input_tensors)) is not None:
            return None
        # The calls inside would not see these masks.
        if any(get_keras_mask(tensor) is not None for tensor in (*node.input_tensors, *node.outputs)):
            if self._full_integer:
                self.reasons[id(layer)] = MASKED
            return None
        found = recorded(layer, node.arguments.args, node.arguments.kwargs)
        return found if found is not None and found.repeatable else None


def _is_float(tensor: Any) -> bool:
    return "float" in keras.backend.standardize_dtype(tensor.dtype)


class _Placer:
    """Walks the units of all graphs in order of execution; see `Placement`."""

    def __init__(
        self,
        model: Any,
        graphs: ReadGraphs,
        kept_float: Mapping[int, str],
        group_size: int | None,
        repeated: Collection[int],
    ):
        self._graphs = graphs
        every = [graphs.main, *graphs.nested.values()]
        self._calls_of = Counter(id(call.operation) for graph in every for call in graph.calls)
        names = DisplayNames(graphs.names, {id(weight.variable): weight.name for weight in weights_in(model)})
        self._units = {id(graph): units_of(graph, self._calls_of, names, kept_float, group_size) for graph in every}
        self._graph_of = {id(graph): graph for graph in every}
        self._ranges: list[SharedGrid] = []
        # id of an operation that is repeated step after step -> the range of all its results.
        self._repeated, self._of_steps = repeated, dict[int, SharedGrid]()
        # id of a tensor that is on a grid -> its range.
        self._on: dict[int, SharedGrid] = {}
        # id of a tensor in floating point -> the range on whose grid kernels read it.
        self._float: dict[int, SharedGrid] = {}
        self._read: dict[tuple[int, int], SharedGrid] = {}
        self._walked: set[int] = set()
        # Inputs of the model, and of models that are called several times.
        self._inputs: list[Any] = []
        self._written: dict[int, SharedGrid] = {}
        self._left: list[tuple[Unit, Skipped]] = []

    def placed(self) -> Placement:
        """Returns the placement."""
        self._enter(tensors_in(self._graphs.main.inputs))
        self._walk(self._graphs.main)
        self._release_unread()
        tables = [unit for unit, _ in self._left if self._is_integer_table(unit)]
        left = [one for unit, one in self._left if unit not in tables]
        stored = frozenset(id(unit.first.operation) for unit in tables)
        return Placement(self._graphs, self._units, self._written, self._read, self._ranges, left, stored)

    def _enter(self, inputs: Sequence[Any]) -> None:
        """Gives each input of a graph in floating point a grid of its own."""
        for tensor in inputs:
            if _is_float(tensor):
                self._inputs.append(tensor)
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
            if not any(map(_is_float, unit.outputs)):
                continue
            if unit.rule.output == "float":
                self._left.append((unit, Skipped(unit.name, unit.rule.reason)))
            elif unit.rule.output == "shared" and not unit.rule.moves and id(unit.outputs[0]) not in self._on:
                self._left.append((unit, Skipped(unit.name, "it reads a tensor in floating point")))
            elif unit.rule.output == "own" and not any(map(_is_float, unit.first.inputs)):
                reason = "it reads integers that are no codes of a grid"
                self._left.append((unit, Skipped(unit.name, reason)))

    def _is_integer_table(self, unit: Unit) -> bool:
        """Returns True for a table whose rows all readers round on one grid: the file stores it on this grid."""
        if not unit.rule.looks_up or self._calls_of[id(unit.first.operation)] > 1:
            return False
        places = self._read_on(unit.outputs[0])
        return len(set(map(id, places))) == 1 and places[0] is not None

    def _read_on(self, tensor: Any) -> list[SharedGrid | None]:
        """Returns the range on which each reader rounds a tensor in floating point; None for one that does not."""
        found: list[SharedGrid | None] = []
        for key, units in self._units.items():
            graph = self._graph_of[key]
            if graph.is_output(tensor):
                found.append(None)
            for unit in units:
                if any(one is tensor for one in unit.first.inputs):
                    place = self._read.get((id(unit), id(tensor)))
                    moves = unit.rule.moves and place is None and graph_of(unit.first.operation) is None
                    found += self._read_on(unit.outputs[0]) if moves and len(unit.outputs) == 1 else [place]
        return found

    def _release_unread(self) -> None:
        """Leaves inputs in floating point with which no integer kernel has to do."""
        units = [unit for units in self._units.values() for unit in units]
        kernels = [unit for unit in units if unit.is_linear or unit.rule.output in ("own", "fixed")]
        tensors = [tensor for unit in kernels for tensor in (*unit.first.inputs, *unit.outputs)]
        used = {id(self._on.get(id(tensor))) for tensor in tensors} | {id(shared) for shared in self._float.values()}
        for place in {id(self._on[id(one)]): self._on[id(one)] for one in self._inputs}.values():
            if id(place) not in used:
                self._ranges.remove(place)
                for tensor in place.tensors:
                    self._on.pop(id(tensor), None)
                    self._written.pop(id(tensor), None)
                for key in [key for key, shared in self._read.items() if shared is place]:
                    del self._read[key]

    def _new(self, name: str, signed: bool | None = None) -> SharedGrid:
        self._ranges.append(SharedGrid(name, signed))
        return self._ranges[-1]

    def _range_of(self, unit: Unit, signed: bool | None) -> SharedGrid:
        """Returns a range for the result of a unit; one for all steps of an operation that is repeated."""
        key = id(unit.first.operation)
        if key not in self._repeated:
            return self._new(unit.name, signed)
        if key not in self._of_steps:
            self._of_steps[key] = self._new(unit.name, signed)
        return self._of_steps[key]

    def _put(self, tensor: Any, shared: SharedGrid) -> None:
        """Says that a tensor is on the grid of a range."""
        self._on[id(tensor)] = shared
        shared.tensors.append(tensor)

    def _write(self, tensor: Any, shared: SharedGrid) -> None:
        """Says that a tensor is rounded when it is computed."""
        self._put(tensor, shared)
        self._written[id(tensor)] = shared

    def _reads(self, unit: Unit, tensor: Any) -> SharedGrid:
        """Returns the range on whose grid a unit reads a tensor; rounds one in floating point for it."""
        if id(tensor) in self._on:
            return self._on[id(tensor)]
        if id(tensor) not in self._float:
            self._float[id(tensor)] = self._new(f"{unit.name} (its input)")
            self._float[id(tensor)].tensors.append(tensor)
        self._read[id(unit), id(tensor)] = self._float[id(tensor)]
        return self._float[id(tensor)]

    def _own(self, unit: Unit) -> None:
        for tensor in unit.first.inputs:
            if _is_float(tensor):
                self._reads(unit, tensor)
        inside = (unit.between, unit.before_activation, unit.cell)
        self._ranges += [one for one in inside if one is not None]
        if unit.rule.output == "float":
            return
        signed = unit.rule.signed if unit.rule.output == "fixed" else None
        for tensor in unit.outputs:
            if _is_float(tensor):
                self._write(tensor, self._range_of(unit, signed))

    def _shared(self, unit: Unit) -> None:
        """Gives the inputs and outputs of an operation one grid, if one of the inputs is on a grid."""
        inputs = [tensor for tensor in unit.first.inputs if _is_float(tensor)]
        if not any(id(tensor) in self._on for tensor in inputs):
            return
        given = [self._reads(unit, tensor) for tensor in inputs]
        target = next((one for one in given if one.signed is None), given[0])
        if any(one.signed is not target.signed for one in given) and target.signed is not None:
            target = self._new(unit.name)
        for tensor, one in zip(inputs, given, strict=True):
            if one.signed is not target.signed:
                # A grid that a kernel prescribes is shared with no other tensor: this one is rounded again.
                self._read[id(unit), id(tensor)] = target
            elif self._on.get(id(tensor), self._float.get(id(tensor))) is not target:
                target = self._join(target, self._reads(unit, tensor))
        for tensor in unit.outputs:
            if not _is_float(tensor):
                continue
            if unit.rule.moves and not unit.adds_constants:
                self._put(tensor, target)
            else:
                self._write(tensor, target)

    def _join(self, one: SharedGrid, other: SharedGrid) -> SharedGrid:
        """Makes two ranges one, in the place of the first of them, and returns it."""
        first, last = sorted((one, other), key=self._ranges.index)
        self._ranges.remove(last)
        first.tensors += last.tensors
        places: tuple[dict[Any, SharedGrid], ...] = (self._on, self._float, self._written, self._read, self._of_steps)
        for place in places:
            place |= {key: first for key, value in place.items() if value is last}
        return first

    def _nested(self, unit: Unit, nested: Graph) -> None:
        """Walks the graph of a nested model when its first call is met."""
        call = unit.first
        inputs, outer = tensors_in(nested.inputs), tensors_in(inputs_in(call.args, call.kwargs))
        outputs = tensors_in(nested.outputs)
        if self._calls_of[id(call.operation)] > 1:
            if id(nested) not in self._walked:
                self._walked.add(id(nested))
                self._enter(inputs)
                self._walk(nested)
            for inner, tensor in zip(inputs, outer, strict=True):
                if id(inner) in self._on:
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
