"""Builds or loads the model of a run: a built-in model, a `.keras` file (safe mode), or a factory's model."""

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
from keras import layers

from prunekit.anatomy.files import model_files
from prunekit.anatomy.files.archives import FileRefused
from prunekit.recipe.settings.sources import IMAGENET, ModelSource
from prunekit.recipe.text.factories import call_factory
from prunekit.recipe.text.loader import RecipeError


def digits_cnn() -> keras.Model:
    """Returns a network for 8x8 images in 10 classes: two convolutions, two dense layers, 38,282 weights."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1), name="image"),
            layers.Conv2D(16, 3, padding="same", activation="relu", name="conv_1"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(name="pool"),
            layers.Flatten(name="flatten"),
            layers.Dense(64, activation="relu", name="fc"),
            layers.Dense(10, name="logits"),
            layers.Softmax(name="probabilities"),
        ],
        name="digits_cnn",
    )


def fashion_mlp() -> keras.Model:
    """Returns the 300-100 perceptron of LeCun et al. 1998 for 28x28 images in 10 classes: 266,610 weights."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="image"),
            layers.Flatten(name="flatten"),
            layers.Dense(300, activation="relu", name="fc_1"),
            layers.Dense(100, activation="relu", name="fc_2"),
            layers.Dense(10, name="logits"),
            layers.Softmax(name="probabilities"),
        ],
        name="fashion_mlp",
    )


def fashion_cnn() -> keras.Model:
    """Returns a network for 28x28 images: two convolutions, two dense layers, 10 classes, 421,642 weights."""
    return keras.Sequential(
        [
            keras.Input((28, 28, 1), name="image"),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_1"),
            layers.MaxPooling2D(name="pool_1"),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(name="pool_2"),
            layers.Flatten(name="flatten"),
            layers.Dense(128, activation="relu", name="fc"),
            layers.Dense(10, name="logits"),
            layers.Softmax(name="probabilities"),
        ],
        name="fashion_cnn",
    )


def diabetes_mlp() -> keras.Model:
    """Returns a perceptron for the 10 measurements of the diabetes data: 2,817 weights, one output in its unit."""
    return keras.Sequential(
        [
            keras.Input((10,), name="measurements"),
            layers.Dense(64, activation="relu", name="fc_1"),
            layers.Dense(32, activation="relu", name="fc_2"),
            layers.Dense(1, name="standardised"),
            # Mean and standard deviation of the target in the training part.
            layers.Rescaling(77.0, offset=152.0, name="progression"),
        ],
        name="diabetes_mlp",
    )


MODELS: dict[str, Callable[[], keras.Model]] = {
    "digits-cnn": digits_cnn,
    "fashion-mlp": fashion_mlp,
    "fashion-cnn": fashion_cnn,
    "diabetes-mlp": diabetes_mlp,
}


def build_model(source: ModelSource, seed: int) -> keras.Model:
    """Returns the model that a recipe names; sets Keras's random seed to `seed` first.

    Raises:
        RecipeError: The file is missing, damaged or unsafe; the application cannot be built with these arguments, or
            its weights cannot be downloaded; the factory does not return a Keras model.
    """
    keras.utils.set_random_seed(seed)
    if source.file is not None:
        return load_model(source.file)
    if source.builtin is not None:
        return MODELS[source.builtin]()
    if source.application is not None:
        return _application(source)
    factory = str(source.factory)
    model = call_factory(factory, source.arguments, "model")
    if not isinstance(model, keras.Model):
        raise RecipeError(
            f"the model factory {factory!r} returns a Keras 3 model. Received: {type(model).__module__}."
            f"{type(model).__qualname__}."
        )
    return model


def _application(source: ModelSource) -> keras.Model:
    """Returns a model of `keras.applications`, with random weights, the weights of a file, or ImageNet weights."""
    name, arguments = str(source.application), dict(source.arguments)
    if source.input_shape is not None:
        arguments["input_shape"] = source.input_shape
    if source.classes is not None:
        arguments["classes"] = source.classes
    pretrained = source.weights == IMAGENET
    try:
        model = getattr(keras.applications, name)(weights=IMAGENET if pretrained else None, **arguments)
    except Exception as error:
        # Catches any exception: a download that fails raises a plain Exception, and each model refuses in its own way.
        what = f"{name} with its imagenet weights, which Keras downloads," if pretrained else name
        offline = pretrained and (isinstance(error, OSError) or "URL fetch failure" in str(error))
        remedy = " Without a network, write the path of a file as 'weights', or null." if offline else ""
        raise RecipeError(
            f"model: {what} could not be built: {' '.join(str(error).split()).rstrip('.')}.{remedy}"
        ) from error
    if source.weights_file is not None:
        load_weights(model, source.weights_file)
    return model


def source_notes(source: ModelSource) -> list[str]:
    """Returns notes for the plan: what building the model needs besides the recipe."""
    if source.weights != IMAGENET:
        return []
    return [f"Keras downloads the imagenet weights of {source.application} once, and keeps them in its cache folder."]


def check_model_file(path: str | os.PathLike[str], like: Iterable[keras.Model] = ()) -> None:
    """Checks that `path` is a `.keras` file that is safe to open.

    Args:
        path: The file.
        like: As for `load_model`.

    Raises:
        RecipeError: The file is missing, has another extension, or is damaged or unsafe.
    """
    with _reading(like):
        model_files.check_model_file(path)


def load_model(path: str | os.PathLike[str], like: Iterable[keras.Model] = ()) -> keras.Model:
    """Returns the model in a `.keras` file, read in safe mode: no code in the file is run.

    Args:
        path: The file.
        like: Models whose classes of layers the file may use, although they are not registered.

    Raises:
        RecipeError: The file is missing, damaged or unsafe, or needs classes that are not registered.
    """
    with _reading(like):
        return model_files.load_model(path)


def model_description(model: keras.Model) -> dict[str, Any]:
    """Returns the architecture and the compile configuration of a model as JSON values, for `rebuilt_model`.

    Raises:
        NotImplementedError, TypeError, ValueError: The model or a layer does not describe itself.
    """
    found = keras.saving.serialize_keras_object(model)
    found.pop("compile_config", None)
    return {"model": found, "compile": model.get_compile_config()}


def rebuilt_model(description: Mapping[str, Any], like: Iterable[keras.Model] = ()) -> keras.Model:
    """Returns a model of the described architecture with new weights, compiled; its optimizer is not built.

    Args:
        description: Result of `model_description`.
        like: Models whose classes of layers the model may use, although they are not registered.

    Raises:
        RecipeError: The description holds code, or needs classes that are not registered.
    """
    with _reading(like):
        model_files.check_config(json.dumps(description), "the description of the model")
        model = keras.saving.deserialize_keras_object(description["model"])
        if description["compile"]:
            # Not `compile_from_config`, which builds the optimizer: the described model's optimizer may not be built.
            model.compile(**keras.saving.deserialize_keras_object(description["compile"]))
    return model


def load_weights(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Loads the weights in a `.keras`, `.weights.h5` or `.h5` file into `model`.

    Raises:
        RecipeError: The file is missing, damaged or unsafe, or holds the weights of another model.
    """
    with _reading([model]):
        model_files.load_weights(model, path)


@contextlib.contextmanager
def _reading(like: Iterable[keras.Model]) -> Iterator[None]:
    """Lets files use the classes of layers of these models, and turns refusals into `RecipeError`s."""
    found = [type(layer) for model in like for layer in (model, *model._flatten_layers())]
    classes = {one.__name__: one for one in found if not one.__module__.startswith("keras.")}
    try:
        with keras.saving.CustomObjectScope(classes):
            yield
    except FileRefused as error:
        raise RecipeError(str(error)) from error
