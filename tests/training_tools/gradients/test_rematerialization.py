"""Recomputed blocks: the same training as without, and fewer activations alive."""

import gc
import re
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradient_models import case
from keras import layers, ops
from optimised_graphs import reads_that_race

import prunekit as pk

RNG = np.random.default_rng(6)


def fresh(build):
    keras.utils.set_random_seed(3)
    return build()


def assert_equal(ones, others, **tolerance):
    for one, other in zip(ones, others, strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 0, "atol": 0} | tolerance))


def rounding(precision):
    """What compiled steps may differ by: TensorFlow fuses operations whose intermediate results nobody wants."""
    return {"rtol": 1e-4, "atol": 1e-6} if precision == "float32" else {"rtol": 1e-10, "atol": 1e-13}


def convolutional():
    """Two nested blocks with batch normalisation, dropout and losses of their own, in a residual chain."""
    inputs = keras.Input((6, 6, 3))
    x = layers.Conv2D(4, 3, padding="same", name="stem")(inputs)
    for name in ("first", "second"):
        inside = keras.Input((6, 6, 4))
        b = layers.Conv2D(4, 3, padding="same", name="conv")(inside)
        b = layers.Dropout(0.4, name="drop")(layers.BatchNormalization(name="norm")(b))
        b = layers.Dense(4, "gelu", activity_regularizer="l2", name="dense")(b)
        x = layers.Add()([x, keras.Model(inside, b, name=name)(x)])
    return keras.Model(inputs, layers.Dense(3, "softmax", name="scores")(layers.GlobalAveragePooling2D()(x)))


def sequences():
    """Masks, a sparse gradient, draws inside of a loop and of attention."""
    inputs = keras.Input((5,), dtype="int32")
    x = layers.Embedding(9, 4, mask_zero=True, name="table")(inputs)
    x = layers.MultiHeadAttention(2, 3, dropout=0.2, name="attention")(x, x)
    x = layers.LSTM(4, recurrent_dropout=0.2, return_sequences=True, name="lstm")(x)
    return keras.Model(inputs, layers.Dense(3, "softmax", name="scores")(layers.GRU(3, dropout=0.2, name="gru")(x)))


def images(examples=12):
    return RNG.normal(size=(examples, 6, 6, 3)).astype(keras.config.floatx()), RNG.integers(0, 3, examples)


def words(examples=12):
    return RNG.integers(0, 9, (examples, 5)), RNG.integers(0, 3, examples)


CASES = {
    "blocks": (convolutional, ["first", "second"], images),
    "a block and a layer in another": (convolutional, ["first", "second/norm", "second/drop", "scores"], images),
    "a block and a layer in it": (convolutional, ["first", "first/conv"], images),
    "sequences": (sequences, ["table", "attention", "lstm", "gru", "scores"], words),
}


# ---------------------------------------------------------------- the same training


@pytest.mark.parametrize(
    ("name", "eagerly"),
    [(name, True) for name in CASES] + [("a block and a layer in another", False), ("sequences", False)],
)
@pytest.mark.short(cases=3)
def test_fit_ends_in_the_same_weights_and_state(name, precision, eagerly):
    build, blocks, data = CASES[name]
    x, y = data()
    found = []
    for recomputed in (False, True):
        model = fresh(build)
        model.compile("sgd", "sparse_categorical_crossentropy", run_eagerly=eagerly)

        def fit(model=model):
            history = model.fit(x, y, batch_size=6, epochs=2, shuffle=False, verbose=0).history["loss"]
            return [*model.get_weights(), *(variable.numpy() for variable in model.non_trainable_variables), history]

        if recomputed:
            with pk.gradients.recomputing(model, blocks):
                found.append(fit())
        else:
            found.append(fit())
    assert_equal(*found, **({} if eagerly else rounding(precision)))


def test_a_model_that_was_fitted_before_recomputes_only_inside():
    calls = []

    class Logging(layers.Layer):
        def call(self, x):
            calls.append(self.name)
            return ops.tanh(x)

    def build():
        return keras.Sequential([keras.Input((4,)), layers.Dense(4), Logging(name="logging"), layers.Dense(1)])

    def traced(model):
        calls.clear()
        model.fit(np.ones((4, 4)), np.ones(4), verbose=0)
        return len(calls)

    model = build()
    model.compile("sgd", "mse", jit_compile=False)
    assert traced(model) > 0
    assert traced(model) == 0
    former = model.train_function
    once = pk.gradients.recomputing(model, "logging")
    with once:
        assert traced(model) == 2
        assert traced(model) == 0
    assert model.train_function is former
    assert "call" not in vars(model.get_layer("logging"))
    assert traced(model) == 0


def test_tape_loops_and_own_steps_train_the_same(precision):
    (x, y), weights = images(), []
    loss = keras.losses.SparseCategoricalCrossentropy(dtype=precision)
    for recomputed in (False, True):
        model = fresh(convolutional)
        loop = pk.loops.TapeLoop(model, keras.optimizers.SGD(0.1), loss)
        own = keras.optimizers.SGD(0.1)

        @tf.function(autograph=False)
        def step(x, y, model=model, own=own):
            with tf.GradientTape() as tape:
                value = loss(y, model(x, training=True)) + sum(model.losses)
            own.apply(tape.gradient(value, model.trainable_variables), model.trainable_variables)

        def train(loop=loop, step=step):
            loop.fit(x, y, epochs=2, batch_size=5, seed=1)
            step(x, y)

        own.build(model.trainable_variables)
        if recomputed:
            with pk.gradients.recomputing(model, ["first", "second"]):
                train()
        else:
            train()
        weights.append(model.get_weights())
    assert_equal(*weights, **rounding(precision))


def test_pruning_inside_holds_its_zeros():
    model, (x, y) = fresh(convolutional), images()
    model.compile("adam", "sparse_categorical_crossentropy")
    with pk.gradients.recomputing(model, ["first", "second"]):
        model.fit(
            x,
            y,
            epochs=2,
            verbose=0,
            callbacks=[pk.PruningCallback(pk.schedules.ConstantSparsity(0.5, frequency=1), allocation="uniform")],
        )
    kernel = model.get_layer("first").get_layer("conv").kernel.numpy()
    assert (kernel == 0).sum() == kernel.size // 2


def test_mixed_precision_and_a_shared_block_are_right():
    keras.config.set_dtype_policy("mixed_float16")
    try:
        inputs = keras.Input((4,))
        block = keras.Sequential([layers.Dense(4, "tanh"), layers.Dropout(0.3), layers.Dense(4)], name="block")
        model = keras.Model(inputs, block(block(inputs)))
    finally:
        keras.config.set_dtype_policy("float32")
    x, states = RNG.normal(size=(6, 4)).astype("float32"), [one.numpy() for one in model.non_trainable_variables]

    def gradients():
        for variable, state in zip(model.non_trainable_variables, states, strict=True):
            variable.assign(state)
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(tf.cast(model(x, training=True), "float32")))
        return tape.gradient(value, [variable.value for variable in model.trainable_variables])

    plain = gradients()
    with pk.gradients.recomputing(model, "block"):
        assert_equal(gradients(), plain)


def test_a_tape_outside_of_a_graph_sees_through_it():
    model, (x, _) = fresh(convolutional), images()

    def gradients(call):
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(call(x)))
        return tape.gradient(value, [variable.value for variable in model.trainable_variables])

    plain = gradients(tf.function(lambda x: model(x), autograph=False))
    with pk.gradients.recomputing(model, ["first", "second"]):
        assert_equal(gradients(tf.function(lambda x: model(x), autograph=False)), plain, **rounding("float32"))


def test_a_weight_that_is_used_outside_of_its_layer_gets_all_of_its_gradient(precision):
    table = layers.Embedding(5, 3, name="table")
    inputs = keras.Input((2,), dtype="int32")
    hidden, borrowed = table(inputs), []

    class Borrowing(layers.Layer):
        def call(self, x):
            return ops.matmul(ops.tanh(x), ops.transpose(borrowed[0].embeddings))

    borrowed.append(table)
    model = keras.Model(inputs, Borrowing(name="borrowing")(hidden))
    x = RNG.integers(0, 5, (4, 2))

    def gradient():
        with tf.GradientTape() as tape:
            value = tf.reduce_sum(tf.square(model(x)))
        return [tf.convert_to_tensor(tape.gradient(value, table.embeddings.value))]

    plain = gradient()
    with pk.gradients.recomputing(model, ["table", "borrowing"]):
        assert_equal(gradient(), plain, rtol=1e-5)


def test_a_weight_that_its_layer_assigns_in_training_gets_the_gradient_of_what_is_read_after_it(precision):
    """Spectral normalisation overwrites the kernel: a tape sees the new value, and not how it was made."""
    x, y = RNG.normal(size=(8, 5)), RNG.normal(size=(8, 3))
    weights = []
    for recomputed in (False, True):
        spectral = fresh(lambda: layers.SpectralNormalization(layers.Dense(6, "tanh"), name="spectral"))
        model = keras.Sequential([keras.Input((5,)), spectral, layers.Dropout(0.2), layers.Dense(3)])
        model.compile("sgd", "mse", run_eagerly=True)
        if recomputed:
            with pk.gradients.recomputing(model, ["spectral"]):
                model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        else:
            model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        weights.append(model.get_weights())
    assert_equal(*weights)


# ---------------------------------------------------------------- beside the other gradients


def test_second_derivatives_and_gradients_of_examples_are_the_same_inside(precision):
    model, x, y, loss = case("residual attention", 3)
    names = [layer.name for layer in model.layers[1:]]
    vectors = [RNG.normal(size=variable.shape) for variable in model.trainable_variables]
    inputs = pk.gradients.vjp(model, x, np.ones((3, 3)), wrt=names[0])

    def all_of_them():
        return [
            *pk.gradients.hvp(model, loss, x, y, vectors),
            *pk.gradients.vjp(model, x, np.ones((3, 3))),
            pk.gradients.jvp(model, x, vectors),
            *pk.gradients.per_example(model, loss, x, y),
            inputs,
        ]

    plain = all_of_them()
    tolerance = {"rtol": 1e-4, "atol": 1e-5} if precision == "float32" else {"rtol": 1e-10, "atol": 1e-12}
    with pk.gradients.recomputing(model, names):
        assert_equal(all_of_them(), plain, **tolerance)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "tf.function"])
def test_parts_and_recomputed_blocks_together_are_the_gradient(precision, compiled):
    loss, (x, y) = keras.losses.SparseCategoricalCrossentropy(dtype=precision), images()
    one, other = fresh(convolutional), fresh(convolutional)

    def whole(x):
        with tf.GradientTape() as tape:
            value = loss(y, one(x, training=True)) + sum(one.losses)
        return tape.gradient(value, [variable.value for variable in one.trainable_variables])

    def parts(x):
        return pk.gradients.in_parts(other, loss, x, y, ["add_" + suffix, "scores"], training=True)[1]

    suffix = next(layer.name for layer in other.layers if isinstance(layer, layers.Add)).removeprefix("add_")
    wrapped = (lambda function: tf.function(function, autograph=False)) if compiled else (lambda function: function)
    expected = wrapped(whole)(tf.constant(x))
    with pk.gradients.recomputing(other, ["first", "second"]):
        found = wrapped(parts)(tf.constant(x))
    assert_equal(found, expected, rtol=1e-5, atol=1e-6 if precision == "float32" else 1e-14)
    assert_equal(other.non_trainable_variables, one.non_trainable_variables)


# ---------------------------------------------------------------- what is kept


def test_only_the_inputs_of_blocks_stay_alive():
    counts = {"alive": 0, "most": 0}

    class Noticed(layers.Layer):
        def call(self, x):
            y = tf.tanh(x)
            counts["alive"] += 1
            counts["most"] = max(counts["most"], counts["alive"])
            weakref.finalize(y, died)
            return y

        def compute_output_shape(self, shape):
            return shape

        def compute_output_spec(self, x):
            return keras.KerasTensor(x.shape, x.dtype)

    def died():
        counts["alive"] -= 1

    blocks = [
        keras.Sequential([keras.Input((4,)), *(Noticed() for _ in range(5)), layers.Dense(4)], name=f"block_{number}")
        for number in range(6)
    ]
    model = keras.Sequential([keras.Input((4,)), *blocks])
    x = tf.constant(RNG.normal(size=(3, 4)), "float32")

    def most():
        gc.collect()
        counts.update(alive=0, most=0)
        with tf.GradientTape() as tape:
            tape.watch(x)
            value = tf.reduce_sum(model(x))
        tape.gradient(value, [variable.value for variable in model.trainable_variables])
        return counts["most"]

    assert most() == 6 * 5
    with pk.gradients.recomputing(model, [block.name for block in blocks]):
        assert most() == 5


def test_xla_does_not_merge_the_second_run_with_the_first():
    model = keras.Sequential([keras.Input((4,)), *(layers.Dense(4, "tanh", name=f"dense_{n}") for n in range(3))])
    block = keras.Sequential([keras.Input((4,)), model], name="block")
    outer = keras.Sequential([keras.Input((4,)), block, layers.Dense(2)])
    x = tf.constant(RNG.normal(size=(8, 4)), "float32")

    def counted():
        @tf.function(jit_compile=True, autograph=False)
        def gradients(x):
            with tf.GradientTape() as tape:
                value = tf.reduce_sum(tf.square(outer(x)))
            return tape.gradient(value, [variable.value for variable in outer.trainable_variables])

        compiled = gradients.experimental_get_compiler_ir(x)(stage="optimized_hlo")
        return gradients(x), len(re.findall(r" tanh\(", compiled))

    plain, once = counted()
    with pk.gradients.recomputing(outer, "block"):
        found, twice = counted()
    assert_equal(found, plain, rtol=1e-4, atol=1e-5)
    assert twice > once > 0


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        ([], ValueError, r"needs at least one layer name. Received: layers=\[\]"),
        ("firts", ValueError, "No layer of the model .* called 'firts'.*layers='firts'. Did you mean 'first"),
        (["conv"], ValueError, "Several layers are called 'conv'.*'first/conv', 'second/conv'"),
        ([("first", 0)], TypeError, r"names of layers, whose calls are all recomputed. Received: \('first', 0\)"),
        (3, TypeError, "`layers` takes names of layers. Received: 3"),
    ],
)
def test_names_that_mean_no_layer_are_refused_in_one_line(names, error, message):
    model = convolutional()
    with pytest.raises(error, match=message) as caught, pk.gradients.recomputing(model, names):
        pass
    assert "\n" not in str(caught.value)
    assert all("call" not in vars(layer) for layer in model.layers)


def test_models_that_cannot_be_recomputed_are_refused():
    with (
        pytest.raises(ValueError, match="is not built"),
        pk.gradients.recomputing(keras.Sequential([layers.Dense(2)]), "x"),
    ):
        pass
    model = keras.Sequential([keras.Input((4,)), layers.Dense(4, name="dense")])
    model.get_layer("dense").quantize("int8")
    with (
        pytest.raises(ValueError, match="'dense', quantized to int8. Leave it out"),
        pk.gradients.recomputing(model, "dense"),
    ):
        pass


def test_a_layer_inside_a_loop_is_refused():
    model = sequences()
    with (
        pytest.raises(ValueError, match="inside a loop.*layers='lstm/lstm_cell'. Name the layer around it, 'lstm'"),
        pk.gradients.recomputing(model, ["gru", "lstm/lstm_cell"]),
    ):
        pass


def test_everything_is_put_back_after_an_error():
    model = convolutional()
    model.compile("sgd", "sparse_categorical_crossentropy")
    with pytest.raises(ZeroDivisionError), pk.gradients.recomputing(model, ["first", "second"]):
        raise ZeroDivisionError
    assert all("call" not in vars(model.get_layer(name)) for name in ("first", "second"))
    assert model.train_function is None


def test_no_update_overtakes_the_reading_of_its_weight_in_the_optimised_graph():
    first, second, shared = keras.Input((8,)), keras.Input((8,)), layers.Dense(8, "tanh", name="shared")
    one = keras.Sequential([keras.Input((8,)), layers.Dense(6, "tanh"), layers.Dense(4)], name="one")
    other = [keras.Input((8,)), layers.Dense(6, "tanh"), layers.BatchNormalization(), layers.Dense(4)]
    joined = one(shared(first)) * keras.Sequential(other, name="other")(shared(second))
    model, optimizer = keras.Model([first, second], layers.Dense(3)(joined)), keras.optimizers.SGD(0.1)
    optimizer.build(model.trainable_variables)

    @tf.function(autograph=False)
    def step(x, y):
        with tf.GradientTape() as tape:
            value = tf.reduce_mean(tf.square(model(x, training=True) - y))
        gradients = tape.gradient(value, model.trainable_variables)
        optimizer.apply(gradients, model.trainable_variables)
        return gradients

    x = [tf.constant(RNG.normal(size=(14, 8)), "float32") for _ in range(2)]
    with pk.gradients.recomputing(model, ["one", "other", "shared"]):
        assert reads_that_race(step, x, tf.constant(RNG.normal(size=(14, 3)), "float32")) == []
