"""The share of the same classes in comparisons of files: of outputs that are classes alone."""

import numpy as np
import pytest

from prunekit.delivery.litert.isolated_run import compare

PROBABILITIES = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]])
SCORES = 5 * PROBABILITIES - 3


@pytest.mark.parametrize(
    ("outputs", "labels", "loss", "expected"),
    [
        (PROBABILITIES, None, None, 0.75),
        (SCORES, None, "sparse_categorical_crossentropy", 0.75),
        (SCORES, np.array([0, 1, 0, 0]), None, 0.75),
        (SCORES, None, "mean_squared_error", None),
        (SCORES, None, None, None),
        (SCORES[:, :1], None, None, None),
    ],
    ids=["probabilities", "loss of classes", "labels", "loss of a regression", "unknown numbers", "one number"],
)
def test_numbers_that_are_no_classes_have_no_share(outputs, labels, loss, expected):
    answers = outputs.copy()
    answers[2] = answers[2][::-1]
    found = compare([outputs], [answers], labels, loss)
    assert found.agreement == expected
    assert found.accuracy == (None if labels is None else 0.5)
