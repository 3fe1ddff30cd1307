"""Writes integer LiteRT files that were run and compared with their simulation."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.layers import own_variables
from prunekit.core.runtime.patching import computing_in
from prunekit.core.runtime.snapshot import write_bytes
from prunekit.delivery.integers.integer_comparison import TensorDifference, file_inputs, tensor_differences
from prunekit.delivery.integers.integer_export import integer_file
from prunekit.delivery.integers.integer_file import IntegerFile
from prunekit.delivery.integers.integer_report import IntegerExport, IntegerExportError
from prunekit.delivery.integers.integer_sparsity import KernelEncoding, sparsely_encoded
from prunekit.delivery.litert.export_reference import ReferenceModel
from prunekit.delivery.litert.gzip_size import gzip_size
from prunekit.delivery.litert.isolated_run import Comparison, ExportRejected, ScriptFailed, compare, run_in_subprocess
from prunekit.delivery.litert.litert import ConversionError
from prunekit.delivery.litert.xnnpack import read_verdict
from prunekit.delivery.reports.formatting import names
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.placement.stored_bytes import FLOAT_BYTES
from prunekit.techniques.quantize.quantization_state import QuantizationState

# Examples that a file is compared on, and those of them that a sparsely encoded file computes one by one.
EXAMPLES, _SINGLE = 64, 4
# Largest and mean difference of a file's outputs from those of the simulation, as fractions of their range. Kernels
# and simulation round values between two codes differently here and there, which adds up from layer to layer.
_LARGEST, _MEAN = 0.25, 0.02
# Steps of 16 bits are a 256th as long, but kernels are off by several.
_FINER = 1 / 16
# Or this multiple of the differences of the simulation from the float model.
_OF_ROUNDING = 3.0
# With activations in floating point: another order of summation.
_SAME = 1e-4
# Bytes of the weights of a model, beside which the structure of its float32 file hardly counts. The file of a smaller
# model is converted for its size, whatever the size of the integer file: files of 4 and 8 bits have one reference.
_LARGE = 1 << 20
# Most tensors that a note names.
_LISTED = 8
ENCODED = "Kernels are encoded sparsely where integer operations of a LiteRT file read them."
_LEAVE_DENSE = "It is not written. Leave `sparse` out: gzip compresses the zeros of a dense file."


@dataclass(frozen=True, eq=False)
class KnownOutputs:
    """Outputs for the samples that were computed before, so that they need not be computed again.

    Attributes:
        float_model: Of the model before its quantization, or with its present weights and tensors in floating point, or
            of the first ones of the samples; None if they are not known.
        simulation: Of the simulation, with the weights that the model has now, or of the first ones of the samples, on
            which the file is compared then; None if they are not known.
    """

    float_model: list[np.ndarray] | None = None
    simulation: list[np.ndarray] | None = None


def export_integers(  # noqa: PLR0913
    found: QuantizationState,
    samples: Any,
    target: Path,
    known: KnownOutputs,
    labels: Any = None,
    *,
    integer_io: Sequence[str] = (),
    sparse: bool = False,
) -> tuple[IntegerExport, list[np.ndarray]]:
    """Writes an integer file; returns how it compares, and its outputs for the samples.

    Args:
        found: The quantized model.
        samples: Examples in the model's input structure.
        target: Name of the file.
        known: Outputs for the samples.
        labels: Classes of the samples for the first output, for the accuracy.
        integer_io: What of "inputs" and "outputs" is integers instead of float32; with "uint8" without a sign.
        sparse: True encodes kernels sparsely where that is smaller.

    Raises:
        ValueError, IntegerExportError: As for `QuantizationResult.export`.
    """
    activations = found.formats.activations
    if sparse and activations is None:
        raise ValueError(f"{ENCODED} Received: sparse=True for a file with activations in floating point.")
    with contextlib.ExitStack() as scratch:
        export = _Export(found, samples, labels, scratch)
        made = export.made(integer_io)
        if not sparse or activations is None:
            return export.written(target, known, made, ())
        return export.written(target, known, *export.encoded(made, activations))


class _Export:
    """One export.

    Args:
        found: The quantized model.
        samples: Examples in the model's input structure.
        labels: Their classes, or None.
        scratch: Removes temporary files.
    """

    def __init__(self, found: QuantizationState, samples: Any, labels: Any, scratch: contextlib.ExitStack):
        if keras.backend.backend() != "tensorflow":
            raise IntegerExportError(
                "LiteRT files are made with Keras's TensorFlow backend. Received: the backend "
                f"{keras.backend.backend()!r}. Save the model as a .keras file, load it where KERAS_BACKEND=tensorflow "
                "is set, and quantize and export it there."
            )
        mixed = _mixed_layers(found.model)
        scratch.enter_context(computing_in("float32", mixed))
        self._in_other_precision = bool(mixed)
        self._found, self._subject = found, ReferenceModel(found.model, samples, labels, None, scratch)
        self._folder = Path(scratch.enter_context(tempfile.TemporaryDirectory()))

    def made(self, integer_io: Sequence[str]) -> IntegerFile:
        """Converts the model."""
        subject, found = self._subject, self._found
        try:
            return integer_file(
                found.placement,
                found.ranges,
                found.formats,
                structure=subject.structure,
                specs=subject.fixed,
                folder=self._folder,
                integer_io=integer_io,
            )
        except ConversionError as error:
            raise IntegerExportError(f"The model cannot be converted: {error}.") from error

    def encoded(self, dense: IntegerFile, activations: IntegerFormat) -> tuple[IntegerFile, tuple[KernelEncoding, ...]]:
        """Returns a file with its kernels encoded sparsely, and how each is stored.

        The outputs are compared with those of the file as it was, for single examples and in batches.
        """
        made, kernels = sparsely_encoded(dense, activations)
        if all(one.reason for one in kernels):
            return dense, kernels
        wrong = read_verdict(made.content).wrong
        if wrong is not None:
            raise IntegerExportError(f"The file with sparsely encoded kernels gives {wrong}. {_LEAVE_DENSE}")
        count = self._subject.count
        for batch, examples in [(1, _SINGLE), (EXAMPLES, count)] if made.batch is None else [(made.batch, count)]:
            try:
                expected = self._answers(self._saved(dense), dense, batch, examples)
                apart = compare(expected, self._answers(self._saved(made), made, batch, examples), None, None)
            except ExportRejected as error:
                raise IntegerExportError(
                    f"The file with sparsely encoded kernels was made, but {error}. {_LEAVE_DENSE}"
                ) from error
            # Kernels of 4 bits become 8 bits, which other kernels of LiteRT read, and they round differently.
            if not (apart.max_error <= _LARGEST and apart.mean_error <= _MEAN):
                raise IntegerExportError(
                    "A file with sparsely encoded kernels computes what the dense file computes. Received: a largest "
                    f"difference of {apart.max_error:.3g} and a mean one of {apart.mean_error:.3g} of the outputs' "
                    f"range in batches of {batch} (allowed: {_LARGEST:g} and {_MEAN:g}). {_LEAVE_DENSE}"
                )
        return made, kernels

    def written(
        self,
        target: Path,
        known: KnownOutputs,
        made: IntegerFile,
        kernels: tuple[KernelEncoding, ...],
    ) -> tuple[IntegerExport, list[np.ndarray]]:
        """Compares and writes the file; returns also its outputs."""
        subject, found = self._subject, self._found
        unexpected = _unexpected(made, found)
        target.parent.mkdir(parents=True, exist_ok=True)
        path = self._saved(made)
        expected, float_outputs = self._simulated(known), known.float_model
        try:
            tensors = self._tensors(made, path)
            answers = self._answers(path, made, EXAMPLES, subject.count)
            count = min(len(expected[0]), len(answers[0]))
            mine, theirs = ([one[:count] for one in outputs] for outputs in (expected, answers))
            labels = None if subject.labels is None else subject.labels[:count]
            simulation = compare(mine, theirs, labels, subject.loss)
        except (ScriptFailed, ExportRejected) as error:
            raise IntegerExportError(f"The file was made, but {error}. It is not written.") from error
        rounding = before = None
        if float_outputs is not None:
            rounding = compare(expected, [one[: len(expected[0])] for one in float_outputs], None, subject.loss)
            known_count = min(len(float_outputs[0]), len(answers[0]))
            theirs, others = ([one[:known_count] for one in outputs] for outputs in (float_outputs, answers))
            labels = None if subject.labels is None else subject.labels[:known_count]
            before = compare(theirs, others, labels, subject.loss)
        _check(tensors, simulation, rounding, found.formats.activations)
        float_bytes = self._float_bytes(len(made.content))
        notes = (*unexpected, *_notes(len(made.content), float_bytes, tensors))
        write_bytes(target, made.content)
        done = IntegerExport(
            str(target),
            len(made.content),
            gzip_size([made.content]),
            float_bytes,
            made.skipped,
            tuple(tensors),
            simulation,
            before,
            notes,
            kernels=kernels,
        )
        return done, answers

    def _simulated(self, known: KnownOutputs) -> list[np.ndarray]:
        """Returns the outputs of the simulation in float32."""
        if known.simulation is not None and not self._in_other_precision:
            return known.simulation
        with self._found.simulating():
            return self._subject.answers(self._found.model)

    def _saved(self, made: IntegerFile) -> Path:
        path = self._folder / "integers.tflite"
        path.write_bytes(made.content)
        return path

    def _tensors(self, made: IntegerFile, path: Path) -> list[TensorDifference]:
        """Returns the differences of the tensors for the first example."""
        if self._found.formats.activations is None:
            return []
        count = made.batch or 1
        first = keras.tree.map_structure(lambda one: np.asarray(one)[:count], self._subject.structure)
        return tensor_differences(made, path, self._found, self._subject.specs, first)

    def _answers(self, path: Path, made: IntegerFile, batch: int, count: int) -> list[np.ndarray]:
        """Returns the outputs of the file for the first `count` examples in batches, as LiteRT runs it by default."""
        subject, batch = self._subject, made.batch or batch
        whole = min(count, subject.count) // batch * batch if made.batch else min(count, subject.count)
        found = run_in_subprocess(path, file_inputs(made, subject.specs, subject.inputs), {batch: whole})
        outputs = {name: found[f"{batch}/{name}"] for name in made.outputs}
        return [
            np.asarray(made.grids[name].values(value) if name in made.grids else value, "float32")
            for name, value in outputs.items()
        ]

    def _float_bytes(self, size: int) -> int:
        """Returns the size of the float32 file; of a large model whose file did not grow, that of its weights."""
        weights = FLOAT_BYTES * sum(int(np.prod(one.shape)) for one in self._found.model.weights)
        if size < weights >= _LARGE:
            return weights
        try:
            return len(self._subject.converted()[1])
        except ExportRejected:
            return weights


def _mixed_layers(model: Any) -> list[Any]:
    """Returns the layers with weights in float32 that compute in another precision.

    Raises:
        IntegerExportError: A layer has its weights in another precision.
    """
    found = [one for one in model._flatten_layers() if one.compute_dtype not in (None, "float32")]
    # The precision of a container says nothing about the weights of the layers in it.
    others = ((one, kind) for one in found for kind in _float_kinds(one) if kind != "float32")
    other, kind = next(others, (None, ""))
    if other is not None:
        raise IntegerExportError(
            f"The weights of a model for an integer file are in float32. Received: the layer {other.name!r} with "
            f"weights in {kind}. Build the model with the policy float32 or mixed_float16, set the "
            "same weights, and quantize that."
        )
    return found


def _float_kinds(layer: Any) -> list[str]:
    """Returns the floating-point types of the weights of a layer, without those of layers in it."""
    kinds = [keras.backend.standardize_dtype(variable.dtype) for variable, *_ in own_variables(layer)]
    return [kind for kind in kinds if "float" in kind]


def _check(
    tensors: list[TensorDifference],
    simulation: Comparison,
    rounding: Comparison | None,
    activations: IntegerFormat | None,
) -> None:
    """Raises if a file is too far from the simulation; with activations in floating point it computes the same.

    Args:
        tensors: Differences of the tensors.
        simulation: Differences of the outputs from those of the simulation.
        rounding: Differences of the simulation from the float model, in the same unit; None if they are not known.
        activations: Codes of the tensors between layers; None = these are in floating point.
    """
    wrong = [one for one in tensors if one.is_too_large]
    if wrong:
        worst = max(wrong, key=lambda one: one.largest or 0)
        kernel = "" if worst.allowed == 1 else f" ({worst.allowed} steps for the kernel of this one)"
        raise IntegerExportError(
            f"Each tensor of an integer file is at most one step from the simulation{kernel}. Received: "
            f"{worst.name!r} with {worst.largest} steps, and {len(wrong) - 1} more. The file is not written. Leave the "
            "layer in floating point with `exclude`, and report this model to prunekit."
        )
    finer = _FINER if activations is not None and activations.bits == 16 else 1.0
    largest, mean = (_SAME, _SAME) if activations is None else (_LARGEST * finer, _MEAN * finer)
    if activations is not None and rounding is not None and np.isfinite(rounding.max_error):
        # Where rounding changes the outputs much, as in deep networks or with outputs of a few steps, so does another
        # rounding of single values.
        largest = max(largest, _OF_ROUNDING * rounding.max_error)
        mean = max(mean, _OF_ROUNDING * rounding.mean_error)
    if not (simulation.max_error <= largest and simulation.mean_error <= mean):
        raise IntegerExportError(
            "The outputs of an integer file are near those of the simulation. Received: a largest difference of "
            f"{simulation.max_error:.3g} and a mean one of {simulation.mean_error:.3g} of the outputs' range (allowed: "
            f"{largest:g} and {mean:g}). The file is not written."
        )


def _unexpected(made: IntegerFile, found: QuantizationState) -> list[str]:
    """Returns a note on what computes in floating point in a file and not by the report of the quantization.

    Raises:
        IntegerExportError: There is something, and all of the model was to become integers.
    """
    known = {one.name for one in found.report.skipped}
    others = [one for one in made.skipped if one.name not in known]
    if not others:
        return []
    listed = names([f"{one.name}: {one.reason}" for one in others], _LISTED)
    if found.whole:
        raise IntegerExportError(
            'With misfits="error" or full_integer=True all of a model becomes integers. Received: a file that '
            f"computes {listed} in floating point. It is not written. Allow that with the default options, and report "
            "this model to prunekit."
        )
    return [f"In floating point, and not in the report: {listed}. Please report this model to prunekit."]


def _notes(size: int, float_bytes: int, tensors: list[TensorDifference]) -> tuple[str, ...]:
    notes = []
    if size >= float_bytes:
        notes.append(
            f"The file is not smaller than the float32 file ({size:,} and {float_bytes:,} bytes): scales and names of "
            "the tensors need more than the integers save."
        )
    merged = dict.fromkeys(one.name for one in tensors if one.largest is None)
    if merged:
        notes.append(
            f"Tensors that the converter merged with others or moved are not compared: {names(list(merged), _LISTED)}."
        )
    return tuple(notes)
