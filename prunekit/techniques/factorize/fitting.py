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
from prunekit.techniques.factorize.layer_factors import Factorizer
from prunekit.techniques.factorize.low_rank import directions_of
from prunekit.techniques.factorize.options import FactorizeOptions
from prunekit.techniques.factorize.ranks import Ranks

# In the place of data: weights alone, without synthetic inputs.
NO_INPUTS = object()


@dataclass(frozen=True, eq=False)
class Found:
    """The factors of a model.

    Attributes:
        values: New values, as (variable, tensor), with which the model computes as with the factors.
        factors: Name of a weight -> its factors.
        errors: Name of a weight -> the error of its layer.
    """

    values: Sequence[tuple[Any, Any]]
    factors: Mapping[str, tuple[np.ndarray, np.ndarray]]
    errors: Mapping[str, float]


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
        self._standing_in: StandIn | None = stand_in(model) if data is None else None
        self.data = data if self._standing_in is None else self._standing_in.inputs
        if data is NO_INPUTS:
            self.data = None
        self.note = "" if self._standing_in is None else self._standing_in.note

    def errors(self) -> dict[str, np.ndarray]:
        """Returns the squared error of each layer's outputs with rank 1, 2, ..., relative to the outputs."""
        return self._fitted(self._targets, {})[1]

    def factors(self, ranks: Ranks) -> Found:
        """Returns the factors, each layer fitted from what the factorized layers before it compute."""
        return self._fitted([one for one in self._targets if ranks.get(one.name) is not None], ranks)[0]

    def _fitted(self, targets: Sequence[Target], ranks: Ranks) -> tuple[Found, dict[str, np.ndarray]]:
        if self.data is None:
            return _without_inputs(targets, ranks)
        solver = Factorizer(targets, ranks, corrects_biases=self._options.correct_biases)
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
            return _without_inputs(targets, ranks)

    def _on_data(self, targets: Sequence[Target], solver: Factorizer) -> tuple[Found, dict[str, np.ndarray]]:
        work = LayerwiseRepair(self._model, targets, solver, self._progress, memory=self._memory)
        work.run([inputs for inputs, _ in batches_of(self.data)])
        errors = {name: one.error for name, one in work.errors.items()}
        return Found(work.values, solver.factors, errors), solver.errors


def _without_inputs(targets: Sequence[Target], ranks: Ranks) -> tuple[Found, dict[str, np.ndarray]]:
    """Returns truncated singular value decompositions."""
    values, factors, errors, curves = [], {}, {}, {}
    for target in targets:
        product = product_of(target)
        matrix = product.matrix(array_of(target.variable).astype("float32")).astype("float64")[0]
        directions = directions_of(np.ones(len(matrix)), matrix)
        energy = float(np.square(matrix).sum())
        curves[target.name] = directions.dropped()[1:] / (energy or 1.0)
        rank = ranks.get(target.name)
        if rank is not None:
            first, second = factors[target.name] = directions.factors(matrix, rank)
            values.append((target.variable, product.kernel((first @ second)[None].astype("float32"))))
            errors[target.name] = float(curves[target.name][rank - 1])
    return Found(values, factors, errors), curves
