"""Baseline: metrics and outputs of a model before and after a change, on every kind of data and output."""

import keras
import numpy as np
import pytest
from keras import layers as L, ops

from prunekit.core.outputs import baseline
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.outputs.output_error import output_error
from prunekit.core.runtime.patching import shadowed
from prunekit.core.runtime.variable_values import replaced
from prunekit.sparsity.array_ops import array_of

pytestmark = pytest.mark.every_backend

INPUTS = np.random.default_rng(0).normal(size=(150, 4)).astype("float32")
LABELS = np.arange(150) % 3


def classifier(activation="softmax", **compiled):
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), L.Dense(3, activation=activation, name="head")])
    if compiled:
        model.compile("sgd", **compiled)
    return model


def flip(model):
    """Multiplies the weights by -1."""
    for one in model.trainable_variables:
        one.assign(ops.negative(one))


def test_metrics_and_classes_are_those_that_the_model_has_before_and_after():
    model = classifier(loss="sparse_categorical_crossentropy", metrics=["accuracy"])
    before = model.evaluate(INPUTS, LABELS, verbose=0, return_dict=True)
    classes = model.predict(INPUTS, verbose=0)
    kept = Baseline(model, (INPUTS, LABELS))
    flip(model)
    after = model.evaluate(INPUTS, LABELS, verbose=0, return_dict=True)
    changed = model.predict(INPUTS, verbose=0)
    found = kept.damage()
    assert [one.name for one in found.metrics] == ["accuracy", "loss"]
    for one in found.metrics:
        assert (one.before, one.after) == pytest.approx((before[one.name], after[one.name]), rel=1e-5)
    assert found.examples == 150
    assert found.agreement == (classes.argmax(-1) == changed.argmax(-1)).mean()
    assert found.error == pytest.approx(np.linalg.norm(changed - classes) / np.linalg.norm(classes), rel=1e-5)


def test_an_unchanged_model_has_no_damage_and_another_model_is_measured_by_the_metrics_of_the_first():
    model, other = classifier(loss="sparse_categorical_crossentropy", metrics=["accuracy"]), classifier()
    kept = Baseline(model, [(INPUTS[:75], LABELS[:75]), (INPUTS[75:], LABELS[75:])])
    assert all(one.before == one.after for one in kept.damage().metrics)
    assert (kept.damage().error, kept.damage().agreement) == (0.0, 1.0)
    flip(other)
    found = kept.damage(other)
    assert [one.name for one in found.metrics] == ["accuracy", "loss"]
    assert found.metrics[1].after != found.metrics[1].before and found.error > 0


@pytest.mark.parametrize("size", [1, 1 << 18], ids=["compiled", "eager"])
def test_a_compiled_model_computes_what_an_eager_one_does(monkeypatch, size):
    monkeypatch.setattr(baseline, "_EAGER", size)
    model = classifier()
    kept = Baseline(model, INPUTS)
    np.testing.assert_allclose(np.concatenate(kept.outputs), model.predict(INPUTS, verbose=0), rtol=1e-5)


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_a_layer_that_computes_otherwise_is_measured(monkeypatch, size):
    monkeypatch.setattr(baseline, "_EAGER", size)
    model = classifier("linear")
    kept = Baseline(model, INPUTS)
    plain = model.layers[0].call
    with shadowed(model.layers[0], "call", lambda *args, **kwargs: 2 * plain(*args, **kwargs)):
        assert kept.damage().error == pytest.approx(1.0)
    assert kept.damage().error == 0.0


@pytest.mark.parametrize("size", [0, 1 << 30])
def test_the_error_is_that_of_the_present_values(monkeypatch, size):
    monkeypatch.setattr(baseline, "_EAGER", size)
    model = classifier("linear")
    kept = Baseline(model, INPUTS)
    before = model.predict(INPUTS, verbose=0)
    for factor in (3.0, 2.0):
        with replaced([(one, factor * array_of(one)) for one in model.trainable_variables]):
            assert kept.error() == pytest.approx(output_error([before], [factor * before]), rel=1e-4)
    assert kept.error() == 0.0


@pytest.mark.parametrize("data", [INPUTS, (INPUTS, LABELS)], ids=["no labels", "not compiled"])
def test_without_labels_or_compiled_metrics_the_outputs_are_compared(data):
    model = classifier(**({"loss": "mse"} if data is INPUTS else {}))
    found = Baseline(model, data).damage()
    assert found.metrics == () and found.problem == "" and len(found.outputs) == 1


def test_labels_that_do_not_fit_the_loss_are_told_and_no_error():
    model = classifier(loss="mse")
    found = Baseline(model, (INPUTS, np.zeros((150, 7, 2), "float32"))).damage()
    assert found.metrics == () and found.problem.startswith("Metrics are not measured: ")
    assert found.section().notes == (found.problem,)


@pytest.mark.parametrize(
    ("activation", "compiled", "classes"),
    [
        ("softmax", {"loss": "mse"}, True),
        ("linear", {"loss": keras.losses.SparseCategoricalCrossentropy(from_logits=True)}, True),
        ("linear", {"loss": "mse"}, False),
        ("linear", {}, False),
        ("softmax", {}, True),
        ("sigmoid", {"loss": "binary_crossentropy"}, True),
    ],
)
def test_outputs_are_classes_by_their_loss_and_their_values(activation, compiled, classes):
    assert (Baseline(classifier(activation, **compiled), INPUTS).damage().agreement is not None) == classes


def test_several_outputs_are_compared_each_by_its_name():
    inputs = keras.Input((4,))
    model = keras.Model(inputs, {"boxes": L.Dense(4, name="boxes")(inputs), "kind": L.Dense(3, name="kind")(inputs)})
    model.compile("sgd", loss={"boxes": "mse", "kind": "sparse_categorical_crossentropy"})
    kept = Baseline(model, INPUTS)
    model.get_layer("kind").kernel.assign(np.zeros((4, 3)))
    found = {one.name: one for one in kept.damage().outputs}
    assert found["boxes"].error == 0.0 and found["boxes"].agreement is None
    assert found["kind"].error == pytest.approx(1.0) and found["kind"].agreement < 1


def test_the_first_examples_are_enough():
    found = Baseline(classifier(), np.tile(INPUTS, (8, 1))).damage()
    assert found.examples == 512


def test_large_outputs_are_kept_for_fewer_examples(monkeypatch):
    monkeypatch.setattr(baseline, "_VALUES", 3 * 100)
    assert Baseline(classifier(), INPUTS).damage().examples == 128
