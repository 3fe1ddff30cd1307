"""Distillation that is refused: wrong options, teachers, layers, losses and steps."""

import keras
import numpy as np
import pytest
from backends import BACKEND, tensorflow_only
from distilled_training import two_outputs, wide_teacher
from quantized_training import LOSS, X, fit, network

import prunekit as pk

pytestmark = pytest.mark.every_backend
L = keras.layers


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


@pytest.mark.parametrize("loss", ["kl", "dist", "dkd"])
def test_losses_of_classes_need_classes(loss):
    model = keras.Sequential([keras.Input((8, 8, 1)), L.Flatten(), L.Dense(1)])
    model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=f'loss="{loss}" compares classes. Received: a model whose outputs are values'):
        fit(model, pk.DistillationCallback(loss=loss), epochs=1)


def test_two_callbacks_and_a_report_before_its_time_are_refused(teacher):
    with pytest.raises(ValueError, match="may contain one DistillationCallback"):
        fit(network(), pk.DistillationCallback(teacher), pk.DistillationCallback(teacher))
    with pytest.raises(RuntimeError, match="exists once `fit` has ended"):
        _ = pk.DistillationCallback(teacher).report


def linear(kind):
    x = keras.Input((8, 8, 1))
    model = kind(x, L.Dense(4)(L.Flatten()(x)))
    model.compile("sgd", LOSS)
    return model


class OwnLoss(keras.Model):
    """Calculates its loss without the compiled one."""

    def compute_loss(self, x=None, y=None, y_pred=None, sample_weight=None, training=True):
        return keras.ops.mean(keras.ops.square(y_pred))


def test_a_loss_that_leaves_the_compiled_one_out_is_refused(teacher):
    with pytest.raises(ValueError, match="own `compute_loss` does not use the compiled loss"):
        fit(linear(OwnLoss), pk.DistillationCallback(teacher), epochs=1)


class OwnStep(keras.Model):
    """A training step that never calculates the loss of Keras."""

    def train_step(self, *args):
        return ({"loss": 0.0}, args[0]) if BACKEND == "jax" else {"loss": 0.0}


def test_a_step_without_compute_loss_is_refused(teacher):
    with pytest.raises(RuntimeError, match="never calls it"):
        fit(linear(OwnStep), pk.DistillationCallback(teacher), epochs=1)


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
    with pytest.raises(ValueError, match="cannot be copied .* Pass the teacher, such as another model of its class"):
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


@tensorflow_only
def test_an_unbuilt_student_and_metrics_without_labels_are_refused(teacher):
    # On other backends Keras builds the model, its loss and metrics before any callback.
    student = Subclassed(4)
    student.compile("sgd", LOSS)
    with pytest.raises(ValueError, match="is not built"):
        fit(student, pk.DistillationCallback(teacher), epochs=1)
    with pytest.raises(ValueError, match="Metrics read labels. Received: training data without labels"):
        network().fit(X, verbose=0, callbacks=[pk.DistillationCallback(teacher)])
