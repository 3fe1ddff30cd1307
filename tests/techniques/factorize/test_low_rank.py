"""Factors along the principal directions of outputs, against the singular value decomposition of these outputs."""

import numpy as np
import pytest

from prunekit.techniques.factorize.low_rank import directions_of

SHAPES = [(128, 64), (24, 90), (40, 40)]


def correlated(rows, inputs, seed=0):
    rng = np.random.default_rng(seed)
    return np.maximum(rng.normal(size=(rows, 12)) @ rng.normal(size=(12, inputs)), 0) + 0.1 * rng.normal(
        size=(rows, inputs)
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rank", [1, 5, 20])
def test_the_error_is_that_of_the_truncated_decomposition_of_the_outputs(shape, rank):
    x, w = correlated(500, shape[0]), np.random.default_rng(1).normal(size=shape)
    found = directions_of(x.T @ x, w)
    first, second = found.factors(w, rank)
    singular = np.linalg.svd(x @ w, compute_uv=False)
    error = np.square(x @ (w - first @ second)).sum()
    assert error == pytest.approx(np.square(singular[rank:]).sum(), rel=1e-6, abs=1e-6)
    assert found.dropped()[rank] == pytest.approx(error, rel=1e-6, abs=1e-6)
    assert found.dropped()[0] == pytest.approx(np.square(singular).sum())


@pytest.mark.parametrize("shape", SHAPES)
def test_the_full_rank_is_the_matrix_and_errors_fall_with_the_rank(shape):
    x, w = correlated(500, shape[0]), np.random.default_rng(1).normal(size=shape)
    found = directions_of(x.T @ x, w)
    first, second = found.factors(w, min(shape))
    np.testing.assert_allclose(first @ second, w, atol=1e-10)
    assert np.all(np.diff(found.dropped()) <= 0) and found.dropped()[-1] == 0


def test_fewer_examples_than_inputs_need_no_inverse():
    x, w = correlated(30, 64), np.random.default_rng(1).normal(size=(64, 48))
    first, second = directions_of(x.T @ x, w).factors(w, 30)
    np.testing.assert_allclose(x @ first @ second, x @ w, atol=1e-8)


def test_a_table_is_weighed_by_how_often_its_rows_are_read():
    rng = np.random.default_rng(2)
    table, counts = rng.normal(size=(20, 6)), np.array([100.0] * 3 + [0.0] * 17)
    first, second = directions_of(counts, table).factors(table, 3)
    np.testing.assert_allclose((first @ second)[:3], table[:3], atol=1e-8)
    # Rows that are not read are not kept for their own sake.
    assert np.abs((first @ second)[3:] - table[3:]).max() > 0.1


def test_each_direction_is_as_large_between_the_layers_as_in_the_second_one():
    """Integers of one scale would lose the small directions otherwise."""
    x, w = correlated(2000, 64), np.random.default_rng(1).normal(size=(64, 32))
    first, second = directions_of(x.T @ x, w).factors(w, 8)
    ratios = np.linalg.norm(x @ first, axis=0) / np.linalg.norm(second, axis=1)
    np.testing.assert_allclose(ratios, ratios[0], rtol=1e-6)


def test_a_matrix_of_zeros_has_factors():
    first, second = directions_of(np.eye(5), np.zeros((5, 4))).factors(np.zeros((5, 4)), 2)
    assert np.isfinite(first).all() and np.isfinite(second).all() and not (first @ second).any()


@pytest.mark.parametrize("rank", [8, 16, 32])
def test_it_loses_at_most_half_of_what_activation_aware_decompositions_lose(rank):
    """ASVD (Yuan et al. 2023, arXiv:2312.05821): rows scaled by the mean magnitudes of inputs to the power 0.5."""
    rng = np.random.default_rng(5)
    mixing = rng.normal(size=(32, 128)) * np.exp(-np.arange(32) / 10)[:, None]
    w = rng.normal(size=(128, 64))
    x, fresh = (
        np.maximum(rng.normal(size=(4000, 32)) @ mixing + 0.3 * rng.normal(size=(4000, 128)), 0) for _ in range(2)
    )
    mean = x.mean(axis=0)
    first, second = directions_of((x - mean).T @ (x - mean), w).factors(w, rank)
    scales = np.abs(x).mean(axis=0) ** 0.5
    u, s, v = np.linalg.svd(scales[:, None] * w, full_matrices=False)
    theirs = (u[:, :rank] * s[:rank] @ v[:rank]) / scales[:, None]
    # The bias takes over the mean.
    ours = np.square((fresh - mean) @ (w - first @ second)).sum()
    assert ours <= 0.5 * np.square(fresh @ (w - theirs)).sum()
