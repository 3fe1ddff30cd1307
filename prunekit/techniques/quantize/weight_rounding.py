"""Chooses the codes of weights: the nearest ones, or those that keep what each layer computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prunekit.anatomy.targets import Target
from prunekit.core.layer_fit import LayerFit, Solution
from prunekit.core.layer_inputs import LayerMoments
from prunekit.core.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian, inverse_factor
from prunekit.techniques.quantize.gptq import gptq
from prunekit.techniques.quantize.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.ranges import RangeRule, grid_holding


class WeightRounder:
    """Rounds one weight after another, on calibration data; see `core.layer_fit.Solver`.

    Args:
        targets: The weights.
        granularities: id of a variable -> which of its entries share a scale.
        form: The codes.
        rule: Chooses the range of each scale.
        method: "nearest" or "gptq".
        corrects_biases: True if biases make up for the mean error of outputs.
        damping: Fraction of the mean diagonal of a Hessian that is added to its diagonal.

    Attributes:
        grids: id of a variable -> the grid of the rounded weight.
    """

    def __init__(  # noqa: PLR0913
        self,
        targets: Sequence[Target],
        granularities: Mapping[int, Granularity],
        form: IntegerFormat,
        rule: RangeRule,
        *,
        method: str,
        corrects_biases: bool,
        damping: float = DAMPING,
    ):
        self._targets, self._granularities, self._form, self._rule = targets, granularities, form, rule
        self._method, self._corrects_biases, self._damping = method, corrects_biases, damping
        self.grids: dict[int, Grid] = {}

    @property
    def repairs(self) -> bool:
        """True if biases are corrected."""
        return self._corrects_biases

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`; entries that are zero stay zero."""
        if moments.same and self._grid(index, weight).holds(weight):
            return Solution(weight, np.ones(weight.shape, bool), None, 0.0)
        corrects = self.repairs and product.bias(moments.output_sums) is not None
        fit = LayerFit(product, moments, centred=corrects)
        if self._method == "gptq" and not product.diagonal:
            found = self._reconstructed(index, product, weight, fit, moments.same)
        else:
            # The rows of an embedding are one-hot: no other weight can make up for an error.
            found = self._grid(index, weight).nearest(weight)
        matrices = product.matrix(found).astype("float64")
        shift = fit.bias_shift(matrices) if corrects else None
        return Solution(found, np.ones(weight.shape, bool), shift, fit.error(matrices))

    def _reconstructed(
        self, index: int, product: LayerProduct, weight: np.ndarray, fit: LayerFit, same: bool
    ) -> np.ndarray:
        matrices, kept = product.matrix(weight).astype("float64"), product.matrix(weight != 0.0)
        wanted = matrices if same else self._wanted(matrices, fit)
        grid = self._grid(index, product.kernel(np.where(kept, wanted, 0.0)))
        # Inputs of one output share a scale.
        scales = product.matrix(np.broadcast_to(grid.scale, weight.shape))[:, :1]
        rows = zip(wanted, fit.gram, scales, kept, strict=True)
        found = [
            gptq(matrix, hessian, scale, self._form, mask=mask, damping=self._damping)
            for matrix, hessian, scale, mask in rows
        ]
        return product.kernel(np.stack(found)).astype("float32")

    def _wanted(self, matrices: np.ndarray, fit: LayerFit) -> np.ndarray:
        """Returns the weights that give the layer's former outputs best on its present inputs."""
        found = []
        for group, (matrix, hessian) in enumerate(zip(matrices, fit.gram, strict=True)):
            damped, _ = damped_hessian(hessian, self._damping)
            found.append(fit.best(group, matrix, damped, inverse_factor(hessian, self._damping)))
        return np.stack(found)

    def _grid(self, index: int, weight: np.ndarray) -> Grid:
        target = self._targets[index]
        granularity = self._granularities[id(target.variable)]
        grid = grid_of_weight(target.name, weight, self._form, granularity, self._rule)
        self.grids[id(target.variable)] = grid
        return grid


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
