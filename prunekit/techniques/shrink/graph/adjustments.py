"""What differs in a smaller model besides the cut weights: constants in other places, and approximations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class Adjustment:
    """One change of a layer that the removal of channels needs, exact or approximate.

    Attributes:
        place: Name of the weight or layer; "outputs" for the outputs of the model.
        change: What was changed.
        error: None for an exact change; otherwise the largest change of the layer's outputs, relative to the largest
            output, on the first two examples of the calibration data or on two random inputs.
    """

    place: str
    change: str
    error: float | None = None

    def __str__(self) -> str:
        kind = "exact" if self.error is None else f"approximate, error {self.error:.2g}"
        return f"{self.place}: {self.change} ({kind})"


def adjustments_section(adjustments: Sequence[Adjustment]) -> Section:
    """Returns a table of adjustments with their errors."""
    columns = (Column("At", "name"), Column("Change", "text"), Column("Exact", "text"), Column("Error", "number"))
    rows = [(one.place, one.change, "yes" if one.error is None else "no", one.error) for one in adjustments]
    return Section(
        "Adjustments",
        columns,
        tuple(rows),
        explanation="Changes that keep the outputs as they are without the removed channels. The error of an "
        "approximation is the largest change of the layer's outputs, relative to the largest output, on the first "
        "two examples of the calibration data or on two random inputs.",
    )
