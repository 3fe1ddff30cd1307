"""The handler of the step kind prune."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

from prunekit.anatomy.records.reports import Choice, choices_sections, layer_error_section
from prunekit.core.data.synthetic_inputs import SYNTHETIC, stand_in
from prunekit.core.layerwise.layerwise import Progress
from prunekit.core.statistics.statistics import READ, check_statistics
from prunekit.recipe.datasets.data import drawn_examples
from prunekit.recipe.settings.fields import EXAMPLES, make, name_of
from prunekit.recipe.settings.step_settings import Prune
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.distillation import distillation, prepared_teacher
from prunekit.recipe.steps.planned_counts import counts_note, planned_targets
from prunekit.recipe.steps.step_handler import (
    PlannedStep,
    PlannedTarget,
    PreparedStep,
    StepHandler,
    StepResult,
    require_backend,
)
from prunekit.recipe.text.loader import RecipeError
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, POLICIES, STATISTICS, sources_of
from prunekit.techniques.pruning.after_training.one_shot import OneShotPruning, may_stand_in
from prunekit.techniques.pruning.masks.options import PruningKeywords, PruningOptions
from prunekit.techniques.pruning.policies.choices import GIVEN, chosen_options, tried_allocations
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruning_notes import abrupt
from prunekit.techniques.pruning.training.targeting import ResolvedTargets, resolved_targets

# Synthetic inputs that tell whether a model takes any.
_FEW = 4


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedPruning(PreparedStep):
    """A prune step, resolved for one model and one set of data.

    Attributes:
        schedule: Sparsity schedule in optimizer updates since the start of the step.
        given: Pruning options as the recipe has them.
        options: The same with a criterion and an allocation in the place of "auto".
        tried: The allocations that the run tries, beginning with that of `options`; () if it tries none.
        found: What the step prunes.
        run: Model and data of the run.
        teacher: The teacher in the file that the step names, or None.
    """

    schedule: Schedule
    given: PruningOptions
    options: PruningOptions
    tried: tuple[str, ...]
    found: ResolvedTargets
    run: RunInputs
    teacher: Any = None


class PruneStep(StepHandler[PreparedPruning]):
    """Prunes gradually during training, or at once without training."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedPruning:
        """Returns the step with its targets.

        Raises:
            ValueError, TypeError: The schedule does not fit the step, the criterion does not exist on this backend, or
                the model has no such weights to prune, or a statistic does not exist for one of them.
        """
        for name in settings.needs:
            require_backend(STATISTICS[name].backends, f"the criterion {name_of(settings.criterion)}")
        schedule = _schedule(settings, run.steps_per_epoch)
        first = schedule.latest_update(0)
        if "training" in sources_of(settings.needs) and first is not None and schedule(first) > 0:
            raise ValueError(
                f"{name_of(settings.criterion)} measures how updates change the weights, but the schedule needs "
                f"sparsity {schedule(first):g} before the first one. Let it begin later, or at sparsity 0."
            )
        training, given = not settings.one_shot, PruningOptions(**_options(settings, run.recipe.seed))
        source = _source(settings, given, run)
        options = chosen_options(given, run.model, training=training, data=source)
        found = resolved_targets(run.model, schedule, options, training=training)
        check_statistics(settings.needs, run.model, found.targets)
        tried = () if training or source is None else tried_allocations(given, run.model, options)
        return PreparedPruning(
            settings,
            schedule=schedule,
            given=given,
            options=options,
            tried=tried,
            found=found,
            run=run,
            teacher=prepared_teacher(settings.distill, run),
        )

    def planned(self, prepared: PreparedPruning, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan with all mask updates and targets."""
        schedule = prepared.found.schedule
        return dataclasses.replace(
            step,
            pruning=tuple((at, schedule(at)) for at in schedule.update_steps(step.updates or 0)),
            targets=_planned_targets(prepared),
            skipped=prepared.found.skipped,
        )

    def plan_notes(self, prepared: PreparedPruning) -> Sequence[str]:
        """Returns notes on a schedule that is not gradual, and on counts that follow from the weights' values."""
        note = counts_note(
            prepared.found, prepared.found.options, _allocation_name(prepared), has_data=prepared.run.data is not None
        )
        either, why = (
            " or ".join(prepared.tried),
            "whichever leaves the outputs nearest; the counts above are of the first",
        )
        chosen = [
            Choice("allocation", either, why) if either and choice.option == "allocation" else choice
            for choice in prepared.options.choices
        ]
        return (*abrupt(prepared.schedule), *(f"prune: {choice}" for choice in chosen), *([note] if note else []))

    def run(self, prepared: PreparedPruning, workspace: Workspace) -> StepResult:
        """Prunes the workspace's model, and hands the masks over to the workspace."""
        workspace.remember_before()
        state = workspace.state
        start = state.updates - (state.pruning_since or 0)
        # This step's masks replace the masks of original zeros in its targets.
        targets = {target.name for target in prepared.found.targets}
        state.masks.release_original(targets)
        # A policy that regrows weights starts from the zeros of earlier steps, and may let them go.
        own = targets if prepared.found.policy.regrows else set()
        with workspace.holding_masks(except_for=own), workspace.noting():
            pruner, result = _pruned(prepared, workspace)
        state.events += [dataclasses.replace(event, step=event.step + start) for event in pruner.events]
        if own:
            state.masks.replace_pruned(pruner.masks)
        else:
            state.masks.add_pruned(pruner.masks)
        state.targets += [name for name in pruner.masks if name not in state.targets]
        state.skipped |= {item.name: item for item in pruner.run.skipped}
        return result


def _pruned(prepared: PreparedPruning, workspace: Workspace) -> tuple[Pruner, StepResult]:
    """Prunes, and returns the pruner and the result of the step."""
    settings, schedule = prepared.settings, prepared.schedule
    reads = settings.reads_data or settings.is_repairable
    data = calibration_data(workspace.run, settings.examples) if reads else None
    if settings.one_shot:
        pruning = OneShotPruning(
            workspace.model,
            schedule,
            prepared.given,
            data,
            repair=settings.repair,
            memory=settings.memory,
            progress=_progress(workspace),
        )
        errors = pruning.run()
        for note in pruning.notes:
            workspace.note(f"prune: {note}")
        chosen = choices_sections(pruning.pruner.run.options.choices)
        return pruning.pruner, StepResult(sections=[*chosen, *([layer_error_section(errors)] if errors else [])])
    callback = PruningCallback(schedule, data=data, **prepared.options.arguments)
    taught = distillation(settings.distill, prepared.teacher, workspace)
    history = workspace.fit(settings.epochs, settings.learning_rate, callback, *taught)
    sections = [
        *choices_sections(prepared.options.choices),
        *(part for one in taught for part in one.report.sections()),
    ]
    return callback.pruner, StepResult(history=history, sections=sections)


def _progress(workspace: Workspace) -> Progress:
    """Returns the progress of a pruning without training: to half of the step while examples are read, if they are."""
    reading, whole = workspace.step_progress("{}", end=0.5), workspace.step_progress("{}")
    rest, were_read = workspace.step_progress("{}", start=0.5), False

    def tell(done: int, total: int, name: str) -> None:
        nonlocal were_read
        is_reading = name == READ
        were_read = were_read or is_reading
        (reading if is_reading else rest if were_read else whole)(done, total, name)

    return tell


def _source(settings: Prune, options: PruningOptions, run: RunInputs) -> str | None:
    """Returns which calibration data the step repairs with; None without a repair."""
    if not settings.is_repairable:
        return None
    if run.data is not None:
        return GIVEN
    stands_in = may_stand_in(run.model, options, settings.repair) and stand_in(run.model, _FEW).inputs is not None
    return SYNTHETIC if stands_in else None


def _allocation_name(prepared: PreparedPruning) -> str:
    chosen = {choice.option: choice.value for choice in prepared.options.choices}
    return chosen.get("allocation", name_of(prepared.settings.allocation))


def calibration_data(run: RunInputs, examples: int | None) -> Any:
    """Returns training examples drawn by the recipe's seed; None if the recipe has no data.

    Args:
        run: Data and seed of the run.
        examples: How many; None means `EXAMPLES`.
    """
    given = run.data
    if given is None:
        return None
    return drawn_examples(given.train, examples or EXAMPLES, run.recipe.seed)


def _schedule(prune: Prune, steps_per_epoch: int | None) -> Schedule:
    if prune.schedule is None or prune.epochs is None or steps_per_epoch is None:
        return OneShot(sparsity=prune.final_sparsity)
    # No offset: callback and recipe both count updates from the start of the step's `fit`.
    steps = prune.epochs * steps_per_epoch
    schedule = prune.schedule.resolve(steps_per_epoch).fitted(steps)
    if schedule.final_step > steps:
        raise ValueError(
            f"the schedule reaches {schedule.final_sparsity:g} at step {schedule.final_step:,}, and the step "
            f"trains for {prune.epochs} epochs of {steps_per_epoch:,} updates, {steps:,} in all. Train longer, or "
            "let the schedule end earlier."
        )
    return schedule


def _options(prune: Prune, seed: int) -> PruningKeywords:
    named = {item.name for item in dataclasses.fields(PruningOptions)} & set(Prune.model_fields)
    made = {
        "criterion": make(CRITERIA, prune.criterion, seed),
        "allocation": make(ALLOCATIONS, prune.allocation, seed),
        "policy": make(POLICIES, prune.policy, seed),
        "bounds": {pattern: bounds.model_dump(exclude_none=True) for pattern, bounds in prune.bounds.items()},
    }
    return cast(PruningKeywords, {name: getattr(prune, name) for name in named} | made)


def _planned_targets(prepared: PreparedPruning) -> tuple[PlannedTarget, ...]:
    found = prepared.found
    reads_data = "data" in sources_of(found.options.needs) and not found.calculator.shares_known
    data = calibration_data(prepared.run, prepared.settings.examples) if reads_data else None
    try:
        return planned_targets(found, found.options, data)
    except ValueError as error:
        raise RecipeError(f"prune: {error}") from error
