"""Finds the layers and operations of a model in its LiteRT file."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.units import Unit, is_any_normalization

# Name of the scope in which the operations of a unit are written, with its number.
SCOPE = "unit_{}_of_prunekit"
_SCOPES = re.compile(SCOPE.format(r"(\d+)") + r"(_\d+)?/")


class FileUnits:
    """Finds the unit of the model that an operation belongs to, by the scope in the name of its result."""

    def __init__(self, graph: LiteRTGraph, units: Sequence[Unit]):
        self._graph, self._units = graph, units

    def of(self, operator: Any) -> Unit | None:
        """Returns the unit of an operation; None for one that the converter has added."""
        unit = self._named(operator.outputs[0])
        if unit is not None:
            return unit
        # The converter names what the model returns after the call: the last operation of a layer has no scope then.
        read = [self._named(index) for index in operator.inputs]
        return next((one for one in read if one is not None and one.rule.output == "float"), None)

    def _named(self, index: Any) -> Unit | None:
        """Returns the unit whose scope is in the name of a tensor; -1 is the index of none."""
        # The converter joins the names of what it merges.
        found = None if index < 0 else _SCOPES.search(self._graph.name(int(index)))
        return None if found is None else self._units[int(found[1])]

    def is_normalization(self, operator: Any) -> bool:
        """Returns True for an operation of a normalization that is not folded and rounds its results."""
        unit = self.of(operator)
        return unit is not None and unit.rule.output != "float" and is_any_normalization(unit.first.operation)

    def moves(self, operator: Any) -> bool:
        """Returns True if each result of an operation's unit is an entry of what it reads, zero or a constant."""
        unit = self.of(operator)
        return unit is not None and unit.rule.moves

    def listed(self, operators: Sequence[Any]) -> tuple[str, ...]:
        """Returns `IntegerFile.left_float` of operations in floating point."""
        found: dict[str, list[str]] = {}
        for operator in operators:
            unit, kind = self.of(operator), self._graph.kind(operator)
            if unit is None:
                found[f"{kind} {self._graph.name(int(operator.outputs[0]))}"] = []
            elif kind not in found.setdefault(f"{unit.name}: ", []):
                found[f"{unit.name}: "].append(kind)
        return tuple(name + ", ".join(kinds) for name, kinds in found.items())

    def remove_scopes(self) -> None:
        """Removes the scopes from the names of all tensors."""
        self._graph.rename(lambda name: _SCOPES.sub("", name))
