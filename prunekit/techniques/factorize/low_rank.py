"""Matrices of low rank that keep what a layer computes. NumPy only."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Directions:
    """Orthogonal directions of a layer's outputs, those of the largest energy first.

    Attributes:
        energies: Squared length of the outputs along each direction, descending, shape (directions,).
        vectors: The directions as columns, shape (outputs, directions).
    """

    energies: np.ndarray
    vectors: np.ndarray

    def dropped(self) -> np.ndarray:
        """Returns the energy that r directions leave out, for r = 0, 1, ..., shape (directions + 1,)."""
        return np.concatenate([np.cumsum(self.energies[::-1])[::-1], [0.0]])

    def factors(self, matrix: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns (inputs x rank, rank x outputs) whose product is the matrix along the first directions alone.

        Each direction is as large in the values between the two as in the second factor: integers of one scale lose
        little of the small directions so, and both factors train alike.

        Args:
            matrix: Shape (inputs, outputs).
            rank: Number of directions, at least 1.
        """
        vectors = self.vectors[:, :rank]
        scales = self.energies[:rank] ** 0.25
        # Directions without energy stay as they are.
        scales = np.where(scales > 1e-6 * max(scales[0], 1e-30), scales / max(scales[0], 1e-30), 1.0)
        return (matrix @ vectors) / scales, scales[:, None] * vectors.T


def directions_of(gram: np.ndarray, matrix: np.ndarray) -> Directions:
    """Returns the directions of the outputs X W, from the products of the inputs.

    The matrix of rank r along the first r of them, W V V^T, gives the outputs with the least squared error of all
    matrices of rank r. No inverse is taken, so that inputs may be linearly dependent.

    Args:
        gram: X^T X, shape (inputs, inputs), about the means where a bias takes these over; or its diagonal, shape
            (inputs,).
        matrix: W, shape (inputs, outputs), float64.

    Source: Zhang et al. 2015, arXiv:1505.06798, section 2.2 (filters of low rank by the principal components of the
        responses). The same as the truncated singular value decomposition of X W.
    """
    inputs, outputs = matrix.shape
    curved = gram[:, None] * matrix if gram.ndim == 1 else gram @ matrix
    if outputs <= inputs:
        energies, vectors = np.linalg.eigh(matrix.T @ curved)
        order = np.argsort(energies)[::-1][: min(inputs, outputs)]
        return Directions(np.maximum(energies[order], 0.0), vectors[:, order])
    # Fewer inputs: the singular vectors of G^(1/2) W, from the smaller of its two products.
    if gram.ndim == 1:
        weighed = np.sqrt(gram)[:, None] * matrix
    else:
        values, basis = np.linalg.eigh(gram)
        weighed = basis * np.sqrt(np.maximum(values, 0.0)) @ basis.T @ matrix
    _, singular, right = np.linalg.svd(weighed, full_matrices=False)
    return Directions(np.square(singular), right.T)
