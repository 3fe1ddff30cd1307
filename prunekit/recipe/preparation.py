"""Checks a recipe and resolves its model, data and steps before any weight changes."""

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.targets import Skipped, Target
from prunekit.core import backend
from prunekit.recipe import data as data_module
from prunekit.recipe.data import Data
from prunekit.recipe.fields import make, name_of
from prunekit.recipe.loader import RecipeError, load_recipe, require_trust
from prunekit.recipe.models import build_model, check_model_file
from prunekit.recipe.replicas import ALONE, Replicas, check_distribution
from prunekit.recipe.schema import Prune, Recipe, parse_pattern
from prunekit.recipe.sources import LOGIT_LOSSES, OPTIMIZERS, Compile, ModelSource
from prunekit.sparsity.patterns import Block
from prunekit.sparsity.schedules import OneShot, Schedule
from prunekit.sparsity.shorthands import ALLOCATIONS, CRITERIA, POLICIES, STATISTICS, sources_of
from prunekit.techniques.pruning.options import Options, PruningOptions
from prunekit.techniques.pruning.pruner import Pruner

# Maximum number of test examples on which an exported file is compared with the model.
_SAMPLES = 500


@dataclass(frozen=True, eq=False)
class Pruning:
    """A prune step, resolved for one model and one set of data.

    Attributes:
        schedule: Sparsity schedule in optimizer updates since the start of the step.
        options: Pruning options for `PruningCallback` and `Pruner`.
        targets: Weights that the step prunes.
        skipped: Weights that the step does not prune, with reasons.
        fractions: Final sparsity of each target; with a joint allocation, the final sparsity over all targets.
    """

    schedule: Schedule
    options: Options
    targets: tuple[Target, ...]
    skipped: tuple[Skipped, ...]
    fractions: tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Prepared:
    """A run that is ready to start.

    Attributes:
        recipe: Recipe, with the path of a model file given by the caller written into it.
        model: Built model with its initial weights.
        data: Data of the run; None if neither the caller nor the recipe gives data.
        compile: Compile settings for training and evaluation; None if neither the recipe has them nor data exist.
        steps_per_epoch: Optimizer updates per epoch; None without data.
        pruning: Resolved prune steps, by index of the step.
        given: "model" and "data", as far as they were given as Python objects, which the recipe does not contain.
        replicas: Replicas on which the model is built.
    """

    recipe: Recipe
    model: keras.Model
    data: Data | None
    compile: Compile | None
    steps_per_epoch: int | None
    pruning: Mapping[int, Pruning]
    given: tuple[str, ...]
    replicas: Replicas = ALONE


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
        raise RecipeError("this recipe names no model: give one with --model (or model=...).")
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
        parts = {"training": found.train, "validation": found.validation, "test": found.test}
        replicas.check(settings, {name: len(part[1]) for name, part in parts.items()})
    with replicas.scope():
        built = _model(recipe, model)
    _check_optimizer(settings)
    if found is not None and settings is not None:
        with replicas.scope():
            _check_fit(built, found, settings, recipe.seed)
    elif not built.built:
        raise RecipeError(
            f"the model {built.name!r} is not built, and there are no data to build it with: give it a "
            "keras.Input, or call it once."
        )
    steps_per_epoch = math.ceil(len(found.train[1]) / settings.batch_size) if found and settings else None
    _check_steps(recipe, built, found, settings)
    return Prepared(
        recipe=recipe,
        model=built,
        data=found,
        compile=settings,
        steps_per_epoch=steps_per_epoch,
        pruning=_all_pruning(recipe, built, steps_per_epoch),
        given=tuple(name for name, is_given in (("model", built is model), ("data", data is not None)) if is_given),
        replicas=replicas,
    )


def _model(recipe: Recipe, given: Any) -> keras.Model:
    if isinstance(given, keras.Model):
        return given
    if recipe.model is None:
        raise RecipeError("this recipe names no model: give one with --model (or model=...).")
    return build_model(recipe.model, recipe.seed)


def _data(recipe: Recipe, given: Any) -> Data | None:
    if given is not None:
        return data_module.given_data(given)
    return data_module.load_data(recipe.data, recipe.seed) if recipe.data is not None else None


# ---- model, data and compile settings --------------------------------------------------------------------------------


def optimizer_from(settings: Compile) -> keras.optimizers.Optimizer:
    """Returns the Keras optimizer that the compile settings describe.

    Raises:
        RecipeError: The installed Keras has no such optimizer, or the optimizer rejects the arguments.
    """
    kind = getattr(keras.optimizers, OPTIMIZERS[settings.optimizer.name], None)
    if kind is None:
        raise RecipeError(f"compile.optimizer: Keras {keras.__version__} has no {OPTIMIZERS[settings.optimizer.name]}.")
    arguments = dict(settings.optimizer.arguments)
    if settings.optimizer.learning_rate is not None:
        arguments["learning_rate"] = settings.optimizer.learning_rate
    try:
        return kind(**arguments)
    except (TypeError, ValueError) as error:
        raise RecipeError(f"compile.optimizer: {kind.__name__} refuses its arguments: {reason_of(error)}.") from error


def loss_from(settings: Compile) -> Any:
    """Returns the Keras loss that the compile settings name."""
    if settings.from_logits:
        return getattr(keras.losses, LOGIT_LOSSES[settings.loss])(from_logits=True)
    return keras.losses.get(settings.loss)


def accuracy_metric(settings: Compile | None) -> str | None:
    """Returns the metric used as "accuracy" in expectations and the report; None without an accuracy metric."""
    named = [name for name in settings.metrics if name.endswith("accuracy") and "top_k" not in name] if settings else []
    return "accuracy" if "accuracy" in named else next(iter(named), None)


def _check_optimizer(settings: Compile | None) -> None:
    if settings is not None:
        optimizer_from(settings)


def _check_fit(model: keras.Model, data: Data, settings: Compile, seed: int) -> None:
    """Checks that model, data and loss fit together; builds a model that is not built yet."""
    inputs, labels = data.train
    if not model.built:
        keras.utils.set_random_seed(seed)
    try:
        outputs = model(inputs[:2], training=False)
    except Exception as error:
        # Catch every exception: each backend has its own exception types for inputs that do not fit.
        raise RecipeError(
            f"the model {model.name!r} does not take the inputs of {data.name}, of shape {inputs.shape[1:]} and type "
            f"{inputs.dtype}: {reason_of(error)}."
        ) from error
    if not hasattr(outputs, "shape"):
        raise RecipeError(
            f"recipes train models with one output. Received: {model.name!r}, which returns a {type(outputs).__name__}."
        )
    given, made = labels.shape[1:], tuple(outputs.shape)[1:]
    if settings.loss == "sparse_categorical_crossentropy":
        _check_classes(model, data, given, made)
    elif given != made and not (made == (1,) and given == ()):
        hint = " For class numbers, write loss: sparse_categorical_crossentropy." if labels.dtype.kind in "iu" else ""
        raise RecipeError(
            f"with loss {settings.loss}, labels have the shape of the outputs of {model.name!r}, {made}. "
            f"Received: labels of shape {given} from {data.name}.{hint}"
        )


def reason_of(error: BaseException) -> str:
    """Returns the line of an error's text that states the reason."""
    # Keras writes "Exception encountered when calling X.", a blank line and a bold escape before the reason. TensorFlow
    # writes the node and the Python frames that created the node.
    before = ("Exception encountered", "Graph execution error", "Detected at node", "File ")
    lines = [line.replace("\x1b[1m", "").replace("\x1b[0m", "").strip() for line in str(error).splitlines()]
    lines = [line for line in lines if line and not line.startswith(before)]
    return (lines or [type(error).__name__])[0].rstrip(".")


def _check_classes(model: keras.Model, data: Data, given: tuple[int, ...], made: tuple[int, ...]) -> None:
    if given not in (made[:-1], (*made[:-1], 1)) or not made:
        raise RecipeError(
            f"with loss sparse_categorical_crossentropy, labels are class numbers of shape {made[:-1]}, one for each "
            f"output of {model.name!r} (shape {made}). Received: labels of shape {given} from {data.name}. "
            "For one-hot labels, write loss: categorical_crossentropy."
        )
    for part, (_, labels) in {"training": data.train, "validation": data.validation, "test": data.test}.items():
        if labels.dtype.kind == "f" and not np.array_equal(labels, np.round(labels)):
            raise RecipeError(f"class numbers are whole. Received: fractions among the {part} labels of {data.name}.")
        low, high = int(labels.min()), int(labels.max())
        if low < 0 or high >= made[-1]:
            raise RecipeError(
                f"the model {model.name!r} has {made[-1]} outputs, so labels are 0 to {made[-1] - 1}. Received: "
                f"{part} labels from {low} to {high} from {data.name}."
            )


# ---- steps -----------------------------------------------------------------------------------------------------------


def _check_steps(recipe: Recipe, model: keras.Model, data: Data | None, settings: Compile | None) -> None:
    for index, step in enumerate(recipe.steps):
        if step.measures_accuracy and accuracy_metric(settings) is None:
            raise RecipeError(
                f"steps[{index}].expect: accuracy is not measured: add it to compile: {{metrics: [accuracy]}}."
            )
        if step.export is not None:
            for format in step.export.formats:
                if format != "keras":
                    _require_tensorflow(f"steps[{index}].export", f"the format {format}")
            try:
                export_samples(model, data, recipe.seed)
            except RecipeError as error:
                raise RecipeError(f"steps[{index}].export: {error}") from error


def _require_tensorflow(place: str, name: str) -> None:
    if not backend.on_tensorflow():
        raise RecipeError(
            f"{place}: {name} needs the TensorFlow backend. Received: {keras.backend.backend()}. Leave it out, or run "
            "with KERAS_BACKEND=tensorflow."
        )


def export_samples(model: keras.Model, data: Data | None, seed: int) -> tuple[Any, np.ndarray | None]:
    """Returns inputs (test data, else random) and labels or None, to compare an exported file with the model.

    Raises:
        RecipeError: There are no data, and the shape of the model's inputs is not fully known.
    """
    if data is not None:
        inputs, labels = data.test
        classes = labels.reshape(len(labels)) if labels.ndim == 2 and labels.shape[1] == 1 else labels
        whole = classes.dtype.kind in "iu" and classes.ndim == 1
        return inputs[:_SAMPLES], classes[:_SAMPLES] if whole else None
    random = np.random.default_rng(seed)

    def sample(tensor: Any) -> np.ndarray:
        if any(length is None for length in tensor.shape[1:]):
            raise RecipeError(
                f"without data, samples are drawn from the shape of the model's inputs, which leaves lengths open: "
                f"{tuple(tensor.shape)}. Name data in the recipe."
            )
        shape = (8, *tensor.shape[1:])
        kind = keras.backend.standardize_dtype(tensor.dtype)
        return random.normal(size=shape).astype(kind) if "float" in kind else random.integers(0, 2, shape).astype(kind)

    if not getattr(model, "inputs", None):
        raise RecipeError(
            f"without data, samples are drawn from the shape of the model's inputs, and {model.name!r} does not say "
            "it. Name data in the recipe."
        )
    # A Sequential model has no `input` before its first call, and a loaded model has not been called.
    return keras.tree.map_structure(
        sample, model.inputs[0] if isinstance(model, keras.Sequential) else model.input
    ), None


def _all_pruning(recipe: Recipe, model: keras.Model, steps_per_epoch: int | None) -> dict[int, Pruning]:
    found = {}
    for index, step in enumerate(recipe.steps):
        if step.prune is not None:
            for name in step.prune.needs:
                if "tensorflow" in STATISTICS[name].backends:
                    _require_tensorflow(f"steps[{index}].prune", f"the criterion {name_of(step.prune.criterion)}")
            try:
                found[index] = _pruning(step.prune, model, steps_per_epoch, recipe.seed)
            except (ValueError, TypeError) as error:
                raise RecipeError(f"steps[{index}].prune: {error}") from error
    return found


def _pruning(prune: Prune, model: keras.Model, steps_per_epoch: int | None, seed: int) -> Pruning:
    if prune.schedule is None or prune.epochs is None or steps_per_epoch is None:
        schedule: Schedule = OneShot(sparsity=prune.final_sparsity)
    else:
        # No offset: callback and recipe both count updates from the start of the step's `fit`.
        schedule = prune.schedule.resolve(steps_per_epoch)
        steps = prune.epochs * steps_per_epoch
        if schedule.landing_step > steps:
            raise ValueError(
                f"the schedule reaches {schedule.final_sparsity:g} at step {schedule.landing_step:,}, and the step "
                f"trains for {prune.epochs} epochs of {steps_per_epoch:,} updates, {steps:,} in all. Train longer, or "
                "let the schedule end earlier."
            )
    first = schedule.latest_update(0)
    if "training" in sources_of(prune.needs) and first is not None and schedule(first) > 0:
        raise ValueError(
            f"{name_of(prune.criterion)} looks at how updates moved the weights, and the schedule asks for sparsity "
            f"{schedule(first):g} before the first one. Let it begin later, or at sparsity 0."
        )
    pattern: Any = prune.pattern
    if prune.pooling is not None:
        inputs, outputs = parse_pattern(prune.pattern).numbers
        pattern = Block(inputs, outputs, pooling=prune.pooling)
    options: Options = {
        "criterion": make(CRITERIA, prune.criterion, seed),
        "pattern": pattern,
        "allocation": make(ALLOCATIONS, prune.allocation, seed),
        "policy": make(POLICIES, prune.policy, seed),
        "include": prune.include,
        "exclude": prune.exclude,
        "keep_one": prune.keep_one,
        "compat": prune.compat,
    }
    pruner = Pruner.detached(model, schedule, PruningOptions(**options), training=not prune.one_shot)
    fractions = tuple(pruner.fractions(pruner.schedule.final_sparsity))
    return Pruning(schedule, options, pruner.targets, tuple(pruner.skipped), fractions)
