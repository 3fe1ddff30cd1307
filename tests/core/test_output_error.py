"""The error of outputs, beside plain NumPy."""

import math

import numpy as np
import pytest

from prunekit.core.output_error import output_error


def softmax(logits):
    found = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return (found / found.sum(axis=-1, keepdims=True)).astype("float32")


@pytest.fixture
def logits():
    generator = np.random.default_rng(0)
    before = generator.normal(size=(200, 4)) * 3
    return before, before + 0.1 * generator.normal(size=before.shape)


def relative(before, after):
    return math.sqrt(np.mean((after - before) ** 2) / np.mean((before - before.mean(axis=0)) ** 2))


def test_the_change_is_relative_to_the_deviation_over_the_examples(logits):
    before, after = logits
    assert output_error([before + 50], [after + 50]) == pytest.approx(relative(before, after))


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


def test_a_model_without_outputs_of_numbers_has_no_error():
    assert output_error([], []) == 0.0
