"""Per-example gradients, their norms and squares, against a loop over batches of one and against closed forms."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradient_models import CASES, case, one_by_one
from keras import layers

import prunekit as pk

TOLERANCE = {"float32": {"rtol": 2e-4, "atol": 2e-6}, "float64": {"rtol": 1e-9, "atol": 1e-12}}


def assert_close(found, expected, precision="float32"):
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == precision
        np.testing.assert_allclose(one, other, **TOLERANCE[precision])


def squares_of(gradients):
    return [np.square(gradient).sum(tuple(range(1, gradient.ndim))) for gradient in gradients]


@pytest.mark.parametrize("name", CASES)
@pytest.mark.short(cases=7)
def test_gradients_norms_and_squares_equal_those_of_a_loop_over_batches_of_one(name, precision):
    model, x, y, loss = case(name)
    expected = one_by_one(model, loss, x, y)
    assert_close(pk.gradients.per_example(model, loss, x, y), expected, precision)
    assert_close(pk.gradients.per_example_square_sums(model, loss, x, y), squares_of(expected), precision)
    assert_close(pk.gradients.sum_of_squares(model, loss, x, y), [(e**2).sum(0) for e in expected], precision)
    norms = pk.gradients.per_example_norms(model, loss, x, y)
    assert_close([norms], [np.sqrt(sum(squares_of(expected)))], precision)


@pytest.mark.parametrize(
    ("name", "batch"),
    [("convolutional", None), ("masked", None), ("shared", 5), ("tied", 5), ("tied", None), ("folded", None)],
)
@pytest.mark.short(cases=3)
def test_inside_a_traced_function_gradients_are_the_same(name, batch):
    model, x, y, loss = case(name)
    traced = _traced(lambda x, y: pk.gradients.per_example(model, loss, x, y), x, y, batch)
    assert_close(traced(x, y), one_by_one(model, loss, x, y))


@pytest.mark.parametrize(("name", "batch"), [("convolutional", None), ("two embeddings of one table", 5)])
def test_inside_a_traced_function_norms_are_the_same(name, batch):
    model, x, y, loss = case(name)
    traced = _traced(lambda x, y: pk.gradients.per_example_square_sums(model, loss, x, y), x, y, batch)
    assert_close(traced(x, y), squares_of(one_by_one(model, loss, x, y)))


def _traced(function, x, y, batch):
    return tf.function(function, [tf.TensorSpec((batch, *array.shape[1:]), array.dtype) for array in (x, y)])


def test_a_batch_of_open_size_cannot_be_split():
    model, x, y, loss = case("perceptron")
    traced = _traced(lambda x, y: pk.gradients.per_example(model, loss, x, y, chunk_size=2), x, y, None)
    with pytest.raises(ValueError, match="size of this batch is not known.*Leave chunk_size out"):
        traced(x, y)


@pytest.mark.parametrize("chunk_size", [1, 2, 3, 5, 9])
def test_chunks_change_nothing(chunk_size):
    model, x, y, loss = case("residual attention")
    for function in (pk.gradients.per_example, pk.gradients.sum_of_squares):
        assert_close(function(model, loss, x, y, chunk_size=chunk_size), function(model, loss, x, y))
    norms = pk.gradients.per_example_norms(model, loss, x, y, chunk_size=chunk_size)
    assert_close([norms], [pk.gradients.per_example_norms(model, loss, x, y)])


def test_a_model_of_a_fixed_batch_size_works():
    model = keras.Sequential([keras.Input((3,), batch_size=5), layers.Dense(4, "tanh"), layers.Dense(3)])
    x, y = np.random.default_rng(8).normal(size=(5, 3)).astype("float32"), np.ones((5, 3), "float32")
    expected = one_by_one(keras.Sequential(model.layers), "mse", x, y)
    assert_close(pk.gradients.per_example(model, "mse", x, y), expected)


@pytest.mark.parametrize("examples", [1, 2, 3])
def test_small_batches_work_whatever_size_the_probe_has(examples):
    model, x, y, loss = case("tied", examples)
    assert_close(pk.gradients.per_example(model, loss, x, y), one_by_one(model, loss, x, y))


def test_a_linear_layer_has_the_gradient_of_the_textbook(precision):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(4, 3)), rng.normal(size=(4, 2))
    kernel, bias = (np.asarray(weight.value) for weight in model.weights)
    error = 2 * (x @ kernel + bias - y) / 2
    expected = [x[:, :, None] * error[:, None, :], error]
    loss = keras.losses.MeanSquaredError(dtype=precision)
    assert_close(pk.gradients.per_example(model, loss, x, y), expected, precision)
    norms = pk.gradients.per_example_norms(model, loss, x, y, per_variable=True)
    assert_close(norms, [np.sqrt(s) for s in squares_of(expected)], precision)


def test_norms_from_gram_matrices_equal_those_of_gradients():
    # Two uses of a 40 x 40 kernel: the Gram matrices are far smaller.
    model = keras.Sequential([keras.Input((2, 40)), layers.Dense(40), layers.Flatten(), layers.Dense(3)])
    rng = np.random.default_rng(1)
    x, y = rng.normal(size=(6, 2, 40)).astype("float32"), rng.normal(size=(6, 3)).astype("float32")
    expected = squares_of(one_by_one(model, "mse", x, y))
    assert_close(pk.gradients.per_example_square_sums(model, "mse", x, y), expected)


def test_several_inputs_outputs_and_losses_keep_their_structure():
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
    x = layers.Dense(5, "relu")(layers.Concatenate()([a, b]))
    model = keras.Model({"a": a, "b": b}, {"class": layers.Dense(3)(x), "size": layers.Dense(1)(x)})
    rng = np.random.default_rng(2)
    inputs = {"a": rng.normal(size=(6, 3)).astype("float32"), "b": rng.normal(size=(6, 4)).astype("float32")}
    y = {"class": rng.integers(0, 3, 6), "size": rng.normal(size=(6, 1)).astype("float32")}
    classes = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    rows = []
    for i in range(6):
        with tf.GradientTape() as tape:
            out = model({key: value[i : i + 1] for key, value in inputs.items()})
            value = classes(y["class"][i : i + 1], out["class"]) + keras.losses.Huber()(y["size"][i], out["size"])
        rows.append(tape.gradient(value, [variable.value for variable in model.trainable_variables]))
    expected = [np.stack(column) for column in zip(*rows, strict=True)]
    assert_close(pk.gradients.per_example(model, {"class": classes, "size": "huber"}, inputs, y), expected)


@pytest.mark.parametrize("reduction", ["sum", "sum_over_batch_size", "none"])
def test_the_reduction_of_a_loss_is_that_of_a_batch_of_one(reduction):
    model = keras.Sequential([keras.Input((4, 3)), layers.Dense(2)])
    rng = np.random.default_rng(3)
    x, y = rng.normal(size=(5, 4, 3)).astype("float32"), rng.normal(size=(5, 4, 2)).astype("float32")
    loss = keras.losses.MeanSquaredError(reduction=reduction)
    assert_close(pk.gradients.per_example(model, loss, x, y), one_by_one(model, loss, x, y))


def test_masked_steps_do_not_count_in_the_loss():
    model = keras.Sequential([keras.Input((4,)), layers.Embedding(6, 3, mask_zero=True), layers.Dense(2)])
    x = np.array([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 4, 5]])
    y = np.random.default_rng(4).normal(size=(3, 4, 2)).astype("float32")
    loss = keras.losses.MeanSquaredError()
    found = pk.gradients.per_example(model, loss, x, y)
    assert_close(found, one_by_one(model, loss, x, y))
    assert not np.asarray(found[0])[:, 0].any()


def test_a_function_is_a_loss():
    model, x, y, _ = case("perceptron")

    def loss(y_true, y_pred):
        return keras.losses.sparse_categorical_crossentropy(y_true, y_pred, from_logits=True)

    expected = one_by_one(model, keras.losses.SparseCategoricalCrossentropy(from_logits=True), x, y)
    assert_close(pk.gradients.per_example(model, loss, x, y), expected)


def test_only_trainable_variables_have_gradients():
    model, x, y, loss = case("shared")
    model.get_layer("shared").trainable = False
    found = pk.gradients.per_example(model, loss, x, y)
    assert len(found) == len(model.trainable_variables)
    assert_close(found, one_by_one(model, loss, x, y))


def test_a_weight_that_the_loss_does_not_depend_on_has_zeros():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(4)(inputs)])
    x = np.ones((3, 3), "float32")
    loss = [lambda y, p: tf.reduce_sum(p, 1), lambda y, p: tf.zeros_like(p[:, 0])]
    found = pk.gradients.per_example(model, loss, x, [np.zeros((3, 2)), np.zeros((3, 4))])
    assert [array.shape for array in found] == [(3, 3, 2), (3, 2), (3, 3, 4), (3, 4)]
    assert np.asarray(found[0]).all() and not np.asarray(found[2]).any()


def test_a_subclass_with_a_call_of_its_own_is_not_taken_for_its_base():
    class Doubled(layers.Dense):
        def call(self, inputs):
            return super().call(inputs) * 2 + keras.ops.sum(self.kernel)

    model = keras.Sequential([keras.Input((3,)), Doubled(4, "tanh"), layers.Dense(2)])
    x, y = np.random.default_rng(5).normal(size=(5, 3)).astype("float32"), np.ones((5, 2), "float32")
    assert_close(pk.gradients.per_example(model, "mse", x, y), one_by_one(model, "mse", x, y))


@pytest.mark.parametrize("scale", [1.0, 100.0], ids=["mild", "saturated"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_softmax_inside_a_layer_with_weights_of_its_own_is_seen_through_as_keras_does(scale, nested):
    class Scores(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(3, "softmax")
            self.scale = self.add_weight(shape=(4,), initializer=keras.initializers.Constant(scale))

        def call(self, x):
            return self.dense(x * self.scale)

    inner = Scores()
    model = keras.Sequential([keras.Input((4,)), inner]) if nested else inner
    x, y = np.random.default_rng(9).normal(size=(6, 4)).astype("float32"), np.arange(6) % 3
    model(x)
    loss = "sparse_categorical_crossentropy"
    expected = one_by_one(model, loss, x, y)
    for found, other in zip(pk.gradients.per_example(model, loss, x, y), expected, strict=True):
        np.testing.assert_allclose(found, other, rtol=1e-3, atol=1e-4 * np.abs(other).max())


def test_mixed_precision_gives_gradients_in_the_precision_of_the_weights():
    with_policy = {"dtype": "mixed_bfloat16"}
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh", **with_policy), layers.Dense(2)])
    x, y = np.random.default_rng(6).normal(size=(5, 3)).astype("float32"), np.ones((5, 2), "float32")
    for found, expected in zip(
        pk.gradients.per_example(model, "mse", x, y), one_by_one(model, "mse", x, y), strict=True
    ):
        assert found.dtype == "float32"
        np.testing.assert_allclose(found, expected, rtol=0.03, atol=0.02)


def test_lora_is_differentiated_as_it_computes():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4), layers.Dense(2)])
    model.layers[0].enable_lora(2)
    model.layers[0].lora_kernel_b.assign(np.ones((2, 4)))
    x, y = np.random.default_rng(7).normal(size=(5, 3)).astype("float32"), np.ones((5, 2), "float32")
    assert_close(pk.gradients.per_example(model, "mse", x, y), one_by_one(model, "mse", x, y))


def test_the_model_is_left_as_it_was():
    model, x, y, loss = case("normalised")
    dropout = keras.Sequential([keras.Input((6, 6, 4)), layers.Dropout(0.5), model])
    before = [np.asarray(variable.value) for variable in dropout.variables]
    attributes = [sorted(vars(layer)) for layer in model.layers]
    call = keras.layers.Layer.__call__
    model.layers[0].trainable = False
    pk.gradients.per_example(dropout, loss, x, y, training=True)
    assert all((old == np.asarray(new.value)).all() for old, new in zip(before, dropout.variables, strict=True))
    assert [sorted(vars(layer)) for layer in model.layers] == attributes
    assert keras.layers.Layer.__call__ is call


def test_training_mode_drops_the_same_units_in_the_forward_and_the_backward_pass():
    model = keras.Sequential([keras.Input((6,)), layers.Dropout(0.5, seed=1), layers.Dense(1, use_bias=False)])
    found = pk.gradients.per_example(
        model, lambda y, p: p[:, 0], np.ones((8, 6), "float32"), np.zeros(8), training=True
    )
    assert set(np.unique(found[0])) == {0.0, 2.0}


def test_another_thread_may_use_the_model_meanwhile():
    model, x, y, loss = case("perceptron", 64)
    expected, wrong, done = np.asarray(model(x)), [], threading.Event()

    def use():
        while not done.is_set():
            if not np.array_equal(np.asarray(model(x)), expected):
                wrong.append(True)

    thread = threading.Thread(target=use)
    thread.start()
    reference = pk.gradients.per_example_norms(model, loss, x, y)
    for _ in range(10):
        np.testing.assert_array_equal(pk.gradients.per_example_norms(model, loss, x, y), reference)
    done.set()
    thread.join()
    assert not wrong


def test_batch_statistics_have_no_per_example_gradient():
    model, x, y, loss = case("normalised")
    with pytest.raises(ValueError, match="each example's output depend on the whole batch.*'batch_normalization.*"):
        pk.gradients.per_example(model, loss, x, y, training=True)


@pytest.mark.parametrize("option", ["dropout", "recurrent_dropout"])
def test_dropout_inside_an_rnn_is_refused_in_training_mode(option):
    rnn = layers.LSTM(2, name="lstm", **{option: 0.5})
    model = keras.Sequential([keras.Input((4, 3)), rnn, layers.Dense(3)])
    x, y = np.ones((2, 4, 3), "float32"), np.zeros((2, 3))
    with pytest.raises(ValueError, match="would draw other random numbers. Received: training=True.*'lstm"):
        pk.gradients.per_example(model, "mse", x, y, training=True)
    setattr(rnn.cell, option, 0.0)
    pk.gradients.per_example(model, "mse", x, y, training=True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"y": np.zeros(4)}, r"one row per example. Received: lengths \[4, 5\]"),
        ({"x": np.zeros((0, 5)), "y": np.zeros(0)}, r"lengths \[0\]"),
        ({"chunk_size": 0}, "chunk_size must be at least 1. Received: chunk_size=0"),
        ({"loss": lambda y, p: tf.reduce_mean(p)}, r"one value per example.*shape \(\)"),
        ({"loss": None}, "needs a loss"),
        ({"loss": ["mse", "mse"]}, "have the same structure"),
        ({"loss": "msse"}, "msse"),
    ],
)
def test_what_cannot_be_differentiated_is_refused(changes, message):
    model, x, y, loss = case("perceptron")
    arguments = {"loss": loss, "x": x, "y": y} | changes
    with pytest.raises(ValueError, match=message):
        pk.gradients.per_example(model, **arguments)


def test_one_loss_for_several_outputs_is_refused():
    inputs = keras.Input((3,))
    model = keras.Model(inputs, [layers.Dense(2)(inputs), layers.Dense(4)(inputs)])
    with pytest.raises(ValueError, match="one loss for one output"):
        pk.gradients.per_example(model, "mse", np.ones((2, 3)), np.ones((2, 2)))


def test_a_model_without_weights_is_refused():
    with pytest.raises(ValueError, match="not built"):
        pk.gradients.per_example(keras.Sequential([layers.Dense(2)]), "mse", np.ones((2, 3)), np.ones((2, 2)))
    with pytest.raises(TypeError, match="Keras 3 models"):
        pk.gradients.per_example(tf.Module(), "mse", np.ones((2, 3)), np.ones((2, 2)))
    frozen, x, y, loss = case("perceptron")
    frozen.trainable = False
    with pytest.raises(ValueError, match="Nothing in the model .* is trainable"):
        pk.gradients.per_example_norms(frozen, loss, x, y)


def test_an_error_inside_the_model_leaves_no_watcher_behind():
    model, _, y, loss = case("perceptron")
    call = keras.layers.Layer.__call__
    with pytest.raises(ValueError, match="incompatible"):
        pk.gradients.per_example(model, loss, np.ones((5, 9), "float32"), y)
    assert keras.layers.Layer.__call__ is call
    assert "activation" in vars(model.layers[0]) and model.layers[0].activation is keras.activations.tanh
