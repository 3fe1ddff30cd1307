"""Rounds the matrix of a layer one input after another; the inputs that follow compensate for the errors.

NumPy only. X stands for the calibration inputs of the layer, W for its matrix of shape (inputs, outputs), and
H = X^T X for the Hessian of the squared output error |X W - X W'|^2. Leading axes, written "...", number matrices that
share no inputs; they are rounded together.

Source: Frantar et al. 2022, arXiv:2210.17323 (GPTQ).
"""

from __future__ import annotations

import numpy as np

from prunekit.sparsity.reconstruction import DAMPING, Rounding, Selection, inverse_factor, reconstruct
from prunekit.techniques.quantize.grids import IntegerFormat

# Rows that change one by one; the rows after them change once, by a matrix product.
_RUN = 128


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

    Weights of inputs that are zero in all rows become the nearest values.

    Args:
        matrix: W, shape (..., inputs, outputs).
        hessian: H, shape (..., inputs, inputs).
        scale: Distances of neighbouring values, which broadcast against `matrix`: shape (..., 1, outputs), or
            (..., inputs, outputs) where groups of inputs have scales of their own (`Granularity.spread`).
        form: The codes, symmetric.
        mask: False = the weight becomes 0, shape (..., inputs, outputs); None = all weights are rounded.
        damping: Fraction of the mean diagonal of H that is added to its diagonal.
        descending: True: the inputs with the largest sums of squares are rounded first, while the most weights are left
            to compensate. False: in the order of the rows.

    Returns:
        Shape (..., inputs, outputs), float32: `Grid.values` of the codes.

    Raises:
        ValueError: The format is not symmetric, or the Hessian has entries that are not finite.

    Source: Frantar et al. 2022, arXiv:2210.17323, algorithm 1; the order from the authors' code (`act_order`, with
        scales that are fixed before the first weight is rounded: `static_groups`).
    """
    inputs = matrix.shape[-2]
    diagonal = np.diagonal(hessian, axis1=-2, axis2=-1)
    order = np.argsort(-diagonal if descending else np.broadcast_to(np.arange(inputs), diagonal.shape), kind="stable")
    rows, columns = order[..., :, None], order[..., None, :]
    factor = inverse_factor(np.take_along_axis(np.take_along_axis(hessian, rows, -2), columns, -1), damping)
    nearest = rounding(np.take_along_axis(np.broadcast_to(scale, matrix.shape), rows, -2), form)
    select = None if mask is None else _given(np.take_along_axis(mask, rows, -2))
    runs = [slice(start, min(start + _RUN, inputs)) for start in range(0, inputs, _RUN)]
    found, _ = reconstruct(np.take_along_axis(matrix, rows, -2), factor, runs, select, nearest)
    result = np.empty(matrix.shape, "float32")
    np.put_along_axis(result, rows, found.astype("float32"), -2)
    return result


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
