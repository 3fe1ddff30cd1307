"""The model of a run: built-in ones, `.keras` files read in safe mode, a factory."""

import contextlib
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np

from prunekit.anatomy import model_files
from prunekit.anatomy.archives import FileRefused
from prunekit.loops.activation_cache import array_digest
from prunekit.recipe.factories import call_factory
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.schema import ModelSource


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
    """Raises where `path` is no `.keras` file that may be opened.

    Raises:
        RecipeError: It is missing, has another extension, or is damaged or hostile.
    """
    with _as_recipe_errors():
        model_files.check_model_file(path)


def load_model(path: str | os.PathLike[str]) -> keras.Model:
    """The model in a `.keras` file, read in safe mode: no code in the file is run.

    Raises:
        RecipeError: It is missing, damaged, unsafe, or needs classes that are not registered.
    """
    with _as_recipe_errors():
        return model_files.load_model(path)


def load_weights(model: keras.Model, path: str | os.PathLike[str]) -> None:
    """Gives `model` the weights in a `.keras` file.

    Raises:
        RecipeError: It is missing, damaged or unsafe, or holds the weights of another model.
    """
    with _as_recipe_errors():
        model_files.load_weights(model, path)


@contextlib.contextmanager
def _as_recipe_errors() -> Iterator[None]:
    try:
        yield
    except FileRefused as error:
        raise RecipeError(str(error)) from error


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


def architecture_digest(model: Any) -> str | None:
    """SHA-256 over a model's configuration; None where it has none, as a class of the user's without `get_config`."""
    try:
        found = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return None
    # Automatic names depend on what the process built before, and cannot be told from others: all are numbered.
    names: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                names.setdefault(value["name"], len(names))
            # How it is compiled the recipe says; and addresses, by which Keras tells shared objects.
            left_out = ("compile_config", "shared_object_id")
            return {key: plain(item) for key, item in value.items() if key not in left_out}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return f"#{names[value]}" if isinstance(value, str) and value in names else value

    return hashlib.sha256(json.dumps(plain(found)).encode()).hexdigest()
