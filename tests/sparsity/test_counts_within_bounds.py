"""Counts within bounds: the total is exact, the bounds hold, and the rest follows the allocation's rule."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from prunekit.sparsity.allocation import ERK, LAMP, Layout, Uniform
from prunekit.sparsity.bounds import Bounds, Counts, as_bounds, shared_within, units_within


def shared_by(allocation, sizes, scores=None):
    """The rule of an allocation, as `shared_within` takes it."""

    def share(number, free):
        total = sum(sizes[i] for i in free)
        if number >= total:
            return [sizes[i] for i in free]
        layouts = [Layout((sizes[i] // 4, 4), (0,), (1,)) for i in free]
        some = None if scores is None else [scores[i] for i in free]
        found = allocation.shares(number / total, layouts, some)
        return [share * sizes[i] for share, i in zip(found, free, strict=True)]

    return share


def filled(level_counts, total, counts):
    """Plain water-filling: the level at which numbers, cut to their counts, have the sum `total`; by bisection."""

    def cut(level):
        return [min(max(n, least), most) for n, (least, most) in zip(level_counts(level), counts, strict=True)]

    low, high = 0.0, 1.0
    for _ in range(60):
        level = (low + high) / 2
        low, high = (level, high) if sum(cut(level)) < total else (low, level)
    return cut(high)


@st.composite
def problems(draw):
    sizes = [4 * n for n in draw(st.lists(st.integers(1, 40), min_size=1, max_size=6))]
    ends = [sorted(draw(st.tuples(st.integers(0, size), st.integers(0, size)))) for size in sizes]
    counts = [Counts(*pair) for pair in ends]
    total = draw(st.integers(sum(least for least, _ in counts), sum(most for _, most in counts)))
    return sizes, counts, total, draw(st.integers(0, 99))


@given(problems())
def test_uniform_shares_are_those_of_plain_water_filling(problem):
    sizes, counts, total, _ = problem
    found = shared_within(total, counts, shared_by(Uniform(), sizes))
    assert sum(found) == total
    assert all(least <= n <= most for n, (least, most) in zip(found, counts, strict=True))
    np.testing.assert_allclose(found, filled(lambda level: [level * size for size in sizes], total, counts), atol=1)


@given(problems())
def test_a_threshold_within_bounds_is_the_same_in_any_order(problem):
    sizes, counts, total, seed = problem
    generator = np.random.default_rng(seed)
    # Least squares of a random permutation: no ties.
    values = np.split(generator.permutation(sum(sizes)) + 1.0, np.cumsum(sizes)[:-1])

    def share(number, free):
        together = np.sort(np.concatenate([values[i] for i in free]))
        threshold = together[number] if number < len(together) else np.inf
        return [np.count_nonzero(values[i] < threshold) for i in free]

    found = shared_within(total, counts, share)
    ranked = [np.sort(value) for value in values]
    whole = filled(lambda level: [np.searchsorted(r, level * (sum(sizes) + 2)) for r in ranked], total, counts)
    assert found == whole and sum(found) == total
    order = generator.permutation(len(sizes))
    values = [values[i] for i in order]
    assert shared_within(total, [counts[i] for i in order], share) == [found[i] for i in order]


@pytest.mark.parametrize("allocation", [ERK(), LAMP()], ids=["erk", "lamp"])
@given(problem=problems())
def test_every_allocation_meets_total_and_bounds(allocation, problem):
    sizes, counts, total, seed = problem
    scores = [np.random.default_rng((seed, i)).random((size // 4, 4)) for i, size in enumerate(sizes)]
    found = shared_within(total, counts, shared_by(allocation, sizes, scores))
    assert sum(found) == total
    assert all(least <= n <= most for n, (least, most) in zip(found, counts, strict=True))


def test_a_fixed_weight_leaves_the_rest_to_the_rule():
    counts = [Counts(0, 10), Counts(0, 100), Counts(0, 200)]
    assert shared_within(160, counts, shared_by(Uniform(), [100, 100, 200])) == [10, 50, 100]


def test_a_minimum_rounds_up_and_a_maximum_down_except_below_the_final_sparsity():
    assert units_within(Bounds(0.55, 0.95), 100) == (55, 95), "0.55 * 100 is 55.00000000000001"
    assert units_within(Bounds(0.5, 0.7), 7) == (4, 4)
    assert units_within(Bounds(0.5, 0.7), 7, scale=0.99) == (3, 4)
    assert units_within(Bounds(0.5), 7) == (4, 7)


@pytest.mark.parametrize(
    "value, error, message",
    [
        ({"min": 0.5, "max": 0.4}, ValueError, r"bounds\['a'\]: Bounds need min <= max. Received: min=0.5 and max=0.4"),
        ({"max": 1.0}, ValueError, r"bounds\['a'\]: max must be a fraction removed, in \[0, 1\)"),
        ({"least": 0.5}, TypeError, r"bounds\['a'\] takes .* Received: {'least': 0.5}"),
        ({}, TypeError, "or one of them. Received: {}"),
        (0.5, TypeError, "or one of them. Received: 0.5"),
        ({"min": "0.5"}, TypeError, "min must be a fraction"),
    ],
)
def test_wrong_bounds_are_refused(value, error, message):
    with pytest.raises(error, match=message):
        as_bounds("bounds['a']", value)
