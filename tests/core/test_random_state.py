import json
import random

import keras
import numpy as np
import pytest
from backends import BACKEND
from networks import sequential

from prunekit.core.runtime.random_state import random_state, restore_random_state

pytestmark = pytest.mark.every_backend


def network():
    return sequential((8,), keras.layers.Dropout(0.5, seed=3), keras.layers.Dense(2), keras.layers.GaussianNoise(1.0))


def output(model, inputs):
    return keras.ops.convert_to_numpy(model(inputs, training=True))


def shuffled():
    """A weight after a `fit`, which depends on the order of the examples."""
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1, kernel_initializer="zeros")])
    model.compile(keras.optimizers.SGD(0.1), "mse")
    model.fit(np.arange(8.0)[:, None] / 8, np.arange(8.0) % 3, batch_size=1, verbose=0)
    return model.get_weights()[0].tolist()


def draws(model):
    ones = np.ones((2, 8), "float32")
    # TensorFlow's shuffle is one of its stateful operations.
    drawn = [
        None if BACKEND == "tensorflow" else shuffled(),
        random.random(),
        random.gauss(0, 1),
        np.random.normal(),
        np.random.permutation(9).tolist(),
    ]
    return [*drawn, keras.ops.convert_to_numpy(keras.random.normal((3,))).tolist(), output(model, ones).tolist()]


def test_generators_that_are_put_back_draw_the_same_again():
    keras.utils.set_random_seed(5)
    model = network()
    draws(model)
    state = json.loads(json.dumps(random_state(model)))
    first = draws(model)
    assert draws(model) != first
    keras.utils.set_random_seed(6)
    restore_random_state(model, state)
    assert draws(model) == first


def test_a_state_fits_another_copy_of_the_model():
    model, copy = network(), network()
    model(np.ones((2, 8), "float32"), training=True)
    copy.set_weights(model.get_weights())
    restore_random_state(copy, random_state(model))
    ones = np.ones((2, 8), "float32")
    np.testing.assert_array_equal(output(model, ones), output(copy, ones))


def test_weight_files_of_keras_leave_the_generators_of_layers_out(tmp_path):
    # Why they are saved beside a BackupAndRestore; where this changes, `random_state` may leave them out.
    model, copy = network(), network()
    model(np.ones((2, 8), "float32"), training=True)
    model.save_weights(tmp_path / "a.weights.h5")
    copy.load_weights(tmp_path / "a.weights.h5")
    assert random_state(copy)["layers"] != random_state(model)["layers"]
