"""Gives a LiteRT file that computes with integers inputs and outputs of integers, as microcontrollers want them."""

from __future__ import annotations

from collections.abc import Mapping

from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids import Grid


def take_integers(graph: LiteRTGraph, grids: Mapping[int, Grid]) -> dict[str, Grid]:
    """Makes the floating-point inputs integers; returns their grids by name.

    Args:
        graph: The file; changed.
        grids: Index of a tensor of integers -> its grid.

    Raises:
        ValueError: An operation reads an input in floating point.
    """
    found, places = {}, {}
    names, readers = graph.signature_names(), graph.readers()
    for index in [one for one in graph.inputs if graph.is_float(one)]:
        kinds = ["" if one is graph else graph.kind(one) for one in readers.get(index, ())]
        if kinds != ["QUANTIZE"]:
            raise ValueError(f"Integer inputs are read by integer kernels alone. {_hint(names[index], 'read')}")
        (operator,) = readers[index]
        places[index] = int(operator.outputs[0])
        found[names[index]] = grids[places[index]]
        graph.operators.remove(operator)
    graph.map_inputs(places)
    return found


def give_integers(graph: LiteRTGraph, grids: Mapping[int, Grid]) -> dict[str, Grid]:
    """Makes the floating-point outputs integers; returns their grids by name.

    Args:
        graph: The file; changed.
        grids: Index of a tensor of integers -> its grid.

    Raises:
        ValueError: An output is computed in floating point.
    """
    found, places = {}, {}
    names = graph.signature_names()
    made = {int(index): one for one in graph.operators for index in one.outputs}
    for index in dict.fromkeys(one for one in graph.outputs if graph.is_float(one)):
        operator = made.get(index)
        if operator is None or graph.kind(operator) != "DEQUANTIZE":
            raise ValueError(
                f"Integer outputs are computed by integer kernels alone. {_hint(names[index], 'computed')}"
            )
        places[index] = int(operator.inputs[0])
        found[names[index]] = grids[places[index]]
    graph.map_outputs(places)
    read = graph.readers()
    graph.operators = [one for one in graph.operators if any(int(index) in read for index in one.outputs)]
    return found


def _hint(name: str, verb: str) -> str:
    return f"Received: {name!r}, which is {verb} in floating point. Leave it float32."
