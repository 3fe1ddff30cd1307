"""Splits batches, so that the outputs of a model's calls have a bounded size on each part."""

import functools
import math
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import keras

from prunekit.anatomy.graph.model_graph import graph_of, nodes_of

# Which outputs of a model's calls are counted: all, which a functional model that is not compiled keeps until its call
# ends; the largest one; or the most that are still read at a time.
Counted = Literal["all", "largest", "live"]


def examples_at_once(model: Any, most: float, counted: Counted = "all") -> int:
    """Returns for how many examples the outputs of a model's calls have at most so many bytes, at least 1.

    Args:
        model: A built Keras model. One without a graph, or with a fixed batch size, has no bound: `sys.maxsize`.
        most: Number of bytes.
        counted: The outputs that are counted.
    """
    sizes = _sizes(model)
    if not sizes:
        return sys.maxsize
    size = _live(model) if counted == "live" else max(sizes) if counted == "largest" else sum(sizes)
    return max(int(most // max(size, 1)), 1)


def in_parts(model: Any, batches: Sequence[Any], most: float, counted: Counted = "largest") -> list[Any]:
    """Returns batches of at most `examples_at_once` examples.

    Args:
        model: A built Keras model.
        batches: Its inputs.
        most: As for `examples_at_once`.
        counted: As for `examples_at_once`.
    """
    step, found = examples_at_once(model, most, counted), []
    for batch in batches:
        count = next(len(leaf) for leaf in keras.tree.flatten(batch) if leaf is not None)
        if step >= count:
            found.append(batch)
            continue
        for start in range(0, count, step):
            found.append(keras.tree.map_structure(functools.partial(_part, slice(start, start + step)), batch))
    return found


def _part(part: slice, leaf: Any) -> Any:
    return None if leaf is None else leaf[part]


def _sizes(model: Any) -> list[int]:
    """Returns the bytes that each tensor of a model's graph has for an example; open lengths count as 1."""
    graph = graph_of(model)
    if graph is None or any(tensor.shape[0] is not None for tensor in graph.inputs):
        return []
    found: list[int] = []
    for node in nodes_of(model):
        found += map(_size, node.outputs)
        found += _sizes(node.operation)
    return found


def _size(tensor: Any) -> int:
    return 4 * math.prod(length or 1 for length in tensor.shape[1:])


def _live(model: Any) -> int:
    """Returns the most bytes of an example's outputs that exist at a time, if each is freed once nothing reads it."""
    nodes, graph = nodes_of(model), graph_of(model)
    uses = Counter(id(tensor) for node in nodes for tensor in node.input_tensors)
    uses.update(map(id, graph.outputs))
    held: dict[int, int] = {}
    most = 0
    for node in nodes:
        inside = _live(node.operation) if graph_of(node.operation) else 0
        held |= {id(tensor): _size(tensor) for tensor in node.outputs}
        most = max(most, sum(held.values()) + inside)
        uses.subtract(map(id, node.input_tensors))
        held = {key: size for key, size in held.items() if uses[key] > 0}
    return most
