"""Small models with random weights that tests quantize, their data and their outputs."""

import keras
import numpy as np
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import layers as L, ops

METHODS = ("nearest", "gptq")


def arrays_of(model) -> list[np.ndarray]:
    """Returns copies of all variables."""
    return [np.array(ops.convert_to_numpy(one)) for one in model.variables]


def assert_bit_identical(model, before):
    """Compares all variables with former values, bit by bit."""
    for one, former in zip(model.variables, before, strict=True):
        assert ops.convert_to_numpy(one).tobytes() == former.tobytes(), one.path


def made(name, examples=12):
    """Returns an architecture with random weights, and calibration data."""
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    data = inputs_of(model, examples=examples)
    return model, (data, None) if isinstance(data, list | tuple) else data


def pair():
    """Returns a model of two Dense layers with a ReLU between, with random weights."""
    x = keras.Input((6,), name="x")
    return randomize(keras.Model(x, L.Dense(3, name="head")(L.Dense(8, activation="relu", name="hidden")(x))))


def correlated(shape, examples=256, rank=4, seed=3):
    """Returns inputs whose features are combinations of a few numbers, with a little noise and a mean."""
    rng = np.random.default_rng(seed)
    size = int(np.prod(shape))
    values = rng.normal(size=(examples, rank)) @ rng.normal(size=(rank, size)) + 0.1 * rng.normal(size=(examples, size))
    return (values + rng.normal(size=size)).reshape(examples, *shape).astype("float32")


def outputs_of(model, data) -> np.ndarray:
    """Returns the model's output in inference."""
    return ops.convert_to_numpy(model(ops.convert_to_tensor(data), training=False))
