"""Compares the outputs of a tf_keras model and a Keras 3 model on the same random inputs."""

from typing import Any

import keras
import numpy as np

from prunekit.interop.tfmot.layers import policy

_BATCH = 3
# Length used for axes of unknown length: enough for a few pooling layers.
_OPEN = 32
_TOLERANCE = 1e-4
_HALF_PRECISION = 2e-2


def compared(old: Any, new: keras.Model, where: str, tolerance: float | None = None) -> float:
    """Returns the largest difference between the two models' outputs, relative to the largest output.

    Args:
        old: tf_keras model.
        new: Keras 3 model.
        where: Name of the model in errors.
        tolerance: Largest accepted difference; None uses the default for the model's precision.

    Raises:
        ValueError: The outputs differ by more than the tolerance, or cannot be compared.
    """
    if tolerance is None:
        tolerance = _HALF_PRECISION if any("16" in policy(layer) for layer in _layers(new)) else _TOLERANCE
    inputs = [_random(tensor, new, seed) for seed, tensor in enumerate(new.inputs)]
    try:
        theirs, ours = (_flat(model(_packed(model, inputs), training=False)) for model in (old, new))
    except Exception as error:  # noqa: BLE001 each backend has its own exceptions for inputs that do not fit
        shapes = ", ".join(str(one.shape) for one in inputs)
        line = next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
        raise ValueError(
            f"{where} cannot be compared: called on random inputs of shape {shapes} it fails: {line}"
        ) from error
    worst = 0.0
    for one, other in zip(theirs, ours, strict=True):
        if one.shape != other.shape:
            raise ValueError(f"{where} has outputs of shape {one.shape}, and in Keras 3 of {other.shape}.")
        same = (one == other) | (np.isnan(one) & np.isnan(other))
        apart = np.abs(np.where(same, 0.0, one - other)).max(initial=0.0)
        largest = float(np.abs(one[np.isfinite(one)]).max(initial=0.0))
        worst = max(worst, float(apart) / (largest or 1.0))
    if not worst <= tolerance:
        masks = (
            " It passes masks from layer to layer, for which Keras 3 has other rules."
            if _masking(new) is not None
            else ""
        )
        raise ValueError(
            f"{where} gives other outputs in Keras 3: on random inputs they differ by {worst:.3g} of the "
            f"largest. Expected at most {tolerance:g}.{masks} Pass a higher tolerance to accept this difference."
        )
    return worst


def _packed(model: Any, inputs: list[np.ndarray]) -> Any:
    """Returns the inputs in the model's input structure: one array, a list or a dictionary."""
    structure = getattr(model, "_nested_inputs", None)
    if structure is None:
        structure = getattr(model, "_inputs_struct", None)
    return inputs[0] if structure is None else keras.tree.pack_sequence_as(structure, inputs)


def _flat(outputs: Any) -> list[np.ndarray]:
    return [np.asarray(keras.ops.convert_to_numpy(one), "float64") for one in keras.tree.flatten(outputs)]


def _layers(model: keras.Model) -> list[Any]:
    return list(model._flatten_layers(include_self=False))


def _vocabulary(model: keras.Model) -> int:
    """Returns the smallest `input_dim` of the embeddings; 0 without an embedding."""
    sizes = [layer.input_dim for layer in _layers(model) if isinstance(layer, keras.layers.Embedding)]
    return min(sizes, default=0)


def _masking(model: keras.Model) -> float | None:
    """Returns the input value that masks a time step; None if the model has no masking layer."""
    for layer in _layers(model):
        if isinstance(layer, keras.layers.Masking):
            return float(layer.mask_value)
        if getattr(layer, "mask_zero", False):
            return 0.0
    return None


def _random(tensor: Any, model: keras.Model, seed: int) -> np.ndarray:
    batch, *rest = tensor.shape
    shape = (batch or _BATCH, *(length or _OPEN for length in rest))
    generator = np.random.default_rng(seed)
    vocabulary, masked = _vocabulary(model), _masking(model)
    if vocabulary or "int" in tensor.dtype:
        values = generator.integers(0, vocabulary or 2, shape).astype(tensor.dtype)
    else:
        values = generator.normal(size=shape).astype(tensor.dtype)
    if masked is not None and values.ndim > 1:
        # Mask the last steps of the first example, as in a padded sequence.
        values[0, -(values.shape[1] // 3) :] = masked
    return values
