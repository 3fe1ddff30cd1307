"""The form and the ranks of each layer: for a share of the energy, or for a budget for the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from prunekit.techniques.factorize.forms import Structure

# Halvings of the price that a budget is paid with.
_HALVINGS = 200
# The first price, as a share of the highest: nothing is saved at it.
_LEAST_PRICE = 1e-18


@dataclass(frozen=True)
class Choice:
    """A form and ranks of a layer.

    Attributes:
        structure: Form and ranks.
        error: Squared error of the layer's outputs, relative to the squared outputs.
        parameters: Number of entries of all arrays.
        macs: Multiply-accumulates of their layers for one example.
    """

    structure: Structure
    error: float
    parameters: int
    macs: float


@dataclass(frozen=True, eq=False)
class Curve:
    """What a layer loses with each form and rank.

    Attributes:
        name: Name of its weight.
        parameters: Number of entries of the weight.
        macs: Multiply-accumulates of the layer for one example; 0 for a table, and if they are unknown.
        choices: The forms and ranks that were looked at.
        forms: The forms that the layer may take.
    """

    name: str
    parameters: int
    macs: float
    choices: tuple[Choice, ...]
    forms: tuple[str, ...]

    @cached_property
    def worthwhile(self) -> list[Choice]:
        """The choices with fewer parameters and no more multiply-accumulates than the layer has, the smallest first."""
        allowed = [one for one in self.choices if one.structure.form in self.forms]
        found = [one for one in allowed if one.parameters < self.parameters and one.macs <= self.macs]
        return sorted(found, key=lambda one: (one.parameters, one.error))

    def choice_for(self, energy: float) -> Choice | None:
        """Returns the smallest worthwhile choice that keeps a share of the energy; None if none does."""
        return next((one for one in self.worthwhile if one.error <= 1 - energy), None)

    def rivals(self, structure: Structure) -> tuple[Structure, ...]:
        """Returns the best choice of each form that costs no more than a choice, this one first."""
        (given,) = (one for one in self.choices if one.structure == structure)
        best = {structure.form: given}
        for one in self.worthwhile:
            form = one.structure.form
            cheap = form != structure.form and one.parameters <= given.parameters and one.macs <= given.macs
            if cheap and (form not in best or one.error < best[form].error):
                best[form] = one
        return tuple(one.structure for one in best.values())


# Name of a weight -> its form and ranks; None = as it is.
Ranks = dict[str, Structure | None]
# Name of a weight -> forms and ranks of which that of the least error is taken.
Rivals = Mapping[str, Sequence[Structure]]
# Cost of a choice, or of a layer as it is.
Cost = Callable[[Choice | Curve], float]


def for_budget(curves: Sequence[Curve], budget: float, cost: Cost) -> Ranks | None:
    """Returns the ranks of the least total error within a budget, None = as it is; None if no ranks are within.

    Each layer takes what costs least at one price for all: error + price * cost. The price is the lowest whose total is
    within the budget, and what is left of the budget goes where it saves most.

    Args:
        curves: The layers.
        budget: Largest total cost of these layers.
        cost: A choice, or a layer as it is -> its cost.

    Source: Everett 1963 (Lagrange multipliers for choices in steps).
    """
    tables = [_Table.of(curve, cost) for curve in curves]
    cheapest = [int(np.argmin(table.costs)) for table in tables]
    if _total(tables, cheapest) > budget:
        return None
    chosen = _spent(tables, _at_one_price(tables, cheapest, budget), budget)
    return {curve.name: table.structures[place] for curve, table, place in zip(curves, tables, chosen, strict=True)}


@dataclass(frozen=True, eq=False)
class _Table:
    """The choices of a layer: forms and ranks, errors and costs."""

    structures: list[Structure | None]
    errors: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, curve: Curve, cost: Cost) -> _Table:
        """Returns the layer as it is, and each worthwhile choice."""
        choices = curve.worthwhile
        errors = np.array([0.0, *(one.error for one in choices)])
        costs = np.array([cost(curve), *(cost(one) for one in choices)], "float64")
        return cls([None, *(one.structure for one in choices)], errors, costs)


def _total(tables: Sequence[_Table], chosen: Sequence[int]) -> float:
    return sum(float(table.costs[place]) for table, place in zip(tables, chosen, strict=True))


def _at_one_price(tables: Sequence[_Table], cheapest: list[int], budget: float) -> list[int]:
    """Returns the choices at the lowest price whose total is within the budget."""
    low, high, chosen = 0.0, max(float(table.errors.max()) for table in tables) + 1.0, cheapest
    for _ in range(_HALVINGS):
        # The first price is 0; prices differ by many powers of ten.
        price = (low * high) ** 0.5 if low else high * _LEAST_PRICE
        found = [int(np.argmin(table.errors + price * table.costs)) for table in tables]
        if _total(tables, found) <= budget:
            if not low:
                return found
            high, chosen = price, found
        else:
            low = price
        if low and high / low < 1 + 1e-9:
            break
    return chosen


def _spent(tables: Sequence[_Table], chosen: list[int], budget: float) -> list[int]:
    """Returns the choices after what is left of the budget went where it saves most."""
    while True:
        left, steps = budget - _total(tables, chosen), []
        for index, table in enumerate(tables):
            more, saved = table.costs - table.costs[chosen[index]], table.errors[chosen[index]] - table.errors
            rates = np.where((more > 0) & (more <= left), saved / np.maximum(more, 1e-300), 0.0)
            steps.append((float(rates.max()), index, int(np.argmax(rates))))
        rate, index, place = max(steps)
        if rate <= 0:
            return chosen
        chosen = [*chosen[:index], place, *chosen[index + 1 :]]
