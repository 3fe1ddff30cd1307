"""choose_bits: budgets of bytes, floors of a metric, the table that it reads, and models that stay as they are."""

import dataclasses
import itertools
import json
import math

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from keras import layers as L, ops
from networks import dense_network

from prunekit.delivery.pages.pictures import PLOTS
from prunekit.delivery.plots.plots import to_svg
from prunekit.operations.choose_bits import choose_bits
from prunekit.techniques.quantize.after_training import quantize_model
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, grid_of
from prunekit.techniques.quantize.options import QuantizationOptions
from prunekit.techniques.quantize.targeting import selected

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)


def network(seed=0):
    """Returns a model of four layers with random weights, and data."""
    model = randomize(dense_network(10, seed=seed, first=24, second=24, third=12, head=4))
    return model, np.random.default_rng(seed).normal(size=(96, 10)).astype("float32")


def outputs_of(model, data):
    return ops.convert_to_numpy(model(data))


def closeness(model, data):
    """Returns what `evaluate` returns: minus the relative squared change of the outputs."""
    before = outputs_of(model, data)

    def evaluate(changed):
        return -float(np.sum(np.square(outputs_of(changed, data) - before)) / np.sum(np.square(before)))

    return evaluate


def variables_of(model):
    return [ops.convert_to_numpy(one).tobytes() for one in model.variables]


@pytest.mark.every_backend
def test_the_table_has_the_error_of_the_outputs_with_one_weight_rounded():
    model, data = network()
    choice = choose_bits(model, data, budget=10_000, activation_bits="float")
    before = outputs_of(model, data)
    for row, layer in zip(choice.weights, model.layers[-4:], strict=True):
        own = ops.convert_to_numpy(layer.kernel)
        for bits, error, rule in zip(row.bits, row.errors, (MeanSquaredError(), MinMax()), strict=True):
            layer.kernel.assign(grid_of(own, IntegerFormat(bits), Granularity((1,)), rule).nearest(own))
            found = np.sum(np.square(outputs_of(model, data) - before)) / np.sum(np.square(before))
            assert error == pytest.approx(found, rel=1e-3), (row.name, bits)
            layer.kernel.assign(own)


@pytest.mark.every_backend
@pytest.mark.parametrize("share", [0.0, 0.3, 0.6, 1.0])
def test_a_budget_is_kept_and_no_other_choice_has_a_smaller_error(share):
    model, data = network()
    least, most = (choose_bits(model, data, budget=one).bytes for one in (2300, 10**6))
    budget = round(least + share * (most - least))
    choice = choose_bits(model, data, budget=budget)
    rows = choice.weights
    every = itertools.product(*(range(len(row.bits)) for row in rows))
    errors = [
        sum(row.errors[at] for row, at in zip(rows, chosen, strict=True))
        for chosen in every
        if dataclasses.replace(choice, chosen=chosen).bytes <= budget
    ]
    assert choice.bytes <= budget and choice.error == pytest.approx(min(errors))
    assert choice.verdict().endswith(f"of {budget:,}, summed error {choice.error:.3g}.")


def test_the_bytes_are_those_of_codes_scales_and_floats():
    model, data = network()
    choice = choose_bits(model, data, budget=10**6, bits=(4, 8, "float"))
    biases = 4 * (24 + 24 + 12 + 4)
    assert choice.other_bytes == biases and set(choice.bits.values()) == {"float"}
    first = choice.weights[0]
    assert first.bytes == (10 * 24 // 2 + 4 * 24, 10 * 24 + 4 * 24, 4 * 10 * 24)
    least = dataclasses.replace(choice, chosen=(0, 0, 0, 0))
    scales = sum(row.stored[0].scales for row in choice.weights)
    codes = sum(row.bytes[0] for row in choice.weights) - 4 * scales
    # The first two layers have as many zero points.
    assert scales == 24 + 24 + 12 + 4 and least.bytes == biases + codes + 4 * scales + 8 * (24 + 12 + 4)
    assert codes == sum(math.prod(row.shape) for row in choice.weights) // 2


def test_a_budget_below_the_fewest_bits_is_refused_with_the_least():
    model, data = network()
    with pytest.raises(ValueError, match=r"the weights of .* have 1,\d+ bytes, 256 of them biases .*=1000"):
        choose_bits(model, data, budget=1000)


@pytest.mark.parametrize("floor", [-1e-1, -1e-3, -1e-5, 0.0])
def test_a_floor_is_reached_by_the_model_that_is_quantized_with_the_choice(floor):
    model, data = network()
    evaluate, former = closeness(model, data), variables_of(model)
    choice = choose_bits(model, data, evaluate=evaluate, floor=floor, activation_bits="float")
    assert variables_of(model) == former
    if set(choice.bits.values()) != {"float"}:
        found = quantize_model(model, QuantizationOptions(bits=choice.bits, activation_bits="float"), data)
        with found.simulating():
            assert evaluate(model) >= floor
        # Reproducible: the choice was evaluated with the same result.
        reached = [one.metric for one in choice.trials if one.bytes == choice.bytes]
        assert reached and min(reached) >= floor
    else:
        assert floor == 0.0, "only a model in floating point has no error at all"


def test_a_lower_floor_needs_fewer_bytes():
    model, data = network()
    sizes = [
        choose_bits(model, data, evaluate=closeness(model, data), floor=floor, activation_bits="float").bytes
        for floor in (-1e-1, -1e-3, -1e-6)
    ]
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]


@pytest.mark.every_backend(cases=0)
def test_where_only_the_float_model_reaches_the_floor_every_weight_stays_in_floating_point():
    model, data = network()
    former = variables_of(model)
    choice = choose_bits(
        model,
        data,
        evaluate=lambda changed: float(variables_of(changed) == former),
        floor=1.0,
        include=["first", "head"],
    )
    assert choice.bits == {"first/kernel": "float", "head/kernel": "float"}
    found = quantize_model(model, QuantizationOptions(bits=choice.bits, include=["first", "head"]), data)
    assert not found.report.weights and variables_of(model) == former


@pytest.mark.every_backend(cases=0)
def test_a_model_on_8_bits_already_may_need_floating_point_tensors():
    model, data = network()
    quantize_model(model, QuantizationOptions(), data)
    before = outputs_of(model, data)
    # Rounding the weights again changes nothing; the tensors do.
    choice = choose_bits(
        model, data, evaluate=lambda changed: float(np.array_equal(outputs_of(changed, data), before)), floor=1.0
    )
    assert set(choice.bits.values()) == {"float"}


def test_bits_go_to_weights_by_their_exact_names():
    x = keras.Input((6,))
    model = keras.Model(x, L.Dense(3, name="head[0]")(L.Dense(8, name="body")(x)))
    found = selected(model, bits={"head[0]/kernel": 4, "body/kernel": None})
    assert {target.name: found.bits[key] for key, target in found.targets.items()} == {"head[0]/kernel": 4}


def test_outputs_that_are_infinite_by_themselves_have_not_changed():
    x = keras.Input((6,))
    y = L.Dense(4, name="head")(L.Dense(8, name="body")(x))
    model = randomize(keras.Model(x, keras.ops.where(np.array([True, True, True, False]), y, -np.inf)))
    data = np.random.default_rng(0).normal(size=(32, 6)).astype("float32")
    choice = choose_bits(model, data, budget=10**6)
    assert all(0 < row.errors[1] < row.errors[0] < 1 for row in choice.weights)


def test_the_budget_is_checked_before_anything_is_measured():
    model, data = network()
    told = []
    with pytest.raises(ValueError, match="With the fewest bits.* Allow more bytes or shrink the model first.$"):
        choose_bits(model, data, budget=1000, progress=lambda *step: told.append(step))
    with pytest.raises(ValueError, match="Allow more bytes, allow 4 among `bits`, or shrink the model first.$"):
        choose_bits(model, data, budget=1000, bits=(8,), progress=lambda *step: told.append(step))
    assert not told


def test_a_floor_above_the_float_model_is_refused_and_the_model_stays():
    model, data = network()
    former = variables_of(model)
    with pytest.raises(ValueError, match=r"The metric of .* in floating point is 0.5. Received: floor=0.6"):
        choose_bits(model, data, evaluate=lambda _: 0.5, floor=0.6)
    assert variables_of(model) == former


def test_a_floor_that_rounded_activations_alone_miss_is_refused():
    keras.utils.set_random_seed(0)
    given = keras.Input((8,))
    added = L.Add(name="add")([L.Dense(8, name="left")(given), L.Dense(8, name="right")(given)])
    model = keras.Model(given, L.Activation("tanh", name="tanh")(added))
    data = np.random.default_rng(0).normal(size=(64, 8)).astype("float32")
    former, evaluate = variables_of(model), closeness(model, data)
    with pytest.raises(ValueError, match=r"activations of 8 bits the metric .* floor=-1e-06.*=16 or act"):
        choose_bits(model, data, evaluate=evaluate, floor=-1e-6)
    assert variables_of(model) == former
    for activations in (16, "float"):
        choice = choose_bits(model, data, evaluate=evaluate, floor=-1e-6, activation_bits=activations)
        found = quantize_model(model, QuantizationOptions(bits=choice.bits, activation_bits=activations), data)
        with found.simulating():
            assert evaluate(model) >= -1e-6


def test_a_metric_that_falls_from_call_to_call_is_refused_without_advice_on_activations():
    model, data = network()
    metrics = itertools.count(0, -1)
    with pytest.raises(ValueError, match=r"With all weights in floating point the metric .*larger drop\)\.$"):
        choose_bits(model, data, evaluate=lambda _: float(next(metrics)), floor=0, activation_bits="float")


def test_an_error_in_evaluate_leaves_the_model_as_it_was():
    model, data = network()
    former = variables_of(model)

    def evaluate(changed):
        if variables_of(changed) != former:
            raise RuntimeError("no metric")
        return 1.0

    with pytest.raises(RuntimeError, match="no metric"):
        choose_bits(model, data, evaluate=evaluate, floor=0.5)
    assert variables_of(model) == former


@pytest.mark.parametrize(
    "name", ["tied", "transformer_encoder", "mobilenetv2", "bidirectional", "nested", "two_towers"]
)
def test_every_kind_of_model_has_a_table(name):
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    data = inputs_of(model, examples=4)
    former = variables_of(model)
    choice = choose_bits(model, (data, None) if isinstance(data, list | tuple) else data, budget=10**9)
    assert variables_of(model) == former
    assert set(choice.bits.values()) == {8}
    assert all(row.errors[0] >= row.errors[1] >= 0 for row in choice.weights if max(row.errors) > 1e-9)
    assert any(row.errors[0] > 0 for row in choice.weights)


def test_excluded_weights_have_no_bits():
    model, data = network()
    choice = choose_bits(model, data, budget=10**6, exclude="head")
    assert list(choice.bits) == ["first/kernel", "second/kernel", "third/kernel"]


def test_progress_is_told_of_each_weight():
    model, data = network()
    told = []
    choose_bits(model, data, budget=10**6, progress=lambda *step: told.append(step))
    assert told == [(i, 4, f"{name}/kernel") for i, name in enumerate(("first", "second", "third", "head"), 1)]


def test_the_report_is_text_json_and_pictures():
    model, data = network()
    for choice in (
        choose_bits(model, data, budget=2600),
        choose_bits(model, data, evaluate=closeness(model, data), floor=-1e-4),
    ):
        assert "first/kernel: " in str(choice) and choice.verdict() in str(choice)
        assert json.loads(json.dumps(choice.to_dict()))["bits"] == choice.bits
        for picture in choice.sections()[0].pictures:
            for width in (320, 560):
                drawn = to_svg(PLOTS[picture.plot](picture.data, width), picture.label, prefix="p")
                assert "chosen" in drawn or "bits" in drawn


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (dict(), "for a budget of bytes, or for a floor"),
        (dict(budget=10, floor=0.5, evaluate=len), "for a budget of bytes, or for a floor"),
        (dict(floor=0.5), "for a budget of bytes, or for a floor"),
        (dict(evaluate=len), "for a budget of bytes, or for a floor"),
        (dict(budget=5000, bits=()), "`bits` are numbers of bits, 2 to 8, or .float."),
        (dict(budget=5000, bits=(4, 16)), r"`bits` are .* Received: \(4, 16\)"),
        (dict(budget=0), "budget"),
    ],
)
def test_wrong_arguments_are_refused(options, message):
    model, data = network()
    with pytest.raises(ValueError, match=message):
        choose_bits(model, data, **options)


@pytest.mark.parametrize("result", [None, "good", float("nan")])
def test_a_metric_is_a_number(result):
    model, data = network()
    former = variables_of(model)
    with pytest.raises((TypeError, ValueError), match="What `evaluate` returns is a metric, a number such as 0.98"):
        choose_bits(model, data, evaluate=lambda _: result, floor=0.5)
    with pytest.raises((TypeError, ValueError), match="`floor` is a metric, a number such as 0.98"):
        choose_bits(model, data, evaluate=lambda _: 1.0, floor="good" if result is None else result)
    assert variables_of(model) == former


def test_an_unknown_option_is_refused_and_data_are_needed():
    model, data = network()
    with pytest.raises(TypeError, match="Received: 'weights'"):
        choose_bits(model, data, budget=10**6, **{"weights": 4})
    with pytest.raises(ValueError, match="measured on calibration data. Received: data=None"):
        choose_bits(model, None, budget=10**6)
    with pytest.raises(TypeError, match="Did you mean 'activation_bits'"):
        choose_bits(model, data, budget=10**6, activaton_bits=8)
    with pytest.raises(TypeError, match='has "float" among its `bits`'):
        choose_bits(model, data, budget=10**6, bits=(4, None))
    with pytest.raises(TypeError, match="Did you mean 'budget'"):
        choose_bits(model, data, buget=10**6)


# Bits by patterns -----------------------------------------------------------------------------------------------------


def test_patterns_give_weights_their_bits_and_the_others_have_8():
    model, data = network()
    found = quantize_model(model, QuantizationOptions(bits={"first": 4, "re:(second|third)/kernel": 3}), data)
    assert {row.name: row.bits for row in found.report.weights} == {
        "first/kernel": 4,
        "second/kernel": 3,
        "third/kernel": 3,
        "head/kernel": 8,
    }
    assert found.report.method == "gptq" and "grids of 3 and 4 and 8 bits" in found.report.verdict()
    for grid, row in zip(found.weights.values(), found.report.weights, strict=True):
        assert grid.format.bits == row.bits


def test_no_bits_are_floating_point():
    model, data = network()
    former = ops.convert_to_numpy(model.get_layer("first").kernel)
    found = quantize_model(model, QuantizationOptions(bits={"first": "float"}), data)
    np.testing.assert_array_equal(ops.convert_to_numpy(model.get_layer("first").kernel), former)
    assert [one.name for one in found.report.skipped] == ["first"]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ({"first": 4, "first/kernel": 8}, "Each weight takes one value. Received: 4 and 8 for first/kernel"),
        ({"first": 4, "re:(first|head)": "float"}, "Received: 4 and None for first.kernel"),
        ({"first/bias": 4}, "A pattern in `bits` must match a quantized weight. Received: 'first/bias'"),
        ({"frist": 4}, "frist"),
        ({"first": 9}, r"`bits\['first'\]` is the number of bits of a weight, an int from 2 to 8.* Received: 9"),
        ({}, "names layers or weights with their bits"),
        ({1: 4}, "names layers or weights with their bits"),
    ],
)
def test_wrong_patterns_are_refused(weights, message):
    model, data = network()
    with pytest.raises(ValueError, match=message):
        quantize_model(model, QuantizationOptions(bits=weights), data)


def table_of(choice, levels=(4, 8), factor=1.0):
    """Returns a scan with the errors of a choice, in the form of `pk.sensitivity`."""
    rows = [
        {
            **{"target": one.name, "technique": "quantize", "level": "bits", "value": bits, "entries": 1},
            **{"metrics": {}, "output_error": (factor * error) ** 0.5},
        }
        for one in choice.weights
        for bits, error in zip(one.bits, one.errors, strict=True)
        if bits in levels
    ]
    targets = [{"name": one.name, "shape": list(one.shape), "size": int(np.prod(one.shape))} for one in choice.weights]
    return {"sensitivity_version": 1, "complete": True, "targets": targets, "rows": rows, "measures": [], "dense": {}}


def test_errors_of_a_scan_are_used_as_they_are():
    model, data = network()
    measured = choose_bits(model, data, budget=3000)
    scanned = choose_bits(model, data, budget=3000, scan=table_of(measured, factor=4.0))
    assert scanned.bits == measured.bits
    assert scanned.error == pytest.approx(4.0 * measured.error)


@pytest.mark.parametrize(
    ("scan", "options", "message"),
    [
        (lambda choice: table_of(choice, levels=(8,)), {}, "The scan measured 8 bits. Received: `bits` with 4"),
        (
            lambda choice: {**table_of(choice), "targets": table_of(choice)["targets"][1:], "rows": []},
            {},
            "Received: 'first/kernel' with 240 entries, and none of that name in the scan",
        ),
        (lambda choice: {**table_of(choice), "complete": False}, {}, "it is not complete"),
        (lambda choice: "missing.json", {}, "does not exist"),
        (lambda choice: 3, {}, "Expected the file of a scan"),
    ],
)
def test_scans_that_do_not_fit_are_refused(scan, options, message):
    model, data = network()
    choice = choose_bits(model, data, budget=3000)
    with pytest.raises(ValueError, match=message):
        choose_bits(model, data, budget=3000, scan=scan(choice), **options)


def test_one_number_of_bits_needs_no_list():
    model, data = network()
    assert set(choose_bits(model, data, budget=10_000, bits=8).bits.values()) == {8}
    with pytest.raises(TypeError, match="`bits` are numbers of bits, such as"):
        choose_bits(model, data, budget=10_000, bits="48")
