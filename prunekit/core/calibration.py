"""Calibration data: batches of inputs and labels from arrays, datasets and lists of batches."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.example_inputs import declared_inputs, fits

_BATCH = 64
_EXPECTED = (
    "Calibration data are an array of inputs, a dictionary of inputs, a pair (inputs, labels), or batches of them as a "
    "list, a tf.data.Dataset or a keras.utils.PyDataset"
)


def batches_of(data: Any, batch_size: int = _BATCH) -> Iterator[tuple[Any, Any]]:
    """Yields (inputs, labels) for each batch of the data; labels are None if the data have none.

    Sample weights, the third part of a Keras batch, are left out.

    Args:
        data: An array or dictionary of arrays (inputs), a tuple (inputs, labels), or an iterable of such batches that
            can be iterated more than once: a list, a `tf.data.Dataset`, a `keras.utils.PyDataset`.
        batch_size: Number of examples per batch for data given as arrays.

    Raises:
        TypeError: `data` is of another kind, or an iterator, which would be empty at the second mask update.
        ValueError: Arrays differ in their number of examples, or there are no examples.
    """
    for inputs, labels, _ in weighted_batches_of(data, batch_size):
        yield inputs, labels


def weighted_batches_of(data: Any, batch_size: int = _BATCH) -> Iterator[tuple[Any, Any, Any]]:
    """Yields (inputs, labels, sample weights) for each batch of the data; None for parts that the data lack.

    Arguments and errors are those of `batches_of`.
    """
    if _is_arrays(data):
        yield from _slices(data, batch_size)
        return
    if isinstance(data, Iterator) or not isinstance(data, Iterable | keras.utils.PyDataset):
        hint = " An iterator can be read only once: pass a list of batches." if isinstance(data, Iterator) else ""
        raise TypeError(f"{_EXPECTED}. Received: {type(data).__name__}.{hint}")
    # A PyDataset defines `__getitem__` without an end, so iterating over it never stops.
    found = (data[i] for i in range(len(data))) if isinstance(data, keras.utils.PyDataset) else iter(data)
    empty = True
    for batch in found:
        empty = False
        yield _parts(batch)
    if empty:
        raise ValueError(f"{_EXPECTED}. Received: no batches.")


class CheckedData:
    """Calibration data of which each batch is checked when it is read: it fits the model, and its numbers are finite.

    Args:
        model: A built model.
        data: As for `batches_of`.

    Raises:
        TypeError, ValueError: As for `batches_of` and `check_inputs`, when it is iterated.
    """

    def __init__(self, model: Any, data: Any):
        self._model, self._data = model, data

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        for batch in weighted_batches_of(self._data):
            check_inputs(self._model, batch[0])
            yield batch


def check_inputs(model: Any, inputs: Any) -> None:
    """Raises if a batch of inputs does not fit the declared inputs of a model, or has numbers that are not finite.

    Raises:
        TypeError: The inputs are no arrays of numbers; texts fit an input of texts.
        ValueError: Another number of inputs, another name or shape than the model declares; NaN or infinity.
    """
    given = keras.tree.flatten(inputs)
    declared = declared_inputs(model)
    if declared is None:
        for leaf in given:
            _check_numbers(leaf, "")
        return
    known = keras.tree.flatten(declared)
    if len(known) != len(given):
        raise ValueError(
            f"The inputs of the model {model.name!r} are {', '.join(map(_input_name, known))}. Received: calibration "
            f"data of {len(given)} inputs. Pass several inputs as a dictionary, or as a pair ([first, second], labels)."
        )
    if isinstance(inputs, Mapping):
        given = _by_names(model, declared, inputs)
    for one, leaf in zip(known, given, strict=True):
        if keras.backend.standardize_dtype(one.dtype) != "string":
            _check_numbers(leaf, f" for the input {_input_name(one)!r}")
        # Keras adds and removes a last axis of length 1.
        shape = tuple(leaf.shape)
        if not any(fits(alike, one) for alike in (shape, (*shape, 1), shape[:-1] if shape[-1:] == (1,) else shape)):
            raise ValueError(
                f"The shape of the input {_input_name(one)!r} is {tuple(one.shape)}, with the batch first. Received: "
                f"calibration data of shape {shape}."
            )


def _by_names(model: Any, declared: Any, inputs: Mapping[str, Any]) -> list[Any]:
    """Returns the inputs of a dictionary in the order of the declared ones, as Keras finds them by name."""
    if isinstance(declared, Mapping):
        names = [{name} for name, one in declared.items() for _ in keras.tree.flatten(one)]
        names = [names[list(declared).index(name)] for name in sorted(declared)]
    else:
        names = [{_input_name(one), one.name} for one in keras.tree.flatten(declared)]
    found = [next((inputs[name] for name in inputs if name in accepted), None) for accepted in names]
    if any(one is None for one in found):
        raise ValueError(
            f"The inputs of the model {model.name!r} are {', '.join(sorted(one)[0] for one in names)}. Received: "
            f"calibration data with the names {', '.join(map(str, inputs))}."
        )
    return found


def _input_name(tensor: Any) -> str:
    """Returns the name of the layer of an input: Keras gives its tensor another one if the user gave none."""
    history = getattr(tensor, "_keras_history", None)
    return str(tensor.name if history is None else history.operation.name)


def _check_numbers(leaf: Any, place: str) -> None:
    kind = str(getattr(leaf, "dtype", type(leaf).__name__)).rpartition(".")[2]
    if not hasattr(leaf, "shape") or not kind.startswith(("float", "bfloat", "int", "uint", "bool")):
        raise TypeError(f"Calibration data are arrays of numbers. Received: {kind}{place}.")
    if "float" in kind:
        wrong = int(np.count_nonzero(~np.isfinite(np.asarray(keras.ops.convert_to_numpy(leaf), "float32"))))
        if wrong:
            raise ValueError(
                f"Calibration data are finite numbers. Received: {wrong:,} NaN or infinite values{place} in a batch. "
                "Remove these examples, or replace the values."
            )


def _is_arrays(data: Any) -> bool:
    return isinstance(data, tuple | dict) or hasattr(data, "shape")


def _slices(data: Any, batch_size: int) -> Iterator[tuple[Any, Any, Any]]:
    parts = _parts(data)
    sizes = {len(leaf) for leaf in keras.tree.flatten(parts) if leaf is not None}
    if len(sizes) != 1 or sizes == {0}:
        raise ValueError(f"{_EXPECTED}, all with one entry per example. Received: arrays of lengths {sorted(sizes)}.")
    for start in range(0, sizes.pop(), batch_size):
        inputs, labels, weights = (_sliced(part, slice(start, start + batch_size)) for part in parts)
        yield inputs, labels, weights


def _sliced(structure: Any, part: slice) -> Any:
    return keras.tree.map_structure(lambda leaf: None if leaf is None else np.asarray(leaf)[part], structure)


def _parts(batch: Any) -> tuple[Any, Any, Any]:
    """Returns (inputs, labels, sample weights)."""
    if not isinstance(batch, tuple):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise TypeError(f"{_EXPECTED}. Received: a tuple of {len(batch)} parts.")
    inputs, labels, weights = (*batch, None, None)[:3]
    return inputs, labels, weights
