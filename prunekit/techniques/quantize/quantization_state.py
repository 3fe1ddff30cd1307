"""QuantizationState: a model whose weights lie on grids, and the grids of its tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import keras

from prunekit.core.outputs.baseline import Baseline
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import Grid
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.units import RoundedWeight, SharedGrid
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.quantize.rescaling.gamma_migration import Migration
from prunekit.techniques.quantize.rounding.calibration import Formats, GridRounding
from prunekit.techniques.quantize.rounding.simulation import simulating

# Examples from which on more of them change little for GPTQ.
_ENOUGH = 128
# Relative error of a variable in half precision.
_PRECISION = {"float16": 2.0**-11, "bfloat16": 2.0**-8}


@dataclass(frozen=True, eq=False)
class QuantizationState:
    """A model whose weights lie on grids, and the grids of its tensors.

    Attributes:
        model: The model.
        placement: Where tensors are rounded.
        formats: The codes.
        ranges: The grid of each range; empty where tensors stay in floating point.
        weights: id of a variable -> its grid.
        report: What was quantized and how.
        whole: True if nothing may stay in floating point unasked: the option `misfits` is "error", or `full_integer`.
        data_problems: What makes the calibration data doubtful; also among the notes of the report.
        migrations: The normalizations without factors and offsets in the placement.
    """

    model: Any
    placement: Placement
    formats: Formats
    ranges: dict[SharedGrid, Grid]
    weights: dict[int, Grid]
    report: QuantizationReport
    whole: bool = False
    data_problems: tuple[str, ...] = ()
    migrations: tuple[Migration, ...] = ()

    @contextlib.contextmanager
    def simulating(self) -> Iterator[Any]:
        """Inside this context the model computes as the integer file will, in `fit`, `predict` and your own loops."""
        with simulating(self.placement, GridRounding(self.formats, self.ranges, self.weights)):
            yield self.model

    def with_damage(self, baseline: Baseline) -> QuantizationState:
        """Returns the same model with what the integers change in its report, and a remark where that is much.

        Args:
            baseline: Of the model before its weights were rounded.
        """
        with self.simulating():
            damage = baseline.damage()
        remark = damage.remark(_remedy(self.report.method, self.formats))
        others = self.report.notes[len(self.data_problems) :]
        few = _few_examples(damage.examples, self.report.method)
        notes = (*self.data_problems, *([] if remark is None else [remark]), *others, *few)
        return replace(self, report=replace(self.report, damage=damage, notes=notes))

    def moved_weights(self) -> list[str]:
        """Returns the names of the weights that do not lie on their grids any more, or that the placement lacks."""
        moved = [name for one in self.migrations for name in one.changed]
        for weight in unique_weights(self.placement):
            grid = self.weights.get(id(weight.variable))
            if grid is None:
                continue
            precision = _PRECISION.get(keras.backend.standardize_dtype(weight.variable.dtype), 0.0)
            if not grid.holds(array_of(weight.variable), precision):
                moved.append(weight.name)
        return moved

    def check_unchanged(self) -> None:
        """Raises if weights do not lie on their grids any more.

        Raises:
            ValueError: A weight was changed.
        """
        moved = self.moved_weights()
        if moved:
            raise ValueError(
                f"The weights of a quantized model lie on grids. Received: {', '.join(moved[:5])} with other values, "
                "as after a training. Call pk.quantize on the model again."
            )


def _few_examples(examples: int, method: str) -> list[str]:
    """Returns a note on data that are too few for GPTQ: docs/measured/integer-defaults.md."""
    if method != "gptq" or examples >= _ENOUGH:
        return []
    return [
        f"{examples} examples were read. Outputs rounded by GPTQ had 1.5 times the error with 64 examples, and 3 times "
        "with 16, that they had with 512: pass some hundred."
    ]


def _remedy(method: str, formats: Formats) -> str:
    """Returns what to try where a quantization lost much."""
    bits, activations = formats.of_weights[0].bits, formats.activations
    if method == "training":
        return "Train longer or with a lower learning rate, or give weights and activations more bits."
    if bits < 8 and method == "nearest":
        return 'Pass method="gptq" with calibration data, or more bits.'
    if bits < 8:
        return (
            "Give the weights with the largest errors more bits (pk.choose_bits finds them), or train on integers with "
            "pk.QuantizationCallback."
        )
    if activations is not None and activations.bits == 8:
        return "Try activations of 16 bits, or train on integers with pk.QuantizationCallback."
    return "Leave the layers with the largest errors in floating point with `exclude`, or train on integers."


def unique_weights(placement: Placement) -> list[RoundedWeight]:
    """Returns the weights that are rounded, each once."""
    return list({id(weight.variable): weight for weight in placement.weights()}.values())
