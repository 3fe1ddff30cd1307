"""DiskPart: numbers in a memory-mapped file, of which only the examples of a batch are read."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.recipe.datasets.parts import Arrays, NumericPart, flat, labels_of, mapped, subset_digest


@dataclass(frozen=True, eq=False)
class DiskPart(NumericPart):
    """Inputs in memory-mapped files, and labels in memory.

    Attributes:
        inputs: Array of shape (rows, ...), or input name -> array; text as Python strings.
        targets: Labels of all rows.
        rows: Rows of the examples, in ascending order.
        digest: Fingerprint of the file that the rows were read from.
        prepare: Function of a batch of inputs; None leaves the inputs as they are.
    """

    inputs: Arrays
    targets: np.ndarray
    rows: np.ndarray
    digest: str
    prepare: Callable[[Arrays], Arrays] | None = None

    @property
    def examples(self) -> int:  # type: ignore[override]
        """Number of examples."""
        return len(self.rows)

    def subset(self, indices: np.ndarray) -> "DiskPart":
        """Returns the examples with these indices."""
        return replace(self, rows=self.rows[indices])

    def prepared(self, prepare: Callable[[Arrays], Arrays]) -> "DiskPart":
        """Returns the part with other inputs; `prepare` is called for each batch that is drawn."""
        return replace(self, prepare=prepare)

    def read(self, indices: Any, batch_size: int) -> Any:
        """Returns a `tf.data.Dataset` of batches from a dataset of example indices."""
        import tensorflow as tf

        arrays = flat(self.inputs)
        kinds = [tf.string if array.dtype == object else tf.as_dtype(array.dtype) for array in arrays]
        targets = tf.convert_to_tensor(self.targets)
        rows = tf.convert_to_tensor(self.rows)

        def drawn(wanted: np.ndarray) -> list[np.ndarray]:
            return [np.asarray(array[wanted]) for array in arrays]

        def batch(numbers: Any) -> tuple[Arrays, Any]:
            wanted = tf.gather(rows, numbers)
            tensors = tf.numpy_function(drawn, [wanted], kinds, stateful=False)
            for tensor, array in zip(tensors, arrays, strict=True):
                tensor.set_shape((None, *array.shape[1:]))
            names = iter(tensors)
            # In the order of `flat`.
            ordered = {name: next(names) for name in sorted(self.inputs)} if isinstance(self.inputs, dict) else None
            inputs = tensors[0] if ordered is None else {name: ordered[name] for name in self.inputs}
            return inputs if self.prepare is None else self.prepare(inputs), tf.gather(targets, wanted)

        return indices.batch(batch_size).map(batch, num_parallel_calls=2, deterministic=True)

    def drawn(self, indices: np.ndarray) -> tuple[Arrays, Any]:
        """Returns inputs and labels of the examples with these indices, without TensorFlow."""
        wanted = self.rows[indices]
        inputs = mapped(lambda array: np.asarray(array[wanted]), self.inputs)
        return inputs if self.prepare is None else self.prepare(inputs), self.targets[wanted]

    def labels(self) -> Any:
        """Returns the `Labels` of the label."""
        return mapped(lambda array: labels_of(array[self.rows]), self.targets)

    def digests(self) -> list[str]:
        """Returns one digest of the file and of the examples that are used."""
        return [subset_digest(self.digest, self.rows)]
