"""Converts Keras models to LiteRT. The model is traced and saved once; every format is converted from that trace."""

from __future__ import annotations

import contextlib
import logging
import re
import tempfile
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.model_weights import quantized_by_keras
from prunekit.core.runtime.hidden_output import STDERR, hidden_output

# Most layers that a refusal names.
_LISTED = 5


class ConversionError(RuntimeError):
    """The model cannot be converted; the message is the converter's message, shortened."""


class Refused(ConversionError):
    """The model is not given to the converter, for the reason in the message."""


@dataclass(frozen=True, eq=False)
class Traced:
    """A model saved as one TensorFlow function, ready for conversion.

    Attributes:
        saved: SavedModel folder with the function and its weights.
        outputs: Names of the outputs, in the order of the model's flattened output structure.
        batch: The fixed batch size; None permits any batch size.
        computed_by: Name of an output -> name of the TensorFlow tensor that the model returned.
    """

    saved: Path
    outputs: tuple[str, ...]
    batch: int | None
    computed_by: Mapping[str, str]


@dataclass(frozen=True)
class InputSpec:
    """Input of a model: name in the file, shape (batch axis first, None = any length) and dtype."""

    name: str
    shape: tuple[int | None, ...]
    dtype: str


def input_specs(model: keras.Model, samples: Any) -> list[InputSpec]:
    """Returns the specs of all inputs, in the order of `keras.tree.flatten(samples)`.

    Names, shapes and dtypes come from the model where it declares its inputs, else from `samples`.

    Args:
        model: A built Keras model.
        samples: Array, or list, tuple or dict of arrays in the model's input structure; samples along axis 0.

    Raises:
        ValueError: The number of arrays in `samples` differs from the number of the model's inputs.
    """
    arrays = [np.asarray(array) for array in keras.tree.flatten(samples)]
    keys = sorted(samples) if isinstance(samples, dict) else []
    known = getattr(model, "inputs", None)
    if not known:  # a subclassed model
        names = _names(keys, len(arrays), "input")
        kinds = {"f": model.input_dtype, "i": "int32", "u": "int32"}
        return [
            InputSpec(name, (None, *array.shape[1:]), kinds.get(array.dtype.kind, array.dtype.name))
            for name, array in zip(names, arrays, strict=True)
        ]
    if len(known) != len(arrays):
        raise ValueError(
            f"`data` hold an array for each input of the model, {len(known)} in all. Received: {len(arrays)}."
        )
    by_name = {tensor.name: tensor for tensor in known}
    if keys and all(key in by_name for key in keys):
        known = [by_name[key] for key in keys]  # match a dict by name, not by order
    names = _names([tensor.name for tensor in known], len(known), "input")
    return [
        InputSpec(name, tuple(tensor.shape), keras.backend.standardize_dtype(tensor.dtype))
        for name, tensor in zip(names, known, strict=True)
    ]


def trace(model: keras.Model, structure: Any, specs: Sequence[InputSpec], folder: Path) -> Traced:
    """Traces the model as one TensorFlow function with named inputs and outputs.

    Args:
        model: A built Keras model on the TensorFlow backend.
        structure: Any structure nested like the model's inputs.
        specs: The inputs, flattened, from `input_specs`.
        folder: Existing folder for the SavedModel, needed until the last conversion; takes the model's size on disk.

    Raises:
        ConversionError: The model cannot be traced, or the folder is full.
    """
    import tensorflow as tf

    names: list[str] = []
    computed_by: dict[str, str] = {}

    def serve(*flat: Any) -> dict[str, Any]:
        outputs = keras.tree.flatten(model(keras.tree.pack_sequence_as(structure, list(flat)), training=False))
        known = getattr(model, "output_names", None)
        names[:] = _names(known if len(outputs) > 1 else None, len(outputs), "output")
        # A constant has no name.
        computed_by.update((name, getattr(tensor, "name", "")) for name, tensor in zip(names, outputs, strict=True))
        return {name: tf.identity(tensor) for name, tensor in zip(names, outputs, strict=True)}

    tensors = [tf.TensorSpec(spec.shape, spec.dtype, name=spec.name) for spec in specs]
    saved = Path(tempfile.mkdtemp(dir=folder))
    try:
        with warnings.catch_warnings(), _silence():
            warnings.simplefilter("ignore")
            module = tf.Module()
            module.serve = tf.function(serve, autograph=False)
            function = module.serve.get_concrete_function(*tensors)
            module.weights = list(function.variables)
            # Save to disk, so that the converter reads the weights itself. As graph constants, the weights would be
            # in memory thirty times.
            tf.saved_model.save(module, str(saved), signatures=function)
    except (OSError, tf.errors.ResourceExhaustedError, tf.errors.PermissionDeniedError) as error:
        raise ConversionError(
            f"the converter's input cannot be written to {saved}: {_shorten(str(error))}. Set TMPDIR to a folder with "
            "more free space than the weights need"
        ) from error
    except Exception as error:
        raise ConversionError(f"the model cannot be traced: {_shorten(str(error))}") from error
    return Traced(saved, tuple(names), specs[0].shape[0], computed_by)


def convert(traced: Traced, *, weights: str = "float32", sparse: bool = False) -> bytes:
    """Converts a traced model; returns the bytes of the LiteRT file.

    Args:
        traced: Result of `trace`.
        weights: "float32", "float16" or "int8" (stored as int8, computed with activations quantized on the fly).
        sparse: True encodes constants with at least 30 % zeros sparsely.

    Raises:
        ConversionError: The converter failed.
    """
    import tensorflow as tf

    optimizations = [tf.lite.Optimize.DEFAULT] if weights != "float32" else []
    try:
        with _silence():
            converter = tf.lite.TFLiteConverter.from_saved_model(str(traced.saved))
            converter.optimizations = optimizations + ([tf.lite.Optimize.EXPERIMENTAL_SPARSITY] if sparse else [])
            if weights == "float16":
                converter.target_spec.supported_types = [tf.float16]
            return converter.convert()
    except Exception as error:
        raise ConversionError(_shorten(str(error))) from error


def check_convertible(model: Any) -> None:
    """Raises if Keras has quantized layers of a model, before a converter makes something else of them.

    Raises:
        Refused: There are such layers.
    """
    found = quantized_by_keras(model)
    if found:
        raise Refused(
            f"Keras has quantized its layers {', '.join(found[:_LISTED])}. The converter fails on int8 layers, or has "
            "files convert each weight to floating point in every call; files of int4 layers in groups are larger than "
            "those in float32. Export the model as it was before, or write integers with pk.quantize"
        )


def trace_and_convert(
    model: keras.Model, structure: Any, specs: Sequence[InputSpec], folder: Path
) -> tuple[Traced, bytes]:
    """Returns a traced model and its float32 file; fixes the batch size at 1 if an open batch size fails.

    For example, the tensor lists of recurrent layers need a known batch size.

    Raises:
        Refused: Keras has quantized layers of the model.
        ConversionError: The conversion fails with an open batch size and with batch size 1.
    """
    check_convertible(model)
    traced = trace(model, structure, specs, folder)
    try:
        return traced, convert(traced)
    except ConversionError:
        if traced.batch is not None:
            raise
    fixed = trace(model, structure, [replace(spec, shape=(1, *spec.shape[1:])) for spec in specs], folder)
    return fixed, convert(fixed)


def _names(known: Sequence[str] | None, count: int, fallback: str) -> list[str]:
    names = [re.sub(r"\W", "_", name) for name in known or ()]
    # Automatic Keras names contain a running number, so two exports of one model would differ.
    if len(set(names)) == count and not any(name.startswith("keras_tensor") for name in names):
        return names
    return [fallback] if count == 1 else [f"{fallback}_{index}" for index in range(count)]


def _shorten(message: str, limit: int = 300) -> str:
    """Returns a converter's message without its pages of source locations."""
    lines = [re.sub(r"\s+", " ", line).strip() for line in re.split(r"\n|\\n", message)]
    telling = [line for line in lines if re.search(r"error:|ops?:|not supported|failed", line, re.IGNORECASE)]
    text = re.sub(r"^.*?error: ", "", next(iter(telling or [line for line in lines if line]), "no message"))
    text = re.sub(r"^loc\(.*\): ", "", text)
    text = re.sub(r"(callsite|fused|loc)\(.*", "", text)
    return text if len(text) <= limit else text[: limit - 3] + "..."


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Hides the converter's log lines on the terminal."""
    loggers = [logging.getLogger(name) for name in ("absl", "tensorflow")]
    levels = [logger.level for logger in loggers]
    with hidden_output(STDERR), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for logger in loggers:
            logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for logger, level in zip(loggers, levels, strict=True):
                logger.setLevel(level)
