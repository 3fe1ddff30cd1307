"""The error of outputs, beside plain NumPy."""

import math

import numpy as np
import pytest

from prunekit.core.outputs.output_error import output_error


def softmax(logits):
    found = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (found / found.sum(axis=-1, keepdims=True)).astype("float32")


@pytest.fixture
def logits():
    generator = np.random.default_rng(0)
    before = generator.normal(size=(200, 4)) * 3
    return before, before + 0.1 * generator.normal(size=before.shape)


def relative(before, after):
    change = ((after - before) ** 2).mean(axis=-1)
    deviation = ((before - before.mean(axis=0)) ** 2).mean(axis=-1)
    return math.sqrt((change / np.maximum(deviation, 0.1 * deviation.mean())).mean())


def test_the_change_is_relative_to_the_deviation_of_each_example(logits):
    before, after = logits
    assert output_error([before + 50], [after + 50]) == pytest.approx(relative(before, after))
    large, changed = before.copy(), after.copy()
    large[0], changed[0] = 1000 * before[0], 1300 * before[0]
    # One example of two hundred: an error over all values would be its 0.3.
    assert output_error([large], [changed]) == pytest.approx(relative(large, changed))


def test_examples_at_the_mean_do_not_decide_alone():
    before = np.linspace(-1, 1, 101)[:, None]
    assert output_error([before], [before + 0.01]) < 0.04


def test_probabilities_of_classes_are_compared_by_logits(logits):
    centred = [each - each.mean(axis=-1, keepdims=True) for each in logits]
    assert output_error([softmax(logits[0])], [softmax(logits[1])]) == pytest.approx(relative(*centred), rel=1e-3)


def test_probabilities_of_two_classes_are_compared_by_logits(logits):
    probabilities = [(1 / (1 + np.exp(-each))).astype("float32") for each in logits]
    assert output_error([probabilities[0]], [probabilities[1]]) == pytest.approx(relative(*logits), rel=1e-3)


def test_rounding_above_1_does_not_hide_probabilities(logits):
    probabilities, changed = softmax(logits[0] * 5), softmax(logits[1] * 5)
    above = np.where(probabilities == probabilities.max(), np.float32(1 + 2e-7), probabilities)
    assert above.max() > 1
    assert output_error([above], [changed]) == pytest.approx(output_error([np.minimum(above, 1)], [changed]))


def test_the_worst_of_several_outputs_counts(logits):
    before, after = logits
    assert output_error([before, before], [before, after]) == pytest.approx(relative(before, after))


@pytest.mark.parametrize("value, error", [(np.nan, math.inf), (np.inf, math.inf), (3.0, math.inf), (2.0, 0.0)])
def test_outputs_that_are_not_finite_or_never_differ(value, error):
    before = np.full((3, 2), 2.0)
    assert output_error([before], [np.full((3, 2), value)]) == error


def test_outputs_without_values_have_no_error():
    assert output_error([], []) == output_error([np.zeros((0, 3))], [np.zeros((0, 3))]) == 0.0
