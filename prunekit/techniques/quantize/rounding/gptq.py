"""Rounds the matrix of a layer one input after another; the inputs that follow compensate for the errors.

NumPy only. X stands for the calibration inputs of the layer, W for its matrix of shape (inputs, outputs), and
H = X^T X for the Hessian of the squared output error |X W - X W'|^2. Leading axes, written "...", number matrices that
share no inputs; they are rounded together.

Source: Frantar et al. 2022, arXiv:2210.17323 (GPTQ).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from prunekit.sparsity.reconstruction import DAMPING, InverseFactor, Rounding, Selection, inverse_factor, reconstruct
from prunekit.techniques.quantize.grids.grids import IntegerFormat

# Rows that change one by one; the rows after them change once, by a matrix product.
_RUN = 128


@dataclass(frozen=True, eq=False)
class OrderedFactor:
    """The factor of an inverse Hessian whose inputs stand in the order in which they are rounded.

    Attributes:
        order: The inputs, shape (..., inputs).
        factor: Factor for the inputs in this order.
    """

    order: np.ndarray
    factor: InverseFactor

    def ordered(self, values: np.ndarray) -> np.ndarray:
        """Returns an array of shape (..., inputs, outputs) with the inputs in this order."""
        return np.take_along_axis(values, self.order[..., None], -2)

    def restored(self, values: np.ndarray) -> np.ndarray:
        """Returns an array of shape (..., inputs, outputs) with the inputs in their own order."""
        found = np.empty_like(values)
        np.put_along_axis(found, self.order[..., None], values, -2)
        return found

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Returns H^-1 right, shape (..., inputs, outputs); see `InverseFactor.solve`."""
        return self.restored(self.factor.solve(self.ordered(right)))


def ordered_factor(hessian: np.ndarray, damping: float = DAMPING, *, descending: bool = True) -> OrderedFactor:
    """Returns the factor of the inverse of a damped Hessian for `rounded_matrix`.

    Args:
        hessian: H, shape (..., inputs, inputs).
        damping: Fraction of the mean diagonal of H that is added to its diagonal.
        descending: True: the inputs with the largest sums of squares are rounded first, while the most weights are left
            to compensate. False: in the order of the rows.

    Raises:
        ValueError: The Hessian has entries that are not finite.

    Source: the order from the code of the authors of GPTQ (`act_order`, with scales that are fixed before the first
        weight is rounded: `static_groups`).
    """
    diagonal = np.diagonal(hessian, axis1=-2, axis2=-1)
    rows = np.broadcast_to(np.arange(hessian.shape[-1]), diagonal.shape)
    order = np.argsort(-diagonal if descending else rows, kind="stable")
    ordered = np.take_along_axis(np.take_along_axis(hessian, order[..., :, None], -2), order[..., None, :], -1)
    return OrderedFactor(order, inverse_factor(ordered, damping))


def gptq(
    matrix: np.ndarray,
    hessian: np.ndarray,
    scale: np.ndarray,
    form: IntegerFormat,
    *,
    mask: np.ndarray | None = None,
    damping: float = DAMPING,
    descending: bool = True,
) -> np.ndarray:
    """Returns a matrix of grid values whose product with the inputs is close to that of `matrix`.

    Args:
        matrix: As for `rounded_matrix`.
        hessian: H, shape (..., inputs, inputs).
        scale: As for `rounded_matrix`.
        form: As for `rounded_matrix`.
        mask: As for `rounded_matrix`.
        damping: As for `ordered_factor`.
        descending: As for `ordered_factor`.

    Raises:
        ValueError: The format is not symmetric, or the Hessian has entries that are not finite.
    """
    return rounded_matrix(matrix, ordered_factor(hessian, damping, descending=descending), scale, form, mask)


def rounded_matrix(
    matrix: np.ndarray,
    factor: OrderedFactor,
    scale: np.ndarray,
    form: IntegerFormat,
    mask: np.ndarray | None = None,
    nearest: Rounding | None = None,
) -> np.ndarray:
    """Returns a matrix of grid values whose product with the inputs is close to that of `matrix`.

    Weights of inputs that are zero in all rows become the nearest values.

    Args:
        matrix: W, shape (..., inputs, outputs).
        factor: Factor of the inverse Hessian of the inputs.
        scale: Distances of neighbouring values, which broadcast against `matrix`: shape (..., 1, outputs), or
            (..., inputs, outputs) where groups of inputs have scales of their own (`Granularity.spread`).
        form: The codes, symmetric.
        mask: False = the weight becomes 0, shape (..., inputs, outputs); None = all weights are rounded.
        nearest: Rounds the rows, in the order of the factor, to grid values; None = to the nearest ones.

    Returns:
        Shape (..., inputs, outputs), float32: `Grid.values` of the codes.

    Raises:
        ValueError: The format is not symmetric.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1.
    """
    inputs = matrix.shape[-2]
    nearest = nearest or rounding(factor.ordered(np.broadcast_to(scale, matrix.shape)), form)
    select = None if mask is None else _given(factor.ordered(mask))
    runs = [slice(start, min(start + _RUN, inputs)) for start in range(0, inputs, _RUN)]
    found, _ = reconstruct(factor.ordered(matrix), factor.factor, runs, select, nearest)
    return factor.restored(found.astype("float32"))


def rounding(scale: np.ndarray, form: IntegerFormat) -> Rounding:
    """Returns the function that rounds the rows of a matrix to their grids.

    Args:
        scale: Shape (..., inputs, outputs).
        form: The codes, symmetric.

    Raises:
        ValueError: The format is not symmetric.
    """
    if not form.symmetric:
        raise ValueError(f"Weights are rounded to symmetric codes. Received: {form}.")
    steps, last = np.asarray(scale, "float32"), form.highest
    wide = steps.astype("float64")

    def nearest(row: int, values: np.ndarray) -> np.ndarray:
        # `Grid.nearest` of one row, which is called too often for a grid of its own.
        codes = np.rint(np.clip(values / wide[..., row, :], -last, last)) + 0.0  # No -0.
        return codes.astype("float32") * steps[..., row, :]

    return nearest


def _given(mask: np.ndarray) -> Selection:
    return lambda rows, scores: mask[..., rows, :]
