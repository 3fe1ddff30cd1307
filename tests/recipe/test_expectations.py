"""Bounds of an `expect` step, held beside what was measured."""

import math

import numpy as np
import pytest

from prunekit.delivery.reports.metrics import inferred
from prunekit.delivery.reports.rows import ExportRow
from prunekit.recipe.settings.export_settings import Expect
from prunekit.recipe.steps.expectations import Measured, checked, failure_text

BOUNDS = {
    "metrics": {"accuracy": {"min": 0.90625}},
    "drop": {"accuracy": 0.0078125},
    "sparsity": {"min": 0.7, "max": 0.8},
    "bytes": {"keras": {"max": 1000, "gzip_max": 500}},
}


def row(size, packed):
    return ExportRow("keras", "model.keras", size, packed, "ok", "", None, None, None)


def met(accuracy, drop, sparsity, size, packed, slack=0.0):
    values = {} if accuracy is None else {"accuracy": accuracy}
    before = {} if drop is None else {"accuracy": accuracy + drop}
    measured = measured_as(values, before, (sparsity, slack), [row(size, packed)])
    return [one["met"] for one in checked(Expect.model_validate(BOUNDS), measured)]


def measured_as(values=None, before=None, sparsity=(0.0, 0.0), exports=()):
    metrics = [inferred(name) for name in values or {}]
    return Measured(metrics, values or {}, before or {}, sparsity, exports)


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ((0.90625, 0.0078125, 0.7, 1000, 500), [True] * 6),
        ((0.90625, 0.0078125, 0.8, 1000, 500), [True] * 6),
        ((0.89, 0.02, 0.69, 1001, 501), [False, False, False, True, False, False]),
        ((0.95, 0.0, 0.81, 999, 499), [True, True, True, False, True, True]),
        ((0.90625, 0.0078125, 0.69, 1000, 500, 0.01), [True] * 6),
        ((None, None, 0.75, None, None), [False, False, True, True, False, False]),
    ],
    ids=["at the bounds", "at the upper bound", "beyond", "too sparse", "beyond by rounding", "not measured"],
)
def test_a_bound_is_met_at_the_bound_itself_and_never_by_what_was_not_measured(measured, expected):
    assert met(*measured) == expected


def test_of_several_exports_of_a_format_the_last_counts():
    settings = Expect.model_validate({"bytes": BOUNDS["bytes"]})
    rows = checked(settings, measured_as(exports=[row(2000, 900), row(900, 400)]))
    assert [one["measured"] for one in rows] == [900, 400]


def test_what_was_not_measured_is_said_to_be_so():
    settings = Expect.model_validate({"metrics": BOUNDS["metrics"]})
    (missed,) = checked(settings, measured_as())
    assert failure_text(missed) == "accuracy was not measured, expected at least 0.90625"


def rows_of(bounds, values, before=None):
    found = checked(Expect.model_validate(bounds), measured_as(values, before))
    return [(one["what"], one["measured"], one["met"]) for one in found]


@pytest.mark.parametrize(
    ("bounds", "row"),
    [
        ({"metrics": {"mae": {"max": 0.5}}}, ("mae", 0.5, True)),
        ({"metrics": {"mae": {"max": 0.25}}}, ("mae", 0.5, False)),
        ({"metrics": {"loss": {"min": 0.0}}}, ("loss", 2.0, True)),
        ({"metrics": {"auc": {"min": 0.875}}}, ("auc", 0.75, False)),
        ({"metrics": {"recall": {"min": 0.5}}}, ("recall", None, False)),
    ],
    ids=["at the bound", "beyond", "loss", "higher is better", "not measured"],
)
def test_a_bound_on_any_metric_is_compared_with_its_value(bounds, row):
    assert rows_of(bounds, {"mae": 0.5, "loss": 2.0, "auc": 0.75}) == [row]


@pytest.mark.parametrize(
    ("drop", "row"),
    [
        ({"mae": 0.25}, ("drop of mae", 0.25, True)),
        ({"mae": 0.125}, ("drop of mae", 0.25, False)),
        ({"auc": 0.125}, ("drop of auc", 0.125, True)),
        ({"mse": 0}, ("drop of mse", -1.0, True)),
        ({"mae": 0.5, "relative": True}, ("relative drop of mae", 0.5, True)),
        ({"r2_score": 0.5, "relative": True}, ("relative drop of r2_score", 0.5, True)),
        ({"hinge": 0.5, "relative": True}, ("relative drop of hinge", math.inf, False)),
        ({"poisson": 0.5}, ("drop of poisson", None, False)),
    ],
    ids=["higher", "beyond", "lower", "better", "relative", "below zero", "from zero", "not measured"],
)
def test_a_drop_is_the_change_for_the_worse_in_the_direction_of_the_metric(drop, row):
    now = {"mae": 0.75, "auc": 0.75, "mse": 1.0, "r2_score": -3.0, "hinge": 1.0}
    before = {"mae": 0.5, "auc": 0.875, "mse": 2.0, "r2_score": -2.0, "hinge": 0.0}
    assert rows_of({"drop": drop}, now, before) == [row]


@pytest.mark.parametrize(
    ("bounds", "now", "expected"),
    [
        ({"metrics": {"accuracy": {"min": 0.96}}}, 0.96, True),
        ({"drop": {"accuracy": 0.02}}, 0.95, True),
        ({"drop": {"accuracy": 0.02 / 0.97, "relative": True}}, 0.95, True),
        ({"metrics": {"accuracy": {"min": 0.96}}}, 0.95999, False),
        ({"drop": {"accuracy": 0.02}}, 0.94999, False),
        ({"drop": {"accuracy": 0.02}}, math.nan, False),
    ],
)
def test_a_metric_in_float32_meets_its_bound_in_decimals(bounds, now, expected):
    (one,) = rows_of(bounds, {"accuracy": float(np.float32(now))}, {"accuracy": float(np.float32(0.97))})
    assert one[2] is expected


def test_a_metric_that_was_infinite_gives_no_tolerance():
    assert rows_of({"metrics": {"mae": {"max": 3}}}, {"mae": 5.0}, {"mae": math.inf}) == [("mae", 5.0, False)]
