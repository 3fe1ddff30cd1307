"""Reference for export: the model, the samples, and the model's outputs, which every file must match."""

import contextlib
import tempfile
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import keras
import numpy as np

from prunekit.core.data.batch_parts import examples_at_once
from prunekit.core.data.calibration import listed_as_arrays
from prunekit.core.outputs.baseline import loss_names
from prunekit.delivery.litert.isolated_run import Comparison, ExportRejected, compare
from prunekit.delivery.litert.litert import ConversionError, InputSpec, Refused, Traced, input_specs, trace_and_convert

# Most examples that a model computes at once, and bytes of the outputs of its layers, which it keeps outside of a
# compiled function.
_BATCH, _BYTES = 16, 1 << 28


@dataclass(frozen=True)
class Format:
    """Export format with its largest permitted errors against the Keras model.

    The bounds are fractions of the range of each output over all samples. float32 tolerates only a different order of
    summation; float16 rounds each weight by up to 2**-11; int8 rounds weights and activations to 8 bits, where a
    confident softmax changes much for single samples near a class boundary, so the mean bound decides. (Files
    that compute wrong numbers have errors of 0.26 and more.)

    Attributes:
        suffix: Suffix that the file name appends to the model's name.
        weights: Storage type of the weights in LiteRT.
        sparse: True if constants with at least 30 % zeros are sparse-encoded.
        max_error: Bound on the largest absolute error.
        mean_error: Bound on the root of the mean squared error.
    """

    suffix: str
    weights: str = "float32"
    sparse: bool = False
    max_error: float = 1e-4
    mean_error: float = 1e-4


Measure: TypeAlias = Callable[[list[np.ndarray]], Mapping[str, float]]


class ReferenceModel:
    """Model to export, with its samples, reference outputs and conversion; outputs and conversion are cached.

    Args:
        model: Built Keras model.
        samples: Inputs in the model's input structure, samples along axis 0.
        labels: Labels, as for `export`.
        batch_size: Batch size of LiteRT files; None keeps the model's batch size.
        scratch: Exit stack that removes the conversion's temporary folder.
        measure: Function of outputs for the first samples that returns metrics by name.

    Raises:
        ValueError: The model is not built; samples or labels do not fit.
    """

    def __init__(
        self,
        model: keras.Model,
        samples: Any,
        labels: Any,
        batch_size: int | None,
        scratch: contextlib.ExitStack,
        measure: Measure | None = None,
    ) -> None:
        if not model.built:
            raise ValueError("Only a built model has weights to export. Call it on some data first.")
        samples = listed_as_arrays(samples)
        arrays = [np.asarray(array) for array in keras.tree.flatten(samples)]
        lengths = {array.shape[0] if array.ndim else 0 for array in arrays}
        if len(lengths) != 1 or 0 in lengths:
            raise ValueError(
                f"`data` are arrays with one or more examples along axis 0. Received lengths: {sorted(lengths)}."
            )
        self.model, self.structure = model, samples
        self.specs: list[InputSpec] = input_specs(model, samples)
        self.fixed = [replace(spec, shape=(batch_size or spec.shape[0], *spec.shape[1:])) for spec in self.specs]
        # NumPy's arrays of texts have no fixed type.
        self.inputs = [
            array if spec.dtype == "string" else array.astype(spec.dtype)
            for array, spec in zip(arrays, self.specs, strict=True)
        ]
        self.count = lengths.pop()
        self.labels = None if labels is None else self._classes(np.asarray(labels))
        self._scratch, self._measure = scratch, measure
        self._converted: tuple[Traced, bytes] | ConversionError | None = None

    def _classes(self, labels: np.ndarray) -> np.ndarray:
        if labels.shape[:1] != (self.count,) or labels.ndim > 2:
            raise ValueError(
                f"`labels` must hold a class, or a one-hot row, for each of the {self.count} examples. "
                f"Received: shape={labels.shape}."
            )
        return labels.argmax(-1) if labels.ndim == 2 and labels.shape[1] > 1 else labels.reshape(self.count)

    def answers(self, model: keras.Model) -> list[np.ndarray]:
        """Returns all outputs of a Keras model for all samples, as float arrays."""
        fixed = self.specs[0].shape[0]
        batch = fixed or min(_BATCH, examples_at_once(model, _BYTES))
        parts: list[list[np.ndarray]] = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for start in range(0, self.count // batch * batch if fixed else self.count, batch):
                flat = [keras.ops.convert_to_tensor(values[start : start + batch]) for values in self.inputs]
                outputs = keras.tree.flatten(model(keras.tree.pack_sequence_as(self.structure, flat), training=False))
                parts.append([np.asarray(keras.ops.convert_to_numpy(keras.ops.cast(o, "float32"))) for o in outputs])
        if not parts:
            raise ValueError(f"The model takes batches of {batch}. Received: {self.count} examples.")
        return [np.concatenate(column) for column in zip(*parts, strict=True)]

    @property
    def loss(self) -> str | None:
        """Name of the loss of the first output; None if it is not known."""
        # Not those of `reference`, which would run the model. A subclassed model declares none.
        return loss_names(self.model, len(getattr(self.model, "outputs", None) or [None]))[0]

    @cached_property
    def reference(self) -> list[np.ndarray]:
        """The model's outputs for all samples.

        Raises:
            ExportRejected: An output contains NaN or infinity.
        """
        answers = self.answers(self.model)
        if not all(np.isfinite(answer).all() for answer in answers):
            raise ExportRejected("failed", "the Keras model itself gives NaN or infinity for these samples")
        return answers

    def converted(self) -> tuple[Traced, bytes]:
        """The traced model and its plain float32 file.

        Raises:
            ExportRejected: The conversion failed, this backend has no converter, or Keras has quantized layers of the
                model.
        """
        if keras.backend.backend() != "tensorflow":
            raise ExportRejected(
                "refused",
                f"LiteRT files are made with Keras's TensorFlow backend, this is {keras.backend.backend()!r}; export "
                "'keras', load that file where KERAS_BACKEND=tensorflow is set, and export from there",
            )
        if self._converted is None:
            folder = Path(self._scratch.enter_context(tempfile.TemporaryDirectory()))
            try:
                self._converted = trace_and_convert(self.model, self.structure, self.fixed, folder)
            except ConversionError as error:
                self._converted = error
        if isinstance(self._converted, Refused):
            raise ExportRejected("refused", str(self._converted))
        if isinstance(self._converted, ConversionError):
            raise ExportRejected("failed", f"the conversion failed: {self._converted}")
        return self._converted

    def measured(self, found: Comparison, answers: list[np.ndarray]) -> Comparison:
        """Returns the comparison with the metrics of `answers`, if there is a function that measures."""
        return found if self._measure is None else replace(found, metrics=dict(self._measure(answers)))

    def compare(self, bounds: Format, answers: list[np.ndarray], what: str) -> Comparison:
        """Compares `answers`, the outputs for the first samples, with the reference outputs.

        Raises:
            ExportRejected: An error exceeds the format's bounds.
        """
        found = compare([values[: len(answers[0])] for values in self.reference], answers, self.labels, self.loss)
        if not (found.max_error <= bounds.max_error and found.mean_error <= bounds.mean_error):
            raise ExportRejected(
                "failed",
                f"it runs but disagrees with the Keras model on {what}: largest error {found.max_error:.3g}, mean "
                f"{found.mean_error:.3g} of the output range (allowed: {bounds.max_error:g} and {bounds.mean_error:g})",
                found,
            )
        return found
