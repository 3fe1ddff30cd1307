"""Finds the new value of one weight from the moments of its layer: mask, reconstruction, correction of the bias."""

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np

from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.patterns import Pattern
from prunekit.sparsity.reconstruction import (
    DAMPING,
    curvatures,
    damped_hessian,
    inverse_factor,
    reconstruct,
    refit,
    thin,
)
from prunekit.sparsity.scores import Criterion
from prunekit.sparsity.shorthands import Repair
from prunekit.techniques.pruning.masks.mask_maker import ArrayMaskMaker
from prunekit.techniques.pruning.policies.sparsegpt import OutputError, RunSelection, SparseGPT

# How kept weights make up for pruned ones: not at all; by each output's bias and scale; by fitting all kept weights.
REPAIRS = get_args(Repair)


class LayerSolver:
    """Solves one weight after another.

    Args:
        criterion: The criterion; one that reconstructs chooses its masks anew, on the moments of the pruned model.
        makers: What pools, selects and expands the units of each target.
        pattern: Pattern of the units.
        masks: Mask of each target by the importances in the unpruned model.
        zeros: Positions of each target that must stay pruned, False = pruned.
        repair: One of `REPAIRS`.
    """

    def __init__(
        self,
        criterion: Criterion,
        makers: Sequence[ArrayMaskMaker],
        pattern: Pattern,
        masks: Sequence[np.ndarray],
        zeros: Sequence[np.ndarray],
        repair: str,
    ):
        self._criterion, self._makers, self._pattern, self._repair = criterion, makers, pattern, repair
        self._masks, self._zeros = masks, zeros

    @property
    def repairs(self) -> bool:
        """True unless pruned weights are made up for by nothing."""
        return self._repair != "none"

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`."""
        if moments.same and self._masks[index].all():
            return Solution(weight, self._masks[index], None, 0.0)
        corrects_bias = self.repairs and product.bias(moments.output_sums) is not None
        fit = LayerFit(product, moments, centred=corrects_bias)
        matrices = product.matrix(weight)
        if product.diagonal:
            # The rows of an embedding are one-hot: no other weight can compensate.
            masks = product.matrix(self._masks[index])
            found = np.where(masks, matrices, np.zeros((), matrices.dtype))
        else:
            found, masks = self._found(index, product, matrices.astype("float64"), fit)
        shift = fit.bias_shift(found) if corrects_bias else None
        return Solution(product.kernel(found), product.kernel(masks), shift, fit.error(found))

    def _found(self, index: int, product: LayerProduct, matrices: np.ndarray, fit: LayerFit) -> Any:
        reconstructs = isinstance(self._criterion, SparseGPT)
        if not reconstructs and self._repair != "weights":
            masks = product.matrix(self._masks[index])
            found = np.where(masks, matrices, 0.0)
            return (fit.scaled(found) if self._repair == "outputs" else found), masks
        damping = getattr(self._criterion, "damping", DAMPING)
        factor = inverse_factor(fit.gram, damping)
        wanted = fit.best(matrices, damping, factor)
        if reconstructs:
            found, masks = self._reconstruct(index, product, wanted, factor.each())
            if self._repair != "weights":
                return found, masks
        hessian, _ = damped_hessian(fit.gram, damping)
        if isinstance(self._criterion, OutputError):
            return self._thin(index, product, wanted, hessian, curvatures(factor))
        if not reconstructs:
            masks = product.matrix(self._masks[index])
            found = np.where(masks, wanted, 0.0)
        return refit(wanted, masks, hessian, start=found), masks

    def _thin(
        self, index: int, product: LayerProduct, wanted: np.ndarray, hessian: np.ndarray, curvature: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        criterion: Any = self._criterion
        maker, allowed, rounds = self._makers[index], self._zeros[index], criterion.refits
        first, last = maker.kept_units(allowed), maker.kept_units(self._masks[index])

        def select(scores: np.ndarray, mask: np.ndarray, kept: int) -> np.ndarray:
            may_stay = product.kernel(mask) & allowed
            return product.matrix(maker.mask_of(product.kernel(scores), may_stay, kept))

        # The cubic schedule: most weights go in the first rounds, while others can still compensate.
        kept = [last + round((first - last) * (1 - number / rounds) ** 3) for number in range(1, rounds + 1)]
        return thin(wanted, hessian, curvature, select, kept)

    def _reconstruct(self, index: int, product: LayerProduct, wanted: np.ndarray, factors: Sequence[Any]) -> Any:
        criterion: Any = self._criterion
        maker, allowed = self._makers[index], self._zeros[index]
        selection = RunSelection(maker, self._pattern, self._masks[index], allowed, criterion.run)
        groups = zip(wanted, factors, selection(product, wanted, factors), strict=True)
        rows = [reconstruct(matrix, factor, runs, select) for matrix, factor, (runs, select) in groups]
        return np.stack([matrix for matrix, _ in rows]), np.stack([mask for _, mask in rows])
