"""pk.shrink without data: the kept weights are fitted to what the layers compute on synthetic inputs."""

import numpy as np
import pytest
from unseen_inputs import perceptron, unseen_error

import prunekit as pk
from prunekit.sparsity.array_ops import array_of

pytestmark = pytest.mark.every_backend


def test_it_loses_less_than_without_repair_on_other_inputs():
    repaired, report = pk.shrink(perceptron(), channels=0.6)
    plain, _ = pk.shrink(perceptron(), channels=0.6, repair="none")
    assert unseen_error(repaired) < 0.7 * unseen_error(plain)
    assert report.notes[0].startswith("No data were given: the weights were fitted on 1,024 synthetic inputs.")
    assert {row.weight for row in report.errors} >= {"hidden_1/kernel", "head/kernel"}


@pytest.mark.parametrize("options", [{"repair": "none"}, {"criterion": "l2"}], ids=str)
def test_a_named_criterion_removes_and_changes_nothing_else(options):
    smaller, report = pk.shrink(perceptron(), channels=0.6, **options)
    assert report.errors == () and not any("synthetic" in note for note in report.notes)
    head, kept = array_of(perceptron().get_layer("head").kernel), report.kept["head/kernel"][0]
    np.testing.assert_array_equal(array_of(smaller.get_layer("head").kernel), head[kept])


def test_channels_of_zeros_are_removed_exactly():
    model = perceptron()
    for name, place in (("hidden_0", (slice(None), slice(16))), ("hidden_1", (slice(None), slice(16)))):
        kernel = np.array(array_of(model.get_layer(name).kernel))
        # What reads zeros hardly counts, so that no other channel has less importance.
        kernel[:16] *= 0.01 if name == "hidden_1" else 1.0
        kernel[place] = 0
        model.get_layer(name).kernel.assign(kernel)
        model.get_layer(name).bias.assign(np.linspace(-1, 1, 32))
    head = np.array(array_of(model.get_layer("head").kernel))
    head[:16] *= 0.01
    model.get_layer("head").kernel.assign(head)
    smaller, report = pk.shrink(model, channels=0.5, reduction="max", allocation="global", normalize=False)
    inputs = np.random.default_rng(1).normal(size=(50, 16)).astype("float32")
    found, wanted = (array_of(one(inputs, training=False)) for one in (smaller, model))
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert report.errors == () and not any("synthetic" in note for note in report.notes)
