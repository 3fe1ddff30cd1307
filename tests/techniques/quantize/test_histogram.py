"""A histogram that was filled in batches against the values themselves."""

import numpy as np
import pytest

from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.grids.histogram import BINS, Histogram, extract_of
from prunekit.techniques.quantize.grids.ranges import MeanSquaredError, MinMax, Percentile, Sample

RNG = np.random.default_rng(0)
BATCHES = {
    "alike": [RNG.normal(size=(8, 50)) for _ in range(6)],
    "growing": [RNG.normal(size=(8, 50)) * 3.0**step for step in range(6)],
    "shrinking": [RNG.normal(size=(8, 50)) * 3.0**-step for step in range(6)],
    "activations": [np.maximum(RNG.normal(size=(8, 50)), 0.0) for _ in range(6)],
    "away from zero": [RNG.uniform(5.0, 6.0, (8, 50)) for _ in range(3)],
    "negative": [-RNG.exponential(size=(8, 50)) for _ in range(3)],
    "zeros first": [np.zeros((8, 50)), RNG.normal(size=(8, 50))],
    "huge after tiny": [RNG.normal(size=(8, 50)) * 1e-30, RNG.normal(size=(8, 50)) * 1e30],
    "the end of the bins in a later batch": [np.full((8, 50), 0.9), np.full((8, 50), 1.0), np.full((8, 50), -1.0)],
    "powers of two": [2.0 ** RNG.integers(-5, 5, (8, 50)) for _ in range(3)],
    "largest": [np.array([np.finfo("float32").max, np.finfo("float32").min])],
}
BATCHES = {name: [batch.astype("float32") for batch in batches] for name, batches in BATCHES.items()}


def observe(histogram, values) -> None:
    """Counts what is read of an array."""
    histogram.observe(*extract_of(np.asarray(values, "float32")))


def filled(batches) -> Histogram:
    """Returns a histogram of batches."""
    histogram = Histogram()
    for batch in batches:
        observe(histogram, batch)
    return histogram


@pytest.mark.parametrize("name", BATCHES)
def test_extremes_and_counts_are_exact(name):
    values = np.concatenate([batch.ravel() for batch in BATCHES[name]])
    histogram = filled(BATCHES[name])
    assert (histogram.low, histogram.high) == (min(values.min(), 0.0), max(values.max(), 0.0))
    assert histogram.count == histogram.sample().counts.sum() == values.size
    assert histogram.sample().values.shape == histogram.sample().counts.shape


@pytest.mark.parametrize("name", BATCHES)
def test_counts_lie_where_the_values_are(name):
    values = np.sort(np.concatenate([batch.ravel() for batch in BATCHES[name]]))
    sample = filled(BATCHES[name]).sample()
    stored = np.sort(np.repeat(sample.values[0], sample.counts[0]))
    width = 4.0 * float(np.abs(values).max()) / BINS
    assert np.abs(stored - values).max() <= width
    assert np.count_nonzero(stored == 0.0) >= np.count_nonzero(values == 0.0)


@pytest.mark.parametrize("name", BATCHES)
def test_the_order_of_batches_does_not_matter(name):
    forward, backward = filled(BATCHES[name]).sample(), filled(BATCHES[name][::-1]).sample()
    assert np.array_equal(forward.values, backward.values) and np.array_equal(forward.counts, backward.counts)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("name", [name for name in BATCHES if name != "largest"])
@pytest.mark.parametrize("rule", [MinMax(), Percentile(0.99), MeanSquaredError()], ids=repr)
def test_ranges_are_those_of_the_values_but_for_the_width_of_a_bin(rule, name, symmetric):
    values = np.concatenate([batch.ravel() for batch in BATCHES[name]])
    form = IntegerFormat(8, symmetric)
    histogram = np.ravel(rule(filled(BATCHES[name]).sample(), form))
    direct = np.ravel(rule(Sample(values[None]), form))
    if isinstance(rule, MinMax):
        assert histogram.tolist() == direct.tolist()
    # The error is flat around its smallest value: ranges may differ more than bins there.
    width = 4.0 / BINS if isinstance(rule, Percentile) else 0.1
    assert np.abs(histogram - direct).max() <= width * np.abs(values).max()


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_refused_and_leave_no_trace(wrong):
    histogram = filled(BATCHES["alike"])
    before = histogram.sample()
    with pytest.raises(ValueError, match="A range needs finite values. Received: NaN or infinity"):
        observe(histogram, [0.5, wrong, 1e9])
    after = histogram.sample()
    assert np.array_equal(before.values, after.values) and np.array_equal(before.counts, after.counts)


def test_subnormal_numbers_count_as_themselves_or_as_zeros():
    # Backends differ: some take them for zeros.
    values = np.array([[1e-42, -1e-44, 0.0]], "float32")
    histogram = filled([values])
    assert histogram.count == histogram.sample().counts.sum() == 3
    assert (histogram.low, histogram.high) in ((0.0, 0.0), (values.min(), values.max()))
    observe(histogram, [[1.0, -1.0, 1e-42]])
    assert (histogram.low, histogram.high, histogram.sample().counts.sum()) == (-1.0, 1.0, 6)


def test_an_empty_histogram_has_the_range_of_zero():
    histogram = Histogram()
    assert histogram.count == 0
    for rule in (MinMax(), Percentile(0.9), MeanSquaredError()):
        low, high = rule(histogram.sample(), IntegerFormat(8, False))
        assert (low.tolist(), high.tolist()) == ([0.0], [0.0])


def test_of_a_large_array_a_sample_is_counted_with_exact_extremes():
    rng = np.random.default_rng(0)
    # One channel in 64 is ten times as large: a sample that leaves channels out would miss it.
    values = (rng.normal(size=(40, 1000, 64)) * np.where(np.arange(64) == 63, 10.0, 1.0)).astype("float32")
    values[12, 345, 7] = 99.0
    histogram = Histogram()
    observe(histogram, values)
    sample = histogram.sample()
    assert (histogram.low, histogram.high) == (values.min(), 99.0)
    assert abs(sample.counts.sum() / values.size - 1) < 1e-3
    large = np.abs(values) > 5.0
    found = sample.counts[0][np.abs(sample.values[0]) > 5.0].sum()
    assert abs(found / large.sum() - 1) < 0.02
