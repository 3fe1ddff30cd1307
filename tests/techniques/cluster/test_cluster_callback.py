"""Training on centroids in `fit`: what is trained, validated and left behind, alone and with other callbacks."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from interrupted_training import crashed, resumed, whole_and_resumed
from quantized_training import LOSS, X, Y, fit, kernels, network, quantizing

import prunekit as pk

pytestmark = pytest.mark.every_backend
CLUSTERED = {"conv/kernel", "depthwise/kernel", "logits/kernel"}


def trained():
    model = network()
    fit(model, epochs=4)
    return model


def most_values(values, run=None):
    """Largest number of different values of an output channel, or of the whole."""
    if run is None:
        return np.unique(values).size
    rows = values.reshape(-1, values.shape[-2] if values.shape[-1] == 1 else values.shape[-1]).T
    return max(np.unique(row).size for row in rows)


@pytest.mark.parametrize("options", [{}, {"gradients": "sum"}, {"assignment": "soft"}], ids=str)
def test_the_model_ends_on_centroids_and_keeps_its_accuracy(options):
    model = trained()
    floats = model.evaluate(X, Y, verbose=0)[1]
    callback = pk.ClusterCallback(4, **options)
    history = fit(model, callback, epochs=4, validation_data=(X, Y), validation_batch_size=64).history
    assert all(most_values(values) <= 4 for values in kernels(model).values())
    found = model.evaluate(X, Y, batch_size=64, verbose=0)
    assert found[1] >= floats - 0.02
    # Validation in `fit` measured what is left.
    np.testing.assert_allclose(found, [history["val_loss"][-1], history["val_accuracy"][-1]], rtol=1e-4)
    report = callback.report
    assert report.method == "training" and {one.name for one in report.weights} == CLUSTERED
    assert {one.values for one in report.weights} == {4} and report.bytes[1] < report.bytes[0]


def test_training_moves_centroids_and_gives_entries_other_ones():
    model, other = trained(), trained()
    pk.cluster(other, 4, granularity="channel", method="kmeans")
    fit(model, pk.ClusterCallback(4, granularity="channel"), epochs=2)
    before, after = kernels(other)["logits/kernel"].T, kernels(model)["logits/kernel"].T
    assert all(np.unique(row).size <= 4 for row in after)
    ranks = [[np.searchsorted(np.unique(row), row) for row in rows] for rows in (before, after)]
    assert any((one != two).any() for one, two in zip(*ranks, strict=True))
    assert all(
        np.abs(np.unique(one)[:2] - np.unique(two)[:2]).max() > 1e-5 for one, two in zip(before, after, strict=True)
    )


def test_on_data_it_begins_with_the_weights_of_the_call():
    model, other = trained(), trained()
    model.compile(keras.optimizers.SGD(0.0), LOSS)
    fit(model, pk.ClusterCallback(2, X[:64]), epochs=1)
    pk.cluster(other, 2, X[:64])
    for name, values in kernels(model).items():
        np.testing.assert_array_equal(values, kernels(other)[name])
    with pytest.raises(ValueError, match="8, 8, 1"):
        fit(trained(), pk.ClusterCallback(4, np.zeros((4, 7, 7, 1), "float32")))


def test_zeros_of_the_model_stay_and_no_other_entry_becomes_one():
    model = trained()
    for layer in (model.get_layer(name.split("/")[0]) for name in CLUSTERED):
        kernel = keras.ops.convert_to_numpy(layer.kernel)
        layer.kernel.assign(np.where(np.abs(kernel) < np.quantile(np.abs(kernel), 0.6), 0, kernel))
    zeros = {name: values == 0 for name, values in kernels(model).items()}
    assert sum(one.sum() for one in zeros.values()) > 50
    # The optimizer's momentum moves zeros that nothing holds.
    fit(model, pk.ClusterCallback(3), epochs=2)
    for name, values in kernels(model).items():
        np.testing.assert_array_equal(values == 0, zeros[name])
        assert most_values(values) <= 3


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_with_pruning_and_quantization_in_any_order(reverse):
    model = trained()
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=12, frequency=2)
    pruning, clusters = pk.PruningCallback(schedule, allocation="uniform"), pk.ClusterCallback(4)
    integers = quantizing(bits=8)
    callbacks = [pruning, clusters, integers]
    history = fit(model, *(callbacks[::-1] if reverse else callbacks), epochs=3, validation_data=(X, Y)).history
    assert not any(pruning.pruner.audit().values())
    for name, mask in pruning.pruner.masks.items():
        assert (kernels(model)[name][~mask] == 0).all()
    # Equal values of a channel have equal integers, and zero is one of the four.
    assert all(most_values(values, run=1) <= 4 for values in kernels(model).values())
    with integers.report.simulating():
        found = model.evaluate(X, Y, batch_size=256, verbose=0)[1]
    assert found == pytest.approx(history["val_accuracy"][-1], abs=0.02) and found > 0.9


def test_between_batches_and_afterwards_the_model_is_its_own():
    model = trained()
    fit(model, epochs=1, validation_data=(X[:32], Y[:32]))
    attributes = {id(owner): set(vars(owner)) for owner in (model.optimizer, *model._flatten_layers())}
    slots, seen = [tuple(one.shape) for one in model.optimizer.variables], []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            layers = [self.model, *self.model.layers]
            seen.append((len(self.model.trainable_variables), any("call" in vars(one) for one in layers)))

    fit(model, pk.ClusterCallback(4), Watch(), epochs=1, validation_data=(X, Y))
    assert set(seen) == {(len(model.trainable_variables), False)}
    assert [tuple(one.shape) for one in model.optimizer.variables] == slots
    for owner in (model.optimizer, *model._flatten_layers()):
        assert set(vars(owner)) == attributes[id(owner)]


class OwnStep(keras.Model):
    """Calls its parts by itself, as GANs and autoencoders do."""

    def __init__(self):
        super().__init__()
        self.body = keras.layers.Dense(12, activation="relu", name="body")
        self.head = keras.layers.Dense(4, name="head", use_bias=False)

    def call(self, x):
        return self.head(self.body(x))

    def train_step(self, batch):
        import tensorflow as tf

        x, y = batch
        with tf.GradientTape() as tape:
            loss = self.compute_loss(x, y, self.head(self.body(x)))
        variables = self.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return {"loss": loss, "values": tf.cast(tf.size(tf.unique(tf.reshape(self.seen(), [-1]))[0]), "float32")}

    def seen(self):
        """The kernel that a product with the identity shows."""
        return self.head(keras.ops.eye(12))


@tensorflow_only
def test_a_training_step_that_calls_layers_by_themselves_computes_on_centroids():
    keras.utils.set_random_seed(0)
    model, x = OwnStep(), np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    model(x[:1])
    model.compile(keras.optimizers.SGD(0.1), LOSS)
    history = model.fit(x, Y[:64], batch_size=16, epochs=1, verbose=0, callbacks=[pk.ClusterCallback(3)]).history
    assert history["values"] == [3.0]
    assert np.unique(model.head.kernel).size == 3


def test_centroids_follow_the_learning_rate_of_the_model():
    starts = {}
    for rate in (0.0, 0.05):
        model = trained()
        model.compile(keras.optimizers.SGD(0.05, momentum=0.9), LOSS)
        schedule = keras.callbacks.LearningRateScheduler(lambda epoch, now, rate=rate: rate)
        callback = pk.ClusterCallback(4)
        fit(model, schedule, callback, epochs=1)
        starts[rate] = callback._work.values()[0], callback._work._centroids.starts
    tables = np.concatenate([one.table.ravel() for one in starts[0.0][1]])
    np.testing.assert_array_equal(starts[0.0][0][np.isfinite(tables)], tables[np.isfinite(tables)])
    assert np.abs(starts[0.05][0] - starts[0.0][0]).max() > 1e-4


def test_a_resumed_fit_ends_as_one_that_was_never_interrupted(tmp_path):
    (expected, _), (found, _) = whole_and_resumed(
        tmp_path, lambda pruning: [pk.ClusterCallback(4, begin_step=6), pruning]
    )
    assert found.report.weights == expected.report.weights


def test_a_backup_of_another_clustering_is_refused(tmp_path):
    crashed(tmp_path, pk.ClusterCallback(8))
    with pytest.raises(ValueError, match="must cluster the same weights as before"):
        resumed(tmp_path, pk.ClusterCallback(4))


def test_the_best_epochs_weights_go_with_the_best_epochs_centroids():
    model = trained()
    stopping = keras.callbacks.EarlyStopping("val_loss", patience=10, restore_best_weights=True, mode="min")
    kept = []
    callback = pk.ClusterCallback(4)

    class Keep(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            if epoch == 1:
                # What comes later is worse.
                stopping.best = -1.0
            kept.append(callback._work.values()[0])

    fit(model, stopping, Keep(), callback, epochs=4, validation_data=(X, Y))
    best = stopping.best_epoch
    assert best < 3
    np.testing.assert_array_equal(kept[best], callback._work.values()[0])
    assert (kept[best] != kept[-1]).any()


def test_a_second_fit_is_not_traced_again(monkeypatch):
    if BACKEND != "tensorflow":
        pytest.skip("traces are kept on TensorFlow")
    model, count = trained(), []
    original = type(model).train_step
    monkeypatch.setattr(type(model), "train_step", lambda self, *args: (count.append(1), original(self, *args))[1])
    first = pk.ClusterCallback(4)
    fit(model, first, epochs=1)
    traced = len(count)
    assert traced
    values = [np.unique(one) for one in kernels(model).values()]
    second = pk.ClusterCallback(4)
    fit(model, second, epochs=1)
    assert len(count) == traced
    assert all(most_values(one) <= 4 for one in kernels(model).values())
    assert any((np.unique(one) != two).any() for one, two in zip(kernels(model).values(), values, strict=True))
    # Its report stays that of its own fit.
    assert first.report.weights != second.report.weights or first.report is not second.report


def test_a_training_that_ends_before_it_begins_is_followed_by_a_clustering_after_training():
    model = network()
    late = pk.ClusterCallback(4, begin_step=10**6)
    with pytest.warns(UserWarning, match="ended after 8 updates, and clustering begins at update 1,000,000"):
        fit(model, late, epochs=1)
    other = network()
    fit(other, epochs=1)
    pk.cluster(other, 4, method="kmeans")
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert "clustered without training" in late.report.notes[0]


@pytest.mark.parametrize(
    "options", [dict(steps_per_execution=2), dict(run_eagerly=True), dict(jit_compile=True)], ids=str
)
def test_compiled_and_eager_steps(options):
    if BACKEND == "torch" and options != dict(run_eagerly=True):
        pytest.skip("Keras runs one eager step at a time on PyTorch")
    model = network(**options)
    fit(model, pk.ClusterCallback(4, granularity="channel"), epochs=1, validation_data=(X, Y))
    assert all(most_values(values, run=1) <= 4 for values in kernels(model).values())


REFUSALS = {
    "one cluster": (dict(clusters=1), ValueError, "`clusters` is the number of values"),
    "an option of clustering without training": (dict(method="gptq"), TypeError, "method"),
    "an unknown assignment": (dict(assignment="sof"), ValueError, "Did you mean 'soft'"),
    "unknown gradients": (dict(gradients="mean"), ValueError, "`gradients` is one of average, sum. Received: 'mean'"),
    "a begin before the first step": (dict(begin_step=-1), ValueError, "begin_step"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_wrong_options_are_refused_before_fit(name):
    options, kind, match = REFUSALS[name]
    with pytest.raises(kind, match=match):
        pk.ClusterCallback(**options)


def test_what_cannot_be_trained_is_refused_before_the_first_update():
    with pytest.raises(ValueError, match="may contain one ClusterCallback. Received: 2"):
        fit(network(), pk.ClusterCallback(4), pk.ClusterCallback(8))
    with pytest.raises(ValueError, match="nothing_like_it"):
        fit(network(), pk.ClusterCallback(4, include="nothing_like_it"))
    empty = network()
    empty.get_layer("logits").kernel.assign(np.zeros(empty.get_layer("logits").kernel.shape, "float32"))
    with pytest.raises(ValueError, match="Received: logits/kernel, zero throughout"):
        fit(empty, pk.ClusterCallback(4))
    frozen = network(compiled=False)
    frozen.trainable = False
    frozen.compile("sgd", LOSS)
    with pytest.raises(ValueError, match="All weights of .* are frozen.*pk.cluster"):
        fit(frozen, pk.ClusterCallback(4))
    with pytest.raises(RuntimeError, match="exists once `fit` has ended"):
        _ = pk.ClusterCallback(4).report


def test_a_model_that_waits_for_its_first_batch_is_built_from_the_data():
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Flatten(), keras.layers.Dense(20, name="hidden"), keras.layers.Dense(4)])
    model.compile("adam", LOSS)
    callback = pk.ClusterCallback(4, X[:64])
    fit(model, callback, epochs=1)
    assert np.unique(keras.ops.convert_to_numpy(model.get_layer("hidden").kernel)).size == 4


def test_a_soft_assignment_needs_to_know_how_long_a_fit_lasts():
    def batches():
        for start in range(0, 64, 32):
            yield X[start : start + 32], Y[start : start + 32]

    with pytest.raises(ValueError, match="steps_per_epoch"):
        network().fit(
            batches(), epochs=1, shuffle=False, verbose=0, callbacks=[pk.ClusterCallback(4, assignment="soft")]
        )
