"""pk.quantize of weights alone, without data: they are rounded on synthetic inputs."""

import numpy as np
import pytest
from unseen_inputs import perceptron, unseen_error

import prunekit as pk
from prunekit.core.data import synthetic_inputs


@pytest.mark.parametrize("bits", [4, 3, 2])
def test_few_bits_lose_less_than_the_nearest_values(bits):
    found, nearest = perceptron(), perceptron()
    done = pk.quantize(found, bits=bits, activation_bits="float")
    pk.quantize(nearest, bits=bits, activation_bits="float", method="nearest")
    assert unseen_error(found) < 0.7 * unseen_error(nearest)
    assert done.method == "gptq"
    assert any(note.startswith("No data were given: the weights were fitted on 1,024") for note in done.notes)
    assert done.damage is None


@pytest.mark.parametrize("options", [{"bits": 8}, {"bits": 4, "method": "nearest"}], ids=str)
def test_nearest_values_need_no_inputs(options):
    report = pk.quantize(perceptron(), activation_bits="float", **options)
    assert report.method == "nearest" and not any("synthetic" in note for note in report.notes)


def test_where_no_inputs_can_be_made_the_nearest_values_are_taken(monkeypatch):
    monkeypatch.setattr(synthetic_inputs, "LARGEST", 100)
    found, nearest = perceptron(), perceptron()
    report = pk.quantize(found, bits=4, activation_bits="float")
    pk.quantize(nearest, bits=4, activation_bits="float", method="nearest")
    for one, other in zip(found.get_weights(), nearest.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)
    assert report.method == "nearest"
    assert any(note.startswith("No data were given, and nothing stands in for them") for note in report.notes)


def test_tensors_between_layers_need_data():
    with pytest.raises(ValueError, match="reads calibration data"):
        pk.quantize(perceptron(), bits=4)
