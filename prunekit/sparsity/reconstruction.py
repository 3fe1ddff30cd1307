"""Reconstruction: prunes or rounds the matrix of a layer and changes the other weights, so that its outputs stay.

NumPy only. X stands for the calibration inputs of the layer, one row per example and position; W for its matrix of
shape (inputs, outputs); H = X^T X for the Hessian of the squared output error |X W - X W'|^2, one for all outputs.
Leading axes, written "...", number matrices that share no inputs, such as those of the channels of a depthwise
convolution: each array operation works on all of them, so that many small matrices take little time.

Sources: Frantar & Alistarh 2023, arXiv:2301.00774, section 3 (SparseGPT), on Hassibi & Stork 1992 (optimal brain
    surgeon); Frantar et al. 2022, arXiv:2210.17323 (GPTQ).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

# Fraction of a Hessian's mean diagonal that is added to its diagonal, as in Frantar & Alistarh 2023.
DAMPING = 0.01
# Inputs from which on the products of a fit are in float32, whose sums the Hessians are: the error that is left changes
# by a millionth of itself, and by less than a ten-thousandth where inputs nearly depend on one another.
_WIDE = 512
# Share of all that the steps of a fit have gained for an output; with a step that gains less the output is fitted. The
# error that is left is then less than a millionth above the smallest one.
_ENOUGH = 1e-8
# Rows that follow one another one by one; these follow the rows before them by a matrix product.
_ROWS = 16
# Side below which a triangular matrix is inverted at once.
_SIDE = 64
# Products with H after each round of `thin` but the last: the next round changes the weights anyway.
_STEPS_BETWEEN = 4


class Selection(Protocol):
    """Chooses which weights of a run of rows are kept, when the reconstruction reaches these rows."""

    def __call__(self, rows: slice, scores: np.ndarray) -> np.ndarray:
        """Returns the mask of the rows.

        Args:
            rows: Rows of the matrix.
            scores: Squared output error that removing each weight costs, shape (..., rows, outputs); higher = keep.

        Returns:
            Boolean array of the shape of `scores`, True = kept.
        """


class Thinning(Protocol):
    """Chooses which weights a round of `thin` keeps."""

    def __call__(self, scores: np.ndarray, mask: np.ndarray, kept: int, /) -> np.ndarray:
        """Returns a mask with `kept` units, a subset of `mask`.

        Args:
            scores: Shape (..., inputs, outputs); higher = keep.
            mask: What the round before has kept, of the same shape.
            kept: Number of units.
        """


class Rounding(Protocol):
    """Rounds the weights of one input, when the reconstruction reaches this row."""

    def __call__(self, row: int, values: np.ndarray, /) -> np.ndarray:
        """Returns the nearest values of the grids of these weights; 0 for 0.

        Args:
            row: Row of the matrix.
            values: Weights of the row, shape (..., outputs), float64.
        """


@dataclass(frozen=True, eq=False)
class InverseFactor:
    """The upper triangular factor U of an inverse Hessian: inverse = U^T U.

    Row i of U beyond the diagonal, divided by U[i, i], says how the weights after weight i compensate for a change of
    weight i, once the weights before i are fixed; 1 / U[i, i] ** 2 is the error that a unit change of weight i costs.

    Attributes:
        upper: Shape (..., inputs, inputs), float64.
        unused: Inputs that are zero in all rows, shape (..., inputs): their weights have no effect.
        added: What was added to the diagonal of the Hessian, shape (..., inputs).
    """

    upper: np.ndarray
    unused: np.ndarray
    added: np.ndarray

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Returns H^-1 right, with what was added to the diagonal of H; shape (..., inputs, outputs)."""
        return np.swapaxes(self.upper, -1, -2) @ (self.upper @ right)

    def each(self) -> list["InverseFactor"]:
        """Returns the factors along the first axis, one for each group."""
        return [InverseFactor(*row) for row in zip(self.upper, self.unused, self.added, strict=True)]


def inverse_factor(hessian: np.ndarray, damping: float = DAMPING) -> InverseFactor:
    """Returns the factor of the inverse of a damped Hessian.

    Args:
        hessian: Shape (..., inputs, inputs), symmetric and positive semidefinite; not changed.
        damping: Fraction of the mean diagonal that is added to the diagonal. It bounds the condition number where
            inputs depend on one another or there are fewer rows than inputs. Doubled until the factorization succeeds,
            for each Hessian alone.

    Raises:
        ValueError: The Hessian has entries that are not finite.
    """
    damped, unused = damped_hessian(hessian, damping)
    while True:
        try:
            # Reversed in both axes, the lower factor L of H gives H^-1 = U^T U with U = L^-1 reversed: one
            # factorization and one triangular inverse.
            lower = np.linalg.cholesky(damped[..., ::-1, ::-1])
            added = np.einsum("...ii->...i", damped) - np.einsum("...ii->...i", hessian)
            return InverseFactor(_lower_inverse(lower)[..., ::-1, ::-1], unused, added)
        except np.linalg.LinAlgError:
            if damped.ndim > 2:
                factors = [inverse_factor(one, damping) for one in hessian]
                upper, added = (np.stack([getattr(one, name) for one in factors]) for name in ("upper", "added"))
                return InverseFactor(upper, unused, added)
            diagonal = np.diag_indices_from(damped)
            damped[diagonal] += max(damping, 1e-6) * damped[diagonal].mean()


def damped_hessian(hessian: np.ndarray, damping: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns (H + damping * mean(diagonal) * identity, mask of the unused inputs); 1 on the diagonal of unused inputs.

    Raises:
        ValueError: The Hessian has entries that are not finite.
    """
    damped = np.array(hessian, "float64")
    diagonal = np.einsum("...ii->...i", damped)
    if not np.isfinite(diagonal).all():
        raise ValueError(
            "A Hessian needs finite inputs. Received: inputs of the layer that are NaN or infinite on the calibration "
            "data. Check the data and the weights of the layers before."
        )
    unused = diagonal <= 0
    count = np.maximum((~unused).sum(axis=-1, keepdims=True), 1)
    mean = np.where(unused, 0.0, diagonal).sum(axis=-1, keepdims=True) / count
    # The view of the diagonals.
    diagonal[...] = np.where(unused, 1.0, diagonal + damping * mean)
    return damped, unused


def _lower_inverse(lower: np.ndarray) -> np.ndarray:
    """Returns the inverse of a lower triangular matrix, by halves: all but the last level are matrix products."""
    size = lower.shape[-1]
    if size <= _SIDE:
        return np.tril(np.linalg.inv(lower)) if size else lower
    half = size // 2
    inverse = np.zeros_like(lower)
    first, second = _lower_inverse(lower[..., :half, :half]), _lower_inverse(lower[..., half:, half:])
    inverse[..., :half, :half], inverse[..., half:, half:] = first, second
    inverse[..., half:, :half] = -second @ (lower[..., half:, :half] @ first)
    return inverse


def reconstruct(
    matrix: np.ndarray,
    factor: InverseFactor,
    runs: Iterable[slice],
    select: Selection | None = None,
    nearest: Rounding | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prunes and rounds the rows of a matrix in order; the rows after each row compensate for its change.

    Weights of unused inputs have no effect: they are selected last, and become 0 if nothing is rounded.

    Args:
        matrix: Shape (..., inputs, outputs).
        factor: Factor of the inverse Hessian of the inputs.
        runs: Consecutive runs of rows that together are all rows. Within a run each row changes the later ones; the
            rows after it change once, by a matrix product.
        select: Chooses the kept weights of a run when all rows before it are fixed; None = all are kept.
        nearest: Rounds the kept weights of a row; None = they are not rounded.

    Returns:
        The new matrix and its mask, both of shape (..., inputs, outputs).

    Sources: Frantar & Alistarh 2023, arXiv:2301.00774, algorithm 1, and section 3.5 for both in one pass; Frantar et
        al. 2022, arXiv:2210.17323, algorithm 1 (rounding).
    """
    weights = np.array(matrix, "float64")
    weights[factor.unused] = 0.0
    mask, _ = _compensate(weights, factor.upper, runs, select, nearest)
    if nearest is not None:
        unused = factor.unused.reshape(-1, factor.unused.shape[-1]).any(axis=0)
        for row in map(int, np.flatnonzero(unused)):
            rounded = np.where(mask[..., row, :], nearest(row, np.array(matrix[..., row, :], "float64")), 0.0)
            weights[..., row, :] = np.where(factor.unused[..., row, None], rounded, weights[..., row, :])
    return weights, mask


def reconstruction_errors(
    matrix: np.ndarray, factor: InverseFactor, runs: Iterable[slice], select: Selection
) -> np.ndarray:
    """Returns the squared error of each output, over all rows, of the matrix that `reconstruct` returns.

    Args:
        matrix: Shape (..., inputs, outputs). In float32 the arithmetic takes half the time of that in float64.
        factor: Factor of the inverse of the damped Hessian.
        runs: As for `reconstruct`.
        select: As for `reconstruct`.

    Returns:
        Shape (..., outputs), float64.
    """
    start = np.array(matrix)
    start[factor.unused] = 0.0
    weights = start.copy()
    _, errors = _compensate(weights, factor.upper.astype(start.dtype, copy=False), runs, select, None)
    # The change is -U^T E, and U D U^T = 1 for the damped Hessian D: |E|^2 is the error by D, without a product.
    squares = np.square(errors, out=errors).sum(axis=-2, dtype="float64")
    weights -= start
    return np.maximum(squares - np.einsum("...i,...io->...o", factor.added, np.square(weights, out=weights)), 0.0)


def _compensate(
    weights: np.ndarray,
    upper: np.ndarray,
    runs: Iterable[slice],
    select: Selection | None,
    nearest: Rounding | None,
) -> tuple[np.ndarray, np.ndarray]:
    """Prunes and rounds a matrix in place, as `reconstruct`, zero where inputs are unused.

    Args:
        weights: The matrix, shape (..., inputs, outputs).
        upper: Factor of the inverse Hessian, of the same dtype.
        runs: As for `reconstruct`.
        select: As for `reconstruct`.
        nearest: As for `reconstruct`.

    Returns:
        The mask, and E of the same shape: the change of the matrix is -upper^T E.
    """
    mask, errors = np.ones(weights.shape, bool), np.zeros_like(weights)
    scales = np.diagonal(upper, axis1=-2, axis2=-1)[..., None]

    def follow(rows: slice, before: slice) -> None:
        """Adds to rows what the errors of the rows before them change."""
        if before.start < before.stop:
            weights[..., rows, :] -= np.swapaxes(upper[..., before, rows], -1, -2) @ errors[..., before, :]

    for run in runs:
        follow(run, slice(0, run.start))
        if select is not None:
            mask[..., run, :] = select(run, np.square(weights[..., run, :] / scales[..., run, :]))
        for start in range(run.start, run.stop, _ROWS):
            stop = min(start + _ROWS, run.stop)
            follow(slice(start, stop), slice(run.start, start))
            for i in range(start, stop):
                follow(slice(i, i + 1), slice(start, i))
                now, error = weights[..., i, :], errors[..., i, :]
                changed = np.where(mask[..., i, :], now if nearest is None else nearest(i, now), 0.0)
                error[...] = (now - changed) / scales[..., i, :]
                now[...] = changed
    return mask, errors


def refit(
    matrix: np.ndarray,
    mask: np.ndarray,
    hessian: np.ndarray,
    *,
    start: np.ndarray | None = None,
    steps: int = 32,
    enough: float = _ENOUGH,
) -> np.ndarray:
    """Returns the kept weights that reproduce the outputs of `matrix` best, by preconditioned conjugate gradients.

    Minimizes trace((W' - W)^T H (W' - W)) over matrices W' with the zeros of the mask, each output on its own. Every
    step costs one product with H and lowers the error.

    Args:
        matrix: W, shape (..., inputs, outputs).
        mask: Shape (..., inputs, outputs), True = kept.
        hessian: H, shape (..., inputs, inputs), damped.
        start: First W', zero where the mask is False; None = the kept entries of W.
        steps: Largest number of products with H.
        enough: An output is fitted when a step lowers its error by less than this share of what all its steps did.

    Source: Hestenes & Stiefel 1952; for pruning Meng et al. 2024, arXiv:2406.07831, section 3.3.
    """
    start = np.where(mask, matrix, 0.0) if start is None else start
    # In units of the inputs in which the diagonal of H is 1, the steps need no preconditioner.
    units = np.sqrt(np.einsum("...ii->...i", hessian))[..., None]
    dtype = "float32" if hessian.shape[-1] >= _WIDE else "float64"
    scaled = (hessian / units).astype(dtype, copy=False)
    scaled /= np.swapaxes(units, -1, -2).astype(dtype)
    residual = scaled @ ((matrix - start) * units).astype(dtype, copy=False)
    residual *= mask
    change, direction, slope = np.zeros_like(residual), residual.copy(), _products(residual, residual)
    gained = np.zeros_like(slope)
    for _ in range(steps):
        if not slope.any():
            break
        curved = scaled @ direction
        curved *= mask
        length = _ratio(slope, _products(direction, curved))
        change += length * direction
        residual -= np.multiply(curved, length, out=curved)
        gain = slope * length
        gained += gain
        renewed = np.where(gain > enough * gained, _products(residual, residual), slope.dtype.type(0))
        direction *= _ratio(renewed, slope)
        direction += residual
        slope = renewed
    return start + change / units


def _products(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns the inner products of the columns, shape (..., 1, outputs)."""
    return np.einsum("...io,...io->...o", first, second)[..., None, :]


def _ratio(numerator: np.ndarray, denominator: np.ndarray) -> np.ndarray:
    """Returns numerator / denominator, 0 where the denominator is not positive."""
    return np.divide(numerator, denominator, out=np.zeros_like(numerator), where=denominator > 0)


def thin(
    matrix: np.ndarray, hessian: np.ndarray, curvature: np.ndarray, select: Thinning, kept: Sequence[int]
) -> tuple[np.ndarray, np.ndarray]:
    """Removes weights in rounds; after each, the kept weights are refitted, and the next round ranks their new values.

    The score of a weight is w ** 2 / (2 [H^-1]_jj), as if all other weights could compensate; a few steps of `refit`
    follow each round, and 32 the last one.

    Args:
        matrix: W, shape (..., inputs, outputs).
        hessian: H, shape (..., inputs, inputs), damped.
        curvature: 1 / [H^-1]_jj, shape (..., inputs).
        select: Chooses the kept weights of a round.
        kept: Number of units that each round keeps, descending.

    Returns:
        The new matrix and its mask, both of shape (..., inputs, outputs).

    Sources: Hassibi & Stork 1992, eq. 5 (the scores); gradual selection with refits Boza 2024, arXiv:2401.02938.
    """
    found, mask = matrix, np.ones(matrix.shape, bool)
    for number, count in enumerate(kept, start=1):
        mask = select(np.square(found) * curvature[..., None], mask, count)
        steps = {} if number == len(kept) else {"steps": _STEPS_BETWEEN}
        found = refit(matrix, mask, hessian, start=np.where(mask, found, 0.0), **steps)
    return found, mask


def output_error(change: np.ndarray, hessian: np.ndarray) -> float:
    """Returns |X change|^2, the squared error of all outputs over all rows.

    Args:
        change: Shape (..., inputs, outputs).
        hessian: H, shape (..., inputs, inputs).
    """
    return float(np.vdot(change, hessian @ change))


def curvatures(factor: InverseFactor) -> np.ndarray:
    """Returns 1 / [H^-1]_jj for each input j, shape (..., inputs); 0 for inputs that are zero in all rows."""
    # [U^T U]_jj is the squared norm of column j.
    return np.where(factor.unused, 0.0, 1.0 / np.einsum("...ij,...ij->...j", factor.upper, factor.upper))
