"""Plans a run: resolves a recipe for its model and data without changing a weight."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.targets import Skipped
from prunekit.delivery.formatting import clean, count, sparsity
from prunekit.recipe.preparation import Prepared, Pruning, prepare, settled_recipe
from prunekit.recipe.schema import Step
from prunekit.recipe.summary import step_text
from prunekit.sparsity.patterns import get_pattern
from prunekit.sparsity.selection import removed_count
from prunekit.techniques.pruning.options import PruningOptions
from prunekit.techniques.pruning.policy import get_policy

if TYPE_CHECKING:
    from rich.console import Console


@dataclass(frozen=True)
class PlannedTarget:
    """One target of a prune step, with its final sparsity and its final number of pruned entries."""

    name: str
    shape: tuple[int, ...]
    size: int
    sparsity: float
    pruned: int


@dataclass(frozen=True)
class PlannedStep:
    """One step of a recipe, resolved.

    Attributes:
        kind: train, prune, finetune, export or expect.
        text: Description of the step in one line.
        epochs: Number of training epochs; None if the step does not train.
        updates: Number of optimizer updates in the step.
        pruning: (optimizer update since the start of the step, requested sparsity) for every mask update.
        targets: Weights that the step prunes.
        skipped: Weights that the step does not prune, with reasons.
    """

    kind: str
    text: str
    epochs: int | None = None
    updates: int | None = None
    pruning: tuple[tuple[int, float], ...] = ()
    targets: tuple[PlannedTarget, ...] = ()
    skipped: tuple[Skipped, ...] = ()


@dataclass(frozen=True)
class Plan:
    """Plan of a whole recipe, resolved for its model and data."""

    name: str
    model: str
    parameters: int
    steps_per_epoch: int | None
    steps: tuple[PlannedStep, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return asdict(self)


def plan(
    recipe: Any,
    model: Any = None,
    data: Any = None,
    *,
    overrides: Mapping[str, object] | None = None,
    trust: bool = False,
) -> Plan:
    """Returns the plan of the run that `compress` would execute with the same arguments.

    Raises:
        RecipeError: `compress` would refuse the run.
    """
    prepared = prepare(settled_recipe(recipe, model, data, overrides), model, data, trust=trust)
    steps = tuple(_planned(prepared, index, step) for index, step in enumerate(prepared.recipe.steps))
    notes = []
    if any(step.prune is not None and step.prune.allocation == "global" for step in prepared.recipe.steps):
        notes.append(
            "allocation global prunes the least important weights of the whole model: how many fall on each weight "
            "follows from their values, and the counts above stand for an even share."
        )
    return Plan(
        name=prepared.recipe.name,
        model=prepared.model.name,
        parameters=prepared.model.count_params(),
        steps_per_epoch=prepared.steps_per_epoch,
        steps=steps,
        notes=tuple(notes),
    )


def described(step: Step) -> str:
    """Returns a one-line description of a step, without its kind."""
    return step_text(step).partition(": ")[2]


def _planned(prepared: Prepared, index: int, step: Step) -> PlannedStep:
    epochs = getattr(step.settings, "epochs", None)
    updates = epochs * prepared.steps_per_epoch if epochs and prepared.steps_per_epoch else None
    pruning = prepared.pruning.get(index)
    if pruning is None:
        return PlannedStep(step.kind, described(step), epochs, updates)
    options = PruningOptions(**pruning.options)
    schedule = get_policy(options.policy).check(pruning.schedule, options)
    asked = tuple((at, schedule(at)) for at in schedule.update_steps(updates or 0))
    return PlannedStep(
        step.kind, described(step), epochs, updates, asked, _targets(prepared.model, pruning), pruning.skipped
    )


def _targets(model: Any, pruning: Pruning) -> tuple[PlannedTarget, ...]:
    options = PruningOptions(**pruning.options)
    policy, pattern = get_policy(options.policy), get_pattern(options.pattern)
    final = policy.check(pruning.schedule, options).final_sparsity
    calculator = policy.calculator(model, pruning.targets, options, final)
    even = not calculator.shares_known
    rows = []
    for target, fraction, removed in zip(
        pruning.targets, pruning.fractions, calculator.units_pruned(final), strict=True
    ):
        units = pattern.units(target.shape, target.in_axes, target.out_axes)
        # Units may be blocks or channels; blocks cut off at an edge are smaller than the others.
        pruned = removed_count(fraction, target.size, keep_one=options.keep_one) if even else removed
        rows.append(
            PlannedTarget(
                name=target.name,
                shape=target.shape,
                size=target.size,
                sparsity=fraction,
                pruned=pruned if even else round(pruned * target.size / units),
            )
        )
    return tuple(rows)


def show_plan(plan: Plan, console: "Console") -> None:
    """Prints a plan: every step, its targets, and every mask update."""
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    def line(text: object) -> str:
        return escape(clean(text))

    per_epoch = f", {count(plan.steps_per_epoch)} steps per epoch" if plan.steps_per_epoch else ""
    console.print(f"[bold]{line(plan.name)}[/]: {line(plan.model)}, {count(plan.parameters)} parameters{per_epoch}")
    for i, step in enumerate(plan.steps, start=1):
        console.print(f"\n[bold]{i}. {line(step.kind)}[/] {line(step.text)}")
        if step.targets:
            table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
            for heading in ("target", "shape", "weights", "sparsity", "pruned"):
                table.add_column(heading, justify="left" if heading in ("target", "shape") else "right")
            for target in step.targets:
                shape = " x ".join(str(length) for length in target.shape)
                cells = (shape, count(target.size), sparsity(target.sparsity), count(target.pruned))
                table.add_row(line(target.name), *cells)
            console.print(table)
        if step.pruning:
            updates = ", ".join(f"{at} ({asked:.4g})" for at, asked in step.pruning)
            console.print(f"   {len(step.pruning)} mask updates, at step (sparsity): {updates}")
        for skipped in step.skipped:
            console.print(f"   left out: {line(skipped.name)}: {line(skipped.reason)}")
    for note in plan.notes:
        console.print(f"note: {line(note)}")
