"""Damage: what counts as a large loss, and how it is told."""

import math

import pytest

from prunekit.anatomy.records.damage import Damage, MetricChange, OutputChange
from prunekit.anatomy.records.keras_metrics import known_metric

GOOD, BAD = OutputChange("", 0.02, 0.99), OutputChange("", 0.6, 0.4)


@pytest.mark.parametrize(
    ("metrics", "output", "large"),
    [
        ([("accuracy", 0.9, 0.89), ("loss", 0.3, 3.0)], BAD, []),
        ([("accuracy", 0.9, 0.87)], GOOD, ["accuracy 0.9 -> 0.87"]),
        ([("boxes_mae", 14.0, 18.0), ("loss", 300.0, 500.0)], BAD, ["boxes_mae 14 -> 18"]),
        ([("mae", 14.0, 18.0)], OutputChange("", 0.01), []),
        ([("loss", 0.1, math.nan)], GOOD, ["loss 0.1 -> nan"]),
        ([("my_score", 1.0, 0.0)], GOOD, []),
        ([("my_score", 1.0, 0.0)], BAD, ["same class 0.4000, relative error 0.6"]),
        ([], OutputChange("boxes", 0.2), ["relative error of boxes 0.2"]),
        ([], OutputChange("", math.nan), ["relative error nan"]),
        ([], OutputChange("", 0.2, 0.96), []),
    ],
    ids="metric_decides drop of_an_output small_change not_a_number unknown unknown_classes error nan classes".split(),
)
def test_a_loss_is_large_by_the_metrics_and_without_them_by_the_outputs(metrics, output, large):
    found = Damage(100, (output,), tuple(MetricChange(*one) for one in metrics))
    assert found.large == large
    remark = found.remark("Keep more.")
    assert remark == (f"Much was lost on 100 examples of the data: {large[0]}. Keep more." if large else None)


def test_the_section_has_metrics_and_the_change_of_each_output():
    found = Damage(
        64, (OutputChange("boxes", 0.25), OutputChange("kind", 0.5, 0.75)), (MetricChange("loss", 1.0, 2.0),)
    )
    assert found.section().rows == (
        ("loss", 1.0, 2.0),
        ("relative error of boxes", None, 0.25),
        ("relative error of kind", None, 0.5),
        ("same class of kind", None, 0.75),
    )
    assert (found.error, found.agreement) == (0.5, 0.75)
    assert (
        str(found) == "loss 1 -> 2; relative error of boxes 0.25; same class of kind 0.7500, relative error of kind 0.5"
    )


@pytest.mark.parametrize(
    ("key", "kind"),
    [("left_mae", "MeanAbsoluteError"), ("acc", "Accuracy"), ("a_loss", "Mean"), ("score", None)],
)
def test_a_metric_of_an_output_is_known_by_the_end_of_its_name(key, kind):
    found = known_metric(key)
    assert (None if found is None else found.kind) == kind
