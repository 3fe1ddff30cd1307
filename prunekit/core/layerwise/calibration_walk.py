"""Runs a model layer by layer over calibration data, once as it was and once as it is while its weights change.

Quantization and pruning of one layer after another need, at each layer, the inputs that the changed layers before it
produce and the inputs that it had before. A model with a graph is run call by call, so that each layer runs a fixed
number of times, however many layers there are. Large outputs that do not fit into the wanted memory are computed again
where they are read.
"""

import itertools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import keras
from keras import ops

from prunekit.anatomy.graph.model_graph import filled, graph_of, inputs_in, nested_graph, nodes_of
from prunekit.core.runtime.backend import bytes_of


@dataclass(frozen=True, eq=False)
class Pair:
    """A structure of tensors in the model as it was, and in the model as it is; the same object if nothing changed."""

    before: Any
    after: Any

    @property
    def same(self) -> bool:
        """True if the weights that led to the tensors are unchanged."""
        return self.after is self.before

    def each(self, function: Callable[[Any], Any]) -> "Pair":
        """Returns the function's results; calls it once if both structures are the same."""
        before = function(self.before)
        return Pair(before, before if self.same else function(self.after))


@dataclass(frozen=True, eq=False)
class WalkedCall:
    """One call in the model's graph, or the whole model if it has no graph.

    Attributes:
        operation: The layer or operation.
        arguments: (args, kwargs) of the call, one pair per batch.
    """

    operation: Any
    arguments: Sequence[Pair]


# Returns the outputs of a call for the arguments of one batch.
Outputs = Callable[[Pair], Pair]
# Receives each call in the order of execution, and returns the function of its outputs, which gives the same results
# whenever it is called.
Visit = Callable[[WalkedCall], Outputs]


def walk(model: Any, batches: Sequence[Any], visit: Visit, memory: float = math.inf) -> None:
    """Shows every call of a model to `visit`, with the outputs that `visit` returned for the calls before it.

    Args:
        model: A built Keras model. A model without a graph of layers, and models that are called several times inside
            it, are one call.
        batches: The inputs of the model.
        visit: Called once per call.
        memory: Number of bytes of tensors above which the outputs of a call are not kept, if they are larger than its
            inputs that no other call reads: they are computed again from these, one batch at a time.

    Memory: the inputs of all calls that were not yet visited, for all batches, twice after the first change; at most
        `memory`, or the inputs that were kept before they exceeded it.
    """
    pairs = [Pair(batch, batch) for batch in (keras.tree.map_structure(ops.convert_to_tensor, one) for one in batches)]
    if graph_of(model) is None:
        visit(WalkedCall(model, [pair.each(lambda inputs: ((inputs,), {"training": False})) for pair in pairs]))
        return
    _Walk(visit, memory).through(model, _Kept(pairs))


class _Column(Protocol):
    """The values of one tensor of the graph, or of a structure of tensors, one pair per batch."""

    @property
    def sources(self) -> Sequence["_Column"]:
        """What the values are computed from."""

    def __getitem__(self, batch: int) -> Pair:
        """Returns the values in one batch."""

    def __len__(self) -> int:
        """Returns the number of batches."""


class _Kept:
    """Values that are in memory.

    Attributes:
        bytes: Their size.
    """

    sources: Sequence[_Column] = ()

    def __init__(self, pairs: Iterable[Pair]):
        self._pairs: list[Any] = list(pairs)
        self.bytes = sum(map(_size_of, self._pairs))

    def __getitem__(self, batch: int) -> Pair:
        return self._pairs[batch]

    def __len__(self) -> int:
        return len(self._pairs)

    def release(self, batch: int) -> None:
        """Forgets the values in one batch, which nothing reads any more."""
        self._pairs[batch] = None


class _Computed(Sequence[Pair]):
    """Values that are computed whenever they are read.

    Args:
        sources: What they are computed from.
        function: Returns the values in one batch from those of the sources.
    """

    def __init__(self, sources: Sequence[_Column], count: int, function: Callable[[list[Pair]], Pair]):
        self.sources, self._count, self._function = tuple(sources), count, function

    def __getitem__(self, batch: Any) -> Any:
        if not 0 <= batch < self._count:
            raise IndexError(batch)
        return self._function([source[batch] for source in self.sources])

    def __len__(self) -> int:
        return self._count


class _Walk:
    """A walk through a model and the models inside it.

    Args:
        visit: As for `walk`.
        memory: As for `walk`.
    """

    def __init__(self, visit: Visit, memory: float):
        self._visit, self._memory = visit, memory
        # The values that calls still read, by the id of their tensor: of the model, of the model inside it, ...
        self._values: list[dict[int, _Column]] = []

    def through(self, model: Any, inputs: _Column) -> list[_Column]:
        """Returns the columns of a model's outputs."""
        graph, nodes, count = graph_of(model), nodes_of(model), len(inputs)
        standard = _Computed([inputs], count, lambda found: found[0].each(graph._standardize_inputs))
        values: dict[int, _Column] = {id(tensor): _entry(standard, at) for at, tensor in enumerate(graph.inputs)}
        self._values.append(values)
        uses = Counter(id(tensor) for node in nodes for tensor in node.input_tensors)
        uses.update(map(id, graph.outputs))
        for node in nodes:
            if node.is_input:
                continue
            keys = list({id(tensor): None for tensor in node.input_tensors})
            arguments = _Computed([values[key] for key in keys], count, _filling(node, keys))
            uses.subtract(map(id, node.input_tensors))
            for key in [key for key in values if uses[key] <= 0]:
                del values[key]
            if nested_graph(node, nodes) is not None:
                outputs = self.through(node.operation, _Computed([arguments], count, _inputs_of))
            else:
                outputs = self._outputs(node.operation, arguments, [uses[id(one)] > 0 for one in node.outputs])
            values |= {
                id(tensor): column for tensor, column in zip(node.outputs, outputs, strict=True) if uses[id(tensor)] > 0
            }
        self._values.pop()
        return [values[id(tensor)] for tensor in graph.outputs]

    def _outputs(self, operation: Any, arguments: _Computed, read: Sequence[bool]) -> list[_Column]:
        """Returns the columns of a call's outputs; outputs that nothing reads are not computed."""
        function = self._visit(WalkedCall(operation, arguments))
        computed = _Computed([arguments], len(arguments), lambda found: function(found[0]).each(keras.tree.flatten))
        columns: list[_Column] = [_entry(computed, at) for at in range(len(read))]
        if not any(read):
            return columns
        live = _reached(itertools.chain.from_iterable(values.values() for values in self._values))
        last = {key: one for key, one in _reached([arguments]).items() if key not in live}
        first = computed[0]
        size = sum(_size_of(first.each(operator.itemgetter(at))) for at in range(len(read)) if read[at]) * len(computed)
        freed, held = (sum(one.bytes for one in each.values()) for each in (last, live))
        if size > freed and held + size > self._memory:
            return columns
        found = [first]
        for batch in range(len(computed)):
            if batch:
                found.append(computed[batch])
            for column in last.values():
                column.release(batch)
        return [
            _Kept(pair.each(operator.itemgetter(at)) for pair in found) if read[at] else columns[at]
            for at in range(len(read))
        ]


def _entry(column: _Column, at: int) -> _Column:
    """Returns one entry of a column of lists."""
    return _Computed([column], len(column), lambda found: found[0].each(operator.itemgetter(at)))


def _reached(columns: Iterable[_Column]) -> dict[int, _Kept]:
    """Returns the values in memory that columns are computed from, by their id."""
    found: dict[int, _Kept] = {}
    waiting, seen = list(columns), set()
    while waiting:
        column = waiting.pop()
        if id(column) in seen:
            continue
        seen.add(id(column))
        waiting.extend(column.sources)
        if isinstance(column, _Kept):
            found[id(column)] = column
    return found


def _size_of(pair: Pair) -> int:
    """Returns the number of bytes of a pair of structures of tensors."""
    sides = [pair.before] if pair.same else [pair.before, pair.after]
    return bytes_of(leaf for leaf in keras.tree.flatten(sides) if hasattr(leaf, "shape"))


def _filling(node: Any, keys: Sequence[int]) -> Callable[[list[Pair]], Pair]:
    """Returns the function that makes (args, kwargs) of a node's call from its input tensors."""

    def arguments(pairs: list[Pair]) -> Pair:
        before = [pair.before for pair in pairs]
        tensors = Pair(before, before if all(pair.same for pair in pairs) else [pair.after for pair in pairs])
        return tensors.each(lambda values: filled(node, dict(zip(keys, values, strict=True))))

    return arguments


def _inputs_of(found: list[Pair]) -> Pair:
    return found[0].each(lambda arguments: inputs_in(*arguments))
