"""The handler of the step kind expect."""

from typing import Any

from prunekit.delivery.metrics import inferred
from prunekit.recipe.expectations import Measured, checked, failure_text
from prunekit.recipe.fields import nearest
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.workspace import Workspace


class ExpectStep(StepHandler[PreparedStep]):
    """Compares measured values with bounds; the run ends after a bound that is not met."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step.

        Raises:
            RecipeError: No such metric is measured, or a drop is bounded of a metric whose direction is not known.
        """
        known = {metric.name: metric for metric in run.metrics}
        own = [metric.name for metric in run.model.metrics]
        for name in settings.bounded_metrics:
            if name not in known and name not in own:
                raise RecipeError(f"no metric {name!r} is measured.{nearest(name, [*known, *own])}")
        for name in settings.drops:
            if known.get(name, inferred(name)).direction is None:
                raise RecipeError(
                    f"whether a drop of {name!r} is a lower or a higher value is known only for the metrics of Keras: "
                    "write its direction where compile names it, as direction: max or direction: min."
                )
        return PreparedStep(settings)

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Adds a row to the expectations of the run for each bound."""
        state = workspace.state
        measured = Measured(
            workspace.metrics, state.metrics, state.metrics_before, workspace.sparsity_of_targets(), state.exports
        )
        state.expectations += checked(prepared.settings, measured)
        return StepResult(text="; ".join(map(failure_text, state.failures)) or "all met")
