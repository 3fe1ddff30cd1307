"""Rounds the matrix of a layer to codes that entropy coding stores in fewer bits, for a small error of its outputs.

NumPy only; matrices and factors as in `gptq`.

Sources: Sullivan & Wiegand 1998 (rate-distortion optimization with a price for bits); Wiedemann et al. 2019,
    arXiv:1907.11900, eq. 4 (for weights).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from prunekit.sparsity.reconstruction import Rounding
from prunekit.techniques.quantize.grids.grids import Grid, IntegerFormat
from prunekit.techniques.quantize.rounding.gptq import OrderedFactor, rounded_matrix

# Times that all weights are rounded with the lengths of the codes of the time before.
_ROUNDS = 2
# Price of a bit, in errors of one step, from which on a coarser grid saves bits for less error than more of the price.
_COARSER = 0.2


def stretch(rate: float) -> float:
    """Returns the factor of a grid's steps for a price of bits: with it, the price is at most `_COARSER` of its steps.

    At many bits, the least error for the bits has the price ln(2) / 6 = 0.116 of a squared step; at 1 to 3 bits, and
    with inputs of different energies, higher prices on finer grids have less error.

    Args:
        rate: Price of a bit, in errors of one step of the grid before.

    Source: Gish & Pierce 1968 (uniform grids with entropy coding: error step^2 / 12, which halves with half a bit).
    """
    return max(1.0, (rate / _COARSER) ** 0.5)


def priced(grid: Grid, rate: float) -> tuple[Grid, float]:
    """Returns the grid on which weights are rounded at a price of bits, and the price in errors of its own steps."""
    factor = stretch(rate)
    longer = grid if factor == 1.0 else replace(grid, scale=(grid.scale * factor).astype(grid.scale.dtype))
    return longer, rate / factor**2


def code_lengths(codes: np.ndarray, form: IntegerFormat) -> np.ndarray:
    """Returns the bits that an adaptive coder takes for each code, shape (2 * highest + 1,), from -highest on.

    The counts are those of the codes, each plus one half, so that a code that does not occur has a length as well.

    Args:
        codes: Codes of the weights, integers, any shape.
        form: The codes, symmetric.

    Source: Krichevsky & Trofimov 1981 (one half).
    """
    counts = np.bincount(np.ravel(codes) + form.highest, minlength=2 * form.highest + 1) + 0.5
    return -np.log2(counts / counts.sum())


def rated_matrix(
    matrix: np.ndarray,
    factor: OrderedFactor,
    scale: np.ndarray,
    form: IntegerFormat,
    mask: np.ndarray | None,
    rate: float,
) -> np.ndarray:
    """Returns a matrix of grid values of little entropy whose product with the inputs is close to that of `matrix`.

    Each weight becomes the value of least error + price * bits, where the error is what its change costs once the
    weights before it are fixed, and the bits are the length of its code.

    Args:
        matrix: As for `rounded_matrix`.
        factor: As for `rounded_matrix`.
        scale: As for `rounded_matrix`.
        form: As for `rounded_matrix`.
        mask: As for `rounded_matrix`.
        rate: Price of a bit: the mean error of a change by one step of the grid, times this number. 0 = the nearest
            values.

    Returns:
        Shape (..., inputs, outputs), float32.
    """
    found = rounded_matrix(matrix, factor, scale, form, mask)
    if not rate:
        return found
    scales = factor.ordered(np.broadcast_to(scale, matrix.shape)).astype("float32")
    costs = 1.0 / np.square(np.diagonal(factor.factor.upper, axis1=-2, axis2=-1))
    # Inputs that are zero in all rows.
    costs = np.where(factor.factor.unused, 0.0, costs)
    price = rate * float(np.mean(costs[..., None] * np.square(scales)))
    for _ in range(_ROUNDS):
        codes = np.rint(found / np.broadcast_to(scale, found.shape)).astype("int64")
        nearest = _cheapest(scales, costs, price * code_lengths(codes, form), form)
        found = rounded_matrix(matrix, factor, scale, form, mask, nearest)
    return found


def _cheapest(scales: np.ndarray, costs: np.ndarray, prices: np.ndarray, form: IntegerFormat) -> Rounding:
    """Returns the function that rounds a row to the codes of least error plus price.

    Args:
        scales: Shape (..., inputs, outputs), float32, the inputs in the order of the factor.
        costs: Error of a unit change of each input's weights, shape (..., inputs).
        prices: Price of each code, from -highest on.
        form: The codes, symmetric.
    """
    last = form.highest
    # Errors in squared steps.
    weights = costs[..., None] * np.square(scales)

    def nearest(row: int, values: np.ndarray) -> np.ndarray:
        steps, weight = scales[..., row, :], weights[..., row, :]
        places = values / steps
        around = np.rint(places).clip(-last, last)

        def total(codes: np.ndarray) -> np.ndarray:
            found: np.ndarray = weight * np.square(places - codes) + prices[codes.astype("int64") + last]
            return found

        best, least = around, total(around)
        # The codes beside the nearest one, and 0.
        for codes in ((around - 1).clip(-last), (around + 1).clip(None, last), np.zeros_like(around)):
            found = total(codes)
            best, least = np.where(found < least, codes, best), np.minimum(found, least)
        return (best + 0.0).astype("float32") * steps  # No -0.

    return nearest
