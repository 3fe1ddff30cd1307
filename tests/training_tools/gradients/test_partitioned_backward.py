"""Gradients in parts, against one plain tape over the whole model."""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers, ops
from optimised_graphs import reads_that_race
from plain_tape import chain, in_one_go

import prunekit as pk

RNG = np.random.default_rng(5)
COMPILED = pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
LOSS = "sparse_categorical_crossentropy"


def cross_entropy(**options):
    return keras.losses.SparseCategoricalCrossentropy(dtype=keras.config.floatx(), **options)


def called(function, compiled):
    return tf.function(function, autograph=False) if compiled else function


def dense(gradients):
    return [None if one is None else tf.convert_to_tensor(one).numpy() for one in gradients]


def twins(build):
    """Two models with the same weights and the same random seeds."""
    made = []
    for _ in range(2):
        keras.utils.set_random_seed(3)
        made.append(build())
        rng = np.random.default_rng(4)
        for weight in made[-1].trainable_variables:
            weight.assign(weight + rng.normal(scale=0.1, size=weight.shape))
    return made


def branching(branches, extras=False):
    """Convolutions, batch normalisation and dropout in a trunk and in branches; with losses of layers and sharing."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, activation="relu", name="trunk")(inputs)
    x = layers.BatchNormalization(name="trunk_norm")(x)
    ends, shared = [], layers.Dense(4, name="shared")
    for number in range(branches):
        b = layers.Conv2D(4, 3, activation="tanh", name=f"conv_{number}")(x)
        b = layers.Dropout(0.4, name=f"drop_{number}")(layers.BatchNormalization(name=f"norm_{number}")(b))
        if extras:
            b = layers.Dense(4, activity_regularizer="l2", kernel_regularizer="l2", name=f"lossy_{number}")(shared(b))
        ends.append(layers.GlobalAveragePooling2D(name=f"end_{number}")(b + 0.5))
    x = layers.Dropout(0.3)(layers.Concatenate(name="joined")(ends))
    return keras.Model(inputs, layers.Dense(3, "softmax", name="scores")(x))


def images(examples=6):
    return RNG.normal(size=(examples, 6, 6, 3)).astype(keras.config.floatx()), RNG.integers(0, 3, examples)


# ---------------------------------------------------------------- the same as in one go


@COMPILED
def test_two_branches_give_the_very_bits_of_one_go_with_dropout_and_batch_statistics(precision, compiled):
    one, other = twins(lambda: branching(2))
    loss, (x, y) = cross_entropy(), images()
    whole = called(lambda x, y: in_one_go(one, loss, x, y), compiled)
    parts = called(lambda x, y: pk.gradients.in_parts(other, loss, x, y, ["end_0", "end_1"], training=True), compiled)
    for _ in range(3):
        value, expected = whole(x, y)
        found_value, found = parts(tf.constant(x), tf.constant(y))
        np.testing.assert_allclose(found_value, value, rtol=1e-6)
        for a, b in zip(found, expected, strict=True):
            assert a.dtype == precision
            np.testing.assert_array_equal(a, b)
        for a, b in zip(other.non_trainable_variables, one.non_trainable_variables, strict=True):
            np.testing.assert_array_equal(a.value, b.value)


BOUNDARIES = {
    "branches": [f"end_{number}" for number in range(4)],
    "one": "joined",
    "trunk and joined": ["trunk_norm", "joined"],
    "pieces": ["trunk", "trunk_norm", *[f"drop_{number}" for number in range(4)]],
    "output": ["scores"],
}


@pytest.mark.parametrize(
    ("name", "compiled"), [(name, False) for name in BOUNDARIES] + [("branches", True), ("pieces", True)]
)
@pytest.mark.short(cases=4)
def test_shared_layers_added_losses_and_trunks_are_right_whatever_the_boundary(precision, compiled, name):
    boundary = BOUNDARIES[name]
    one, other = twins(lambda: branching(4, extras=True))
    loss, (x, y) = cross_entropy(), images()
    value, expected = called(lambda x, y: in_one_go(one, loss, x, y), compiled)(x, y)
    found_value, found = called(
        lambda x, y: pk.gradients.in_parts(other, loss, x, y, boundary, training=True), compiled
    )(tf.constant(x), tf.constant(y))
    # Gradients of three and more uses are added up in another order.
    tolerance = {"rtol": 1e-5, "atol": 1e-6} if precision == "float32" else {"rtol": 1e-12, "atol": 1e-14}
    np.testing.assert_allclose(found_value, value, rtol=tolerance["rtol"])
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, **tolerance)
    for a, b in zip(other.non_trainable_variables, one.non_trainable_variables, strict=True):
        np.testing.assert_array_equal(a.value, b.value)


def test_no_update_overtakes_the_reading_of_its_weight_in_the_optimised_graph():
    """TensorFlow drops the order of the two where it takes single identities out: every third trace was wrong."""
    first, second, shared = keras.Input((8,)), keras.Input((8,)), layers.Dense(8, "tanh", name="shared")
    p = layers.Dense(4, name="p")(shared(first))
    q = layers.BatchNormalization(name="norm")(layers.Dense(4, name="q")(shared(second)))
    outputs = [layers.Dense(3, name="sum")(p + q), layers.Dense(3, "softmax", name="product")(p * q)]
    model, optimizer = keras.Model([first, second], outputs), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        _, gradients = pk.gradients.in_parts(model, ["mse", "mse"], x, [y, y], ["p", "norm"], training=True)
        optimizer.apply(gradients, model.trainable_variables)
        return gradients

    x = [tf.constant(RNG.normal(size=(14, 8)), "float32") for _ in range(2)]
    assert reads_that_race(step, x, tf.constant(RNG.normal(size=(14, 3)), "float32")) == []


def test_every_trace_of_a_step_has_the_same_gradients_although_it_updates_the_weights():
    """Every third trace was wrong where the second run read the weights again."""

    def build():
        first, second, shared = keras.Input((8,)), keras.Input((8,)), layers.Dense(8, "tanh", name="shared")
        p = layers.Dense(4, name="p")(shared(first))
        q = layers.BatchNormalization(name="norm")(layers.Dense(4, name="q")(shared(second)))
        return keras.Model([first, second], layers.Dense(3)(p * q))

    rng = np.random.default_rng(6)
    x, y = [tf.constant(rng.normal(size=(14, 8)), "float32") for _ in range(2)], tf.constant(rng.normal(size=(14, 3)))

    def update(compiled):
        keras.utils.set_random_seed(3)
        model, optimizer = build(), keras.optimizers.SGD(1.0)
        optimizer.build(model.trainable_variables)

        def step(x, y):
            _, gradients = pk.gradients.in_parts(model, "mse", x, y, ["p", "norm"], training=True)
            optimizer.apply(gradients, model.trainable_variables)
            return gradients

        return dense(called(step, compiled)(x, y))

    expected = update(False)
    for _ in range(8):
        for a, b in zip(update(True), expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-5)


def test_a_mask_may_pass_by_the_boundary(precision):
    inputs = keras.Input((5,), dtype="int32")
    table = layers.Embedding(9, 4, mask_zero=True, name="table")(inputs)
    x = layers.Add()([layers.MultiHeadAttention(2, 3)(table, table), table])
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.GRU(3)(x)))
    x, y = RNG.integers(0, 9, (6, 5)), RNG.integers(0, 3, 6)
    _, expected = in_one_go(model, cross_entropy(), x, y)
    _, found = pk.gradients.in_parts(model, cross_entropy(), x, y, "table", training=True)
    for a, b in zip(dense(found), dense(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("precision", ["float64"], indirect=True)
def test_gradients_are_finite_differences(precision):
    (model, _), (x, y), loss = twins(lambda: branching(3, extras=True)), images(), cross_entropy()
    _, found = pk.gradients.in_parts(model, loss, x, y, ["end_0", "end_1", "end_2"])
    for variable, gradient in zip(model.trainable_variables, found, strict=True):
        direction = RNG.normal(size=variable.shape)
        values = []
        for step in (1e-6, -2e-6):
            variable.assign_add(step * direction)
            values.append(float(loss(y, model(x)) + sum(model.losses)))
        variable.assign_add(1e-6 * direction)
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(float((gradient.numpy() * direction).sum()), abs=1e-7)


def attention():
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="table")(inputs)
    heads = []
    for number in range(2):
        seen = layers.MultiHeadAttention(2, 3, dropout=0.2, name=f"attention_{number}")(x, x)
        heads.append(layers.SimpleRNN(3, recurrent_dropout=0.2, name=f"rnn_{number}")(seen))
    return keras.Model(inputs, layers.Dense(3, "softmax")(layers.Add(name="sum")(heads)))


def several_ends():
    first, second = keras.Input((4,), name="first"), keras.Input((3,), name="second")
    twice = layers.Dense(3, "tanh", name="twice")
    left, right = twice(layers.Dense(3, name="left")(first)), twice(layers.Dense(3, name="right")(second))
    scores = {"sum": layers.Dense(3, "softmax", name="sum")(left + right), "right": layers.Softmax(name="soft")(right)}
    return keras.Model({"first": first, "second": second}, scores)


CASES = {
    "attention and masks": (attention, ["rnn_0", "rnn_1"], lambda rng: rng.integers(0, 9, (6, 5))),
    "a chain in pieces": (chain, ["link_0", "link_2"], lambda rng: rng.normal(size=(6, 4))),
    "calls of a shared layer, several inputs and outputs": (
        several_ends,
        [("twice", 0), ("twice", 1)],
        lambda rng: {"first": rng.normal(size=(6, 4)), "second": rng.normal(size=(6, 3))},
    ),
}


@COMPILED
@pytest.mark.parametrize("name", CASES)
def test_masks_sparse_gradients_chains_and_several_ends(name, precision, compiled):
    build, boundary, draw = CASES[name]
    (one, other), x, y = twins(build), draw(RNG), RNG.integers(0, 3, 6)
    x = {key: each.astype(precision) for key, each in x.items()} if isinstance(x, dict) else x
    x = keras.tree.map_structure(tf.constant, x if isinstance(x, dict) or x.dtype == "int64" else x.astype(precision))
    single = cross_entropy()
    several = isinstance(x, dict)
    loss, truth = ({"sum": single, "right": single}, {"sum": y, "right": y}) if several else (single, y)

    def total(y, prediction):
        return sum(single(y, each) for each in keras.tree.flatten(prediction))

    value, expected = called(lambda x: in_one_go(one, total, x, y), compiled)(x)
    found_value, found = called(
        lambda x: pk.gradients.in_parts(other, loss, x, truth, boundary, training=True), compiled
    )(x)
    tolerance = 1e-6 if precision == "float32" else 1e-14
    np.testing.assert_allclose(found_value, value, rtol=10 * tolerance)
    for a, b in zip(dense(found), dense(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=tolerance)


def test_a_training_ends_in_the_same_weights_with_mixed_precision():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        models = twins(lambda: branching(2))
    finally:
        keras.config.set_dtype_policy("float32")
    (x, y), loss = images(), cross_entropy()
    for model, parted in zip(models, (False, True), strict=True):
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01), initial_scale=256.0)
        for _ in range(3):
            if parted:
                _, found = pk.gradients.in_parts(
                    model, loss, x, y, ["end_0", "end_1"], training=True, scale_loss=optimizer.scale_loss
                )
            else:
                _, found = in_one_go(model, loss, x, y, scale_loss=optimizer.scale_loss)
            optimizer.apply(found, model.trainable_variables)
    for a, b in zip(*(model.get_weights() for model in models), strict=True):
        np.testing.assert_array_equal(a, b)


def test_the_models_graph_and_layers_are_as_they_were():
    model, (x, y) = branching(2), images()
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    config = model.get_config()
    pk.gradients.in_parts(model, LOSS, x, y, "joined")
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes
    assert "_run_through_graph" not in vars(model)
    assert model.get_config() == config
    np.testing.assert_array_equal(model(x), model(x))


# ---------------------------------------------------------------- what runs, and what is kept


@keras.saving.register_keras_serializable("prunekit_tests")
class Counted(layers.Layer):
    """tanh(w x), which counts its calls and those of its outputs that are alive."""

    alive, most = 0, 0

    def __init__(self, **options):
        super().__init__(**options)
        self.calls = 0

    def build(self, shape):
        self.w = self.add_weight(shape=(shape[-1],), initializer="ones")

    def call(self, x):
        if isinstance(x, tf.Tensor) and tf.executing_eagerly():
            self.calls += 1
            y = tf.tanh(self.w * x)
            Counted.alive += 1
            Counted.most = max(Counted.most, Counted.alive)
            weakref.finalize(y, Counted.died)
            return y
        return ops.tanh(self.w * x)

    @classmethod
    def died(cls):
        cls.alive -= 1


def fan_in(branches, depth):
    inputs, ends = keras.Input((8,)), []
    for number in range(branches):
        x = inputs
        for level in range(depth):
            x = Counted(name=f"counted_{number}_{level}")(x)
        ends.append(layers.Dense(2, name=f"end_{number}")(x))
    return keras.Model(inputs, layers.Dense(3)(layers.Concatenate()(ends)))


def test_only_one_branch_is_alive_at_a_time():
    model, x, y = fan_in(8, 5), RNG.normal(size=(4, 8)), RNG.integers(0, 3, 4)
    loss, peaks = keras.losses.SparseCategoricalCrossentropy(from_logits=True), {}
    for name in ("whole", "parts"):
        gc.collect()
        Counted.alive = Counted.most = 0
        if name == "whole":
            in_one_go(model, loss, tf.constant(x, "float32"), y)
        else:
            pk.gradients.in_parts(model, loss, x, y, [f"end_{number}" for number in range(8)])
        peaks[name] = Counted.most
    assert peaks == {"whole": 8 * 5, "parts": 5}


def test_what_needs_no_gradient_does_not_run_again():
    inputs = keras.Input((4,))
    frozen, trunk = Counted(name="frozen"), Counted(name="trunk")
    x = trunk(frozen(inputs))
    ends = [Counted(name="left")(x), Counted(name="right")(x)]
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Add()(ends)))
    x, y = RNG.normal(size=(4, 4)), RNG.integers(0, 3, 4)

    def calls(boundary):
        for layer in counted:
            layer.calls = 0
        gradients = pk.gradients.in_parts(model, LOSS, x, y, boundary)[1]
        assert len(gradients) == len(model.trainable_variables)
        return [layer.calls for layer in counted]

    counted = [layer for layer in model.layers if isinstance(layer, Counted)]
    frozen.trainable = False
    assert calls(["frozen", "trunk", "left", "right"]) == [1, 2, 2, 2]
    trunk.trainable = False
    assert calls(["frozen", "trunk", "left", "right"]) == [1, 1, 2, 2]
    assert calls(["trunk"]) == [1, 1, 1, 1]


def test_in_a_graph_branches_take_turns_in_both_directions():
    events = []

    def logged(name):
        @tf.custom_gradient
        def log(x):
            def note(what, tensor):
                tensor = tf.py_function(lambda one: (events.append((name, what)), one)[1], [tensor], tensor.dtype)
                return tf.ensure_shape(tensor, x.shape)

            return note("forward", x), lambda upstream: note("backward", upstream)

        return log

    inputs, ends = keras.Input((3,)), []
    for number in range(3):
        x = layers.Dense(3)(inputs)
        ends.append(layers.Lambda(logged(number), output_shape=(3,), name=f"end_{number}")(x))
    model = keras.Model(inputs, layers.Dense(3, "softmax")(layers.Add()(ends)))
    x, y = tf.constant(RNG.normal(size=(4, 3)), "float32"), RNG.integers(0, 3, 4)
    tf.function(lambda x: pk.gradients.in_parts(model, LOSS, x, y, ["end_0", "end_1", "end_2"])[1], autograph=False)(x)
    order = [number for number, _ in events[:3]]
    there = [(number, "forward") for number in order]
    back = [(number, what) for number in reversed(order) for what in ("forward", "backward")]
    assert sorted(order) == [0, 1, 2]
    assert events == [*there, *back]


def test_a_variable_that_the_loss_does_not_reach_has_none():
    inputs = keras.Input((3,))
    x = layers.Dense(3, name="cut_off")(inputs)
    x = layers.Lambda(tf.stop_gradient, output_shape=(3,))(x)
    model = keras.Model(inputs, layers.Dense(3, "softmax", name="head")(layers.Dense(3, name="end")(x)))
    _, found = pk.gradients.in_parts(model, LOSS, np.ones((2, 3)), np.zeros(2), "end")
    assert [one is None for one in found] == [True, True, False, False, False, False]
