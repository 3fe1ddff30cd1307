"""The handler of the step kind expect."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prunekit.delivery.reports.metrics import Metric, inferred
from prunekit.recipe.settings.export_settings import Expect
from prunekit.recipe.settings.fields import nearest
from prunekit.recipe.state.compile_settings import own_metrics
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.expectations import Measured, checked, failure_text
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.text.loader import RecipeError


@dataclass(frozen=True)
class PreparedExpectations(PreparedStep):
    """The step, with notes on bounds that are probably not what was meant."""

    notes: tuple[str, ...] = ()


class ExpectStep(StepHandler[PreparedExpectations]):
    """Compares measured values with bounds; the run ends after a bound that is not met."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedExpectations:
        """Returns the step.

        Raises:
            RecipeError: No such metric is measured, or a drop is bounded of a metric whose direction is not known.
        """
        known = {metric.name: metric for metric in run.metrics}
        own = own_metrics(run.model)
        for name in settings.bounded_metrics:
            if name not in known and name not in own:
                raise RecipeError(f"no metric {name!r} is measured.{nearest(name, {**known, **own})}")
        for name in settings.drops:
            if known.get(name, inferred(name)).direction is None:
                raise RecipeError(
                    f"whether a drop of {name!r} is a lower or a higher value is known only for the metrics of Keras: "
                    "write its direction where compile names it, as direction: max or direction: min."
                )
        return PreparedExpectations(settings, notes=tuple(_one_sided(settings, known.values())))

    def plan_notes(self, prepared: PreparedExpectations) -> Sequence[str]:
        """Returns the notes of the step."""
        return prepared.notes

    def run(self, prepared: PreparedExpectations, workspace: Workspace) -> StepResult:
        """Adds a row to the expectations of the run for each bound."""
        state = workspace.state
        measured = Measured(
            workspace.metrics, state.metrics, state.metrics_before, workspace.sparsity_of_targets(), state.exports
        )
        state.expectations += checked(prepared.settings, measured)
        return StepResult(text="; ".join(map(failure_text, state.failures)) or "all met")


def _one_sided(settings: Expect, metrics: Iterable[Metric]) -> Iterator[str]:
    """Yields a note for each metric whose only bound is met by every worse value."""
    for metric in metrics:
        bound = (settings.metrics or {}).get(metric.name)
        if bound is None or metric.direction is None:
            continue
        given, useful = ("min", "max") if metric.direction == "min" else ("max", "min")
        if getattr(bound, given) is not None and getattr(bound, useful) is None:
            yield (
                f"expect: {metric.name} has only the bound {given!r}, which every worse value meets "
                f"({metric.better}): {useful!r} would bound it."
            )
