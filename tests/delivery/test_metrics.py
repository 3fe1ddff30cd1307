"""Names, directions and texts of metrics."""

import inspect

import keras
import pytest

from prunekit.anatomy.records.keras_metrics import KERAS_METRICS
from prunekit.delivery.reports.metrics import Metric, inferred, keras_metric, measured_in, with_main_first


@pytest.mark.parametrize(
    ("key", "direction"),
    [
        ("accuracy", "max"),
        ("mae", "min"),
        ("auc", "max"),
        ("loss", "min"),
        ("kl_loss", "min"),
        ("my_score", None),
        # The end of a name says nothing: an error of a user's own may be a negative one.
        ("my_accuracy", None),
    ],
)
def test_the_direction_is_known_for_names_of_keras_and_for_losses_alone(key, direction):
    assert inferred(key).direction == direction


def test_better_is_the_direction_of_the_metric():
    accuracy, mae = keras_metric("accuracy"), keras_metric("mae")
    assert (accuracy.is_better(0.9, 0.8), mae.is_better(0.9, 0.8)) == (True, False)
    assert (accuracy.drop(0.75, 0.5), mae.drop(0.75, 0.5)) == (0.25, -0.25)
    with pytest.raises(ValueError, match="A drop of 'score' needs its direction, which is not known"):
        Metric("score").drop(1.0, 2.0)


@pytest.mark.parametrize(
    ("name", "values", "text", "change"),
    [
        ("accuracy", (0.5, 0.75), "0.7500", "+0.2500"),
        ("accuracy", (0.5, 0.5), "0.5000", "±0"),
        ("mae", (200.0, 150.5), "150.5", "−49.5, −24.8 %"),
        ("mae", (0.0, 1.5), "1.5", "+1.5"),
        ("loss", (2.0, 2.0), "2", "±0"),
        ("loss", (None, 2.0), "2", "–"),
        ("loss", (2.0, float("nan")), "–", "–"),
    ],
)
def test_a_value_and_its_change_are_written_in_the_form_of_the_metric(name, values, text, change):
    metric = inferred(name)
    assert (metric.text(values[1]), metric.change_text(*values)) == (text, change)


def test_titles_spell_abbreviations_in_capitals():
    names = ("mae", "left_mae", "mean_absolute_error", "auc")
    assert [Metric(name).heading for name in names] == ["MAE", "Left MAE", "Mean absolute error", "AUC"]


def test_an_older_report_names_its_metrics_by_its_figures():
    found = measured_in({"latency_after": 3.0, "accuracy_before": 0.5, "accuracy_after": 0.75, "loss_after": 1.0})
    assert [(metric.name, metric.direction) for metric in found] == [
        ("accuracy", "max"),
        ("latency", None),
        ("loss", "min"),
    ]


def test_the_main_metric_comes_first_and_the_others_keep_their_order():
    metrics = [Metric("a"), Metric("b"), Metric("c")]
    assert [metric.name for metric in with_main_first(metrics, "b")] == ["b", "a", "c"]


def test_a_fraction_is_a_metric_whose_best_value_is_one():
    assert {metric.direction for metric in KERAS_METRICS.values() if metric.fraction} == {"max"}


@pytest.mark.parametrize("name", KERAS_METRICS)
def test_a_metric_has_one_value_without_further_arguments(name):
    parameters = inspect.signature(getattr(keras.metrics, KERAS_METRICS[name].kind)).parameters
    required = {key for key, one in parameters.items() if one.default is one.empty and key not in ("self", "kwargs")}
    # By default, these metrics have a value for each class.
    required |= {"average"} & set(parameters)
    assert set(KERAS_METRICS[name].needs) == required
