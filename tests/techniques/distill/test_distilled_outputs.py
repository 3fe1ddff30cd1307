"""What is learned in `fit`: kept outputs, outputs of inner layers, and outputs of every kind."""

import keras
import numpy as np
import pytest
from backends import tensorflow_only
from distilled_training import log_softmax, plain_network, two_outputs, wide_teacher
from quantized_training import LOSS, X, Y, fit, network

import prunekit as pk
from prunekit.techniques.distill.output_cache import OFF, READING

pytestmark = pytest.mark.every_backend
L = keras.layers


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


# ---- inner layers ----------------------------------------------------------------------------------------------------


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


def small(kind=keras.Model, compiled=None, **outputs):
    """A model whose outputs are a dictionary, or one output of four logits."""
    x = keras.Input((8, 8, 1))
    y = L.Flatten()(x)
    made = {name: L.Dense(width, name=f"layer_of_{name}")(y) for name, width in outputs.items()}
    model = kind(x, made or L.Dense(4)(y))
    model.compile(keras.optimizers.Adam(0.01), compiled)
    return model


def test_keys_of_outputs_may_differ_from_the_names_of_layers():
    losses = {"z": LOSS, "a": "mse"}
    model, other = (small(compiled=losses, z=4, a=1) for _ in range(2))
    labels, nothing = {"z": Y, "a": X.mean((1, 2, 3))}, np.zeros(len(X))
    callback = pk.DistillationCallback(other, loss="dkd")
    weights = {"z": nothing, "a": nothing}
    fitted = model.fit(X, labels, epochs=2, verbose=0, sample_weight=weights, callbacks=[callback])
    assert [one.loss for one in callback.report.outputs] == ["mse", "dkd"]
    assert fitted.history["loss"] == [0, 0]


def test_labels_are_not_needed(teacher):
    student = small()
    callback = pk.DistillationCallback(teacher)
    losses = student.fit(X, batch_size=64, epochs=8, verbose=0, callbacks=[callback]).history["loss"]
    assert losses[-1] < losses[0] and callback.report.cached_examples == 256
    # The student has no loss that tells of logits; its teacher has.
    assert [one.loss for one in callback.report.outputs] == ["dist"]


def test_metrics_are_left_out_of_steps_without_labels(teacher):
    student = network()
    fit(student, epochs=1)
    fitted = student.fit(X, epochs=2, verbose=0, callbacks=[pk.DistillationCallback(teacher)], validation_data=(X, Y))
    assert set(fitted.history) == {"loss", "val_loss", "val_accuracy"}
    assert set(fit(student, epochs=1).history) == {"loss", "accuracy"}


def cross_entropy(labels, outputs):
    return keras.losses.sparse_categorical_crossentropy(labels, outputs, from_logits=True)


def test_a_model_with_a_loss_function_of_its_own_teaches_itself():
    student = small(compiled=cross_entropy)
    callback = pk.DistillationCallback()
    fit(student, callback, epochs=1)
    assert [one.loss for one in callback.report.outputs] == ["mse"]


class Penalized(L.Layer):
    """Adds a loss, and draws random numbers."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(0)

    def call(self, x):
        self.add_loss(keras.ops.sum(keras.ops.square(x)))
        return x + keras.random.normal(keras.ops.shape(x), seed=self.seed)


def test_losses_and_random_states_of_a_teacher_belong_to_no_step():
    x = keras.Input((8, 8, 1))
    other, student = keras.Model(x, L.Dense(4)(Penalized()(L.Flatten()(x)))), small(compiled=LOSS)
    with pk.distilling(student, other) as distillation:
        found = distillation.loss(keras.ops.convert_to_tensor(X[:4]), student(X[:4]))
    assert np.isfinite(float(keras.ops.convert_to_numpy(keras.ops.stop_gradient(found))))
    fit(student, pk.DistillationCallback(other), epochs=1)
    assert other.predict(X[:4], verbose=0).shape == (4, 4)


@tensorflow_only
def test_a_copy_has_the_vocabulary_of_its_model():
    words = L.TextVectorization(max_tokens=9, output_sequence_length=3)
    texts = keras.ops.convert_to_tensor(["red green", "blue red red"] * 16)
    words.adapt(texts)
    layers = [words, L.Embedding(9, 4), L.GlobalAveragePooling1D(), L.Dense(3, activation="softmax")]
    model = keras.Sequential([keras.Input((), dtype="string"), *layers])
    model.compile("adam", "sparse_categorical_crossentropy")
    expected = model.predict(texts, verbose=0)
    callback = pk.DistillationCallback()
    model.fit(texts, np.arange(32) % 3, verbose=0, callbacks=[callback])
    np.testing.assert_allclose(callback._work.teacher.model.predict(texts, verbose=0), expected, rtol=1e-6)
