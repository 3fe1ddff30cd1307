"""TapeLoop beside model.fit: the same bytes, the same events, one trace."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.training_tools.loops.tape_loop import TapeLoop

cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
SCHEDULE = PolynomialDecay(0.0, 0.8, 1, 6, frequency=2)
OPTIMIZERS = {
    "SGD": lambda: keras.optimizers.SGD(0.1, momentum=0.9),
    "Adam, clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.5),
    "AdamW, accumulating": lambda: keras.optimizers.AdamW(0.01, gradient_accumulation_steps=2),
    "LossScaleOptimizer": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01)),
    "EMA": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
}


def network(dtype="float32"):
    """Normalisation, dropout, an embedding's kind of regularizer: everything that `fit` has to get right."""
    keras.utils.set_random_seed(1)
    return keras.Sequential(
        [
            keras.Input((8,), dtype=dtype),
            keras.layers.Dense(16, kernel_regularizer="l2", dtype=dtype),
            keras.layers.BatchNormalization(dtype=dtype),
            keras.layers.Activation("relu", dtype=dtype),
            keras.layers.Dropout(0.2, seed=4, dtype=dtype),
            keras.layers.Dense(4, name="logits", dtype=dtype),
        ]
    )


def weights_of(model):
    return [np.array(weight) for weight in model.get_weights()]


def assert_same_bytes(one, other):
    for a, b in zip(weights_of(one), weights_of(other), strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.fixture
def kept_precision():
    yield
    keras.config.set_floatx("float32")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.short(cases=3)
def test_a_loop_ends_in_the_same_bytes_as_fit_with_the_callback(name, samples):
    fitted, looped = network(), network()
    fitted.compile(OPTIMIZERS[name](), cross_entropy, jit_compile=False)
    options = {"epochs": 3, "batch_size": 16, "shuffle": False, "verbose": 0}
    history = fitted.fit(*samples, **options, callbacks=[PruningCallback(SCHEDULE, allocation="uniform")])

    optimizer = OPTIMIZERS[name]()
    with Pruner(looped, SCHEDULE, optimizer, allocation="uniform") as pruner:
        other = TapeLoop(looped, optimizer, cross_entropy, pruner).fit(*samples, **options)
        assert pruner.sparsity == pytest.approx(0.8, abs=0.01)
    assert_same_bytes(fitted, looped)
    assert other.epoch == history.epoch
    assert {key: np.float32(values[-1]) for key, values in other.history.items()} == {
        key: np.float32(values[-1]) for key, values in history.history.items()
    }


def test_in_double_precision_as_well(samples, kept_precision):
    keras.config.set_floatx("float64")
    fitted, looped = network("float64"), network("float64")
    fitted.compile(keras.optimizers.Adam(0.01), cross_entropy, jit_compile=False)
    options = {"epochs": 2, "batch_size": 16, "shuffle": False, "verbose": 0}
    fitted.fit(*samples, **options)
    TapeLoop(looped, keras.optimizers.Adam(0.01), cross_entropy).fit(*samples, **options)
    assert weights_of(looped)[0].dtype == "float64"
    assert_same_bytes(fitted, looped)


def test_a_dataset_is_taken_in_its_own_order(samples):
    fitted, looped = network(), network()
    data = tf.data.Dataset.from_tensor_slices(samples).batch(16)
    fitted.compile("sgd", cross_entropy, jit_compile=False)
    fitted.fit(data, epochs=2, shuffle=False, verbose=0)
    TapeLoop(looped, "sgd", cross_entropy).fit(data, epochs=2)
    assert_same_bytes(fitted, looped)


def test_weighted_examples_metrics_and_validation_are_those_of_fit(samples):
    fitted, looped = network(), network()
    x, y = samples
    weight = np.linspace(0.5, 2, 70).astype("float32")
    held_out = (x[:20], y[:20])
    metric = keras.metrics.SparseCategoricalAccuracy
    fitted.compile("sgd", cross_entropy, weighted_metrics=[metric()], jit_compile=False)
    expected = fitted.fit(
        x, y, batch_size=16, sample_weight=weight, validation_data=held_out, shuffle=False, verbose=0, epochs=2
    ).history
    loop = TapeLoop(looped, "sgd", cross_entropy, metrics=[metric()])
    found = loop.fit(x, y, epochs=2, sample_weight=weight, validation_data=held_out, shuffle=False, batch_size=16)
    assert_same_bytes(fitted, looped)
    assert set(found.history) == set(expected)
    for name, values in expected.items():
        np.testing.assert_allclose(found.history[name], values, rtol=1e-6)


def test_several_inputs_and_outputs_with_a_loss_each():
    def build():
        keras.utils.set_random_seed(2)
        left, right = keras.Input((3,), name="left"), keras.Input((2,), name="right")
        joined = keras.layers.Concatenate()([left, right])
        outputs = {"a": keras.layers.Dense(1, name="a")(joined), "b": keras.layers.Dense(2, name="b")(joined)}
        return keras.Model({"left": left, "right": right}, outputs)

    rng = np.random.default_rng(0)
    x = {"left": rng.normal(size=(20, 3)).astype("float32"), "right": rng.normal(size=(20, 2)).astype("float32")}
    y = {"a": rng.normal(size=(20, 1)).astype("float32"), "b": rng.normal(size=(20, 2)).astype("float32")}
    losses = {"a": "mse", "b": keras.losses.MeanAbsoluteError()}
    fitted, looped = build(), build()
    fitted.compile("sgd", losses, jit_compile=False)
    fitted.fit(x, y, batch_size=8, shuffle=False, verbose=0)
    TapeLoop(looped, "sgd", losses).fit(x, y, batch_size=8, shuffle=False)
    for a, b in zip(weights_of(fitted), weights_of(looped), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-7)


def test_a_step_returns_the_figures_of_its_batch_and_updates_once(samples):
    model = network()
    x, y = samples
    loop = TapeLoop(model, keras.optimizers.SGD(0.0), cross_entropy, metrics=["sparse_categorical_accuracy"])
    figures = loop.step(x[:16], y[:16])
    again = loop.step(x[:16], y[:16])
    assert set(figures) == {"loss", "sparse_categorical_accuracy"}
    assert all(isinstance(value, float) for value in figures.values())
    assert int(loop.optimizer.iterations.numpy()) == 2
    assert 0 <= again["sparse_categorical_accuracy"] <= 1


def test_the_loss_of_a_step_is_that_of_plain_numpy(samples):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, kernel_regularizer=keras.regularizers.L2(0.1))])
    x, y = samples
    kernel, bias = weights_of(model)
    logits = x.astype("float64") @ kernel + bias
    logits -= logits.max(axis=1, keepdims=True)
    chosen = logits[np.arange(70), y] - np.log(np.exp(logits).sum(axis=1))
    expected = -chosen.mean() + 0.1 * (kernel.astype("float64") ** 2).sum()
    assert TapeLoop(model, "sgd", cross_entropy).step(x, y)["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_function_of_the_users_is_averaged_over_the_batch(samples, perceptron):
    x, y = samples
    loop = TapeLoop(
        perceptron, keras.optimizers.SGD(0.0), lambda truth, output: tf.cast(truth, "float32") + 0 * output[:, 0]
    )
    assert loop.step(x, y)["loss"] == pytest.approx(np.abs(y).mean(), rel=1e-6)


def test_the_step_is_traced_once_whatever_the_size_of_the_batch(samples):
    loop = TapeLoop(network(), "adam", cross_entropy)
    loop.fit(*samples, epochs=3, batch_size=16)  # the last batch has 6 examples
    loop.step(samples[0][:5], samples[1][:5])
    assert loop._train.traces == 1
    loop.step(samples[0][:5], samples[1][:5], np.ones(5))
    assert loop._train.traces == 2


def test_changes_of_masks_need_no_trace(samples):
    model, optimizer = network(), keras.optimizers.Adam()
    with Pruner(model, PolynomialDecay(0.0, 0.9, 0, 14, frequency=1), optimizer, allocation="uniform") as pruner:
        loop = TapeLoop(model, optimizer, cross_entropy, pruner)
        loop.fit(*samples, epochs=3, batch_size=16)
        assert len({event.reached for event in pruner.events}) > 5
        assert sum(pruner.audit().values()) == 0
    assert loop._train.traces == 1


def test_nothing_of_the_step_runs_on_the_host_in_python(samples):
    model, optimizer = network(), keras.optimizers.Adam()
    with Pruner(model, ConstantSparsity(0.5), optimizer, allocation="uniform") as pruner:
        loop = TapeLoop(model, optimizer, cross_entropy, pruner)
        loop.step(*samples)
        graph = loop._train.graphs[0]
        kinds = {op.type for op in graph.get_operations()}
        kinds |= {node.op for function in graph.as_graph_def().library.function for node in function.node_def}
    assert "ReadVariableOp" in kinds
    assert not {kind for kind in kinds if "PyFunc" in kind or "Host" in kind or kind in ("Print", "PrintV2")}


def test_the_same_seed_gives_the_same_order_and_another_one_another(samples):
    def train(seed):
        model = network()
        TapeLoop(model, "sgd", cross_entropy).fit(*samples, epochs=2, batch_size=16, seed=seed)
        return weights_of(model)[0]

    np.testing.assert_array_equal(train(3), train(3))
    assert (train(3) != train(4)).any()
    keras.utils.set_random_seed(9)
    first = train(None)
    keras.utils.set_random_seed(9)
    second = train(None)
    np.testing.assert_array_equal(first, second)


def test_each_example_is_seen_once_in_an_epoch(samples):
    seen = []

    class Watch(keras.layers.Layer):
        def call(self, x):
            tf.py_function(lambda rows: seen.append(rows.numpy()), [x], [])
            return x

    model = keras.Sequential([keras.Input((8,)), Watch(), keras.layers.Dense(4)])
    TapeLoop(model, "sgd", cross_entropy).fit(*samples, epochs=2, batch_size=16)
    rows = np.concatenate(seen)
    assert rows.shape == (140, 8)
    for epoch in (rows[:70], rows[70:]):
        np.testing.assert_array_equal(np.sort(epoch, axis=0), np.sort(samples[0], axis=0))
    assert (rows[:70] != rows[70:]).any()


def test_callbacks_see_the_optimizer_and_can_stop_the_training(samples):
    model = network()
    rates = []

    class Record(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            rates.append(float(self.model.optimizer.learning_rate))

    history = TapeLoop(model, keras.optimizers.SGD(0.1), cross_entropy).fit(
        *samples,
        epochs=9,
        callbacks=[
            keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2),
            Record(),
            keras.callbacks.EarlyStopping("loss", patience=1, min_delta=100.0),
        ],
    )
    assert rates == pytest.approx([0.05, 0.025])
    assert history.epoch == [0, 1]
    assert "optimizer" not in vars(model) or model.optimizer is None


def test_a_schedule_that_is_too_long_is_announced_before_and_after(samples):
    model, optimizer = network(), keras.optimizers.SGD(0.1)
    pruner = Pruner(model, PolynomialDecay(0.0, 0.9, 0, 1000), optimizer, allocation="uniform")
    with pytest.warns(UserWarning, match="lands on sparsity 0.9 at step 1000") as caught:
        TapeLoop(model, optimizer, cross_entropy, pruner).fit(*samples, epochs=2, batch_size=16)
    pruner._attached.close()
    assert ["has only 10 steps" in str(caught[0].message), "ended after 10" in str(caught[1].message)] == [True, True]


def test_progress_is_shown_where_asked_for(samples, capsys):
    loop = TapeLoop(network(), "sgd", cross_entropy)
    loop.fit(*samples, epochs=2)
    assert capsys.readouterr().out == ""
    loop.fit(*samples, epochs=2, verbose=2)
    assert "Epoch 2/2" in capsys.readouterr().out


def test_a_step_compiled_by_xla_agrees(samples, perceptron):
    # Without dropout: under XLA Keras draws other numbers.
    plain, fused = perceptron, keras.models.clone_model(perceptron)
    fused.set_weights(plain.get_weights())
    TapeLoop(plain, "sgd", cross_entropy).fit(*samples, shuffle=False, batch_size=35)
    TapeLoop(fused, "sgd", cross_entropy, jit_compile=True).fit(*samples, shuffle=False, batch_size=35)
    for a, b in zip(weights_of(plain), weights_of(fused), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)


def test_what_cannot_be_is_refused(samples, perceptron):
    optimizer = keras.optimizers.SGD()
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    x, y = samples
    with Pruner(perceptron, ConstantSparsity(0.5), optimizer, allocation="uniform") as pruner:
        with pytest.raises(ValueError, match="The pruner was built without this loop's optimizer.*pk.Pruner"):
            TapeLoop(perceptron, keras.optimizers.SGD(), cross_entropy, pruner)
        with pytest.raises(ValueError, match="prunes another model"):
            TapeLoop(other, optimizer, cross_entropy, pruner)
        with pytest.raises(TypeError, match="`pruner` is a pk.Pruner.* Received: <Sequential"):
            TapeLoop(perceptron, optimizer, cross_entropy, perceptron)
    loop = TapeLoop(other, "sgd", cross_entropy)
    with pytest.raises(TypeError, match="PruningCallback works inside model.fit.*pruner=pruner"):
        loop.fit(x, y, callbacks=[PruningCallback(SCHEDULE, allocation="uniform")])
    with pytest.raises(ValueError, match="Arrays need labels. Received: y=None"):
        loop.fit(x)
    with pytest.raises(ValueError, match="one row per example.* Received: x with 70, y with 69"):
        loop.fit(x, y[:69])
    with pytest.raises(ValueError, match="at least one. Received: x with 0, y with 0"):
        loop.fit(x[:0], y[:0])
    with pytest.raises(ValueError, match="batch_size must be at least 1. Received: batch_size=0"):
        loop.fit(x, y, batch_size=0)
    with pytest.raises(ValueError, match="epochs must be at least 1. Received: epochs=-1"):
        loop.fit(x, y, epochs=-1)
    with pytest.raises(ValueError, match="Losses are shaped like the outputs.* Received: loss=.* for outputs of shape"):
        TapeLoop(other, "sgd", [cross_entropy, cross_entropy]).step(x, y)
    with pytest.raises(ValueError, match="A dataset holds its own labels"):
        loop.fit(tf.data.Dataset.from_tensor_slices(samples).batch(4), y)
    with pytest.raises(ValueError, match="Training needs a loss.* Received: None"):
        TapeLoop(other, "sgd", None)
    with pytest.raises(ValueError, match="is not built"):
        TapeLoop(keras.Sequential([keras.layers.Dense(3)]), "sgd", cross_entropy)


def test_several_replicas_are_refused_with_the_remedy(perceptron, monkeypatch):
    class Strategy:
        num_replicas_in_sync = 2

    monkeypatch.setattr(tf.distribute, "get_strategy", Strategy)
    with pytest.raises(RuntimeError, match="one replica. Received: Strategy with 2 replicas. Use model.fit"):
        TapeLoop(perceptron, "sgd", cross_entropy)


@pytest.mark.parametrize(
    ("metrics", "error", "message"),
    [
        (["accuracy"], ValueError, "'sparse_categorical_accuracy' for labels that are numbers.*Received: 'accuracy'"),
        (["ce"], ValueError, "'binary_crossentropy' for one output. Received: 'ce'"),
        ("mse", TypeError, "is a list of Keras metrics.*Received: 'mse'"),
    ],
)
def test_a_metric_that_means_several_is_refused_with_their_names(metrics, error, message, perceptron):
    with pytest.raises(error, match=message):
        TapeLoop(perceptron, "sgd", "mse", metrics=metrics)
