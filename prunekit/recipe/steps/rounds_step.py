"""The handler of the step kind rounds: iterative pruning with rewinding."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.recipe.state.checkpoint import CheckpointState
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.prune_step import PreparedPruning, PruneStep
from prunekit.recipe.steps.step_handler import PlannedStep, PreparedStep, StepHandler, StepResult
from prunekit.techniques.pruning.after_training.rounds import (
    RewindPoint,
    Round,
    RoundPruning,
    round_sparsities,
    rounds_section,
)


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedRounds(PreparedStep):
    """A rounds step, resolved for one model and one set of data.

    Attributes:
        prunings: The pruning of each round; all have the targets of the last one.
    """

    prunings: tuple[PreparedPruning, ...]


class RoundsStep(StepHandler[PreparedRounds]):
    """Trains, then prunes, rewinds and trains again in each round."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedRounds:
        """Returns the step with the targets of each round.

        Raises:
            ValueError, TypeError: As for a prune step.
        """
        last, goal = PruneStep().prepare(settings.last_pruning, run), settings.sparsity
        schedules = (RoundPruning(asked, goal=goal) for asked in round_sparsities(goal, settings.rounds))
        prunings = (dataclasses.replace(last, schedule=schedule) for schedule in schedules)
        return PreparedRounds(settings, prunings=tuple(prunings))

    def planned(self, prepared: PreparedRounds, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan: the sparsity of each round, and the targets with their final counts."""
        updates = (step.updates or 0) // (len(prepared.prunings) + 1)
        moments = ((i * updates, one.schedule(0)) for i, one in enumerate(prepared.prunings, start=1))
        last = PruneStep().planned(prepared.prunings[-1], step)
        return dataclasses.replace(last, pruning=tuple(moments))

    def plan_notes(self, prepared: PreparedRounds) -> Sequence[str]:
        """Returns the notes of a prune step."""
        return PruneStep().plan_notes(prepared.prunings[-1])

    def run(self, prepared: PreparedRounds, workspace: Workspace) -> StepResult:
        """Runs the trainings; a resumed step goes on in the round of its checkpoint."""
        settings, state, resumed = prepared.settings, workspace.state, workspace.step.resumed
        point = _rewind_point(workspace)
        each, history = settings.epochs_per_round, resumed.history
        rows = state.own.setdefault("rounds", [])
        for number in range(resumed.epoch // each, settings.rounds + 1):
            begin = number * each
            # A checkpoint at the first epoch of a round follows the pruning of this round.
            prunes = resumed.epoch < begin
            if prunes:
                PruneStep().run(prepared.prunings[number - 1], workspace)
                point.rewind(settings.rewind)
                workspace.step.resumed = CheckpointState(workspace.step.index, begin, history=history)
            with workspace.holding_masks():
                if prunes:
                    workspace.save_epoch(begin, history)
                history = workspace.fit(begin + each, settings.learning_rate, begin=begin)
            state.metrics = workspace.evaluate()
            rows.append(dataclasses.asdict(_row(number, workspace)))
        name = workspace.metrics[0].name if workspace.metrics else "Metric"
        return StepResult(history=history, sections=[rounds_section([Round(**row) for row in rows], name)])


def _rewind_point(workspace: Workspace) -> RewindPoint:
    """Returns the rewind point of a checkpoint, or the present state."""
    state, optimizer = workspace.state, workspace.optimizer
    with workspace.run.replicas.scope():
        optimizers = [] if optimizer is None else [optimizer]
        point = RewindPoint(workspace.model, optimizers, list(state.own_arrays.values()) or None)
    state.own_arrays = {str(number): array for number, array in enumerate(point.arrays)}
    return point


def _row(number: int, workspace: Workspace) -> Round:
    masks = [workspace.state.masks.pruned[name] for name in workspace.state.targets]
    pruned = sum(mask.size - int(np.count_nonzero(mask)) for mask in masks)
    size = sum(mask.size for mask in masks)
    metric = workspace.state.metrics.get(workspace.metrics[0].name) if workspace.metrics else None
    return Round(number, pruned / size if size else 0.0, pruned, metric)
