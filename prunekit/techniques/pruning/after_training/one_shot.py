"""Prunes a trained model at once, without training: plans the masks, then solves layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from prunekit.anatomy.layers.model_weights import check_built
from prunekit.anatomy.records.reports import Choice, LayerError
from prunekit.core.data.calibration import CheckedData, batches_of
from prunekit.core.data.synthetic_inputs import SYNTHETIC, stand_in
from prunekit.core.layerwise.layerwise import LayerwiseRepair, Progress
from prunekit.core.layerwise.trials import nearest, trial_progress
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.runtime.kept_grids import check_off_grids, on_grids
from prunekit.core.runtime.variable_values import replaced
from prunekit.core.statistics.layer_products import unfitted
from prunekit.sparsity.allocation import get_allocation
from prunekit.sparsity.arguments import MEMORY, number_of_bytes
from prunekit.sparsity.array_ops import array_of
from prunekit.sparsity.automatic import AutomaticCriterion
from prunekit.sparsity.schedules import Schedule
from prunekit.sparsity.scores import Criterion, get_criterion
from prunekit.sparsity.shorthands import sources_of
from prunekit.techniques.pruning.after_training.layer_solver import REPAIRS, LayerSolver
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import MaskRequest, MaskUpdate
from prunekit.techniques.pruning.policies.choices import GIVEN, chosen_options, tried_allocations
from prunekit.techniques.pruning.policies.gradual import Gradual
from prunekit.techniques.pruning.policies.sparsegpt import HessianCriterion
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruner_run import PrunerRun


class OneShotPruning:
    """A pruning without training: the constructor refuses what is known to fail before data are read; `run` prunes.

    Args:
        model: As for `prune`.
        schedule: The sparsity.
        settings: Pruning options.
        data: As for `prune`.
        repair: As for `prune`.
        memory: As for `prune`.
        progress: As for `prune`.

    Attributes:
        pruner: The pruner, finished after `run`.
        notes: What was not done as a reader would expect, with reasons.

    Raises:
        ValueError, TypeError: As for `prune`.
    """

    def __init__(  # noqa: PLR0913
        self,
        model: Any,
        schedule: Schedule,
        settings: PruningOptions,
        data: Any,
        *,
        repair: str | None = None,
        memory: float | str = MEMORY,
        progress: Progress | None = None,
    ):
        if repair not in (None, *REPAIRS):
            raise ValueError(f"`repair` is one of {', '.join(REPAIRS)}. Received: {repair!r}.")
        self._model, self._schedule, self._settings = model, schedule, settings
        self._repair, self._memory, self._progress = repair, number_of_bytes("memory", memory), progress
        check_built(model)
        self._stand_in = None
        if data is None and may_stand_in(model, settings, repair):
            self._stand_in = stand_in(model)
            if repair is not None and self._stand_in.inputs is None:
                raise ValueError(
                    f"A repair reads data. Received: repair={repair!r} without data. Pass `data` as well. "
                    f"{self._stand_in.note}"
                )
        self._prepare(data)

    def _prepare(self, data: Any) -> None:
        """Makes the pruner, for given data or for the synthetic inputs."""
        model, repair, stood_in = self._model, self._repair, self._stand_in
        self.notes = [] if stood_in is None else [stood_in.note]
        source = None if data is None else GIVEN
        if stood_in is not None and stood_in.inputs is not None:
            data, source = stood_in.inputs, SYNTHETIC
        # What the user asked for is refused where it cannot be had; what was chosen is replaced by the next best.
        asked = repair is not None or "data" in sources_of(self._settings.needs)
        settings = chosen_options(self._settings, model, training=False, data=None if repair == "none" else source)
        if stood_in is not None:
            settings = replace(settings, choices=(*settings.choices, *stood_in.choices(repair)))
        criterion, sources = get_criterion(settings.criterion), sources_of(settings.needs)
        if "training" in sources:
            raise ValueError(
                f"The criterion {criterion} needs a training, and pk.prune does not train. Train with PruningCallback "
                "or Pruner, or choose another criterion."
            )
        self._layerwise = None
        if data is not None and not isinstance(data, CheckedData):
            data = CheckedData(model, data)
        if data is not None and _repairs(settings, criterion, repair):
            _check_rounds(criterion)
            if repair != "none":
                check_off_grids(
                    model, "A repair", 'Prune first, then quantize; or pass repair="none", which keeps grids.'
                )
            left = frozenset() if asked else self._left(model, settings)
            tried = tried_allocations(self._settings, model, settings)
            self._layerwise = Layerwise(
                model, data, criterion, repair or "weights", self._progress, left, self._memory, tried
            )
            settings = replace(settings, policy=self._layerwise, criterion=_planning(criterion, settings))
        elif data is not None and "data" not in sources:
            unread = f"the policy {settings.policy}" if type(settings.policy) is not Gradual else f"{criterion}"
            self.notes.append(f"The data were not read for pruning: {unread} needs none, and is not repaired.")
        run = PrunerRun(model, self._schedule, settings, training=False, data=data, progress=self._progress)
        self.pruner = Pruner.following(run)

    def _left(self, model: Any, settings: PruningOptions) -> frozenset[str]:
        """Returns the names of the targets that cannot be fitted, and are pruned without repair."""
        targets, _ = settings.policy.select(model, settings)  # type: ignore[union-attr]
        found = unfitted(targets)
        self.notes += [f"{name} is pruned by magnitude, without repair: {reason}." for name, reason in found.items()]
        return frozenset(found)

    def run(self) -> tuple[LayerError, ...]:
        """Prunes; returns the errors of the layers."""
        if self._stand_in is None:
            return self._run()
        try:
            with self._stand_in.renormalization(self._model):
                return self._run()
        except ValueError as error:
            if self._stand_in.inputs is None or self._repair is not None:
                raise
            # Nobody asked for synthetic inputs: what cannot be fitted to them is pruned as the weights alone say.
            self._stand_in = self._stand_in.failed(error)
            self._prepare(None)
            return self._run()

    def _run(self) -> tuple[LayerError, ...]:
        self.pruner.run.begin()
        if self._layerwise is not None:
            self._layerwise.assign_others()
            self.pruner.run.take(self._layerwise.choices)
        self.pruner.finish()
        return () if self._layerwise is None else tuple(self._layerwise.errors)


def may_stand_in(model: Any, settings: PruningOptions, repair: str | None) -> bool:
    """Returns True if synthetic inputs are read where no data were given.

    A criterion that is named prunes by the weights alone, as papers describe it, unless a repair is asked for.
    """
    if type(settings.policy) is not Gradual or repair == "none":
        return False
    if repair is not None:
        return True
    return get_criterion(settings.criterion) == AutomaticCriterion() and not on_grids(model)


def _repairs(settings: PruningOptions, criterion: Criterion, repair: str | None) -> bool:
    """Returns True if the weights are pruned layer by layer on data."""
    untrained = criterion.before_training and repair in (None, "none")
    return type(settings.policy) is Gradual and not untrained


def _check_rounds(criterion: Criterion) -> None:
    if criterion.rounds > 1:
        raise ValueError(
            f"A repair needs a criterion that selects once. Received: criterion={criterion}, which selects in "
            f'{criterion.rounds} rounds. Pass repair="none".'
        )


def _planning(criterion: Criterion, settings: PruningOptions) -> Criterion:
    """Returns the criterion that determines how many weights each layer keeps."""
    allocation = get_allocation(settings.allocation)
    known = not (allocation.joint or allocation.needs_scores)
    # These criteria select later, on the inputs of the pruned layers: the counts need no pass.
    return get_criterion("magnitude") if isinstance(criterion, HessianCriterion) and known else criterion


@dataclass(frozen=True, eq=False)
class _Solved:
    """Planned masks, and what follows from them layer by layer; no work where an importance is NaN."""

    planned: MaskUpdate
    work: LayerwiseRepair | None = None
    masks: Sequence[np.ndarray] = ()


@dataclass(frozen=True, eq=False)
class Layerwise(Gradual):
    """Prunes once, layer by layer, on calibration data; keeps the values that are no pruned weights for `repair`.

    Args:
        model: The model.
        data: Calibration data.
        criterion: Determines masks and new weights.
        repair: As for `prune`.
        progress: Told of each pruned weight.
        left: Names of the targets whose masks follow from the importances alone, without repair.
        memory: Largest number of bytes of activations that are kept.
        allocations: Names of those of which the one with the nearest outputs is taken; () = that of the calculator.
    """

    model: Any
    data: Any
    criterion: Criterion
    repair: str = "weights"
    progress: Progress | None = None
    left: frozenset[str] = frozenset()
    memory: float = MEMORY
    allocations: tuple[str, ...] = ()
    choices: list[Choice] = field(default_factory=list)
    errors: list[Any] = field(default_factory=list)
    _repairs: list[tuple[Any, Any]] = field(default_factory=list)

    def update(self, request: MaskRequest) -> MaskUpdate:
        """Returns masks and new weights."""
        if not self.allocations:
            return self._taken(request, self._solved(request, self.progress))
        baseline = Baseline(self.model, self.data, with_metrics=False)
        tried: list[tuple[float, tuple[str, _Solved]]] = []
        for number, allocation in enumerate(self.allocations):
            request.calculator.allocation = get_allocation(allocation)
            solved = self._solved(request, trial_progress(self.progress, number, len(self.allocations)))
            if solved.work is None:
                return solved.planned
            with replaced(solved.work.values):
                tried.append((baseline.error(), (allocation, solved)))
        (best, solved), reason = nearest(tried)
        request.calculator.allocation = get_allocation(best)
        self.choices.append(Choice("allocation", best, reason))
        return self._taken(request, solved)

    def _solved(self, request: MaskRequest, progress: Progress | None) -> _Solved:
        """Finds masks and new weights by the calculator's allocation."""
        # Weights are found layer by layer, on the inputs of the pruned model; here only masks are planned.
        planned = request.calculator.choose(request.sparsity, request.masks, request.statistics)
        if planned.nans.any():
            return _Solved(planned)
        masks = [array_of(mask) for mask in planned.masks]
        served = [i for i, target in enumerate(request.targets) if target.name not in self.left]
        targets = [request.targets[i] for i in served]
        solver = LayerSolver(
            self.criterion,
            [request.calculator.array_maker(i) for i in served],
            request.calculator.pattern,
            [masks[i] for i in served],
            [array_of(request.masks[i]) for i in served],
            self.repair,
        )
        rows = zip(request.targets, masks, strict=True)
        values = [
            (target.variable, np.where(mask, array_of(target.variable), 0))
            for target, mask in rows
            if target.name in self.left
        ]
        work = LayerwiseRepair(self.model, targets, solver, progress, values, memory=self.memory)
        work.run([inputs for inputs, _ in batches_of(self.data)])
        return _Solved(planned, work, masks)

    def _taken(self, request: MaskRequest, solved: _Solved) -> MaskUpdate:
        """Returns the masks and the new weights, and keeps the other values and the errors."""
        planned, work = solved.planned, solved.work
        if work is None:
            return planned
        new = {id(variable): value for variable, value in work.values}
        weights = [new.pop(id(target.variable), None) for target in request.targets]
        self._repairs.extend(pair for pair in work.values if id(pair[0]) in new)
        self.errors.extend(work.errors.values())
        rows = zip(request.targets, solved.masks, strict=True)
        found = [work.masks.get(target.name, mask) for target, mask in rows]
        return replace(planned, masks=found, weights=weights, kept=_counts(found))

    def assign_others(self) -> None:
        """Assigns the corrected biases and moving statistics."""
        for variable, value in self._repairs:
            variable.assign(value)


def _counts(masks: Sequence[np.ndarray]) -> np.ndarray:
    return np.array([np.count_nonzero(mask) for mask in masks])
