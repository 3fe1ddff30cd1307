"""Losses measured outside the graph: against the same loss inside TensorFlow, and against a plain loop."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from keras import layers

import prunekit as pk
from prunekit.core.runtime.losses import loss_of

CentralDifferences, MeasuredLoss, SPSA = pk.gradients.CentralDifferences, pk.gradients.MeasuredLoss, pk.gradients.SPSA


def network():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, "tanh"), layers.Dense(2, name="last")])
    rng = np.random.default_rng(4)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model


def data(examples=10):
    rng = np.random.default_rng(5)
    precision = keras.config.floatx()
    return rng.normal(size=(examples, 3)).astype(precision), rng.normal(size=(examples, 2)).astype(precision)


def squares(labels, outputs):
    """One number per example."""
    return np.square(outputs.astype("float64") - labels).mean(1)


def squares_of_batch(labels, outputs):
    return squares(labels, outputs).mean()


def with_gradient(labels, outputs):
    """Of each example's own number."""
    return squares(labels, outputs), outputs - labels


def with_gradient_of_batch(labels, outputs):
    return squares_of_batch(labels, outputs), (outputs - labels) / len(outputs)


KINDS = {
    "given": lambda: MeasuredLoss(with_gradient, "given", per_example=True),
    "given, of the batch": lambda: MeasuredLoss(with_gradient_of_batch, "given"),
    "differences": lambda: MeasuredLoss(squares, CentralDifferences(0.01), per_example=True),
    "differences, of the batch": lambda: MeasuredLoss(squares_of_batch, CentralDifferences(0.01)),
}


def fitted(model, loss, x, y, **options):
    model.compile(keras.optimizers.SGD(0.1), loss, jit_compile=False)
    history = model.fit(x, y, batch_size=4, epochs=2, shuffle=False, verbose=0, **options)
    return history.history["loss"]


def fitted_with_pruning(model, loss, x, y):
    callback = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.5, frequency=1), include="last/kernel", allocation="uniform"
    )
    found = fitted(model, loss, x, y, callbacks=[callback])
    assert (model.get_layer("last").kernel.numpy() == 0).mean() == 0.5
    return found


def looped(model, loss, x, y):
    loop = pk.loops.TapeLoop(model, keras.optimizers.SGD(0.1), loss)
    return loop.fit(x, y, batch_size=4, epochs=2, shuffle=False).history["loss"]


def taped(model, loss, x, y):
    losses = []
    for begin in (0, 4, 8) * 2:
        with tf.GradientTape() as tape:
            value = loss(y[begin : begin + 4], model(x[begin : begin + 4]))
        for weight, gradient in zip(model.weights, tape.gradient(value, model.trainable_variables), strict=True):
            weight.assign(weight - 0.1 * gradient)
        losses.append(value.numpy())
    return losses


WAYS = {"fit": fitted, "fit with pruning": fitted_with_pruning, "TapeLoop": looped, "a tape": taped}


@pytest.mark.parametrize(
    ("way", "kind"),
    [("fit", kind) for kind in KINDS]
    + [("a tape", kind) for kind in KINDS]
    + [("TapeLoop", "differences"), ("fit with pruning", "given")],
)
def test_a_squared_error_trains_as_kerass_own(kind, way, precision):
    x, y = data()
    ends = []
    for loss in (keras.losses.MeanSquaredError(dtype=precision), KINDS[kind]()):
        model = network()
        ends.append([*model.get_weights(), WAYS[way](model, loss, x, y), *model.get_weights()])
    tolerance = 1e-8 if precision == "float64" else 1e-3
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance / 10)


def test_sample_weights_weigh_the_numbers_of_examples(precision):
    x, y = data()
    weights = np.arange(10.0).astype(precision)
    ends = []
    for loss in (keras.losses.MeanSquaredError(), KINDS["differences"]()):
        model = network()
        fitted(model, loss, x, y, sample_weight=weights)
        ends.append(model.get_weights())
    for ours, theirs in zip(*ends, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-8 if precision == "float64" else 1e-3, atol=1e-5)
    with pytest.raises(ValueError, match="One number for a batch cannot be weighted by example"):
        fitted(network(), KINDS["differences, of the batch"](), x, y, sample_weight=weights)


@pytest.mark.parametrize(
    ("kind", "gradient", "backward"),
    [
        (squares, CentralDifferences(0.1), 2 * 2),
        (squares_of_batch, CentralDifferences(0.1), 2 * 2 * 5),
        (squares, SPSA(0.1), 2),
        (squares_of_batch, SPSA(0.1, samples=3), 6),
        (with_gradient, "given", 0),
    ],
)
def test_evaluations_are_counted_and_none_is_made_for_a_gradient_that_nobody_asks_for(kind, gradient, backward):
    (x, y), model, calls = data(), network(), []

    def counted(labels, outputs):
        calls.append(len(outputs))
        return kind(labels, outputs)

    loss = MeasuredLoss(counted, gradient, per_example=kind is not squares_of_batch)
    model.compile("sgd", loss, jit_compile=False)
    model.evaluate(x, y, batch_size=5, verbose=0)
    assert loss.evaluations == len(calls) == 2
    model.fit(x, y, batch_size=5, epochs=3, verbose=0)
    assert loss.evaluations == len(calls) == 2 + 3 * 2 * (1 + backward)
    assert set(calls) == {5}


def test_the_same_seed_ends_in_the_same_weights_and_evaluations():
    x, y = data()
    ends = []
    for seed in (1, 1, 2):
        seen = []

        def measure(labels, outputs, seen=seen):
            seen.append(outputs)
            return np.abs(np.round(4 * (outputs - labels))).sum(1)

        model, loss = network(), MeasuredLoss(measure, SPSA(0.5, samples=2, seed=seed), per_example=True)
        fitted(model, loss, x, y)
        ends.append([*model.get_weights(), *seen, loss.evaluations])
    for ours, theirs in zip(ends[0], ends[1], strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (ends[0][0] != ends[2][0]).any()


def test_an_estimate_in_a_step_is_that_of_a_plain_loop(precision):
    (x, y), model = data(6), network()
    seen = []

    def measure(labels, outputs):
        seen.append(outputs)
        return np.abs(np.round(8 * (outputs - labels))).sum(1)

    loss = MeasuredLoss(measure, SPSA(0.5, samples=2, control_variate=None), per_example=True)
    with tf.GradientTape() as tape:
        outputs = model(x)
        tape.watch(outputs)
        value = loss(y, outputs)
    found = tape.gradient(value, outputs).numpy()
    expected = np.zeros((6, 2))
    for plus, minus in (seen[1:3], seen[3:5]):
        for example, output in np.ndindex(6, 2):
            numbers = [np.abs(np.round(8 * (each[example] - y[example]))).sum() for each in (plus, minus)]
            expected[example, output] += (numbers[0] - numbers[1]) / (plus - minus)[example, output] / 2 / 6
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(value, np.abs(np.round(8 * (outputs - y))).sum(1).mean(), rtol=1e-6)


def test_a_black_box_with_steps_is_learnt():
    rng = np.random.default_rng(6)
    x = rng.normal(size=(200, 3)).astype("float32")
    y = np.tanh(x @ rng.normal(size=(3, 2))).astype("float32")

    def measure(labels, outputs):
        return np.square(np.round(outputs * 8) / 8 - labels).sum(1)

    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, "tanh")])
    model.compile(keras.optimizers.Adam(0.03), MeasuredLoss(measure, SPSA(0.2), per_example=True), jit_compile=False)
    losses = model.fit(x, y, epochs=30, batch_size=20, verbose=0).history["loss"]
    assert losses[0] > 0.3 and losses[-1] < 0.02


def test_outputs_of_any_rank_and_labels_in_a_structure_and_the_losses_of_pk_gradients():
    outputs = tf.constant(np.random.default_rng(7).normal(size=(3, 4, 2)), "float32")
    labels = {"first": tf.ones((3, 4)), "second": tf.zeros((3,))}
    shapes = []

    def measure(labels, outputs):
        shapes.append((labels["first"].shape, labels["second"].shape, outputs.shape))
        return np.square(outputs).sum((1, 2))

    loss = MeasuredLoss(measure, CentralDifferences(0.1), per_example=True)
    with tf.GradientTape() as tape:
        tape.watch(outputs)
        value = loss(labels, outputs)
    np.testing.assert_allclose(tape.gradient(value, outputs), 2 * outputs / 3, rtol=1e-3)
    assert set(shapes) == {((3, 4), (3,), (3, 4, 2))}
    flat = MeasuredLoss(lambda labels, outputs: np.square(outputs).sum(1), SPSA(0.1), per_example=True)
    per_example = loss_of(flat, np.zeros((3, 2)), outputs[:, 0], per_example=True)
    np.testing.assert_allclose(per_example, np.square(outputs[:, 0]).sum(1), rtol=1e-6)


def test_what_measure_does_to_its_arrays_stays_with_it():
    (x, y), model = data(), network()

    def careless(labels, outputs):
        found = squares(labels, outputs)
        labels[:], outputs[:] = 7, 8
        return found

    losses = fitted(model, MeasuredLoss(careless, CentralDifferences(0.01), per_example=True), x, y)
    np.testing.assert_allclose(losses, fitted(network(), KINDS["differences"](), x, y), rtol=1e-6)


def test_a_mask_on_the_outputs_is_left_to_measure():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, layers.Dense(2)(layers.Embedding(5, 3, mask_zero=True)(inputs)))
    x, y = np.array([[1, 2, 0, 0], [3, 0, 0, 0]]), np.zeros((2, 4, 2))
    loss = MeasuredLoss(lambda labels, outputs: np.square(outputs).mean((1, 2)), SPSA(0.1), per_example=True)
    found = loss(y, model(x))
    np.testing.assert_allclose(found, np.square(model(x)).mean(), rtol=1e-6)


# What comes back wrong -----------------------------------------------------------------------------------------------


def failing(labels, outputs):
    raise StopIteration("the device is gone")


WRONG = {
    "raises": (failing, True, SPSA(0.1), "`measure` raised StopIteration: the device is gone"),
    "one number": (squares_of_batch, True, SPSA(0.1), "for each example, of shape (4,). Received: shape (). See"),
    "a number each": (squares, False, SPSA(0.1), "a number for the batch, of shape (). Received: shape (4,). See"),
    "NaN": (lambda y, o: o[:, 0] + [1, np.nan, 1, np.inf], True, SPSA(0.1), "Received: nan, 2 of 4 not finite"),
    "nothing": (lambda y, o: None, False, SPSA(0.1), "a number for the batch. Received: None"),
    "a word": (lambda y, o: "low", False, SPSA(0.1), "a number for the batch. Received: 'low'"),
    "no gradient": (squares, True, "given", "`measure` returns (numbers, gradient). Received: array(["),
    "a gradient of another shape": (
        lambda y, o: (squares(y, o), o[:, :1]), True, "given", "a gradient for each example, of shape (4, 2). Received",
    ),
    "NaN only where it is moved": (
        lambda y, o: np.full(4, 1.0 if np.abs(o).max() < 0.5 else np.nan), True, CentralDifferences(1.0), "4 of 4 not",
    ),
}  # fmt: skip


@pytest.mark.parametrize("way", ["fit", "TapeLoop", "a tape"])
@pytest.mark.parametrize("kind", WRONG)
def test_the_error_is_one_line_and_the_weights_are_unchanged(kind, way):
    measure, per_example, gradient, message = WRONG[kind]
    model = keras.Sequential([keras.Input((3,)), layers.Dense(2, kernel_initializer="zeros")])
    x, y = np.ones((8, 3), "float32"), np.ones((8, 2), "float32")
    before = model.get_weights()
    with pytest.raises(tf.errors.OpError if way != "a tape" else (ValueError, RuntimeError), match=re.escape(message)):
        WAYS[way](model, MeasuredLoss(measure, gradient, per_example=per_example), x, y)
    for old, new in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(old, new)
    model.compile("sgd", KINDS["given"](), jit_compile=False)
    model.fit(x, y, verbose=0)


@pytest.mark.parametrize("way", ["fit", "TapeLoop", "a function"])
def test_a_step_that_xla_compiles_is_refused_in_words(way):
    (x, y), model, loss = data(), network(), KINDS["differences"]()
    with pytest.raises(RuntimeError, match="Pass jit_compile=False"):
        if way == "fit":
            model.compile("sgd", loss, jit_compile=True)
            model.fit(x, y, verbose=0)
        elif way == "TapeLoop":
            pk.loops.TapeLoop(model, "sgd", loss, jit_compile=True).step(x, y)
        else:
            inner = tf.function(lambda: loss(y, model(x)))
            tf.function(lambda: inner(), jit_compile=True)()


def test_what_is_no_measured_loss_is_refused():
    with pytest.raises(TypeError, match="`measure` is a function"):
        MeasuredLoss("mse", SPSA(0.1))
    for wrong in ("spsa", None, 0.1, SPSA):
        with pytest.raises(TypeError, match="`gradient` is pk.gradients.CentralDifferences"):
            MeasuredLoss(squares, wrong)
    loss = KINDS["differences"]()
    with pytest.raises(ValueError, match="one row per example. Received: shape \\(\\)"):
        loss(tf.ones(()), tf.ones(()))
    with pytest.raises(TypeError, match="one tensor of outputs. Received: 2 outputs"):
        loss([tf.ones((2, 2))] * 2, [tf.ones((2, 2))] * 2)


def test_a_model_is_saved_with_it_and_loaded_without_it(tmp_path):
    (x, y), model = data(), network()
    fitted(model, KINDS["given"](), x, y)
    model.save(tmp_path / "model.keras")
    with pytest.raises(TypeError, match="Could not locate class 'MeasuredLoss'"):
        keras.models.load_model(tmp_path / "model.keras")
    with pytest.raises(ValueError, match="compile=False"):
        keras.models.load_model(tmp_path / "model.keras", custom_objects={"MeasuredLoss": MeasuredLoss})
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=False)
    np.testing.assert_array_equal(loaded(x), model(x))


def test_several_replicas_are_refused(monkeypatch):
    class Two:
        num_replicas_in_sync = 2

    monkeypatch.setattr(tf.distribute, "get_strategy", Two)
    with pytest.raises(RuntimeError, match="one replica. Received: .* with 2 replicas. It is measured"):
        KINDS["given"]().call(np.ones((2, 2)), np.ones((2, 2)))
