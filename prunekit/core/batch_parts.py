"""Batches of fewer examples, so that what a model computes in one of them has a bounded size."""

import functools
import math
import sys
from collections.abc import Sequence
from typing import Any

import keras

from prunekit.anatomy.model_graph import graph_of, nodes_of


def examples_at_once(model: Any, most: float, *, together: bool = True) -> int:
    """Returns for how many examples the outputs of a model's calls have at most so many bytes, at least 1.

    Args:
        model: A built Keras model. One without a graph, or with a fixed batch size, has no bound: `sys.maxsize`.
        most: Number of bytes.
        together: True counts the outputs of all calls, which a functional model that is not compiled keeps until its
            call ends; False the largest one.
    """
    sizes = _sizes(model)
    if not sizes:
        return sys.maxsize
    return max(int(most // max(sum(sizes) if together else max(sizes), 1)), 1)


def in_parts(model: Any, batches: Sequence[Any], most: float, *, together: bool = False) -> list[Any]:
    """Returns batches of at most `examples_at_once` examples.

    Args:
        model: A built Keras model.
        batches: Its inputs.
        most: As for `examples_at_once`.
        together: As for `examples_at_once`.
    """
    step, found = examples_at_once(model, most, together=together), []
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
    found = []
    for node in nodes_of(model):
        found += [4 * math.prod(length or 1 for length in tensor.shape[1:]) for tensor in node.outputs]
        found += _sizes(node.operation) if isinstance(node.operation, keras.Model) else []
    return found
