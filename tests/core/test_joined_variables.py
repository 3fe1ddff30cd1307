"""Variables that are trained beside a model: neither model nor optimizer keep them, and the weights' updates stay."""

import keras
import numpy as np
import pytest
from backends import BACKEND, training_step
from keras import ops
from networks import dense_network

from prunekit.core.runtime.patching import shadowed
from prunekit.core.training.joined_variables import joined, trainer_for

pytestmark = pytest.mark.every_backend
X = np.random.default_rng(0).normal(size=(8, 4)).astype("float32")
Y = np.random.default_rng(1).normal(size=(8, 3)).astype("float32")


def network(optimizer=None):
    model = dense_network(4, seed=0, dense=3)
    model.compile(optimizer or keras.optimizers.SGD(0.1), "mse")
    return model


def gain(value=1.0):
    return keras.Variable(value, dtype="float32", name="gain")


def number(variable):
    return float(ops.convert_to_numpy(variable.value))


def sgd(**options):
    return keras.optimizers.SGD(0.5, **options)


def beside(model, variable):
    """A scope in which the variable is trained with the model."""
    return joined(model, [model.optimizer], [variable], trainer_for([model.optimizer], [variable], sgd))


def with_gain(model, variable):
    """A scope in which the model multiplies its outputs by the variable."""
    call = type(model).call.__get__(model)

    def scaled(*args, **kwargs):
        return call(*args, **kwargs) * ops.convert_to_tensor(variable.value)

    return shadowed(model, "call", scaled)


def train(model, variable, steps=3, *, keep=True):
    """Trains the model and, where `keep`, the variable, in the backend's own loop; returns the trainer."""
    trainer = trainer_for([model.optimizer], [variable], sgd)
    with with_gain(model, variable), joined(model, [model.optimizer], [variable] if keep else [], trainer):
        step = training_step(model, model.optimizer, keras.losses.MeanSquaredError())
        for _ in range(steps):
            step(ops.convert_to_tensor(X), ops.convert_to_tensor(Y))
    return trainer


def gradients(kernel, bias, factor):
    """NumPy's gradients of mean((factor * (x k + b) - y)^2): of kernel, bias and factor."""
    product = X @ kernel + bias
    slope = 2 * (factor * product - Y) / Y.size
    return factor * X.T @ slope, factor * slope.sum(axis=0), (slope * product).sum()


def test_the_variable_is_trained_as_numpy_trains_it():
    model, variable = network(), gain(0.7)
    kernel, bias, factor = *(np.array(value) for value in model.get_weights()), np.float32(0.7)
    train(model, variable)
    for _ in range(3):
        of_kernel, of_bias, of_factor = gradients(kernel, bias, factor)
        kernel, bias, factor = kernel - 0.1 * of_kernel, bias - 0.1 * of_bias, factor - 0.5 * of_factor
    np.testing.assert_allclose(model.get_weights()[0], kernel, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(model.get_weights()[1], bias, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(number(variable), factor, rtol=1e-5)


def test_it_stands_first_inside_and_is_nowhere_outside():
    model, variable = network(), gain()
    model.optimizer.build(model.trainable_variables)
    before = [id(one) for one in model.trainable_variables]
    attributes = set(vars(model)), set(vars(model.optimizer))
    with beside(model, variable):
        assert [id(one) for one in model.trainable_variables] == [id(variable), *before]
    assert [id(one) for one in model.trainable_variables] == before
    assert (set(vars(model)), set(vars(model.optimizer))) == attributes


def test_an_error_inside_gives_everything_back():
    model, variable = network(), gain()
    with (
        pytest.raises(KeyError),
        beside(model, variable),
    ):
        raise KeyError("stop")
    assert len(model.trainable_variables) == 2 and "apply" not in vars(model.optimizer)


def test_without_variables_nothing_is_changed():
    model = network()
    with joined(model, [model.optimizer], [], None):
        assert len(model.trainable_variables) == 2 and "apply" not in vars(model.optimizer)


@pytest.mark.parametrize("clip", [dict(global_clipnorm=0.01), dict(clipnorm=0.01), dict(clipvalue=0.001)], ids=str)
def test_the_optimizer_clips_as_if_the_variable_did_not_exist(clip):
    alone, beside = network(keras.optimizers.SGD(0.1, **clip)), network(keras.optimizers.SGD(0.1, **clip))
    # One step: in later ones the variable has another value.
    train(alone, gain(50.0), 1, keep=False)
    variable = gain(50.0)
    train(beside, variable, 1)
    for one, other in zip(alone.get_weights(), beside.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert number(variable) != 50.0


def test_the_optimizer_keeps_no_slot_for_it():
    model, variable = network(keras.optimizers.Adam(0.1)), gain()
    train(model, variable)
    other = network(keras.optimizers.Adam(0.1))
    other.optimizer.build(other.trainable_variables)
    assert [tuple(one.shape) for one in model.optimizer.variables] == [
        tuple(one.shape) for one in other.optimizer.variables
    ]


@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_loss_scale_changes_no_update_of_it(scale):
    optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1), initial_scale=scale)
    model, variable = network(optimizer), gain(0.7)
    step_model, plain = network(), gain(0.7)
    with with_gain(model, variable), beside(model, variable):
        model.train_on_batch(X, Y)
    train(step_model, plain, 1)
    np.testing.assert_allclose(number(variable), number(plain), rtol=1e-5)


def test_it_moves_as_often_as_the_weights_where_gradients_are_accumulated():
    model, variable = network(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2)), gain(0.7)
    values = []
    with with_gain(model, variable), beside(model, variable):
        step = training_step(model, model.optimizer, keras.losses.MeanSquaredError())
        for _ in range(4):
            step(ops.convert_to_tensor(X), ops.convert_to_tensor(Y))
            values.append(number(variable))
    assert values[0] == np.float32(0.7) and values[1] != values[0] and values[2] == values[1] and values[3] != values[2]


def test_a_step_that_does_not_list_it_leaves_it_as_it_is():
    if BACKEND == "jax":
        pytest.skip("a step on JAX lists all trainable variables of its model")
    model, variable = network(), gain(0.7)
    kernel = np.array(model.get_weights()[0])
    own = list(model.trainable_variables)
    with (
        with_gain(model, variable),
        beside(model, variable),
    ):
        model.optimizer.apply([ops.ones_like(one.value) for one in own], own)
    assert number(variable) == np.float32(0.7)
    np.testing.assert_allclose(model.get_weights()[0], kernel - 0.1, rtol=1e-6)


def test_lists_of_unequal_length_get_kerass_own_error():
    model, variable = network(), gain()
    with (
        beside(model, variable),
        pytest.raises(ValueError),
    ):
        model.optimizer.apply([ops.zeros((4, 3))], model.trainable_variables)


def test_files_that_are_saved_inside_hold_the_models_own_weights(tmp_path):
    model, variable = network(), gain()
    model.predict(X, verbose=0)
    with beside(model, variable):
        model.save(tmp_path / "model.keras")
        model.save_weights(tmp_path / "model.weights.h5")
        model.load_weights(tmp_path / "model.weights.h5")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    assert len(loaded.weights) == 2
    np.testing.assert_array_equal(loaded.predict(X, verbose=0), model.predict(X, verbose=0))
