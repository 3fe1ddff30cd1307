"""Repairs what the removal of channels changes: weights, biases and moving statistics, from data without labels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.anatomy.channels.channel_links import WeightAxes
from prunekit.anatomy.channels.channels import Channels
from prunekit.anatomy.channels.weight_entries import masked, zeroed
from prunekit.anatomy.layers.targets import Target, find_targets
from prunekit.anatomy.records.reports import Choice
from prunekit.core.data.calibration import CheckedData, batches_of
from prunekit.core.data.synthetic_inputs import stand_in
from prunekit.core.layerwise.layer_fit import LayerFit, Solution
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.runtime.kept_grids import check_off_grids, on_grids
from prunekit.core.statistics.layer_inputs import LayerMoments
from prunekit.core.statistics.layer_products import LayerProduct, product_of
from prunekit.sparsity.arguments import MEMORY
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian, refit
from prunekit.techniques.shrink.channels.options import ShrinkOptions
from prunekit.techniques.shrink.graph.kept_statistics import kept_statistics


@dataclass(frozen=True)
class RepairError:
    """The error of a layer's outputs on the calibration data, squared and relative to the squared outputs.

    Attributes:
        weight: Name of the weight.
        before: With the kept weights as they were, and no corrected bias.
        after: With the repaired weights and bias.
    """

    weight: str
    before: float
    after: float


class Repair:
    """What repairs a model after a removal: calibration data, or synthetic inputs where none were given.

    Args:
        model: The model.
        options: Which repair; see `ShrinkOptions`.
        data: Calibration data, or None.
        stands_in: Whether synthetic inputs may stand in for data.

    Attributes:
        kind: "weights", "outputs", or "none".
        data: What is read: checked calibration data, or None.

    Raises:
        ValueError: A repair is asked for, and there are no data; the weights lie on integer grids; the data do not fit.
    """

    def __init__(self, model: Any, options: ShrinkOptions, data: Any, *, stands_in: bool):
        self._asked, self._stand_in = options.repair, None
        wanted = (self._asked or "none") if data is None else options.repair_with(data)
        if wanted != "none":
            check_off_grids(model, "A repair", 'Shrink first, then quantize; or pass repair="none" and quantize again.')
        if data is None and stands_in and options.may_stand_in and not on_grids(model):
            self._stand_in = stand_in(model)
            data = self._stand_in.inputs
        self.kind = options.repair_with(data)
        self.data = None if data is None else CheckedData(model, data)
        if self.data is not None:
            # Data that do not fit are refused before anything is removed.
            next(iter(self.data))

    @property
    def is_synthetic(self) -> bool:
        """True if synthetic inputs stand in for data."""
        return self._stand_in is not None and self._stand_in.inputs is not None

    @property
    def notes(self) -> list[str]:
        """What a report says of the repair."""
        return [] if self._stand_in is None else [self._stand_in.note]

    @property
    def choices(self) -> tuple[Choice, ...]:
        """The repair that nobody asked for."""
        return () if self._stand_in is None else self._stand_in.choices(self._asked)

    def leave_out(self) -> None:
        """Repairs nothing where nobody asked for it: for a removal of zeros, which is exact without a fit."""
        if self._stand_in is not None and self._asked is None:
            self._stand_in, self.kind, self.data = None, "none", None

    def run(
        self, channels: Channels, removed: np.ndarray, progress: Progress | None, memory: float
    ) -> tuple[dict[int, np.ndarray], list[RepairError]]:
        """Returns new values and errors, as `repaired`; none where nothing is repaired."""
        if self.kind == "none" or not removed.size:
            return {}, []
        if self._stand_in is None:
            return repaired(channels, removed, self.data, self.kind, progress, memory)
        try:
            with self._stand_in.renormalization(channels.model) as statistics:
                values, errors = repaired(channels, removed, self.data, self.kind, progress, memory)
                return {key: statistics.on_data(key, value) for key, value in values.items()}, errors
        except ValueError as error:
            if self._asked is not None:
                raise
            # Nobody asked for synthetic inputs: what cannot be fitted to them is not repaired.
            self._stand_in, self.kind = self._stand_in.failed(error), "none"
            return {}, []


def repaired(
    channels: Channels,
    removed: np.ndarray,
    data: Any,
    repair: str,
    progress: Callable[[int, int, str], None] | None = None,
    memory: float = MEMORY,
) -> tuple[dict[int, np.ndarray], list[RepairError]]:
    """Returns {id of a variable: repaired values, of the former shape}, and the errors of the layers.

    Each layer is fitted to the outputs that it had, from the inputs that it receives when the layers before it are
    repaired: its kept weights by least squares ("weights"), or a scale and a bias for each output ("outputs"). Weights
    that are exactly zero stay zero.

    Args:
        channels: The channels of the model.
        removed: The removed channels.
        data: Calibration data, as `batches_of` takes them; labels are not read.
        repair: "outputs", "weights", or "none".
        progress: Told of each layer: (done, total, name).
        memory: Largest number of bytes of activations that are kept between layers.

    Raises:
        ValueError: The inputs of a layer are not finite; the model does not call a layer on these data.

    Source: He et al. 2017, "Channel pruning for accelerating very deep neural networks", arXiv:1707.06168, eq. 3 (least
        squares on the kept channels).
    """
    kept = channels.kept_numbers(removed)
    weights = channels.links.weights
    targets = [target for target in find_targets(channels.model)[0] if _is_fitted(target, channels)]
    solver = _Solver(targets, weights, kept, repair)
    fitted = {id(target.variable) for target in targets}
    others = [pair for pair in zeroed(channels, kept) if id(pair[0]) not in fitted]
    work = LayerwiseRepair(channels.model, targets, solver, progress, others, memory)
    with kept_statistics(channels, kept):
        work.run([inputs for inputs, _ in batches_of(data)])
    values = {id(variable): array_of(value) for variable, value in work.values}
    after = {name: error.error for name, error in work.errors.items()}
    return values, [RepairError(name, solver.before[name], error) for name, error in after.items()]


def _is_fitted(target: Target, channels: Channels) -> bool:
    """Returns True for a weight whose layer is a matrix product of its inputs."""
    if id(target.variable) not in channels.links.weights or not target.in_axes:
        return False
    try:
        return not product_of(target).diagonal
    except ValueError:
        return False


class _Solver:
    """Fits the entries of the kept channels; see `repaired`.

    Attributes:
        before: Name of a weight -> error before the repair.
    """

    def __init__(self, targets: Sequence[Target], weights: dict[int, WeightAxes], kept: np.ndarray, repair: str):
        self._targets, self._weights, self._kept, self._repair = targets, weights, kept, repair
        self.before: dict[str, float] = {}

    @property
    def repairs(self) -> bool:
        """True unless nothing is repaired."""
        return self._repair != "none"

    def solve(self, index: int, product: LayerProduct, weight: np.ndarray, moments: LayerMoments) -> Solution:
        """Returns the new value of target `index`, zero at removed channels."""
        target = self._targets[index]
        axes = self._weights[id(target.variable)]
        mask = masked(weight != 0, axes, self._kept)
        masks = product.matrix(mask)
        matrices = np.where(masks, product.matrix(weight).astype("float64"), 0.0)
        corrects_bias = self.repairs and product.bias(moments.output_sums) is not None
        # The outputs that are removed have no error.
        outputs = product.matrix(masked(np.ones(weight.shape, bool), axes, self._kept)).any(axis=1)
        moments = moments.of_outputs(outputs)
        self.before[target.name] = LayerFit(product, moments, centred=False).error(matrices)
        fit = LayerFit(product, moments, centred=corrects_bias)
        if moments.same and (masks | (product.matrix(weight) == 0)).any(axis=2).all():
            # The inputs are what they were: the kept weights are right.
            return Solution(product.kernel(matrices), mask, None, 0.0)
        if self._repair == "weights":
            matrices = np.stack(
                [_fitted(fit, group, *row) for group, row in enumerate(zip(matrices, masks, strict=True))]
            )
        elif self._repair == "outputs":
            matrices = fit.scaled(matrices)
        shift = np.where(outputs, fit.bias_shift(matrices), 0.0) if corrects_bias else None
        return Solution(product.kernel(matrices), mask, shift, fit.error(matrices))


def _fitted(fit: LayerFit, group: int, matrix: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Returns the least-squares matrix that is zero where the mask is.

    Where all outputs have the same kept inputs, one factorization serves them all; otherwise conjugate gradients fit
    the kept weights of each. A small damping towards the present weights keeps inputs apart that depend on one another.
    """
    rows = np.flatnonzero(mask.any(axis=1))
    if not rows.size:
        return matrix
    gram = fit.gram[group][np.ix_(rows, rows)]
    damped, _ = damped_hessian(gram, DAMPING)
    added = (damped.diagonal() - gram.diagonal())[:, None]
    found = np.zeros_like(matrix)
    found[rows] = np.linalg.solve(damped, fit.cross[group][rows] + added * matrix[rows])
    outputs = mask.any(axis=0)
    if not mask[np.ix_(rows, np.flatnonzero(outputs))].all():
        found[rows] = refit(found[rows], mask[rows], damped, start=matrix[rows])
    return np.where(mask, found, 0.0)
