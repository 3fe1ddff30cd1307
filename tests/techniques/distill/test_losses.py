"""The losses between teacher and student, beside plain NumPy in float64."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.techniques.distill import losses

pytestmark = pytest.mark.every_backend
RANDOM = np.random.default_rng(3)
TEACHER = RANDOM.normal(size=(6, 5), scale=3.0)
STUDENT = RANDOM.normal(size=(6, 5), scale=2.0)
LABELS = RANDOM.integers(0, 5, 6)


def plain(function, *arrays, **options):
    given = [keras.ops.convert_to_tensor(one.astype("float32")) for one in arrays]
    return keras.ops.convert_to_numpy(function(*given, **options))


def softmax(logits):
    raised = np.exp(logits - logits.max(-1, keepdims=True))
    return raised / raised.sum(-1, keepdims=True)


def divergence(p, q):
    return (p * (np.log(p) - np.log(q))).sum(-1)


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_divergence_is_that_of_softened_probabilities_times_the_square_of_the_temperature(temperature):
    expected = divergence(softmax(TEACHER / temperature), softmax(STUDENT / temperature)) * temperature**2
    np.testing.assert_allclose(
        plain(losses.divergence, TEACHER, STUDENT, temperature=temperature), expected, rtol=1e-4, atol=1e-6
    )
    assert plain(losses.divergence, TEACHER, TEACHER, temperature=temperature) == pytest.approx(0, abs=1e-6)


def pearson(one, two, weights=None):
    weights = np.ones_like(one) if weights is None else weights
    one, two = (values - np.average(values, weights=weights) for values in (one, two))
    return (weights * one * two).sum() / np.sqrt((weights * one**2).sum() * (weights * two**2).sum())


@pytest.mark.parametrize("weights", [None, np.array([1.0, 2.0, 0.0, 1.0, 0.5, 3.0])], ids=["equal", "weighted"])
def test_relations_are_correlations_within_examples_and_within_classes(weights):
    p, q = softmax(TEACHER / 4), softmax(STUDENT / 4)
    within = np.array([1 - pearson(*rows) for rows in zip(p, q, strict=True)])
    among = np.mean([1 - pearson(p[:, column], q[:, column], weights) for column in range(5)])
    given = None if weights is None else ops.convert_to_tensor(weights.astype("float32"))
    found = plain(losses.relations, TEACHER, STUDENT, temperature=4.0, weights=given)
    np.testing.assert_allclose(found, (within + among) * 16, rtol=1e-4)


def test_relations_do_not_change_with_the_scale_of_probabilities_and_have_finite_gradients_where_all_are_equal():
    assert plain(losses.relations, np.zeros((3, 4)), np.zeros((3, 4)), temperature=1.0) == pytest.approx(2.0)
    assert plain(losses.relations, TEACHER, TEACHER, temperature=2.0) == pytest.approx(0, abs=1e-4)


def test_decoupled_distillation_is_the_sum_of_its_two_parts():
    p, q = softmax(TEACHER / 4), softmax(STUDENT / 4)
    rows = np.arange(6)
    target = [np.stack([side[rows, LABELS], 1 - side[rows, LABELS]], -1) for side in (p, q)]
    others = np.ones((6, 5), bool)
    others[rows, LABELS] = False
    among = [side[others].reshape(6, 4) / side[others].reshape(6, 4).sum(-1, keepdims=True) for side in (p, q)]
    expected = (divergence(*target) + 8 * divergence(*among)) * 16
    found = plain(losses.decoupled, TEACHER, STUDENT, np.eye(5)[LABELS], temperature=4.0)
    np.testing.assert_allclose(found, expected, rtol=1e-4)


def test_decoupled_distillation_is_finite_where_the_teacher_is_certain():
    certain = np.array([[200.0, 0.0, 0.0]])
    assert np.isfinite(plain(losses.decoupled, certain, -certain, np.array([[1.0, 0.0, 0.0]]), temperature=1.0)).all()


def test_squared_error_is_the_mean_along_the_last_axis():
    np.testing.assert_allclose(
        plain(losses.squared_error, TEACHER, STUDENT), ((TEACHER - STUDENT) ** 2).mean(-1), rtol=1e-5
    )


def test_map_error_compares_maps_of_root_mean_square_one():
    one, two = RANDOM.normal(size=(3, 4, 4, 2)), RANDOM.normal(size=(3, 4, 4, 2))
    unit = [maps / np.sqrt((maps**2).mean((1, 2, 3), keepdims=True)) for maps in (one, two)]
    expected = ((unit[0] - unit[1]) ** 2).mean((1, 2, 3))
    np.testing.assert_allclose(plain(losses.map_error, one, two), expected, rtol=1e-4)
    np.testing.assert_allclose(plain(losses.map_error, one * 7, two), expected, rtol=1e-4)
    assert plain(losses.map_error, one, np.zeros_like(one)) == pytest.approx(1.0)
