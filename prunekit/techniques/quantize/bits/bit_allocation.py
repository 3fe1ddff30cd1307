"""Chooses one of several costs for each weight so that the sum of the errors is least under a budget.

NumPy only. The choice is a multiple-choice knapsack problem: from each class (a weight) one option (its bits) is taken,
with a cost (bytes) and an error.

Sources: Kellerer, Pferschy & Pisinger 2004, Knapsack Problems, chapter 11 (dominated options, linear relaxation,
    dynamic programming with lists of states); Shoham & Gersho 1988 (bits of quantizers along the convex hull).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from prunekit.sparsity.convex_shares import lower_hull

# Errors that differ by less than this fraction of the largest sum are equal.
_TOLERANCE = 1e-12


@dataclass(frozen=True, eq=False)
class KnapsackItem:
    """The options of one weight.

    Attributes:
        costs: Cost of each option, shape (options,), integers.
        errors: Error of each option, shape (options,), at least 0.

    Raises:
        ValueError: There is no option, the shapes differ, or a number is negative or not finite.
    """

    costs: np.ndarray
    errors: np.ndarray

    def __post_init__(self) -> None:
        costs, errors = np.asarray(self.costs, "int64"), np.asarray(self.errors, "float64")
        if costs.ndim != 1 or not costs.size or costs.shape != errors.shape:
            raise ValueError(f"Each option has a cost and an error. Received: shapes {costs.shape} and {errors.shape}.")
        if not (np.isfinite(errors).all() and (errors >= 0).all() and (costs >= 0).all()):
            raise ValueError(f"Costs and errors are numbers from 0 on. Received: {costs} and {errors}.")
        object.__setattr__(self, "costs", costs)
        object.__setattr__(self, "errors", errors)

    def efficient(self) -> np.ndarray:
        """Returns the indices of the options that no other one equals or betters in both, by rising cost."""
        order = np.lexsort((self.errors, self.costs))
        errors = self.errors[order]
        before = np.concatenate([[np.inf], np.minimum.accumulate(errors)[:-1]])
        return order[errors < before]


def least_error(options: Sequence[KnapsackItem], budget: int) -> list[int]:
    """Returns the option of each weight with which the sum of the errors is least and the costs are within the budget.

    The result is exact. Of several, one with the least cost is returned.

    Args:
        options: The options of each weight.
        budget: Largest sum of the costs.

    Raises:
        ValueError: The cheapest options cost more than the budget.
    """
    least = sum(int(one.costs.min()) for one in options)
    if least > budget:
        raise ValueError(f"The cheapest options cost {least:,}. Received: a budget of {budget:,}.")
    # Weights with the largest differences of costs first: their choice tells most about the rest.
    order = sorted(range(len(options)), key=lambda at: int(np.ptp(options[at].costs)), reverse=True)
    kept = [options[at].efficient() for at in order]
    rows = [(options[at].costs[chosen], options[at].errors[chosen]) for at, chosen in zip(order, kept, strict=True)]
    bounds = _bounds(rows)
    tolerance = _TOLERANCE * max(sum(float(errors.max()) for _, errors in rows), 1e-300)
    costs, errors, steps = np.zeros(1, "int64"), np.zeros(1), []
    best = np.inf
    for (added_costs, added_errors), bound in zip(rows, bounds[1:], strict=True):
        all_costs = (costs[:, None] + added_costs).ravel()
        all_errors = (errors[:, None] + added_errors).ravel()
        lowest, reached = bound.at(budget - all_costs)
        best = min(best, float((all_errors + reached).min()))
        possible = np.flatnonzero(all_errors + lowest <= best + tolerance)
        possible = possible[np.lexsort((all_errors[possible], all_costs[possible]))]
        found = all_errors[possible]
        before = np.concatenate([[np.inf], np.minimum.accumulate(found)[:-1]])
        possible = possible[found < before]
        costs, errors = all_costs[possible], all_errors[possible]
        steps.append(np.divmod(possible, len(added_costs)))
    choice, at = [0] * len(options), int(np.argmin(errors)) if len(errors) else 0
    for index, chosen, (parents, taken) in reversed(list(zip(order, kept, steps, strict=True))):
        choice[index] = int(chosen[taken[at]])
        at = int(parents[at])
    return choice


def hull_path(options: Sequence[KnapsackItem]) -> list[list[int]]:
    """Returns choices from the cheapest to the one without needless error, each with one weight changed.

    The next change is the one that removes the most error for its cost; each choice is the best for the sum of its
    costs.

    Args:
        options: The options of each weight.
    """
    kept = [one.efficient() for one in options]
    pieces = []
    for index, (one, chosen) in enumerate(zip(options, kept, strict=True)):
        corners = _hull(one.costs[chosen], one.errors[chosen])
        for first, last in zip(corners, corners[1:], strict=False):
            before, after = chosen[first], chosen[last]
            slope = (one.errors[after] - one.errors[before]) / (one.costs[after] - one.costs[before])
            pieces.append((float(slope), index, int(after)))
    choices = [[int(chosen[0]) for chosen in kept]]
    # Pieces of one weight are in order already: the slopes of a hull rise.
    for _, index, option in sorted(pieces, key=lambda piece: piece[0]):
        choices.append([*choices[-1][:index], option, *choices[-1][index + 1 :]])
    return choices


@dataclass(frozen=True, eq=False)
class _Bound:
    """The least error of some weights as a function of the budget, if options could be mixed.

    Attributes:
        least: Sum of the lowest costs.
        costs: Further costs at the corners of the function, rising from 0.
        errors: Errors there, falling.
    """

    least: int
    costs: np.ndarray
    errors: np.ndarray

    def at(self, budget: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the lower bound for each budget, and the error of a choice within it; infinite where none fits."""
        spare = budget - self.least
        lowest = np.where(spare >= 0, np.interp(spare, self.costs, self.errors), np.inf)
        whole = np.maximum(np.searchsorted(self.costs, spare, side="right") - 1, 0)
        return lowest, np.where(spare >= 0, self.errors[whole], np.inf)


def _bounds(rows: Sequence[tuple[np.ndarray, np.ndarray]]) -> list[_Bound]:
    """Returns the bound of the rows from each one on, and that of no rows."""
    pieces: list[tuple[float, int, int, float]] = []
    for index, (costs, errors) in enumerate(rows):
        corners = _hull(costs, errors)
        for first, last in zip(corners, corners[1:], strict=False):
            cost, error = int(costs[last] - costs[first]), float(errors[last] - errors[first])
            pieces.append((error / cost, index, cost, error))
    pieces.sort(key=lambda piece: piece[0])
    found = []
    for start in range(len(rows) + 1):
        rest = [piece for piece in pieces if piece[1] >= start]
        least = sum(int(row[0][0]) for row in rows[start:])
        most = sum(float(row[1][0]) for row in rows[start:])
        added = np.cumsum([0, *(piece[2] for piece in rest)])
        found.append(_Bound(least, added, np.cumsum([most, *(piece[3] for piece in rest)])))
    return found


def _hull(costs: np.ndarray, errors: np.ndarray) -> list[int]:
    return lower_hull([float(cost) for cost in costs], [float(error) for error in errors])
