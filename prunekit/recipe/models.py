"""The model of a run: built-in ones, `.keras` files read in safe mode, a factory."""

import hashlib
import os
import re
import zipfile
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from prunekit.recipe.factories import call_factory
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.schema import ModelSource
from prunekit.training.activation_store import array_digest


def digits_cnn() -> keras.Model:
    """A convolutional network for 8x8 images in 10 classes: two convolutions and two dense layers, 38,282 weights."""
    layers = keras.layers
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
    """The 300-100 perceptron of LeCun et al. 1998 for 28x28 images in 10 classes: 266,610 weights."""
    layers = keras.layers
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
    """Two convolutions of 32 and 64 filters and a dense layer of 128 for 28x28 images, 10 classes: 421,642 weights."""
    layers = keras.layers
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


MODELS: dict[str, Callable[[], keras.Model]] = {
    "digits-cnn": digits_cnn,
    "fashion-mlp": fashion_mlp,
    "fashion-cnn": fashion_cnn,
}


def build_model(source: ModelSource, seed: int) -> keras.Model:
    """The model that a recipe names; the random numbers it starts from are those of `seed`.

    Raises:
        RecipeError: The file is missing, damaged or unsafe; the factory returns something else.
    """
    keras.utils.set_random_seed(seed)
    if source.file is not None:
        return load_model(source.file)
    if source.builtin is not None:
        return MODELS[source.builtin]()
    factory = str(source.factory)
    model = call_factory(factory, source.arguments, "model")
    if not isinstance(model, keras.Model):
        raise RecipeError(
            f"the model factory {factory!r} returns a Keras 3 model. Received: {type(model).__module__}."
            f"{type(model).__qualname__}."
        )
    return model


def check_model_file(path: str | os.PathLike[str]) -> None:
    """Raises where `path` cannot be a `.keras` file; reads no more than its table of contents.

    Raises:
        RecipeError: It is missing, has another extension, or is no `.keras` archive.
    """
    path = os.fspath(path)
    if not path.endswith(".keras"):
        raise RecipeError(f"only .keras files are read (in safe mode). Received: {path}.")
    if not os.path.isfile(path):
        raise RecipeError(f"the model file {path} does not exist.")
    if not zipfile.is_zipfile(path):
        raise RecipeError(f"{path} is not a .keras file: it is damaged, or of another kind with that extension.")


def load_model(path: str | os.PathLike[str]) -> keras.Model:
    """The model in a `.keras` file, read in safe mode: no code in the file is run.

    Raises:
        RecipeError: It is missing, damaged, unsafe, or needs classes that are not registered.
    """
    check_model_file(path)
    path = os.fspath(path)
    try:
        return keras.models.load_model(path, safe_mode=True)
    except (
        ValueError,
        TypeError,
        KeyError,
        IndexError,
        AttributeError,
        OSError,
        EOFError,
        NotImplementedError,
        zipfile.BadZipFile,
    ) as error:
        raise RecipeError(f"{path} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)
    if "safe_mode" in text or "unsafe" in text.lower():
        return (
            "it holds Python code (a Lambda layer), which safe mode does not run. If you trust it, build the model in "
            "a factory instead: model: {factory: package.module:function}."
        )
    unknown = re.search(r"Could not locate (?:class|function) '([^']+)'", text)
    if unknown is not None:
        return (
            f"it needs {unknown[1]}, which is not registered here. Build the model in a factory instead: "
            "model: {factory: package.module:function}."
        )
    line = (text.strip() or type(error).__name__).splitlines()[0].rstrip(".")
    return f"the file is damaged or not a Keras 3 model: {line}."


def weight_arrays(model: Any) -> dict[str, np.ndarray]:
    """Every weight of a model as a NumPy array, by its readable name, in the order of its layers."""
    from prunekit.anatomy.targets import weights_in

    return {weight.name: keras.ops.convert_to_numpy(weight.variable) for weight in weights_in(model)}


def model_digest(model: Any) -> str:
    """SHA-256 over all weights: their names, types, shapes and bytes."""
    total = hashlib.sha256()
    for name, array in weight_arrays(model).items():
        total.update(f"{name} {array_digest(array)}\n".encode())
    return total.hexdigest()
