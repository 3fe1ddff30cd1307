"""A simulation computes what the model does wherever it rounds nothing, also in training, and leaves no trace."""

import contextlib

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from backends import BACKEND, tensorflow_only
from keras import layers as L, ops
from simulated_models import Passing, Rounding, arrays, assert_close, eighths, made, outputs_of, quarters

from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rounding.simulation import simulating

pytestmark = pytest.mark.every_backend
# Every kind of layer with a state, and models with several outputs, nested and subclassed ones.
TRAINED = (
    "separable mobilenetv2 transformer_encoder nested multi_output subclassed_model lstm_stack two_towers "
    "grouped transposed mlp efficientnet_v2"
).split()


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_outputs_without_rounding_are_the_models_own(name):
    model, inputs = made(name)
    placement, passing = place(model), Passing()
    expected = outputs_of(model, inputs)
    with simulating(placement, passing):
        found = outputs_of(model, inputs)
    # Batch normalizations are folded.
    assert_close(found, expected, 5e-6)
    written = {one.name for one in placement.ranges}
    assert passing.seen.keys() - {"the sigmoid of silu", "constant"} == written


# Operations that kernels compute in other ways than Keras.
REWRITTEN = {
    "negative": ops.negative,
    "square": ops.square,
    "half": lambda y: y / 2,
    "by an array": lambda y: y / np.linspace(1, 2, 4, dtype="float32"),
    "average": lambda y: L.Average()([y, y * 0.5, ops.abs(y)]),
    "hard sigmoid": L.Activation("hard_sigmoid"),
    "hard sigmoid in a layer": L.Dense(3, activation="hard_sigmoid"),
}


@pytest.mark.parametrize("name", REWRITTEN)
def test_operations_that_kernels_compute_in_another_way_have_the_same_results(name):
    x = keras.Input((4,), name="x")
    model = randomize(keras.Model(x, REWRITTEN[name](x)))
    inputs = np.random.default_rng(0).normal(size=(16, 4)).astype("float32") * 3
    placement, passing = place(model), Passing()
    with simulating(placement, passing):
        found = outputs_of(model, inputs)
    assert_close(found, outputs_of(model, inputs), 1e-6)
    assert placement.skipped == []
    assert ("constant" in passing.seen) is (name in ("half", "by an array", "average"))


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", TRAINED)
def test_a_training_step_without_rounding_is_the_models_own(name):
    """Gradients, moving statistics and random seeds."""

    def trained(simulated):
        model, inputs = made(name)
        outputs = model(keras.tree.map_structure(ops.convert_to_tensor, inputs), training=False)
        labels = keras.tree.map_structure(lambda one: np.zeros(one.shape, "float32"), outputs)
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=BACKEND == "jax")
        keras.utils.set_random_seed(1)
        if simulated:
            with simulating(place(model), Passing()):
                loss = model.train_on_batch(inputs, labels)
        else:
            loss = model.train_on_batch(inputs, labels)
        return [np.asarray(loss, "float32")], arrays(model.variables)

    loss, variables = trained(simulated=True)
    expected_loss, expected = trained(simulated=False)
    assert_close(loss, expected_loss, 1e-4)
    assert_close(variables, expected, 1e-3)


def test_training_steps_advance_the_random_seeds_as_without_a_simulation():
    """Exactly: `assert_close` compares the counter of an array with its seed, which may have many digits."""

    def seeds(simulated):
        keras.utils.set_random_seed(0)
        x = keras.Input((4, 3))
        y = L.LSTM(5, dropout=0.5, seed=1, name="lstm")(x)
        y = L.Dense(4, name="hidden")(L.Dropout(0.5, seed=2, name="dropout")(y))
        model = keras.Model(x, L.GaussianNoise(0.1, seed=3, name="noise")(y))
        model.compile(keras.optimizers.SGD(0.1), "mse", jit_compile=BACKEND == "jax")
        rng = np.random.default_rng(0)
        data = rng.normal(size=(12, 4, 3)).astype("float32"), np.zeros((12, 4), "float32")
        with simulating(place(model), Passing()) if simulated else contextlib.nullcontext():
            model.fit(*data, batch_size=4, epochs=2, verbose=0, shuffle=False)
        found = [one for one in model.variables if "int" in keras.backend.standardize_dtype(one.dtype)]
        return [ops.convert_to_numpy(one).tolist() for one in found]

    expected = seeds(simulated=False)
    assert [seed for seed, _ in expected] == [1, 2, 3] and all(count >= 6 for _, count in expected)
    assert seeds(simulated=True) == expected


def test_leaving_restores_every_layer():
    model, inputs = made("conv1d")
    layers = model._flatten_layers()
    before = [dict(vars(layer)) for layer in layers]
    stopping, count = Passing(), 0

    def stop(value, weight):
        nonlocal count
        count += 1
        if count == 3:
            raise RuntimeError("stopped")
        return value

    stopping.weight = stop
    with pytest.raises(Exception, match="stopped"), simulating(place(model), stopping):
        model(ops.convert_to_tensor(inputs), training=True)
    for layer, attributes in zip(layers, before, strict=True):
        assert vars(layer).keys() == attributes.keys()
        assert all(value is attributes[name] for name, value in vars(layer).items() if name != "_called")


def test_functions_that_were_traced_outside_are_traced_again_inside_and_kept():
    x = keras.Input((5,), name="x")
    model = keras.Model(x, L.Dense(2, name="dense")(x))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    inputs = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    labels = np.zeros((4, 2), "float32")

    def results():
        history = model.fit(inputs, labels, verbose=0, shuffle=False).history["loss"][0]
        return np.array(
            [history, model.evaluate(inputs, labels, verbose=0), np.square(model.predict(inputs, verbose=0)).mean()]
        )

    plain, functions = results(), [model.train_function, model.test_function, model.predict_function]
    with simulating(place(model), Rounding()):
        rounded = results()
    again = results()
    kernel = eighths(ops.convert_to_numpy(model.layers[-1].kernel))
    expected = np.square(quarters(quarters(inputs) @ kernel)).mean()
    assert np.allclose(rounded, expected, rtol=1e-4) and not np.allclose(plain, expected, rtol=1e-4)
    assert np.allclose(again, plain, rtol=1e-6)
    assert all(
        one is other
        for one, other in zip(
            functions, [model.train_function, model.test_function, model.predict_function], strict=True
        )
    )


@pytest.mark.parametrize("policy", ["mixed_bfloat16", "mixed_float16", "bfloat16", "float64"])
def test_other_dtypes(policy):
    if policy == "float64" and BACKEND == "jax":
        pytest.skip("JAX takes float64 for float32")
    x = keras.Input((8, 8, 3))
    y = L.Conv2D(4, 3, use_bias=False, dtype=policy)(x)
    y = L.ReLU(dtype=policy)(L.BatchNormalization(dtype=policy)(y))
    model = randomize(keras.Model(x, L.Dense(2, dtype=policy)(L.GlobalAveragePooling2D(dtype=policy)(y))))
    inputs, passing = inputs_of(model), Passing()
    expected = outputs_of(model, inputs)
    with simulating(place(model), passing):
        found = model(ops.convert_to_tensor(inputs), training=False)
    assert keras.backend.standardize_dtype(found.dtype) == keras.DTypePolicy(policy).compute_dtype
    # Half precision rounds the folded weights differently.
    assert_close(arrays(found), expected, 3e-2 if "16" in policy else 1e-6)
    # Weights are rounded before a layer casts them.
    assert passing.dtypes == {keras.DTypePolicy(policy).variable_dtype}


@tensorflow_only
@pytest.mark.parametrize("compiled", [False, True], ids=["graph", "XLA"])
def test_functions_of_tensorflow(compiled):
    import tensorflow as tf

    model, inputs = made("mobilenetv2")
    with simulating(place(model), Rounding()):
        eager = arrays(model(tf.constant(inputs), training=False))
        traced = tf.function(lambda x: model(x, training=False), jit_compile=compiled, autograph=False)
        found = arrays(traced(tf.constant(inputs)))
    # A value at the middle of two grid values goes to either.
    assert np.mean(np.abs(found[0] - eager[0]) > 1e-5) < 0.05


def test_the_model_is_called_by_its_users_model():
    """An outer model that is not simulated gets the results, with its own `training`."""
    inner = keras.Sequential([keras.Input((3,)), L.Dense(2), L.Dropout(0.5)])
    outer = keras.Sequential([keras.Input((3,)), inner])
    x, passing = ops.ones((4, 3)), Passing()
    with simulating(place(inner), passing):
        assert_close(arrays(outer(x, training=False)), arrays(inner(x, training=False)), 0.0)
    assert len(next(iter(passing.seen.values()))) == 2


MASKED = {
    "a recurrent layer": lambda y: L.LSTM(2)(L.Dense(5)(y)),
    "a recurrent layer with a state": lambda y: L.LSTM(3)(L.Dense(5)(y), initial_state=[L.Dense(3)(y[:, 0])] * 2),
    "an activation": lambda y: L.LSTM(2)(L.Activation("silu")(y)),
    "a rescaling": lambda y: L.LSTM(2)(L.Rescaling(2.0, offset=0.5)(y)),
    "attention": lambda y: L.GlobalAveragePooling1D()(L.MultiHeadAttention(2, 3)(y, y)),
    "attention that drops": lambda y: L.MultiHeadAttention(2, 3, dropout=0.1)(y, y, use_causal_mask=True),
    "a softmax": lambda y: L.Softmax()(y[:, :, 0], mask=ops.greater(y[:, :, 1], 0)),
}


@pytest.mark.parametrize("name", MASKED)
def test_masks_reach_the_layers_behind(name):
    x = keras.Input((4,), dtype="int32")
    model = randomize(keras.Model(x, MASKED[name](L.Embedding(10, 3, mask_zero=True)(x))))
    tokens = np.array([[1, 2, 0, 0], [3, 4, 5, 0]], "int32")
    expected = outputs_of(model, tokens)
    with simulating(place(model), Passing()):
        assert_close(outputs_of(model, tokens), expected, 1e-6)


def test_losses_of_outputs_are_added_once():
    x = keras.Input((4, 3))
    y = L.Bidirectional(L.LSTM(4, activity_regularizer="l2"), name="both")(x)
    model = randomize(keras.Model(x, L.Dense(1, activity_regularizer="l2")(y)))
    model.compile(keras.optimizers.SGD(0.0), "mse")
    inputs, labels = inputs_of(model), np.zeros((3, 1), "float32")
    expected = model.train_on_batch(inputs, labels)
    with simulating(place(model), Passing()):
        found = model.train_on_batch(inputs, labels)
    assert np.isclose(float(np.asarray(found)), float(np.asarray(expected)), rtol=1e-5)


def test_further_arguments_of_a_subclassed_model_are_refused():
    class Scaled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(2)

        def call(self, x, temperature=1.0):
            return self.dense(x) * temperature

    model = Scaled()
    x = ops.ones((1, 3))
    expected = arrays(model(x))
    with simulating(place(model), Passing()):
        assert_close(arrays(model(x=x)), expected, 1e-6)
        with pytest.raises(ValueError, match="takes its inputs, `training` and `mask`. Received: temperature"):
            model(x, temperature=2.0)


def test_a_small_factor_in_half_precision_is_no_division_by_zero():
    x = keras.Input((5,))
    norm = L.BatchNormalization(dtype="mixed_float16")
    model = keras.Model(x, norm(L.Dense(3, dtype="mixed_float16")(x)))
    norm.gamma.assign([1e-8, 1.0, -1e-9])
    with simulating(place(model), Passing()):
        assert np.isfinite(arrays(model(ops.ones((4, 5)), training=True))[0]).all()
