"""Stores weights of a LiteRT file as integers that are converted to floats where float operations read them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.ranges import narrowest_grid
from prunekit.techniques.quantize.stored_bytes import ENTRIES, PER_SCALE

# The first versions of DEQUANTIZE with a scale for each index of an axis, and with codes of 4 bits.
_PER_CHANNEL, _FOUR_BITS = 5, 6


def store_weights(graph: LiteRTGraph, forms: Sequence[IntegerFormat]) -> None:
    """Replaces constants of floats whose values lie on grids by integers, with a DEQUANTIZE before the first reader.

    The operations compute what they did: an interpreter converts the constants when it first runs.

    Args:
        graph: The file; changed.
        forms: Codes of the weights, those with the fewest bits first.
    """
    added = []
    for index in sorted({int(index) for one in graph.operators for index in one.inputs}):
        values = graph.values(index)
        found = None if values is None else _grid(values, forms)
        if values is None or found is None:
            continue
        grid, axis = found
        codes = grid.codes(values).astype("int8")
        few = grid.format.bits <= 4
        name = graph.name(index)
        constant = graph.new_int4_constant(name, codes) if few else graph.new_constant(name, codes)
        graph.set_scales(constant, grid.scale.reshape(-1), grid.zero_point.reshape(-1), axis)
        floats = graph.new_tensor(f"{name}_float", values.shape, "float32")
        operator = graph.new_operator("DEQUANTIZE", [constant], [floats])
        graph.replace(index, floats)
        graph.need_version(operator, _FOUR_BITS if few else _PER_CHANNEL)
        added.append(operator)
    graph.operators = [*added, *graph.operators]


def _grid(values: np.ndarray, forms: Sequence[IntegerFormat]) -> tuple[Grid, int] | None:
    """Returns the grid on which the values lie, and the axis of its scales; None if there is none."""
    if values.size < ENTRIES or not values.any():
        return None
    for axis, length in enumerate(values.shape):
        if values.size < PER_SCALE * length:
            continue
        grid = narrowest_grid(values, forms, Granularity((axis,)))
        if grid.holds(values):
            return grid, axis
    return None
