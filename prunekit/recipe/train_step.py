"""The handler of the step kinds train and finetune."""

from typing import Any

from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.workspace import Workspace


class TrainStep(StepHandler[PreparedStep]):
    """Trains for a number of epochs, and keeps the zeros of earlier steps."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedStep:
        """Returns the step; every refusal of a training is visible in the recipe or in model and data."""
        return PreparedStep(settings)

    def run(self, prepared: PreparedStep, workspace: Workspace) -> StepResult:
        """Trains the workspace's model."""
        settings = prepared.settings
        if not settings.keep_zeros:
            workspace.state.masks.release_original()
        with workspace.holding_masks():
            return StepResult(history=workspace.fit(settings.epochs, settings.learning_rate))
