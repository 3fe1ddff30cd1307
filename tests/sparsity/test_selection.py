"""Exact selection against a stable NumPy sort."""

import keras
import numpy as np
import pytest
from backends import BACKEND, PRECISIONS
from keras import ops

from prunekit.core.runtime import compilation
from prunekit.sparsity.selection import count_true, keep_largest, pruned_count, reading_plan

pytestmark = pytest.mark.every_backend

AWKWARD = {
    "distinct": np.linspace(-1, 1, 41),
    "all equal": np.ones((8, 5)),
    "all zero": np.zeros(40),
    "two-entry codebook": np.tile([0.1, 0.2], 20),
    "single": np.ones(1),
    "signed zeros": np.array([0.0, -0.0, 1.0, -0.0, 0.0]),
    "infinite": np.array([np.inf, -np.inf, 0.0, np.inf, -np.inf, 3.0]),
    "neighbours": np.nextafter(1.0, np.arange(2, 34, dtype="float32"), dtype="float32"),
    "subnormal": np.array([1e-45, 3e-45, 0.0, 1e-45, 2e-45]),
    "negative": -np.arange(1.0, 30.0),
    "pruned before": np.where(np.arange(60) % 3, -np.inf, np.arange(60.0)),
    "pruned before and negative": np.where(np.arange(60) % 3, -np.inf, -np.arange(60.0)),
    "next to infinity": np.array([-np.inf, -3.4028234e38, -1e38, -np.inf, -3.4028234e38, 3.4028234e38, np.inf] * 3),
    "rank four": np.random.default_rng(0).normal(size=(3, 3, 5, 7)).round(1),
}


def largest_by_sorting(importance, kept):
    order = np.argsort(-importance.astype("float64").ravel(), kind="stable")
    mask = np.zeros(importance.size, bool)
    mask[order[:kept]] = True
    mask &= importance.ravel() > -np.inf
    return mask.reshape(importance.shape)


# Compiled: JAX would compile the loops of an eager call again each time.
compiled = compilation.compiled(keep_largest)


def largest(importance, kept):
    return compiled(importance, ops.convert_to_tensor(kept, "int32"))


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", *PRECISIONS])
@pytest.mark.parametrize("name", AWKWARD)
def test_mask_keeps_exactly_the_largest_and_breaks_ties_by_position(name, dtype):
    importance = ops.cast(ops.convert_to_tensor(AWKWARD[name], PRECISIONS[-1]), dtype)
    exact = ops.convert_to_numpy(ops.cast(importance, PRECISIONS[-1]))
    for kept in {0, 1, exact.size // 3, exact.size // 2, exact.size - 1, exact.size}:
        mask = ops.convert_to_numpy(largest(importance, kept))
        assert mask.dtype == bool
        np.testing.assert_array_equal(mask, largest_by_sorting(exact, kept))


@pytest.mark.skipif(BACKEND == "jax", reason="takes float64 for float32")
def test_float64_is_distinguished_where_float32_cannot():
    importance = 1.0 + np.arange(10) * 1e-15
    mask = ops.convert_to_numpy(keep_largest(ops.convert_to_tensor(importance, dtype="float64"), 4))
    np.testing.assert_array_equal(mask, np.arange(10) >= 6)


@pytest.mark.parametrize("size", [1, 2, 255, 257, 65_537, 2**18 - 1, 2**18, 300_007])
def test_mask_is_exact_at_the_sizes_where_digits_change(size):
    importance = np.abs(np.random.default_rng(size).normal(size=size)).astype("float32")
    for kept in {0, 1, size // 10, size}:
        mask = ops.convert_to_numpy(largest(ops.convert_to_tensor(importance), kept))
        np.testing.assert_array_equal(mask, largest_by_sorting(importance, kept))


@pytest.mark.parametrize("size", [2**22, 2**22 + 1, 9_000_000])
def test_mask_is_exact_where_an_array_is_read_piece_by_piece(size):
    importance = np.random.default_rng(size).random(size).astype("float32")
    kept = size // 10
    mask = ops.convert_to_numpy(largest(ops.convert_to_tensor(importance), kept))
    threshold = np.partition(importance, size - kept)[size - kept]
    tied = np.flatnonzero(importance == threshold)
    expected = importance > threshold
    expected[tied[: kept - int(expected.sum())]] = True
    np.testing.assert_array_equal(mask, expected)


@pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="counts traces of tf.function")
def test_a_selection_of_open_length_is_traced_once_for_every_length_and_count():
    traces = []

    def choose(importance, kept):
        traces.append(importance.shape)
        return keep_largest(importance, kept, how=reading_plan(9))

    select = compilation.compiled(choose, open_shapes=True)
    for size, kept in ((20, 1), (20, 5), (7, 7), (1, 0), (300, 100)):
        importance = np.random.default_rng(size).normal(size=size).astype("float32")
        mask = ops.convert_to_numpy(select(ops.convert_to_tensor(importance), np.int32(kept)))
        np.testing.assert_array_equal(mask, largest_by_sorting(importance, kept))
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("sparsity", "n", "pruned"),
    [(0.0, 7, 0), (0.5, 7, 4), (0.5, 5, 2), (0.7, 10, 7), (0.05, 10, 0), (0.95, 10, 10), (0.9, 0, 0), (1 / 3, 3, 1)],
)
@pytest.mark.one_backend
def test_pruned_count_is_sparsity_times_n_rounded(sparsity, n, pruned):
    assert pruned_count(sparsity, n) == pruned


@pytest.mark.parametrize("sparsity", [-0.1, 1.0, 90, float("nan")])
@pytest.mark.one_backend
def test_a_sparsity_outside_its_range_is_refused(sparsity):
    with pytest.raises(ValueError, match=r"fraction removed, in \[0, 1\). Received: sparsity="):
        pruned_count(sparsity, 10)


@pytest.mark.parametrize("expect_any", [False, True])
@pytest.mark.parametrize("mask", [[], [False], [True], [False, True, True], [[True, False], [True, True]]], ids=str)
def test_true_entries_are_counted(mask, expect_any):
    assert int(count_true(ops.convert_to_tensor(np.array(mask, bool)), expect_any=expect_any)) == np.sum(mask)
