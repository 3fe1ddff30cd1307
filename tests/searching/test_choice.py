"""The exact choice: against all choices, with tables over one to three variables, and bounds that cannot be met."""

import itertools

import numpy as np
import pytest

from prunekit.searching.choice import Program, Term, Unreachable, totals

pytestmark = pytest.mark.one_backend


def problem(seed, variables):
    rng = np.random.default_rng(seed)
    sizes = [int(n) for n in rng.integers(2, 5, variables)]
    terms = [Term((v,), {"error": rng.random(n)}) for v, n in enumerate(sizes)]
    for count in (2, 3, min(3, variables)):
        chosen = tuple(int(v) for v in rng.choice(variables, count, replace=False))
        table = rng.integers(1, 100, [sizes[v] for v in chosen]).astype(float)
        # Levels with equal costs, as those of another form in a table of one form.
        table[-1] = table[0]
        terms.append(Term(chosen, {"bytes": table, "time": rng.random(table.shape)}))
    return sizes, terms


def all_choices(sizes, terms):
    return [totals(terms, levels) for levels in itertools.product(*map(range, sizes))]


@pytest.mark.short(cases=1)
@pytest.mark.parametrize("seed", range(12))
def test_no_other_choice_within_the_bounds_is_better(seed):
    sizes, terms = problem(seed, 3 + seed % 4)
    found = all_choices(sizes, terms)
    error, time = (float(np.quantile([one[name] for one in found], 0.4)) for name in ("error", "time"))
    within = [one["bytes"] for one in found if one["error"] <= error and one["time"] <= time]
    bounds = {"error": error, "time": time}
    if not within:
        with pytest.raises(Unreachable):
            Program(sizes, terms).choose("bytes", bounds)
        return
    best = Program(sizes, terms).choose("bytes", bounds)
    assert best.totals["bytes"] == min(within) and best.gap <= 1e-4
    assert best.totals == pytest.approx(totals(terms, best.levels))
    assert all(best.totals[name] <= bound for name, bound in bounds.items())


def test_bounds_of_any_magnitude_are_met():
    tables = {"error": np.array([1e-7, 3e-7, 9e-7]), "bytes": np.array([9e8, 5e8, 1e8])}
    terms = [Term((v,), tables) for v in range(4)]
    best = Program([3] * 4, terms).choose("bytes", {"error": 13e-7})
    assert best.totals["error"] <= 13e-7
    every = all_choices([3] * 4, terms)
    assert best.totals["bytes"] == min(one["bytes"] for one in every if one["error"] <= 13e-7)


@pytest.mark.thorough
def test_bounds_that_nothing_meets_are_named():
    terms = [Term((0,), {"error": np.array([0.1, 0.4]), "bytes": np.array([90.0, 10.0])})]
    with pytest.raises(Unreachable, match="error': 0.05"):
        Program([2], terms).choose("bytes", {"error": 0.05})
