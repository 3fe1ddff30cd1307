"""Chooses the codes of weights: the nearest ones, or those that keep what each layer computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from prunekit.anatomy.targets import Target
from prunekit.core.layer_fit import LayerFit, Solution
from prunekit.core.layer_inputs import LayerMoments
from prunekit.core.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import (
    DAMPING,
    InverseFactor,
    Selection,
    damped_hessian,
    inverse_factor,
    output_error,
    reconstruct,
    refit,
)
from prunekit.techniques.quantize.gptq import gptq, sparse_gptq
from prunekit.techniques.quantize.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.ranges import RangeRule, grid_holding

# Returns, for each group of a layer's product, runs of inputs and what chooses the kept weights of a run; arguments:
# product, weights to reproduce of shape (groups, inputs, outputs), factors of the inverse Hessians.
Pruning = Callable[[LayerProduct, np.ndarray, Sequence[InverseFactor]], list[tuple[list[slice], Selection]]]


class WeightRounder:
    """Rounds one weight after another, on calibration data; see `core.layer_fit.Solver`.

    Args:
        targets: The weights.
        grid_of: Returns the grid of a target for a value.
        method: "nearest" or "gptq".
        corrects_biases: True if biases make up for the mean error of outputs.
        damping: Fraction of the mean diagonal of a Hessian that is added to its diagonal.
        prunings: id of a variable -> what prunes it in the same pass; "gptq" only.

    Attributes:
        grids: id of a variable -> the grid of the rounded weight.
    """

    def __init__(  # noqa: PLR0913
        self,
        targets: Sequence[Target],
        grid_of: Callable[[Target, np.ndarray], Grid],
        *,
        method: str,
        corrects_biases: bool,
        damping: float = DAMPING,
        prunings: Mapping[int, Pruning] | None = None,
    ):
        self._prunings = prunings or {}
        self._targets, self._grid_of = targets, grid_of
        self._method, self._corrects_biases, self._damping = method, corrects_biases, damping
        self.grids: dict[int, Grid] = {}

    @property
    def repairs(self) -> bool:
        """True if biases are corrected."""
        return self._corrects_biases

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`; entries that are zero stay zero."""
        pruning = self._prunings.get(id(self._targets[index].variable))
        if pruning is None and moments.same and self._grid(index, weight).holds(weight):
            return Solution(weight, np.ones(weight.shape, bool), None, 0.0)
        corrects = self.repairs and product.bias(moments.output_sums) is not None
        fit = LayerFit(product, moments, centred=corrects)
        mask = np.ones(weight.shape, bool)
        if self._method == "gptq" and not product.diagonal:
            matrices = product.matrix(weight).astype("float64")
            wanted = matrices
            if not moments.same:
                # The weights that give the layer's former outputs best on its present inputs.
                wanted = fit.best(matrices, self._damping, inverse_factor(fit.gram, self._damping))
            if pruning is None:
                found = self._rounded(index, product, wanted, product.matrix(weight != 0.0), fit.gram)
            else:
                found, mask = self._pruned_and_rounded(index, product, wanted, fit.gram, pruning)
        else:
            # The rows of an embedding are one-hot: no other weight can make up for an error.
            found = self._grid(index, weight).nearest(weight)
        matrices = product.matrix(found).astype("float64")
        shift = fit.bias_shift(matrices) if corrects else None
        return Solution(found, mask, shift, fit.error(matrices))

    def _rounded(
        self, index: int, product: LayerProduct, wanted: np.ndarray, kept: np.ndarray, gram: np.ndarray
    ) -> np.ndarray:
        """Returns a kernel on its grid, from matrices of shape (groups, inputs, outputs); zeros where not `kept`."""
        scales, form = self._scales(index, product, np.where(kept, wanted, 0.0))
        found = gptq(wanted, gram, scales, form, mask=kept, damping=self._damping)
        return product.kernel(found).astype("float32")

    def _pruned_and_rounded(
        self, index: int, product: LayerProduct, wanted: np.ndarray, gram: np.ndarray, pruning: Pruning
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns a pruned kernel on its grid, and its mask.

        Each group has the better of two results: weights that are chosen while the weights before them are rounded, and
        weights that are rounded after all are chosen, in the order that suits the rounding.
        """
        factors = inverse_factor(gram, self._damping).each()
        selections = pruning(product, wanted, factors)
        groups = list(zip(wanted, gram, factors, selections, strict=True))
        fitted, masks = [], []
        for matrix, hessian, factor, (runs, select) in groups:
            start, mask = reconstruct(matrix, factor, runs, select)
            fitted.append(refit(matrix, mask, damped_hessian(hessian, self._damping)[0], start=start))
            masks.append(mask)
        found = []
        scales, form = self._scales(index, product, np.stack(fitted))
        for (matrix, hessian, factor, (runs, select)), scale, start, mask in zip(
            groups, scales, fitted, masks, strict=True
        ):
            joint = sparse_gptq(matrix, factor, scale, form, runs, select)
            after = gptq(start, hessian, scale, form, mask=mask, damping=self._damping), mask
            found.append(_better(joint, after, matrix, hessian))
        weights, kept = (np.stack(part) for part in zip(*found, strict=True))
        return product.kernel(weights).astype("float32"), product.kernel(kept)

    def _scales(self, index: int, product: LayerProduct, matrices: np.ndarray) -> tuple[np.ndarray, IntegerFormat]:
        """Returns the scales of a kernel, one for each entry of its matrices, and its codes.

        The scales are known before the first weight is rounded, whatever the order of the inputs.
        """
        kernel = product.kernel(matrices)
        grid = self._grid(index, kernel)
        return product.matrix(np.broadcast_to(grid.spread(kernel)[0], kernel.shape)), grid.format

    def _grid(self, index: int, weight: np.ndarray) -> Grid:
        target = self._targets[index]
        grid = self._grid_of(target, weight)
        self.grids[id(target.variable)] = grid
        return grid


def _better(first: Any, second: Any, matrix: np.ndarray, hessian: np.ndarray) -> Any:
    """Returns the pair (weights, mask) whose outputs are nearer to those of a matrix."""
    errors = [output_error(weights - matrix, hessian) for weights, _ in (first, second)]
    return first if errors[0] <= errors[1] else second


def grid_of_weight(
    name: str, weight: np.ndarray, form: IntegerFormat, granularity: Granularity, rule: RangeRule
) -> Grid:
    """Returns the grid of a weight: the one that it lies on already, so that it stays as it is, or that of the rule.

    Args:
        name: Path of the weight, for messages.
        weight: Its values.
        form: The codes.
        granularity: Which entries share a scale.
        rule: Chooses the range of each scale.

    Raises:
        ValueError: A value is NaN or infinite.
    """
    try:
        return grid_holding(weight, form, granularity, rule)
    except ValueError as error:
        raise ValueError(f"The weight {name} cannot be quantized. {error}") from error
