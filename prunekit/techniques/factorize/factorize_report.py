"""The report of a factorization: rank, sizes and error of each layer, and the error of every rank."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.reports import Skipped, skipped_section
from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class FactorizedLayer(Record):
    """One factorized layer.

    Attributes:
        name: Name of its weight.
        added: Names of the new layers.
        shape: Shape of the weight.
        form: "channels", "separable" or "tucker" of a convolution, "pair" of other layers.
        ranks: Number of values between its layers, from the first one on.
        full: The largest rank of the form "channels" or "pair".
        parameters: Number of entries of the weight, and of all factors.
        error: Squared change of the layer's outputs relative to the squared outputs, with the errors of the layers
            before it. Without any inputs: squared change of the weight, relative to its squares.
        errors: Such errors of every rank from 1 of the form "channels" or "pair", of the layer alone.
        by_form: Error of the layer with each form that was compared, at no higher cost.
    """

    derived: ClassVar = ("rank",)

    name: str
    added: tuple[str, ...]
    shape: tuple[int, ...]
    form: str
    ranks: tuple[int, ...]
    full: int
    parameters: tuple[int, int]
    error: float
    errors: tuple[float, ...]
    by_form: Mapping[str, float]

    @property
    def rank(self) -> int:
        """Number of values before the last layer."""
        return self.ranks[-1]


@dataclass(frozen=True)
class FactorizeReport(Displayed):
    """What `pk.factorize` did.

    Attributes:
        model_name: Name of the model.
        layers: The factorized layers.
        skipped: Weights that stay as they are, with reasons.
        parameters: Number of parameters (before, after).
        macs: Multiply-accumulates of one example (before, after); None if unknown.
        notes: Remarks.
        damage: What changed on the calibration data: metrics and outputs; None without data.
    """

    main_items: ClassVar = "layers"

    model_name: str
    layers: tuple[FactorizedLayer, ...]
    skipped: tuple[Skipped, ...]
    parameters: tuple[int, int]
    macs: tuple[int | None, int | None]
    notes: tuple[str, ...] = ()
    damage: Damage | None = None

    def verdict(self) -> str:
        """Returns the sizes before and after, in one sentence."""
        before, after = self.parameters
        count = f"{len(self.layers)} layer{'' if len(self.layers) == 1 else 's'}"
        text = f"{count} of low rank: {before:,} -> {after:,} parameters"
        if None not in self.macs:
            text += f", {self.macs[0]:,} -> {self.macs[1]:,} MACs"
        return f"{text}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: change of the outputs, layers, what stays as it was."""
        found = [] if self.damage is None else [self.damage.section()]
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape", keep=4),
            Column("Form"),
            Column("Ranks", "shape"),
            Column("Of", "count", keep=5),
            Column("Parameters", "count"),
            Column("After", "count"),
            Column("Error", "number"),
            Column("New layers", "name", keep=3),
        )
        rows = tuple(
            (one.name, one.shape, one.form, one.ranks, one.full, *one.parameters, one.error, ", ".join(one.added))
            for one in self.layers
        )
        found.append(
            Section(
                "Layers of low rank",
                columns,
                rows,
                explanation="Error: squared change of the layer's outputs on the inputs that were read, relative to "
                "the squared outputs.",
                notes=self.notes if rows else ("No layer was factorized.", *self.notes),
            )
        )
        if self.skipped:
            found.append(skipped_section("Left as they are", "Weight", self.skipped))
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {self.verdict()}"]
        lines += [] if self.damage is None else [f"  on {self.damage.examples:,} examples of the data: {self.damage}"]
        lines += [f"  {one.name}: {_ranks(one)}, error {one.error:.3g}" for one in self.layers]
        lines += [f"  left as it is: {one.name}: {one.reason}" for one in self.skipped]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])


def _ranks(layer: FactorizedLayer) -> str:
    if layer.form in ("pair", "channels"):
        return f"rank {layer.rank} of {layer.full}"
    return f"{layer.form}, rank {' and '.join(map(str, layer.ranks))}"
