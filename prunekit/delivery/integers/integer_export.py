"""Converts a model to a LiteRT file that computes with integers, with the scales of a simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import keras

from prunekit.delivery.integers.integer_file import READING, IntegerFile, with_integer_weights, with_integers
from prunekit.delivery.integers.integer_products import product
from prunekit.delivery.integers.integer_units import SCOPE
from prunekit.delivery.litert.litert import InputSpec, trace_and_convert
from prunekit.techniques.quantize.grids.grids import Grid, IntegerFormat
from prunekit.techniques.quantize.placement.placement import Placement
from prunekit.techniques.quantize.placement.units import SharedGrid, Unit
from prunekit.techniques.quantize.rounding.calibration import Formats, grid_at
from prunekit.techniques.quantize.rounding.rounding import NoRounding
from prunekit.techniques.quantize.rounding.simulation import simulating


def integer_file(
    placement: Placement,
    grids: Mapping[SharedGrid, Grid],
    formats: Formats,
    *,
    structure: Any,
    specs: Sequence[InputSpec],
    folder: Path,
    integer_io: Sequence[str] = (),
) -> IntegerFile:
    """Returns the file of a model in which its weights, and the tensors that a placement names, are integers.

    Args:
        placement: Where tensors are rounded; knows the model, which computes on TensorFlow.
        grids: The grid of each range.
        formats: The codes.
        structure: Any structure nested like the model's inputs.
        specs: The inputs, from `input_specs`.
        folder: Existing folder for temporary files of the model's size.
        integer_io: What of "inputs" and "outputs" is integers instead of float32; with "uint8" without a sign.

    Raises:
        ConversionError: The model cannot be traced or converted.
        ValueError: The codes of activations are others than all of 8 bits, or 16 bits.
    """
    if formats.activations not in (None, IntegerFormat(8, symmetric=False), IntegerFormat(16)):
        raise ValueError(
            "Integer files have activations of 8 bits with a zero point, of 16 bits without, or in floating point. "
            f'Received: {formats.activations}. Quantize with activation_bits=8, 16 or "float".'
        )
    marking = _Marking(grids, formats)
    with simulating(placement, marking):
        traced, content = trace_and_convert(placement.graphs.main.model, structure, specs, folder)
    if formats.activations is None:
        sizes = {weight.granularity.group_size for weight in placement.weights()}
        made = with_integer_weights(content, formats.of_weights, sorted(filter(None, sizes)))
    else:
        made = with_integers(
            content,
            marking.marks,
            marking.units,
            weights=formats.of_weights,
            activations=formats.activations,
            computed_by=traced.computed_by,
            cells={place: grid for place, grid in grids.items() if place.is_cell},
            integer_io=integer_io,
        )
    return replace(made, outputs=traced.outputs, batch=traced.batch)


class _Marking(NoRounding):
    """Writes a fake-quantization operation in the place of each rounding, under a name by which it is found again.

    Constants, and the weights that integer kernels read, are rounded in the file; other weights stay as they are.

    Attributes:
        marks: Names -> grids, in the order of the roundings.
        units: The units, each in the scope of its place in this list.
    """

    def __init__(self, grids: Mapping[SharedGrid, Grid], formats: Formats):
        self._grids, self._formats = grids, formats
        self._traced: Any = None
        self._number = 0
        self.marks: dict[str, Grid] = {}
        self.units: list[Unit] = []

    def running(self, unit: Unit) -> AbstractContextManager[Any]:
        """Writes the operations of a unit under a name by which its operations are found again."""
        import tensorflow as tf

        if self._formats.activations is None:
            return nullcontext()
        if unit not in self.units:
            self.units.append(unit)
        return tf.name_scope(SCOPE.format(self.units.index(unit)))

    def tensor(self, value: Any, place: SharedGrid) -> Any:
        """Writes an operation behind one that computes with integers."""
        return self._marked(value, place, "rounding")

    def argument(self, value: Any, place: SharedGrid) -> Any:
        """Writes an operation before one that reads integers."""
        return self._marked(value, place, READING)

    def product(self, layer: Any, inputs: Any, kernel: Any, bias: Any) -> Any:
        """Writes the products of a layer as one operation."""
        form = self._formats.activations
        return None if form is None else product(layer, inputs, kernel, bias, form.bits)

    def all_steps(self, operation: Any, inputs: Any) -> Any:
        """Writes one operation with the shape of the outputs, which the file has another one for."""
        import tensorflow as tf

        if self._formats.activations is None:
            return None
        return tf.matmul(inputs, tf.cast(operation.cell.kernel[:, : operation.cell.units], inputs.dtype))

    def _marked(self, value: Any, place: SharedGrid, kind: str) -> Any:
        import tensorflow as tf

        if self._formats.activations is None:
            return value
        grid = grid_at(place, self._grids, self._formats.activations)
        value = keras.ops.cast(value, "float32")
        # A model may be traced several times.
        self._number = self._number + 1 if self._traced is value.graph else 0
        self._traced = value.graph
        # With a letter behind the number, so that no name begins with another one.
        name = f"{kind}_{self._number}_of_prunekit"
        self.marks[name] = grid
        low, high = (float(grid.scale * (code - grid.zero_point)) for code in (grid.format.lowest, grid.format.highest))
        return tf.quantization.fake_quant_with_min_max_args(
            value, low, high, num_bits=grid.format.bits, narrow_range=grid.format.symmetric, name=name
        )
