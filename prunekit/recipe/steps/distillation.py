"""Distillation in the steps that train: the teacher, and the callback."""

from typing import Any

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.recipe.settings.distill_settings import Distill
from prunekit.recipe.state.compile_settings import compile_arguments, output_names
from prunekit.recipe.state.models import load_model
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.state.workspace import Workspace
from prunekit.recipe.text.loader import RecipeError
from prunekit.techniques.distill.distillation_callback import DistillationCallback
from prunekit.techniques.distill.feature_maps import named_layer
from prunekit.techniques.distill.options import DistillationKeywords, DistillationOptions
from prunekit.techniques.distill.output_kinds import output_kinds
from prunekit.techniques.distill.teacher import check_teacher, copy_of
from prunekit.techniques.distill.training import check_loss


def prepared_teacher(settings: Distill | None, run: RunInputs) -> Any:
    """Returns the teacher in the file that a step names; None if it names none.

    Raises:
        RecipeError: The file cannot be read, its outputs are not those of the model, a layer does not exist, or the
            loss does not fit the outputs.
    """
    if settings is None:
        return None
    try:
        with run.replicas.scope():
            teacher = None if settings.teacher is None else load_model(settings.teacher, like=[run.model])
        if teacher is not None:
            check_teacher(teacher, run.model)
        for one, two in settings.features.items():
            named_layer(run.model, one, "student")
            named_layer(run.model if teacher is None else teacher, two, "teacher")
        check_loss(_options(settings), output_kinds(run.model, loss=_loss(run)))
    except ValueError as error:
        message = error.message if isinstance(error, RecipeError) else error
        raise RecipeError(f"distill: {message}") from error
    return teacher


def _loss(run: RunInputs) -> Any:
    """Returns the loss with which the run will compile the model."""
    if run.data is None or run.compile is None:
        return None
    names = output_names(run.model, run.model(run.data.train.example[0], training=False))
    return compile_arguments(run.compile, names)["loss"]


def distillation(settings: Distill | None, teacher: Any, workspace: Workspace) -> list[DistillationCallback]:
    """Returns the callback of a step; [] without distillation.

    Args:
        settings: The `distill` of the step.
        teacher: What `prepared_teacher` returned.
        workspace: The run.
    """
    if settings is None:
        return []
    with workspace.run.replicas.scope():
        taught_by = teacher if teacher is not None else _model_before(workspace)
    return [DistillationCallback(taught_by, **_keywords(settings))]


def _model_before(workspace: Workspace) -> Any:
    """Returns a model with the weights from before the first step that compressed the run's model.

    Not the model at the start of the step: a resumed step has other weights by then.
    """
    model, weights = copy_of(workspace.run.model), workspace.state.weights_before
    for weight in weights_in(model):
        weight.variable.assign(weights[weight.name])
    return model


def _keywords(settings: Distill) -> DistillationKeywords:
    return {name: getattr(settings, name) for name in DistillationKeywords.__annotations__}  # type: ignore[return-value]


def _options(settings: Distill) -> DistillationOptions:
    return DistillationOptions(**_keywords(settings))
