"""The report of a simplification: what was rewritten, what was left and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.reports import Skipped, skipped_section
from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class Rewrite:
    """One change of the graph.

    Attributes:
        kind: Kind of the change, such as "batch normalization folded".
        layers: The layers that the new model lacks.
        what: Details.
    """

    kind: str
    layers: tuple[str, ...]
    what: str = ""


@dataclass(frozen=True)
class SimplifyReport(Displayed):
    """What `pk.simplify` did.

    Attributes:
        model_name: Name of the model.
        layers: Number of layers and operations (before, after), those of nested models included, inputs not.
        parameters: Number of parameters (before, after).
        rewrites: The changes of the graph, in order.
        skipped: Layers that stay, with reasons.
        notes: Remarks.
    """

    main_items: ClassVar = "rewrites"

    model_name: str
    layers: tuple[int, int]
    parameters: tuple[int, int]
    rewrites: tuple[Rewrite, ...] = ()
    skipped: tuple[Skipped, ...] = ()
    notes: tuple[str, ...] = ()

    def counts(self) -> Mapping[str, int]:
        """Returns the number of removed layers for each kind of rewrite."""
        found: Counter[str] = Counter()
        for rewrite in self.rewrites:
            found[rewrite.kind] += len(rewrite.layers)
        return dict(found)

    def verdict(self) -> str:
        """Returns the sizes before and after, in one line."""
        if not self.rewrites:
            return f"Nothing to simplify: {self.layers[0]} layers, {self.parameters[0]:,} parameters."
        return (
            f"{self.layers[0]} -> {self.layers[1]} layers, {self.parameters[0]:,} -> {self.parameters[1]:,} parameters."
        )

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: rewrites, and what is left."""
        rewrites = Section(
            "Simplified",
            (Column("Rewrite", "label"), Column("Layers", "names"), Column("Details", "text", keep=5)),
            tuple((one.kind, one.layers, one.what) for one in self.rewrites),
            notes=self.notes,
        )
        left = skipped_section("Layers that stay", "Layer", self.skipped)
        return (rewrites, left) if self.skipped else (rewrites,)

    def __str__(self) -> str:
        lines = [
            f"{self.model_name}: layers {self.layers[0]} -> {self.layers[1]}, "
            f"parameters {self.parameters[0]:,} -> {self.parameters[1]:,}"
        ]
        lines += [f"  {one.kind}: {', '.join(one.layers)} {one.what}".rstrip() for one in self.rewrites]
        lines += [f"  stays: {one.name}: {one.reason}" for one in self.skipped]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
