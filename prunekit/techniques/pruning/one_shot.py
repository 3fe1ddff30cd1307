"""prune: prunes a trained model at once, without training."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

from prunekit.anatomy.inspection import Report, inspect
from prunekit.anatomy.reports import LayerError
from prunekit.core.calibration import CheckedData, batches_of
from prunekit.core.kept_grids import check_off_grids
from prunekit.core.layerwise import LayerwiseRepair, Progress
from prunekit.sparsity.allocation import get_allocation
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.gradual import Gradual
from prunekit.techniques.pruning.layer_solver import REPAIRS, LayerSolver
from prunekit.techniques.pruning.options import Options, PruningOptions, as_options
from prunekit.techniques.pruning.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.pruner import Pruner
from prunekit.techniques.pruning.pruning_notes import LATER_TRAINING


def prune(
    model,
    sparsity: float,
    data: Any = None,
    *,
    repair: str | None = None,
    progress: Progress | None = None,
    **options: Unpack[Options],
) -> Report:
    """Prunes a trained model once, in place, without training; returns a `Report`.

    With calibration data, layers are pruned in the order in which the model calls them, and each is repaired so that it
    gives its former outputs from what the pruned layers before it produce. The report then has the error of each
    layer's outputs. The model changes only at the end: an interruption leaves it as it was.

    Training afterwards lets the zeros grow back, unless it has `pk.KeepZeros`.

    Args:
        model: A built Keras model.
        sparsity: Fraction of the targets' entries to remove, in [0, 1).
        data: Calibration data: inputs, a pair (inputs, labels), or a dataset or list of such batches; some hundred
            examples of the training data. None, for a criterion that reads weights only, prunes without repair.
        repair: What makes up for pruned weights, where there are data. "weights": the kept weights of each layer are
            fitted to its former outputs (least squares). "outputs": each output's scale and bias are. "none": nothing.
            "weights" and "outputs" also correct biases by the mean error and update the moving statistics of batch
            normalizations. None = "weights", or "none" for criteria of untrained models (SNIP, GraSP, SynFlow).
        progress: Called as progress(done, total, name) after each weight that was pruned with calibration data.
        **options: `criterion`, `pattern`, `allocation`, `include`, `exclude`, `keep_zeros`, `keep_one`, `origin`,
            `overrides`, `policy`, `compat`, `misfits`: see `prunekit.techniques.pruning.options.PruningOptions`.

    Raises:
        ValueError: As for `Pruner`; the criterion needs data and there are none, or needs a training ("movement").
        TypeError: An option is unknown.
    """
    settings = as_options(options)
    sources = sources_of(settings.needs)
    if "training" in sources:
        raise ValueError(
            f"The criterion {get_criterion(settings.criterion)} needs a training, and pk.prune does not train. Train "
            "with PruningCallback or Pruner, or choose another criterion."
        )
    before = inspect(model)
    pruning = OneShotPruning(model, OneShot(sparsity=sparsity), settings, data, repair=repair, progress=progress)
    pruner, errors = pruning.pruner, pruning.run()
    notes = [LATER_TRAINING] if pruner.sparsity else []
    return replace(pruner.report(before=before, notes=notes, only_pruned=not errors), layer_errors=errors)


class OneShotPruning:
    """A pruning without training: the constructor refuses what is known to fail before data are read; `run` prunes.

    Args:
        model: As for `prune`.
        schedule: The sparsity.
        settings: Pruning options.
        data: As for `prune`.
        repair: As for `prune`.
        progress: As for `prune`.

    Attributes:
        pruner: The pruner, finished after `run`.

    Raises:
        ValueError, TypeError: As for `prune`.
    """

    def __init__(
        self,
        model: Any,
        schedule: Schedule,
        settings: PruningOptions,
        data: Any,
        *,
        repair: str | None = None,
        progress: Progress | None = None,
    ):
        if repair not in (None, *REPAIRS):
            raise ValueError(f"`repair` is one of {', '.join(REPAIRS)}. Received: {repair!r}.")
        criterion = get_criterion(settings.criterion)
        repair = repair or ("none" if criterion.before_training else "weights")
        repairs = type(settings.policy) is Gradual and not (repair == "none" and criterion.before_training)
        self._layerwise = None
        data = None if data is None else CheckedData(model, data)
        if data is not None and repairs:
            _check_rounds(criterion)
            if repair != "none":
                check_off_grids(
                    model, "A repair", 'Prune first, then quantize; or pass repair="none", which keeps grids.'
                )
            self._layerwise = Layerwise(model, data, criterion, repair, progress)
            settings = replace(settings, policy=self._layerwise, criterion=_planning(criterion, settings))
        elif data is not None and "data" not in sources_of(settings.needs):
            raise ValueError(
                f'Calibration data are read by a criterion, or repair what the policy "gradual" prunes. Received: '
                f"data, with policy={settings.policy}, criterion={criterion} and repair={repair!r}. Leave `data` out."
            )
        self.pruner = Pruner.detached(model, schedule, settings, training=False, data=data)

    def run(self) -> tuple[LayerError, ...]:
        """Prunes; returns the errors of the layers."""
        self.pruner.begin()
        if self._layerwise is not None:
            self._layerwise.assign_others()
        self.pruner.finish()
        return () if self._layerwise is None else tuple(self._layerwise.errors)


def _check_rounds(criterion: Criterion) -> None:
    if criterion.rounds > 1:
        raise ValueError(
            f"A repair follows one selection of weights. Received: criterion={criterion}, which selects in "
            f'{criterion.rounds} rounds. Pass repair="none".'
        )


def _planning(criterion: Criterion, settings: PruningOptions) -> Criterion:
    """Returns the criterion that determines how many weights each layer keeps."""
    allocation = get_allocation(settings.allocation)
    known = not (allocation.joint or allocation.needs_scores)
    # A criterion that reconstructs selects later, on the inputs of the pruned layers: the counts need no pass.
    return get_criterion("magnitude") if criterion.reconstructs and known else criterion


@dataclass(frozen=True, eq=False)
class Layerwise(Gradual):
    """Prunes once, layer by layer, on calibration data; keeps the values that are no pruned weights for `repair`.

    Args:
        model: The model.
        data: Calibration data.
        criterion: Determines masks and new weights.
        progress: Told of each pruned weight.
    """

    model: Any
    data: Any
    criterion: Criterion
    repair: str = "weights"
    progress: Progress | None = None
    errors: list[Any] = field(default_factory=list)
    _repairs: list[tuple[Any, Any]] = field(default_factory=list)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks and new weights."""
        planned = super().update(request)
        if planned.nans.any():
            return planned
        masks = [array_of(mask) for mask in planned.masks]
        zeros = [array_of(mask) for mask in request.masks]
        calculator = request.calculator
        solver = LayerSolver(self.criterion, calculator, masks, zeros, self.repair)
        work = LayerwiseRepair(self.model, request.targets, solver, self.progress)
        work.run([inputs for inputs, _ in batches_of(self.data)])
        values = {id(variable): value for variable, value in work.values}
        weights = [values.pop(id(target.variable), None) for target in request.targets]
        self._repairs.extend(pair for pair in work.values if id(pair[0]) in values)
        self.errors.extend(work.errors.values())
        found = [work.masks[target.name] for target in request.targets]
        return replace(planned, masks=found, weights=weights, kept=_counts(found))

    def assign_others(self) -> None:
        """Assigns the corrected biases and moving statistics."""
        for variable, value in self._repairs:
            variable.assign(value)


def _counts(masks: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.count_nonzero(mask) for mask in masks])
