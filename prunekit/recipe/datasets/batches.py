"""The order of the examples in each epoch, and batches of examples that NumPy reads by index."""

import math
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np


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
        return self._generator().permutation(self._examples)

    def epoch_seed(self) -> np.int64:
        """Returns a seed for the next epoch, for a data set that has no access by index: int64 scalar."""
        return self._generator().integers(2**62, dtype=np.int64)

    def _generator(self) -> np.random.Generator:
        return np.random.default_rng([self._seed, self.epoch])


class AdvancingOrder(Order):
    """An order that goes on to the next epoch by itself, for trainings that are never resumed."""

    def indices(self) -> np.ndarray:
        """Returns the example indices of the next epoch, and goes on."""
        found = super().indices()
        self.epoch += 1
        return found

    def epoch_seed(self) -> np.int64:
        """Returns a seed for the next epoch, and goes on."""
        found = super().epoch_seed()
        self.epoch += 1
        return found


class IndexedBatches(keras.utils.PyDataset):
    """Batches (inputs, labels) as NumPy arrays, for JAX and PyTorch; `fit` needs `shuffle=False`.

    Args:
        read: Returns the inputs and labels of the examples with these indices, shape (n,).
        examples: Number of examples.
        batch_size: Number of examples per batch; the last batch may have fewer.
        order: Returns the indices of all examples, shape (examples,); called at each first batch.
    """

    def __init__(
        self, read: Callable[[np.ndarray], Any], examples: int, batch_size: int, order: Callable[[], np.ndarray]
    ):
        super().__init__()
        self._read, self._examples, self._batch_size, self._order = read, examples, batch_size, order
        self._indices: np.ndarray | None = None

    def __len__(self) -> int:
        return math.ceil(self._examples / self._batch_size)

    def __getitem__(self, index: int) -> Any:
        if index == 0 or self._indices is None:
            self._indices = self._order()
        return self._read(self._indices[index * self._batch_size : (index + 1) * self._batch_size])

    def __iter__(self) -> Iterator[Any]:
        # `__getitem__` raises no IndexError, so Python's own iteration would not end.
        return (self[index] for index in range(len(self)))
