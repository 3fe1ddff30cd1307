"""Bounds of an `expect` step, held beside what was measured."""

import pytest

from prunekit.delivery.rows import ExportRow
from prunekit.recipe.expectations import checked, failure_text
from prunekit.recipe.step_settings import Expect

BOUNDS = {
    "accuracy": {"min": 0.9},
    "accuracy_drop": {"max": 0.01},
    "sparsity": {"min": 0.7, "max": 0.8},
    "bytes": {"keras": {"max": 1000, "gzip_max": 500}},
}


def row(size, packed):
    return ExportRow("keras", "model.keras", size, packed, "ok", "", None, None, None)


def met(accuracy, drop, sparsity, size, packed, slack=0.0):
    rows = checked(Expect.model_validate(BOUNDS), accuracy, drop, (sparsity, slack), [row(size, packed)])
    return [one["met"] for one in rows]


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((0.9, 0.01, 0.7, 1000, 500), [True] * 6),
        ((0.9, 0.01, 0.8, 1000, 500), [True] * 6),
        ((0.89, 0.02, 0.69, 1001, 501), [False, False, False, True, False, False]),
        ((0.95, 0.0, 0.81, 999, 499), [True, True, True, False, True, True]),
        ((0.9, 0.01, 0.69, 1000, 500, 0.01), [True] * 6),
        ((None, None, 0.75, None, None), [False, False, True, True, False, False]),
    ],
    ids=["at the bounds", "at the upper bound", "beyond", "too sparse", "beyond by rounding", "not measured"],
)
def test_a_bound_is_met_at_the_bound_itself_and_never_by_what_was_not_measured(measured, expected):
    assert met(*measured) == expected


def test_of_several_exports_of_a_format_the_last_counts():
    settings = Expect.model_validate({"bytes": BOUNDS["bytes"]})
    rows = checked(settings, None, None, (0.0, 0.0), [row(2000, 900), row(900, 400)])
    assert [one["measured"] for one in rows] == [900, 400]


def test_what_was_not_measured_is_said_to_be_so():
    settings = Expect.model_validate({"accuracy": BOUNDS["accuracy"]})
    (missed,) = checked(settings, None, None, (0.0, 0.0), [])
    assert failure_text(missed) == "accuracy was not measured, expected at least 0.9"
