"""The report of a distillation: what was learned from which teacher."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.sections import Column, Section


@dataclass(frozen=True)
class DistilledOutput(Record):
    """One output of the student.

    Attributes:
        place: Its number, from 0.
        kind: What it is, such as "probabilities of classes".
        loss: "kl", "dist", "dkd" or "mse".
    """

    place: int
    kind: str
    loss: str


@dataclass(frozen=True)
class DistillReport(Displayed):
    """What a model learned from its teacher.

    Attributes:
        model_name: Name of the student.
        teacher_name: Name of the teacher.
        outputs: The outputs.
        features: {layer of the student: layer of the teacher}.
        cached_examples: Number of examples whose outputs of the teacher were kept at the end.
        cached_bytes: Bytes of these.
        notes: Remarks.
    """

    main_items: ClassVar = "outputs"

    model_name: str
    teacher_name: str
    outputs: tuple[DistilledOutput, ...]
    features: Mapping[str, str]
    cached_examples: int
    cached_bytes: int
    notes: tuple[str, ...] = ()

    def verdict(self) -> str:
        """Returns one sentence: the teacher, the losses, and what was kept."""
        losses = " and ".join(dict.fromkeys(one.loss for one in self.outputs))
        layers = f" and {len(self.features)} inner layers" if self.features else ""
        kept = (
            f"its outputs for {self.cached_examples:,} examples were kept ({self.cached_bytes:,} bytes)"
            if self.cached_examples
            else "its outputs were calculated in each step"
        )
        return f"learned from {self.teacher_name} by {losses}{layers}; {kept}."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: the outputs, and the layers."""
        columns = (Column("Output", "count"), Column("Kind", "label"), Column("Loss", "label"))
        rows = tuple((one.place, one.kind, one.loss) for one in self.outputs)
        explanation = f"Teacher and student: {self.verdict()}"
        found = [Section("Distillation", columns, rows, explanation=explanation, notes=self.notes)]
        if self.features:
            names = (Column("Layer", "name"), Column("Layer of the teacher", "name"))
            found.append(Section("Distilled layers", names, tuple(self.features.items())))
        return tuple(found)

    def __str__(self) -> str:
        return "\n".join([f"{self.model_name} {self.verdict()}", *(f"  note: {note}" for note in self.notes)])
