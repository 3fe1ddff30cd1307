"""Gives a LiteRT file that computes with integers inputs and outputs of integers.

Microcontrollers want them signed, as kernels compute; cameras deliver unsigned ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import Grid, IntegerFormat

# The word for inputs and outputs of integers without a sign, and all words.
UINT8 = "uint8"
INTEGER_IO = ("inputs", "outputs", UINT8)
# An unsigned code is a signed one and this number: QUANTIZE maps one to the other exactly.
_OFFSET = 128


class FloatEndError(ValueError):
    """An input or output that is to be integers is read or computed in floating point."""


@dataclass(frozen=True)
class _UnsignedFormat(IntegerFormat):
    """The codes from 0 to 255."""

    bits: int = 8
    symmetric: bool = False

    @property
    def lowest(self) -> int:
        return 0

    @property
    def highest(self) -> int:
        return 255

    @property
    def dtype(self) -> str:
        return UINT8


def with_integer_io(graph: LiteRTGraph, grids: Mapping[int, Grid], integer_io: Sequence[str]) -> dict[str, Grid]:
    """Makes floating-point inputs and outputs integers; returns their grids by name.

    Args:
        graph: The file; changed.
        grids: Index of a tensor of integers -> its grid.
        integer_io: What of "inputs" and "outputs"; with "uint8" without a sign. "uint8" alone means both.

    Raises:
        FloatEndError: An operation reads an input, or computes an output, in floating point.
    """
    unsigned, both = UINT8 in integer_io, set(integer_io) == {UINT8}
    found: dict[str, Grid] = {}
    if both or "inputs" in integer_io:
        found |= _take_integers(graph, grids, unsigned)
    if both or "outputs" in integer_io:
        found |= _give_integers(graph, grids, unsigned)
    return found


def _take_integers(graph: LiteRTGraph, grids: Mapping[int, Grid], unsigned: bool) -> dict[str, Grid]:
    found, places = {}, {}
    names, readers = graph.signature_names(), graph.readers()
    for index in [one for one in graph.inputs if graph.is_float(one)]:
        kinds = ["" if one is graph else graph.kind(one) for one in readers.get(index, ())]
        if kinds != ["QUANTIZE"]:
            raise FloatEndError(f"Integer inputs are read by integer kernels alone. {_hint(names[index], 'read')}")
        (operator,) = readers[index]
        made = int(operator.outputs[0])
        found[names[index]] = grids[made]
        if unsigned:
            found[names[index]] = _make_unsigned(graph, index, grids[made])
            continue
        places[index] = made
        graph.operators.remove(operator)
    graph.map_inputs(places)
    return found


def _give_integers(graph: LiteRTGraph, grids: Mapping[int, Grid], unsigned: bool) -> dict[str, Grid]:
    found, places = {}, {}
    names = graph.signature_names()
    made = {int(index): one for one in graph.operators for index in one.outputs}
    for index in dict.fromkeys(one for one in graph.outputs if graph.is_float(one)):
        operator = made.get(index)
        if operator is None or graph.kind(operator) != "DEQUANTIZE":
            raise FloatEndError(
                f"Integer outputs are computed by integer kernels alone. {_hint(names[index], 'computed')}"
            )
        places[index] = int(operator.inputs[0])
        grid = found[names[index]] = grids[places[index]]
        if unsigned:
            held, places[index] = places[index], graph.new_tensor(graph.name(index), graph.open_shape(index), UINT8)
            found[names[index]] = _make_unsigned(graph, places[index], grid)
            graph.operators.append(graph.new_operator("QUANTIZE", [held], [places[index]]))
    graph.map_outputs(places)
    read = graph.readers()
    graph.operators = [one for one in graph.operators if any(int(index) in read for index in one.outputs)]
    return found


def _make_unsigned(graph: LiteRTGraph, index: int, grid: Grid) -> Grid:
    """Makes a tensor one of uint8 with the values of a grid of int8; returns its grid."""
    found = Grid(_UnsignedFormat(), grid.granularity, grid.scale, grid.zero_point + np.int32(_OFFSET))
    graph.set_dtype(index, UINT8)
    graph.set_scales(index, found.scale.reshape(-1), found.zero_point.reshape(-1))
    return found


def _hint(name: str, verb: str) -> str:
    return f"Received: {name!r}, which is {verb} in floating point. Leave it float32."
