"""Finds the factors of one weight after another, on calibration data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian
from prunekit.techniques.factorize.forms import Factors, Layout, Structure
from prunekit.techniques.factorize.ranks import Rivals
from prunekit.techniques.factorize.window_forms import WindowForms

# Squared change of a layer's outputs, relative to these, up to which it may come from rounding alone, also that of sums
# in float32: nothing is fitted to it.
_ROUNDING = 1e-6


class Factorizer:
    """Gives weights a low rank, one after another; see `core.layerwise.layer_fit.Solver`.

    Args:
        targets: The weights.
        ranks: Name of a weight -> forms and ranks of which that of the least error is taken; weights without any stay
            as they are, and only their errors are found.
        forms: Name of a weight -> its axes, and the forms whose errors are found.
        corrects_biases: True if biases make up for the mean error of outputs.

    Attributes:
        errors: Name of a weight that stays -> squared error of its layer's outputs with each form and ranks, relative
            to the outputs.
        factors: Name of a weight -> its factors.
        by_form: Name of a weight -> error of its layer with each form that was tried.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        ranks: Rivals,
        forms: Mapping[str, tuple[Layout, Sequence[str]]],
        *,
        corrects_biases: bool,
    ):
        self._targets, self._ranks, self._forms, self._corrects = targets, ranks, forms, corrects_biases
        self.errors: dict[str, dict[Structure, float]] = {}
        self.factors: dict[str, Factors] = {}
        self.by_form: dict[str, dict[str, float]] = {}

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
        if not moments.same and not product.diagonal and fit.error(matrices) > _ROUNDING:
            # The weights that give the layer's former outputs best on its present inputs.
            matrices = fit.best(matrices, DAMPING, _Damped(fit.gram))
        gram = fit.gram if product.diagonal else fit.gram[0]
        layout, forms = self._forms[name]
        of_forms, structures = WindowForms(gram, matrices[0], layout), self._ranks.get(name, ())
        if not structures:
            self.errors[name] = relative(of_forms.errors(forms), float(moments.output_squares.sum()))
            return Solution(weight, whole, None, 0.0)
        tried = [of_forms.factors(one) for one in structures]
        errors = [fit.error(one.matrix[None]) for one in tried]
        self.by_form[name] = {one.form: error for one, error in zip(tried, errors, strict=True)}
        factors = self.factors[name] = tried[int(np.argmin(errors))]
        found = factors.matrix[None]
        shift = fit.bias_shift(found) if corrects else None
        return Solution(product.kernel(found.astype("float32")), whole, shift, fit.error(found))


def relative(errors: Mapping[Structure, float], energy: float) -> dict[Structure, float]:
    """Returns squared errors relative to the squared outputs; 0 without any outputs."""
    return {one: error / energy if energy else 0.0 for one, error in errors.items()}


class _Damped:
    """Solves equations with the damped Hessians of a layer."""

    def __init__(self, gram: np.ndarray):
        self._damped, _ = damped_hessian(gram, DAMPING)

    def solve(self, right: np.ndarray) -> np.ndarray:
        """Returns H^-1 right."""
        return np.linalg.solve(self._damped, right)
