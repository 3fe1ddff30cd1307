"""pk.search with training: bolder mixtures are trained, kept, and judged as the others."""

import re
from types import SimpleNamespace

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from digit_network import digit_network

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.runtime.model_copies import copied_model
from prunekit.operations import search_training
from prunekit.operations.quantization_callback import QuantizationCallback
from prunekit.operations.search_training import MixtureTraining
from prunekit.searching.finding import FEWER_TRAINED, TRAINED
from prunekit.searching.judge import SearchData
from prunekit.sparsity.array_ops import array_of


@pytest.fixture(scope="module")
def digits():
    return digit_network()


def test_trained_mixtures_are_smaller_and_hold_the_drop(digits, monkeypatch):
    model, (images, labels) = digits
    kept = []
    trained = QuantizationCallback.on_train_end

    def on_train_end(self, logs=None):
        trained(self, logs)
        kept.append({one.name: float((array_of(one.layer.kernel) == 0).mean()) for one in find_targets(self.model)[0]})

    monkeypatch.setattr(QuantizationCallback, "on_train_end", on_train_end)
    before = [weight.numpy() for weight in model.weights]
    training = {"epochs": 4, "data": (images[:400], labels[:400])}
    data = images[400:], labels[400:]
    found = pk.search(model, data, drop=0.03, target="packed", training=training)
    plain = min(one.bytes for one in found.report.points if not one.trained and one.drop <= 0.03)
    points = [one for one in found.report.points if one.trained]
    assert 1 <= len(points) <= TRAINED + FEWER_TRAINED and found.report.drop <= 0.03
    assert found.report.bytes <= plain
    # Training gives back what the mixture lost.
    for one in points:
        same = [
            other for other in found.report.points if other.predicted_error == one.predicted_error and not other.trained
        ]
        assert all(one.drop <= other.drop + 0.01 for other in same)
    assert any(max(zeros.values()) >= 0.5 for zeros in kept)
    for was, weight in zip(before, model.weights, strict=True):
        np.testing.assert_array_equal(was, weight.numpy())


@pytest.mark.thorough
def test_a_training_that_held_other_zeros_is_made_again(digits, tmp_path):
    model, (images, labels) = digits
    training = {"epochs": 1, "data": (images[:64], labels[:64])}
    train = MixtureTraining(model, training, tmp_path).of(SearchData((images, labels), 0))
    for zeros in ([], ["hidden/kernel"]):
        copy = copied_model(model)
        kernel = copy.get_layer("hidden").kernel
        before = np.where(np.arange(kernel.shape[0])[:, None] % 2, array_of(kernel), 0)
        kernel.assign(before)
        train(copy, 8, zeros, "a mixture")
        held = array_of(copy.get_layer("hidden").kernel)[before == 0]
    assert not held.any() and len(list(tmp_path.glob("trained-*.snapshot"))) == 2


@pytest.mark.thorough
def test_trainings_that_were_made_before_an_interruption_are_not_made_again(digits, tmp_path, monkeypatch):
    model, (images, labels) = digits
    fitted = []
    fit = MixtureTraining._fit

    def counted(self, smaller, *arguments):
        fitted.append(smaller)
        if len(fitted) == 2:
            raise KeyboardInterrupt
        fit(self, smaller, *arguments)

    monkeypatch.setattr(MixtureTraining, "_fit", counted)
    training = {"epochs": 1, "data": (images[:400], labels[:400])}
    arguments = {"drop": 0.02, "training": training, "output": tmp_path, "target": "packed"}
    with pytest.raises(KeyboardInterrupt):
        pk.search(model, (images[400:], labels[400:]), **arguments)
    (kept,) = tmp_path.glob("trained-*.snapshot")
    content = kept.read_bytes()
    resumed = pk.search(model, (images[400:], labels[400:]), **arguments)
    trained = [one for one in resumed.report.points if one.trained]
    # The first one was kept, and the second one is made.
    assert len(fitted) == 1 + len(trained) and len(trained) > 1
    assert not list(tmp_path.glob("trained-*.snapshot"))
    fitted[:] = [None, None]
    kept.write_bytes(content[:-10])
    whole = pk.search(model, (images[400:], labels[400:]), **arguments)
    assert len(fitted) == 2 + len(trained)
    assert [one.bytes for one in whole.report.points] == [one.bytes for one in resumed.report.points]
    assert [one.drop for one in whole.report.points] == [one.drop for one in resumed.report.points]


@pytest.mark.thorough
def test_what_is_kept_of_a_training_depends_on_its_settings_data_and_losses(digits, tmp_path):
    model, (images, labels) = digits
    examples = SearchData((images, labels), 0)

    def subject(loss_weights=None, count=200, identity=None, **given):
        one = keras.models.clone_model(model)
        one.set_weights(model.get_weights())
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        one.compile("adam", loss, loss_weights=loss_weights, metrics=["accuracy"])
        training = {"epochs": 2, "data": (images[:count], labels[:count]), **given}
        return MixtureTraining(one, training, tmp_path)._subject(examples, full_integer=False)

    # Losses are objects, whose texts have addresses.
    assert subject() == subject() is not None
    assert len({subject(), subject([2.0]), subject(count=199), subject(epochs=3), subject(batch_size=8)}) == 5
    # Reading a data set may change what it returns next.
    assert subject(data=[(images[:64], labels[:64])]) is None
    assert (
        MixtureTraining(model, lambda smaller, callbacks: None, tmp_path)._subject(examples, full_integer=False) is None
    )


def test_a_training_that_loses_more_is_not_delivered_and_leaves_the_file_before_as_it_was(digits):
    model, (images, labels) = digits

    def spoil(smaller, callbacks):
        smaller.compile(keras.optimizers.SGD(0.0), "sparse_categorical_crossentropy")
        smaller.fit(images[:64], labels[:64], verbose=0, callbacks=callbacks)
        for weight in smaller.get_layer("logits").weights:
            weight.assign(0 * weight)

    found = pk.search(model, (images, labels), bytes="6kB", training=spoil)
    delivered = [one for one in found.report.points if one.delivered]
    assert [one.trained for one in delivered] == [False] and any(one.trained for one in found.report.points)
    assert found.model.get_layer("logits").kernel.numpy().any()


@pytest.mark.thorough
def test_zeros_of_a_model_that_was_pruned_before_stay(digits):
    model, (images, labels) = digits
    pruned = keras.models.clone_model(model)
    pruned.set_weights(model.get_weights())
    pruned.compile(loss=model.loss, metrics=["accuracy"])
    pk.prune(pruned, 0.6, images[:200], include="hidden")
    training = {"epochs": 1, "data": [(images[:64], labels[:64]), (images[64:128], labels[64:128])]}
    found = pk.search(pruned, (images[128:], labels[128:]), drop=0.2, training=training)
    trained = [one for one in found.report.points if one.trained]
    assert trained
    (row,) = [one for one in found.report.weights if one.name == "hidden/kernel"]
    assert row.sparsity >= 0.4


def test_a_function_trains_with_the_callbacks_it_is_given(digits):
    model, (images, labels) = digits
    seen = []

    def train(smaller, callbacks):
        seen.append([type(one).__name__ for one in callbacks])
        smaller.compile("sgd", "sparse_categorical_crossentropy")
        smaller.fit(images[:64], labels[:64], verbose=0, callbacks=callbacks)

    report = pk.search(model, (images[64:], labels[64:]), bytes="6kB", training=train).report
    assert seen == [["QuantizationCallback", "DistillationCallback", "_TrainingPace"]] and report.bytes <= 6000
    pk.search(model, (images[64:], labels[64:]), bytes="3kB", target="packed", training=train)
    assert seen[1] == ["KeepZeros", "QuantizationCallback", "DistillationCallback", "_TrainingPace"]


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({}, "`training` has epochs, and may have data, learning_rate, batch_size. Received: nothing."),
        ({"epochs": 1, "rate": 2}, "Received: epochs, rate."),
        ({"epochs": 0}, "must be at least 1"),
        (3, "a mapping such as"),
        ({"epochs": 1, "data": np.zeros((200, 8, 8, 1), "float32")}, "Received: inputs alone"),
        ({"epochs": 1, "data": iter([])}, "Received: a generator"),
        ({"epochs": 1}, "A training needs labels, and 128 examples or more. Received: 100 examples that neither"),
    ],
)
def test_mistakes_in_a_training_are_told_before_the_scan(digits, training, message):
    model, (images, labels) = digits
    with pytest.raises((ValueError, TypeError), match=message):
        pk.search(model, (images[:200], labels[:200]), drop=0.1, training=training)


@pytest.mark.thorough
def test_a_trained_mixture_for_a_microcontroller_is_integers_throughout(digits):
    model, (images, labels) = digits
    training = {"epochs": 3, "data": (images[:400], labels[:400])}
    found = pk.search(model, (images[400:], labels[400:]), drop=0.03, target="microcontroller", training=training)
    assert found.report.drop <= 0.03 and any(one.trained for one in found.report.points)
    interpreter = Interpreter(model_content=found.file)
    ends = interpreter.get_input_details() + interpreter.get_output_details()
    assert {one["dtype"] for one in ends} == {np.int8}
    assert not any(one["dtype"] == np.float32 for one in interpreter.get_tensor_details())


@pytest.mark.thorough
def test_no_training_begins_after_the_time(digits, tmp_path):
    model, (images, labels) = digits
    training = {"epochs": 1, "data": (images[:400], labels[:400])}
    late = pk.search(model, (images[400:], labels[400:]), drop=0.05, time=0.01, training=training, output=tmp_path)
    assert late.report.drop <= 0.05 and not any(one.trained for one in late.report.points)
    assert "The time was over before all files were made." in late.report.notes


@pytest.mark.thorough
def test_a_training_for_which_there_is_no_time_is_given_up_at_its_begin(digits):
    model, (images, labels) = digits
    training = {"epochs": 100_000, "data": (images[:400], labels[:400])}
    options = {"time": "5min", "training": training, "techniques": "quantize"}
    report = pk.search(model, (images[400:], labels[400:]), drop=0.05, **options).report
    assert report.drop <= 0.05 and not any(one.trained for one in report.points)
    (note,) = report.notes
    assert re.fullmatch(r"A training takes about \d+ h \d\d min, and .* were left: it was given up\.", note)


@pytest.mark.short(cases=1)
@pytest.mark.parametrize(
    ("steps", "at_once", "seconds", "late"),
    [
        (100, 1, 350, True),
        (100, 1, 450, False),
        (None, 1, 250, True),
        (None, 1, 350, False),
        (100, 10, 350, True),
        (100, 10, 450, False),
    ],
)
def test_the_time_of_a_training_is_known_from_its_first_steps(steps, at_once, seconds, late, monkeypatch):
    clock, told = SimpleNamespace(now=0.0), []
    monkeypatch.setattr(search_training, "time", SimpleNamespace(monotonic=lambda: clock.now))
    pace = search_training._TrainingPace(SimpleNamespace(left=seconds), lambda *one: told.append(one))
    pace.set_params({"epochs": 4, "steps": steps})
    pace.set_model(SimpleNamespace(stop_training=False))
    pace.on_train_begin()
    for epoch in range(4):
        # Keras tells the last one of the steps that it makes at once.
        for batch in range(at_once - 1, 100, at_once):
            # The first call compiles.
            clock.now += at_once if epoch or batch >= at_once else 60.0
            pace.on_train_batch_end(batch)
            if pace.model.stop_training:
                break
        pace.on_epoch_end(epoch)
        if pace.model.stop_training:
            break
    # Of 400 steps, one second each, few are done where their number is known, else those of an epoch.
    assert (pace.late is not None) is late
    if late:
        assert pace.late.seconds == pytest.approx(400) and told == []
    else:
        assert [(done, total) for done, total, _ in told] == [(1, 4), (2, 4), (3, 4), (4, 4)]
