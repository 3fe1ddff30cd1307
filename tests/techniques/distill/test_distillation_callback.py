"""Distillation in `fit`: the loss of a step, the teacher, the kept outputs, and other callbacks beside it."""

import keras
import numpy as np
import pytest
from backends import BACKEND
from crashes import Crash
from quantized_training import LOSS, X, Y, fit, is_on_a_grid_of, kernels, network, quantizing

import prunekit as pk
from prunekit.techniques.distill.output_cache import OFF, READING

pytestmark = pytest.mark.every_backend
L = keras.layers


@pytest.fixture(scope="module")
def teacher():
    model = network()
    fit(model, epochs=3)
    return model


def plain_network(**options):
    """A model without dropout and batch normalization, whose loss NumPy calculates."""
    keras.utils.set_random_seed(5)
    x = keras.Input((8, 8, 1))
    y = L.Dense(6, activation="relu", kernel_regularizer=keras.regularizers.L2(0.1), name="hidden")(L.Flatten()(x))
    model = keras.Model(x, L.Dense(4, name="logits")(y))
    model.compile(keras.optimizers.SGD(0.0), LOSS, **options)
    return model


def log_softmax(logits):
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


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


# ---- kept outputs ----------------------------------------------------------------------------------------------------


def test_kept_outputs_give_the_weights_of_calculated_ones(teacher):
    results, callbacks = [], [pk.DistillationCallback(teacher), pk.DistillationCallback(teacher, cache=False)]
    for callback in callbacks:
        model = network()
        fit(model, callback, epochs=3)
        results.append(model.get_weights())
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)
    assert [one.report.cached_examples for one in callbacks] == [256, 0]


def test_shuffled_examples_are_found(teacher):
    callback = pk.DistillationCallback(teacher)
    modes = []

    class Watch(keras.callbacks.Callback):
        def on_epoch_end(self, epoch, logs=None):
            cache = callback._work._cache
            modes.append(cache.mode)
            if epoch:
                found, seen = keras.ops.convert_to_numpy(cache.variables[0])
                modes.append((int(found), int(seen)))

    network().fit(X, Y, batch_size=48, epochs=3, verbose=0, callbacks=[Watch(), callback])
    assert modes == ["recording", READING, (256, 256), READING, (256, 256)]


class Noisy(keras.utils.PyDataset):
    """Batches with other noise in each epoch; a share of the batches stays as it is."""

    def __init__(self, same=0):
        super().__init__()
        self.random, self.same = np.random.default_rng(0), same

    def __len__(self):
        return 8

    def __getitem__(self, index):
        rows = slice(32 * index, 32 * (index + 1))
        noise = 0.0 if index < self.same else self.random.normal(size=(32, 8, 8, 1), scale=0.1)
        return (X[rows] + noise).astype("float32"), Y[rows]


def test_augmented_examples_are_calculated_anew(teacher):
    callback, model = pk.DistillationCallback(teacher, weight=1.0), plain_network()
    model.fit(Noisy(), epochs=3, verbose=0, shuffle=False, callbacks=[callback])
    assert callback._work._cache.mode == OFF and callback.report.cached_examples == 0
    results = []
    for cache in (True, False):
        student = network()
        student.fit(
            Noisy(same=6), epochs=3, verbose=0, shuffle=False, callbacks=[pk.DistillationCallback(teacher, cache=cache)]
        )
        results.append(student.get_weights())
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

    def training(folder, *others):
        model = network()
        schedule = pk.schedules.PolynomialDecay(final_sparsity=0.5, begin_step=1, end_step=20, frequency=3)
        callback = pk.DistillationCallback(narrow if features else teacher, features=features, begin_step=2)
        backup = keras.callbacks.BackupAndRestore(str(folder))
        fit(model, backup, callback, pk.PruningCallback(schedule, allocation="uniform"), *others, epochs=4)
        return model, callback

    whole, expected = training(tmp_path / "whole")
    with pytest.raises(RuntimeError, match="the machine is gone"):
        training(tmp_path / "cut", Crash(2))
    resumed, found = training(tmp_path / "cut")
    for one, two in zip(resumed.get_weights(), whole.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
    assert found.report.cached_examples == expected.report.cached_examples == (0 if features else 256)


def test_a_backup_with_another_teacher_is_refused(teacher, tmp_path):
    with pytest.raises(RuntimeError, match="the machine is gone"):
        fit(network(), keras.callbacks.BackupAndRestore(str(tmp_path)), pk.DistillationCallback(teacher), Crash(1))
    with pytest.raises(ValueError, match="has the teacher of the first run"):
        fit(network(), keras.callbacks.BackupAndRestore(str(tmp_path)), pk.DistillationCallback(network()))


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


# ---- inner layers ----------------------------------------------------------------------------------------------------


def wide_teacher():
    """As `network`, with ten channels."""
    keras.utils.set_random_seed(1)
    x = keras.Input((8, 8, 1))
    y = L.DepthwiseConv2D(3, name="depthwise")(L.Conv2D(10, 3, padding="same", activation="relu", name="wide")(x))
    model = keras.Model(x, L.Dense(4, name="logits")(L.Flatten()(y)))
    model.compile("adam", LOSS)
    return model


def maps(model, name):
    return keras.Model(model.inputs, model.get_layer(name).output).predict(X, verbose=0).reshape(len(X), -1)


def test_inner_layers_come_nearer_to_those_of_the_teacher(teacher):
    def angle(model):
        one, two = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (maps(model, "conv"), wanted))
        return (one * two).sum(1).mean()

    wanted, found = maps(teacher, "conv"), []
    for options in ({}, {"features": "conv", "feature_weight": 10.0}):
        model = network()
        callback = pk.DistillationCallback(teacher, **options)
        fit(model, callback, epochs=3)
        found.append(angle(model))
    assert found[1] > found[0]
    assert callback.report.features == {"conv": "conv"} and callback.report.cached_examples == 0


def test_layers_of_other_widths_have_a_trained_projection_between_them():
    model, callback = network(), pk.DistillationCallback(wide_teacher(), features={"conv": "wide"}, feature_weight=5.0)
    kept = []

    class Watch(keras.callbacks.Callback):
        def on_train_batch_end(self, batch, logs=None):
            kept.append(np.array(keras.ops.convert_to_numpy(callback._work._pairs.variables[0])))

    shapes = [tuple(one.shape) for one in model.weights]
    losses = fit(model, callback, Watch(), epochs=4).history["loss"]
    assert kept[0].shape == (6, 10) and np.abs(kept[0] - kept[-1]).max() > 1e-3
    assert losses[-1] < losses[0]
    assert [tuple(one.shape) for one in model.weights] == shapes


# ---- other outputs ---------------------------------------------------------------------------------------------------


def two_outputs(seed):
    keras.utils.set_random_seed(seed)
    x = keras.Input((8, 8, 1))
    y = L.Dense(8, activation="relu")(L.Flatten()(x))
    outputs = [L.Dense(4, activation="softmax", name="which")(y), L.Dense(1, name="size")(y)]
    model = keras.Model(x, outputs)
    model.compile(keras.optimizers.SGD(0.0), {"which": "sparse_categorical_crossentropy", "size": "mse"})
    return model


def test_each_output_has_a_term_of_its_kind():
    model, other = two_outputs(1), two_outputs(2)
    callback = pk.DistillationCallback(other, loss="kl", weight=1.0, temperature=2.0)
    labels = {"which": Y, "size": X.mean((1, 2, 3))}
    losses = model.fit(X, labels, batch_size=256, epochs=2, verbose=0, callbacks=[callback]).history["loss"]
    (p, a), (q, b) = (one.predict(X, verbose=0) for one in (other, model))
    one, two = (log_softmax(np.log(rows) / 2) for rows in (p, q))
    expected = (np.exp(one) * (one - two)).sum(-1).mean() * 4 + np.square(a - b).mean()
    np.testing.assert_allclose(losses, expected, rtol=2e-3)
    assert [(one.kind, one.loss) for one in callback.report.outputs] == [
        ("probabilities of classes", "kl"),
        ("values", "mse"),
    ]
    assert callback.report.cached_examples == 256


def test_a_sigmoid_is_learned_as_yes_or_no():
    def made(seed):
        keras.utils.set_random_seed(seed)
        model = keras.Sequential([keras.Input((8, 8, 1)), L.Flatten(), L.Dense(3, activation="sigmoid")])
        model.compile(keras.optimizers.SGD(0.0), "binary_crossentropy")
        return model

    model, other = made(1), made(2)
    labels = np.eye(4, dtype="float32")[Y][:, :3]
    callback = pk.DistillationCallback(other, weight=1.0, temperature=1.0)
    loss = model.fit(X, labels, batch_size=256, verbose=0, callbacks=[callback]).history["loss"][0]
    p, q = other.predict(X, verbose=0).astype("float64"), model.predict(X, verbose=0).astype("float64")
    expected = (p * np.log(p / q) + (1 - p) * np.log((1 - p) / (1 - q))).mean()
    assert loss == pytest.approx(expected, rel=5e-3)


def test_the_loss_that_is_chosen_goes_with_the_number_of_classes():
    def made(classes):
        keras.utils.set_random_seed(1)
        model = keras.Sequential([keras.Input((8, 8, 1)), L.Flatten(), L.Dense(classes, activation="softmax")])
        model.compile("sgd", "sparse_categorical_crossentropy")
        return model

    for classes, loss in ((2, "kl"), (3, "dist")):
        callback = pk.DistillationCallback(made(classes))
        made(classes).fit(X[:32], Y[:32] % 2, verbose=0, callbacks=[callback])
        assert [one.loss for one in callback.report.outputs] == [loss]


def test_masked_positions_do_not_count():
    def made(seed):
        keras.utils.set_random_seed(seed)
        layers = [L.Embedding(9, 6, mask_zero=True), L.Dense(3)]
        model = keras.Sequential([keras.Input((None,), dtype="int32"), *layers])
        model.compile(keras.optimizers.SGD(0.0), LOSS)
        return model

    tokens = np.random.default_rng(0).integers(1, 9, (8, 5)).astype("int32")
    padded = np.pad(tokens, [(0, 0), (0, 5)])
    model, found = made(1), []
    for inputs in (tokens, padded):
        callback = pk.DistillationCallback(made(2), weight=1.0)
        fitted = model.fit(inputs, inputs % 3, batch_size=8, verbose=0, callbacks=[callback])
        found.append(fitted.history["loss"][0])
    assert found[0] == pytest.approx(found[1], rel=1e-4)
    # Their length is not known before.
    assert callback.report.cached_examples == 0


@pytest.mark.skipif(BACKEND != "tensorflow", reason="elsewhere Keras builds the loss from labels before it trains")
def test_labels_are_not_needed_where_they_do_not_count(teacher):
    model = plain_network()
    model.compile(keras.optimizers.Adam(0.01))
    losses = model.fit(X, batch_size=64, epochs=8, verbose=0, callbacks=[pk.DistillationCallback(teacher)]).history
    assert losses["loss"][-1] < losses["loss"][0]


# ---- refusals --------------------------------------------------------------------------------------------------------

WRONG_OPTIONS = {
    "an unknown loss": (dict(loss="kll"), ValueError, "Did you mean 'kl'"),
    "a share in percent": (dict(weight=90), ValueError, "For 90 %, pass 0.9"),
    "a temperature of zero": (dict(temperature=0), ValueError, "temperature"),
    "a layer instead of its name": (dict(features=[L.Dense(2)]), TypeError, "Pass their `name`"),
    "features that are a number": (dict(features=3), TypeError, "list of names of layers"),
    "a cache of bytes": (dict(cache=100), TypeError, "`cache` is True or False. Received: 100"),
    "memory without a unit": (dict(memory="500"), ValueError, "500MB"),
    "an unknown option": (dict(alpha=0.5), TypeError, "alpha"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_are_refused_before_fit(name):
    options, kind, match = WRONG_OPTIONS[name]
    with pytest.raises(kind, match=match):
        pk.DistillationCallback(**options)


def with_shared_layer(model):
    return keras.Model(model.inputs, model.outputs)


WRONG_TEACHERS = {
    "no model": (lambda model: "teacher.keras", TypeError, "`teacher` is a Keras 3 model or None"),
    "an unbuilt model": (lambda model: keras.Sequential([L.Dense(4)]), ValueError, "not built"),
    "a model of the same weights": (with_shared_layer, ValueError, "shares .* with the model. Pass a copy"),
    "a model of other outputs": (
        lambda model: keras.Sequential([keras.Input((8, 8, 1)), L.Flatten(), L.Dense(5)]),
        ValueError,
        r"the same shapes as its student. Received: outputs of shapes \(5,\), and \(4,\) of the student",
    ),
    "a model of more outputs": (lambda model: two_outputs(0), ValueError, r"shapes \(4,\), \(1,\), and \(4,\) of"),
}


@pytest.mark.parametrize("name", WRONG_TEACHERS)
def test_a_teacher_that_does_not_fit_is_refused_before_the_first_update(name):
    make, kind, match = WRONG_TEACHERS[name]
    model = network()
    before = model.get_weights()
    with pytest.raises(kind, match=match):
        fit(model, pk.DistillationCallback(make(model)), epochs=1)
    for one, two in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)


WRONG_LAYERS = {
    "an unknown layer": ("convv", "Did you mean 'conv'"),
    "a layer of the student alone": ("pool", "the teacher .* has no such layer"),
    "layers of other sizes": ({"conv": "depthwise"}, "position by position"),
}


@pytest.mark.parametrize("name", WRONG_LAYERS)
def test_layers_that_do_not_fit_are_refused(name):
    features, match = WRONG_LAYERS[name]
    with pytest.raises(ValueError, match=match):
        fit(network(), pk.DistillationCallback(wide_teacher(), features=features), epochs=1)


def test_losses_between_classes_need_classes():
    model = keras.Sequential([keras.Input((8, 8, 1)), L.Flatten(), L.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match='loss="dist" compares classes. Received: a model whose outputs are values'):
        fit(model, pk.DistillationCallback(loss="dist"), epochs=1)


def test_two_callbacks_and_a_report_before_its_time_are_refused(teacher):
    with pytest.raises(ValueError, match="may contain one DistillationCallback"):
        fit(network(), pk.DistillationCallback(teacher), pk.DistillationCallback(teacher))
    with pytest.raises(RuntimeError, match="exists once `fit` has ended"):
        _ = pk.DistillationCallback(teacher).report


class OwnLoss(keras.Model):
    """Calculates its loss without the compiled one."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred))


def test_a_loss_that_leaves_the_compiled_one_out_is_refused(teacher):
    x = keras.Input((8, 8, 1))
    model = OwnLoss(x, L.Dense(4)(L.Flatten()(x)))
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match="own `compute_loss` does not use the compiled loss"):
        fit(model, pk.DistillationCallback(teacher), epochs=1)


class OwnStep(keras.Model):
    """A training step that never calculates the loss of Keras."""

    def train_step(self, *args):
        return ({"loss": 0.0}, args[0]) if BACKEND == "jax" else {"loss": 0.0}


def test_a_step_without_compute_loss_is_refused(teacher):
    x = keras.Input((8, 8, 1))
    model = OwnStep(x, L.Dense(4)(L.Flatten()(x)))
    model.compile("sgd", LOSS)
    with pytest.raises(RuntimeError, match="never calls it"):
        fit(model, pk.DistillationCallback(teacher), epochs=1)


class Subclassed(keras.Model):
    """A model that gives no config."""

    def __init__(self, width):
        super().__init__()
        self.body = L.Dense(width)

    def call(self, x):
        return self.body(keras.ops.reshape(x, (-1, 64)))


def test_a_model_that_cannot_be_copied_needs_a_teacher(teacher):
    model = Subclassed(4)
    model(X[:1])
    model.compile("sgd", LOSS)
    with pytest.raises(ValueError, match="cannot be copied .* Pass the teacher"):
        fit(model, pk.DistillationCallback(), epochs=1)
    fit(model, pk.DistillationCallback(teacher), epochs=1)


def test_a_training_that_ends_before_it_begins_says_so(teacher):
    model = network()
    late = pk.DistillationCallback(teacher, begin_step=10**6)
    with pytest.warns(UserWarning, match="ended after 8 updates, and distillation begins at update 1,000,000: nothing"):
        fit(model, late, epochs=1)
    plain = network()
    fit(plain, epochs=1)
    for one, two in zip(model.get_weights(), plain.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)
