"""`fit` with a callback of prunekit traces its first step once on TensorFlow, and creates what Keras would create."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only

import prunekit as pk

pytestmark = tensorflow_only
X = np.random.default_rng(0).normal(size=(32, 4)).astype("float32")
Y = np.arange(32) % 2
CALLBACKS = {
    "pruning": lambda: pk.PruningCallback(pk.schedules.ConstantSparsity(0.5), allocation="uniform"),
    "quantization": lambda: pk.QuantizationCallback(X, freeze_step=-1),
}


class Counting(keras.optimizers.Adam):
    """Adam that counts the calls of `apply`: one for each trace of the step."""

    applied = 0

    def apply(self, grads, trainable_variables=None):
        self.applied += 1
        return super().apply(grads, trainable_variables)


class ReadsValues(keras.metrics.MeanSquaredError):
    """A metric that cannot be built without data."""

    def update_state(self, y_true, y_pred, sample_weight=None):
        if y_true.shape[0] is None or keras.backend.is_keras_tensor(y_true):
            raise RuntimeError("no data")


class OwnStep(keras.Model):
    """Trains the last layer alone."""

    def __init__(self):
        super().__init__()
        self.body, self.head = keras.layers.Dense(4, name="body"), keras.layers.Dense(1, name="head")

    def call(self, x):
        return self.head(self.body(x))

    def train_step(self, data):
        import tensorflow as tf

        with tf.GradientTape() as tape:
            loss = self.compute_loss(y=data[1], y_pred=self(data[0], training=True))
        weights = self.head.trainable_variables
        self.optimizer.apply(tape.gradient(loss, weights), weights)
        return {"loss": loss}


def network(outputs=1):
    inputs = keras.Input((4,))
    x = keras.layers.Dense(8, "relu", name="hidden")(inputs)
    return keras.Model(inputs, [keras.layers.Dense(1, name=f"output_{i}")(x) for i in range(outputs)])


@pytest.mark.parametrize("name", CALLBACKS)
@pytest.mark.parametrize(
    ("outputs", "metrics"), [(1, None), (1, ["mae"]), (2, None)], ids=["loss", "metric", "two losses"]
)
def test_the_first_step_is_traced_once(name, outputs, metrics):
    model, optimizer = network(outputs), Counting()
    model.compile(optimizer, ["mse"] * outputs, metrics=metrics)
    history = model.fit(X, [Y] * outputs, batch_size=16, verbose=0, callbacks=[CALLBACKS[name]()]).history
    assert optimizer.applied == 1 and optimizer.iterations == 2
    assert len(history.keys() - {"sparsity"}) == 1 + bool(metrics) + (outputs if outputs > 1 else 0)


def test_what_is_trained_is_what_a_step_traced_twice_trains(monkeypatch):
    results = []
    for creates in (True, False):
        if not creates:
            monkeypatch.setattr("prunekit.core.training.train_function.create_step_state", lambda *_: None)
        keras.utils.set_random_seed(0)
        model, optimizer = network(), Counting(use_ema=True, name="adam")
        model.compile(optimizer, "mse", metrics=["mae"])
        history = model.fit(X, Y, verbose=0, shuffle=False, callbacks=[CALLBACKS["quantization"]()]).history
        results.append((optimizer.applied, history, model.get_weights(), [one.path for one in optimizer.variables]))
    assert [one[0] for one in results] == [1, 2]
    assert results[0][1] == results[1][1] and results[0][3] == results[1][3]
    assert all(np.array_equal(one, other) for one, other in zip(results[0][2], results[1][2], strict=True))


def test_a_metric_that_cannot_be_built_without_data_is_left_to_keras():
    model, optimizer = network(), Counting()
    model.compile(optimizer, "mse", metrics=[ReadsValues()])
    model.fit(X, Y, batch_size=32, verbose=0, callbacks=[CALLBACKS["pruning"]()])
    assert optimizer.built and optimizer.iterations == 1


def test_a_step_of_the_models_own_builds_the_optimizer_for_the_weights_that_it_trains():
    model = OwnStep()
    model(X[:1])
    model.compile("sgd", "mse")
    model.fit(X, Y, verbose=0, callbacks=[CALLBACKS["pruning"]()])
    assert [one.path for one in model.optimizer._trainable_variables] == [one.path for one in model.head.weights]
