"""Distillation in `fit`: the loss of a step, the teacher, and other callbacks and steps beside it."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from distilled_training import log_softmax, plain_network, wide_teacher
from interrupted_training import crashed, resumed, whole_and_resumed
from quantized_training import LOSS, X, Y, fit, is_on_a_grid_of, kernels, network, quantizing
from two_replicas import on_one_and_on_two

import prunekit as pk

pytestmark = pytest.mark.every_backend
L = keras.layers


def expected_loss(model, teacher, x, y, weight, temperature, weights=1.0):
    """Loss of a batch: labels, teacher in float16, and the regularization loss."""
    student = model.predict(x, verbose=0).astype("float64")
    wanted = teacher.predict(x, verbose=0).astype("float16").astype("float64")
    of_labels = -log_softmax(student)[np.arange(len(y)), y]
    one, two = log_softmax(wanted / temperature), log_softmax(student / temperature)
    of_teacher = (np.exp(one) * (one - two)).sum(-1) * temperature**2
    kernel = keras.ops.convert_to_numpy(model.get_layer("hidden").kernel)
    mixed = (1 - weight) * of_labels + weight * of_teacher
    return (mixed * weights).mean() + 0.1 * np.square(kernel).sum()


WEIGHTS = np.linspace(0, 2, 64)


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["equal", "weighted"])
@pytest.mark.parametrize(("weight", "temperature"), [(0.9, 4.0), (0.3, 1.0), (1.0, 2.0)])
def test_the_loss_mixes_labels_and_teacher_and_keeps_regularization_and_weights(teacher, weights, weight, temperature):
    model = plain_network()
    callback = pk.DistillationCallback(teacher, loss="kl", weight=weight, temperature=temperature)
    given = {} if weights is None else {"sample_weight": weights}
    found = model.fit(X[:64], Y[:64], batch_size=64, verbose=0, callbacks=[callback], **given).history["loss"]
    expected = expected_loss(model, teacher, X[:64], Y[:64], weight, temperature, 1.0 if weights is None else weights)
    assert found[0] == pytest.approx(expected, rel=1e-4)


def test_weights_of_classes_count_as_those_of_examples(teacher):
    losses = []
    for given in ({"class_weight": {0: 0.0, 1: 2.0, 2: 1.0, 3: 0.5}}, {"sample_weight": np.array([0, 2, 1, 0.5])[Y]}):
        model = plain_network()
        fitted = model.fit(X, Y, batch_size=256, verbose=0, callbacks=[pk.DistillationCallback(teacher)], **given)
        losses.append(fitted.history["loss"][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("loss", ["dist", "dkd"])
def test_examples_of_weight_zero_do_not_count(teacher, loss):
    found = []
    for count in (64, 128):
        model = plain_network()
        weights = np.r_[np.ones(64), np.zeros(64)][:count] * count / 64
        callback = pk.DistillationCallback(teacher, loss=loss)
        fitted = model.fit(
            X[:count], Y[:count], batch_size=count, verbose=0, sample_weight=weights, callbacks=[callback]
        )
        found.append(fitted.history["loss"][0])
    # The part of the batch in "dist" is multiplied by the mean weight, which is one.
    assert found[0] == pytest.approx(found[1], rel=1e-4)


def test_one_hot_labels_are_read_as_class_numbers(teacher):
    found = []
    for labels, loss in ((Y, LOSS), (np.eye(4, dtype="float32")[Y], keras.losses.CategoricalCrossentropy(True))):
        model = plain_network()
        model.compile(keras.optimizers.SGD(0.0), loss)
        callback = pk.DistillationCallback(teacher, loss="dkd")
        found.append(model.fit(X, labels, batch_size=256, verbose=0, callbacks=[callback]).history["loss"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-5)


def test_validation_and_metrics_are_those_of_a_plain_fit(teacher):
    model = network()
    history = fit(model, pk.DistillationCallback(teacher), epochs=1, validation_data=(X, Y)).history
    before = [np.array(one) for one in map(keras.ops.convert_to_numpy, model.variables)]
    found = model.evaluate(X, Y, batch_size=32, verbose=0)
    np.testing.assert_allclose(found, [history["val_loss"][0], history["val_accuracy"][0]], rtol=1e-4)
    for one, two in zip(model.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), two)
    assert set(history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_a_student_is_called_once_in_a_step(teacher):
    # With labels alone in the loss, statistics and weights are those of a plain training.
    results = []
    for callbacks in ([], [pk.DistillationCallback(teacher, weight=0.0, features=["norm"], feature_weight=1e-30)]):
        model = network()
        fit(model, *callbacks, epochs=2)
        results.append(model.get_weights())
    for one, two in zip(*results, strict=True):
        np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-6)


def test_the_teacher_is_never_changed(teacher):
    before = [np.array(keras.ops.convert_to_numpy(one)) for one in teacher.variables]
    attributes = {id(one): set(vars(one)) for one in teacher._flatten_layers()}
    fit(network(), pk.DistillationCallback(teacher, features=["norm", "logits"]), epochs=2)
    for one, two in zip(teacher.variables, before, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(one), two)
    assert all(one.trainable for one in teacher.layers)
    assert {id(one): set(vars(one)) for one in teacher._flatten_layers()} == attributes


@pytest.mark.parametrize("loss", ["kl", "dist", "dkd", "mse"])
def test_a_student_comes_nearer_to_its_teacher(teacher, loss):
    def distance(model):
        return np.square(model.predict(X, verbose=0) - teacher.predict(X, verbose=0)).mean()

    labels, taught = network(), network()
    fit(labels, epochs=5)
    callback = pk.DistillationCallback(teacher, loss=loss)
    fit(taught, callback, epochs=5)
    if loss in ("kl", "mse"):
        # Correlations do not see the scale, and divergence among the other classes counts eight times.
        assert distance(taught) < distance(labels)
    assert taught.evaluate(X, Y, verbose=0)[1] > 0.8
    assert [one.loss for one in callback.report.outputs] == [loss]


def test_without_a_teacher_the_model_of_the_start_teaches(teacher):
    results = []
    for given in (None, teacher):
        model = network()
        model.set_weights(teacher.get_weights())
        schedule = pk.schedules.PolynomialDecay(final_sparsity=0.8, begin_step=1, end_step=8, frequency=2)
        callback = pk.DistillationCallback(given)
        # Its name in the list makes no difference, nor does a second `fit`: the teacher is that of the first.
        fit(model, callback, pk.PruningCallback(schedule, allocation="uniform"), epochs=1)
        fit(model, callback, epochs=1)
        results.append(model.get_weights())
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_teacher_that_was_trained_in_between_gives_new_outputs():
    own, losses = plain_network(), []
    own.compile(keras.optimizers.SGD(0.1), LOSS)
    callback, model = pk.DistillationCallback(own, weight=1.0), plain_network()
    fit(model, callback, epochs=2)
    fit(own, epochs=2)
    for one in (callback, pk.DistillationCallback(own, weight=1.0)):
        losses.append(fit(model, one, epochs=1).history["loss"][0])
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


# ---- other callbacks and steps ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("reverse", [False, True], ids=["in order", "reversed"])
def test_with_pruning_clusters_quantization_and_a_penalty_in_any_order(teacher, reverse):
    model = network()
    model.set_weights(teacher.get_weights())
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=12, frequency=2)
    pruning, integers = pk.PruningCallback(schedule, allocation="uniform"), quantizing(bits=3)
    taught, penalty = pk.DistillationCallback(teacher), pk.penalties.GroupLasso(1e-4)
    callbacks = [taught, penalty, pruning, pk.ClusterCallback(4), integers]
    history = fit(model, *(callbacks[::-1] if reverse else callbacks), epochs=3, validation_data=(X, Y)).history
    for name, mask in pruning.pruner.masks.items():
        assert (kernels(model)[name][~mask] == 0).all()
    assert all(is_on_a_grid_of(values, 3) for values in kernels(model).values())
    assert history["val_accuracy"][-1] > 0.8
    assert taught.report.cached_examples == 256


def test_between_batches_and_afterwards_the_model_is_its_own(teacher):
    model, seen = network(), []
    fit(model, epochs=1, validation_data=(X[:32], Y[:32]))
    attributes = {id(owner): set(vars(owner)) for owner in (model.optimizer, *model._flatten_layers())}
    counts = [len(model.trainable_variables), len(model.non_trainable_variables), len(model.optimizer.variables)]

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            now = self.model
            seen.append((len(now.trainable_variables), len(now.non_trainable_variables), "compute_loss" in vars(now)))

    fit(model, pk.DistillationCallback(teacher, features=["norm"]), Watch(), epochs=2, validation_data=(X, Y))
    assert set(seen) == {(*counts[:2], False)}
    for owner in (model.optimizer, *model._flatten_layers()):
        assert set(vars(owner)) == attributes[id(owner)]
    assert len(model.optimizer.variables) == counts[2]


def test_a_saved_model_has_nothing_of_its_teacher(teacher, tmp_path):
    saved, plain = network(), network()
    path = str(tmp_path / "{epoch}.keras")
    fit(saved, pk.DistillationCallback(teacher, features=["conv"]), keras.callbacks.ModelCheckpoint(path), epochs=2)
    fit(plain, epochs=1)
    again = keras.models.load_model(tmp_path / "2.keras")
    assert [one.shape for one in again.weights] == [one.shape for one in plain.weights]
    for one, two in zip(again.get_weights(), saved.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


@pytest.mark.parametrize("features", [(), ["depthwise"]], ids=["outputs", "features"])
def test_a_resumed_fit_ends_as_one_that_was_never_interrupted(teacher, tmp_path, features):
    narrow = network() if not features else wide_teacher()

    def callbacks(pruning):
        given = narrow if features else teacher
        return [pk.DistillationCallback(given, features=features, begin_step=2), pruning]

    (expected, _), (found, _) = whole_and_resumed(tmp_path, callbacks)
    assert found.report.cached_examples == expected.report.cached_examples == (0 if features else 256)


def test_a_backup_with_another_teacher_is_refused(teacher, tmp_path):
    crashed(tmp_path, pk.DistillationCallback(teacher))
    with pytest.raises(ValueError, match="has the teacher of the first run"):
        resumed(tmp_path, pk.DistillationCallback(network()))


@pytest.mark.parametrize(
    "options", [dict(steps_per_execution=3), dict(run_eagerly=True), dict(jit_compile=True)], ids=str
)
def test_compiled_and_eager_steps_have_one_loss(teacher, options):
    if BACKEND == "torch" and options != dict(run_eagerly=True):
        pytest.skip("Keras runs one eager step at a time on PyTorch")
    found = []
    for given in ({}, options):
        model = plain_network(**given)
        model.optimizer.learning_rate = 0.01
        history = fit(model, pk.DistillationCallback(teacher), epochs=3).history["loss"]
        found.append(history)
    np.testing.assert_allclose(found[1], found[0], rtol=1e-3)


def test_accumulated_gradients_and_half_precision(teacher):
    keras.utils.set_random_seed(5)
    x = keras.Input((8, 8, 1))
    with_half = keras.Model(x, L.Dense(4, dtype="mixed_float16")(L.Flatten()(x)))
    with_half.compile(keras.optimizers.SGD(0.05, gradient_accumulation_steps=2), LOSS)
    callback = pk.DistillationCallback(teacher)
    losses = fit(with_half, callback, epochs=4).history["loss"]
    assert losses[-1] < losses[0] and callback.report.cached_examples == 256


REPLICAS = """
import keras, numpy as np, prunekit as pk
from keras import layers as L
from quantized_training import LOSS, data
x, y = data()
def network(width):
    keras.utils.set_random_seed(3)
    image = keras.Input((8, 8, 1))
    hidden = L.Conv2D(width, 3, activation="relu", kernel_regularizer="l2", name="conv")(image)
    # Replicas wait for each other in it.
    hidden = L.BatchNormalization(synchronized=True)(hidden)
    return keras.Model(image, L.Dense(4, name="logits")(L.Flatten()(hidden)))
def trained(strategy):
    teacher = network(10)
    teacher.compile("adam", LOSS)
    teacher.fit(x, y, epochs=1, verbose=0)
    with strategy.scope():
        model = network(6)
        model.compile(keras.optimizers.SGD(0.05), LOSS)
    schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, end_step=10, frequency=2)
    callbacks = [pk.PruningCallback(schedule), pk.DistillationCallback(teacher, OPTIONS)]
    losses = model.fit(x, y, batch_size=32, epochs=2, shuffle=False, verbose=0, callbacks=callbacks).history["loss"]
    return [*model.get_weights(), np.array(losses)]
"""


@tensorflow_only
@pytest.mark.thorough
@pytest.mark.parametrize("options", ['loss="kl"', 'loss="kl", features="conv"', 'loss="dkd"'])
def test_two_replicas_train_the_weights_of_one(options, tmp_path):
    one, two = on_one_and_on_two(REPLICAS.replace("OPTIONS", options), tmp_path)
    assert max(np.abs(first - second).max() for first, second in zip(one, two, strict=True)) < 1e-5
