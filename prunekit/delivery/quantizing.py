"""quantize: puts a trained model on integer grids, and writes its integer file."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Unpack

import keras
import numpy as np

from prunekit.anatomy.model_weights import check_built
from prunekit.core.calibration import CheckedData, batches_of, check_inputs
from prunekit.core.layerwise import Progress
from prunekit.core.snapshot import write_bytes
from prunekit.delivery.export_reference import Subject
from prunekit.delivery.formatting import names
from prunekit.delivery.gzip_size import gzip_size
from prunekit.delivery.integer_comparison import TensorDifference, file_inputs, tensor_differences
from prunekit.delivery.integer_export import integer_file
from prunekit.delivery.integer_file import IntegerFile
from prunekit.delivery.integer_report import IntegerExport, IntegerExportError
from prunekit.delivery.isolated_run import Comparison, ScriptFailed, Unfit, compare, run_apart
from prunekit.delivery.keras_integers import export_keras_integers
from prunekit.delivery.litert import ConversionError
from prunekit.suggestions import check_names
from prunekit.techniques.quantize.after_training import quantized
from prunekit.techniques.quantize.grids import IntegerFormat
from prunekit.techniques.quantize.options import Options, QuantizationOptions
from prunekit.techniques.quantize.quantization_report import QuantizationReport
from prunekit.techniques.quantize.quantized_model import QuantizedModel

# Examples that a file is compared on.
_EXAMPLES = 64
# Largest and mean difference of a file's outputs from those of the simulation, as fractions of their range. Kernels
# and simulation round values between two codes differently here and there, which adds up from layer to layer.
_LARGEST, _MEAN = 0.25, 0.02
# Steps of 16 bits are a 256th as long, but kernels are off by several.
_FINER = 1 / 16
# Or this multiple of the differences of the simulation from the float model.
_OF_ROUNDING = 3.0
# With activations in floating point: another order of summation.
_SAME = 1e-4
_FLOAT_BYTES = 4
# Most tensors that a note names.
_LISTED = 8


class Quantized:
    """A model whose weights lie on integer grids.

    Attributes:
        model: The model; its weights were changed in place.
        report: What was quantized, and how.
        found: Placement and grids.
    """

    def __init__(self, found: QuantizedModel, samples: Any, float_outputs: list[np.ndarray] | None):
        self.found, self._samples, self._float_outputs = found, samples, float_outputs

    @property
    def model(self) -> Any:
        return self.found.model

    @property
    def report(self) -> QuantizationReport:
        return self.found.report

    @contextlib.contextmanager
    def simulating(self) -> Iterator[Any]:
        """Inside this context the model computes as the integer file will; yields the model.

        `predict`, `evaluate`, `fit` and eager calls run the simulation on every backend. Functions of your own that
        were traced before have to be traced again inside.
        """
        with self.found.simulating() as model:
            yield model

    def export(
        self,
        path: str | os.PathLike[str],
        *,
        samples: Any = None,
        integer_io: Sequence[str] | str = (),
    ) -> IntegerExport:
        """Writes the model as a file with the grids of this quantization, and returns how the file compares.

        The file is run before it is kept. In a LiteRT file each tensor must be at most one step of its grid from the
        simulation, or the few steps that kernels of 16 bits are known to be off. A Keras file has the weights of Dense,
        EinsumDense and Embedding layers in int8, computes in floating point as the model with weights on grids, and
        loads without prunekit.

        Args:
            path: Name of the file, which ends with ".tflite" or ".keras". An existing file is replaced.
            samples: Examples in the model's input structure that the file is compared on; None = some of the
                calibration data.
            integer_io: "inputs", "outputs" or both: these are int8 or int16 in the LiteRT file, with scale and zero
                point of their grids, instead of float32, as microcontrollers want them.

        Raises:
            ValueError: The name has another ending; there are no samples; the weights were changed since; an input or
                output that is to be integers is read or computed in floating point.
            IntegerExportError: The model cannot be converted on this backend, Keras has none of its layers in int8, or
                the file computes something else. No file is written then.
        """
        target = Path(path)
        if target.suffix not in (".tflite", ".keras"):
            raise ValueError(
                'An integer file is a LiteRT file, "NAME.tflite", or a Keras file, "NAME.keras". '
                f"Received: {str(path)!r}."
            )
        is_litert = target.suffix == ".tflite"
        self.found.check_unchanged()
        if samples is not None:
            check_inputs(self.model, samples)
        given = self._samples if samples is None else samples
        if given is None:
            raise ValueError(
                "A file is compared with the simulation before it is kept. Received: no samples, and a quantization "
                "without calibration data. Pass some inputs as `samples`."
            )
        reference = self._float_outputs if samples is None else None
        kinds = _integer_io(integer_io, self.found, is_litert)
        if not is_litert:
            return export_keras_integers(self.found, given, target, reference)
        return export_integers(self.found, given, target, reference, integer_io=kinds)[0]


def _integer_io(given: Sequence[str] | str, found: QuantizedModel, is_litert: bool) -> tuple[str, ...]:
    kinds = (given,) if isinstance(given, str) else tuple(given)
    if set(kinds) - {"inputs", "outputs"}:
        raise ValueError(f'`integer_io` lists "inputs", "outputs" or both. Received: {given!r}.')
    if kinds and (found.formats.activations is None or not is_litert):
        raise ValueError(
            "A file with activations in floating point, as each Keras file is, has inputs and outputs in floating "
            f"point. Received: integer_io={given!r}."
        )
    return kinds


def export_integers(  # noqa: PLR0913
    found: QuantizedModel,
    samples: Any,
    target: Path,
    float_outputs: list[np.ndarray] | None,
    labels: Any = None,
    *,
    integer_io: Sequence[str] = (),
) -> tuple[IntegerExport, list[np.ndarray]]:
    """Writes an integer file; returns how it compares, and its outputs for the samples.

    Args:
        found: The quantized model.
        samples: Examples in the model's input structure.
        target: Name of the file.
        float_outputs: Outputs of the model before its quantization for the samples; None if they are not known.
        labels: Classes of the samples for the first output, for the accuracy.
        integer_io: What of "inputs" and "outputs" is integers instead of float32.

    Raises:
        IntegerExportError: As for `Quantized.export`.
    """
    with contextlib.ExitStack() as scratch:
        return _Export(found, samples, labels, scratch).written(target, float_outputs, integer_io)


class _Export:
    """One export.

    Args:
        found: The quantized model.
        samples: Examples in the model's input structure.
        labels: Their classes, or None.
        scratch: Removes temporary files.
    """

    def __init__(self, found: QuantizedModel, samples: Any, labels: Any, scratch: contextlib.ExitStack):
        if keras.backend.backend() != "tensorflow":
            raise IntegerExportError(
                "LiteRT files are made with Keras's TensorFlow backend. Received: the backend "
                f"{keras.backend.backend()!r}. Save the model as a .keras file, load it where KERAS_BACKEND=tensorflow "
                "is set, and quantize and export it there."
            )
        others = [one for one in found.model._flatten_layers() if one.compute_dtype not in (None, "float32")]
        if others:
            raise IntegerExportError(
                f"Integer files are made of models that compute in float32. Received: the layer {others[0].name!r} in "
                f"{others[0].compute_dtype}. Build the model with the policy float32 and the same weights."
            )
        self._found, self._subject = found, Subject(found.model, samples, labels, None, scratch)
        self._folder = Path(scratch.enter_context(tempfile.TemporaryDirectory()))

    def written(
        self, target: Path, float_outputs: list[np.ndarray] | None, integer_io: Sequence[str]
    ) -> tuple[IntegerExport, list[np.ndarray]]:
        """Converts, compares and writes the file; returns also its outputs."""
        subject, found = self._subject, self._found
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            made = integer_file(
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
        path = self._folder / "integers.tflite"
        path.write_bytes(made.content)
        with found.simulating():
            expected = subject.answers(found.model)
        try:
            tensors = self._tensors(made, path)
            answers = self._answers(made, path)
            simulation = compare([one[: len(answers[0])] for one in expected], answers, subject.labels)
        except (ScriptFailed, Unfit) as error:
            raise IntegerExportError(f"The file was made, but {error}. It is not written.") from error
        rounding = before = None
        if float_outputs is not None:
            rounding = compare(expected, [one[: len(expected[0])] for one in float_outputs], None)
            before = compare([one[: len(answers[0])] for one in float_outputs], answers, subject.labels)
        _check(tensors, simulation, rounding, found.formats.activations)
        float_bytes = self._float_bytes(len(made.content))
        notes = _notes(len(made.content), float_bytes, tensors)
        write_bytes(target, made.content)
        sizes = (len(made.content), gzip_size([made.content]), float_bytes)
        done = IntegerExport(str(target), *sizes, made.left_float, tuple(tensors), simulation, before, notes)
        return done, answers

    def _tensors(self, made: IntegerFile, path: Path) -> list[TensorDifference]:
        """Returns the differences of the tensors for the first example."""
        if self._found.formats.activations is None:
            return []
        count = made.batch or 1
        first = keras.tree.map_structure(lambda one: np.asarray(one)[:count], self._subject.structure)
        return tensor_differences(made, path, self._found, self._subject.specs, first)

    def _answers(self, made: IntegerFile, path: Path) -> list[np.ndarray]:
        """Returns the outputs of the file, as LiteRT runs it by default."""
        subject, batch = self._subject, made.batch or _EXAMPLES
        whole = subject.count // made.batch * made.batch if made.batch else subject.count
        found = run_apart(path, file_inputs(made, subject.specs, subject.inputs), {batch: whole})
        outputs = {name: found[f"{batch}/{name}"] for name in made.outputs}
        return [
            np.asarray(made.grids[name].values(value) if name in made.grids else value, "float32")
            for name, value in outputs.items()
        ]

    def _float_bytes(self, size: int) -> int:
        """Returns the size of the float32 file; converts the model only where the integer file may have grown."""
        weights = _FLOAT_BYTES * sum(int(np.prod(one.shape)) for one in self._found.model.weights)
        if size < weights:
            return weights
        try:
            return len(self._subject.converted()[1])
        except Unfit:
            return weights


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


def quantize(
    model: Any, data: Any = None, *, progress: Progress | None = None, **options: Unpack[Options]
) -> Quantized:
    """Puts the weights of a trained model on integer grids, in place, and chooses the grids of its tensors from data.

    The model stays a Keras model that loads without prunekit: each weight has the value that an integer stands for.
    Entries that are zero stay zero. An interruption or an error leaves the model as it was.

    Args:
        model: A built Keras model.
        data: Calibration data: inputs, a pair (inputs, labels), or a dataset or list of such batches; some hundred
            examples of the training data. Needed unless activations=None and the method is "nearest".
        progress: Told of each weight that is rounded on data: (done, total, name).
        **options: `weights` (bits, 8, or bits by patterns), `activations` (8, 16 or None), `group_size`, `method`
            ("auto", "nearest", "gptq", "awq"), `weight_ranges`, `activation_ranges`, `correct_biases`, `equalize`,
            `damping`, `sparsity`, `pattern`, `include`, `exclude`, `misfits`: see
            `prunekit.techniques.quantize.options.QuantizationOptions`.

    Returns:
        A `Quantized`: `.report`, `.simulating()`, `.export(path)`.

    Raises:
        ValueError: An option has a wrong value; data are missing or not finite; a pattern matches nothing.
        TypeError: `model` is not a Keras 3 model; an option is unknown.

    Source: Jacob et al. 2018, arXiv:1712.05877 (integer arithmetic); Frantar et al. 2022, arXiv:2210.17323 (GPTQ);
        Frantar & Alistarh 2023, arXiv:2301.00774 (zeros in the same pass); Lin et al. 2023, arXiv:2306.00978 (AWQ).
    """
    check_names(options, [field.name for field in fields(QuantizationOptions)])
    chosen = QuantizationOptions(**options)
    chosen.with_data(data)
    check_built(model)
    samples = None if data is None else first_examples(inputs for inputs, _ in batches_of(CheckedData(model, data)))
    before = None if samples is None else outputs_of(model, samples)
    return Quantized(quantized(model, chosen, data, progress), samples, before)


def first_examples(batches: Iterable[Any]) -> Any:
    """Returns some examples of batches of inputs, as NumPy arrays in the model's input structure."""
    found: list[Any] = []
    for inputs in batches:
        found.append(keras.tree.map_structure(lambda one: np.asarray(keras.ops.convert_to_numpy(one)), inputs))
        if sum(len(keras.tree.flatten(one)[0]) for one in found) >= _EXAMPLES:
            break
    return keras.tree.map_structure(lambda *parts: np.concatenate(parts)[:_EXAMPLES], *found)


def outputs_of(model: Any, samples: Any) -> list[np.ndarray]:
    """Returns all outputs of a model for all samples, as float arrays."""
    with contextlib.ExitStack() as scratch:
        return Subject(model, samples, None, None, scratch).answers(model)
