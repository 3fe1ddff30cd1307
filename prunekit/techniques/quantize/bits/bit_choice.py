"""BitChoice: bits for each weight, with what was known when they were chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from prunekit.anatomy.records.display import Displayed
from prunekit.anatomy.records.sections import Column, Section, Value
from prunekit.techniques.quantize.bits.bit_scan import WeightLevels
from prunekit.techniques.quantize.placement.stored_bytes import zero_point_bytes
from prunekit.techniques.quantize.report_pictures import bits_picture, errors_picture

# Bits of a weight that stays in floating point, in pictures.
_FLOAT_BITS = 32


@dataclass(frozen=True)
class Trial:
    """A choice that was quantized and evaluated; the first of a search is the model in floating point.

    Attributes:
        bytes: Bytes of all weights.
        metric: What `evaluate` returned.
    """

    bytes: int
    metric: float


@dataclass(frozen=True)
class BitChoice(Displayed):
    """Bits for each weight of a model.

    Attributes:
        model_name: Name of the model.
        weights: The weights, each at several numbers of bits.
        chosen: For each weight the index of its bits.
        other_bytes: Bytes of the weights that are not quantized, such as biases.
        path: (bytes of all weights, summed error) of the best choices from the fewest to the most bits.
        budget: Largest number of bytes that was allowed; None where a floor was given.
        floor: Least metric that was allowed; None where a budget was given.
        trials: The evaluated choices, in order of evaluation.
    """

    derived: ClassVar = ("bits", "bytes", "error")
    main_items: ClassVar = "weights"

    model_name: str
    weights: tuple[WeightLevels, ...]
    chosen: tuple[int, ...]
    other_bytes: int
    path: tuple[tuple[int, float], ...]
    budget: int | None = None
    floor: float | None = None
    trials: tuple[Trial, ...] = ()

    @property
    def bits(self) -> dict[str, int | Literal["float"]]:
        """Bits by the names of the weights, as `pk.quantize` takes them, with "float" for floating point."""
        return {one.name: one.bits[at] or "float" for one, at in zip(self.weights, self.chosen, strict=True)}

    @property
    def bytes(self) -> int:
        """Bytes of all weights of the model with these bits, with scales and zero points; biases count as floats."""
        stored = [one.stored[at] for one, at in zip(self.weights, self.chosen, strict=True)]
        return self.other_bytes + sum(one.bytes for one in stored) + zero_point_bytes(stored)

    @property
    def error(self) -> float:
        """Sum of the errors of the weights, each as if it was the only one: about that of the model's outputs."""
        return sum(one.errors[at] for one, at in zip(self.weights, self.chosen, strict=True))

    def verdict(self) -> str:
        """Returns one sentence: bits, bytes and error, and what bounded them."""
        counts = {bits: list(self.bits.values()).count(bits) for bits in dict.fromkeys(self.bits.values())}
        told = ", ".join(
            f"{count} in floating point" if bits == "float" else f"{count} with {bits} bits"
            for bits, count in sorted(counts.items(), key=lambda pair: _FLOAT_BITS if pair[0] == "float" else pair[0])
        )
        text = f"{len(self.weights)} weights: {told}; {self.bytes:,} bytes"
        if self.budget is not None:
            return f"{text} of {self.budget:,}, summed error {self.error:.3g}."
        reached = [one.metric for one in self.trials if one.bytes == self.bytes]
        return f"{text}, metric {reached[-1]:.6g} (at least {self.floor:.6g})." if reached else f"{text}."

    def sections(self) -> tuple[Section, ...]:
        """Returns tables: the weights with their errors and bits, and the evaluated choices."""
        found = [self._weights_section()]
        if self.trials:
            floor = -math.inf if self.floor is None else self.floor
            rows = tuple((one.bytes, one.metric, "yes" if one.metric >= floor else "no") for one in self.trials)
            columns = (
                Column("Bytes of all weights", "bytes"),
                Column("Metric", "number", digits=6),
                Column("Reaches the floor", "label"),
            )
            explanation = "The first is the model in floating point, its activations included."
            found.append(Section("Evaluated choices", columns, rows, explanation=explanation))
        return tuple(found)

    def _weights_section(self) -> Section:
        levels = self.weights[0].bits if self.weights else ()
        columns = (
            Column("Weight", "name"),
            Column("Shape", "shape", keep=4),
            *(Column(f"{bits} bits", "number", group="Error", keep=3) for bits in levels if bits is not None),
            Column("Bits", "label"),
            Column("Bytes", "bytes", keep=5),
        )
        rows: list[tuple[Value, ...]] = []
        for one, at in zip(self.weights, self.chosen, strict=True):
            errors = [error for bits, error in zip(one.bits, one.errors, strict=True) if bits is not None]
            rows.append((one.name, one.shape, *errors, str(one.bits[at] or "float"), one.bytes[at]))
        explanation = (
            "Error: squared change of the model's outputs on the calibration data relative to the squared outputs, "
            "with the nearest values of so many bits for this weight alone. Bytes: of the weight and its scales in a "
            "LiteRT file."
        )
        return Section("Bits of each weight", columns, tuple(rows), explanation=explanation, pictures=self._pictures())

    def _pictures(self) -> tuple[Any, ...]:
        if not self.weights:
            return ()
        errors = [
            {"name": one.name, "error": one.errors[at], "bits": one.bits[at] or _FLOAT_BITS}
            for one, at in zip(self.weights, self.chosen, strict=True)
        ]
        return bits_picture(self._picture_data()), errors_picture(errors)

    def _picture_data(self) -> dict[str, Any]:
        return {
            "path": [list(point) for point in self.path],
            "chosen": [self.bytes, self.error],
            "budget": self.budget,
            "floor": self.floor,
            "trials": [[one.bytes, one.metric] for one in self.trials],
        }

    def __str__(self) -> str:
        lines = [f"  {name}: {bits or 'float'}" for name, bits in self.bits.items()]
        return "\n".join([f"{self.model_name}: {self.verdict()}", *lines])
