"""Part: the training, validation or test examples of a run, in memory or streamed, in an order fixed by a seed."""

import contextlib
import hashlib
import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from prunekit.anatomy.files.digests import array_digest
from prunekit.core.runtime.environment import is_installed
from prunekit.recipe.datasets.batches import IndexedBatches, Order
from prunekit.recipe.text.loader import RecipeError

# One array, or several by name: {input or output of the model: array}.
Arrays = Any
# Examples per batch where only speed depends on the number.
READ_AT_ONCE = 256


@dataclass(frozen=True)
class Labels:
    """Values of one label over all examples of a part.

    Attributes:
        shape: Shape of the label of one example.
        dtype: Type, such as "int64".
        low: Smallest value.
        high: Largest value.
        whole: True if all values are whole numbers.
    """

    shape: tuple[int, ...]
    dtype: str
    low: float
    high: float
    whole: bool


def labels_of(array: np.ndarray) -> Labels:
    """Returns the facts about an array of labels of shape (examples, ...)."""
    whole = array.dtype.kind in "biu" or bool(np.array_equal(array, np.round(array)))
    return Labels(array.shape[1:], array.dtype.name, float(array.min()), float(array.max()), whole)


def mapped(function: Callable[..., Any], arrays: Arrays, *more: Arrays) -> Arrays:
    """Returns the function of one array, or of each of several arrays by name."""
    if isinstance(arrays, Mapping):
        return {name: function(array, *(other[name] for other in more)) for name, array in arrays.items()}
    return function(arrays, *more)


def flat(arrays: Arrays) -> list[Any]:
    """Returns the arrays as a list, in the order of their names."""
    return [arrays[name] for name in sorted(arrays)] if isinstance(arrays, Mapping) else [arrays]


class Part(ABC):
    """The examples of one part of the data. Batches are pairs (inputs, labels).

    Attributes:
        examples: Number of examples.
    """

    examples: int

    @abstractmethod
    def subset(self, indices: np.ndarray) -> "Part":
        """Returns the part of the examples with these indices, in ascending order."""

    @abstractmethod
    def prepared(self, prepare: Callable[[Arrays], Arrays]) -> "Part":
        """Returns the part with other inputs: `prepare` of each batch of inputs.

        Args:
            prepare: Function of TensorFlow tensors; where TensorFlow is not installed, of NumPy arrays.
        """

    @abstractmethod
    def in_order(self, batch_size: int) -> Any:
        """Returns all batches in the stored order: a `tf.data.Dataset`, or `IndexedBatches` without TensorFlow."""

    @abstractmethod
    def shuffled(self, order: Order, batch_size: int) -> Any:
        """Returns batches like `in_order`; each iteration takes its order from `order` at its first batch."""

    @abstractmethod
    def labels(self) -> Any:
        """Returns the `Labels` of the label, or {output: Labels} for several outputs."""

    @abstractmethod
    def digests(self) -> list[str]:
        """Returns SHA-256 digests that change if the examples change."""

    def damaged(self) -> str | None:
        """Returns the first file of the part that cannot be read, or None; called after a reading error."""
        return None

    def first(self, count: int) -> tuple[Arrays, Arrays]:
        """Returns inputs and labels of the first examples as NumPy arrays."""
        batch = next(iter(self.in_order(min(count, self.examples)).take(1)))
        return tuple(mapped(lambda tensor: tensor.numpy(), item) for item in batch)

    @cached_property
    def example(self) -> tuple[Arrays, Arrays]:
        """Inputs and labels of the first example, with a batch axis of length 1."""
        return self.first(1)

    def training_batches(self, order: Order, batch_size: int, replicas: int = 1) -> Any:
        """Returns the batches for `fit`; each epoch takes its order from `order` at its first batch.

        Keras' own shuffling draws the same order in every epoch once a global seed is set (measured on 3.15): its
        permutation is a seeded operation that restarts with each epoch's iterator.

        With several replicas, each example has a weight: Keras averages the replicas' means, which is not the mean of
        the batch if the replicas cannot share the last batch evenly.
        """
        drawn = self.shuffled(order, batch_size)
        if replicas > 1:
            drawn = drawn.map(lambda inputs, labels: (inputs, labels, _shares(_size(labels), replicas)))
        return self._finished(drawn, batch_size)

    def evaluation_data(self, batch_size: int) -> tuple[Any, ...]:
        """Returns the first arguments of `model.evaluate`: inputs and labels, or batches."""
        return (self._finished(self.in_order(batch_size), batch_size),)

    def calibration_data(self) -> Any:
        """Returns inputs and labels, or batches of these that can be iterated more than once."""
        batches = self.in_order(64)
        return batches if isinstance(batches, IndexedBatches) else _NumpyBatches(batches)

    def _finished(self, dataset: Any, batch_size: int) -> Any:
        if isinstance(dataset, IndexedBatches):
            return dataset
        import tensorflow as tf

        options = tf.data.Options()
        options.deterministic = True
        # Each worker process draws the same batches and takes its share: files are not divided between the workers.
        options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.DATA
        counted = dataset.apply(tf.data.experimental.assert_cardinality(math.ceil(self.examples / batch_size)))
        return counted.prefetch(2).with_options(options)


class _NumpyBatches:
    """Batches of a `tf.data.Dataset` as NumPy arrays, which every backend takes."""

    def __init__(self, dataset: Any):
        self._dataset = dataset

    def __iter__(self) -> Iterator[tuple[Arrays, Arrays]]:
        return iter(self._dataset.as_numpy_iterator())


class IndexedPart(Part):
    """A part whose examples are read by index, so each epoch has a random order of all examples."""

    @abstractmethod
    def read(self, indices: Any, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches from a dataset of example indices, in the same order."""

    def in_order(self, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of all batches in the stored order."""
        import tensorflow as tf

        return self.read(tf.data.Dataset.range(self.examples), batch_size)

    def shuffled(self, order: Order, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches; each iteration takes its order from `order` at its first batch."""
        import tensorflow as tf

        def ordered(_: Any) -> Any:
            indices = tf.numpy_function(order.indices, [], tf.int64, stateful=True)
            return tf.data.Dataset.from_tensor_slices(tf.ensure_shape(indices, [self.examples]))

        return self.read(tf.data.Dataset.from_tensors(0).flat_map(ordered), batch_size)


class NumericPart(IndexedPart):
    """A part whose examples NumPy reads by index: `IndexedBatches` where TensorFlow is not installed."""

    @abstractmethod
    def drawn(self, indices: np.ndarray) -> tuple[Arrays, Arrays]:
        """Returns inputs and labels of the examples with these indices as NumPy arrays, without TensorFlow."""

    def in_order(self, batch_size: int) -> Any:
        """Returns all batches in the stored order."""
        if is_installed("tensorflow"):
            return super().in_order(batch_size)
        return IndexedBatches(self.drawn, self.examples, batch_size, lambda: np.arange(self.examples))

    def shuffled(self, order: Order, batch_size: int) -> Any:
        """Returns batches; each iteration takes its order from `order` at its first batch."""
        if is_installed("tensorflow"):
            return super().shuffled(order, batch_size)
        return IndexedBatches(self.drawn, self.examples, batch_size, order.indices)

    def first(self, count: int) -> tuple[Arrays, Arrays]:
        """Returns inputs and labels of the first examples as NumPy arrays."""
        if is_installed("tensorflow"):
            return super().first(count)
        return self.drawn(np.arange(min(count, self.examples)))


@dataclass(frozen=True, eq=False)
class ArrayPart(NumericPart):
    """Inputs and labels in memory; unpacks as (inputs, labels).

    Attributes:
        inputs: Array of shape (examples, ...), or input name -> array.
        targets: Labels of shape (examples, ...), or output name -> array.
    """

    inputs: Arrays
    targets: Arrays

    def __iter__(self) -> Iterator[Arrays]:
        return iter((self.inputs, self.targets))

    def __getitem__(self, index: int) -> Arrays:
        return (self.inputs, self.targets)[index]

    @property
    def examples(self) -> int:  # type: ignore[override]
        """Number of examples."""
        return len(flat(self.targets)[0])

    def subset(self, indices: np.ndarray) -> "ArrayPart":
        """Returns the examples with these indices."""
        return ArrayPart(*self.drawn(indices))

    def drawn(self, indices: np.ndarray) -> tuple[Arrays, Arrays]:
        """Returns inputs and labels of the examples with these indices."""
        inputs, targets = (mapped(lambda array: array[indices], arrays) for arrays in self)
        return inputs, targets

    def prepared(self, prepare: Callable[[Arrays], Arrays]) -> "ArrayPart":
        """Returns the part with prepared inputs; computes them now."""
        stored = self.in_order(READ_AT_ONCE)
        if isinstance(stored, IndexedBatches):
            batches = [prepare(inputs) for inputs, _ in stored]
        else:
            # In `map`, Keras's preprocessing layers compute with TensorFlow on every backend.
            batches = list(stored.map(lambda inputs, _: prepare(inputs)).as_numpy_iterator())
        first = batches[0]
        if isinstance(first, Mapping):
            inputs: Arrays = {name: np.concatenate([batch[name] for batch in batches]) for name in first}
        else:
            inputs = np.concatenate(batches)
        return ArrayPart(inputs, self.targets)

    def read(self, indices: Any, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches from a dataset of example indices."""
        import tensorflow as tf

        inputs, targets = (mapped(tf.convert_to_tensor, arrays) for arrays in self)

        def examples(drawn: Any) -> tuple[Arrays, Arrays]:
            def gathered(array: Any) -> Any:
                return tf.gather(array, drawn)

            return mapped(gathered, inputs), mapped(gathered, targets)

        return indices.batch(batch_size).map(examples, num_parallel_calls=2)

    def first(self, count: int) -> tuple[Arrays, Arrays]:
        """Returns inputs and labels of the first examples."""
        return mapped(lambda array: array[:count], self.inputs), mapped(lambda array: array[:count], self.targets)

    def evaluation_data(self, batch_size: int) -> tuple[Any, ...]:
        """Returns inputs and labels."""
        return tuple(self)

    def calibration_data(self) -> Any:
        """Returns inputs and labels."""
        return tuple(self)

    def labels(self) -> Any:
        """Returns the `Labels` of the label, or of each output."""
        return mapped(labels_of, self.targets)

    def digests(self) -> list[str]:
        """Returns the digest of each array; the names of several arrays are part of it."""
        found = []
        for arrays in self:
            if isinstance(arrays, Mapping):
                found += [f"{name} {array_digest(arrays[name])}" for name in sorted(arrays)]
            else:
                found.append(array_digest(arrays))
        return found


def as_part(pair: Any) -> Part:
    """Returns a `Part` from itself or from a pair (inputs, labels)."""
    return pair if isinstance(pair, Part) else ArrayPart(*pair)


@contextlib.contextmanager
def naming_damaged_file(parts: Iterable[Part]) -> Iterator[None]:
    """Context manager that names the file in the error of TensorFlow if an example of these parts cannot be read.

    Raises:
        RecipeError: A file of the data is damaged.
    """
    try:
        yield
    except _reading_errors() as error:
        path = next(filter(None, (part.damaged() for part in parts)), None)
        if path is None:
            raise
        raise RecipeError(
            f"{path} cannot be read as an image. Restore the file and continue with --resume (resume=True) if "
            "checkpoints were written, or remove the file and start again."
        ) from error


def _reading_errors() -> tuple[type[Exception], ...]:
    # Not imported here: plans and refusals do without TensorFlow, and it may not be installed.
    errors = getattr(sys.modules.get("tensorflow"), "errors", None)
    if errors is None:
        return ()
    return errors.InvalidArgumentError, errors.NotFoundError, errors.DataLossError, errors.PermissionDeniedError


def require_tensorflow_for(setting: str, remedy: str) -> None:
    """Checks that TensorFlow is installed, which reads some kinds of data on every backend of Keras.

    Args:
        setting: The setting that needs TensorFlow, such as "data.images".
        remedy: Text of the error after "or": another remedy.

    Raises:
        RecipeError: TensorFlow is not installed.
    """
    if not is_installed("tensorflow"):
        raise RecipeError(
            f"{setting} needs TensorFlow on every backend of Keras. Received: no package tensorflow. Install it (pip "
            f"install tensorflow), or {remedy}."
        )


def subset_digest(fingerprint: str, indices: np.ndarray) -> str:
    """Returns the SHA-256 over a fingerprint of files and the indices of the examples that are used."""
    return hashlib.sha256(fingerprint.encode() + np.asarray(indices, "<i8").tobytes()).hexdigest()


def _size(labels: Arrays) -> Any:
    import tensorflow as tf

    return tf.shape(flat(labels)[0])[0]


def _shares(count: Any, replicas: int) -> Any:
    """Returns one weight per example from the size of its replica's part; all 1 if the parts are equal."""
    import tensorflow as tf

    # TensorFlow gives every replica the same number of examples, rounded up, until no examples remain.
    part = (count + replicas - 1) // replicas
    begin = tf.range(count) // part * part
    return tf.cast(tf.minimum(part, count - begin) * replicas, tf.float32) / tf.cast(count, tf.float32)


@dataclass(frozen=True, eq=False)
class Opened:
    """What a source holds, before a split and before preprocessing.

    Attributes:
        name: Readable name, such as "digits".
        train: Training examples, from which validation and test examples may be held out.
        validation: Validation examples; None if the source has none.
        test: Test examples; None if the source has none.
        class_names: Names of the classes, in the order of their numbers; empty if the source has no names.
        notes: Facts for the plan and the report, such as the names of the arrays that were read.
    """

    name: str
    train: Part
    validation: Part | None = None
    test: Part | None = None
    class_names: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
