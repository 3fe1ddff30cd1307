"""Bytes of memory that a LiteRT file needs for its activations, planned as LiteRT for Microcontrollers plans them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

# Bytes to which each tensor is aligned.
_ALIGNED = 16
# Bits of an entry, by the name of the type.
_BITS = {"FLOAT64": 64, "INT64": 64, "FLOAT16": 16, "INT16": 16, "INT8": 8, "UINT8": 8, "BOOL": 8, "INT4": 4}


@dataclass(frozen=True)
class Lifetime:
    """A tensor in memory.

    Attributes:
        size: Its bytes.
        first: Number of the operator that writes it.
        last: Number of the last one that reads it.
    """

    size: int
    first: int
    last: int


def arena_bytes(content: bytes) -> int:
    """Returns the bytes of the plan for all activations of a LiteRT file, inputs and outputs included, for one example.

    Not counted are buffers that kernels ask for, states of recurrent layers, and the descriptions of tensors and
    operators, which take a hundred bytes or so each. Graphs inside control flow are planned apart, and added.

    Args:
        content: The file.
    """
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(content, 0)
    names = {value: name for name, value in vars(schema.TensorType).items() if isinstance(value, int)}
    return sum(planned(_lifetimes(model, model.Subgraphs(i), names)) for i in range(model.SubgraphsLength()))


def planned(lifetimes: Sequence[Lifetime]) -> int:
    """Returns the bytes of a plan: each tensor, the largest first, at the lowest place that is free while it lives.

    Source: LiteRT for Microcontrollers, GreedyMemoryPlanner.
    """
    placed: list[tuple[int, int, Lifetime]] = []
    for one in sorted(lifetimes, key=lambda one: (-one.size, one.first)):
        start = 0
        for begin, end, other in sorted(placed, key=lambda entry: entry[0]):
            if other.first > one.last or other.last < one.first:
                continue
            if begin - start >= one.size:
                break
            start = max(start, end)
        placed.append((start, start + one.size, one))
    return max((end for _, end, _ in placed), default=0)


def _lifetimes(model: Any, graph: Any, names: dict[int, str]) -> list[Lifetime]:
    written: dict[int, int] = dict.fromkeys(map(int, _numbers(graph.InputsAsNumpy())), 0)
    read: dict[int, int] = dict.fromkeys(written, 0)
    count = graph.OperatorsLength()
    for number in range(count):
        operator = graph.Operators(number)
        for tensor in map(int, _numbers(operator.OutputsAsNumpy())):
            written.setdefault(tensor, number)
            read.setdefault(tensor, number)
        for tensor in map(int, _numbers(operator.InputsAsNumpy())):
            read[tensor] = number
    read |= dict.fromkeys(map(int, _numbers(graph.OutputsAsNumpy())), count)
    found = []
    for tensor, first in written.items():
        described = graph.Tensors(tensor)
        if model.Buffers(described.Buffer()).DataLength() or described.IsVariable():
            continue
        bits = _BITS.get(names[described.Type()], 32) * math.prod(_numbers(described.ShapeAsNumpy()).tolist())
        found.append(Lifetime(-(-bits // (8 * _ALIGNED)) * _ALIGNED, first, read[tensor]))
    return found


def _numbers(vector: Any) -> np.ndarray:
    """Returns the numbers of a vector, of which flatbuffers return 0 where there is none."""
    return np.asarray(vector, np.int64) if isinstance(vector, np.ndarray) else np.zeros(0, np.int64)
