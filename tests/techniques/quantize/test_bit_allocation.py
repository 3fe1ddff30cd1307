"""Bits under a budget: exact against all choices, on awkward costs and errors, and the path along the hull."""

import itertools

import numpy as np
import pytest

from prunekit.techniques.quantize.bits.bit_allocation import KnapsackItem, hull_path, least_error


def total(options, choice):
    """Returns (error, cost) of a choice."""
    return (
        sum(float(one.errors[at]) for one, at in zip(options, choice, strict=True)),
        sum(int(one.costs[at]) for one, at in zip(options, choice, strict=True)),
    )


def best_of_all(options, budget):
    """Returns the least (error, cost) of all choices within the budget."""
    choices = itertools.product(*(range(len(one.costs)) for one in options))
    return min(found for choice in choices if (found := total(options, choice))[1] <= budget)


def drawn(rng, weights, *, digits):
    counts = rng.integers(1, 5, weights)
    # Few digits: equal costs and equal errors are frequent.
    return [KnapsackItem(rng.integers(0, 30, n), np.round(rng.random(n) * 10, digits)) for n in counts]


@pytest.mark.parametrize("digits", [0, 1, 6])
@pytest.mark.parametrize("weights", [1, 2, 6])
def test_the_choice_is_the_best_of_all(weights, digits):
    rng = np.random.default_rng(weights)
    for _ in range(60):
        options = drawn(rng, weights, digits=digits)
        low, high = (sum(int(pick(one.costs)) for one in options) for pick in (np.min, np.max))
        budget = int(rng.integers(low, high + 2))
        error, cost = total(options, least_error(options, budget))
        wanted, wanted_cost = best_of_all(options, budget)
        assert cost <= budget and np.isclose(error, wanted, rtol=0, atol=1e-9) and cost == wanted_cost


def test_the_greedy_choice_is_not_taken_where_another_is_better():
    # The first weight has the better ratio, and then nothing else fits.
    options = [KnapsackItem([0, 6], [10.0, 0.0]), KnapsackItem([0, 5], [8.0, 0.0]), KnapsackItem([0, 5], [8.0, 0.0])]
    assert least_error(options, 10) == [0, 1, 1]


def test_a_beginning_that_the_ratios_complete_badly_is_not_dropped():
    # After the first weight the best ratios are those of the second and the fourth, and neither leaves room for both.
    options = [KnapsackItem([0, cost], [error, 0.0]) for cost, error in ((9, 8.0), (7, 9.0), (8, 6.0), (5, 7.0))]
    assert least_error(options, 19) == [1, 1, 0, 0]


def test_errors_in_proportion_to_costs_are_still_chosen_exactly():
    costs = [13, 17, 19, 23, 29, 31, 37, 41, 43, 47]
    options = [KnapsackItem([0, cost], [float(cost), 0.0]) for cost in costs]
    choice = least_error(options, 150)
    assert total(options, choice) == (float(sum(costs) - 150), 150)


def test_among_equal_errors_the_cheapest_option_is_taken():
    assert least_error([KnapsackItem([9, 3, 5], [1.0, 1.0, 1.0]), KnapsackItem([4, 8], [0.0, 0.0])], 1000) == [1, 0]


def test_the_budget_is_used_to_the_last_byte():
    options = [KnapsackItem([4, 8], [1.0, 0.0])] * 3
    assert [sum(least_error(options, budget)) for budget in (12, 15, 16, 23, 24)] == [0, 0, 1, 2, 3]


def test_large_models_are_chosen_exactly_too():
    rng = np.random.default_rng(0)
    sizes = (10 ** rng.uniform(2, 6, 150)).astype(int)
    errors = 10 ** rng.uniform(-6, -1, 150)
    options = [KnapsackItem([n // 2, n, 4 * n], [e, e / 200, 0.0]) for n, e in zip(sizes, errors, strict=True)]
    low, high = (sum(int(one.costs[at]) for one in options) for at in (0, 2))
    found = [total(options, least_error(options, int(low + share * (high - low)))) for share in (0, 0.1, 0.4, 1)]
    assert [error for error, _ in found] == sorted((error for error, _ in found), reverse=True)
    assert found[0][1] == low and found[-1] == (0.0, high)


def test_a_budget_below_the_cheapest_options_is_refused_with_both():
    with pytest.raises(ValueError, match="The cheapest options cost 1,007. Received: a budget of 1,006"):
        least_error([KnapsackItem([7, 9], [1, 0]), KnapsackItem([1000], [0])], 1006)


@pytest.mark.parametrize(
    ("costs", "errors", "message"),
    [
        ([], [], "has a cost and an error"),
        ([1, 2], [0.5], r"Received: shapes \(2,\) and \(1,\)"),
        ([1], [np.nan], "numbers from 0 on"),
        ([1], [-0.5], "numbers from 0 on"),
        ([-1], [0.5], "numbers from 0 on"),
    ],
)
def test_options_that_are_none_are_refused(costs, errors, message):
    with pytest.raises(ValueError, match=message):
        KnapsackItem(costs, errors)


def test_the_path_leads_from_the_cheapest_to_the_best_and_each_choice_is_the_best_for_its_cost():
    options = drawn(np.random.default_rng(5), 5, digits=3)
    path = hull_path(options)
    found = [total(options, choice) for choice in path]
    assert found[0][1] == sum(int(one.costs.min()) for one in options)
    assert found[-1][0] == pytest.approx(sum(float(one.errors.min()) for one in options))
    for before, after in itertools.pairwise(path):
        assert sum(a != b for a, b in zip(before, after, strict=True)) == 1
    for error, cost in found:
        assert error == pytest.approx(best_of_all(options, cost)[0])


def test_without_weights_there_is_nothing_to_choose():
    assert least_error([], 0) == [] and hull_path([]) == [[]]
