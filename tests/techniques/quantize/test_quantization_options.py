"""Options of quantization after training: defaults, shorthands, and refusals of wrong values."""

from dataclasses import FrozenInstanceError

import numpy as np
import pytest

from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile
from prunekit.techniques.quantize.options import QuantizationOptions, as_range_rule, rule_name

DATA = np.zeros((4, 3), "float32")
REFUSALS = {
    "one bit": (dict(bits=1), "`bits` is the number of bits of a weight, an int from 2 to 8.* Received: 1"),
    "sixteen bits": (
        dict(bits=16),
        "`bits` is the number of bits of a weight, an int from 2 to 8.* Received: 16",
    ),
    "no bits": (dict(bits=0), "`bits` is the number of bits of a weight, an int from 2 to 8.* Received: 0"),
    "negative bits": (
        dict(bits=-4),
        "`bits` is the number of bits of a weight, an int from 2 to 8.* Received: -4",
    ),
    "four bits between layers": (dict(activation_bits=4), "8 or 16, or .float. .* Received: 4"),
    "a truth value between layers": (dict(activation_bits=True), "8 or 16, or .float. .* Received: True"),
    "a text between layers": (dict(activation_bits="8"), "8 or 16, or .float. .* Received: '8'"),
    "unknown method": (dict(method="gptp"), r"`method` is one of auto, nearest, gptq.*'gptp'. Did you mean 'gptq'\?"),
    "no method": (dict(method=None), "`method` is one of auto, nearest, gptq, awq. Received: None"),
    "bias text": (dict(correct_biases="yes"), "`correct_biases` is True, False or None. Received: 'yes'"),
    "equalize text": (dict(equalize="yes"), "`equalize` is True or False. Received: 'yes'"),
    "no equalize": (dict(equalize=None), "`equalize` is True or False. Received: None"),
    "negative damping": (
        dict(damping=-0.1),
        "`damping` is a fraction .*, in \\[0, 100\\). Received: -0.1",
    ),
    "NaN damping": (dict(damping=float("nan")), "`damping` is a fraction .* Received: nan"),
    "infinite damping": (dict(damping=float("inf")), "`damping` is a fraction .* Received: inf"),
    "truth value as damping": (dict(damping=True), "`damping` is a fraction .* Received: True"),
    "text as damping": (dict(damping="0.01"), "`damping` is a fraction .* Received: '0.01'"),
    "unknown rule of weights": (
        dict(weight_ranges="minmx"),
        r"`weight_ranges` is one of minmax, mse, percentile:0.9999. Received: 'minmx'. Did you mean 'minmax'\?",
    ),
    "unknown rule of tensors": (
        dict(activation_ranges="kl"),
        "`activation_ranges` is one of minmax, mse, percentile:0.9999. Received: 'kl'.",
    ),
    "share that is no number": (
        dict(activation_ranges="percentile:most"),
        '`activation_ranges`: write "percentile:0.9999", with the share of values inside. Received: .percentile:most.',
    ),
    "share above one": (dict(weight_ranges="percentile:99.99"), '`weight_ranges`: write "percentile:0.9999"'),
    "share that is NaN": (dict(weight_ranges="percentile:nan"), '`weight_ranges`: write "percentile:0.9999"'),
    "empty rule of tensors": (dict(activation_ranges=""), "`activation_ranges` is one of minmax, mse"),
}
WRONG_TYPES = {
    "bits as a text": (dict(bits="8"), "an int from 2 to 8, or bits by patterns, .* Received: '8'"),
    "bits as a fraction": (dict(bits=4.5), "an int from 2 to 8, or bits by patterns, .* Received: 4.5"),
    "bits as a truth value": (dict(bits=True), "bits"),
    "no bits": (dict(bits=None), "or bits by patterns, {'head': 8, 'block_.': 'float'}. Received: None"),
    "a truth value of a pattern": (dict(bits={"a": True}), r"`bits\['a'\]` is .* to 8, or .float.. Received: True"),
    "a number as a rule": (dict(weight_ranges=0.99), "`weight_ranges` is one of .*, or a RangeRule. Received: 0.99"),
    "a class of rules": (dict(weight_ranges=MinMax), "is a rule, not its class. Received: MinMax. Pass MinMax()"),
    "no rule of tensors": (dict(activation_ranges=None), "`activation_ranges` is one of .*, or a RangeRule. .* None"),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_a_wrong_value_is_refused_with_what_is_expected_and_received(name):
    options, message = REFUSALS[name]
    with pytest.raises(ValueError, match=message):
        QuantizationOptions(**options)


@pytest.mark.parametrize("name", WRONG_TYPES)
def test_a_value_of_another_type_is_refused(name):
    options, message = WRONG_TYPES[name]
    with pytest.raises(TypeError, match=message):
        QuantizationOptions(**options)


def test_numbers_of_bits_may_be_numpys():
    options = QuantizationOptions(bits=np.int64(4), activation_bits=np.int32(16))
    assert options == QuantizationOptions(bits=4, activation_bits=16) and type(options.activation_bits) is int


def test_the_defaults_are_eight_bits_with_the_extremes_of_weights_and_the_best_ranges_of_tensors():
    options = QuantizationOptions()
    assert (options.default_bits, options.activation_format) == (8, IntegerFormat(8, symmetric=False))
    assert (options.weight_rule(8), options.activation_ranges) == (MinMax(), MeanSquaredError())
    assert (options.method, options.correct_biases, options.equalize) == ("auto", None, False)
    assert (options.include, options.exclude) == ((), ())


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_ranges_of_weights_are_the_extremes_for_eight_bits_and_the_best_ones_for_fewer(bits):
    assert QuantizationOptions(bits=bits).weight_rule(bits) == (MinMax() if bits == 8 else MeanSquaredError())
    assert QuantizationOptions(bits=bits, weight_ranges="percentile:0.99").weight_ranges == Percentile(0.99)
    assert QuantizationOptions(bits=bits).default_bits == bits


@pytest.mark.parametrize(
    "given, form",
    [(8, IntegerFormat(8, symmetric=False)), (16, IntegerFormat(16)), ("float", None)],
    ids=["eight", "sixteen", "float"],
)
def test_sixteen_bits_between_layers_are_symmetric_and_eight_have_a_zero_point(given, form):
    assert QuantizationOptions(activation_bits=given).activation_format == form


@pytest.mark.parametrize(
    "text, rule",
    [
        ("minmax", MinMax()),
        ("mse", MeanSquaredError()),
        ("percentile", Percentile()),
        ("percentile:0.99", Percentile(0.99)),
        ("percentile:1", Percentile(1.0)),
    ],
)
def test_a_shorthand_is_a_rule(text, rule):
    options = QuantizationOptions(weight_ranges=text, activation_ranges=text)
    assert (options.weight_ranges, options.activation_ranges) == (rule, rule)
    assert as_range_rule(rule_name(rule), "weight_ranges") == rule


def test_a_rule_of_your_own_stays_as_it_is():
    def own(sample, form):
        return -np.ones(len(sample.values)), np.ones(len(sample.values))

    assert as_range_rule(own, "weight_ranges") is own
    assert QuantizationOptions(activation_ranges=own).activation_ranges is own
    assert rule_name(own) == "function"


@pytest.mark.parametrize(
    "options, data, expected",
    [
        (dict(), DATA, ("nearest", False)),
        (dict(bits=8, activation_bits="float"), None, ("nearest", False)),
        (dict(bits=7), DATA, ("gptq", True)),
        (dict(bits=4), DATA, ("gptq", True)),
        (dict(bits=4, activation_bits="float"), None, ("nearest", False)),
        (dict(bits=4, correct_biases=False), DATA, ("gptq", False)),
        (dict(bits=4, method="nearest"), DATA, ("nearest", False)),
        (dict(correct_biases=True), DATA, ("nearest", True)),
        (dict(method="gptq"), DATA, ("gptq", True)),
    ],
    ids=str,
)
def test_the_method_and_the_correction_follow_from_bits_and_data(options, data, expected):
    assert QuantizationOptions(**options).with_data(data) == expected


@pytest.mark.parametrize(
    "options, needed",
    [
        (dict(), "activation_bits=8 reads"),
        (dict(activation_bits=16), "activation_bits=16 reads"),
        (dict(activation_bits="float", method="gptq"), "method='gptq' and correct_biases=True reads"),
        (dict(activation_bits="float", method="gptq", correct_biases=False), "method='gptq' reads"),
        (dict(activation_bits="float", correct_biases=True), "correct_biases=True reads"),
        (dict(bits=4, correct_biases=True), "activation_bits=8 and correct_biases=True reads"),
    ],
    ids=str,
)
def test_options_that_read_data_are_named_where_there_are_none(options, needed):
    with pytest.raises(ValueError, match=f"Quantization with {needed} calibration data. Received: data=None"):
        QuantizationOptions(**options).with_data(None)


def test_options_cannot_be_changed():
    with pytest.raises(FrozenInstanceError, match="bits"):
        QuantizationOptions().bits = 4
