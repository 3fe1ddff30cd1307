"""The handler of the step kind shrink: removes channels, at once or in rounds with training after each removal."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.channels.channels import find_channels
from prunekit.anatomy.channels.weight_entries import cut
from prunekit.anatomy.graph.example_inputs import declared_inputs
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.records.reports import Choice
from prunekit.anatomy.records.sections import Column, Section
from prunekit.core.runtime.random_state import random_state
from prunekit.core.statistics.channel_importance import ranked_weights
from prunekit.core.statistics.statistics import check_statistics
from prunekit.delivery.litert.model_measures import check_measure
from prunekit.delivery.reports.formatting import count, names, short_count
from prunekit.operations.shrink import shrink_to
from prunekit.recipe.settings.fields import make, name_of
from prunekit.recipe.settings.shrink_settings import Shrink
from prunekit.recipe.state.checkpoint import CheckpointState
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.run_state import RunMasks
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.prune_step import calibration_data
from prunekit.recipe.steps.step_handler import PlannedStep, PreparedStep, StepHandler, StepResult, require_backend
from prunekit.sparsity.shorthands import CRITERIA, MEASURED, STATISTICS
from prunekit.techniques.shrink.channels.options import ShrinkOptions, SizeTarget
from prunekit.techniques.shrink.channels.repair import Repair
from prunekit.techniques.shrink.channels.shrink_report import MEASURED_SIZE, ShrinkReport
from prunekit.techniques.shrink.channels.shrinking import ChannelRemoval
from prunekit.techniques.shrink.channels.trials import reason_not_to_try, ways_to_select

# Most groups of channels that a note of the plan names.
_LISTED_GROUPS = 12


@dataclass(frozen=True, eq=False, kw_only=True)
class PreparedShrink(PreparedStep):
    """A shrink step, resolved for one model and one set of data.

    Attributes:
        rows: Sizes of the stand-in before and after each round, as in `RunState.rounds`.
        choices: What stands for "auto".
        left: Name of a group of channels -> its size in the stand-in before and after the step.
    """

    rows: tuple[dict[str, Any], ...]
    choices: tuple[Choice, ...]
    left: Mapping[str, tuple[int, int]]


class ShrinkStep(StepHandler[PreparedShrink]):
    """Removes channels, and trains after each removal if the settings say so."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedShrink:
        """Returns the step with a stand-in: the model without the channels that its present magnitudes select.

        Raises:
            ValueError, TypeError: The target cannot be reached, no channel can be removed, a pattern matches nothing,
                the criterion does not exist on this backend, or a statistic does not exist for a weight.
        """
        for name in settings.needs:
            require_backend(STATISTICS[name].backends, f"the criterion {name_of(settings.criterion)}")
        _check_measure(settings, run)
        options, inputs = _options(settings, run), _example_inputs(run)
        _check_statistics(settings, run.model)
        choices = _choices(settings, options, run)
        options = dataclasses.replace(options, criterion="magnitude", repair="none")
        # Refuses a target that cannot be reached, in the words of the recipe.
        whole = None if settings.nonzero else SizeTarget(settings.measure, settings.share)
        found = shrink_to(run.model, whole, options, inputs=inputs)
        rows = [_row(1, settings.measure, found.report)]
        before = {group.name: group.before for group in found.report.groups}
        # Rounds of a measured target are not planned each: a single removal leaves as much, and takes one search.
        if settings.rounds > 1 and settings.measure not in MEASURED:
            options = dataclasses.replace(options, tolerance=None)
            model, rows = run.model, []
            for number in range(1, settings.rounds + 1):
                found = shrink_to(model, _target(settings, rows), options, inputs=inputs)
                model = found.model
                rows.append(_row(number, settings.measure, found.report))
        left = {group.name: (before.get(group.name, group.before), group.after) for group in found.report.groups}
        return PreparedShrink(settings, model=found.model, rows=tuple(rows), choices=choices, left=left)

    def planned(self, prepared: PreparedShrink, step: PlannedStep) -> PlannedStep:
        """Returns the entry of the plan, with the sizes before and after the step."""
        return dataclasses.replace(step, text=f"{step.text}: {_sizes(prepared.rows)}")

    def plan_notes(self, prepared: PreparedShrink) -> Sequence[str]:
        """Returns the channels that are left, what stands for "auto", and whether the run may leave others."""
        changed = [f"{name} {after} of {before}" for name, (before, after) in prepared.left.items() if after < before]
        notes = [f"shrink leaves channels: {names(changed, _LISTED_GROUPS)}."] if changed else []
        notes += [f"shrink: {choice}" for choice in prepared.choices]
        chosen = {choice.option: choice.value for choice in prepared.choices}
        allocation = chosen.get("allocation", prepared.settings.allocation)
        if prepared.settings.nonzero or allocation != "uniform":
            given = "channels nonzero" if prepared.settings.nonzero else f"allocation {allocation}"
            notes.append(
                f"shrink, {given}: how many channels each layer loses follows from "
                "the weights at that time. The sizes above, also those of later steps, are for the weights that the "
                f"model has now{', and uniform' if ' or ' in allocation else ''}; the run calculates them anew."
            )
        measure = prepared.settings.measure
        if measure in MEASURED:
            notes.append(
                f"shrink to a share of the {measure}: the sizes above, also those of later steps, are of files of the "
                "model as it is now; the run measures anew."
            )
        return notes

    def run(self, prepared: PreparedShrink, workspace: Workspace) -> StepResult:
        """Runs the rounds; a resumed step goes on in the round of its checkpoint."""
        workspace.remember_before()
        settings, state, resumed = prepared.settings, workspace.state, workspace.step.resumed
        each, history = settings.epochs_per_round, resumed.history
        rows = state.own.setdefault("rounds", [])
        for number in range(max(1, len(rows)), settings.rounds + 1):
            begin = (number - 1) * each
            # Checkpoints inside the step follow the removal of their round, which has a row then.
            removes = number > len(rows)
            if removes:
                rows.append(_remove(settings, workspace, rows))
                # The training begins with these random states, in a resumed run too: the first `fit` of a new model
                # draws numbers on PyTorch before its first epoch.
                random = random_state(workspace.model)
                workspace.step.resumed = CheckpointState(workspace.step.index, begin, history=history, random=random)
            with workspace.holding_masks():
                if each and removes:
                    workspace.save_epoch(begin, history)
                if each:
                    history = workspace.fit(begin + each, settings.learning_rate, begin=begin)
            if each:
                state.metrics = workspace.evaluate()
                rows[-1]["metric"] = _main_metric(workspace)
        return StepResult(
            model=workspace.model, history=history, sections=_sections(rows, workspace), text=_sizes(rows)
        )


def _check_measure(settings: Shrink, run: RunInputs) -> None:
    """Raises if the target cannot be measured in this run."""
    check_measure(settings.measure)
    if settings.measure in MEASURED and run.replicas.several_processes:
        raise ValueError(
            f"{settings.measure} is measured by one process, and with distribute: multi_worker several remove the same "
            "channels. Use parameters or macs."
        )


def _choices(settings: Shrink, options: ShrinkOptions, run: RunInputs) -> tuple[Choice, ...]:
    """Returns what the step takes for "auto"."""
    if settings.nonzero:
        return ()
    found, target = find_channels(run.model, options.approximate), SizeTarget(settings.measure, settings.share)
    # Without data, a repair depends on whether anything stands in for them.
    without = run.data is None
    repair = Repair(run.model, options, None, stands_in=True).kind if without else options.repair_with(run.data)
    untried = reason_not_to_try(repair, target, run.model.count_params())
    ways, choices = ways_to_select(found, options, untried)
    if len(ways) == 1:
        return choices
    tried = dict(zip(("criterion", "allocation"), zip(*ways, strict=True), strict=True))
    either = {name: " or ".join(dict.fromkeys(map(str, values))) for name, values in tried.items()}
    return tuple(Choice(one.option, either[one.option], "whichever leaves the outputs nearest") for one in choices)


# ---- one removal -----------------------------------------------------------------------------------------------------


def _remove(settings: Shrink, workspace: Workspace, rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Removes the channels of the round after `rows`, and goes on with the smaller model; returns the round's row."""
    run = workspace.run
    options = _options(settings, run)
    data = calibration_data(run, settings.examples) if settings.reads_data or settings.may_repair else None
    # The importances are new, so the channels of the plan may be others: a run does not end at the tolerance.
    options = dataclasses.replace(options, tolerance=None)

    begun = len(rows) / settings.rounds
    # Models are measured first, and layers repaired afterwards: the fraction would go back between.
    progress = workspace.step_progress("{}", begun, begun)

    with run.replicas.scope(), workspace.noting():
        found = shrink_to(
            workspace.model,
            _target(settings, rows),
            options,
            data,
            inputs=_example_inputs(run),
            memory=settings.memory,
            progress=progress,
        )
        _cut_masks(found, workspace)
    workspace.replace_model(found.model)
    for note in found.report.notes:
        workspace.note(f"shrink: {note}")
    return _row(len(rows) + 1, settings.measure, found.report)


def _target(settings: Shrink, rows: Sequence[Mapping[str, Any]]) -> SizeTarget | None:
    """Returns what the next round leaves of the present model; `rows` are the rounds so far."""
    if settings.nonzero:
        return None
    asked = settings.shares[len(rows)]
    return SizeTarget(settings.measure, asked if not rows else min(1.0, asked / _left(rows)))


def _options(settings: Shrink, run: RunInputs) -> ShrinkOptions:
    """Returns the options that all rounds share."""
    shared = {one.name for one in dataclasses.fields(ShrinkOptions)} & set(Shrink.model_fields) - {"criterion"}
    criterion = make(CRITERIA, settings.criterion, run.recipe.seed)
    return ShrinkOptions(criterion, **{name: getattr(settings, name) for name in shared})


def _example_inputs(run: RunInputs) -> Any:
    """Returns an example of the data for a model that leaves sizes of its inputs open; else None."""
    declared = keras.tree.flatten(declared_inputs(run.model))
    is_open = any(one is None or None in tuple(one.shape)[1:] for one in declared)
    return run.data.train.example[0] if is_open and run.data is not None else None


def _cut_masks(found: ChannelRemoval, workspace: Workspace) -> None:
    """Cuts the masks of earlier steps to the kept channels, and names them as the weights of the new model."""
    state, channels = workspace.state, found.channels
    if not state.masks.all and not state.targets:
        return
    kept = channels.kept_numbers(found.removed)
    named = {id(weight.variable): weight.name for weight in weights_in(found.model)}
    new_names: dict[str, str] = {}
    axes: dict[str, Any] = {}
    for weight in weights_in(channels.model):
        _, new = found.variables.get(id(weight.variable), (None, None))
        new_names[weight.name] = named.get(id(new), weight.name)
        axes[weight.name] = channels.links.weights.get(id(weight.variable))

    def smaller(masks: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {new_names[name]: cut(mask, axes[name], kept) for name, mask in masks.items()}

    state.masks = RunMasks(smaller(state.masks.pruned), smaller(state.masks.original))
    state.targets = [new_names[name] for name in state.targets]


def _check_statistics(settings: Shrink, model: Any) -> None:
    if not settings.needs:
        return
    members = {member.weight for group in find_channels(model, settings.approximate).groups for member in group.members}
    targets = [one for one in ranked_weights(model)[0] if one.name in members]
    check_statistics(settings.needs, model, targets)


# ---- what the report says --------------------------------------------------------------------------------------------


def _row(number: int, measure: str, report: ShrinkReport) -> dict[str, Any]:
    """Returns the sizes before and after a round, and the sections of its report, as JSON values."""
    free = [group for group in report.groups if not group.reason]
    sizes: dict[str, Any] = {
        "channels": [sum(group.before for group in free), sum(group.after for group in free)],
        "parameters": list(report.parameters),
        "macs": list(report.macs),
    }
    measured = report.measured
    return sizes | {
        "round": number,
        "measure": measure,
        "left": sizes[measure][1] / sizes[measure][0] if measured is None else measured.share,
        "metric": None,
        "sections": [section.to_dict() for section in report.sections()],
    }


def _sizes(rows: Sequence[Mapping[str, Any]]) -> str:
    first, last = rows[0], rows[-1]
    parameters = f"parameters {count(first['parameters'][0])} -> {count(last['parameters'][1])}"
    sizes = f"{parameters}, MACs {short_count(first['macs'][0])} -> {short_count(last['macs'][1])}"
    return f"{sizes}, {last['measure']} to {_left(rows):.3f}" if last["measure"] in MEASURED else sizes


def _left(rows: Sequence[Mapping[str, Any]]) -> float:
    """Returns the share of the step's target that is left after these rounds."""
    return math.prod(row["left"] for row in rows)


def _main_metric(workspace: Workspace) -> float | None:
    return workspace.state.metrics.get(workspace.metrics[0].name) if workspace.metrics else None


def _sections(rows: Sequence[Mapping[str, Any]], workspace: Workspace) -> list[Section]:
    """Returns the table of the rounds if there are several, and the sections of the last one for the whole step."""
    groups, *others = rows[-1]["sections"]
    before = {row[0]: row[1] for row in rows[0]["sections"][0]["rows"]}
    groups = groups | {"rows": [[row[0], before.get(row[0], row[1]), *row[2:]] for row in groups["rows"]]}
    found = [Section.from_dict(one) for one in (groups, *others)]
    if len(rows) == 1:
        return found
    of_last = [
        dataclasses.replace(one, title=f"{one.title} of round {len(rows)}") if one.title == MEASURED_SIZE else one
        for one in found
    ]
    return [_rounds_section(rows, workspace), *of_last]


def _rounds_section(rows: Sequence[Mapping[str, Any]], workspace: Workspace) -> Section:
    metric = workspace.metrics[0].name if workspace.metrics else "Metric"
    sizes = (Column("Channels", "count"), Column("Parameters", "count"), Column("MACs", "short_count"))
    columns = [Column("Round", "count"), *sizes, Column(metric, "number")]
    values = [[row["round"], row["channels"][1], row["parameters"][1], row["macs"][1], row["metric"]] for row in rows]
    if rows[0]["measure"] in MEASURED:
        columns.append(Column(f"{rows[0]['measure']} left", "number"))
        values = [[*row, round(_left(rows[: row[0]]), 4)] for row in values]
    explanation = "Sizes after each removal; metric after the training."
    return Section("Rounds", tuple(columns), tuple(map(tuple, values)), explanation=explanation)
