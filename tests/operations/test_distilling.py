"""`pk.distilling`: a scope around `fit`, `train_on_batch` and loops of your own."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from quantized_training import LOSS, X, Y, fit, network

import prunekit as pk

pytestmark = pytest.mark.every_backend


@pytest.fixture(scope="module")
def teacher():
    model = network()
    fit(model, epochs=2)
    return model


def plain_network():
    keras.utils.set_random_seed(5)
    model = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Flatten(), keras.layers.Dense(4)])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    return model


def test_fit_in_the_scope_is_fit_with_the_callback(teacher):
    one, callback = network(), pk.DistillationCallback(teacher, weight=0.7)
    fit(one, callback, epochs=2)
    two = network()
    with pk.distilling(two, teacher, weight=0.7) as distillation:
        fit(two, epochs=2)
    for first, second in zip(one.get_weights(), two.get_weights(), strict=True):
        np.testing.assert_array_equal(first, second)
    assert distillation.report.cached_examples == callback.report.cached_examples == 256


def test_callbacks_that_are_given_by_position_stay(teacher):
    model, seen = plain_network(), []
    watch = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: seen.append(epoch))
    with pk.distilling(model, teacher) as distillation:
        model.fit(X, Y, 64, 2, 0, [watch])
        assert seen == [0, 1] and distillation.report.outputs[0].loss == "dist"
        model.fit(X, Y, 64, 1, 0, watch)
        own = pk.DistillationCallback(teacher, loss="mse")
        model.fit(X, Y, 64, 1, 0, [own])
    assert own.report.outputs[0].loss == "mse"


def test_train_on_batch_learns_from_the_teacher_inside_the_scope_alone(teacher):
    with_callback, model = plain_network(), plain_network()
    loss = with_callback.fit(
        X[:64], Y[:64], batch_size=64, verbose=0, callbacks=[pk.DistillationCallback(teacher)]
    ).history["loss"][0]
    plain = plain_network().train_on_batch(X[:64], Y[:64])
    model.train_on_batch(X[:64], Y[:64])
    model.set_weights(plain_network().get_weights())
    with pk.distilling(model, teacher):
        assert float(model.train_on_batch(X[:64], Y[:64])) == pytest.approx(loss, rel=1e-5)
        model.set_weights(plain_network().get_weights())
        # `evaluate` measures the compiled loss.
        assert model.evaluate(X[:64], Y[:64], verbose=0) == pytest.approx(float(plain), rel=1e-5)
    assert float(model.train_on_batch(X[:64], Y[:64])) == pytest.approx(float(plain), rel=1e-5)


def test_the_model_is_given_back_also_after_an_error(teacher):
    model = plain_network()
    attributes = {name for name in vars(model) if name != "_compile_loss"}
    with pytest.raises(KeyError), pk.distilling(model, teacher, features=()):
        model.fit(X, Y, epochs=1, verbose=0)
        raise KeyError("own")
    assert {"fit", "compute_loss"}.isdisjoint(vars(model)) and attributes <= set(vars(model))


@tensorflow_only
@pytest.mark.parametrize("options", [{}, {"features": ["norm"]}], ids=["outputs", "features"])
def test_a_loop_of_your_own_adds_the_loss(teacher, options):
    import tensorflow as tf

    def trained(step_of):
        model = network()
        with pk.distilling(model, teacher, **options) as distillation:
            step = tf.function(step_of(model, distillation))
            for start in range(0, 256, 64):
                step(X[start : start + 64], Y[start : start + 64])
        return model.get_weights()

    def by_hand(model, distillation):
        def step(x, y):
            with tf.GradientTape() as tape:
                outputs = model(x, training=True)
                loss = 0.5 * LOSS(y, outputs) + distillation.loss(x, outputs)
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        return step

    def by_keras(model, distillation):
        def step(x, y):
            with tf.GradientTape() as tape:
                loss = model.compute_loss(x, y, model(x, training=True))
            variables = model.trainable_variables
            model.optimizer.apply(tape.gradient(loss, variables), variables)

        return step

    for one, two in zip(trained(by_hand), trained(by_keras), strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-4, atol=1e-5)


def test_without_a_teacher_the_model_of_the_beginning_teaches():
    model = network()
    with pk.distilling(model, loss="kl", weight=1.0) as distillation:
        first = float(np.ravel(model.train_on_batch(X[:64], Y[:64]))[0])
        assert distillation.loss(X[:8], model(X[:8])) > 0
    # Dropout and statistics of the batch are the only differences from itself.
    assert 0 < first < 16


def test_wrong_arguments_are_refused(teacher):
    with pytest.raises(TypeError, match="`teacher` is a Keras 3 model or None"), pk.distilling(network(), 3):
        pass
    with pytest.raises(TypeError, match="alpha"), pk.distilling(network(), teacher, alpha=1):
        pass
    with pytest.raises(RuntimeError, match="exists once"), pk.distilling(network(), teacher) as distillation:
        _ = distillation.report
