"""Parts of batches: bounded by the largest output of a call, or by the outputs of all calls together."""

import keras
import numpy as np

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.data.batch_parts import examples_at_once, in_parts
from prunekit.core.outputs import baseline
from prunekit.core.outputs.baseline import Baseline
from prunekit.core.statistics import input_statistics
from prunekit.core.statistics.input_statistics import Hessians

INPUTS = np.random.default_rng(0).normal(size=(7, 4, 4, 3)).astype("float32")
# Bytes of the outputs of an example: 48 of the input, 128 of the convolution and of its activation, 10 of the head.
BYTES = 4 * (48 + 128 + 128 + 128 + 10)


def network(batch=None):
    keras.utils.set_random_seed(0)
    inner = keras.Sequential([keras.Input((4, 4, 8)), keras.layers.Flatten(), keras.layers.Dense(10)])
    inputs = keras.Input((4, 4, 3), batch_size=batch)
    x = keras.layers.ReLU()(keras.layers.Conv2D(8, 1)(inputs))
    return keras.Model(inputs, inner(x))


def lengths(most, counted="largest", model=None):
    return [len(one) for one in in_parts(model or network(), [INPUTS], most, counted)]


def test_parts_have_as_many_examples_as_the_bytes_allow():
    assert lengths(4 * 128 * 3) == [3, 3, 1]
    assert lengths(4 * 128 * 7) == [7]
    assert sum(lengths(2 * BYTES, "all")) == 7 and max(lengths(2 * BYTES, "all")) < 3


def test_of_outputs_that_are_freed_once_nothing_reads_them_only_the_others_count():
    layers = [keras.layers.Conv2D(8, 1), keras.layers.ReLU(), keras.layers.Flatten(), keras.layers.Dense(10)]
    chain = keras.Sequential([keras.Input((4, 4, 3)), *layers])
    # Two of 128 entries, that which a layer reads and that which it computes.
    assert lengths(4 * 256 * 3, "live", chain) == [3, 3, 1] and lengths(4 * 256 * 3 - 1, "live", chain) == [2, 2, 2, 1]
    x = keras.Input((4, 4, 3))
    y = keras.layers.Conv2D(8, 1)(x)
    z = keras.layers.ReLU()(keras.layers.ReLU()(y))
    # The first of them is read again behind the others.
    skip = keras.Model(x, keras.layers.Add()([y, z]))
    assert lengths(4 * 384 * 3, "live", skip) == [3, 3, 1] and lengths(4 * 384 * 3 - 1, "live", skip) == [2, 2, 2, 1]
    # Inside a nested model, what it reads is counted twice.
    assert lengths(4 * (128 + 10 + 256) * 3, "live") == [3, 3, 1]


def test_a_part_has_at_least_one_example():
    assert lengths(1.0) == [1] * 7


def test_batches_of_a_fixed_size_and_models_without_a_graph_stay_whole():
    class Own(keras.Model):
        def call(self, x):
            return x

    for model in (network(batch=7), Own()):
        assert lengths(1.0, model=model) == [7]
        assert examples_at_once(model, 1.0) > 1e9


def test_absent_inputs_stay_absent():
    (first, *_) = in_parts(network(), [[INPUTS, None]], 1.0)
    assert len(first[0]) == 1 and first[1] is None


def test_the_outputs_of_a_baseline_do_not_depend_on_the_parts(monkeypatch):
    whole = np.concatenate(Baseline(network(), INPUTS).outputs)
    monkeypatch.setattr(baseline, "_AT_ONCE", 1)
    np.testing.assert_allclose(np.concatenate(Baseline(network(), INPUTS).outputs), whole, rtol=1e-5, atol=1e-6)


def test_hessians_do_not_depend_on_the_parts_in_which_the_model_runs(monkeypatch):
    def observed():
        model, calls = network(), []
        plain = input_statistics.run_released
        monkeypatch.setattr(
            input_statistics, "run_released", lambda model, part: calls.append(len(part)) or plain(model, part)
        )
        hessians = Hessians(model, find_targets(model)[0])
        hessians.reset()
        hessians.observe(INPUTS, None)
        monkeypatch.setattr(input_statistics, "run_released", plain)
        assert hessians.examples == 7
        return max(calls), hessians.values()[0]["hessian"]

    longest, whole = observed()
    assert longest == 7
    monkeypatch.setattr(input_statistics, "_AT_ONCE", 1)
    longest, found = observed()
    assert longest == 1
    np.testing.assert_allclose(found, whole, rtol=1e-5, atol=1e-6)
