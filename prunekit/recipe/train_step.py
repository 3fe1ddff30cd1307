"""The handler of the step kinds train and finetune."""

from dataclasses import dataclass
from typing import Any

from prunekit.recipe.loader import RecipeError
from prunekit.recipe.run_inputs import RunInputs
from prunekit.recipe.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.workspace import Workspace
from prunekit.techniques.shrink.channel_penalties import ChannelWeights, GroupLasso


@dataclass(frozen=True, eq=False)
class PreparedTrain(PreparedStep):
    """A training, with the penalty on channels that its settings ask for, or None."""

    penalty: GroupLasso | None = None


class TrainStep(StepHandler[PreparedTrain]):
    """Trains for a number of epochs, and keeps the zeros of earlier steps."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedTrain:
        """Returns the step.

        Raises:
            RecipeError: `group_lasso`, and the model has no channels that can be removed.
        """
        if settings.group_lasso is None:
            return PreparedTrain(settings)
        try:
            ChannelWeights(run.model)
        except ValueError as error:
            raise RecipeError(f"group_lasso: {error}") from error
        return PreparedTrain(settings, penalty=GroupLasso(settings.group_lasso))

    def run(self, prepared: PreparedTrain, workspace: Workspace) -> StepResult:
        """Trains the workspace's model."""
        settings = prepared.settings
        if not settings.keep_zeros:
            workspace.state.masks.release_original()
        with workspace.holding_masks():
            return StepResult(history=workspace.fit(settings.epochs, settings.learning_rate, penalty=prepared.penalty))
