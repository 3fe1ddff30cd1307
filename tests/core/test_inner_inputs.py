import keras
import numpy as np
import pytest
from keras import ops

from prunekit.core.layerwise.calibration_walk import Pair, WalkedCall
from prunekit.core.layerwise.inner_inputs import InnerInputs


class Block(keras.layers.Layer):
    """Two dense layers, the first of which is called twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = keras.layers.Dense(4), keras.layers.Dense(2)
        self.passes = 0

    def call(self, inputs):
        self.passes += 1
        return self.second(self.first(self.first(inputs)))


@pytest.mark.every_backend
@pytest.mark.parametrize(("memory", "passes"), [(1e9, 3), (0, 1 + 2 * 3)])
def test_inputs_before_a_change_are_observed_in_one_pass_if_they_fit(memory, passes):
    block, data = Block(), ops.convert_to_tensor(np.random.default_rng(0).normal(size=(3, 5, 4)).astype("float32"))
    block(data[0])
    block.passes = 0
    arguments = [Pair(given, given) for given in (((one,), {}) for one in data)]
    inputs = InnerInputs(WalkedCall(block, arguments), [block.second, block.first], memory)
    assert inputs.order == [(block.first, 2), (block.second, 1)]
    for batch, one in enumerate(data):
        first, again = inputs.of(block.first, batch, ())
        (second,) = inputs.of(block.second, batch, ())
        assert first.same and again.same and second.same
        np.testing.assert_array_equal(*map(ops.convert_to_numpy, (first.before[0], one)))
        hidden = block.first(one)
        np.testing.assert_allclose(*map(ops.convert_to_numpy, (again.before[0], hidden)), rtol=1e-6)
        np.testing.assert_allclose(*map(ops.convert_to_numpy, (second.before[0], block.first(hidden))), rtol=1e-6)
    assert block.passes == passes


@pytest.mark.every_backend
def test_a_layer_that_reads_the_arguments_of_the_call_needs_no_pass_after_a_change():
    rng = np.random.default_rng(0)
    before, other, after = (ops.convert_to_tensor(rng.normal(size=(2, 5, 4)).astype("float32")) for _ in range(3))
    attention = keras.layers.MultiHeadAttention(2, 3)
    attention(before, other)
    layers = [attention.query_dense, attention.key_dense, attention.output_dense]
    # The first argument changed, the second, which is given by name, did not.
    given = Pair(((before,), {"value": other}), ((after,), {"value": other}))
    inputs, passes = InnerInputs(WalkedCall(attention, [given]), layers, 1e9), []
    own = attention.call
    attention.call = lambda *args, **kwargs: passes.append(1) or own(*args, **kwargs)
    (query,), (key,) = (inputs.of(layer, 0, ()) for layer in layers[:2])
    assert not passes
    assert query.before[0] is before and query.after[0] is after
    assert key.before[0] is other and key.after[0] is other
    (output,) = inputs.of(layers[2], 0, ())
    assert passes == [1]
    results = [ops.convert_to_numpy(attention.output_dense(one)) for one in (output.before[0], output.after[0])]
    expected = [ops.convert_to_numpy(own(one, other)) for one in (before, after)]
    np.testing.assert_allclose(results, expected, rtol=1e-5, atol=1e-6)
