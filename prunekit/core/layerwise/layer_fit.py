"""The fit of one layer's weights to the outputs that the layer had before its inputs changed."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import damped_hessian


@dataclass(frozen=True, eq=False)
class Solution:
    """The new value of a weight.

    Attributes:
        weight: New value, the shape of the kernel.
        mask: True = kept.
        bias_shift: What the bias must add, shape (groups, outputs); None if the layer has no bias.
        error: Squared change of the layer's outputs relative to the outputs, with the corrected bias.
    """

    weight: np.ndarray
    mask: np.ndarray
    bias_shift: np.ndarray | None
    error: float


class Solver(Protocol):
    """Finds the new value of one weight after another."""

    @property
    def repairs(self) -> bool:
        """True if biases are corrected and moving statistics of batch normalizations follow their inputs."""

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`."""


class Factor(Protocol):
    """What solves equations with the damped Hessians of a layer."""

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Returns H^-1 right, shape (groups, inputs, outputs)."""


class LayerFit:
    """The squared error of a layer's outputs as a function of its matrices, up to what the bias corrects.

    Args:
        product: The matrix product of the layer.
        moments: Moments of the inputs that the layer receives now, and of the outputs that it had before.
        centred: True if the bias takes over the means, so that the matrices are fitted to the deviations from them.

    Attributes:
        gram: X^T X of the inputs, shape (groups, inputs, inputs); its diagonal, shape (inputs,), for an embedding.
        cross: X^T Y of inputs and former outputs, shape (groups, inputs, outputs).
    """

    def __init__(self, product: LayerProduct, moments: LayerMoments, *, centred: bool):
        inputs, rows = moments.inputs, max(moments.inputs.rows, 1)
        self._input_means, self._output_means = inputs.sums / rows, moments.output_sums / rows
        self.gram, self.cross, self._squares = inputs.gram, moments.cross, moments.output_squares
        self._energy, self._same = float(moments.output_squares.sum()), moments.same
        self._table = moments.matrix[0] if product.diagonal else None
        if centred:
            means = self._input_means
            self.gram = self.gram - rows * means[:, :, None] * means[:, None, :]
            self.cross = self.cross - rows * means[:, :, None] * self._output_means[:, None, :]
            self._squares = self._squares - rows * np.square(self._output_means)

    def best(self, matrices: np.ndarray, damping: float, factor: Factor) -> np.ndarray:
        """Returns the dense weights that give the former outputs best on the inputs of the pruned model.

        Args:
            matrices: Weights before, shape (groups, inputs, outputs), to which the damping draws.
            damping: Fraction of the mean diagonal of each Hessian that was added to its diagonal.
            factor: Solves equations with the damped Hessians.
        """
        if self._same:
            return matrices
        damped, _ = damped_hessian(self.gram, damping)
        added = np.diagonal(damped - self.gram, axis1=-2, axis2=-1)
        wanted = self.cross + added[..., None] * matrices
        return factor.solve(wanted)

    def scaled(self, matrices: np.ndarray) -> np.ndarray:
        """Returns the matrices with each output scaled by least squares."""
        wanted = np.sum(self.cross * matrices, axis=1, keepdims=True)
        energy = np.sum((self.gram @ matrices) * matrices, axis=1, keepdims=True)
        return matrices * np.divide(wanted, energy, out=np.ones_like(wanted), where=energy > 0)

    def error(self, matrices: np.ndarray) -> float:
        """Returns the squared error of the outputs relative to the squared outputs."""
        if not self._energy:
            return 0.0
        if self._table is not None:
            used = np.flatnonzero(self.gram)
            change = (matrices[0, used] - self._table[used]).astype("float64")
            return float(self.gram[used] @ np.einsum("io,io->i", change, change)) / self._energy
        curved = self.gram @ matrices
        left = self._squares.sum() - 2 * np.sum(self.cross * matrices) + np.sum(curved * matrices)
        return max(float(left), 0.0) / self._energy

    def bias_shift(self, matrices: np.ndarray) -> np.ndarray:
        """Returns the mean that the outputs lack, shape (groups, outputs)."""
        return self._output_means - np.einsum("gi,gio->go", self._input_means, matrices)
