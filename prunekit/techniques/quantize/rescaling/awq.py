"""Activation-aware scaling of weights: makes input channels with large activations precise.

Before a kernel is rounded, its rows are multiplied by a power of the magnitude of their activations, and the
activations are divided by the same numbers in the layer before. The power is searched for.

Source: Lin et al. 2023, arXiv:2306.00978, section 3.2, eq. 4-5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.arguments import whole
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import RangeRule, grid_of
from prunekit.techniques.quantize.rescaling.channel_scaling import ChannelWeight

# One scale for each output of each group.
PER_OUTPUT = Granularity((0, 2))
# Largest factor of a channel, so that numbers of all usual dtypes neither overflow nor vanish.
LIMIT = 2.0**10


@dataclass(frozen=True, eq=False)
class Reading:
    """The matrix product of a layer that reads the channels, or of a table that computes them (`table_product`).

    Attributes:
        matrices: What the inputs are multiplied by, shape (groups, inputs, outputs): `LayerProduct.matrix` of the
            kernel with folded batch normalization.
        hessian: X^T X of the layer's inputs, shape (groups, inputs, inputs): `InputProducts.gram`.
        channels: Channel of each input, shape (groups, inputs); see `input_channels`.
        granularity: Which entries of the matrices share a scale.

    Raises:
        ValueError: The shapes do not agree.
    """

    matrices: np.ndarray
    hessian: np.ndarray
    channels: np.ndarray
    granularity: Granularity = PER_OUTPUT

    def __post_init__(self) -> None:
        shapes = self.matrices.shape, self.hessian.shape, self.channels.shape
        groups, inputs = self.channels.shape if self.channels.ndim == 2 else (-1, -1)
        if self.matrices.shape[:-1] != (groups, inputs) or self.hessian.shape != (groups, inputs, inputs):
            raise ValueError(
                "Expected matrices of shape (groups, inputs, outputs), a Hessian of shape (groups, inputs, inputs) and "
                f"channels of shape (groups, inputs). Received: shapes {shapes[0]}, {shapes[1]} and {shapes[2]}."
            )


def input_channels(product: LayerProduct, kernel: ChannelWeight) -> np.ndarray:
    """Returns the channel of each input of a product, shape (groups, inputs).

    Args:
        product: The product of a kernel.
        kernel: The same kernel, with the channel that each entry reads.
    """
    return product.matrix(np.broadcast_to(kernel.channels, product.target.shape))[:, :, 0]


def table_product(table: np.ndarray, lookups: np.ndarray, readings: Sequence[Reading], rows: Sequence[int]) -> Reading:
    """Returns the product whose error is that of the readers' outputs if a table is rounded, to a good approximation.

    A row e of errors of the table changes the outputs of a reader at each of its window positions by e W, where W is
    the kernel at this position. Errors of different lookups count as independent. The mean of several lookups counts
    as one of them, which is more than its error.

    Args:
        table: Shape (rows, channels).
        lookups: Number of lookups of each row.
        readings: The products that read the channels.
        rows: Number of rows of inputs that each of them multiplied.

    Returns:
        The product of the transposed table: each row has a scale of its own, and those without lookups are left out.
        The table is multiplied by the factors by which the readers' kernels are divided.
    """
    total, channels = max(float(lookups.sum()), 1.0), table.shape[1]
    products = np.zeros((channels, channels))
    for reading, count in zip(readings, rows, strict=True):
        for matrix, of_inputs in zip(reading.matrices, reading.channels, strict=True):
            order = np.argsort(of_inputs, kind="stable")
            ordered = of_inputs[order]
            position = np.arange(len(ordered)) - np.searchsorted(ordered, ordered)
            for one in range(position.max(initial=-1) + 1):
                here = order[position == one]
                kernel = matrix[here].astype("float64")
                products[np.ix_(of_inputs[here], of_inputs[here])] += (count / total) * (kernel @ kernel.T)
    used = lookups > 0
    # A row that is looked up n times has n times the squared error, as the same row times the root of n has.
    weighted = table[used].astype("float64") * np.sqrt(lookups[used])[:, None]
    return Reading(weighted.T[None], products[None], np.arange(channels)[None])


def awq_factors(
    readings: Sequence[Reading],
    mean_abs: np.ndarray,
    form: IntegerFormat,
    *,
    tables: Sequence[Reading] = (),
    rule: RangeRule | None = None,
    steps: int = 20,
    limit: float = LIMIT,
) -> np.ndarray:
    """Returns the factors of channels with which the kernels that read them are rounded with the smallest error.

    The kernels are divided by the factors, mean_abs ** -power, where the best of `steps` powers from 0 to 1 is taken.
    The factors are divided by the geometric mean of the largest and the smallest. The error is that of the outputs on
    the calibration data, ||X (diag(f) Q(diag(1 / f) W) - W)||^2, summed over the readings, where Q rounds to the
    nearest value; for tables, which the factors multiply, with 1 / f in the place of f. It is never larger than without
    factors.

    Args:
        readings: The products that read the channels.
        mean_abs: Mean magnitude of each channel over the calibration data, shape (channels,). Channels of zeros have
            the factor 1.
        form: The codes of the rounded kernels and tables.
        tables: The products of a rounded table that computes the channels.
        rule: Chooses the ranges; None = `MinMax`.
        steps: Number of powers.
        limit: Largest factor; 1 / limit is the smallest.

    Returns:
        The factors for `rescaling.rescale`, which multiplies the activations by them, shape (channels,), float64.

    Raises:
        ValueError: `mean_abs` has an entry that is negative or not finite, or `steps` is below 1.
        TypeError: `steps` is no integer.
    """
    mean_abs = np.asarray(mean_abs, "float64")
    if mean_abs.ndim != 1 or not (np.isfinite(mean_abs) & (mean_abs >= 0)).all():
        raise ValueError(f"mean_abs needs finite magnitudes, one for each channel. Received: {mean_abs!r}.")
    best, smallest = np.ones(len(mean_abs)), np.inf
    for power in np.linspace(0.0, 1.0, whole("steps", steps, 1)):
        factors = _factors(mean_abs, power, limit)
        error = sum(output_error(reading, factors, form, rule) for reading in readings)
        error += sum(output_error(table, 1 / factors, form, rule) for table in tables)
        if error < smallest:
            best, smallest = factors, error
    return best


def _factors(mean_abs: np.ndarray, power: float, limit: float) -> np.ndarray:
    """Returns mean_abs ** -power, divided by the geometric mean of the largest and the smallest; 1 for 0."""
    used = mean_abs > 0
    factors = np.ones(len(mean_abs))
    if used.any():
        # In logarithms: a power of a very small number times another overflows.
        logs = -power * np.log(mean_abs[used])
        centred = logs - (logs.max() + logs.min()) / 2
        factors[used] = np.exp(np.clip(centred, -np.log(limit), np.log(limit)))
    return factors


def output_error(reading: Reading, factors: np.ndarray, form: IntegerFormat, rule: RangeRule | None = None) -> float:
    """Returns the squared error of a layer's outputs, summed over the calibration data, if its kernel is rounded.

    Args:
        reading: The layer's product.
        factors: Factors of the channels, by which the kernel is divided before it is rounded.
        form: The codes.
        rule: Chooses the ranges; None = `MinMax`.
    """
    spread = np.asarray(factors, "float32")[reading.channels][:, :, None]
    scaled = reading.matrices.astype("float32") / spread
    rounded = grid_of(scaled, form, reading.granularity, rule).nearest(scaled)
    difference = (rounded * spread - reading.matrices).astype(reading.hessian.dtype)
    return float(np.sum(difference * (reading.hessian @ difference), dtype="float64"))
