"""Checks a recipe and resolves its model, data and steps before any weight changes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from prunekit.delivery.reports.metrics import Metric
from prunekit.recipe.datasets import data as data_module
from prunekit.recipe.datasets.data import Data
from prunekit.recipe.datasets.parts import Labels, naming_damaged_file
from prunekit.recipe.settings.compile_fields import CLASS_LOSSES, LOGIT_LOSSES, Compile
from prunekit.recipe.settings.fields import first_text, shown
from prunekit.recipe.settings.schema import Recipe, Step
from prunekit.recipe.settings.sources import ModelSource
from prunekit.recipe.state.compile_settings import (
    are_logits,
    compile_arguments,
    metrics_of,
    optimizer_from,
    output_names,
    reason_of,
)
from prunekit.recipe.state.models import build_model, check_model_file, model_description, rebuilt_model
from prunekit.recipe.state.replicas import ALONE, Replicas, check_distribution
from prunekit.recipe.state.run_inputs import RunInputs
from prunekit.recipe.steps.step_handler import PreparedStep, handler_of
from prunekit.recipe.text.loader import RecipeError, load_recipe, require_trust

# First training examples that the model must accept. Fewer logits of a single output might all lie in [0, 1].
_FEW = 16


@dataclass(frozen=True, eq=False, kw_only=True)
class Prepared(RunInputs):
    """A run that is ready to start.

    Attributes:
        steps: The resolved steps, in the order of the recipe.
        given: "model" and "data", as far as they were given as Python objects, which the recipe does not contain.
    """

    steps: tuple[PreparedStep, ...]
    given: tuple[str, ...]

    @property
    def models(self) -> list[keras.Model]:
        """The model of the run, and the stand-ins for the models that steps will return."""
        return [self.model, *(step.model for step in self.steps if step.model is not None)]


def settled_recipe(
    recipe: Any, model: Any = None, data: Any = None, overrides: Mapping[str, object] | None = None
) -> Recipe:
    """Returns the recipe of the run, with the path of a given model file written into it; imports no factory.

    Raises:
        RecipeError: The recipe is invalid, or a model or data are needed but neither named nor given.
        TypeError: `model` is neither a Keras model nor a path.
    """
    found = load_recipe(recipe, overrides, data_given=data is not None)
    if isinstance(model, str | os.PathLike):
        check_model_file(model)
        found = found.model_copy(update={"model": ModelSource(file=os.path.abspath(model))})
    elif model is not None and not isinstance(model, keras.Model):
        raise TypeError(f"`model` is a Keras 3 model or the path of a .keras file. Received: {type(model)!r}.")
    check_distribution(found, model)
    if model is None and found.model is None:
        raise RecipeError("this recipe names no model. Pass --model FILE (model=...).")
    index = found.needs_data()
    if index is not None and data is None and found.data is None:
        raise RecipeError(
            f"steps[{index}].{found.steps[index].kind} needs data, and the recipe names none: add for example "
            "data: {builtin: digits}, or pass data=((x_train, y_train), (x_test, y_test))."
        )
    return found


def prepare(recipe: Recipe, model: Any, data: Any, *, trust: bool, replicas: Replicas = ALONE) -> Prepared:
    """Builds the model, loads the data and resolves every step; does not change the weights of a built model.

    Args:
        recipe: Recipe that `settled_recipe` returned.
        model: Model given by the caller; replaces the recipe's model.
        data: Data given by the caller; replaces the recipe's data.
        trust: True allows importing the recipe's Python factories.
        replicas: Replicas on which the model is built.

    Raises:
        RecipeError: A check found a problem that would make the run fail later.
    """
    if not isinstance(model, keras.Model) and recipe.model is not None and recipe.model.file is not None:
        check_model_file(recipe.model.file)
    if data is None and recipe.data is not None:
        data_module.check_files(recipe.data)
    require_trust(recipe, trust, model_given=model is not None, data_given=data is not None)
    found = _data(recipe, data)
    settings = (recipe.compile or Compile()) if found is not None else recipe.compile
    if found is not None:
        replicas.check(settings, {name: part.examples for name, part in found.parts.items()})
    with replicas.scope():
        built = _model(recipe, model)
    _check_optimizer(settings)
    metrics: tuple[Metric, ...] = ()
    if found is not None and settings is not None:
        with replicas.scope():
            settings, metrics = _fitted(built, found, settings, recipe.seed)
    elif not built.built:
        raise RecipeError(
            f"the model {built.name!r} is not built, and there are no data to build it with: give it a "
            "keras.Input, or call it once."
        )
    steps_per_epoch = math.ceil(found.train.examples / settings.batch_size) if found and settings else None
    run = RunInputs(recipe, built, found, settings, steps_per_epoch, replicas, metrics)
    given_parts = (("model", built is model), ("data", data is not None))
    return Prepared(
        **vars(run),
        steps=_prepared_steps(run),
        given=tuple(name for name, is_given in given_parts if is_given),
    )


def _model(recipe: Recipe, given: Any) -> keras.Model:
    if isinstance(given, keras.Model):
        return given
    if recipe.model is None:
        raise RecipeError("this recipe names no model. Pass --model FILE (model=...).")
    return build_model(recipe.model, recipe.seed)


def _data(recipe: Recipe, given: Any) -> Data | None:
    if given is not None:
        return data_module.given_data(given)
    return data_module.load_data(recipe.data, recipe.seed) if recipe.data is not None else None


# ---- model, data and compile settings --------------------------------------------------------------------------------


def _check_optimizer(settings: Compile | None) -> None:
    if settings is not None:
        optimizer_from(settings)


def _fitted(model: keras.Model, data: Data, settings: Compile, seed: int) -> tuple[Compile, tuple[Metric, ...]]:
    """Checks that model, data and compile settings fit together; builds a model that is not built yet.

    Returns:
        The settings with `from_logits`, and the metrics of the run, the main one first.
    """
    with naming_damaged_file([data.train]):
        inputs, _ = data.train.first(_FEW)
    if not model.built:
        keras.utils.set_random_seed(seed)
    try:
        outputs = model(inputs, training=False)
    except Exception as error:
        # Catch every exception: each backend has its own exception types for inputs that do not fit.
        raise RecipeError(
            f"the model {model.name!r} does not accept the inputs of {data.name}, of {_described(inputs)}: "
            f"{reason_of(error)}."
        ) from error
    names = output_names(model, outputs)
    _check_label_names(model, data, names)
    _check_parts_agree(data)
    losses, made_by = dict(settings.losses()), _by_name(outputs, names)
    if settings.from_logits is None:
        named = ((losses.get(name, losses.get(None)), made) for name, made in made_by.items())
        logits = any(isinstance(loss, str) and loss in LOGIT_LOSSES and are_logits(made) for loss, made in named)
        settings = settings.model_copy(update={"from_logits": logits})
    compile_arguments(settings, names)
    for name in made_by:
        loss = losses.get(name, losses.get(None))
        if isinstance(loss, str):
            _check_regression(loss, data)
            made = made_by[name]
            parts = {part: labels if name is None else labels[name] for part, labels in _labels(data).items()}
            _check_labels(_Output(model.name, name, tuple(made.shape)[1:], data.name), loss, parts)
    return settings, metrics_of(settings, names, model)


def _by_name(outputs: Any, names: tuple[str, ...] | None) -> dict[str | None, Any]:
    """Returns outputs by name; None is the name of a single output."""
    if names is None:
        return {None: outputs}
    return {name: outputs[name] if isinstance(outputs, Mapping) else outputs[i] for i, name in enumerate(names)}


def _described(inputs: Any) -> str:
    if isinstance(inputs, Mapping):
        listed = [f"{name!r} of shape {array.shape[1:]} and type {array.dtype}" for name, array in inputs.items()]
        return f"{len(listed)} names: {', '.join(listed)}"
    return f"shape {inputs.shape[1:]} and type {inputs.dtype}"


def _labels(data: Data) -> dict[str, Any]:
    """Returns the `Labels` of each part; by output for several outputs."""
    return {name: part.labels() for name, part in data.parts.items()}


def _check_label_names(model: keras.Model, data: Data, names: tuple[str, ...] | None) -> None:
    labels = data.train.labels()
    for part, others in _labels(data).items():
        if isinstance(others, Mapping) != isinstance(labels, Mapping) or (
            isinstance(labels, Mapping) and sorted(others) != sorted(labels)
        ):
            raise RecipeError(f"{data.name}: the training and the {part} labels must have the same names.")
    if names is None:
        if isinstance(labels, Mapping):
            raise RecipeError(
                f"the model {model.name!r} has one output, so labels are one array. Received: labels named "
                f"{', '.join(labels)} from {data.name}."
            )
        return
    if not isinstance(labels, Mapping) or sorted(labels) != sorted(names):
        received = f"labels named {', '.join(labels)}" if isinstance(labels, Mapping) else "one array"
        raise RecipeError(
            f"labels must have the names of the outputs of {model.name!r}: {', '.join(names)}. Received: {received} "
            f"from {data.name}."
        )


def _check_parts_agree(data: Data) -> None:
    """Checks that the labels of all parts have one shape; a label of shape () may also be one of shape (1,)."""
    train = _shapes(data.train.labels())
    for part, labels in _labels(data).items():
        found = _shapes(labels)
        if any(found[name] != shape and {found[name], shape} != {(), (1,)} for name, shape in train.items()):
            raise RecipeError(
                f"{data.name}: labels of the training and the {part} part must have one shape. Received: "
                f"{', '.join(map(str, train.values()))} and {', '.join(map(str, found.values()))}."
            )


def _shapes(labels: Any) -> dict[str, tuple[int, ...]]:
    return {name: item.shape for name, item in (labels if isinstance(labels, Mapping) else {"": labels}).items()}


@dataclass(frozen=True)
class _Output:
    """An output of a model: the model's name, the output's, its shape without the batch; and the name of the data."""

    model: str
    name: str | None
    shape: tuple[int, ...]
    data: str

    @property
    def title(self) -> str:
        return repr(self.model) if self.name is None else f"{self.model!r} ({self.name})"


def _check_regression(loss: str, data: Data) -> None:
    """Refuses labels that are numbers of classes for a loss that compares quantities."""
    names, labels = data.class_names, data.train.labels()
    if loss not in CLASS_LOSSES and len(names) > 2 and isinstance(labels, Labels) and labels.shape == ():
        raise RecipeError(
            f"with loss {loss}, labels must be quantities. Received: {len(names):,} classes from {data.name}, such as "
            f"{shown(first_text(names))}. Correct labels that are no "
            "numbers, or write a loss of classification, such as loss: sparse_categorical_crossentropy."
        )


def _check_labels(output: _Output, loss: str, parts: Mapping[str, Labels]) -> None:
    """Checks the labels of each part of the data against one output and its loss."""
    given, made = parts["training"].shape, output.shape
    if loss == "sparse_categorical_crossentropy":
        _check_classes(output, parts)
    elif given != made and not (made == (1,) and given == ()):
        whole = np.dtype(parts["training"].dtype).kind in "iu"
        hint = " For class numbers, write loss: sparse_categorical_crossentropy." if whole else ""
        raise RecipeError(
            f"with loss {loss}, labels must have the shape of the outputs of {output.title}, {made}. "
            f"Received: labels of shape {given} from {output.data}.{hint}"
        )
    elif loss in LOGIT_LOSSES:
        _check_probabilities(output, loss, parts)


def _check_probabilities(output: _Output, loss: str, parts: Mapping[str, Labels]) -> None:
    for part, labels in parts.items():
        if labels.low < 0 or labels.high > 1:
            raise RecipeError(
                f"with loss {loss}, labels must be 0 to 1. Received: {part} labels from {labels.low:g} to "
                f"{labels.high:g} from {output.data}. For several classes, give the model an output for each class, "
                "and write loss: sparse_categorical_crossentropy."
            )


def _check_classes(output: _Output, parts: Mapping[str, Labels]) -> None:
    given, made = parts["training"].shape, output.shape
    if given not in (made[:-1], (*made[:-1], 1)) or not made:
        raise RecipeError(
            f"with loss sparse_categorical_crossentropy, labels must be class numbers of shape {made[:-1]}, one for "
            f"each output of {output.title} (shape {made}). Received: labels of shape {given} from {output.data}. "
            "For one-hot labels, write loss: categorical_crossentropy."
        )
    for part, labels in parts.items():
        if not labels.whole:
            raise RecipeError(
                f"class numbers must be whole numbers. Received: fractions among the {part} labels of {output.data}."
            )
        low, high = int(labels.low), int(labels.high)
        if low < 0 or high >= made[-1]:
            raise RecipeError(
                f"the model {output.title} has {made[-1]} outputs, so labels must be 0 to {made[-1] - 1}. Received: "
                f"{part} labels from {low} to {high} from {output.data}."
            )


# ---- steps -----------------------------------------------------------------------------------------------------------


def _prepared_steps(run: RunInputs) -> tuple[PreparedStep, ...]:
    found = []
    for index, step in enumerate(run.recipe.steps):
        try:
            prepared = _prepared(step, run)
        except (ValueError, TypeError) as error:
            message = error.message if isinstance(error, RecipeError) else error
            raise RecipeError(f"steps[{index}].{step.kind}: {message}") from error
        found.append(prepared)
        if prepared.model is not None:
            # Later steps are prepared for the model that this step will return.
            run = replace(run, model=prepared.model)
    return tuple(found)


def _prepared(step: Step, run: RunInputs) -> PreparedStep:
    with run.replicas.scope():
        prepared = handler_of(step.kind).prepare(step.settings, run)
    if prepared.model is not None:
        _check_stand_in(prepared.model, run)
    return prepared


def _check_stand_in(model: keras.Model, run: RunInputs) -> None:
    """Checks that a model that a step will return can be trained on the data, and built again from a checkpoint."""
    if run.data is not None and run.compile is not None:
        _fitted(model, run.data, run.compile, run.recipe.seed)
    try:
        description = model_description(model)
    except (NotImplementedError, TypeError, ValueError) as error:
        raise RecipeError(
            f"the model {model.name!r} that this step returns does not describe its layers, so no checkpoint can hold "
            f"it: {reason_of(error)}. Give its classes a get_config()."
        ) from error
    with run.replicas.scope():
        rebuilt_model(description, [run.model, model])
