"""The report of a removal of blocks: every candidate with its cost and the change without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Skipped, skipped_section
from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class RankedBlock:
    """One block that could be removed.

    Attributes:
        name: Name of the sum after a residual branch; otherwise that of the first layer with a kernel.
        kind: "residual branch" or "layers".
        layers: The layers that the removal removes.
        parameters: Their number of parameters.
        macs: Their multiply-accumulates of one example; None if unknown.
        change: Relative squared change of the model's outputs without this block alone; infinite if they are not
            numbers then (None in JSON).
        removed: 1 for the block that was removed first, and so on; 0 for a block that stays.
        total_change: Relative squared change of the outputs after its removal and those before it; None if it stays.
    """

    name: str
    kind: str
    layers: tuple[str, ...]
    parameters: int
    macs: int | None
    change: float
    removed: int = 0
    total_change: float | None = None


@dataclass(frozen=True)
class BlocksReport(Displayed):
    """What `pk.remove_blocks` did.

    Attributes:
        model_name: Name of the model.
        layers: Number of layers and operations (before, after), those of nested models included, inputs not.
        parameters: Number of parameters (before, after).
        macs: Multiply-accumulates of one example (before, after); None if unknown.
        blocks: The candidates, in the order of the model.
        skipped: What is no candidate, with reasons.
        notes: Remarks.
    """

    main_items: ClassVar = "blocks"

    model_name: str
    layers: tuple[int, int]
    parameters: tuple[int, int]
    macs: tuple[int | None, int | None]
    blocks: tuple[RankedBlock, ...]
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def removed(self) -> tuple[str, ...]:
        """Names of the removed blocks, in the order of their removal."""
        return tuple(one.name for one in sorted(self.blocks, key=lambda one: one.removed) if one.removed)

    def verdict(self) -> str:
        """Returns what was removed, and the sizes before and after, in one line."""
        sizes = f"{_change('parameters', self.parameters)}, {_change('MACs', self.macs)}"
        return f"Removed {', '.join(self.removed)}: {self.layers[0]} -> {self.layers[1]} layers, {sizes}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: the candidates, and what is none."""
        columns = (
            Column("Block", "name"),
            Column("Kind", "label", keep=4),
            Column("Parameters", "count"),
            Column("MACs", "count", keep=5),
            Column("Change", "number"),
            Column("Removed", "count"),
            Column("Total change", "number"),
            Column("Layers", "names", keep=3),
        )
        rows = tuple(
            (
                *(one.name, one.kind, one.parameters, one.macs, one.change),
                *(one.removed or None, one.total_change, one.layers),
            )
            for one in self.blocks
        )
        blocks = Section(
            "Blocks",
            columns,
            rows,
            explanation="Change: squared change of the model's outputs without this block alone, relative to the "
            "squared outputs. Removed: the order of the removals. Total change: the change after the removal, together "
            "with those before it.",
            notes=(_change("parameters", self.parameters), _change("multiply-accumulates", self.macs), *self.notes),
        )
        left = skipped_section("Not removable", "At", self.skipped)
        return (blocks, left) if self.skipped else (blocks,)

    def __str__(self) -> str:
        lines = [
            f"{self.model_name}: layers {self.layers[0]} -> {self.layers[1]}, "
            f"{_change('parameters', self.parameters)}, {_change('MACs', self.macs)}"
        ]
        for one in self.blocks:
            end = f", removed as number {one.removed} (total change {one.total_change:.3g})" if one.removed else ""
            lines.append(f"  {one.name} ({one.kind}, {one.parameters:,} parameters): change {one.change:.3g}{end}")
        lines += [f"  stays: {one.name}: {one.reason}" for one in self.skipped]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _change(name: str, pair: Sequence[int | None]) -> str:
    before, after = pair
    return f"{name} not known" if before is None or after is None else f"{name} {before:,} -> {after:,}"
