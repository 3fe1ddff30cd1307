"""GPTQ against optimal brain quantization in plain loops, nearest values and Keras's GPTQ."""

import keras
import numpy as np
import pytest
from keras.src.quantizers.gptq import GPTQ
from plain_quantization import plain_brain_quantization, plain_limits

import prunekit as pk
from prunekit.sparsity.reconstruction import DAMPING, damped_hessian, inverse_factor, output_error, reconstruct
from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, grid_of
from prunekit.techniques.quantize.rounding.gptq import gptq, ordered_factor, rounded_matrix

BY_OUTPUT = Granularity((1,))
# Ragged: the last group of 24 or 150 inputs is shorter.
GROUPED = Granularity((1,), 16)
RULES = pytest.mark.parametrize("rule", [MinMax(), MeanSquaredError()], ids=["extremes", "squared error"])


def mixed(rng, rows, inputs):
    """Rows of strongly correlated inputs: sums of independent ones."""
    return rng.normal(size=(rows, inputs)) @ rng.normal(size=(inputs, inputs)) / np.sqrt(inputs)


def rectified(rng, rows, inputs):
    """Rows as after a ReLU, most of whose variance has few dimensions."""
    return np.maximum(rng.normal(size=(rows, 12)) @ rng.normal(size=(12, inputs)) + rng.normal(size=(rows, inputs)), 0)


def neighbouring(rng, rows, inputs):
    """Rows in which each input is like the one before it."""
    return np.cumsum(rng.normal(size=(rows, inputs)), axis=1) / np.sqrt(inputs)


INPUTS = pytest.mark.parametrize("draw", [mixed, rectified, neighbouring])


def layer(inputs=24, outputs=7, *, rows=400, seed=0, draw=mixed):
    """Returns a matrix W and the Hessian X^T X."""
    rng = np.random.default_rng(seed)
    x = draw(rng, rows, inputs)
    return rng.normal(size=(inputs, outputs)) / np.sqrt(inputs), x.T @ x


def spread(grid, matrix):
    return np.broadcast_to(grid.granularity.spread(grid.scale, matrix.shape), matrix.shape)


def error(found, matrix, hessian):
    """Returns the squared error of the outputs relative to the squared outputs."""
    return output_error(found - matrix, hessian) / output_error(matrix, hessian)


# Against the formula -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(24, 7), (150, 4), (1, 3), (3, 1)], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("descending", [True, False], ids=["descending", "rows"])
@pytest.mark.parametrize("granularity", [BY_OUTPUT, GROUPED], ids=["outputs", "groups"])
def test_values_are_those_of_optimal_brain_quantization_in_loops(shape, bits, descending, granularity):
    matrix, hessian = layer(*shape)
    grid = grid_of(matrix, IntegerFormat(bits), granularity, MeanSquaredError())
    scale = granularity.spread(grid.scale, shape)
    order = np.argsort(-hessian.diagonal()) if descending else range(len(matrix))
    mask = np.random.default_rng(1).random(shape) < 0.6
    for kept in (None, mask):
        found = gptq(matrix, hessian, scale, grid.format, mask=kept, descending=descending)
        expected = plain_brain_quantization(matrix, hessian, spread(grid, matrix), bits, order=order, mask=kept)
        np.testing.assert_array_equal(found, expected)


@INPUTS
@RULES
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("granularity", [BY_OUTPUT, GROUPED], ids=["outputs", "groups"])
def test_the_error_is_below_that_of_nearest_values(draw, rule, bits, granularity):
    for seed in range(5):
        matrix, hessian = layer(64, 32, seed=seed, draw=draw)
        grid = grid_of(matrix, IntegerFormat(bits), granularity, rule)
        found = gptq(matrix, hessian, granularity.spread(grid.scale, matrix.shape), grid.format)
        assert error(found, matrix, hessian) < 0.75 * error(grid.nearest(matrix), matrix, hessian)


def test_a_run_changes_the_rows_after_it():
    # 300 rows are three runs.
    matrix, hessian = layer(300, 20, rows=900)
    grid = grid_of(matrix, IntegerFormat(4), BY_OUTPUT)
    found = gptq(matrix, hessian, grid.scale, grid.format)
    assert error(found, matrix, hessian) < 0.5 * error(grid.nearest(matrix), matrix, hessian)


# Values, zeros and order ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("granularity", [BY_OUTPUT, GROUPED], ids=["outputs", "groups"])
@RULES
def test_values_are_those_of_codes_inside_the_format(bits, granularity, rule):
    matrix, hessian = layer(40, 9, draw=neighbouring)
    grid = grid_of(matrix, IntegerFormat(bits), granularity, rule)
    scale = granularity.spread(grid.scale, matrix.shape)
    found = gptq(matrix, hessian, scale, grid.format)
    codes = np.round(found / scale)
    lowest, highest = plain_limits(bits, True)
    assert found.dtype == "float32" and codes.min() >= lowest and codes.max() <= highest
    np.testing.assert_array_equal(found, grid.values(codes))
    np.testing.assert_array_equal(found, grid.nearest(found))


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "rows"])
def test_masked_weights_are_zero_and_the_others_compensate(descending):
    matrix, hessian = layer(64, 32)
    mask = np.random.default_rng(1).random(matrix.shape) < 0.5
    matrix[~mask] = 0
    grid = grid_of(matrix, IntegerFormat(4), BY_OUTPUT)
    found = gptq(matrix, hessian, grid.scale, grid.format, mask=mask, descending=descending)
    assert not found[~mask].any() and found[mask].any()
    assert error(found, matrix, hessian) < error(grid.nearest(matrix), matrix, hessian)
    dense = gptq(matrix, hessian, grid.scale, grid.format, descending=descending)
    assert dense[~mask].any(), "without a mask, weights that are zero compensate too"


def test_the_arguments_are_left_as_they_were():
    matrix, hessian = layer()
    mask, scale = matrix > 0, np.full((1, 7), 0.1, "float32")
    arguments = matrix, hessian, scale, mask
    before = [argument.copy() for argument in arguments]
    gptq(matrix, hessian, scale, IntegerFormat(4), mask=mask)
    for argument, was in zip(arguments, before, strict=True):
        np.testing.assert_array_equal(argument, was)


def test_the_largest_inputs_are_rounded_first():
    matrix, hessian = layer(30, 5)
    sizes = np.random.default_rng(2).permutation(30) + 1.0
    hessian = hessian * sizes[:, None] * sizes
    order = np.argsort(-hessian.diagonal())
    scale, form = np.full((1, 5), 0.05, "float32"), IntegerFormat(4)
    found = gptq(matrix, hessian, scale, form)
    sorted_before = gptq(matrix[order], hessian[np.ix_(order, order)], scale, form, descending=False)
    np.testing.assert_array_equal(found[order], sorted_before)
    assert (found != gptq(matrix, hessian, scale, form, descending=False)).any()


def test_groups_are_those_of_the_rows_in_any_order():
    matrix, hessian = layer(40, 3)
    # Powers of 3: no value of one group's grid is a value of another's.
    scale = np.repeat(3.0 ** -np.arange(2, 7), 8)[:, None].astype("float32") * np.ones((1, 3), "float32")
    found = gptq(matrix, hessian, scale, IntegerFormat(2))
    np.testing.assert_array_equal(np.abs(found)[found != 0], scale[found != 0])


# Edges ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("diagonal", [np.ones(150), np.arange(1.0, 151.0), np.zeros(150)], ids=["1", "rising", "0"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("granularity", [BY_OUTPUT, GROUPED], ids=["outputs", "groups"])
def test_uncorrelated_inputs_are_rounded_to_nearest(diagonal, bits, granularity):
    matrix, _ = layer(150, 6)
    grid = grid_of(matrix, IntegerFormat(bits), granularity, MeanSquaredError())
    found = gptq(matrix, np.diag(diagonal), granularity.spread(grid.scale, matrix.shape), grid.format)
    np.testing.assert_array_equal(found, grid.nearest(matrix))


@pytest.mark.parametrize("descending", [True, False], ids=["descending", "rows"])
def test_unused_inputs_are_rounded_to_nearest_and_change_no_others(descending):
    matrix, hessian = layer(24, 7)
    unused = np.isin(np.arange(24), [0, 11, 12])
    hessian[unused], hessian[:, unused] = 0, 0
    grid = grid_of(matrix, IntegerFormat(3), BY_OUTPUT)
    mask = np.random.default_rng(1).random(matrix.shape) < 0.7
    found = gptq(matrix, hessian, grid.scale, grid.format, mask=mask, descending=descending)
    np.testing.assert_array_equal(found[unused], np.where(mask, grid.nearest(matrix), 0)[unused])
    used = hessian[np.ix_(~unused, ~unused)]
    rest = gptq(matrix[~unused], used, grid.scale, grid.format, mask=mask[~unused], descending=descending)
    np.testing.assert_array_equal(found[~unused], rest)


def test_a_matrix_of_zeros_stays_zero():
    _, hessian = layer()
    assert not gptq(np.zeros((24, 3)), hessian, np.ones((1, 3), "float32"), IntegerFormat(4)).any()


def test_an_output_of_zeros_stays_zero_beside_others():
    matrix, hessian = layer()
    matrix[:, 2] = 0
    grid = grid_of(matrix, IntegerFormat(4), BY_OUTPUT)
    found = gptq(matrix, hessian, grid.scale, grid.format)
    assert not found[:, 2].any() and found.any(axis=0).sum() == 6


def test_dependent_inputs_are_damped():
    matrix, hessian = layer(24, 7, rows=3)
    grid = grid_of(matrix, IntegerFormat(4), BY_OUTPUT)
    for damping in (0.0, 0.01):
        found = gptq(matrix, hessian, grid.scale, grid.format, damping=damping)
        assert error(found, matrix, hessian) < error(grid.nearest(matrix), matrix, hessian)


def test_codes_with_a_zero_point_are_refused():
    with pytest.raises(ValueError, match="symmetric codes. Received: IntegerFormat.bits=4, symmetric=False"):
        gptq(*layer(), np.ones((1, 7)), IntegerFormat(4, symmetric=False))


def test_a_hessian_that_is_not_finite_is_refused():
    matrix, hessian = layer()
    hessian[3, 3] = np.nan
    with pytest.raises(ValueError, match="NaN or infinite on the calibration data"):
        gptq(matrix, hessian, np.ones((1, 7), "float32"), IntegerFormat(4))


@pytest.mark.parametrize("damping", [0.01, 0.0], ids=["damped", "singular"])
@pytest.mark.parametrize("inputs", [9, 150])
def test_groups_are_rounded_together_as_each_alone(inputs, damping):
    rng = np.random.default_rng(0)
    matrices, hessians = map(np.stack, zip(*(layer(inputs, 2, seed=seed) for seed in range(12)), strict=True))
    # Groups with unused inputs, and one whose Hessian has no Cholesky factor without damping.
    hessians[:3, 4], hessians[:3, :, 4] = 0.0, 0.0
    hessians[5] = np.ones((inputs, inputs))
    scales = np.abs(matrices).max(axis=1, keepdims=True).astype("float32") / 7
    masks = rng.random(matrices.shape) < 0.8
    for mask in (None, masks):
        found = gptq(matrices, hessians, scales, IntegerFormat(4), mask=mask, damping=damping)
        given = [None] * 12 if mask is None else mask
        rows = zip(matrices, hessians, scales, given, strict=True)
        expected = [gptq(*row, IntegerFormat(4), mask=kept, damping=damping) for *row, kept in rows]
        np.testing.assert_array_equal(found, np.stack(expected))


# Keras ---------------------------------------------------------------------------------------------------------------


def keras_values(given, x, bits, *, symmetric, ordered):
    """Returns the kernel that Keras's GPTQ makes of a layer, as a matrix, and its scales and zero points by output."""
    config = keras.quantizers.GPTQConfig(
        None, None, weight_bits=bits, group_size=-1, symmetric=symmetric, activation_order=ordered, hessian_damping=0.01
    )
    given.quantize("gptq", config=config)
    quantizer = GPTQ(given, config)
    quantizer.update_hessian_with_batch(x)
    quantizer.quantize_and_correct_layer()
    matrix = keras.ops.convert_to_numpy(given(np.eye(x.shape[1], dtype="float32"))).reshape(x.shape[1], -1)
    scale, zero = (
        keras.ops.convert_to_numpy(parameter).astype("float64").reshape(1, -1)
        for parameter in (given.kernel_scale, given.kernel_zero)
    )
    return matrix.astype("float64"), scale, zero


LAYERS = {
    "Dense": lambda: keras.layers.Dense(48, use_bias=False),
    "EinsumDense": lambda: keras.layers.EinsumDense("ab,bcd->acd", (6, 8)),
}


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("make", LAYERS.values(), ids=LAYERS)
@pytest.mark.parametrize("bits", [3, 4])
@pytest.mark.parametrize("ordered", [False, True], ids=["rows", "descending"])
@pytest.mark.parametrize("symmetric", [True, False], ids=["symmetric", "asymmetric"])
def test_the_squared_error_is_a_fraction_of_that_of_keras(make, bits, ordered, symmetric):
    """Keras 3.15 compensates with rows of the inverse Hessian instead of those of its factor."""
    ratios = []
    for seed in range(3):
        rng = np.random.default_rng(seed)
        x = mixed(rng, 512, 64).astype("float32")
        hessian = x.T.astype("float64") @ x
        given = make()
        given.build((None, 64))
        given.kernel.assign(rng.normal(size=given.kernel.shape) / 8)
        matrix = keras.ops.convert_to_numpy(given.kernel).reshape(64, 48).astype("float64")
        theirs, scale, zero = keras_values(given, x, bits, symmetric=symmetric, ordered=ordered)

        # On Keras's own grid, whose codes are 0 to 2 ** bits - 1, the arithmetic alone differs.
        def nearest(row, values, scale=scale[0], zero=zero[0]):
            return (np.clip(np.round(values / scale) + zero, 0, 2**bits - 1) - zero) * scale

        order = np.argsort(-hessian.diagonal()) if ordered else np.arange(64)
        same_grid = np.empty_like(matrix)
        factor = inverse_factor(hessian[np.ix_(order, order)])
        same_grid[order], _ = reconstruct(matrix[order], factor, [slice(0, 64)], None, nearest)
        grid = grid_of(matrix, IntegerFormat(bits), BY_OUTPUT, MeanSquaredError())
        own_grid = gptq(matrix, hessian, grid.scale, grid.format, descending=ordered)
        keras_error = error(theirs, matrix, hessian)
        ratios.append([keras_error / error(found, matrix, hessian) for found in (same_grid, own_grid)])
    same_grid, own_grid = np.mean(ratios, axis=0)
    # Norms of the error differ by the square root: 1.4. The means over the seeds are at least 1.98.
    assert same_grid > 1.9
    # Keras's symmetric grids have one code more than ours; its asymmetric ones, the default, also reach from the lowest
    # to the highest weight, so that steps are finer. The means are at least 2.06, 1.69 and 1.55.
    assert own_grid > (2.0 if symmetric else 1.6 if ordered else 1.5)


def test_one_factorization_gives_the_best_weights_and_their_rounding():
    rng = np.random.default_rng(0)
    matrix, right = rng.normal(size=(2, 24, 7)), rng.normal(size=(2, 24, 7))
    hessian = np.stack([x.T @ x for x in (mixed(rng, 200, 24), rectified(rng, 200, 24))])
    factor = ordered_factor(hessian)
    damped = damped_hessian(hessian, DAMPING)[0]
    np.testing.assert_allclose(factor.solve(right), np.linalg.solve(damped, right), rtol=1e-6, atol=1e-9)
    np.testing.assert_array_equal(factor.restored(factor.ordered(matrix)), matrix)
    scale = np.full((2, 1, 7), 0.2, "float32")
    found = rounded_matrix(matrix, factor, scale, IntegerFormat(4))
    np.testing.assert_array_equal(found, gptq(matrix, hessian, scale, IntegerFormat(4)))


def test_a_layer_is_factorized_once(monkeypatch):
    rng = np.random.default_rng(0)
    model = keras.Sequential([keras.Input((8,)), *(keras.layers.Dense(8, activation="relu") for _ in range(3))])
    calls, cholesky = [], np.linalg.cholesky
    monkeypatch.setattr(np.linalg, "cholesky", lambda matrix: calls.append(1) or cholesky(matrix))
    pk.quantize(model, rng.normal(size=(200, 8)).astype("float32"), bits=4, method="gptq")
    assert len(calls) == 3
