"""Losses and metrics of a recipe: what `compile` receives, what the results are named, which one is the main one."""

import keras
import numpy as np
import pytest

from prunekit.recipe.run.preparation import prepare
from prunekit.recipe.settings.compile_fields import Compile
from prunekit.recipe.state.compile_settings import (
    OutputMetrics,
    accuracy_name,
    as_floats,
    compile_arguments,
    metrics_of,
    output_names,
    reason_of,
)
from prunekit.recipe.text.loader import RecipeError, load_recipe

TWO = ("left", "right")
INPUTS = np.linspace(-1, 1, 24, dtype="float32").reshape(6, 4)
LABELS = {"left": np.arange(6, dtype="float32")[:, None], "right": np.array([0, 1, 2, 0, 1, 2])}


def spread(labels, outputs):
    """A metric of the user's own."""
    return keras.ops.max(outputs, axis=-1) - keras.ops.min(outputs, axis=-1)


def new_spread():
    return spread


def new_mean():
    return keras.metrics.Mean(name="average")


def new_loss(scale):
    return lambda labels, outputs: scale * keras.ops.mean(keras.ops.square(labels - outputs), axis=-1)


def no_metric():
    return 3


@pytest.fixture(scope="module")
def two_outputs():
    keras.utils.set_random_seed(1)
    inputs = keras.Input((4,))
    left = keras.layers.Dense(1, name="left")(inputs)
    right = keras.layers.Dense(3, activation="softmax", name="right")(inputs)
    return keras.Model(inputs, [left, right], name="two")


@pytest.fixture(scope="module")
def one_output():
    return keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)], name="one")


def settings(**values):
    return Compile.model_validate(values)


def named(model, outputs=None, **values):
    return [(metric.name, metric.direction) for metric in metrics_of(settings(**values), outputs, model)]


@pytest.mark.parametrize(
    ("values", "names"),
    [
        ({}, ["accuracy", "loss"]),
        ({"loss": "mse"}, ["loss"]),
        ({"loss": "mse", "metrics": ["mae", "mse"]}, ["mae", "mse", "loss"]),
        ({"loss": "mse", "metrics": ["mae", "mse"], "monitor": "mse"}, ["mse", "mae", "loss"]),
        ({"loss": "mse", "metrics": ["mae"], "monitor": "loss"}, ["loss", "mae"]),
        (
            {"loss": "mse", "metrics": ["mae"], "weighted_metrics": ["mae", "mse"]},
            ["mae", "weighted_mae", "mse", "loss"],
        ),
        ({"metrics": [{"metric": "auc", "arguments": {"curve": "PR"}, "name": "pr"}]}, ["pr", "loss"]),
    ],
    ids=["classes", "regression", "first metric", "monitor", "loss", "weighted", "renamed"],
)
def test_the_main_metric_is_the_first_one_or_the_loss_unless_monitor_names_another(one_output, values, names):
    assert [name for name, _ in named(one_output, **values)] == names


def test_names_are_those_of_the_results_of_evaluate(two_outputs):
    values = settings(
        loss={"left": "mse", "right": "sparse_categorical_crossentropy"},
        loss_weights={"right": 0.5},
        metrics={
            "left": ["mae", {"factory": "test_compile_settings:new_spread", "direction": "min"}],
            "right": [
                "accuracy",
                {"metric": "sparse_top_k_categorical_accuracy", "arguments": {"k": 2}, "name": "top"},
            ],
        },
        weighted_metrics={"left": ["mae", "mse"]},
    )
    names = output_names(two_outputs, two_outputs(INPUTS))
    assert names == TWO
    two_outputs.compile(**compile_arguments(values, names))
    labels = [LABELS["left"], LABELS["right"]]
    measured = two_outputs.evaluate(INPUTS, labels, verbose=0, return_dict=True)
    assert {metric.name for metric in metrics_of(values, names, two_outputs)} == set(measured)
    assert measured["loss"] == pytest.approx(measured["left_loss"] + 0.5 * measured["right_loss"], rel=1e-5)

    calculated = OutputMetrics(values, names)([np.asarray(one) for one in two_outputs(INPUTS)], LABELS)
    assert calculated == pytest.approx(measured, rel=1e-5)


def test_a_single_output_by_name_and_metrics_of_one_name_have_the_names_of_evaluate(one_output):
    model = keras.Model(one_output.inputs[0], {"price": one_output.outputs[0]})
    values = settings(loss="mse", metrics={"price": ["mae", "mse", "mse"]}, weighted_metrics=["mse", "mse"])
    names = output_names(model, model(INPUTS))
    model.compile(**compile_arguments(values, names))
    labels = {"price": np.arange(len(INPUTS)) % 2}
    measured = model.evaluate(INPUTS, labels, verbose=0, return_dict=True)
    found = [metric.name for metric in metrics_of(values, names, model)]
    assert found == ["mae", "mse", "mse_1", "weighted_mse", "weighted_mse_1", "loss"] and set(found) == set(measured)


def test_without_metrics_the_main_one_is_the_loss_of_all_outputs_and_outputs_without_a_loss_have_none(two_outputs):
    assert [name for name, _ in named(two_outputs, TWO, loss="mse")] == ["loss", "left_loss", "right_loss"]
    assert named(two_outputs, TWO, loss={"left": "mse"}, metrics={"right": ["mae"]}) == [
        ("right_mae", "min"),
        ("loss", "min"),
    ]


def test_a_list_of_metrics_is_measured_for_every_output(two_outputs):
    found = named(two_outputs, TWO, loss="mse", metrics=["mae", "cosine_similarity"])
    assert found == [
        ("left_mae", "min"),
        ("right_mae", "min"),
        ("left_cosine_similarity", "max"),
        ("right_cosine_similarity", "max"),
        ("left_loss", "min"),
        ("right_loss", "min"),
        ("loss", "min"),
    ]
    arguments = compile_arguments(settings(loss="mse", metrics=[{"metric": "mae"}]), TWO)
    assert arguments["metrics"]["left"][0] is not arguments["metrics"]["right"][0]


def test_one_output_is_measured_as_the_model_measures_it(one_output):
    values = settings(loss="huber", metrics=["mae", "r2_score"])
    one_output.compile(**compile_arguments(values, None))
    measured = one_output.evaluate(INPUTS, LABELS["left"], verbose=0, return_dict=True)
    calculated = OutputMetrics(values, None)([np.asarray(one_output(INPUTS))], LABELS["left"])
    assert calculated == pytest.approx(measured, rel=1e-5)


def test_a_metric_with_several_values_is_refused_by_name():
    assert as_floats({"mae": np.float32(0.5), "loss": 2}) == {"mae": 0.5, "loss": 2.0}
    with pytest.raises(RecipeError, match=r"a metric is one number. Received: 'f1_score' with values of shape \(3,\)"):
        as_floats({"f1_score": np.ones(3)})


def test_a_metric_of_a_factory_is_named_by_its_function_or_by_the_recipe(one_output):
    own = {"factory": "test_compile_settings:new_spread", "direction": "max"}
    assert named(one_output, loss="mse", metrics=[own])[0] == ("spread", "max")
    assert named(one_output, loss="mse", metrics=[{**own, "name": "width"}])[0] == ("width", "max")
    mean = {"factory": "test_compile_settings:new_mean", "direction": "min"}
    assert named(one_output, loss="mse", metrics=[mean])[0] == ("average", "min")
    assert named(one_output, loss="mse", metrics=[{**mean, "name": "typical"}])[0] == ("typical", "min")


def test_a_loss_of_a_factory_is_made_with_its_arguments(one_output):
    values = settings(
        loss={"factory": "test_compile_settings:new_loss", "arguments": {"scale": 2.0}}, metrics=["mse"], monitor="mse"
    )
    one_output.compile(**compile_arguments(values, None))
    measured = one_output.evaluate(INPUTS, LABELS["left"], verbose=0, return_dict=True)
    assert measured["loss"] == pytest.approx(2 * measured["mse"], rel=1e-6)


def test_from_logits_holds_for_each_loss_that_knows_it():
    arguments = compile_arguments(
        settings(loss={"left": "mse", "right": "sparse_categorical_crossentropy"}, from_logits=True), TWO
    )
    assert arguments["loss"]["right"].from_logits
    assert not hasattr(arguments["loss"]["left"], "from_logits")


@pytest.mark.parametrize(
    ("activation", "given", "loss", "expected"),
    [
        (None, None, "sparse_categorical_crossentropy", True),
        ("softmax", None, "sparse_categorical_crossentropy", False),
        ("sigmoid", None, "sparse_categorical_crossentropy", False),
        ("sigmoid", None, "binary_crossentropy", False),
        (None, None, "mse", False),
        (None, False, "sparse_categorical_crossentropy", False),
    ],
)
def test_a_loss_takes_logits_where_the_outputs_are_no_probabilities(pairs, activation, given, loss, expected):
    model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, activation)])
    if loss in ("binary_crossentropy", "mse"):
        pairs = [(inputs, np.eye(4)[labels]) for inputs, labels in pairs]
    compiled = {"optimizer": "adam", "loss": loss, "metrics": []}
    if given is not None:
        compiled["from_logits"] = given
    source = {"version": 1, "compile": compiled, "steps": [{"train": {"epochs": 1}}]}
    found = prepare(load_recipe(source, data_given=True), model, pairs, trust=False)
    assert found.compile.from_logits is expected


OWN = {"factory": "test_compile_settings:new_spread"}


@pytest.mark.parametrize(
    ("outputs", "values", "message"),
    [
        (None, {"loss": "mse", "metrics": [OWN]}, "'spread' are better is known only.*monitor: {name: spread, dir"),
        (None, {"loss": "mse", "monitor": "mea", "metrics": ["mae"]}, "no metric 'mea' is measured. Did you mean 'm"),
        (None, {"loss": {"left": "mse"}}, "this model has one output, so 'loss' is one loss"),
        (None, {"loss": "mse", "metrics": {"left": ["mae"]}}, "no output 'left'. The model has one output: name none"),
        (TWO, {"loss": {"lft": "mse"}}, "compile.loss: the model has no output 'lft'. Did you mean 'left'"),
        (TWO, {"loss": "mse", "loss_weights": {"up": 1.0}}, "compile.loss_weights: the model has no output 'up'"),
        (
            TWO,
            {"loss": "mse", "weighted_metrics": {"up": ["mae"]}},
            "compile.weighted_metrics: the model has no output",
        ),
        (
            None,
            {"loss": "mse", "metrics": [{"metric": "auc", "arguments": {"curv": "PR"}}]},
            "AUC refuses its arguments",
        ),
        (
            None,
            {"metrics": ["mae"], "monitor": {"name": "mae", "direction": "max"}},
            "of 'mae', lower is better. Received: direction: max.",
        ),
        (None, {"metrics": [{"factory": "test_compile_settings:no_metric"}]}, "returns a keras.metrics.Metric.*: int"),
        (None, {"loss": {"factory": "test_compile_settings:no_metric"}}, "returns a keras.losses.Loss.*Received: int"),
    ],
    ids=[
        "no direction",
        "unknown monitor",
        "one output",
        "one output's metrics",
        "unknown output",
        "weight",
        "weighted",
        "arguments",
        "other direction",
        "no metric",
        "no loss",
    ],
)
def test_what_does_not_fit_is_refused_by_name(two_outputs, one_output, outputs, values, message):
    model = one_output if outputs is None else two_outputs
    with pytest.raises(RecipeError, match=message):
        compile_arguments(settings(**values), outputs)
        metrics_of(settings(**values), outputs, model)


def test_the_accuracy_of_a_report_has_another_name_where_it_is_the_one(one_output):
    found = metrics_of(settings(metrics=["top_k_categorical_accuracy", "binary_accuracy"]), None, one_output)
    assert accuracy_name(found) == "binary_accuracy"
    assert accuracy_name(metrics_of(settings(loss="mse"), None, one_output)) is None


def test_outputs_without_names_are_refused(two_outputs):
    assert output_names(two_outputs, {"b": 0, "a": 1}) == ("b", "a")
    with pytest.raises(RecipeError, match="returns them by name. Received: 'two', which returns a tuple"):
        output_names(two_outputs, (1, 2, 3))


def test_the_reason_of_a_keras_error_is_without_the_values_of_the_input():
    model = keras.Sequential([keras.Input((24, 24, 3)), keras.layers.Flatten()])
    with pytest.raises(ValueError) as refused:
        model(np.linspace(0, 1, 200, dtype="float32").reshape(2, 100))
    assert reason_of(refused.value).endswith(
        "Expected shape (None, 24, 24, 3), but input has incompatible shape (2, 100)"
    )
