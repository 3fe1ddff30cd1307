"""LayerErrorAllocation: shares the sparsity between layers by the errors that it causes in their outputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.allocation import Allocation
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.convex_shares import least_total
from prunekit.sparsity.reconstruction import InverseFactor, inverse_factor, output_error, reconstruction_errors
from prunekit.sparsity.selection import keep_largest_of_array, pruned_count

# Sparsities at which the error of each layer is calculated; linear in between.
GRID = (0.0, 0.25, 0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.925, 0.95, 0.97, 0.98, 0.99, 1.0)
# Share of its outputs that a layer without weights is said to keep: its logarithm is finite.
_LEAST = 1e-4
_RUN = 128
# Most outputs that are reconstructed at once, so that the rows of a run stay in the processor's cache.
_OUTPUTS = 1 << 10


@dataclass(frozen=True)
class LayerErrorAllocation(Allocation):
    """Shares the sparsity so that the layers together keep most of their outputs, or so that their errors are equal.

    The error of a layer is the squared change of its outputs on the calibration inputs, relative to the squared
    outputs, after its least important weights are removed and the others have compensated (`reconstruct`). It is
    calculated at fifteen sparsities; its memory is that of the statistic "hessian".

    Args:
        objective: "product": the product over the layers of (1 - error), the share of its outputs that a layer keeps,
            is greatest, so that small and sensitive layers stay dense, and no layer loses nearly all. "equal": each
            layer has the same error.

    Source: the errors are those of Frantar & Alistarh 2023, arXiv:2301.00774; the least sum, of -log(1 -
        error), by convex hulls is the bit allocation of Shoham & Gersho 1988.
    """

    objective: str = "product"

    needs: ClassVar[frozenset[str]] = frozenset({"hessian"})
    needs_scores: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if self.objective not in ("equal", "product"):
            raise ValueError(f"`objective` is product or equal. Received: {self.objective!r}.")

    def sparsities(
        self, sparsity: float, targets: Sequence[Any], scores: Any = None, statistics: Any = None
    ) -> list[float]:
        """One sparsity per weight; counts are exact, and each weight keeps at least one entry."""
        curves = [error_curve(*row) for row in zip(targets, scores, statistics, strict=True)]
        sizes = [int(np.prod(target.shape)) for target in targets]
        removed = min(pruned_count(sparsity, sum(sizes)), sum(sizes) - len(sizes))
        # What an earlier update pruned stays pruned, so those counts are the least.
        gone = [min(int(np.count_nonzero(array_of(target.variable) == 0)), target.size - 1) for target in targets]
        if sum(gone) > removed:
            gone = [0] * len(sizes)
        if self.objective == "equal" and targets:
            counts = _equal(removed, sizes, curves, gone)
        else:
            lost = [-np.log(np.maximum(1.0 - curve, _LEAST)) for curve in curves]
            counts = least_total(removed, sizes, [(GRID, curve) for curve in lost], gone)
        return [count / size for count, size in zip(counts, sizes, strict=True)]


def error_curve(target: Any, scores: Any, statistics: Any) -> np.ndarray:
    """Returns the relative output error of a layer at each sparsity of `GRID`, non-decreasing, shape (15,)."""
    product, hessian = product_of(target), statistics["hessian"]["hessian"]
    matrices = product.matrix(array_of(target.variable)).astype("float32")
    importance = array_of(scores)
    masks = [product.matrix(_kept(importance, sparsity)) for sparsity in GRID[1:-1]]
    if product.diagonal:
        energy = hessian[None, :, None] * np.square(matrices)
        errors = [energy[~mask].sum() for mask in masks]
        total = energy.sum()
    else:
        factor = inverse_factor(hessian)
        total = output_error(matrices, hessian)
        at_once = max(_OUTPUTS // (product.groups * product.outputs), 1)
        parts = [masks[start : start + at_once] for start in range(0, len(masks), at_once)]
        errors = [error for part in parts for error in _errors(matrices, factor, part)]
    relative = np.array([0.0, *errors, total]) / (total or 1.0)
    return np.maximum.accumulate(np.minimum(relative, 1.0))


def _kept(importance: np.ndarray, sparsity: float) -> np.ndarray:
    kept = importance.size - pruned_count(sparsity, importance.size)
    return keep_largest_of_array(importance.reshape(-1), kept).reshape(importance.shape)


def _errors(matrices: np.ndarray, factor: InverseFactor, masks: Sequence[np.ndarray]) -> list[float]:
    """Returns the squared error of the outputs with each mask; the masks stand side by side, as further outputs."""
    inputs, outputs = matrices.shape[-2:]
    runs = (slice(start, min(start + _RUN, inputs)) for start in range(0, inputs, _RUN))
    wide, kept = np.concatenate([matrices] * len(masks), axis=-1), np.concatenate(masks, axis=-1)
    errors = reconstruction_errors(wide, factor, runs, lambda rows, scores: kept[..., rows, :])
    return [float(one.sum()) for one in np.split(errors, len(masks), axis=-1)]


def _equal(removed: int, sizes: Sequence[int], curves: Sequence[np.ndarray], gone: Sequence[int]) -> list[int]:
    """The counts of the `removed` entries whose removal has the smallest error of their layer."""
    # Strictly increasing, so that each level is one sparsity.
    rising = [curve + 1e-9 * np.array(GRID) for curve in curves]

    def counts(level: float) -> list[int]:
        each = (np.interp(level, curve, GRID) for curve in rising)
        return [
            max(min(int(share * size), size - 1), least) for share, size, least in zip(each, sizes, gone, strict=True)
        ]

    low, high = 0.0, 2.0
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(counts(middle)) <= removed else (low, middle)
    found = counts(low)

    def next_error(i: int) -> float:
        more = found[i] + 1
        return float(np.interp(more / sizes[i], GRID, rising[i])) if more < sizes[i] else np.inf

    for _ in range(removed - sum(found)):
        found[min(range(len(found)), key=next_error)] += 1
    return found
