"""The principal directions of one dimension of a tensor. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Mode:
    """The principal directions of one dimension, those of the largest energy first.

    Attributes:
        means: Mean over all other dimensions, shape (length,).
        energies: Squared deviations from the means along each direction, descending, shape (length,).
        vectors: The directions as columns, shape (length, length).
    """

    means: np.ndarray
    energies: np.ndarray
    vectors: np.ndarray

    def errors(self) -> np.ndarray:
        """Returns what 1, 2, ... directions lose of the squared deviations from the means, as shares of them."""
        total = self.energies.sum()
        dropped = np.append(np.cumsum(self.energies[::-1])[::-1], 0.0)[1:]
        return dropped / total if total else np.zeros_like(dropped)

    def size_for(self, energy: float) -> int:
        """Returns the smallest number of directions that keeps a share of the squared deviations."""
        return int(np.argmax(self.errors() <= 1 - energy)) + 1


class ModeMoments:
    """Sums over tensors from which the directions of one dimension follow.

    Args:
        axis: The dimension, counted from the first one, which is the batch; negative: from the last one.

    Attributes:
        length: Length of the dimension; None before the first tensor.
        examples: Number of examples.
        sums: Sums over all other dimensions, shape (length,).
    """

    def __init__(self, axis: int):
        self._axis, self._rows = axis, 0
        self.length: int | None = None
        self.examples = 0
        self._gram, self.sums = np.zeros(()), np.zeros(())

    def add(self, tensor: np.ndarray) -> None:
        """Adds a batch of tensors.

        Raises:
            ValueError: The dimension has another length than in the batches before.
        """
        rows = np.moveaxis(tensor, self._axis, -1).reshape(-1, tensor.shape[self._axis]).astype("float64")
        if self.length is None:
            self.length = rows.shape[1]
        elif rows.shape[1] != self.length:
            raise ValueError(
                f"The dimension that is reduced has one length. Received: batches of the lengths {self.length} and "
                f"{rows.shape[1]}. Pad or cut the data to one length."
            )
        self._gram = self._gram + rows.T @ rows
        self.sums = self.sums + rows.sum(axis=0)
        self._rows += len(rows)
        self.examples += len(tensor)

    def mode(self) -> Mode:
        """Returns the directions: eigenvectors of the products of the unfolded tensor about its means.

        Source: De Lathauwer et al. 2000, "A multilinear singular value decomposition", section 3.
        """
        means = self.sums / max(self._rows, 1)
        energies, vectors = np.linalg.eigh(self._gram - self._rows * np.outer(means, means))
        energies, vectors = np.maximum(energies[::-1], 0.0), vectors[:, ::-1]
        # An eigenvector has no sign of its own: its largest entry is positive, on every machine.
        largest = np.abs(vectors).argmax(axis=0)
        return Mode(means, energies, vectors * np.sign(vectors[largest, np.arange(len(means))]))
