"""Cached prefixes: results are those of the whole model, and what cannot be kept is refused."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers
from prefix_models import CASES, built, data, frozen, same

import prunekit as pk


def trained(model, x, y, weights, *, shuffle=False, **options):
    """The history of two epochs of `fit`; the order of the data is the same each time."""
    keras.utils.set_random_seed(11)
    loss = keras.tree.map_structure(lambda _: "mse", y)
    # Tracing takes most of a test's time; in float32 it is part of the comparison.
    eagerly = keras.config.floatx() == "float64"
    model.compile(keras.optimizers.Adam(0.01), loss, jit_compile=False, run_eagerly=eagerly)
    if isinstance(y, dict):
        weights = None
    options |= {"epochs": 2, "batch_size": 16, "verbose": 0, "shuffle": shuffle}
    return model.fit(x, y, sample_weight=weights, **options).history


# ---------------------------------------------------------------- results are those of the whole model


@pytest.mark.parametrize("name", ["convolutional", "two_ends", "masked_inside"])
def test_outputs_from_the_activations_are_those_of_the_whole_model_to_the_bit(name):
    model = built(name)
    x, _, _ = data(model)
    prefix = pk.loops.CachedPrefix(model, batch_size=32)
    whole = model.predict(x, verbose=0)
    assert same(whole, prefix.upper.predict(prefix.activations(x), verbose=0))
    assert same(whole, model.predict(x, verbose=0)), "the model itself still works"


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", CASES)
def test_training_from_the_activations_ends_in_the_weights_of_the_whole_training_to_the_bit(name, precision):
    whole = built(name)
    x, y, weights = data(whole)
    figures = trained(whole, x, y, weights)
    model = built(name)
    start = model.get_weights()
    prefix = pk.loops.CachedPrefix(model, batch_size=16)
    assert trained(prefix.upper, prefix.activations(x), y, weights) == figures
    assert not same(start, model.get_weights())
    assert same(whole.get_weights(), model.get_weights())


@pytest.mark.parametrize("name", ["convolutional", "nested"])
def test_in_a_shuffled_order_only_last_bits_may_differ(name, precision):
    whole, model = built(name), built(name)
    x, y, weights = data(whole)
    trained(whole, x, y, weights, shuffle=True)
    prefix = pk.loops.CachedPrefix(model)
    trained(prefix.upper, prefix.activations(x), y, weights, shuffle=True)
    # Kernels compute the last numbers of a batch one by one, and tanh then rounds in another way.
    for one, other in zip(whole.get_weights(), model.get_weights(), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3 if precision == "float32" else 1e-10, atol=1e-6)


def test_the_activations_are_those_of_arithmetic_on_paper(precision):
    model = built("perceptron")
    x, _, _ = data(model)
    kernel, bias = (variable.numpy() for variable in model.get_layer("hidden").weights)
    found = pk.loops.CachedPrefix(model).activations(x)
    assert found.dtype == precision
    # Relative to the summands: a sum near zero has few correct digits.
    summands = np.abs(x) @ np.abs(kernel) + np.abs(bias)
    error = np.abs(found - np.maximum(x @ kernel + bias, 0)) / summands
    assert error.max() <= (1e-6 if precision == "float32" else 1e-14)


def test_how_examples_are_grouped_changes_last_bits_at_most():
    model = built("convolutional")
    x, _, _ = data(model)
    found = [pk.loops.CachedPrefix(model, batch_size=size).activations(x) for size in (1, 7, 16, 1000)]
    for other in found[1:]:
        np.testing.assert_allclose(found[0], other, rtol=1e-5, atol=1e-6)


def test_pruning_above_the_boundary_chooses_the_masks_of_the_whole_training():
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.7, end_step=10, frequency=2)
    weights = {}
    for way in ("whole", "cached"):
        model = built("perceptron")
        x, y, _ = data(model)
        callback = pk.PruningCallback(schedule, include=["middle", "logits"], allocation="uniform")
        if way == "whole":
            trained(model, x, y, None, callbacks=[callback])
        else:
            prefix = pk.loops.CachedPrefix(model, batch_size=16)
            trained(prefix.upper, prefix.activations(x), y, None, callbacks=[callback])
        weights[way] = callback.pruner.masks | dict(enumerate(model.get_weights()))
    assert weights["whole"].keys() == weights["cached"].keys() >= {"middle/kernel", "logits/kernel"}
    assert same(list(weights["whole"].values()), list(weights["cached"].values()))


def test_names_of_pruned_weights_in_nested_models_are_those_of_the_whole_model():
    model = built("nested")
    prefix = pk.loops.CachedPrefix(model)
    above = pk.prune(prefix.upper, 0.5, allocation="uniform").targets
    assert set(above) == {"backbone/core/two/kernel", "backbone/three/kernel", "logits/kernel"}
    assert set(above) < {weight.name for weight in pk.inspect(model).weights}
    assert [variable.path for variable in prefix.upper.trainable_variables] == [
        variable.path for variable in model.trainable_variables
    ]


def test_a_tape_loop_runs_on_the_upper_part():
    whole, figures = built("perceptron"), {}
    x, y, weights = data(whole)
    loop = pk.loops.TapeLoop(whole, keras.optimizers.SGD(0.1), "mse")
    figures["whole"] = loop.fit(x, y, epochs=2, batch_size=16, shuffle=False, sample_weight=weights).history
    model = built("perceptron")
    prefix = pk.loops.CachedPrefix(model, batch_size=16)
    loop = pk.loops.TapeLoop(prefix.upper, keras.optimizers.SGD(0.1), "mse")
    cached = prefix.activations(x)
    figures["cached"] = loop.fit(cached, y, epochs=2, batch_size=16, shuffle=False, sample_weight=weights).history
    assert figures["whole"] == figures["cached"]
    assert same(whole.get_weights(), model.get_weights())


def test_gradients_of_single_examples_and_signals_are_those_of_the_whole_model(precision):
    model = built("convolutional")
    x, y, _ = data(model, 6)
    prefix = pk.loops.CachedPrefix(model)
    activations = prefix.activations(x)
    whole = pk.gradients.per_example(model, "mse", x, y)
    for one, other in zip(whole, pk.gradients.per_example(prefix.upper, "mse", activations, y), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)
    loss = keras.losses.get("mse")
    rows = {row.layer: row for row in pk.initializers.signal_report(model, x, y=y, loss=loss, training=False).layers}
    last = pk.initializers.signal_report(prefix.upper, activations, y=y, loss=loss, training=False).layers[-1]
    assert (last.layer, last.std, last.gradient_norm) == ("logits", rows["logits"].std, rows["logits"].gradient_norm)


def test_calibrating_the_layers_above_needs_no_pass_through_those_below():
    model = built("perceptron")
    x, _, _ = data(model)
    below = model.get_layer("hidden").get_weights()
    prefix = pk.loops.CachedPrefix(model)
    pk.initializers.reinitialize(prefix.upper, pk.initializers.LSUV(prefix.activations(x), seed=0))
    assert same(below, model.get_layer("hidden").get_weights())
    assert np.std(model.predict(x, verbose=0)) == pytest.approx(1, rel=0.05)


@pytest.mark.parametrize("policy", ["mixed_float16", "mixed_bfloat16"])
def test_activations_in_half_precision_are_kept_as_they_are(policy, tmp_path):
    keras.config.set_dtype_policy(policy)
    try:
        whole = built("perceptron")
        x, y, weights = data(whole)
        figures = trained(whole, x, y, weights)
        model = built("perceptron")
        prefix = pk.loops.CachedPrefix(model, directory=tmp_path, batch_size=16)
        activations = prefix.activations(x)
        assert activations.dtype.name == policy.removeprefix("mixed_")
        assert same(pk.loops.CachedPrefix(model, batch_size=16).activations(x), activations)
        assert same(pk.loops.CachedPrefix(model, directory=tmp_path, batch_size=16).activations(x), activations)
        assert trained(prefix.upper, activations, y, weights) == figures
        assert same(whole.get_weights(), model.get_weights())
    finally:
        keras.config.set_dtype_policy("float32")


# ---------------------------------------------------------------- datasets


def test_a_dataset_of_batches_becomes_one_of_activations_with_all_that_was_beside_the_inputs():
    model = built("residual")
    x, y, weights = data(model)
    batches = tf.data.Dataset.from_tensor_slices((x, y, weights)).batch(16)
    passes = []
    batches = batches.map(lambda *parts: (tf.py_function(lambda: passes.append(1), [], []), parts)[1])
    whole = built("residual")
    whole.compile("adam", "mse")
    expected = whole.fit(batches, epochs=2, verbose=0, shuffle=False).history
    passes.clear()
    prefix = pk.loops.CachedPrefix(model)
    cached = prefix.activations(batches, key="train")
    assert [len(labels) for _, labels, _ in cached] == [16, 16, 16, 16, 6]
    prefix.upper.compile("adam", "mse")
    assert (
        prefix.upper.fit(prefix.activations(batches, key="train"), epochs=2, verbose=0, shuffle=False).history
        == expected
    )
    assert same(whole.get_weights(), model.get_weights())
    assert prefix.computed == 1 and len(passes) <= 5
    alone = prefix.activations(tf.data.Dataset.from_tensor_slices(x).batch(16), key="inputs")
    assert same(next(iter(alone)), [part[:16] for part in prefix.activations(x)])


def test_datasets_that_cannot_be_kept_are_refused():
    prefix = pk.loops.CachedPrefix(built("perceptron"))
    x, _, _ = data(prefix.model)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(8)
    with pytest.raises(ValueError, match="needs a key.*key='train'"):
        prefix.activations(dataset)
    with pytest.raises(ValueError, match="infinite"):
        prefix.activations(dataset.repeat(), key="train")
    with pytest.raises(ValueError, match="an empty data set"):
        prefix.activations(dataset.take(0), key="none")
    strings = tf.data.Dataset.from_tensor_slices((x, [b"label"] * len(x))).batch(8)
    with pytest.raises(ValueError, match="Only numeric arrays"):
        prefix.activations(strings, key="strings")


# ---------------------------------------------------------------- refusals


class TwiceInTraining(layers.Layer):
    def call(self, x, training=False):
        return x * 2 if training else x


class Counting(layers.Layer):
    def build(self, shape):
        self.count = self.add_weight(shape=(), initializer="zeros", trainable=False)

    def call(self, x):
        self.count.assign_add(1.0)
        return x


class AddingLoss(layers.Layer):
    def call(self, x):
        self.add_loss(keras.ops.sum(x))
        return x


@pytest.mark.parametrize(
    ("layer", "reason"),
    [(TwiceInTraining, "outputs differ in training"), (Counting, "changes .*count"), (AddingLoss, "adds losses")],
)
def test_layers_of_the_users_own_that_act_in_training_are_found_before_anything_is_kept(layer, reason):
    dense = frozen(layers.Dense(4))
    model = keras.Sequential([keras.Input((3,)), dense, layer(), layers.Dense(2)])
    prefix = pk.loops.CachedPrefix(model)
    before = model.get_weights()
    for _ in range(2):
        with pytest.raises(ValueError, match=reason):
            prefix.activations(np.ones((5, 3), "float32"))
    assert same(before, model.get_weights())
    assert pk.loops.CachedPrefix(model, dense.name).activations(np.ones((5, 3), "float32")).shape == (5, 4)


class Unwritten(layers.Layer):
    def call(self, x):
        return x

    def get_config(self):
        raise NotImplementedError("Unwritten has no get_config.")


def test_layers_without_a_configuration_are_kept_in_memory_only(tmp_path):
    model = keras.Sequential([keras.Input((3,)), frozen(layers.Dense(4)), Unwritten(), layers.Dense(2)])
    x = np.ones((5, 3), "float32")
    prefix = pk.loops.CachedPrefix(model)
    assert prefix.activations(x) is prefix.activations(x)
    with pytest.raises(ValueError, match="Unwritten has no get_config. Give the layer a `get_config`, or leave"):
        pk.loops.CachedPrefix(model, directory=tmp_path).activations(x)


def test_arguments_of_the_wrong_kind_get_one_clear_line():
    model = built("perceptron")
    with pytest.raises(ValueError, match="limit must be (at least 1|an int). Received: limit="):
        pk.loops.CachedPrefix(model, limit=0)
    with pytest.raises(TypeError, match="`boundary` takes a layer's name"):
        pk.loops.CachedPrefix(model, 3)
    prefix = pk.loops.CachedPrefix(model)
    with pytest.raises(ValueError, match="at least one"):
        prefix.activations(np.ones((0, 8)))
    with pytest.raises(TypeError, match="one row per example"):
        prefix.activations(np.float32(3))
    with pytest.raises(TypeError, match="one row per example"):
        prefix.activations(iter([1]))
    with pytest.raises(TypeError, match="`key` is a name"):
        prefix.activations(np.ones((2, 8)), key=3)
    with pytest.raises(ValueError, match="with 2 and 3"):
        pk.loops.CachedPrefix(built("two_ends")).activations({"a": np.ones((2, 8)), "b": np.ones((3, 3))})


def test_float64_activations_need_keras_in_float64():
    model = keras.Sequential(
        [keras.Input((3,), dtype="float64"), frozen(layers.Dense(2, dtype="float64")), layers.Dense(2, dtype="float64")]
    )
    with pytest.raises(ValueError, match="float64 activations would lose digits"):
        pk.loops.CachedPrefix(model)


def test_activations_without_an_axis_for_examples_are_refused():
    inputs = keras.Input((3,))
    x = layers.Lambda(lambda x: keras.ops.sum(x, 0, keepdims=True))(frozen(layers.Dense(2))(inputs))
    prefix = pk.loops.CachedPrefix(keras.Model(inputs, layers.Dense(2)(x)))
    with pytest.raises(ValueError, match="one row per example. Received: shape .1, 2. for 5 examples"):
        prefix.activations(np.ones((5, 3)))


@pytest.mark.parametrize("strange", [np.nan, np.inf])
def test_activations_that_are_not_finite_are_kept_as_the_model_computes_them(strange):
    frozen = keras.layers.Dense(3, name="frozen", trainable=False)
    model = keras.Sequential([keras.Input((4,)), frozen, keras.layers.Dense(2, name="top")])
    x = np.ones((6, 4), "float32")
    x[0, 0] = strange
    np.testing.assert_array_equal(pk.loops.CachedPrefix(model).activations(x), frozen(x))


def test_infinite_activations_do_not_hide_a_layer_that_acts_in_training():
    class Doubles(keras.layers.Layer):
        def call(self, inputs, training=False):
            return inputs * (2.0 if training else 1.0)

    frozen = keras.layers.Dense(3, name="frozen", trainable=False)
    model = keras.Sequential([keras.Input((4,)), frozen, Doubles(name="doubles"), keras.layers.Dense(2, name="top")])
    x = np.ones((6, 4), "float32")
    x[0, 0] = np.inf
    with pytest.raises(ValueError, match="its outputs differ in training"):
        pk.loops.CachedPrefix(model, "doubles").activations(x)
