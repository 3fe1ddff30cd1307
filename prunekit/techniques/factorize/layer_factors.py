"""Finds the factors of one weight after another, on calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian
from prunekit.techniques.factorize.low_rank import directions_of


class Factorizer:
    """Gives weights a low rank, one after another; see `core.layerwise.layer_fit.Solver`.

    Args:
        targets: The weights.
        ranks: Name of a weight -> its rank; others stay as they are, and only their errors are found.
        corrects_biases: True if biases make up for the mean error of outputs.

    Attributes:
        errors: Name of a weight -> squared error of its layer's outputs with rank 1, 2, ..., relative to the outputs.
        factors: Name of a weight -> its factors, shapes (inputs, rank) and (rank, outputs).
    """

    def __init__(self, targets: Sequence[Target], ranks: Mapping[str, int | None], *, corrects_biases: bool):
        self._targets, self._ranks, self._corrects = targets, ranks, corrects_biases
        self.errors: dict[str, np.ndarray] = {}
        self.factors: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    @property
    def repairs(self) -> bool:
        """True if biases are corrected and moving statistics follow."""
        return self._corrects

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the weight of low rank of target `index`."""
        name, whole = self._targets[index].name, np.ones(weight.shape, bool)
        corrects = self._corrects and product.bias(moments.output_sums) is not None
        fit = LayerFit(product, moments, centred=corrects)
        matrices = product.matrix(weight).astype("float64")
        if not moments.same and not product.diagonal:
            # The weights that give the layer's former outputs best on its present inputs.
            matrices = fit.best(matrices, DAMPING, _Damped(fit.gram))
        gram = fit.gram if product.diagonal else fit.gram[0]
        directions = directions_of(gram, matrices[0])
        energy = float(moments.output_squares.sum())
        self.errors[name] = directions.dropped()[1:] / energy if energy else np.zeros(len(directions.energies))
        rank = self._ranks.get(name)
        if rank is None:
            return Solution(weight, whole, None, 0.0)
        first, second = self.factors[name] = directions.factors(matrices[0], rank)
        found = (first @ second)[None]
        shift = fit.bias_shift(found) if corrects else None
        return Solution(product.kernel(found.astype("float32")), whole, shift, fit.error(found))


class _Damped:
    """Solves equations with the damped Hessians of a layer."""

    def __init__(self, gram: np.ndarray):
        self._damped, _ = damped_hessian(gram, DAMPING)

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Returns H^-1 right."""
        return np.linalg.solve(self._damped, right)
