"""The statistics of criteria, against derivatives of a two-layer network in plain NumPy."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from keras import ops
from networks import sequential

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.statistics import Collectors

pytestmark = pytest.mark.every_backend

RNG = np.random.default_rng(7)
INPUTS, LABELS = RNG.normal(size=(10, 3)).astype("float32"), RNG.integers(0, 2, 10)
# Batches of different sizes.
BATCHES = [(INPUTS[:6], LABELS[:6]), (INPUTS[6:], LABELS[6:])]


class Network:
    """softmax(tanh(x V) W) with the mean cross-entropy, and its derivatives with respect to V and W."""

    def __init__(self, v, w):
        self.v, self.w = np.asarray(v, "float64"), np.asarray(w, "float64")

    def forward(self, x):
        hidden = np.tanh(np.asarray(x, "float64") @ self.v)
        scores = np.exp(hidden @ self.w)
        return hidden, scores / scores.sum(axis=1, keepdims=True)

    def gradients(self, x, y):
        """The gradients of each example's loss: shapes (examples, 3, 4) and (examples, 4, 2)."""
        hidden, probabilities = self.forward(x)
        return self.pulled(x, hidden, probabilities - np.eye(2)[y])

    def pulled(self, x, hidden, cotangents):
        back = (cotangents @ self.w.T) * (1 - hidden**2)
        return np.einsum("ni,nj->nij", x, back), np.einsum("ni,nj->nij", hidden, cotangents)

    def gradient(self, x, y):
        return [each.mean(axis=0) for each in self.gradients(x, y)]

    def gauss_newton(self, x):
        """The mean over examples of diag(J^T (diag(p) - p p^T) J)."""
        hidden, p = self.forward(x)
        jacobians = [self.pulled(x, hidden, np.tile(row, (len(x), 1))) for row in np.eye(2)]
        curvature = np.einsum("nk,kl->nkl", p, np.eye(2)) - np.einsum("nk,nl->nkl", p, p)
        return [
            np.einsum("knij,nkl,lnij->ij", np.stack(each), curvature, np.stack(each)) / len(x)
            for each in zip(*jacobians, strict=True)
        ]

    def hessian_times_gradient(self, x, y, step=1e-5):
        """Central difference of the gradient along the gradient."""
        first, second = self.gradient(x, y)
        ends = [Network(self.v + sign * step * first, self.w + sign * step * second).gradient(x, y) for sign in (1, -1)]
        return [(ahead - behind) / (2 * step) for ahead, behind in zip(*ends, strict=True)]


def model_of(activation="softmax", **options):
    layers = keras.layers
    model = sequential(
        (3,),
        layers.Dense(4, "tanh", use_bias=False, name="first"),
        layers.Dense(2, activation, use_bias=False, name="second"),
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=activation is None)
    model.compile("sgd", **{"loss": loss, **options})
    return model


@pytest.fixture
def model():
    return model_of()


def collected(model, name, data=None, **options):
    targets, _ = find_targets(model, **options)
    found = Collectors({name}, model, targets, data).values()
    return [ops.convert_to_numpy(each[name]) for each in found]


def network_of(model):
    return Network(*(ops.convert_to_numpy(ops.convert_to_tensor(layer.kernel)) for layer in model.layers))


def assert_close(found, expected, rtol=2e-4):
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-6)


def test_gradient_is_that_of_the_mean_loss_over_all_batches(model):
    assert_close(collected(model, "gradient", BATCHES), network_of(model).gradient(INPUTS, LABELS))


@pytest.mark.every_backend(cases=0)
def test_square_batch_gradient_is_the_mean_of_squares_weighted_by_examples(model):
    each = [network_of(model).gradient(*batch) for batch in BATCHES]
    expected = [0.6 * one**2 + 0.4 * other**2 for one, other in zip(*each, strict=True)]
    assert_close(collected(model, "square_batch_gradient", BATCHES), expected)


@pytest.mark.every_backend(cases=1)
def test_gradient_flow_is_the_hessian_of_the_mean_loss_times_its_gradient(model):
    expected = network_of(model).hessian_times_gradient(INPUTS, LABELS)
    assert_close(collected(model, "gradient_flow", BATCHES), expected, rtol=2e-3)


@tensorflow_only
@pytest.mark.one_backend
def test_gradient_flow_is_exact_with_layer_normalization():
    import tensorflow as tf

    layers = keras.layers
    model = sequential((3,), layers.Dense(4), layers.LayerNormalization(), layers.Dense(2, "softmax"))
    model.compile("sgd", "sparse_categorical_crossentropy")
    found = collected(model, "gradient_flow", (INPUTS, LABELS))
    variables = [model.layers[0].kernel, model.layers[2].kernel]

    def gradient():
        with tf.GradientTape() as tape:
            loss = model.compute_loss(y=LABELS, y_pred=model(INPUTS))
        return [one.numpy() for one in tape.gradient(loss, [variable.value for variable in variables])]

    first, values, step = gradient(), [variable.numpy() for variable in variables], 1e-2
    ends = []
    for sign in (1, -1):
        for variable, value, along in zip(variables, values, first, strict=True):
            variable.assign(value + sign * step * along)
        ends.append(gradient())
    for one, ahead, behind in zip(found, *ends, strict=True):
        np.testing.assert_allclose(one, (ahead - behind) / (2 * step), rtol=0.02, atol=2e-4)


@tensorflow_only
@pytest.mark.one_backend
def test_gradient_flow_of_weights_before_batch_normalization_follows_from_their_scale():
    layers = keras.layers
    model = sequential(
        (3,),
        layers.Dense(4, use_bias=False, name="first"),
        layers.BatchNormalization(epsilon=1e-9),
        layers.Dense(2, "softmax"),
    )
    model.compile("sgd", "sparse_categorical_crossentropy")
    (flow,) = collected(model, "gradient_flow", (INPUTS, LABELS), include=["first"])
    (slope,) = collected(model, "gradient", (INPUTS, LABELS), include=["first"])
    # The loss does not depend on the length of a column v: the derivative of g(c v) = g(v) / c in c is H v = -g.
    kernel = ops.convert_to_numpy(ops.convert_to_tensor(model.layers[0].kernel))
    np.testing.assert_allclose(np.sum(kernel * flow), -np.sum(slope**2), rtol=1e-3)


@pytest.mark.one_backend
def test_the_gradient_contains_that_of_regularizers(model):
    plain = collected(model, "gradient", (INPUTS, LABELS))
    regularized = sequential(
        (3,),
        keras.layers.Dense(4, "tanh", use_bias=False, kernel_regularizer=keras.regularizers.L2(0.5)),
        keras.layers.Dense(2, "softmax", use_bias=False),
    )
    regularized.compile("sgd", "sparse_categorical_crossentropy")
    regularized.set_weights(model.get_weights())
    found = collected(regularized, "gradient", (INPUTS, LABELS))
    assert_close(found, [plain[0] + network_of(model).v, plain[1]])


@tensorflow_only
@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["gradient", "square_gradient"])
def test_gradients_of_a_mixed_precision_model_are_those_of_float32(name, model):
    policy = keras.dtype_policies.DTypePolicy("mixed_float16")
    half = keras.models.clone_model(
        model, clone_function=lambda layer: type(layer).from_config({**layer.get_config(), "dtype": policy})
    )
    half.set_weights(model.get_weights())
    # Gradients below 6e-8 are zero in float16.
    tiny = model_of(loss=lambda y, p: 1e-9 * keras.losses.sparse_categorical_crossentropy(y, p))
    tiny.set_weights(model.get_weights())
    half.compile("sgd", tiny.loss)
    assert half.layers[0].compute_dtype == "float16"
    for one, other in zip(*(collected(each, name, (INPUTS, LABELS)) for each in (half, tiny)), strict=True):
        np.testing.assert_array_equal(one, other)
        assert np.abs(one).max() > 0


@tensorflow_only
@pytest.mark.one_backend
def test_square_gradient_is_the_mean_of_squared_gradients_of_examples(model):
    expected = [(each**2).mean(axis=0) for each in network_of(model).gradients(INPUTS, LABELS)]
    assert_close(collected(model, "square_gradient", BATCHES), expected)


@tensorflow_only
@pytest.mark.one_backend
def test_square_gradient_of_several_outputs_is_of_the_sum_of_their_losses():
    inputs = keras.Input((3,))
    hidden = keras.layers.Dense(4, "tanh", use_bias=False, name="hidden")(inputs)
    heads = {name: keras.layers.Dense(1, use_bias=False, name=name)(hidden) for name in ("p", "q")}
    model = keras.Model(inputs, heads)
    model.compile("sgd", {"p": "mse", "q": "mse"})
    labels = {"p": INPUTS[:, :1], "q": INPUTS[:, 1:2]}
    kernels = [ops.convert_to_numpy(ops.convert_to_tensor(weight)) for weight in model.get_weights()]
    active = np.tanh(INPUTS @ kernels[0])
    slopes = [2 * (active @ kernel - labels[name]) for name, kernel in zip("pq", kernels[1:], strict=True)]
    back = sum(slope @ kernel.T for slope, kernel in zip(slopes, kernels[1:], strict=True)) * (1 - active**2)
    expected = [(np.einsum("ni,nj->nij", INPUTS, back) ** 2).mean(axis=0)]
    expected += [((active * slope) ** 2).mean(axis=0)[:, None] for slope in slopes]
    assert_close(collected(model, "square_gradient", (INPUTS, labels)), expected)


@tensorflow_only
@pytest.mark.one_backend
@pytest.mark.parametrize("activation", ["softmax", None])
def test_gauss_newton_is_the_diagonal_for_outputs_before_the_softmax(activation):
    model = model_of(activation)
    assert_close(collected(model, "gauss_newton", BATCHES), network_of(model).gauss_newton(INPUTS))


@tensorflow_only
@pytest.mark.one_backend
def test_gauss_newton_of_a_squared_error_is_that_of_the_outputs():
    model = model_of(None, loss="mse")
    network = network_of(model)
    hidden, _ = network.forward(INPUTS)
    # The mean over two outputs of squares has the Hessian 2 / 2 on the diagonal.
    each = [network.pulled(INPUTS, hidden, np.tile(row, (10, 1))) for row in np.eye(2)]
    expected = [(one**2 + other**2).mean(axis=0) for one, other in zip(*each, strict=True)]
    assert_close(collected(model, "gauss_newton", (INPUTS, np.eye(2)[LABELS])), expected)


def test_synflow_is_the_gradient_of_the_summed_outputs_of_magnitudes():
    layers = keras.layers
    model = sequential(
        (3,),
        layers.Dense(4, use_bias=False, name="first"),
        layers.BatchNormalization(),
        layers.PReLU(),
        layers.Dense(2, "softmax", name="second"),
    )
    normalization = model.layers[1]
    normalization.moving_variance.assign([1.0, 4.0, 0.25, 9.0])
    normalization.gamma.assign([1.0, -2.0, 0.5, -1.0])
    before = [np.array(ops.convert_to_numpy(ops.convert_to_tensor(weight))) for weight in model.weights]
    v, w = np.abs(before[0]), np.abs(before[6])
    gain = np.abs([1.0, -2.0, 0.5, -1.0]) / np.sqrt(np.array([1.0, 4.0, 0.25, 9.0]) + normalization.epsilon)
    first = np.tile(gain * w.sum(axis=1), (3, 1))
    second = np.tile((v.sum(axis=0) * gain)[:, None], (1, 2))
    largest = max((v * first).max(), (w * second).max())
    assert_close(collected(model, "synflow"), [first / largest, second / largest])
    for weight, value in zip(model.weights, before, strict=True):
        np.testing.assert_array_equal(ops.convert_to_numpy(ops.convert_to_tensor(weight)), value)
    assert {layer.dtype_policy.name for layer in model.layers} == {"float32"}


@tensorflow_only
@pytest.mark.one_backend
def test_synflow_of_a_network_whose_flow_exceeds_float32_is_finite():
    width = 8
    hidden = [keras.layers.Dense(width, use_bias=False) for _ in range(30)]
    model = keras.Sequential([keras.Input((width,)), *hidden])
    for layer in hidden:
        layer.kernel.assign(np.full((width, width), 1e3, "float32"))
    # All paths are equal, so that the scores are, too.
    for found in collected(model, "synflow"):
        np.testing.assert_allclose(found, 1e-3, rtol=1e-5)


@pytest.mark.one_backend
def test_synflow_leaves_the_model_as_it_was_when_a_layer_raises(model):
    def fail(value):
        raise ArithmeticError("stop")

    policy, kernel = model.layers[1].dtype_policy, np.array(ops.convert_to_numpy(model.layers[0].kernel))
    model.layers[1].activation = fail
    with pytest.raises(ArithmeticError, match="stop"):
        collected(model, "synflow")
    assert model.layers[1].dtype_policy is policy
    np.testing.assert_array_equal(ops.convert_to_numpy(model.layers[0].kernel), kernel)


@pytest.mark.one_backend
def test_synflow_of_tokens_is_refused():
    model = keras.Sequential([keras.Input((5,), dtype="int32"), keras.layers.Embedding(9, 4), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match="all inputs must be of a floating-point type. Received: the model"):
        collected(model, "synflow")


@pytest.mark.one_backend
@pytest.mark.parametrize(
    "name", ["gradient", "square_batch_gradient", "gradient_flow", "square_gradient", "gauss_newton"]
)
def test_a_derivative_of_the_loss_is_refused_without_labels_and_without_a_loss(name, model):
    with pytest.raises(ValueError, match=f"statistic '{name}' .* needs labels. Received: data without labels"):
        collected(model, name, INPUTS)
    with pytest.raises(ValueError, match=f"statistic '{name}' is collected from data. Received: no data"):
        collected(model, name)
    plain = keras.Sequential([keras.Input((3,)), keras.layers.Dense(2)])
    with pytest.raises(ValueError, match=f"statistic '{name}' .* not compiled with a loss. Call model.compile"):
        collected(plain, name, (INPUTS, LABELS))


@tensorflow_only
@pytest.mark.one_backend
def test_statistics_of_examples_are_refused_for_frozen_weights_and_weighted_losses(model):
    model.layers[0].trainable = False
    with pytest.raises(ValueError, match="Received: first/kernel, which is frozen"):
        collected(model, "square_gradient", (INPUTS, LABELS))
    weighted = model_of(loss_weights=[2.0])
    with pytest.raises(ValueError, match="without `loss_weights`. Received: the model"):
        collected(weighted, "square_gradient", (INPUTS, LABELS))
    wide = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1025)])
    wide.compile("sgd", "mse")
    with pytest.raises(ValueError, match=r"one output of at most 1024 .* shape \(None, 1025\)"):
        collected(wide, "gauss_newton", (INPUTS, np.zeros((10, 1025))))
