"""The report of a clustering: values, bytes and error of each weight."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

from prunekit.anatomy.records.damage import Damage
from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.plain_data import Record
from prunekit.anatomy.records.reports import Skipped, skipped_section
from prunekit.anatomy.records.sections import Column, Section

_FLOAT_BYTES = 4
# Who reads indices into codebooks.
_WHERE = (
    "The model computes with plain values, as before. Its file is smaller where it is compressed, and where the "
    "runtime reads indices and codebooks, as LiteRT for Microcontrollers, Core ML and OpenVINO do; LiteRT on phones "
    "does not."
)


@dataclass(frozen=True)
class ClusteredWeight(Record):
    """One weight on centroids.

    Attributes:
        name: Its path in the model.
        shape: Its shape.
        values: Largest number of different values in a codebook, zero included.
        codebooks: Number of codebooks.
        zeros: Number of entries that are exactly zero.
        entropy: Bits that an entry takes on average, if each value is coded by how often it occurs.
        error: With calibration data: squared change of the layer's outputs on them, relative to the squared outputs,
            with the errors of the layers before it. Without: squared change of the weight, relative to its squares.
    """

    derived: ClassVar = ("bytes",)

    name: str
    shape: tuple[int, ...]
    values: int
    codebooks: int
    zeros: int
    entropy: float
    error: float

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Bytes of its indices, of equally many bits each, and of its codebooks in float32."""
        return stored_bytes(self.size, self.values, self.codebooks)


def stored_bytes(size: int, values: int, codebooks: int) -> int:
    """Returns the bytes of indices, of equally many bits each, and of codebooks in float32.

    Args:
        size: Number of entries.
        values: Number of values of a codebook.
        codebooks: Number of codebooks.
    """
    return math.ceil(size * math.ceil(math.log2(max(values, 2))) / 8) + _FLOAT_BYTES * values * codebooks


@dataclass(frozen=True)
class ClusterReport(Displayed):
    """What `pk.cluster` did.

    Attributes:
        model_name: Name of the model.
        method: "kmeans" or "gptq".
        weights: The weights on centroids.
        skipped: Weights that stay as they were, with reasons.
        parameters: Number of all weights of the model.
        notes: Remarks.
        damage: What changed on the calibration data: metrics and outputs; None without data.
    """

    derived: ClassVar = ("bytes",)
    main_items: ClassVar = "weights"

    model_name: str
    method: str
    weights: tuple[ClusteredWeight, ...]
    skipped: tuple[Skipped, ...]
    parameters: int
    notes: tuple[str, ...] = ()
    damage: Damage | None = None

    @property
    def bytes(self) -> tuple[int, int]:
        """Bytes of all weights in float32, and with indices and codebooks in the place of the clustered ones."""
        others = self.parameters - sum(one.size for one in self.weights)
        return _FLOAT_BYTES * self.parameters, sum(one.bytes for one in self.weights) + _FLOAT_BYTES * others

    def verdict(self) -> str:
        """Returns one sentence: weights, values and bytes."""
        before, after = self.bytes
        values = " and ".join(map(str, sorted({one.values for one in self.weights}))) or "no"
        text = f"{len(self.weights)} weights on codebooks of {values} values ({self.method})"
        return f"{text}: {before:,} -> {after:,} bytes as indices and codebooks."

    def sections(self) -> tuple[Section, ...]:
        """Returns the report as sections: change of the outputs, weights, what stays as it was."""
        found = [] if self.damage is None else [self.damage.section()]
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape", keep=4),
            Column("Values", "count"),
            Column("Codebooks", "count", keep=5),
            Column("Zeros", "count", keep=3),
            Column("Bytes", "bytes", keep=6),
            Column("Entropy", "number", keep=2),
            Column("Error", "number"),
        )
        rows = tuple(
            (one.name, one.shape, one.values, one.codebooks, one.zeros, one.bytes, one.entropy, one.error)
            for one in self.weights
        )
        found.append(
            Section(
                "Clustered weights",
                columns,
                rows,
                explanation="Bytes: of indices and codebooks. Entropy: bits of an entry if each value is coded by how "
                "often it occurs. Error: squared change of the layer's outputs on the calibration data relative to the "
                "squared outputs; without data, squared change of the weight relative to its squares.",
                notes=(_WHERE,) if rows else ("No weight is clustered.",),
            )
        )
        if self.skipped:
            found.append(skipped_section("Not clustered", "Weight", self.skipped))
        return tuple(found)

    def __str__(self) -> str:
        lines = [f"{self.model_name}: {self.verdict()}"]
        lines += [] if self.damage is None else [f"  on {self.damage.examples:,} examples of the data: {self.damage}"]
        lines += [f"  not clustered: {one.name}: {one.reason}" for one in self.skipped]
        return "\n".join([*lines, *(f"  note: {note}" for note in self.notes)])
