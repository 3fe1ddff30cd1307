"""The handler of the step kind expect."""

from typing import Any

from prunekit.recipe.expectations import checked, failure_text
from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.workspace import Workspace


class ExpectStep(StepHandler[PreparedStep]):
    """Compares measured values with bounds; the run ends after a bound that is not met."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step; every refusal of an expectation is visible in the recipe alone."""
        return PreparedStep(settings)

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Adds a row to the expectations of the run for each bound."""
        state, drop = workspace.state, None
        if state.accuracy is not None and state.accuracy_before is not None:
            drop = state.accuracy_before - state.accuracy
        state.expectations += checked(
            prepared.settings, state.accuracy, drop, workspace.sparsity_of_targets(), state.exports
        )
        return StepResult(text="; ".join(map(failure_text, state.failures)) or "all met")
