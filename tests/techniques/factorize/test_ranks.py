"""Ranks under a budget, against all choices."""

import itertools

import numpy as np
import pytest

from prunekit.techniques.factorize.forms import CHANNELS, PAIR, SEPARABLE, Layout, Structure
from prunekit.techniques.factorize.ranks import Choice, Curve, for_budget


def curve(name, inputs, outputs, seed):
    energies = np.sort(np.random.default_rng(seed).exponential(size=min(inputs, outputs)) ** 2)[::-1]
    errors = np.concatenate([np.cumsum(energies[::-1])[::-1][1:], [0.0]]) / energies.sum()
    layout = Layout((), inputs, outputs)
    structures = [Structure(PAIR, (rank,)) for rank in range(1, len(errors) + 1)]
    choices = tuple(
        Choice(one, error, layout.parameters(one), 7 * layout.parameters(one))
        for one, error in zip(structures, errors, strict=True)
    )
    return Curve(name, inputs * outputs, 7 * inputs * outputs, choices, (PAIR,))


CURVES = [curve("a", 12, 9, 0), curve("b", 8, 16, 1), curve("c", 10, 10, 2)]


def parameters(one):
    return one.parameters


def chosen(one, structure):
    """What a structure costs: a choice, or the layer as it is."""
    return one if structure is None else next(each for each in one.choices if each.structure == structure)


def error(curves, ranks):
    return sum(0.0 if ranks[one.name] is None else chosen(one, ranks[one.name]).error for one in curves)


@pytest.mark.parametrize("share", [0.3, 0.4, 0.55, 0.7, 0.85, 0.99])
def test_within_the_budget_the_error_is_that_of_the_best_choice_or_next_to_it(share):
    total = sum(one.parameters for one in CURVES)
    found = for_budget(CURVES, share * total, parameters)
    assert sum(chosen(one, found[one.name]).parameters for one in CURVES) <= share * total
    best = min(
        error(CURVES, dict(zip("abc", ranks, strict=True)))
        for ranks in itertools.product(*([None, *(each.structure for each in one.worthwhile)] for one in CURVES))
        if sum(chosen(one, rank).parameters for one, rank in zip(CURVES, ranks, strict=True)) <= share * total
    )
    assert error(CURVES, found) <= 1.1 * best + 0.02
    # Nothing is left that another rank of a layer would cost.
    left = share * total - sum(chosen(one, found[one.name]).parameters for one in CURVES)
    for one in CURVES:
        if found[one.name] is not None:
            now = chosen(one, found[one.name])
            more = [each.parameters - now.parameters for each in one.worthwhile if each.error < now.error]
            assert all(step > left for step in more)


def test_the_whole_budget_leaves_all_layers_and_too_small_a_one_has_no_ranks():
    total = sum(one.parameters for one in CURVES)
    assert for_budget(CURVES, total, parameters) == {"a": None, "b": None, "c": None}
    least = sum(one.worthwhile[0].parameters for one in CURVES)
    assert for_budget(CURVES, least, parameters) == dict.fromkeys("abc", Structure(PAIR, (1,)))
    assert for_budget(CURVES, least - 1, parameters) is None


def test_a_rank_that_saves_nothing_is_not_worthwhile():
    counts = [len(curve("x", *shape, 0).worthwhile) for shape in ((10, 10), (3, 100), (2, 2))]
    assert counts == [4, 2, 0]


def test_a_form_that_is_not_allowed_or_computes_more_is_not_worthwhile():
    allowed, other, slow = (
        Choice(Structure(form, (2,)), 0.1, 40, macs)
        for form, macs in ((PAIR, 300.0), (SEPARABLE, 300.0), (PAIR, 800.0))
    )
    assert Curve("x", 100, 700.0, (allowed, other, slow), (PAIR,)).worthwhile == [allowed]
    assert Curve("x", 100, 700.0, (allowed, other, slow), (PAIR, SEPARABLE)).worthwhile == [allowed, other]


def test_the_choice_for_an_energy_is_the_smallest_that_keeps_it():
    one = curve("x", 30, 40, 3)
    found = one.choice_for(0.9)
    before = one.choices[found.structure.ranks[0] - 2]
    assert found.error <= 0.1 < before.error
    assert one.choice_for(1 - 1e-12) is None


def test_rivals_are_the_best_choices_of_other_forms_that_cost_no_more():
    def one(form, rank, error, size, macs):
        return Choice(Structure(form, (rank,)), error, size, macs)

    given = one(PAIR, 3, 0.3, 20, 20.0)
    others = [
        one(SEPARABLE, 1, 0.4, 10, 10.0),
        one(SEPARABLE, 2, 0.2, 20, 20.0),
        one(SEPARABLE, 3, 0.1, 21, 20.0),
        one(CHANNELS, 1, 0.1, 20, 21.0),
    ]
    curve_of_all = Curve("x", 100, 100.0, (given, *others), (PAIR, SEPARABLE, CHANNELS))
    assert curve_of_all.rivals(given.structure) == (given.structure, others[1].structure)
    assert Curve("x", 100, 100.0, (given, *others), (PAIR,)).rivals(given.structure) == (given.structure,)
