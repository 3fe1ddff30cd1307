"""Ranks under a budget, against all choices."""

import itertools

import numpy as np
import pytest

from prunekit.techniques.factorize.ranks import Curve, for_budget


def curve(name, inputs, outputs, seed):
    energies = np.sort(np.random.default_rng(seed).exponential(size=min(inputs, outputs)) ** 2)[::-1]
    errors = np.concatenate([np.cumsum(energies[::-1])[::-1][1:], [0.0]]) / energies.sum()
    return Curve(name, inputs, outputs, errors, inputs * outputs * 7)


CURVES = [curve("a", 12, 9, 0), curve("b", 8, 16, 1), curve("c", 10, 10, 2)]


def error(curves, ranks):
    return sum(0.0 if ranks[one.name] is None else one.errors[ranks[one.name] - 1] for one in curves)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.55, 0.7, 0.85, 0.99])
def test_within_the_budget_the_error_is_that_of_the_best_choice_or_next_to_it(share):
    total = sum(one.parameters(None) for one in CURVES)
    found = for_budget(CURVES, share * total, Curve.parameters)
    assert sum(one.parameters(found[one.name]) for one in CURVES) <= share * total
    best = min(
        error(CURVES, dict(zip("abc", ranks, strict=True)))
        for ranks in itertools.product(*([None, *range(1, one.worthwhile + 1)] for one in CURVES))
        if sum(one.parameters(rank) for one, rank in zip(CURVES, ranks, strict=True)) <= share * total
    )
    assert error(CURVES, found) <= 1.1 * best + 0.02
    # Nothing is left that another rank of a layer would cost.
    left = share * total - sum(one.parameters(found[one.name]) for one in CURVES)
    for one in CURVES:
        rank = found[one.name]
        if rank is not None and rank < one.worthwhile:
            assert one.parameters(rank + 1) - one.parameters(rank) > left


def test_the_whole_budget_leaves_all_layers_and_too_small_a_one_has_no_ranks():
    total = sum(one.parameters(None) for one in CURVES)
    assert for_budget(CURVES, total, Curve.parameters) == {"a": None, "b": None, "c": None}
    least = sum(one.parameters(1) for one in CURVES)
    assert for_budget(CURVES, least, Curve.parameters) == {"a": 1, "b": 1, "c": 1}
    assert for_budget(CURVES, least - 1, Curve.parameters) is None


def test_a_rank_that_saves_nothing_is_not_worthwhile():
    assert [curve("x", 10, 10, 0).worthwhile, curve("x", 3, 100, 0).worthwhile, curve("x", 2, 2, 0).worthwhile] == [
        4,
        2,
        0,
    ]
    assert curve("x", 10, 10, 0).macs_with(4) == 0.8 * 700


def test_the_rank_for_an_energy_is_the_smallest_that_keeps_it():
    one = curve("x", 30, 40, 3)
    rank = one.rank_for(0.9)
    assert one.errors[rank - 1] <= 0.1 < one.errors[rank - 2]
    assert one.rank_for(1 - 1e-12) is None
