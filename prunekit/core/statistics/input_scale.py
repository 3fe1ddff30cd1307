"""Compares data with what a model's normalizations and preprocessing layers expect: data that are scaled otherwise."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import keras
import numpy as np
from keras import ops

from prunekit.anatomy.graph.example_inputs import declared_inputs
from prunekit.anatomy.graph.watching import watching_outside_loops
from prunekit.anatomy.layers.linear_kinds import is_normalization

# Examples that are looked at. A deviation from the moving mean that is so many times as large as the moving variance
# says, or so small: less happens where moving statistics did not reach those of the weights yet.
_EXAMPLES, _APART = 16, 16.0
# Most layers that a sentence names.
_LISTED = 3
# What preprocessing usually makes of images: values between -1 and 1, or 0 and 1.
_LARGEST, _LEAST_RANGE = 8.0, 1 / 64


def scale_problem(model: Any, inputs: Any) -> str | None:
    """Returns a sentence that names the layers for which data are scaled otherwise than in training; None for none.

    The first batch normalization behind each input knows mean and variance of what it read in training, Normalization
    layers those of the data that they were adapted to; a Rescaling at the input makes values near 1.

    Args:
        model: A built model.
        inputs: A batch of inputs.
    """
    seen = _ScaleWatcher()
    few = _first_examples(model, inputs)
    seen.know(few, normalized=False)
    with watching_outside_loops(seen), keras.StatelessScope():
        model(few, training=False)
    if not seen.found:
        return None
    more = f"; and {len(seen.found) - _LISTED} more" if len(seen.found) > _LISTED else ""
    return (
        "The calibration data are scaled otherwise than those that the model was trained on: "
        f"{'; '.join(seen.found[:_LISTED])}{more}. "
        "Prepare them as in training, such as pixels divided by 255. If they are, the weights were changed since."
    )


def _first_examples(model: Any, inputs: Any) -> Any:
    """Returns the first examples as tensors of the types that the model declares, which it then reads as they are."""
    declared, leaves = declared_inputs(model), keras.tree.flatten(inputs)
    known = keras.tree.flatten(declared)
    # Names of a dictionary for a model that takes a list are in another order.
    alike = len(known) == len(leaves) and isinstance(inputs, Mapping) == isinstance(declared, Mapping)
    # A subclassed model declares none.
    kinds = [getattr(one, "dtype", None) for one in known] if alike else [None] * len(leaves)

    def tensor(one: Any, kind: Any) -> Any:
        return None if one is None else ops.convert_to_tensor(one[:_EXAMPLES], dtype=kind)

    return keras.tree.pack_sequence_as(inputs, [tensor(*pair) for pair in zip(leaves, kinds, strict=True)])


class _ScaleWatcher:
    """Looks at the inputs of normalizations and the outputs of preprocessing layers."""

    def __init__(self) -> None:
        self.found: list[str] = []
        self._at_input = True
        self._any_normalized = False
        # Address of a tensor -> the tensor, so that the address stays its own, and whether it was normalized.
        self._known: dict[int, tuple[Any, bool]] = {}

    def know(self, tensors: Any, *, normalized: bool) -> None:
        """Notes tensors that are not known yet, and whether they come from a batch normalization."""
        for one in keras.tree.flatten(tensors):
            if one is not None:
                self._known.setdefault(id(one), (one, normalized))

    def _is_normalized(self, args: tuple, kwargs: dict) -> bool:
        """Returns True if an argument comes from a batch normalization; one that no layer made, if there was any."""
        given = [one for one in keras.tree.flatten([args, kwargs]) if hasattr(one, "shape")]
        return any(self._known.get(id(one), (one, self._any_normalized))[1] for one in given)

    def __call__(self, original: Callable[..., Any], layer: Any, args: tuple, kwargs: dict) -> Any:
        if not args:
            return original(layer, *args, **kwargs)
        # What a later one reads depends on weights more than on the scale of the data.
        normalized = self._is_normalized(args, kwargs)
        ratio = _ratio_to_moving(layer, args[0]) if is_normalization(layer) and not normalized else None
        outputs = original(layer, *args, **kwargs)
        self._any_normalized |= is_normalization(layer)
        self.know(outputs, normalized=normalized or is_normalization(layer))
        if ratio is not None:
            self.found.append(f"the inputs of {layer.name!r} vary {ratio:.3g} times as much as its moving statistics")
        if isinstance(layer, keras.layers.Normalization) and not layer.invert:
            self._see_normalized(layer.name, _array(outputs))
        elif isinstance(layer, keras.layers.Rescaling) and self._at_input:
            self._see_rescaled(layer.name, _array(outputs))
        if layer.weights and not list(layer._flatten_layers(include_self=False)):
            self._at_input = False
        return outputs

    def _see_normalized(self, name: str, values: np.ndarray) -> None:
        rows = values.reshape(-1, values.shape[-1] if values.ndim > 1 else 1)
        ratio = _far_apart(rows.astype("float64"))
        if ratio is not None:
            self.found.append(f"the inputs of {name!r} vary {ratio:.3g} times as much as its statistics")

    def _see_rescaled(self, name: str, values: np.ndarray) -> None:
        low, high = float(values.min()), float(values.max())
        if max(-low, high) > _LARGEST or high - low < _LEAST_RANGE:
            self.found.append(f"{name!r} makes values from {low:.3g} to {high:.3g} of them")


def _ratio_to_moving(layer: Any, inputs: Any) -> float | None:
    """Returns how much the inputs of a batch normalization vary; None if its moving statistics say about the same."""
    mean, variance = (_array(one).astype("float64") for one in (layer.moving_mean, layer.moving_variance))
    if not mean.any() and (variance == 1.0).all():
        return None
    values = np.moveaxis(_array(inputs).astype("float64"), layer.axis, -1)
    rows = values.reshape(-1, values.shape[-1])
    # Others are constant in training and here, as pruned channels.
    used = (variance > layer.epsilon) | (np.square(rows - mean).mean(axis=0) > layer.epsilon)
    return _far_apart((rows - mean)[:, used] / np.sqrt(variance[used] + layer.epsilon))


def _far_apart(standardized: np.ndarray) -> float | None:
    """Returns the deviation from 0 of values that should have a deviation of 1, or their own, if it is far from 1.

    Args:
        standardized: Values of each channel, shape (values, channels); the median of the channels counts.
    """
    if not standardized.size:
        return None
    far = float(np.median(np.sqrt(np.square(standardized).mean(axis=0))))
    # A mean that is wrong hides how little values vary.
    own = float(np.median(standardized.std(axis=0)))
    return far if far > _APART else own if own < 1 / _APART else None


def _array(value: Any) -> np.ndarray:
    return np.asarray(ops.convert_to_numpy(ops.cast(value, "float32")))
