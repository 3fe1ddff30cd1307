"""Loads the data of a run: built-in data sets, idx, npz or npy files, or a factory; limits, scales, splits by seed."""

import hashlib
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from prunekit.loops.activation_cache import array_digest
from prunekit.recipe.factories import call_factory
from prunekit.recipe.idx import read_idx
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.npy import read_npy, read_npz
from prunekit.recipe.schema import DataSource

# Commands that install missing data.
GET_DIGITS = "pip install 'prunekit[examples]'"
GET_FASHION = (
    "apt install dataset-fashion-mnist, or have Keras download them (30 MB) with "
    "keras.datasets.fashion_mnist.load_data()"
)
# Install folder of Debian's package.
DEBIAN_FASHION = Path("/usr/share/datasets/fashion-mnist")
FASHION_FILES = {
    "train_inputs": "train-images-idx3-ubyte",
    "train_labels": "train-labels-idx1-ubyte",
    "test_inputs": "t10k-images-idx3-ubyte",
    "test_labels": "t10k-labels-idx1-ubyte",
}
PARTS = tuple(FASHION_FILES)
_DIGITS_TEST = 360
_DIABETES_TEST = 88

Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Data:
    """Training, validation and test data of a run.

    Attributes:
        name: Readable name, such as "digits".
        train: (inputs, labels); inputs of shape (examples, ...).
        validation: (inputs, labels) held out of the training part; the test part if nothing is held out.
        test: (inputs, labels) for the accuracy of the run.
    """

    name: str
    train: tuple[np.ndarray, np.ndarray]
    validation: tuple[np.ndarray, np.ndarray]
    test: tuple[np.ndarray, np.ndarray]

    @property
    def digest(self) -> str:
        """Returns the SHA-256 over types, shapes and bytes of all arrays, after preparation for the model."""
        total = hashlib.sha256()
        for array in (*self.train, *self.validation, *self.test):
            total.update(array_digest(array).encode())
        return total.hexdigest()


def check_files(source: DataSource) -> None:
    """Checks that the data's files exist, without reading them.

    Raises:
        RecipeError: A file is missing.
    """
    if source.builtin == "fashion-mnist":
        fashion_files(source.path)
    elif source.npz is not None:
        _existing(source.npz)
    else:
        files = source.idx or source.npy
        for part in PARTS if files else ():
            _existing(getattr(files, part))


def load_data(source: DataSource, seed: int) -> Data:
    """Loads the data that a recipe names.

    Args:
        source: Data settings of the recipe.
        seed: Seed of the recipe: selects the examples that `limit` keeps and the examples held out for validation.

    Raises:
        RecipeError: A file is missing or damaged, or arrays do not fit together.
    """
    name, read = _reader(source)
    arrays = _checked(name, read())
    scale = source.scale
    if scale is None and source.factory is None and arrays["train_inputs"].dtype == np.uint8:
        scale = 255.0
    random = np.random.default_rng(seed)
    train = _limited((arrays["train_inputs"], arrays["train_labels"]), source.limit, random)
    test = _scaled(_limited((arrays["test_inputs"], arrays["test_labels"]), source.limit, random), scale)
    train, held_out = _split(train, source.validation_split, random)
    validation = test if held_out is None else _scaled(held_out, scale)
    return Data(name=name, train=_scaled(train, scale), validation=validation, test=test)


def first_examples(part: tuple[Any, Any], count: int) -> tuple[Any, Any]:
    """Returns the first `count` examples of a part of the data; inputs and labels may be nested."""
    inputs, labels = (keras.tree.map_structure(lambda array: array[:count], values) for values in part)
    return inputs, labels


def given_data(pairs: Any) -> Data:
    """Returns data given in Python, ((train inputs, labels), (test inputs, labels)), without changes.

    All examples are used, without scaling, and the test part also serves for validation.

    Raises:
        RecipeError: `pairs` has a different structure, or its arrays do not fit together.
    """
    arrays = _checked("the given data", _from_pairs(pairs, "`data`"))
    train = _scaled((arrays["train_inputs"], arrays["train_labels"]), None)
    test = _scaled((arrays["test_inputs"], arrays["test_labels"]), None)
    return Data(name="given in Python", train=train, validation=test, test=test)


# ---- reading ---------------------------------------------------------------------------------------------------------


def _reader(source: DataSource) -> tuple[str, Callable[[], Arrays]]:
    if source.builtin == "digits":
        return "digits", _digits
    if source.builtin == "diabetes":
        return "diabetes", _diabetes
    if source.builtin is not None:
        return source.builtin, lambda: _with_channel(_read_files(fashion_files(source.path), read_idx))
    if source.idx is not None:
        return "idx files", lambda: _with_channel(_read_files(_paths(source.idx), read_idx))
    if source.npy is not None:
        return "npy files", lambda: _read_files(_paths(source.npy), read_npy)
    if source.npz is not None:
        return Path(source.npz).name, lambda: read_npz(
            _existing(str(source.npz)), {part: getattr(source.arrays, part) for part in PARTS}
        )
    factory = str(source.factory)
    return factory, lambda: _from_pairs(call_factory(factory, source.arguments, "data"), f"the factory {factory!r}")


def _digits() -> Arrays:
    """Returns scikit-learn's copy of the UCI digits: 1,797 images of 8x8 in [0, 1], split into 1,437 + 360."""
    digits = _sklearn("digits").load_digits()
    inputs = (digits.images[..., np.newaxis] / 16.0).astype("float32")
    # The last images of the file are by other writers than the first.
    return _shuffled(inputs, digits.target.astype("int64"), _DIGITS_TEST)


def _diabetes() -> Arrays:
    """Returns scikit-learn's diabetes data: 442 patients, 10 standardised measurements, split into 354 + 88.

    The target is the progression of the disease after one year, 25 to 346.

    Source: Efron, Hastie, Johnstone and Tibshirani 2004, Least Angle Regression, Annals of Statistics 32.
    """
    inputs, target = _sklearn("diabetes").load_diabetes(return_X_y=True)
    # scikit-learn scales each column to a sum of squares of 1.
    return _shuffled((inputs * np.sqrt(len(inputs))).astype("float32"), target.astype("float32"), _DIABETES_TEST)


def _sklearn(name: str) -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise RecipeError(f"the {name} come with scikit-learn, which is not installed: {GET_DIGITS}.") from error
    return sklearn.datasets


def _shuffled(inputs: np.ndarray, labels: np.ndarray, held_out: int) -> Arrays:
    """Returns the examples in a random order, the last `held_out` as the test part.

    The split does not depend on the recipe's seed, so that metrics of different seeds are comparable.
    """
    order = np.random.default_rng(0).permutation(len(labels))
    train, test = order[:-held_out], order[-held_out:]
    return dict(zip(PARTS, (inputs[train], labels[train], inputs[test], labels[test]), strict=True))


def fashion_files(folder: str | os.PathLike[str] | None = None) -> dict[str, Path]:
    """Returns the paths of the four idx files of Fashion-MNIST, raw or gzip; downloads nothing.

    Args:
        folder: Folder to search; None searches the folders of Debian's package and of Keras' cache.

    Raises:
        RecipeError: The files are missing; the message explains how to get them.
    """
    keras_home = Path(os.environ.get("KERAS_HOME") or Path.home() / ".keras")
    folders = [Path(folder)] if folder is not None else [DEBIAN_FASHION, keras_home / "datasets" / "fashion-mnist"]
    for candidate in folders:
        found = {
            part: path
            for part, stem in FASHION_FILES.items()
            for path in (candidate / stem, candidate / f"{stem}.gz")
            if path.is_file()
        }
        if len(found) == len(FASHION_FILES):
            return found
    raise RecipeError(
        f"the files of Fashion-MNIST ({', '.join(FASHION_FILES.values())}, raw or .gz) are not in "
        f"{' or '.join(map(str, folders))}. Get them: {GET_FASHION}; or name their folder: "
        "data: {builtin: fashion-mnist, path: FOLDER}."
    )


def _existing(path: str | os.PathLike[str]) -> Path:
    if not os.path.isfile(path):
        raise RecipeError(f"the data file {os.fspath(path)} does not exist.")
    return Path(path)


def _paths(files: Any) -> dict[str, Path]:
    return {part: _existing(getattr(files, part)) for part in PARTS}


def _read_files(paths: dict[str, Path], read: Callable[[Path], np.ndarray]) -> Arrays:
    return {part: read(path) for part, path in paths.items()}


def _with_channel(arrays: Arrays) -> Arrays:
    """Adds the channel axis that convolutions expect to images of shape (examples, rows, columns)."""
    for part in ("train_inputs", "test_inputs"):
        if arrays[part].ndim == 3:
            arrays[part] = arrays[part][..., np.newaxis]
    return arrays


def _from_pairs(pairs: Any, owner: str) -> Arrays:
    try:
        (train_inputs, train_labels), (test_inputs, test_labels) = pairs
    except (TypeError, ValueError) as error:
        raise RecipeError(
            f"{owner} must return ((train inputs, train labels), (test inputs, test labels)). "
            f"Received: {_outline(pairs)}."
        ) from error
    values = (train_inputs, train_labels, test_inputs, test_labels)
    for part, value in zip(PARTS, values, strict=True):
        if isinstance(value, dict | tuple | list):
            raise RecipeError(
                f"{part} of {owner} must be one array: recipes train models with one input and one output. "
                f"Received: {_outline(value)}."
            )
    return {part: np.asarray(value) for part, value in zip(PARTS, values, strict=True)}


def _outline(value: Any) -> str:
    kind = type(value).__name__
    return f"{kind} of {len(value)}" if isinstance(value, dict | tuple | list) else kind


# ---- checking and preparing ------------------------------------------------------------------------------------------


def _checked(name: str, arrays: Arrays) -> Arrays:
    for inputs, labels in (PARTS[:2], PARTS[2:]):
        _check(name, inputs, arrays[inputs])
        _check(name, labels, arrays[labels])
        if len(arrays[inputs]) != len(arrays[labels]):
            raise RecipeError(
                f"{name}: {inputs} and {labels} must have the same number of examples. "
                f"Received: {len(arrays[inputs]):,} and {len(arrays[labels]):,}."
            )
    if arrays["train_inputs"].shape[1:] != arrays["test_inputs"].shape[1:]:
        raise RecipeError(
            f"{name}: inputs of the training and the test part must have one shape. "
            f"Received: {arrays['train_inputs'].shape[1:]} and {arrays['test_inputs'].shape[1:]}."
        )
    return arrays


def _check(name: str, part: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "biuf":
        raise RecipeError(f"{name}: {part} must be numbers. Received: an array of type {array.dtype}.")
    if array.ndim == 0 or array.size == 0:
        raise RecipeError(f"{name}: {part} must hold at least one example. Received: an array of shape {array.shape}.")
    if array.dtype.kind == "f" and not np.isfinite(array).all():
        raise RecipeError(f"{name}: {part} must be finite. Received: NaN or infinity among them.")


def _limited(
    pair: tuple[np.ndarray, np.ndarray], limit: int | None, random: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = pair
    if limit is None or limit >= len(labels):
        return pair
    # Select at random, because files may be sorted by class; keep the original order.
    chosen = np.sort(random.permutation(len(labels))[:limit])
    return inputs[chosen], labels[chosen]


def _split(
    pair: tuple[np.ndarray, np.ndarray], fraction: float, random: np.random.Generator
) -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray] | None]:
    if fraction == 0.0:
        return pair, None
    inputs, labels = pair
    held_out = round(fraction * len(labels))
    if not 0 < held_out < len(labels):
        raise RecipeError(
            f"validation_split must leave examples in both parts. Received: {fraction:g} of {len(labels):,} examples."
        )
    order = random.permutation(len(labels))
    train, validation = np.sort(order[:-held_out]), np.sort(order[-held_out:])
    return (inputs[train], labels[train]), (inputs[validation], labels[validation])


def _scaled(pair: tuple[np.ndarray, np.ndarray], scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    inputs, labels = pair
    if scale is not None:
        inputs = np.divide(inputs, np.float32(scale), dtype="float32")
    elif inputs.dtype.kind in "fb":
        inputs = inputs.astype("float32", copy=False)
    return np.ascontiguousarray(inputs), np.ascontiguousarray(labels)


class Order:
    """Random order of the examples in each epoch, determined by seed and epoch alone.

    The order of a shuffling data set would depend on the number of earlier iterations, and so on
    whether the training was interrupted.

    Args:
        examples: Number of examples.
        seed: Non-negative number.
    """

    def __init__(self, examples: int, seed: int):
        self._examples, self._seed = examples, seed
        #: The epoch that begins next, from 0.
        self.epoch = 0

    def indices(self) -> np.ndarray:
        """Returns the example indices of the next epoch: shape (examples,), int64."""
        return np.random.default_rng([self._seed, self.epoch]).permutation(self._examples)


def batches(pair: tuple[np.ndarray, np.ndarray], batch_size: int, order: Order, replicas: int = 1) -> Any:
    """Returns a `tf.data.Dataset` for `fit`; each epoch takes its order from `order` at its first batch.

    Keras' own shuffling draws the same order in every epoch once a global seed is set (measured on 3.15): its
    permutation is a seeded operation that restarts with each epoch's iterator.

    With several replicas, each example has a weight: Keras averages the replicas' means, which is not the mean of
    the batch if the replicas cannot share the last batch evenly.
    """
    import tensorflow as tf

    inputs, labels = (tf.convert_to_tensor(array) for array in pair)
    count = math.ceil(len(pair[1]) / batch_size)

    def ordered(_: Any) -> Any:
        indices = tf.numpy_function(order.indices, [], tf.int64, stateful=True)
        return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(indices, [len(pair[1])]))

    def examples(indices: Any) -> tuple[Any, ...]:
        drawn = tf.gather(inputs, indices), tf.gather(labels, indices)
        return drawn if replicas == 1 else (*drawn, _shares(tf.size(indices), replicas))

    drawn = tf.data.Dataset.from_tensors(0).flat_map(ordered).batch(batch_size)
    gathered = drawn.map(examples, num_parallel_calls=2)
    return gathered.apply(tf.data.experimental.assert_cardinality(count)).prefetch(2)


def _shares(count: Any, replicas: int) -> Any:
    """Returns one weight per example from the size of its replica's part; all 1 if the parts are equal."""
    import tensorflow as tf

    # TensorFlow gives every replica the same number of examples, rounded up, until no examples remain.
    part = (count + replicas - 1) // replicas
    begin = tf.range(count) // part * part
    return tf.cast(tf.minimum(part, count - begin) * replicas, tf.float32) / tf.cast(count, tf.float32)
