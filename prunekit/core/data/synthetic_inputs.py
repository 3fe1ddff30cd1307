"""Random inputs that stand in for data: signals of many kinds, at the scale that a model's first layers expect."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.example_inputs import declared_inputs, fixed_batch
from prunekit.anatomy.graph.watching import watching
from prunekit.anatomy.records.reports import Choice
from prunekit.core.data.moving_statistics import Renormalization

# So many examples of at most so many entries in all: weights behind a Flatten have few rows and many inputs, so that
# more examples tell more; large inputs have many rows each.
_EXAMPLES = ((1024, 1 << 20), (256, 1 << 23))
_LEAST = 64
# Examples on which files are compared.
_COMPARED = 8
# Examples on which a model is tried.
_TRIED = 4
# Length of an axis that the model leaves open.
_OPEN = 32
# Weights of the largest model to which layers are fitted without being asked: above, this takes many minutes.
LARGEST = 50_000_000
# Reason of a choice that follows from synthetic inputs.
SYNTHETIC = "on synthetic inputs, since no data were given"
_BETTER = "With some hundred examples of the training data, less is lost."


@dataclass(frozen=True, eq=False)
class StandIn:
    """What is read where no data were given.

    Attributes:
        inputs: Synthetic inputs in a tuple, as calibration data of several inputs are given; None if there are none.
        note: A sentence for the report.
    """

    inputs: Any
    note: str

    def failed(self, error: Exception) -> StandIn:
        """Returns what is left where the kept weights cannot be fitted to the inputs."""
        return StandIn(None, f"No data were given, and the weights were not fitted: {error}")

    def renormalization(self, model: Any) -> Renormalization:
        """Returns the scope in which a model's batch normalizations normalize the inputs as they normalize data."""
        return Renormalization(model, None if self.inputs is None else self.inputs[0])

    def choices(self, repair: str | None) -> tuple[Choice, ...]:
        """Returns the repair as a choice, where there are inputs and nobody asked for a `repair`."""
        return (Choice("repair", "weights", SYNTHETIC),) if self.inputs is not None and repair is None else ()


def stand_in(model: Any, examples: int | None = None) -> StandIn:
    """Returns synthetic inputs that stand in for data, and a note; no inputs for models of over `LARGEST` weights.

    Args:
        model: A built model.
        examples: As for `synthetic_inputs`.
    """
    size = sum(math.prod(weight.shape) for weight in model.trainable_variables)
    lacking = f"it has {size:,} weights, more than {LARGEST:,}" if size > LARGEST else ""
    inputs = None
    if not lacking:
        try:
            inputs = synthetic_inputs(model, examples)
        except NoInputsError as error:
            lacking = str(error)
    if inputs is None:
        return StandIn(None, f"No data were given, and nothing stands in for them: {lacking}. {_BETTER}")
    count = len(keras.tree.flatten(inputs)[0])
    # A list would be one of batches.
    return StandIn((inputs,), f"No data were given: the weights were fitted on {count:,} synthetic inputs. {_BETTER}")


def comparison_inputs(model: Any, seed: int = 0) -> Any:
    """Returns a few random inputs on which a model and its exported file are compared where no data were given.

    Raises:
        ValueError: The shape of the inputs is not fully known, or the model takes no random numbers.
    """
    for tensor in keras.tree.flatten(declared_inputs(model)):
        # The length of an open axis would decide on measured latencies.
        if tensor is not None and None in tensor.shape[1:]:
            raise ValueError(
                "Without data, files are compared on random numbers in the shape of the model's inputs, which is not "
                f"fully known: {tuple(tensor.shape)}. Pass data."
            )
    try:
        return synthetic_inputs(model, _COMPARED, seed)
    except NoInputsError as error:
        raise ValueError(f"Without data, files are compared on random numbers, and {error}. Pass data.") from error


class NoInputsError(ValueError):
    """Raised where no inputs can be made; the message says why, as a clause."""


def synthetic_inputs(model: Any, examples: int | None = None, seed: int = 0) -> Any:
    """Returns random inputs of a model, in the structure that it takes.

    Floating-point inputs are noise of many kinds, so that what is fitted to them holds for other signals: each example
    has its own spectrum (amplitudes from equal to falling by the square of the frequency), offset and contrast, and
    every second is flat but for its peaks. They have the scale that a Rescaling or Normalization expects that reads
    them. Integers are drawn from the vocabulary of the embedding that reads them, or are ones.

    Args:
        model: A built model.
        examples: How many; None = 1,024 of small inputs, 256 of larger ones, and no less than 64.
        seed: Seed of the generator.

    Raises:
        NoInputsError: The model declares no inputs, reads texts, or does not accept random inputs.
    """
    declared = declared_inputs(model)
    leaves = keras.tree.flatten(declared)
    if declared is None or not leaves:
        raise NoInputsError("the model declares no inputs")
    if any(keras.backend.standardize_dtype(leaf.dtype) == "string" for leaf in leaves):
        raise NoInputsError("the model reads texts")
    shapes = [tuple(_OPEN if length is None else length for length in leaf.shape[1:]) for leaf in leaves]
    entries = [math.prod(shape) for shape in shapes]
    if not all(entries):
        raise NoInputsError("an input has no entries")
    if examples is None:
        examples = max(_LEAST, *(min(most, total // sum(entries)) for most, total in _EXAMPLES))
    generator = np.random.default_rng(seed)
    # A model of a fixed batch size takes whole batches.
    batch = fixed_batch(model) or 1
    count = -(-examples // batch) * batch
    readers = _readers(model, declared, [(batch, *shape) for shape in shapes])
    made = [
        _drawn(leaf, (count, *shape), reader, generator)
        for leaf, shape, reader in zip(leaves, shapes, readers, strict=True)
    ]
    inputs = keras.tree.pack_sequence_as(declared, made)
    _check_accepted(model, inputs)
    return inputs


def _check_accepted(model: Any, inputs: Any) -> None:
    """Raises `NoInputsError` if a model does not run on inputs, or gives outputs that are not finite."""
    few = keras.tree.map_structure(lambda leaf: leaf[: fixed_batch(model) or _TRIED], inputs)
    for leaf in keras.tree.flatten(_outputs(model, few)):
        if not np.isfinite(np.asarray(keras.ops.convert_to_numpy(leaf), "float64")).all():
            raise NoInputsError("the outputs for random ones are not finite")


def _outputs(model: Any, inputs: Any) -> Any:
    try:
        with keras.StatelessScope():
            return model(inputs, training=False)
    except Exception as error:  # a model may accept some numbers alone
        raise NoInputsError(f"the model does not accept random ones ({str(error).splitlines()[0]})") from error


def signals(shape: tuple[int, ...], generator: np.random.Generator) -> np.ndarray:
    """Returns noise of many spectra, offsets and contrasts, of about unit size.

    Args:
        shape: Shape, with the examples first.
        generator: Source of the numbers.
    """
    values = generator.normal(size=shape)
    axes = tuple(range(1, len(shape)))

    def each(low: float, high: float) -> np.ndarray:
        return generator.uniform(low, high, len(values)).reshape(-1, *(1 for _ in axes))

    if len(axes) > 1:
        squares = [np.square(np.fft.fftfreq(shape[axis], 1 / shape[axis])) for axis in axes]
        squared = np.add.reduce(np.meshgrid(*squares, indexing="ij"))
        values = np.fft.ifftn(np.fft.fftn(values, axes=axes) * (1 + squared) ** -each(0.0, 1.0), axes=axes).real
        values /= np.maximum(values.std(axis=axes, keepdims=True), 1e-6)
    # Images of strokes, counts and rectified features have a background, at a level of its own or at 0.
    values[1::2] = np.maximum(values[1::2] - each(-1.0, 2.0)[1::2], 0.0)
    values[1::2] /= np.maximum(values[1::2].std(axis=axes, keepdims=True), 0.1)
    offsets = each(-0.75, 0.75)
    offsets[1::4] = 0.0
    return (values + offsets) * np.exp(each(math.log(0.2), 0.5))


def _drawn(leaf: Any, shape: tuple[int, ...], reader: Any, generator: np.random.Generator) -> np.ndarray:
    dtype = keras.backend.standardize_dtype(leaf.dtype)
    vocabulary = getattr(reader, "input_dim", None)
    if vocabulary is not None:
        # 0 is padding where it is masked.
        first = 1 if getattr(reader, "mask_zero", False) and vocabulary > 1 else 0
        return generator.integers(first, vocabulary, shape).astype(dtype)
    if isinstance(reader, keras.layers.Normalization) and not reader.invert:
        values = signals(shape, generator)
        mean, variance = (np.asarray(keras.ops.convert_to_numpy(one)) for one in (reader.mean, reader.variance))
        # Statistics have the shape (1, ..., channels), or (channels,) of given ones.
        values = values * np.sqrt(variance) + mean
    elif isinstance(reader, keras.layers.Rescaling):
        values = (signals(shape, generator) - np.asarray(reader.offset)) / np.asarray(reader.scale)
    elif dtype == "bool" or "int" in dtype:
        # Ones are numbers of any vocabulary, and no padding.
        values = np.ones(shape)
    else:
        values = signals(shape, generator)
    if "int" in dtype:
        values = np.clip(np.rint(values), np.iinfo(dtype).min, np.iinfo(dtype).max)
    return values.astype("float32" if dtype == "bfloat16" else dtype)


def _readers(model: Any, declared: Any, shapes: Sequence[tuple[int, ...]]) -> list[Any]:
    """Returns the first layer that looks up, rescales or normalizes each input; None for other inputs."""
    known = (keras.layers.Normalization, keras.layers.Rescaling)
    leaves = keras.tree.flatten(declared)
    found: list[Any] = [None] * len(leaves)
    # A tensor of the declared type reaches the layers as it is.
    ones = [keras.ops.ones(shape, leaf.dtype) for shape, leaf in zip(shapes, leaves, strict=True)]

    def see(original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        outputs = original(layer, *args, **kwargs)
        if args and (isinstance(layer, known) or hasattr(layer, "input_dim")):
            for place, one in enumerate(ones):
                if found[place] is None and args[0] is one:
                    found[place] = layer
        return outputs

    with watching(see):
        _outputs(model, keras.tree.pack_sequence_as(declared, ones))
    return found
