"""Calibration data: batches of inputs and labels from arrays, datasets and lists of batches."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.graph.example_inputs import declared_inputs, fits, input_names, input_words

_BATCH = 64
# Most examples that are read of a generator function, which may have no end.
MOST_GENERATED = 2048
_EXPECTED = (
    "Calibration data are an array of inputs, a dictionary of inputs, a pair (inputs, labels), or batches of them as a "
    "list, a tf.data.Dataset, a keras.utils.PyDataset or a function that returns an iterator of them"
)


def batches_of(data: Any, batch_size: int = _BATCH) -> Iterator[tuple[Any, Any]]:
    """Yields (inputs, labels) for each batch of the data; labels are None if the data have none.

    Sample weights, the third part of a Keras batch, are left out.

    Args:
        data: An array, list of texts or dictionary of arrays (inputs), a tuple (inputs, labels), or an iterable of such
            batches that can be iterated more than once: a list, a `tf.data.Dataset`, a `keras.utils.PyDataset`. Or a
            function without arguments that returns a new iterator of batches at each call, as
            `tf.lite.RepresentativeDataset` takes it, whose batches are lists of the inputs; it is read until
            `MOST_GENERATED` examples are reached.
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
    check_no_path(data)
    data = listed_as_arrays(data)
    if _is_arrays(data):
        yield from _slices(data, batch_size)
        return
    if _is_function(data):
        data = _Generated(data)
    if isinstance(data, Iterator) or not isinstance(data, Iterable | keras.utils.PyDataset):
        hint = (
            " An iterator can be read only once: pass a list of batches, or the function that makes the iterator."
            if isinstance(data, Iterator)
            else ""
        )
        raise TypeError(f"{_EXPECTED}. Received: {type(data).__name__}.{hint}")
    # A PyDataset defines `__getitem__` without an end, so iterating over it never stops.
    found = (data[i] for i in range(len(data))) if isinstance(data, keras.utils.PyDataset) else iter(data)
    empty = True
    for batch in found:
        empty = False
        yield _parts(batch)
    if empty:
        raise ValueError(f"{_EXPECTED}. Received: no batches.")


def check_no_path(data: Any) -> None:
    """Raises a TypeError for a path in the place of data."""
    if isinstance(data, str | os.PathLike):
        raise TypeError(
            f"`data` are arrays, or batches of them. Received: the path {os.fspath(data)!r}. Load the file first, for "
            "example with np.load, or keras.utils.image_dataset_from_directory for a folder of images."
        )


def without_labels(model: Any, data: Any) -> Any:
    """Returns the inputs of a pair (inputs, labels) for a model, and all other data unchanged."""
    check_no_path(data)
    declared, data = declared_inputs(model), listed_as_arrays(data)
    if declared is None or not isinstance(data, tuple) or len(data) not in (2, 3):
        return data
    count, of_all, of_first = (len(keras.tree.flatten(one)) for one in (declared, data, data[0]))
    return data[0] if of_first == count != of_all else data


def most_examples(data: Any) -> float:
    """Returns the largest number of examples that are read of data: `MOST_GENERATED` of a function, else infinity."""
    return MOST_GENERATED if _is_function(data) else math.inf


def _is_function(data: Any) -> bool:
    return callable(data) and not isinstance(data, Iterable | keras.utils.PyDataset | type)


def example_count(data: Any) -> int | None:
    """Returns the number of examples of data that are arrays or a list of batches; None where it takes a reading."""
    data = listed_as_arrays(data._data if isinstance(data, CheckedData) else data)
    if not _is_arrays(data) and not isinstance(data, list):
        return None
    counts = [_length(_parts(batch)[0]) for batch in (data if isinstance(data, list) else [data])]
    return sum(counts)


def _length(inputs: Any) -> int:
    return next(len(leaf) for leaf in keras.tree.flatten(inputs) if leaf is not None)


def listed_as_arrays(data: Any) -> Any:
    """Returns data with arrays in the place of lists of texts, and of lists of labels or sample weights.

    A list of anything else is one of batches, or of the arrays of several inputs.
    """
    if isinstance(data, tuple):
        return tuple(_as_array(part, (str, bytes, int, float, np.generic)) for part in data)
    if isinstance(data, dict):
        return {name: _as_array(part, (str, bytes)) for name, part in data.items()}
    return _as_array(data, (str, bytes))


def _as_array(part: Any, kinds: tuple[type, ...]) -> Any:
    if not isinstance(part, list) or not part or not all(isinstance(one, kinds) for one in part):
        return part
    # Objects: NumPy's own texts are cut to the longest of an array, and bytes lose zeros at their ends.
    return np.array(part, object if isinstance(part[0], str | bytes) else None)


class CheckedData:
    """Calibration data that are checked as they are read the first time: they fit the model, and are finite numbers.

    Args:
        model: A built model.
        data: As for `batches_of`.
        batch_size: As for `batches_of`.

    Raises:
        TypeError, ValueError: As for `batches_of` and `check_inputs`, when it is iterated.
    """

    def __init__(self, model: Any, data: Any, batch_size: int = _BATCH):
        self._model, self._data, self._batch_size = model, data, batch_size
        self._checked = False

    def __iter__(self) -> Iterator[tuple[Any, Any, Any]]:
        for batch in weighted_batches_of(self._data, self._batch_size):
            if not self._checked:
                check_inputs(self._model, batch[0])
            yield batch
        self._checked = True


def check_inputs(model: Any, inputs: Any) -> None:
    """Raises if a batch of inputs does not fit the declared inputs of a model, or has numbers that are not finite.

    Raises:
        TypeError: An input is not an array of numbers (of texts, for an input of dtype string).
        ValueError: Another number of inputs, another name or shape than the model declares; NaN or infinity.
    """
    declared = declared_inputs(model)
    if declared is None:
        for leaf in keras.tree.flatten(inputs):
            _check_array(leaf, "", texts=None)
        return
    known, given = keras.tree.flatten(declared), _in_order(model, declared, inputs)
    if len(known) != len(given):
        raise ValueError(
            f"The inputs of the model {model.name!r} are {_inputs(known)}. Received: "
            f"{len(given)} in the calibration data. Pass several inputs as a dictionary, or as a pair "
            "([first, second], labels)."
        )
    for one, leaf in zip(known, given, strict=True):
        if leaf is None and getattr(one._keras_history.operation, "optional", False):
            continue
        texts = keras.backend.standardize_dtype(one.dtype) == "string"
        name = input_words(one, len(known))
        _check_array(leaf, f" for {name}", texts)
        # Keras adds and removes a last axis of length 1.
        shape = tuple(leaf.shape)
        if not any(fits(alike, one) for alike in (shape, (*shape, 1), shape[:-1] if shape[-1:] == (1,) else shape)):
            raise ValueError(
                f"The shape of {name} is {tuple(one.shape)}, with the batch first. Received: calibration data of shape "
                f"{shape}."
            )


def _inputs(known: list[Any]) -> str:
    words = [input_words(one, len(known)).removeprefix("the input").strip(" '") for one in known]
    return ", ".join(words) if all(words) else "one array"


def _in_order(model: Any, declared: Any, inputs: Any) -> list[Any]:
    """Returns the inputs in the order of the declared ones: Keras finds those of a dictionary by their names."""
    if not isinstance(inputs, Mapping):
        return keras.tree.flatten(inputs)
    names = input_names(model)
    if set(names) - inputs.keys() or (isinstance(declared, Mapping) and inputs.keys() - set(names)):
        raise ValueError(
            f"The inputs of the model {model.name!r} are {_inputs(keras.tree.flatten(declared))}. Received: "
            f"calibration data with the names {', '.join(map(str, inputs))}."
        )
    return keras.tree.flatten(inputs) if isinstance(declared, Mapping) else [inputs[name] for name in names]


def _check_array(leaf: Any, place: str, texts: bool | None) -> None:
    """Raises unless an input is an array of finite numbers, or of texts for an input of texts; None takes both."""
    dtype = getattr(leaf, "dtype", None)
    # TensorFlow's types print as "<dtype: 'float32'>"; those of PyTorch have no name.
    kind = type(leaf).__name__ if dtype is None else str(getattr(dtype, "name", dtype)).rpartition(".")[2]
    numbers, words = ("float", "bfloat", "int", "uint", "bool"), ("str", "bytes", "object")
    allowed = numbers + words if texts is None else words if texts else numbers
    if not hasattr(leaf, "shape") or not kind.startswith(allowed):
        raise TypeError(f"Calibration data are arrays of {'texts' if texts else 'numbers'}. Received: {kind}{place}.")
    if "float" in kind:
        # Also of sparse and ragged tensors.
        array = leaf if isinstance(leaf, np.ndarray) else keras.ops.convert_to_numpy(leaf)
        finite = np.isfinite(array if array.dtype.kind == "f" else array.astype("float32"))
        if not finite.all():
            raise ValueError(
                f"Calibration data are finite numbers. Received: {finite.size - np.count_nonzero(finite):,} NaN or "
                f"infinite values{place} in a batch. Remove these examples, or replace the values."
            )


class _Generated:
    """The batches of a generator function, a new iterator each time, up to `MOST_GENERATED` examples."""

    def __init__(self, function: Callable[[], Any]):
        self._function = function

    def __iter__(self) -> Iterator[Any]:
        made = self._function()
        if not isinstance(made, Iterable) or _is_arrays(made):
            raise TypeError(f"{_EXPECTED}. Received: a function that returns {type(made).__name__}.")
        count = 0
        for batch in made:
            yield batch[0] if isinstance(batch, list) and len(batch) == 1 else batch
            count += next((len(leaf) for leaf in keras.tree.flatten(batch) if getattr(leaf, "shape", ())), 1)
            if count >= MOST_GENERATED:
                return


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
    batch = listed_as_arrays(batch)
    if not isinstance(batch, tuple):
        return batch, None, None
    if not 1 <= len(batch) <= 3:
        raise TypeError(f"{_EXPECTED}. Received: a tuple of {len(batch)} parts.")
    inputs, labels, weights = (*batch, None, None)[:3]
    return inputs, labels, weights
