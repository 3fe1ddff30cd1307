"""The handler of the step kinds train and finetune."""

from dataclasses import dataclass
from typing import Any

from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.steps.cluster_step import trained_clusters
from prunekit.recipe.steps.distillation import distillation, prepared_teacher
from prunekit.recipe.steps.step_handler import PreparedStep, StepHandler, StepResult
from prunekit.recipe.text.loader import RecipeError
from prunekit.techniques.shrink.channels.channel_penalties import (
    ChannelPenalty,
    ChannelWeights,
    GroupLasso,
    GrowingRegularization,
)


@dataclass(frozen=True, eq=False)
class PreparedTrain(PreparedStep):
    """A training, with the penalty on channels and the teacher that its settings ask for, or None."""

    penalty: ChannelPenalty | None = None
    teacher: Any = None


class TrainStep(StepHandler[PreparedTrain]):
    """Trains for a number of epochs, and keeps the zeros of earlier steps."""

    def prepare(self, settings: Any, run: RunInputs) -> PreparedTrain:
        """Returns the step.

        Raises:
            RecipeError: The settings ask for a penalty on channels, and the model has no channels that can be removed;
                or for a teacher that does not fit.
        """
        penalty = _penalty(settings)
        if penalty is not None:
            try:
                ChannelWeights(run.model)
            except ValueError as error:
                name = "group_lasso" if settings.growing_regularization is None else "growing_regularization"
                raise RecipeError(f"{name}: {error}") from error
        return PreparedTrain(settings, penalty=penalty, teacher=prepared_teacher(settings.distill, run))

    def run(self, prepared: PreparedTrain, workspace: Workspace) -> StepResult:
        """Trains the workspace's model."""
        settings = prepared.settings
        if not settings.keep_zeros:
            workspace.state.masks.release_original()
        with workspace.holding_masks():
            penalties, clusters = [] if prepared.penalty is None else [prepared.penalty], trained_clusters(workspace)
            taught = distillation(settings.distill, prepared.teacher, workspace)
            history = workspace.fit(settings.epochs, settings.learning_rate, *penalties, *clusters, *taught)
        reports = [one.report for one in (*clusters, *taught)]
        return StepResult(history=history, sections=[part for one in reports for part in one.sections()])


def _penalty(settings: Any) -> ChannelPenalty | None:
    if settings.group_lasso is not None:
        return GroupLasso(settings.group_lasso)
    growing = settings.growing_regularization
    return None if growing is None else GrowingRegularization(**dict(growing))
