"""What a placement says, in words that tests can compare."""

from __future__ import annotations

import re

import keras

from prunekit.techniques.quantize.placement.placement import Placement


def producers(placement: Placement) -> dict[int, str]:
    """Returns {id of a symbolic tensor: name of the layer, operation or input that computes it}."""
    found: dict[int, str] = {}
    graphs = placement.graphs
    for graph in (graphs.main, *graphs.nested.values()):
        for tensor in keras.tree.flatten(graph.inputs):
            found.setdefault(id(tensor), tensor.name)
        for call in graph.calls:
            # Without the number that Keras gives to names that it makes.
            name = re.sub(r"_\d+$", "", graphs.names.get(id(call.operation), call.name))
            found |= {id(tensor): name for tensor in call.outputs}
    return found


def ranges_of(placement: Placement) -> list[str]:
    """Returns a line for each range: its tensors, those in brackets that are not rounded when they are computed."""
    names, lines = producers(placement), []
    for place in placement.ranges:
        parts = [names[id(one)] if id(one) in placement.written else f"({names[id(one)]})" for one in place.tensors]
        fixed = "" if place.signed is None else (" [-1, 1)" if place.signed else " [0, 1)")
        lines.append((" ".join(parts) or place.name) + fixed)
    return lines


def reads_of(placement: Placement) -> list[str]:
    """Returns "unit <- tensor" for each tensor that a unit rounds again when it reads it."""
    names = producers(placement)
    units = {id(unit): unit.name for units in placement.units.values() for unit in units}
    return [f"{units[unit]} <- {names[tensor]}" for unit, tensor in placement.read]


def units_of_main(placement: Placement) -> list[str]:
    """Returns a line for each unit of the model itself: its calls."""
    return ["+".join(call.name for call in unit.calls) for unit in placement.units[id(placement.graphs.main)]]
