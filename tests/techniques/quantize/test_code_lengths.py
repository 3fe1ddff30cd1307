"""The bits of weights as a loss: against NumPy, its slopes, and what it does in a training."""

import keras
import numpy as np
import pytest
from keras import ops
from quantized_training import data, network

import prunekit as pk
from prunekit.sparsity.array_ops import array_of
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.training.code_lengths import BitPrice, mean_bits

pytestmark = pytest.mark.every_backend
FORM = IntegerFormat(3, symmetric=True)
WIDE = IntegerFormat(6, symmetric=True)


def entropy(codes):
    shares = np.unique(codes, return_counts=True)[1] / np.size(codes)
    return float(-(shares * np.log2(shares)).sum())


def bits(steps, form=FORM):
    return float(array_of(mean_bits(ops.convert_to_tensor(np.asarray(steps, "float32")), form)))


@pytest.mark.parametrize(
    "codes",
    [np.random.default_rng(0).integers(-3, 4, (9, 7)), np.zeros((4, 2)), np.array([[-3.0, 3.0]]), np.array([3.0])],
    ids=["random", "zeros", "ends", "one"],
)
@pytest.mark.parametrize("form", [FORM, WIDE], ids=["few codes", "many codes"])
def test_on_the_grid_the_bits_are_the_entropy_of_the_codes(codes, form):
    assert bits(codes, form) == pytest.approx(entropy(codes), abs=1e-6)


def test_weights_beyond_the_last_codes_count_to_these():
    assert bits([-9.0, 3.5, 0.0, 0.0]) == pytest.approx(1.5)


@pytest.mark.parametrize("form", [FORM, WIDE], ids=["few codes", "many codes"])
def test_between_two_codes_the_slope_is_the_difference_of_their_lengths(form):
    steps = np.array([0, 0, 0, 0, 0, 1, 1, -1, 2.4], "float32")
    lengths = -np.log2(np.array([5, 2, 1, 0.6, 0.4]) / 9)  # Codes 0, 1, -1, 2, 3.
    # A regularizer's slope is what a training sees: one step of plain descent, on every backend.
    layer = keras.layers.Dense(1, use_bias=False, kernel_initializer=keras.initializers.Zeros())
    layer.kernel_regularizer = lambda value: mean_bits(value, form)
    model = keras.Sequential([keras.Input((9,)), layer])
    layer.kernel.assign(steps[:, None])
    model.compile(keras.optimizers.SGD(1.0), "mse")
    model.train_on_batch(np.zeros((1, 9), "float32"), np.zeros((1, 1), "float32"))
    slopes = (steps - array_of(layer.kernel)[:, 0]) * 9
    assert slopes[-1] == pytest.approx(lengths[4] - lengths[3], rel=1e-4)
    assert slopes[5] == pytest.approx(lengths[3] - lengths[1], rel=1e-4)
    step = 1e-2
    up, down = steps.copy(), steps.copy()
    up[-1] += step
    down[-1] -= step
    assert (bits(up, form) - bits(down, form)) / (2 * step) == pytest.approx(slopes[-1] / 9, rel=1e-2)


def test_the_price_is_added_to_what_the_weight_s_own_regularizer_costs():
    codes = np.random.default_rng(1).integers(-3, 4, 50).astype("float32")
    found = BitPrice(0.5, lambda value: value / 2.0, FORM, keras.regularizers.L2(0.1))(codes * 2)
    assert float(array_of(found)) == pytest.approx(0.5 * entropy(codes) + 0.1 * np.square(codes * 2).sum(), rel=1e-5)


def trained(rate):
    model = network()
    x, y = data()
    callback = pk.QuantizationCallback(x[:64], bits=4, rate=rate)
    history = model.fit(x, y, batch_size=32, epochs=6, shuffle=False, verbose=0, callbacks=[callback])
    state = callback.report.state
    codes = [np.ravel(state.weights[id(w.variable)].codes(array_of(w.variable))) for w in state.placement.weights()]
    return model, float(np.mean([entropy(one) for one in codes])), history.history["loss"]


def test_a_price_lowers_the_entropy_of_the_codes_and_is_part_of_the_loss():
    plain_model, plain, plain_loss = trained(0.0)
    model, priced, loss = trained(2.0)
    assert priced < 0.9 * plain
    assert loss[0] > plain_loss[0] + 2.0
    assert [one.regularizer for one in model.trainable_variables] == [
        one.regularizer for one in plain_model.trainable_variables
    ]


def test_a_wrong_price_is_refused():
    with pytest.raises(ValueError, match=r"`rate` is the price of a bit, such as 0\.1, in \[0, 100\)"):
        pk.QuantizationCallback(activation_bits="float", rate=-0.1)
