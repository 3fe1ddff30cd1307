"""Tensors that calibration data say too little of, and tensors that span few steps of a grid that others share."""

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.techniques.quantize.after_training import planned_quantization, quantize_model
from prunekit.techniques.quantize.options import QuantizationOptions

pytestmark = pytest.mark.every_backend

INPUTS = np.random.default_rng(0).normal(size=(64, 6)).astype("float32")


def detector(activation="sigmoid", joint=None, boxes=100.0):
    """Returns a model whose boxes are some hundred times as large as its scores, in one output."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), name="x")
    hidden = L.Dense(8, activation="relu", name="hidden")(x)
    large = L.Dense(4, kernel_initializer=keras.initializers.RandomNormal(0, boxes), name="boxes")(hidden)
    small = L.Dense(4, activation=activation, name="scores")(hidden)
    return keras.Model(x, (joint or L.Concatenate(name="joint"))([large, small]))


def notes(model, data=INPUTS, **options):
    return [
        one for one in quantize_model(model, QuantizationOptions(**options), data).report.notes if "Few steps" in one
    ]


@pytest.mark.parametrize("activation", ["sigmoid", "linear"], ids=["prescribed grid", "own grid"])
def test_scores_that_share_the_grid_of_boxes_are_named_with_the_remedies(activation):
    (note,) = notes(detector(activation))
    assert note.startswith("Few steps of the grid that they share at 'joint' lie between the extremes of scores (")
    assert note.endswith(
        "told apart: use activations of 16 bits, give the model an output for each of them, or leave 'joint' in "
        "floating point with `exclude`."
    )


@pytest.mark.parametrize(
    "options", [{"activation_bits": 16}, {"exclude": "joint"}, {"activation_bits": "float"}], ids=str
)
def test_each_remedy_leaves_nothing_to_say(options):
    assert notes(detector(), **options) == []


def test_tensors_of_one_size_may_share_a_grid():
    assert notes(detector("linear", boxes=0.3)) == []


def test_a_summand_and_a_channel_of_an_output_are_named_too():
    (note,) = notes(detector("linear", L.Add(name="sum")))
    assert note.startswith("Few steps of the grid of their sum 'sum' lie between the extremes of scores (")
    x = keras.Input((6,), name="x")
    model = keras.Model(x, L.Dense(3, name="head")(x))
    model.get_layer("head").set_weights([np.ones((6, 3)) * [100.0, 100.0, 0.5], np.zeros(3)])
    (note,) = notes(model)
    assert note.startswith("Few steps of the grid of the output 'head' lie between the extremes of channel 2 (")


def test_the_plan_lists_what_shares_a_grid():
    plan = planned_quantization(detector(), QuantizationOptions())
    assert plan.joined == (("joint", ("boxes", "scores")),)
    (section,) = [one for one in plan.sections() if one.title == "Tensors that share a grid"]
    assert section.rows == (("joint", ("boxes", "scores")),)
    assert planned_quantization(detector(), QuantizationOptions(activation_bits="float")).joined == ()


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (INPUTS, ""),
        (INPUTS * 0, "On the calibration data all values are the same at 'x' (0)"),
        (INPUTS * 0 + 1e30, "On the calibration data all values are the same at 'x' (1e+30)"),
        (INPUTS * 1e8, "The calibration data reach huge values at 'x' (3"),
    ],
    ids=["good", "zeros", "constant", "huge"],
)
def test_degenerate_data_are_named_with_the_tensor(data, problem):
    found = quantize_model(detector("linear", boxes=0.3), QuantizationOptions(), data)
    first = found.data_problems[0] if found.data_problems else ""
    assert first.startswith(problem) and bool(first) == bool(problem)
    assert found.report.notes[: len(found.data_problems)] == found.data_problems
