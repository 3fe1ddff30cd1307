"""Rounding with a price for bits: against plain loops, and what it saves."""

import keras
import numpy as np
import pytest

import prunekit as pk
from prunekit.sparsity.reconstruction import output_error
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, grid_of
from prunekit.techniques.quantize.rounding.gptq import ordered_factor, rounded_matrix
from prunekit.techniques.quantize.rounding.rate import code_lengths, rated_matrix, stretch


def layer(inputs=40, outputs=9, bits=3, seed=0):
    """Returns (W, X^T X, scales of all entries, codes)."""
    rng = np.random.default_rng(seed)
    x = np.maximum(rng.normal(size=(300, 8)) @ rng.normal(size=(8, inputs)) + rng.normal(size=(300, inputs)), 0)
    x[:, 3] = 0
    matrix = rng.laplace(size=(inputs, outputs))
    grid = grid_of(matrix.astype("float32"), IntegerFormat(bits, symmetric=True), Granularity((1,)), MeanSquaredError())
    return matrix, x.T @ x, np.broadcast_to(grid.spread(matrix)[0], matrix.shape), grid.format


def entropy(codes):
    shares = np.unique(codes, return_counts=True)[1] / codes.size
    return float(-(shares * np.log2(shares)).sum())


def plain_round(matrix, hessian, scale, highest, mask, rate, counts):
    """One pass over the inputs, in loops; `counts` are those of the codes before, from -highest on."""
    used = np.diag(hessian) > 0
    damped = hessian + np.diag(np.where(used, 0.01 * np.diag(hessian)[used].mean(), 1.0))
    order = sorted(range(len(matrix)), key=lambda i: -hessian[i, i])
    left, weights, costs = list(order), np.where(used[:, None], matrix, 0.0), {}
    for i in order:
        costs[i] = 1 / np.linalg.inv(damped[np.ix_(left, left)])[0, 0]
        left.remove(i)
    price = rate * np.mean([costs[i] * used[i] * scale[i] ** 2 for i in order])
    bits = [-np.log2((one + 0.5) / sum(count + 0.5 for count in counts)) for one in counts]
    codes, left = np.zeros(matrix.shape, int), list(order)
    for i in order:
        inverse = np.linalg.inv(damped[np.ix_(left, left)])[0]
        left.remove(i)
        for o in range(matrix.shape[1]):
            value, step = weights[i, o], scale[i, o]
            nearest = int(np.rint(np.clip(value / step, -highest, highest)))
            tried = [nearest, max(nearest - 1, -highest), min(nearest + 1, highest), 0]
            total = [costs[i] * used[i] * (value - code * step) ** 2 + price * bits[code + highest] for code in tried]
            codes[i, o] = tried[int(np.argmin(total))] if mask[i, o] else 0
            error = (value - codes[i, o] * step) / inverse[0]
            for place, j in enumerate(left, 1):
                weights[j, o] -= error * inverse[place] * used[j]
    return codes


@pytest.mark.parametrize("offset", [0.0, 1.5], ids=["around zero", "most are not zero"])
def test_the_codes_are_those_of_plain_loops(offset):
    matrix, hessian, scale, form = layer()
    # A small Hessian: an input that is always zero has a cost of 1 if it is not left out.
    matrix, hessian = matrix + offset, hessian * 1e-6
    mask = np.random.default_rng(1).random(matrix.shape) > 0.3
    factor = ordered_factor(hessian)
    found = rounded_matrix(matrix, factor, scale, form, mask)
    codes = np.rint(found / scale).astype(int)
    for _ in range(2):
        counts = [int((codes == code).sum()) for code in range(-form.highest, form.highest + 1)]
        codes = plain_round(matrix, hessian, scale, form.highest, mask, 0.2, counts)
    rated = rated_matrix(matrix, factor, scale, form, mask, 0.2)
    np.testing.assert_array_equal(np.rint(rated / scale), codes)
    assert not codes[~mask].any()
    if not offset:
        assert (codes == 0).sum() > (found == 0).sum()
        assert not codes[3].any()  # An input that is always zero costs no bits.


def test_without_a_price_the_codes_are_the_nearest():
    matrix, hessian, scale, form = layer()
    factor = ordered_factor(hessian)
    np.testing.assert_array_equal(
        rated_matrix(matrix, factor, scale, form, None, 0.0), rounded_matrix(matrix, factor, scale, form)
    )


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_a_higher_price_gives_less_entropy_and_more_error(bits):
    matrix, hessian, scale, form = layer(120, 40, bits)
    factor = ordered_factor(hessian)
    found = [rated_matrix(matrix, factor, scale, form, None, rate) for rate in (0, 0.1, 0.2, 0.4, 0.8)]
    entropies = [entropy(np.rint(one / scale)) for one in found]
    errors = [output_error(one - matrix, hessian) for one in found]
    assert entropies == sorted(entropies, reverse=True) and errors[-1] > errors[0]


@pytest.mark.parametrize(("rate", "share"), [(0.2, 0.95), (0.6, 0.8), (2.0, 0.65)])
def test_a_bit_saved_by_the_price_costs_less_error_than_one_saved_by_a_coarser_grid(rate, share):
    matrix, hessian, scale, form = layer(160, 60, 4)
    energies = np.exp(np.random.default_rng(2).normal(size=160))
    hessian = hessian * energies[:, None] * energies
    factor = ordered_factor(hessian)

    def measured(scale, rate=0.0):
        found = rated_matrix(matrix, factor, scale, form, None, rate)
        return entropy(np.rint(found / scale)), output_error(found - matrix, hessian)

    bits, error = measured(scale * np.float32(stretch(rate)), rate / stretch(rate) ** 2)
    coarser = [measured(scale * np.float32(factor)) for factor in np.geomspace(1, 30, 91)]
    assert error < share * min(error for entropy, error in coarser if entropy <= bits)


@pytest.mark.parametrize("rate", [0.6, 2.0])
def test_longer_steps_cost_less_error_than_a_higher_price_on_short_ones(rate):
    matrix, hessian, scale, form = layer(120, 40, 4)
    factor = ordered_factor(hessian)

    def measured(scale, rate):
        found = rated_matrix(matrix, factor, scale, form, None, rate)
        return entropy(np.rint(found / scale)), output_error(found - matrix, hessian)

    bits, error = measured(scale * np.float32(stretch(rate)), rate / stretch(rate) ** 2)
    short = [measured(scale, one) for one in np.geomspace(0.1, 30, 40)]
    assert error < 0.8 * min(error for entropy, error in short if entropy <= bits)


def test_lengths_are_those_of_the_counts():
    form = IntegerFormat(2, symmetric=True)
    lengths = code_lengths(np.array([[0, 0, 1], [0, 0, 0]]), form)
    np.testing.assert_allclose(lengths, -np.log2(np.array([0.5, 5.5, 1.5]) / 7.5))


def network():
    keras.utils.set_random_seed(2)
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            keras.layers.Conv2D(6, 3, activation="relu", name="conv"),
            keras.layers.Flatten(),
            keras.layers.Dense(12, name="dense"),
        ]
    )


@pytest.mark.every_backend
def test_quantize_with_a_rate_keeps_zeros_and_makes_more():
    x = np.random.default_rng(0).random((64, 8, 8, 1), dtype="float32")
    counts = []
    for rate in (0.0, 0.3):
        model = network()
        pk.prune(model, 0.5)
        before = np.array(model.get_layer("dense").kernel) == 0
        report = pk.quantize(model, x, bits=4, activation_bits="float", rate=rate)
        after = np.array(model.get_layer("dense").kernel) == 0
        assert after[before].all()
        counts.append(after.sum())
        assert report.state.report is not None
    assert counts[1] > counts[0]


def test_a_rate_of_8_bits_is_rounded_by_gptq_and_asks_for_data():
    x = np.random.default_rng(0).random((32, 8, 8, 1), dtype="float32")
    assert pk.QuantizationOptions(rate=0.1).with_data(x)[0] == "gptq"
    with pytest.raises(ValueError, match=r"with activation_bits=8 and rate=0\.1 reads calibration data"):
        pk.quantize(network(), rate=0.1)
    assert pk.QuantizationOptions(rate=0.1, activation_bits="float").may_stand_in


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rate": -1}, r"`rate` is the price of a bit, such as 0\.1, in \[0, 100\)"),
        ({"rate": True}, "`rate` is the price of a bit"),
        ({"rate": 0.1, "method": "nearest"}, "rate=0.1 and method='nearest'"),
    ],
)
def test_a_wrong_rate_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        pk.QuantizationOptions(**options)
