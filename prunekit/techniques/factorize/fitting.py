"""Finds the factors of a model's weights: on data, on synthetic inputs, or from the weights alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.anatomy.layers.targets import Target
from prunekit.core.data.calibration import batches_of
from prunekit.core.data.synthetic_inputs import StandIn, stand_in
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.statistics.layer_products import product_of
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.factorize.forms import Factors, Layout, Structure
from prunekit.techniques.factorize.layer_factors import Factorizer, relative
from prunekit.techniques.factorize.layer_parts import forms_of, layout_of
from prunekit.techniques.factorize.options import FactorizeOptions
from prunekit.techniques.factorize.ranks import Rivals
from prunekit.techniques.factorize.window_forms import WindowForms

# In the place of data: weights alone, without synthetic inputs.
NO_INPUTS = object()


@dataclass(frozen=True, eq=False)
class Found:
    """The factors of a model.

    Attributes:
        values: New values, as (variable, tensor), with which the model computes as with the factors.
        factors: Name of a weight -> its factors.
        errors: Name of a weight -> the error of its layer.
        by_form: Name of a weight -> the error of its layer with each form that was tried.
    """

    values: Sequence[tuple[Any, Any]]
    factors: Mapping[str, Factors]
    errors: Mapping[str, float]
    by_form: Mapping[str, Mapping[str, float]]


class Fitting:
    """Finds the factors of a model's weights, on data, on synthetic inputs, or without any.

    Args:
        model: The model.
        targets: The weights.
        options: How.
        data: Calibration data; None = synthetic inputs; `NO_INPUTS` = weights alone.
        memory: Largest number of bytes of activations that are kept between layers.
        progress: Told of each weight.

    Attributes:
        data: What is read; None = nothing.
        note: What the report says of the inputs; "" with data.
    """

    def __init__(
        self,
        model: Any,
        targets: Sequence[Target],
        options: FactorizeOptions,
        data: Any = None,
        memory: float = MEMORY,
        progress: Progress | None = None,
    ):
        self._model, self._targets, self._options = model, list(targets), options
        self._memory, self._progress = memory, progress
        self._forms = {one.name: (layout_of(one), forms_of(one, options.form)) for one in targets}
        self._standing_in: StandIn | None = stand_in(model) if data is None else None
        self.data = data if self._standing_in is None else self._standing_in.inputs
        if data is NO_INPUTS:
            self.data = None
        self.note = "" if self._standing_in is None else self._standing_in.note

    def errors(self) -> dict[str, dict[Structure, float]]:
        """Returns the squared error of each layer's outputs with each form and ranks, relative to the outputs."""
        return self._fitted(self._targets, {})[1]

    def factors(self, ranks: Rivals) -> Found:
        """Returns the factors, each layer fitted from what the factorized layers before it compute."""
        return self._fitted([one for one in self._targets if ranks.get(one.name)], ranks)[0]

    def _fitted(self, targets: Sequence[Target], ranks: Rivals) -> tuple[Found, dict[str, dict[Structure, float]]]:
        if self.data is None:
            return _without_inputs(targets, ranks, self._forms)
        solver = Factorizer(targets, ranks, self._forms, corrects_biases=self._options.correct_biases)
        if self._standing_in is None:
            return self._on_data(targets, solver)
        try:
            with self._standing_in.renormalization(self._model) as statistics:
                found, errors = self._on_data(targets, solver)
                values = [(variable, statistics.on_data(id(variable), value)) for variable, value in found.values]
                return replace(found, values=values), errors
        except ValueError as error:
            # Nobody asked for synthetic inputs.
            self.note, self.data = self._standing_in.failed(error).note, None
            return _without_inputs(targets, ranks, self._forms)

    def _on_data(
        self, targets: Sequence[Target], solver: Factorizer
    ) -> tuple[Found, dict[str, dict[Structure, float]]]:
        work = LayerwiseRepair(self._model, targets, solver, self._progress, memory=self._memory)
        work.run([inputs for inputs, _ in batches_of(self.data)])
        errors = {name: one.error for name, one in work.errors.items()}
        return Found(work.values, solver.factors, errors, solver.by_form), solver.errors


def _without_inputs(
    targets: Sequence[Target], ranks: Rivals, forms: Mapping[str, tuple[Layout, Sequence[str]]]
) -> tuple[Found, dict[str, dict[Structure, float]]]:
    """Returns the factors that are nearest to the weights themselves."""
    values, factors, errors, by_form, curves = [], {}, {}, {}, {}
    for target in targets:
        product = product_of(target)
        matrix = product.matrix(array_of(target.variable).astype("float32")).astype("float64")[0]
        layout, looked_at = forms[target.name]
        of_forms, energy = WindowForms(np.ones(len(matrix)), matrix, layout), float(np.square(matrix).sum())
        if not ranks.get(target.name):
            curves[target.name] = relative(of_forms.errors(looked_at), energy)
            continue
        tried = [of_forms.factors(one) for one in ranks[target.name]]
        lost = [float(np.square(matrix - one.matrix).sum()) / (energy or 1.0) for one in tried]
        by_form[target.name] = {one.form: error for one, error in zip(tried, lost, strict=True)}
        errors[target.name] = min(lost)
        found = factors[target.name] = tried[int(np.argmin(lost))]
        values.append((target.variable, product.kernel(found.matrix[None].astype("float32"))))
    return Found(values, factors, errors, by_form), curves
