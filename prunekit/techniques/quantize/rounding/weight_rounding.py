"""Chooses the codes of weights: the nearest ones, or those that keep what each layer computes."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import DAMPING
from prunekit.techniques.quantize.grids.grids import Granularity, Grid, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import RangeRule, grid_holding
from prunekit.techniques.quantize.rounding.gptq import OrderedFactor, ordered_factor
from prunekit.techniques.quantize.rounding.rate import priced, rated_matrix


class WeightRounder:
    """Rounds one weight after another, on calibration data; see `core.layerwise.layer_fit.Solver`.

    Args:
        targets: The weights.
        grid_of: Returns the grid of a target for a value.
        method: "nearest" or "gptq".
        corrects_biases: True if biases make up for the mean error of outputs.
        damping: Fraction of the mean diagonal of a Hessian that is added to its diagonal.
        rates: "gptq": price of a bit for each target; see `rated_matrix`. None = 0.

    Attributes:
        grids: id of a variable -> the grid of the rounded weight.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        grid_of: Callable[[Target, np.ndarray], Grid],
        *,
        method: str,
        corrects_biases: bool,
        damping: float = DAMPING,
        rates: Sequence[float] | None = None,
    ):
        self._targets, self._grid_of = targets, grid_of
        self._method, self._corrects_biases, self._damping = method, corrects_biases, damping
        self._rates = [0.0] * len(targets) if rates is None else list(rates)
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
            matrices = product.matrix(weight).astype("float64")
            factor = ordered_factor(fit.gram, self._damping)
            # The weights that give the layer's former outputs best on its present inputs.
            wanted = fit.best(matrices, self._damping, factor)
            found = self._rounded(index, product, wanted, product.matrix(weight != 0.0), factor)
        else:
            # The rows of an embedding are one-hot: no other weight can make up for an error.
            found = self._grid(index, weight).nearest(weight)
        matrices = product.matrix(found)
        matrices = matrices if product.diagonal else matrices.astype("float64")
        shift = fit.bias_shift(matrices) if corrects else None
        return Solution(found, np.ones(weight.shape, bool), shift, fit.error(matrices))

    def _rounded(
        self, index: int, product: LayerProduct, wanted: np.ndarray, kept: np.ndarray, factor: OrderedFactor
    ) -> np.ndarray:
        """Returns a kernel on its grid, from matrices of shape (groups, inputs, outputs); zeros where not `kept`."""
        kernel = product.kernel(np.where(kept, wanted, 0.0))
        # The scales are known before the first weight is rounded, whatever the order of the inputs.
        grid, price = priced(self._grid(index, kernel), self._rates[index])
        self.grids[id(self._targets[index].variable)] = grid
        scales = product.matrix(np.broadcast_to(grid.spread(kernel)[0], kernel.shape))
        return product.kernel(rated_matrix(wanted, factor, scales, grid.format, kept, price))

    def _grid(self, index: int, weight: np.ndarray) -> Grid:
        target = self._targets[index]
        grid = self._grid_of(target, weight)
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
