"""The report of a reduced dimension: its size, and the error of every size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class DimensionSize(Record):
    """What one size loses.

    Attributes:
        size: Number of entries that are left.
        error: Squared error of the restored tensor, relative to the squared deviations from its means.
    """

    derived: ClassVar = ()

    size: int
    error: float


@dataclass(frozen=True)
class DimensionReport(Displayed):
    """What `pk.reduce_dimension` did.

    Attributes:
        model_name: Name of the model; None without one.
        layer: Name of the layer that the reduction stands before; None without a model.
        axis: The dimension, from 1: the batch is 0.
        length: Its length before.
        size: Its length after.
        error: Squared error of the restored tensor on the data, relative to the squared deviations from its means.
        sizes: The error of every size from 1.
        examples: Number of examples that were read.
        notes: Remarks.
        damage: What changed in the model's metrics and outputs; None without a model.
    """

    main_items: ClassVar = "sizes"

    model_name: str | None
    layer: str | None
    axis: int
    length: int
    size: int
    error: float
    sizes: tuple[DimensionSize, ...]
    examples: int
    notes: tuple[str, ...] = ()
    damage: Damage | None = None

    def verdict(self) -> str:
        """Returns the sizes and the error in one sentence."""
        place = "" if self.layer is None else f" before {self.layer}"
        return f"Dimension {self.axis}{place}: {self.length} -> {self.size} entries, error {self.error:.3g}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: change of the outputs, and the error of each size."""
        found = [] if self.damage is None else [self.damage.section()]
        columns = (Column("Entries", "count"), Column("Error", "number"))
        rows = tuple((one.size, one.error) for one in self.sizes)
        found.append(
            Section(
                "Entries of the dimension",
                columns,
                rows,
                explanation="Error: squared error of the restored tensor, relative to the squared deviations from its "
                "means.",
                notes=self.notes,
            )
        )
        return tuple(found)

    def __str__(self) -> str:
        lines = [self.verdict() if self.model_name is None else f"{self.model_name}: {self.verdict()}"]
        lines += [] if self.damage is None else [f"  on {self.damage.examples:,} examples of the data: {self.damage}"]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
