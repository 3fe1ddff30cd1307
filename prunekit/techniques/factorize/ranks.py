"""How many directions each layer keeps: a given number, a share of the energy, or a budget for the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

# Halvings of the price that a budget is paid with.
_HALVINGS = 200
# The first price, as a share of the highest: nothing is saved at it.
_LEAST_PRICE = 1e-18


@dataclass(frozen=True, eq=False)
class Curve:
    """What a layer loses with each rank.

    Attributes:
        name: Name of its weight.
        inputs: Inputs of each output.
        outputs: Outputs.
        errors: Squared error of its outputs with rank 1, 2, ..., relative to the squared outputs, shape (ranks,).
        macs: Multiply-accumulates of the layer for one example; 0 for a table.
    """

    name: str
    inputs: int
    outputs: int
    errors: np.ndarray
    macs: int = 0

    @property
    def worthwhile(self) -> int:
        """The largest rank with fewer weights than the layer has; 0 if there is none."""
        return min((self.inputs * self.outputs - 1) // (self.inputs + self.outputs), len(self.errors))

    def parameters(self, rank: int | None) -> int:
        """Returns the number of weights with a rank; None = of the layer as it is."""
        return self.inputs * self.outputs if rank is None else rank * (self.inputs + self.outputs)

    def macs_with(self, rank: int | None) -> float:
        """Returns the multiply-accumulates with a rank; None = of the layer as it is."""
        return self.macs * self.parameters(rank) / (self.inputs * self.outputs)

    def rank_for(self, energy: float) -> int | None:
        """Returns the smallest rank that keeps a share of the energy; None if no worthwhile one does."""
        enough = np.flatnonzero(self.errors[: self.worthwhile] <= 1 - energy)
        return int(enough[0]) + 1 if enough.size else None


Ranks = dict[str, int | None]


def for_budget(curves: Sequence[Curve], budget: float, cost: Callable[[Curve, int | None], float]) -> Ranks | None:
    """Returns the ranks of the least total error within a budget, None = as it is; None if no ranks are within.

    Each layer takes what costs least at one price for all: error + price * cost. The price is the lowest whose total is
    within the budget, and what is left of the budget goes where it saves most.

    Args:
        curves: The layers.
        budget: Largest total cost of these layers.
        cost: (layer, rank) -> its cost.

    Source: Everett 1963 (Lagrange multipliers for choices in steps).
    """
    tables = [_Table.of(curve, cost) for curve in curves]
    cheapest = [int(np.argmin(table.costs)) for table in tables]
    if _total(tables, cheapest) > budget:
        return None
    chosen = _spent(tables, _at_one_price(tables, cheapest, budget), budget)
    return {curve.name: table.ranks[place] for curve, table, place in zip(curves, tables, chosen, strict=True)}


@dataclass(frozen=True, eq=False)
class _Table:
    """The choices of a layer: ranks, errors and costs."""

    ranks: list[int | None]
    errors: np.ndarray
    costs: np.ndarray

    @classmethod
    def of(cls, curve: Curve, cost: Callable[[Curve, int | None], float]) -> _Table:
        """Returns the layer as it is, and with each worthwhile rank."""
        ranks: list[int | None] = [None, *range(1, curve.worthwhile + 1)]
        errors = np.concatenate([[0.0], curve.errors[: curve.worthwhile]])
        return cls(ranks, errors, np.array([cost(curve, rank) for rank in ranks], "float64"))


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
