"""A model as plain data that can be rewritten: its graphs of calls, and what changes in its layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prunekit.anatomy.channels.graph_calls import Graph
from prunekit.anatomy.channels.graph_reader import Opened, read_graphs
from prunekit.sparsity.array_ops import array_of


@dataclass
class Change:
    """What differs when a layer is made again.

    Attributes:
        config: Entries of the config.
        values: Values of the weights, by attribute.
    """

    config: dict[str, Any] = field(default_factory=dict)
    values: dict[str, np.ndarray] = field(default_factory=dict)


class LayerGraph:
    """The graphs of a model and of its nested models, with the changes of layers. The model itself stays as it is.

    Nested models stay nested, apart from those with a layer that is also called elsewhere: Keras cannot load a file of
    such a model.

    Args:
        model: A built model with a graph of layers, or a subclassed model whose `call` consists of layers and
            operations alone.
        opened: Returns for a node of a graph, or for a model without a graph, the calls that replace it, or None.
            None opens no layer.

    Attributes:
        model: The model.
        main: Its graph.
        nested: id of a nested model -> its graph.
        names: id of a layer, operation or nested model -> its name in the new model, where that is another.
        changes: id of a layer -> what differs when it is made again.

    Raises:
        ValueError: The model's calls cannot be read.
    """

    def __init__(self, model: Any, opened: Opened | None = None):
        self.model, found = model, read_graphs(model, opened)
        self.main, self.nested, self.names = found.main, found.nested, found.names
        self.changes: dict[int, Change] = {}

    def graphs(self) -> Iterator[Graph]:
        """Yields the graph of the model, and that of each nested model which is still called."""
        pending, seen = [self.main], set()
        while pending:
            graph = pending.pop(0)
            yield graph
            found = [id(call.operation) for call in graph.calls if id(call.operation) in self.nested]
            pending += [self.nested[key] for key in dict.fromkeys(found) if key not in seen]
            seen.update(found)

    def calls_of(self, operation: Any) -> int:
        """Returns how often the graphs call a layer or operation."""
        return sum(call.operation is operation for graph in self.graphs() for call in graph.calls)

    def value(self, layer: Any, attribute: str) -> np.ndarray | None:
        """Returns the present values of a weight; None if the layer has no such weight."""
        change = self.changes.get(id(layer))
        if change is not None and attribute in change.values:
            return change.values[attribute]
        variable = getattr(layer, attribute, None)
        return None if variable is None else array_of(variable)

    def change(self, layer: Any, config: Mapping[str, Any], values: Mapping[str, np.ndarray]) -> None:
        """Changes entries of a layer's config, and weights."""
        change = self.changes.setdefault(id(layer), Change())
        change.config |= config
        # Without + 0, a pruned weight times a negative number would be -0.
        change.values |= {name: value + 0 for name, value in values.items()}

    def layer_count(self) -> int:
        """Returns the number of different layers and operations that are called, without inputs and nested models."""
        called = {id(call.operation) for graph in self.graphs() for call in graph.calls}
        return len(called - self.nested.keys())
