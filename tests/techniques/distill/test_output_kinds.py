"""Outputs after a softmax or sigmoid are recognised, and read as logits."""

import keras
import numpy as np
import pytest

from prunekit.techniques.distill.output_kinds import OutputKind, logits_of, output_kinds

pytestmark = pytest.mark.every_backend
L = keras.layers


def ending(*layers, loss=None):
    model = keras.Sequential([keras.Input((4,)), *layers])
    if loss is not None:
        model.compile("sgd", loss)
    return model


def inside(model):
    return keras.Sequential([keras.Input((4,)), model])


FROM_LOGITS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
MODELS = {
    "a softmax as activation": (lambda: ending(L.Dense(3, activation="softmax")), OutputKind.PROBABILITIES),
    "a softmax layer": (lambda: ending(L.Dense(3), L.Softmax()), OutputKind.PROBABILITIES),
    "an activation layer": (lambda: ending(L.Dense(3), L.Activation("softmax")), OutputKind.PROBABILITIES),
    "a softmax in a model inside": (lambda: inside(ending(L.Dense(3, activation="softmax"))), OutputKind.PROBABILITIES),
    "a sigmoid": (lambda: ending(L.Dense(3, activation="sigmoid")), OutputKind.YES_NO),
    "a loss of logits": (lambda: ending(L.Dense(3), loss=FROM_LOGITS), OutputKind.LOGITS),
    "a loss of probabilities": (lambda: ending(L.Dense(3), loss="categorical_crossentropy"), OutputKind.PROBABILITIES),
    "a softmax and a loss of logits": (
        lambda: ending(L.Dense(3, activation="softmax"), loss=FROM_LOGITS),
        OutputKind.PROBABILITIES,
    ),
    "logits of yes or no": (
        lambda: ending(L.Dense(1), loss=keras.losses.BinaryCrossentropy(from_logits=True)),
        OutputKind.YES_NO_LOGITS,
    ),
    "a regression": (lambda: ending(L.Dense(1), loss="mse"), OutputKind.VALUES),
    "no loss": (lambda: ending(L.Dense(3)), OutputKind.VALUES),
}


@pytest.mark.parametrize("name", MODELS)
def test_the_end_of_a_model_and_its_loss_tell_the_kind(name):
    make, kind = MODELS[name]
    assert output_kinds(make()) == [kind]


def test_losses_by_name_are_those_of_their_outputs():
    x = keras.Input((4,))
    model = keras.Model(x, [L.Dense(3, name="z")(x), L.Dense(2, name="a")(x)])
    model.compile("sgd", {"z": FROM_LOGITS, "a": "mse"})
    assert output_kinds(model) == [OutputKind.LOGITS, OutputKind.VALUES]


def test_a_teacher_without_a_loss_has_logits_where_its_student_tells_classes():
    teacher = ending(L.Dense(3))
    assert output_kinds(teacher, like=[OutputKind.PROBABILITIES]) == [OutputKind.LOGITS]
    assert output_kinds(teacher, like=[OutputKind.YES_NO]) == [OutputKind.YES_NO_LOGITS]
    assert output_kinds(teacher, like=[OutputKind.VALUES]) == [OutputKind.VALUES]


@pytest.mark.parametrize("kind", [OutputKind.PROBABILITIES, OutputKind.YES_NO])
def test_logits_give_the_probabilities_back(kind):
    given = np.array([[0.7, 0.2, 0.1], [0.05, 0.9, 0.05]], "float32")
    logits = keras.ops.convert_to_numpy(logits_of(kind, keras.ops.convert_to_tensor(given)))
    raised = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    np.testing.assert_allclose(raised if kind is OutputKind.PROBABILITIES else raised[..., 0], given, rtol=1e-5)


def test_probabilities_that_are_zero_have_finite_logits():
    for kind in (OutputKind.PROBABILITIES, OutputKind.YES_NO):
        found = logits_of(kind, keras.ops.convert_to_tensor(np.array([[1.0, 0.0]], "float32")))
        assert np.isfinite(keras.ops.convert_to_numpy(found)).all()
