"""Finds the layers and operations of a model in its LiteRT file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.integers.integer_kernels import MOVES
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.placement.units import Unit, is_any_normalization

# Name of the scope in which the operations of a unit are written, with its number.
SCOPE = "unit_{}_of_prunekit"
# Kind of the operation that is converted in the place of an LSTM.
STANDS_FOR_LSTM = "FULLY_CONNECTED"
_SCOPES = re.compile(SCOPE.format(r"(\d+)") + r"(_\d+)?/")


class FileUnits:
    """Finds the unit of the model that an operation belongs to, by the scope in the name of its result.

    Args:
        graph: The file as the converter made it.
        units: The units, in the order of the numbers of their scopes.
        computed_by: As for `with_integers`.
    """

    def __init__(self, graph: LiteRTGraph, units: Sequence[Unit], computed_by: Mapping[str, str]):
        self._graph, self._units = graph, units
        # The converter gives outputs names of their own, without scopes.
        self._outputs = {index: computed_by.get(name, "") for index, name in graph.signature_names().items()}

    def of(self, operator: Any) -> Unit | None:
        """Returns the unit of an operation; None for one that the converter has added."""
        index = int(operator.outputs[0])
        names = self._graph.name(index), self._outputs.get(index, "")
        found = [[self._units[int(one[1])] for one in _SCOPES.finditer(name)] for name in names]
        # The converter joins the names of what it merges or exchanges.
        units = found[0] or found[1]
        if self._graph.kind(operator) in MOVES:
            units = [one for one in units if one.rule.moves] or units
        return units[0] if units else None

    def is_normalization(self, operator: Any) -> bool:
        """Returns True for an operation of a normalization that is not folded and rounds its results."""
        unit = self.of(operator)
        return unit is not None and unit.rule.output != "float" and is_any_normalization(unit.first.operation)

    def lstm(self, operator: Any) -> Unit | None:
        """Returns the unit of an operation that stands for all steps of an LSTM; None for another operation."""
        unit = self.of(operator) if self._graph.kind(operator) == STANDS_FOR_LSTM else None
        return unit if unit is not None and unit.cell is not None else None

    def moves(self, operator: Any) -> bool:
        """Returns True if each result of an operation's unit is an entry of what it reads, zero or a constant."""
        unit = self.of(operator)
        return unit is not None and unit.rule.moves

    def listed(self, operators: Sequence[Any]) -> tuple[Skipped, ...]:
        """Returns `IntegerFile.skipped` of operations in floating point."""
        found: dict[str, list[str]] = {}
        for operator in operators:
            unit, kind = self.of(operator), self._graph.kind(operator)
            name = self._graph.name(int(operator.outputs[0])) if unit is None else unit.name
            if kind not in found.setdefault(name, []):
                found[name].append(kind)
        return tuple(Skipped(name, ", ".join(kinds)) for name, kinds in found.items())

    def remove_scopes(self) -> None:
        """Removes the scopes from the names of all tensors."""
        self._graph.rename(lambda name: _SCOPES.sub("", name))
