"""Outputs from cached prefixes are those of the whole model."""

import operator

import keras
import numpy as np
import pytest
from scanned_models import KINDS, sequential

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.outputs import suffix_runs
from prunekit.core.outputs.suffix_runs import SuffixRuns

# Compiled segments may order the sums of a product otherwise than single operations do.
ROUNDING = 1e-6


def batches_of(inputs):
    return [keras.tree.map_structure(operator.itemgetter(part), inputs) for part in (slice(12), slice(12, 20))]


def arrays(outputs):
    return keras.tree.map_structure(keras.ops.convert_to_numpy, outputs)


def check_each_weight(model, inputs, memory):
    batches, targets = batches_of(inputs), find_targets(model)[0]
    runs = SuffixRuns(model, batches, [target.variable for target in targets], memory)
    for target in sorted(targets, key=lambda target: runs.position(target.variable)):
        runs.advance(runs.position(target.variable))
        value = keras.ops.convert_to_numpy(target.variable)
        for share in (0.5, 0.9):
            target.variable.assign(np.where(np.abs(value) > np.quantile(np.abs(value), share), value, 0))
            found = [arrays(outputs) for outputs in runs.outputs()]
            wanted = [arrays(model(batch, training=False)) for batch in batches]
            keras.tree.assert_same_structure(found, wanted)
            for one, other in zip(keras.tree.flatten(found), keras.tree.flatten(wanted), strict=True):
                np.testing.assert_allclose(one, other, rtol=0, atol=ROUNDING)
        target.variable.assign(value)
    return runs


@pytest.mark.every_backend
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_outputs_are_those_of_the_whole_model(kind):
    keras.utils.set_random_seed(0)
    runs = check_each_weight(*kind(), memory=1e9)
    assert runs.whole == (kind.__name__ == "subclassed")
    assert not runs.overflowed


def test_activations_beyond_the_memory_are_computed_again():
    runs = check_each_weight(*sequential(), memory=0)
    assert runs.overflowed and runs.kept_bytes == 0


def test_calls_before_the_weight_run_once_and_each_part_is_traced_once():
    model, inputs = sequential()
    kernel = model.layers[-1].kernel
    runs = SuffixRuns(model, batches_of(inputs), [kernel], 1e9)
    runs.advance(runs.position(kernel))
    first = model.layers[0].kernel
    wanted = [arrays(outputs) for outputs in runs.outputs()]
    # A change before the kept activations has no effect: they are not computed again.
    first.assign(0 * keras.ops.convert_to_numpy(first))
    for found, one in zip(runs.outputs(), wanted, strict=True):
        np.testing.assert_array_equal(arrays(found), one)
    assert [segment._function.traces for segment in runs._segments.values()] == [1, 1]


def test_positions_that_fall_are_refused():
    model, inputs = sequential()
    kernels = [model.layers[0].kernel, model.layers[-1].kernel]
    runs = SuffixRuns(model, batches_of(inputs), kernels, 1e9)
    runs.advance(runs.position(kernels[1]))
    with pytest.raises(ValueError, match="measured in graph order. Received: position 0 after 4"):
        runs.advance(runs.position(kernels[0]))


def test_a_model_of_many_layers_is_compiled_in_few_segments(monkeypatch):
    monkeypatch.setattr(suffix_runs, "_SEGMENTS", 3)
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), *(keras.layers.Dense(4, activation="tanh") for _ in range(9))])
    inputs = np.random.default_rng(0).normal(size=(20, 4)).astype("float32")
    runs = check_each_weight(model, inputs, memory=1e9)
    kernels = [layer.kernel for layer in model.layers]
    assert [runs.position(kernel) for kernel in kernels] == [0, 0, 0, 3, 3, 3, 6, 6, 6]
