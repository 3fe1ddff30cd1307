"""Plans a run: resolves a recipe for its model and data without changing a weight."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from prunekit.anatomy.records.reports import by_reason
from prunekit.delivery.reports.formatting import clean, count, sparsity
from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.datasets.data import DataSummary, summary
from prunekit.recipe.run.preparation import prepare, settled_recipe
from prunekit.recipe.settings.schema import Step, described
from prunekit.recipe.state.models import source_notes
from prunekit.recipe.steps.step_handler import PlannedStep, PlannedTarget, handler_of
from prunekit.recipe.text.loader import located
from prunekit.sparsity.bounds import Bounds

__all__ = ["Plan", "PlannedStep", "PlannedTarget", "plan", "show_plan"]

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

# More mask updates than these are not listed one by one.
LISTED_UPDATES = 12


@dataclass(frozen=True)
class Plan:
    """Plan of a whole recipe, resolved for its model and data."""

    name: str
    model: str
    parameters: int
    steps_per_epoch: int | None
    steps: tuple[PlannedStep, ...]
    notes: tuple[str, ...] = ()
    metrics: tuple[Metric, ...] = ()
    data: DataSummary | None = None

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
    with located(recipe):
        prepared = prepare(settled_recipe(recipe, model, data, overrides), model, data, trust=trust)
    steps: list[PlannedStep] = []
    notes: dict[str, None] = {}
    if prepared.recipe.model is not None and "model" not in prepared.given:
        notes.update(dict.fromkeys(source_notes(prepared.recipe.model)))
    for step, resolved in zip(prepared.recipe.steps, prepared.steps, strict=True):
        handler = handler_of(step.kind)
        steps.append(handler.planned(resolved, _outline(step, prepared.steps_per_epoch)))
        notes.update(dict.fromkeys(handler.plan_notes(resolved)))
    return Plan(
        name=prepared.recipe.name,
        model=prepared.model.name,
        parameters=prepared.model.count_params(),
        steps_per_epoch=prepared.steps_per_epoch,
        steps=tuple(steps),
        notes=tuple(notes),
        metrics=prepared.metrics,
        data=None if prepared.data is None else summary(prepared.data),
    )


def _outline(step: Step, steps_per_epoch: int | None) -> PlannedStep:
    epochs = getattr(step.settings, "epochs", None)
    updates = epochs * steps_per_epoch if epochs and steps_per_epoch else None
    return PlannedStep(step.kind, described(step), epochs, updates)


def _lines_above_the_steps(plan: Plan) -> list[str]:
    lines = [] if plan.data is None else _data_lines(plan.data)
    if plan.metrics:
        main, *others = (f"{metric.name} ({metric.better or 'direction not known'})" for metric in plan.metrics)
        lines.append(f"measures: {', '.join([f'{main}, the main metric', *others])}")
    return lines


def _mask_updates(pruning: Sequence[tuple[int, float]]) -> str:
    """Returns the line of a step's mask updates; of many, the first and the last."""
    updates = [f"{at} ({asked:.4g})" for at, asked in pruning]
    if len(updates) > LISTED_UPDATES:
        updates = [*updates[: LISTED_UPDATES // 2], "...", *updates[-LISTED_UPDATES // 2 :]]
    return f"{count(len(pruning))} mask update{'s' * (len(pruning) > 1)}, at step (sparsity): {', '.join(updates)}"


def _limits(target: PlannedTarget) -> str:
    """Returns the text of a target's bounds and override; "" without any."""
    if target.override is not None:
        return f"set to {target.override:g}"
    if target.minimum is None and target.maximum is None:
        return ""
    return str(Bounds(target.minimum or 0.0, target.maximum))


def _data_lines(data: DataSummary) -> list[str]:
    """Returns the lines of a plan about the data."""
    parts = ", ".join(f"{count(examples)} {name}" for name, examples in data.examples.items())
    streamed = ", read from files during the training" if data.streamed else ""
    lines = [f"data: {data.name}: {parts} examples{streamed}"]
    for kind, found in (("input", data.inputs), ("label", data.labels)):
        lines += [f"   {kind}{' ' + name if name else ''}: {text}" for name, text in found.items()]
    return lines + [f"   {note.removeprefix('data: ')}" for note in data.notes]


def _targets_table(targets: Sequence[PlannedTarget]) -> "Table":
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    limits = [_limits(target) for target in targets]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("target", "shape", "weights", "sparsity", "pruned", *(["limits"] if any(limits) else [])):
        table.add_column(heading, justify="left" if heading in ("target", "shape", "limits") else "right")
    for target, limit in zip(targets, limits, strict=True):
        shape = " x ".join(str(length) for length in target.shape)
        cells = (shape, count(target.size), sparsity(target.sparsity), count(target.pruned))
        table.add_row(escape(clean(target.name)), *cells, *([limit] if any(limits) else []))
    return table


def show_plan(plan: Plan, console: "Console") -> None:
    """Prints a plan: every step, its targets, and every mask update."""
    from rich.markup import escape

    def line(text: object) -> str:
        return escape(clean(text))

    per_epoch = f", {count(plan.steps_per_epoch)} steps per epoch" if plan.steps_per_epoch else ""
    console.print(f"[bold]{line(plan.name)}[/]: {line(plan.model)}, {count(plan.parameters)} parameters{per_epoch}")
    for text in _lines_above_the_steps(plan):
        console.print(line(text))
    for i, step in enumerate(plan.steps, start=1):
        console.print(f"\n[bold]{i}. {line(step.kind)}[/] {line(step.text)}")
        if step.targets:
            console.print(_targets_table(step.targets))
        if step.pruning:
            console.print(f"   {_mask_updates(step.pruning)}")
        for skipped in by_reason(step.skipped):
            console.print(f"   left out: {line(skipped)}")
        if step.sections:
            from prunekit.delivery.reports.terminal_report import print_section

            for section in step.sections:
                print_section(section, console)
    for note in plan.notes:
        console.print(f"note: {line(note)}")
