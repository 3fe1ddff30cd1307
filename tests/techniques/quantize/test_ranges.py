"""Rules for ranges against brute force: every percentile, and the best of a thousand clipped ranges."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from hypothesis.extra import numpy as arrays
from plain_quantization import plain_error, plain_parts, plain_percentile

from prunekit.techniques.quantize.grids.grids import Granularity, IntegerFormat
from prunekit.techniques.quantize.grids.ranges import (
    MeanSquaredError,
    MinMax,
    Percentile,
    Sample,
    grid_holding,
    grid_of,
    sample_of,
)

RULES = [MinMax(), Percentile(0.99), Percentile(1.0), MeanSquaredError()]
SYMMETRIC, ASYMMETRIC = IntegerFormat(4), IntegerFormat(4, symmetric=False)
FORMATS = {"symmetric": SYMMETRIC, "asymmetric": ASYMMETRIC}
VALUES = {
    "normal": np.random.default_rng(0).normal(size=400),
    "heavy tails": np.random.default_rng(1).standard_t(2, size=400),
    "one outlier": np.append(np.random.default_rng(2).normal(size=399), 40.0),
    "positive": np.abs(np.random.default_rng(3).normal(size=400)),
    "away from zero": np.random.default_rng(4).uniform(0.5, 1.0, 400),
    "negative": -np.random.default_rng(5).exponential(size=400),
    "mostly zero": np.random.default_rng(6).normal(size=400) * (np.random.default_rng(7).random(400) < 0.1),
    "two values": np.tile([-0.3, 0.8], 200),
    "all equal": np.full(400, 0.25),
    "all zero": np.zeros(400),
    "tiny": np.random.default_rng(8).normal(size=400) * 1e-30,
    "single": np.array([0.7]),
}
VALUES = {name: values.astype("float32") for name, values in VALUES.items()}


def range_of(rule, values, form, counts=None) -> tuple[float, float]:
    """Returns the range of one row of values."""
    counts = None if counts is None else np.asarray(counts)[None]
    (low,), (high,) = rule(Sample(np.asarray(values, "float32")[None], counts), form)
    return float(low), float(high)


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("rule", RULES, ids=repr)
class TestEveryRule:
    """What holds for each rule, format and kind of values."""

    def test_the_range_contains_zero_and_ends_at_most_at_the_extremes(self, rule, name, form):
        low, high = range_of(rule, VALUES[name], form)
        bound = float(np.abs(VALUES[name]).max())
        lowest, highest = (
            (-bound, bound) if form.symmetric else (min(VALUES[name].min(), 0), max(VALUES[name].max(), 0))
        )
        assert lowest <= low <= 0.0 <= high <= highest

    def test_rows_are_independent(self, rule, name, form):
        rows = np.stack([VALUES[name], 3.0 * VALUES[name][::-1], np.zeros_like(VALUES[name])])
        low, high = rule(Sample(rows), form)
        assert [*zip(low, high, strict=True)] == [range_of(rule, row, form) for row in rows]

    def test_counts_stand_for_repeated_values(self, rule, name, form):
        values, counts = np.unique(VALUES[name], return_counts=True)
        assert np.allclose(range_of(rule, values, form, counts), range_of(rule, VALUES[name], form), rtol=0.03)

    def test_the_grid_of_a_matrix_has_the_ranges_of_its_parts(self, rule, name, form):
        matrix = np.resize(VALUES[name], (9, 4))
        granularity = Granularity((1,), 4)
        grid = grid_of(matrix, form, granularity, rule)
        for index, entries in plain_parts(matrix.shape, (1,), 4):
            alone = grid_of(matrix[entries], form, rule=rule)
            assert (grid.scale[index], grid.zero_point[index]) == (alone.scale, alone.zero_point)


@pytest.mark.parametrize("name", VALUES)
@pytest.mark.parametrize("share", [0.51, 0.75, 0.9, 0.99, 0.9975, 0.9999, 1.0])
def test_percentiles_are_those_of_the_sorted_values(name, share):
    values = VALUES[name]
    bound = plain_percentile(np.abs(values), share)
    assert range_of(Percentile(share), values, SYMMETRIC) == (-bound, bound)
    expected = (-max(plain_percentile(-values, share), 0.0), max(plain_percentile(values, share), 0.0))
    assert range_of(Percentile(share), values, ASYMMETRIC) == expected


def test_a_percentile_holds_its_share_and_not_one_value_more():
    values = np.arange(1, 101, dtype="float32")
    assert range_of(Percentile(0.99), values, ASYMMETRIC) == (0.0, 99.0)
    assert range_of(Percentile(0.991), values, ASYMMETRIC) == (0.0, 100.0)


@pytest.mark.parametrize("share", [0.5, 0.0, 1.01, -1, float("nan"), "0.9", True, None])
def test_other_shares_are_refused(share):
    with pytest.raises(ValueError, match="share must be the share of values inside the range"):
        Percentile(share)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("name", VALUES)
def test_no_symmetric_range_has_a_much_smaller_error_than_the_one_found(name, bits):
    values = VALUES[name]
    high = max(map(abs, range_of(MeanSquaredError(), values, IntegerFormat(bits))))
    bound = float(np.abs(values).max())
    found = plain_error(values, -high, high, bits, True)
    extremes = plain_error(values, -bound, bound, bits, True)
    candidates = [
        plain_error(values, -bound * factor, bound * factor, bits, True) for factor in np.linspace(0.04, 1, 97)
    ]
    assert found <= extremes
    # The error of few values jumps with the range, so a search in steps of a thirty-second of an octave comes near.
    assert found <= 1.1 * min(candidates) + 1e-12 * float(np.square(values, dtype="float64").sum())


@pytest.mark.parametrize("name", VALUES)
def test_asymmetric_ranges_have_smaller_errors_than_extremes_and_than_ends_moved_alike(name):
    values = VALUES[name]
    low, high = range_of(MinMax(), values, ASYMMETRIC)
    found = plain_error(values, *range_of(MeanSquaredError(), values, ASYMMETRIC), 4, False)
    assert found <= plain_error(values, low, high, 4, False)
    alike = [plain_error(values, low * f, high * f, 4, False) for f in np.linspace(0.05, 1.0, 60)]
    assert found <= 1.1 * min(alike) + 1e-12 * float(np.square(values, dtype="float64").sum())


def test_an_outlier_is_clipped_for_the_smallest_error_but_not_without_being_asked():
    values = np.append(VALUES["normal"], np.float32(8.0))
    assert range_of(MinMax(), values, ASYMMETRIC)[1] == 8.0
    assert range_of(MeanSquaredError(), values, SYMMETRIC)[1] < 5.0


@settings(deadline=None, max_examples=100)
@given(values=arrays.arrays("float32", st.integers(1, 30), elements=st.floats(-1e6, 1e6, width=32)))
def test_errors_of_any_values_do_not_grow(values):
    for form in FORMATS.values():
        low, high = range_of(MinMax(), values, form)
        found = range_of(MeanSquaredError(), values, form)
        tolerance = 1e-6 * float(np.square(values, dtype="float64").sum()) * form.symmetric
        assert (
            plain_error(values, *found, 4, form.symmetric)
            <= plain_error(values, low, high, 4, form.symmetric) + tolerance
        )


@pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
def test_large_arrays_are_taken_in_parts_with_the_same_result(form, monkeypatch):
    values = np.random.default_rng(0).normal(size=(3, 1000)).astype("float32")
    whole = MeanSquaredError()(Sample(values), form)
    monkeypatch.setattr("prunekit.techniques.quantize.grids.ranges._PART", 7)
    assert np.allclose(MeanSquaredError()(Sample(values), form), whole, rtol=1e-12)


def test_entries_that_complete_a_short_group_do_not_count():
    values = np.array([[1.0], [2.0], [3.0], [4.0], [5.0]], "float32")
    sample = sample_of(values, Granularity((1,), 3))
    assert sample.values.tolist() == [[1.0, 2.0, 3.0], [4.0, 5.0, 0.0]]
    assert sample.counts.tolist() == [[1, 1, 1], [1, 1, 0]]


@pytest.mark.parametrize("dtype", ["float16", "float64", "bfloat16"])
def test_weights_of_other_dtypes_have_grids(dtype):
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([[0.5, -1.0], [0.25, 0.0]]).astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    grid = grid_of(values, IntegerFormat(8), Granularity((1,)))
    assert grid.scale.tolist() == [[np.float32(0.5 / 127), np.float32(1.0 / 127)]]


def on_a_grid(shape, axes, bits, seed, largest=None, sparse=0.0):
    """Returns (codes, values): random codes, and their products with a random scale for each index of the axes.

    Args:
        shape: Shape of the codes.
        axes: Axes whose indices have scales of their own.
        bits: Bits of a code.
        seed: Seed.
        largest: Largest code that occurs; None = the largest of the format.
        sparse: Share of the codes that are zero.
    """
    rng = np.random.default_rng(seed)
    largest = IntegerFormat(bits).highest if largest is None else largest
    codes = rng.integers(-largest, largest + 1, shape) * (rng.random(shape) >= sparse)
    scale = np.exp(rng.normal(scale=3.0, size=Granularity(axes).parameter_shape(shape))).astype("float32")
    return codes, (codes.astype("float32") * scale).astype("float32")


def assert_held(values, bits, axes):
    """Asserts that the grid found holds all values: codes within the format reproduce them."""
    form = IntegerFormat(bits)
    grid = grid_holding(values, form, Granularity(axes))
    codes = grid.codes(values)
    assert np.abs(codes).max(initial=0) <= form.highest and (grid.zero_point == 0).all()
    # In single precision, and relative to each value: zeros are exact.
    assert np.allclose(grid.values(codes), values, rtol=1e-6, atol=0.0)
    return grid, codes


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("axes", [(), (0,), (1,), (3,), (2, 3)], ids=str)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_a_grid_is_found_on_which_products_of_codes_and_scales_lie(bits, axes, seed):
    rng = np.random.default_rng(seed + 100)
    _, values = on_a_grid((3, 4, 5, 6), axes, bits, seed)
    assert_held(values, bits, axes)
    # As by a batch normalization that is folded.
    factor = rng.uniform(0.01, 30.0, Granularity(axes).parameter_shape(values.shape)).astype("float32")
    assert_held(values * factor * rng.choice([-1.0, 1.0], factor.shape).astype("float32"), bits, axes)


@pytest.mark.parametrize("bits, largest", [(3, 2), (4, 5), (8, 126), (8, 90), (8, 64), (8, 3)])
def test_codes_that_do_not_use_the_largest_one_have_a_grid(bits, largest):
    codes, values = on_a_grid((9, 40), (0,), bits, 0, largest)
    extremes = grid_of(values, IntegerFormat(bits), Granularity((0,)))
    assert not np.allclose(extremes.nearest(values), values, rtol=1e-6, atol=0.0)
    grid, found = assert_held(values, bits, (0,))
    assert ((found == 0) == (codes == 0)).all()


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_rows_of_zeros_and_rows_of_one_value_have_a_grid(bits):
    codes, values = on_a_grid((6, 30), (0,), bits, 1, sparse=0.8)
    codes[2], values[2] = 0, 0.0
    values[4], values[5] = 0.3, 0.0
    values[5, 7] = -1e-20
    grid, found = assert_held(values, bits, (0,))
    assert grid.scale[2, 0] == 1.0 and not found[2].any()
    assert len(set(found[4])) == 1 and np.isfinite(grid.scale).all() and (grid.scale > 0.0).all()


def test_a_row_on_no_grid_has_the_grid_of_its_extremes_and_the_others_theirs():
    form, granularity = IntegerFormat(4), Granularity((0,))
    codes, values = on_a_grid((5, 60), (0,), 4, 2, largest=5)
    values[3] = np.random.default_rng(0).normal(size=60)
    grid = grid_holding(values, form, granularity)
    assert grid.scale[3] == grid_of(values, form, granularity).scale[3]
    held = [0, 1, 2, 4]
    assert np.allclose(grid.nearest(values)[held], values[held], rtol=1e-6, atol=0.0)
    assert not np.allclose(grid.nearest(values)[3], values[3], rtol=1e-3)


@pytest.mark.parametrize("bits", [2, 3, 4])
def test_values_of_more_bits_lie_on_no_grid_of_fewer(bits):
    form = IntegerFormat(bits)
    _, values = on_a_grid((4, 400), (0,), 8, 3)
    found, expected = (grid(values, form, Granularity((0,))) for grid in (grid_holding, grid_of))
    assert np.array_equal(found.scale, expected.scale)


@pytest.mark.parametrize("shape", [(0, 4), (4, 0), ()], ids=str)
def test_arrays_without_values_and_single_values_have_a_grid(shape):
    values = np.full(shape, 0.7, "float32")
    assert np.allclose(grid_holding(values, IntegerFormat(4)).nearest(values), values)


def test_values_that_are_not_finite_have_no_grid():
    with pytest.raises(ValueError, match="Quantization needs finite values. Received: 1 of 4 values"):
        grid_holding(np.array([1.0, np.nan, 2.0, 0.0]), IntegerFormat(8))


@settings(deadline=None, max_examples=60)
@given(
    codes=arrays.arrays("int32", (3, 12), elements=st.integers(-7, 7)),
    scale=st.floats(2.0**-20, 2.0**20, width=32),
    factor=st.floats(2.0**-10, 2.0**10, width=32),
)
def test_any_codes_are_reproduced_also_after_a_factor(codes, scale, factor):
    values = codes.astype("float32") * np.float32(scale)
    assert_held(values, 4, (0,))
    assert_held(values * np.float32(factor), 4, (0,))


def test_one_value_that_is_no_multiple_is_seen_behind_many_that_are():
    values = np.ones((1, 1000), "float32")
    values[0, -1] = 0.3337
    assert grid_holding(values, IntegerFormat(4)).scale == grid_of(values, IntegerFormat(4)).scale
