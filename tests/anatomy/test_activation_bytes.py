"""Bytes of activations: those of a real pass and of the gradients that a real tape takes."""

from collections import Counter

import keras
import numpy as np
import pytest
from cost_models import convolutional, operations, recurrent, sequential, shared, with_attention
from keras import layers as L

from prunekit.anatomy.cost.cost import cost


def outputs_in(run, *known):
    """(layer, tensor) of everything that layers put out while `run` runs, each tensor once."""
    seen, ids, original = [], set(map(id, known)), L.Layer.__call__

    def noting(layer, *args, **kwargs):
        outputs = original(layer, *args, **kwargs)
        for tensor in keras.tree.flatten(outputs):
            if id(tensor) not in ids:
                ids.add(id(tensor))
                seen.append((layer, tensor))
        return outputs

    L.Layer.__call__ = noting
    try:
        return run(), seen
    finally:
        L.Layer.__call__ = original


def bytes_by_name(model, tensors):
    """Sizes per layer name; a cell's count for its RNN layer."""
    cells = {id(layer.cell): layer.name for layer in model._flatten_layers() if isinstance(layer, L.RNN)}
    total = Counter()
    for layer, tensor in tensors:
        total[cells.get(id(layer), layer.name)] += tensor.numpy().nbytes if tensor is not None else 0
    return {name: size for name, size in total.items() if size}


def measured_bytes(model, data):
    """What layers put out in a real pass, and the gradients of it that a real tape takes."""
    tf = pytest.importorskip("tensorflow")
    arrays = [keras.ops.convert_to_tensor(array) for array in (data if isinstance(data, list) else [data])]
    inputs = arrays if isinstance(data, list) else arrays[0]
    _, forward = outputs_in(lambda: model(inputs, training=False), *arrays)
    # Frozen variables are variables that a tape follows too, unless told not to.
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch([variable.value for variable in model.trainable_variables])
        outputs, seen = outputs_in(lambda: model(inputs, training=True), *arrays)
        loss = sum(tf.reduce_sum(tf.square(tf.cast(each, "float64"))) for each in keras.tree.flatten(outputs))
    layers, tensors = zip(*seen, strict=True)
    gradients = tape.gradient(loss, list(tensors))
    return bytes_by_name(model, forward), bytes_by_name(model, zip(layers, gradients, strict=True))


def counted_bytes(model, batch_size):
    counted = cost(model, batch_size)
    assert counted.unknown == ()
    names = [row.layer.rpartition("/")[2] for row in counted.layers]
    assert len(set(names)) == len(names)
    forward = {name: row.activation_bytes for name, row in zip(names, counted.layers, strict=True)}
    backward = {name: row.backward_activation_bytes for name, row in zip(names, counted.layers, strict=True)}
    assert (counted.activation_bytes, counted.backward_activation_bytes) == (
        sum(forward.values()),
        sum(backward.values()),
    )
    return tuple({name: size for name, size in each.items() if size} for each in (forward, backward))


@pytest.mark.parametrize("build", [convolutional, with_attention, recurrent, shared, operations])
def test_bytes_of_activations_are_those_of_a_real_pass_and_its_gradients(build, precision):
    model = build()
    shapes = [tensor.shape[1:] for tensor in getattr(model, "inputs", None) or [keras.Input((4,))]]
    data = [np.ones((3, *shape), precision) for shape in shapes]
    forward, backward = measured_bytes(model, data if len(data) > 1 else data[0])
    assert counted_bytes(model, batch_size=3) == (forward, backward)
    assert forward and backward


def test_a_layer_whose_result_no_output_needs_costs_nothing_backward():
    rows = {row.layer: row for row in cost(operations()).layers}
    assert (rows["unused"].macs, rows["unused"].backward_macs) == (15, 0)
    # Behind `stop_gradient`, "right" is trained in name alone.
    assert (rows["right"].macs, rows["right"].backward_macs, rows["right"].backward_activation_bytes) == (12, 0, 0)
    assert (rows["left"].backward_macs, rows["block/inner"].backward_macs) == (12, 18)


def test_mixed_precision_halves_the_bytes_and_changes_no_multiplication():
    layers = [L.Conv2D(4, 3, name="c"), L.LSTM(3, name="lstm"), L.Dense(2, dtype="float32", name="d")]
    half = sequential(
        L.Conv2D(4, 3, dtype="mixed_float16", name="c"),
        L.Reshape((9, 4), dtype="mixed_float16", name="r"),
        L.LSTM(3, dtype="mixed_float16", name="lstm"),
        L.Dense(2, dtype="float32", name="d"),
        shape=(5, 5, 2),
    )
    layers.insert(1, L.Reshape((9, 4), name="r"))
    whole = sequential(*layers, shape=(5, 5, 2))
    for small, large in zip(cost(half, 2).layers, cost(whole, 2).layers, strict=True):
        assert (small.macs, small.backward_macs) == (large.macs, large.backward_macs)
        divisor = 1 if small.layer == "d" else 2
        assert small.activation_bytes * divisor == large.activation_bytes
        assert small.backward_activation_bytes * divisor == large.backward_activation_bytes


def test_the_steps_of_a_recurrent_layer_count_one_by_one():
    # Two examples, five steps of three numbers: output and cell state at each, and the layer's own output.
    steps = 2 * 5 * (3 + 3) * 4
    assert cost(sequential(L.LSTM(3), shape=(5, 4)), 2).activation_bytes == steps + 2 * 3 * 4
    assert cost(sequential(L.LSTM(3, return_sequences=True), shape=(5, 4)), 2).activation_bytes == steps + 2 * 5 * 3 * 4
    within = cost(sequential(L.TimeDistributed(L.Dense(7, name="inner"), name="all"), shape=(5, 4)), 2)
    assert {row.layer: row.activation_bytes for row in within.layers} == {"all": 280, "all/inner": 280}
    assert within.backward_activation_bytes == 560


def test_outputs_of_no_known_size_are_listed_and_left_out():
    tf = pytest.importorskip("tensorflow")

    class Sparse(L.Layer):
        def call(self, inputs):
            return tf.sparse.from_dense(inputs)

    model = sequential(Sparse(name="sparse"), L.Dense(2, name="d"), shape=(4,))
    counted = cost(model)
    assert {row.layer: row.activation_bytes for row in counted.layers} == {"sparse": None, "d": 8}
    assert (counted.activation_bytes, counted.macs) == (8, 8)
    assert [(item.name, item.reason) for item in counted.unknown] == [
        ("sparse", "the size of its outputs is not known before the model runs")
    ]


def test_integers_have_bytes_but_no_gradient():
    model = keras.Sequential([keras.Input((5,), dtype="int64"), L.Reshape((5, 1), dtype="int64", name="r")])
    assert (cost(model).activation_bytes, cost(model).backward_activation_bytes) == (40, 0)
