"""Jacobian and Hessian products, and Jacobians, against closed forms, finite differences and each other."""

import threading

import keras
import numpy as np
import pytest
import tensorflow as tf
from gradient_models import case
from keras import layers

import prunekit as pk

RNG = np.random.default_rng(11)
MODELS = ["perceptron", "convolutional", "normalised", "recurrent", "masked", "residual attention", "shared", "tied"]


@pytest.fixture
def double():
    """Keras in float64, for finite differences."""
    former = keras.config.floatx(), keras.config.dtype_policy()
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx(former[0])
    keras.config.set_dtype_policy(former[1])


def like(tensors, rng=RNG):
    return [rng.normal(size=tensor.shape) for tensor in tensors]


def dot(ones, others):
    return sum(float(np.vdot(np.asarray(a, "float64"), np.asarray(b))) for a, b in zip(ones, others, strict=True))


def moved(model, vectors, step):
    for variable, vector in zip(model.trainable_variables, vectors, strict=True):
        variable.assign_add(step * vector)


def along(model, vectors, function, step=1e-5):
    """The derivative of `function()` as the weights move along the vectors: central difference."""
    moved(model, vectors, step)
    above = [np.asarray(part) for part in tf.nest.flatten(function())]
    moved(model, vectors, -2 * step)
    below = [np.asarray(part) for part in tf.nest.flatten(function())]
    moved(model, vectors, step)
    return [(a - b) / (2 * step) for a, b in zip(above, below, strict=True)]


def assert_close(found, expected, **tolerance):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, **({"rtol": 1e-6, "atol": 1e-8} | tolerance))


# ---------------------------------------------------------------- closed forms


def test_products_of_a_linear_layer_are_matrix_products(precision):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, name="dense")])
    x, u, v = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 2)), RNG.normal(size=(3, 2))
    kernel = np.asarray(model.weights[0].value)
    tolerance = {"rtol": 1e-5, "atol": 1e-5}
    weights = pk.gradients.vjp(model, x, u)
    assert_close(weights, [x.T @ u, u.sum(0)], **tolerance)
    assert_close([pk.gradients.vjp(model, x, u, wrt="inputs")], [u @ kernel.T], **tolerance)
    assert_close([pk.gradients.jvp(model, x, [v, np.ones(2)])], [x @ v + 1], **tolerance)
    assert_close([pk.gradients.jvp(model, x, x, wrt="inputs")], [x @ kernel], **tolerance)
    rows = pk.gradients.jacobian(model, x)
    assert_close(rows, [np.einsum("bi,jk->bjik", x, np.eye(2)), np.tile(np.eye(2), (4, 1, 1))], **tolerance)
    assert_close([pk.gradients.jacobian(model, x, wrt="inputs")], [np.tile(kernel.T, (4, 1, 1))], **tolerance)
    assert all(tensor.dtype == precision for tensor in (*weights, *rows))


def test_the_hessian_of_least_squares_is_the_inputs_covariance(precision):
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, use_bias=False)])
    x, y, v = RNG.normal(size=(4, 3)), RNG.normal(size=(4, 2)), RNG.normal(size=(3, 2))
    expected = [2 * x.T @ x @ v / (4 * 2)]
    for product in (pk.gradients.hvp, pk.gradients.gauss_newton_vp):
        (found,) = product(model, "mse", x, y, [v])
        assert found.dtype == precision
        assert_close([found], expected, rtol=1e-4)


# ---------------------------------------------------------------- the same battery for every model


@pytest.mark.parametrize("name", MODELS)
def test_jvp_is_the_finite_difference_and_vjp_its_transpose(name, double):
    model, x, _, _ = case(name, 3)
    vectors = like(model.trainable_variables)
    forward = pk.gradients.jvp(model, x, vectors)
    (difference,) = along(model, vectors, lambda: model(x))
    assert_close([forward], [difference], rtol=1e-5, atol=1e-7)
    cotangent = RNG.normal(size=forward.shape)
    assert dot([cotangent], [forward]) == pytest.approx(dot(vectors, pk.gradients.vjp(model, x, cotangent)), rel=1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_hvp_is_the_finite_difference_of_gradients(name, double):
    model, x, y, loss = case(name, 3)
    vectors = like(model.trainable_variables)

    def gradient():
        return pk.gradients.vjp(model, x, 1.0, of=lambda prediction: keras.losses.get(loss)(y, prediction))

    if isinstance(loss, str):
        loss = keras.losses.SparseCategoricalCrossentropy(dtype="float64")
    found = pk.gradients.hvp(model, loss, x, y, vectors)
    assert_close(found, along(model, vectors, gradient), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", ["perceptron", "convolutional", "masked", "shared", "tied"])
def test_gauss_newton_is_built_from_the_jacobian_and_the_losss_curvature(name, double):
    model, x, y, loss = case(name, 3)
    vectors = like(model.trainable_variables)
    output = np.asarray(model(x))
    flat = [rows.numpy().reshape(output.size, -1) for rows in pk.gradients.jacobian(model, x)]
    moves = sum(rows @ vector.ravel() for rows, vector in zip(flat, vectors, strict=True))
    curved = _curvature(output, y, softmax=name != "convolutional") @ moves
    expected = [(rows.T @ curved).reshape(v.shape) for rows, v in zip(flat, vectors, strict=True)]
    assert_close(pk.gradients.gauss_newton_vp(model, loss, x, y, vectors), expected, rtol=1e-5, atol=1e-7)


def _curvature(output, y, softmax):
    """Hessian of the mean cross-entropy with respect to logits, or to probabilities, one block per prediction."""
    scores = output.reshape(-1, output.shape[-1])
    blocks = []
    for row, label in zip(scores, np.ravel(y), strict=True):
        if softmax:
            p = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
            blocks.append(np.diag(p) - np.outer(p, p))
        else:
            # -log(p_y / sum of p), which is how Keras reads probabilities.
            block = -np.ones((len(row), len(row))) / row.sum() ** 2
            block[label, label] += 1 / row[label] ** 2
            blocks.append(block)
    size = scores.shape[-1]
    whole = np.zeros((scores.size, scores.size))
    for place, block in enumerate(blocks):
        whole[place * size : (place + 1) * size, place * size : (place + 1) * size] = block / len(blocks)
    return whole


@pytest.mark.parametrize("name", ["convolutional", "masked", "shared", "tied"])
def test_rows_of_the_jacobian_are_vjps(name):
    model, x, _, _ = case(name, 3)
    output = np.asarray(model(x))
    rows = pk.gradients.jacobian(model, x)
    assert [row.shape for row in rows] == [(*output.shape, *v.shape) for v in model.trainable_variables]
    for place in [(0,) * output.ndim, tuple(size - 1 for size in output.shape)]:
        one = np.zeros_like(output)
        one[place] = 1
        assert_close([row[place] for row in rows], pk.gradients.vjp(model, x, one), rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(("of", "shape"), [("hidden", (5, 7)), (lambda scores: scores[:, 1:], (5, 2))])
def test_rows_of_other_jacobians_are_vjps_too(of, shape):
    model, x, _, _ = case("perceptron")
    one = np.zeros(shape)
    one[3, 1] = 1
    rows = [row[3, 1] for row in pk.gradients.jacobian(model, x, of=of)]
    assert_close(rows, pk.gradients.vjp(model, x, one, of=of), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("wrt", [None, "inputs", "shared#2"])
@pytest.mark.parametrize("chunk_size", [1, 2, 9])
def test_chunks_change_nothing_about_a_jacobian(wrt, chunk_size):
    model, x, _, _ = case("shared", 3)
    wrt = ("shared", 2) if wrt == "shared#2" else wrt
    whole = tf.nest.flatten(pk.gradients.jacobian(model, x, wrt=wrt))
    assert_close(
        tf.nest.flatten(pk.gradients.jacobian(model, x, wrt=wrt, chunk_size=chunk_size)), whole, rtol=1e-3, atol=1e-6
    )


# ---------------------------------------------------------------- layers by name


def test_any_layers_output_with_respect_to_any_other(double):
    model, x, _, _ = case("perceptron")
    hidden, logits = model.layers
    kernel, slope = np.asarray(logits.kernel.value), 1 - np.asarray(hidden(x)) ** 2
    v, u = RNG.normal(size=(5, 7)), RNG.normal(size=(5, 3))
    assert_close([pk.gradients.jvp(model, x, v, wrt="hidden")], [v @ kernel])
    assert_close([pk.gradients.vjp(model, x, u, wrt="hidden")], [u @ kernel.T])
    assert_close([pk.gradients.vjp(model, x, u, of="logits", wrt="hidden")], [u @ kernel.T])
    expected = slope[:, :, None] * np.asarray(hidden.kernel.value).T
    assert_close([pk.gradients.jacobian(model, x, of="hidden", wrt="inputs")], [expected])
    upstream = pk.gradients.vjp(model, x, v, of="hidden")
    assert_close(upstream[:1], [x.T @ (v * slope)])
    assert not np.asarray(upstream[2]).any(), "what comes later has no influence"


def test_chosen_scores_and_losses_are_functions_of_the_output():
    model, x, y, loss = case("perceptron")
    one = np.zeros((5, 3))
    one[:, 1] = 1
    chosen = pk.gradients.vjp(model, x, np.ones(5), of=lambda scores: scores[:, 1], wrt="inputs")
    assert_close([chosen], [pk.gradients.vjp(model, x, one, wrt="inputs")], rtol=1e-5)
    with tf.GradientTape() as tape:
        value = loss(y, model(x))
    expected = tape.gradient(value, [variable.value for variable in model.trainable_variables])
    assert_close(pk.gradients.vjp(model, x, 1.0, of=lambda scores: loss(y, scores)), expected, rtol=1e-5)
    gradient = pk.gradients.jacobian(model, x, of=lambda scores: scores[:, 1], wrt="inputs")
    assert_close([gradient], [chosen], rtol=1e-5)


@pytest.mark.parametrize("name", ["shared", "block/shared"])
def test_each_call_of_a_shared_layer_has_a_number(name, double):
    model, x, _, _ = case("shared")
    calls = [pk.gradients.vjp(model, x, np.ones((5, 3)), wrt=("shared", call)) for call in range(3)]
    v = RNG.normal(size=(5, 5))
    for call, cotangent in enumerate(calls):
        forward = pk.gradients.jvp(model, x, v, wrt=(name, call))
        assert dot([np.ones((5, 3))], [forward]) == pytest.approx(dot([cotangent], [v]))
    assert not np.allclose(calls[0], calls[1])
    with pytest.raises(ValueError, match=r"called 3 times.*Say which call, counted from 0: \('\w"):
        pk.gradients.vjp(model, x, np.ones((5, 3)), wrt=name)
    with pytest.raises(ValueError, match="called 3 times.*Received: call 3.*count from 0"):
        pk.gradients.vjp(model, x, np.ones((5, 3)), of=(name, 3))


def test_layers_of_nested_models_have_paths():
    model, x, _, _ = case("shared")
    by_path = pk.gradients.jacobian(model, x, of="block/inner", wrt="inputs")
    assert_close([by_path], [pk.gradients.jacobian(model, x, of="inner", wrt="inputs")])
    assert by_path.shape == (5, 5, 5)


def test_a_layer_that_returns_its_inputs_is_a_place_of_its_own():
    inputs = keras.Input((3,))
    same = layers.Dropout(0.5, name="same")(inputs)
    model = keras.Model(inputs, layers.Add()([same, inputs]))
    x, u = np.ones((2, 3), "float32"), np.ones((2, 3), "float32")
    assert_close([pk.gradients.vjp(model, x, u, wrt="same")], [u])
    assert_close([pk.gradients.jvp(model, x, u, wrt="same")], [u])
    assert_close([pk.gradients.vjp(model, x, u, wrt="inputs")], [2 * u])


def test_inputs_and_outputs_keep_their_structure():
    a, b = keras.Input((3,), name="a"), keras.Input((4,), name="b")
    x = layers.Concatenate()([a, b])
    model = keras.Model({"a": a, "b": b}, [layers.Dense(2)(x), layers.Dense(1)(x)])
    inputs = {"a": np.ones((5, 3), "float32"), "b": np.ones((5, 4), "float32")}
    found = pk.gradients.vjp(model, inputs, [np.ones((5, 2)), np.zeros((5, 1))], wrt="inputs")
    assert {key: tuple(value.shape) for key, value in found.items()} == {"a": (5, 3), "b": (5, 4)}
    forward = pk.gradients.jvp(model, inputs, inputs, wrt="inputs")
    assert_close(forward, model(inputs), rtol=1e-5)
    first = pk.gradients.jacobian(model, inputs, of=lambda outputs: outputs[0], wrt="inputs")
    assert tuple(first["b"].shape) == (5, 2, 4)
    with pytest.raises(ValueError, match="one array with a row for each.*of=lambda outputs: outputs"):
        pk.gradients.jacobian(model, inputs)


@pytest.mark.parametrize("name", ["perceptron", "masked", "normalised"])
@pytest.mark.short(cases=1)
def test_inside_a_traced_function_the_products_are_the_same(name):
    model, x, y, loss = case(name)
    vectors = [tf.constant(vector, "float32") for vector in like(model.trainable_variables)]

    def all_of_them(x, y):
        forward = pk.gradients.jvp(model, x, vectors)
        second = [product(model, loss, x, y, vectors) for product in (pk.gradients.hvp, pk.gradients.gauss_newton_vp)]
        rows = pk.gradients.jacobian(model, x, wrt=model.layers[0].name)
        return [forward, pk.gradients.vjp(model, x, forward), *second, rows]

    x, y = tf.constant(x), tf.constant(y)
    traced, eager = tf.nest.flatten(tf.function(all_of_them)(x, y)), tf.nest.flatten(all_of_them(x, y))
    assert_close(traced, eager, rtol=1e-3, atol=1e-5)


def test_a_traced_jacobian_of_weights_is_the_same():
    model, x, _, _ = case("shared", 2)
    traced = tf.function(lambda x: pk.gradients.jacobian(model, x))(tf.constant(x))
    assert_close(traced, pk.gradients.jacobian(model, x), rtol=1e-3, atol=1e-5)


def test_the_model_is_left_as_it_was():
    model, x, y, loss = case("normalised")
    before = [np.asarray(variable.value) for variable in model.variables]
    vectors = like(model.trainable_variables)
    pk.gradients.vjp(model, x, np.ones((5, 3)), wrt=model.layers[0].name, training=True)
    pk.gradients.jvp(model, x, vectors, training=True)
    pk.gradients.hvp(model, loss, x, y, vectors, training=True)
    assert all((old == np.asarray(new.value)).all() for old, new in zip(before, model.variables, strict=True))


def test_two_threads_may_take_second_derivatives_at_once():
    model, x, y, loss = case("shared")
    vectors, moments, found = like(model.trainable_variables), tf.nn.moments, {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: pk.gradients.hvp(model, loss, x, y, vectors)}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert tf.nn.moments is moments
    for other in range(1, 4):
        assert_close(found[other], found[0], rtol=1e-4, atol=1e-5)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"wrt": "hiden"}, ValueError, r"No layer .* is called 'hiden'. Received: wrt='hiden'. Did you mean 'hidden'"),
        ({"of": "qqq"}, ValueError, "No layer .* is called 'qqq'. Received: of='qqq'. Its layers are hidden, logits"),
        ({"wrt": 3}, TypeError, "`wrt` takes a layer's name.*Received: 3"),
        ({"of": ("hidden", "x")}, TypeError, "`of` takes a layer's name"),
    ],
)
def test_names_that_mean_no_layer_are_refused(options, error, message):
    model, x, _, _ = case("perceptron")
    with pytest.raises(error, match=message):
        pk.gradients.vjp(model, x, np.ones((5, 3)), **options)


def test_a_name_that_several_layers_have_is_refused():
    inputs = keras.Input((3,))
    blocks = [keras.Sequential([layers.Dense(3, name="dense")], name=name) for name in ("first", "second")]
    model = keras.Model(inputs, blocks[1](blocks[0](inputs)))
    x = np.ones((2, 3), "float32")
    with pytest.raises(ValueError, match="Several layers are called 'dense'.*'first/dense', 'second/dense'"):
        pk.gradients.vjp(model, x, x, wrt="dense")
    assert pk.gradients.vjp(model, x, x, wrt="first/dense").shape == (2, 3)


def test_the_name_of_a_recurrent_layer_is_not_that_of_its_cell():
    model, x, _, _ = case("recurrent", 2)
    name = next(layer.name for layer in model.layers if isinstance(layer, layers.LSTM))
    assert pk.gradients.vjp(model, x, np.ones((2, 3)), wrt=name).shape == (2, 3)


def test_layers_out_of_sight_are_refused():
    model, x, _, _ = case("recurrent", 2)
    rnn = next(layer for layer in model.layers if isinstance(layer, layers.LSTM))
    cell = rnn.cell
    with pytest.raises(ValueError, match=r"called \d times"):
        pk.gradients.vjp(model, x, np.ones((2, 3)), wrt=f"{rnn.name}/{cell.name}")
    traced = tf.function(lambda x: pk.gradients.vjp(model, x, tf.ones((2, 3)), wrt=(cell.name, 1)))
    with pytest.raises(ValueError, match="called inside a loop.*Name the layer around it"):
        traced(tf.constant(x))


def test_a_layer_that_no_pass_calls_is_refused():
    class Unused(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.spare = layers.Dense(2), layers.ReLU(name="spare")

        def call(self, x):
            return self.used(x)

    model, x = Unused(), np.ones((2, 3), "float32")
    model(x)
    with pytest.raises(ValueError, match="'spare' is called 0 times"):
        pk.gradients.vjp(model, x, np.ones((2, 2)), wrt="spare")


def test_integers_have_no_derivative():
    model, x, _, _ = case("masked")
    for function in (pk.gradients.vjp, pk.gradients.jvp):
        with pytest.raises(
            ValueError, match="floating-point numbers. Received: wrt='inputs', of type int64.*embedding"
        ):
            function(model, x, np.ones((5, 3)), wrt="inputs")
    assert pk.gradients.vjp(model, x, np.ones((5, 3)), wrt=model.layers[0].name).shape == (5, 5, 4)


@pytest.mark.parametrize("given", [np.ones((5, 4)), [np.ones((5, 3))], None], ids=["shape", "structure", "none"])
def test_cotangents_and_tangents_that_do_not_fit_are_refused(given):
    model, x, y, loss = case("perceptron")
    with pytest.raises(ValueError, match=r"`cotangent` has the shapes \(5, 3\), in that structure. Received"):
        pk.gradients.vjp(model, x, given)
    with pytest.raises(ValueError, match="`tangents` has the shapes"):
        pk.gradients.jvp(model, x, given)
    for function in (pk.gradients.hvp, pk.gradients.gauss_newton_vp):
        with pytest.raises(ValueError, match="`vectors` has the shapes"):
            function(model, loss, x, y, [np.ones((5, 7))])


def test_a_jacobian_in_training_mode_needs_examples_that_are_apart():
    model, x, _, _ = case("normalised")
    with pytest.raises(ValueError, match="no gradient of one example"):
        pk.gradients.jacobian(model, x, wrt="inputs", training=True)


def test_a_jacobian_needs_rows():
    model, x, _, _ = case("perceptron")
    with pytest.raises(ValueError, match="a row for each of 5 examples.*"):
        pk.gradients.jacobian(model, x, of=lambda scores: tf.reduce_sum(scores))
    positions, x, _, _ = case("tied", 3)
    with pytest.raises(ValueError, match=r"with respect to arrays with a row.*'\(5, 4\)'|\(5, 4\).*Use vjp or jvp"):
        pk.gradients.jacobian(positions, x, wrt="positions")
