"""Merges equal constants of a LiteRT file."""

from __future__ import annotations

from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_folding import LINEAR
from prunekit.delivery.litert.litert_graph import LiteRTGraph


def merge_constants(graph: LiteRTGraph) -> None:
    """Lets operations read one of several equal constants of integers: biases, lengths, amounts of padding.

    Kernels stay apart, and so do the biases of operations that share one: XNNPACK keeps packed weights, whose scales
    depend on the results, by the addresses of kernel and bias.

    Args:
        graph: The file; changed.
    """
    first: dict[Any, int] = {}
    biased: set[tuple[int, int]] = set()
    for operator in graph.operators:
        places, inputs = LINEAR.get(graph.kind(operator)), [int(index) for index in operator.inputs]
        for place, index in enumerate(inputs):
            key = _key(graph, index) if index >= 0 and index not in graph.outputs else None
            if key is None or (places is not None and place == places.weights):
                continue
            if places is not None and place == places.bias:
                # Whether another operation has this kernel with the bias that it would get.
                pair = inputs[places.weights], first.setdefault(key, index)
                inputs[place] = index if pair in biased else pair[1]
                biased.add(pair)
            else:
                inputs[place] = first.setdefault(key, index)
        operator.inputs = np.array(inputs, "int32")


def _key(graph: LiteRTGraph, index: int) -> Any:
    """Returns what equal constants of integers have in common; None for other tensors."""
    if graph.dtype(index) not in ("int32", "int64"):
        return None
    return graph.stored(index)
