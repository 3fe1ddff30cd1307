"""Chooses one level for each of several variables: least of one cost, within bounds of others; exact.

A cost is a sum of terms, each a table over the levels of one or more variables: the bytes of a
kernel are a table over its bits, the kept share of its inputs and the kept share of its outputs.

Source: Adams & Sherali 1986 (products of binary variables as linear constraints; here one unknown for each entry of a
    table, whose sums along each axis are the variables' own unknowns).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.core.runtime.hidden_output import STDOUT, hidden_output

# Relative gap at which a choice counts as the best, and the seconds after which the best found so far is taken.
_GAP, _SECONDS = 1e-4, 60.0
# HiGHS takes a bound as met that is exceeded by this share of it: such a choice is made again with smaller bounds.
_FEASIBLE, _ROUNDING = 1e-6, 1e-12


@dataclass(frozen=True, eq=False)
class Term:
    """A part of the costs.

    Attributes:
        variables: Numbers of the variables, each once.
        costs: Name of a cost -> table of shape (levels of the first variable, levels of the second, ...).
    """

    variables: tuple[int, ...]
    costs: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Choice:
    """One level for each variable.

    Attributes:
        levels: Number of the chosen level of each variable.
        totals: Total of each cost.
        gap: How far the minimised cost may be above the least possible one, relative to it; 0 = proven least.
    """

    levels: tuple[int, ...]
    totals: Mapping[str, float]
    gap: float


class Unreachable(ValueError):
    """No choice meets the bounds."""


def totals(terms: Sequence[Term], levels: Sequence[int]) -> dict[str, float]:
    """Returns the total of each cost of a choice."""
    found: dict[str, float] = {}
    for term in terms:
        at = tuple(levels[variable] for variable in term.variables)
        for name, table in term.costs.items():
            found[name] = found.get(name, 0.0) + float(table[at])
    return found


def _classes(term: Term, axis: int) -> np.ndarray:
    """Returns the number of a class for each level of one variable: levels of one class have the same costs."""
    stacked = np.stack([np.moveaxis(np.asarray(table, "float64"), axis, 0) for table in term.costs.values()], axis=1)
    found: np.ndarray = np.unique(stacked.reshape(len(stacked), -1), axis=0, return_inverse=True)[1].reshape(-1)
    return found


def _widened(matrix: Any) -> Any:
    """Returns a sparse matrix with a column of zeros more."""
    from scipy.sparse import csr_array

    found = csr_array(matrix)
    return csr_array((found.data, found.indices, found.indptr), (found.shape[0], found.shape[1] + 1))


class Program:
    """The mixed-integer program: one binary unknown for each level, one unknown for each entry of a joint table.

    Args:
        sizes: Number of levels of each variable.
        terms: The costs.
    """

    def __init__(self, sizes: Sequence[int], terms: Sequence[Term]):
        self._sizes, self._terms = list(sizes), list(terms)
        self._starts = np.concatenate([[0], np.cumsum(sizes)]).astype(int)
        self._places: list[np.ndarray] = []
        joint: dict[tuple[tuple[int, ...], bytes], np.ndarray] = {}
        self._rows: list[int] = []
        self._columns: list[int] = []
        self._values: list[float] = []
        self._sides: list[float] = []
        self.unknowns = int(self._starts[-1])
        for variable in range(len(sizes)):
            self._equal(range(self._starts[variable], self._starts[variable + 1]), (), 1.0)
        for term in terms:
            if len(term.variables) == 1:
                self._places.append(self._of(term.variables[0]))
                continue
            classes = [_classes(term, axis) for axis in range(len(term.variables))]
            key = term.variables, np.concatenate(classes).tobytes()
            if key not in joint:
                joint[key] = self._joint(term.variables, classes)
            self._places.append(joint[key][np.ix_(*classes)])

    def _of(self, variable: int) -> np.ndarray:
        return np.arange(self._starts[variable], self._starts[variable + 1])

    def _joint(self, variables: tuple[int, ...], classes: Sequence[np.ndarray]) -> np.ndarray:
        """Returns the unknowns of a table, one for each combination of classes of levels with equal costs."""
        shape = [int(found.max()) + 1 for found in classes]
        places = np.arange(self.unknowns, self.unknowns + math.prod(shape)).reshape(shape)
        self.unknowns += places.size
        for axis, variable in enumerate(variables):
            for number in range(shape[axis]):
                own = self._of(variable)[classes[axis] == number]
                self._equal(np.take(places, number, axis).ravel(), own, 0.0)
        return places

    def _equal(self, plus: Sequence[int] | np.ndarray, minus: Sequence[int] | np.ndarray, side: float) -> None:
        row = len(self._sides)
        self._sides.append(side)
        for places, value in ((plus, 1.0), (minus, -1.0)):
            self._rows += [row] * len(places)
            self._columns += [int(place) for place in places]
            self._values += [value] * len(places)

    def _coefficients(self, name: str) -> np.ndarray:
        found = np.zeros(self.unknowns)
        for term, places in zip(self._terms, self._places, strict=True):
            if name in term.costs:
                # Levels of one class share an unknown, whose cost is added once.
                at, first = np.unique(places, return_index=True)
                found[at] += np.asarray(term.costs[name], "float64").ravel()[first]
        return found

    def choose(self, minimised: str | Sequence[str], bounds: Mapping[str, float]) -> Choice:
        """Returns the choice of least total of one cost within bounds of others.

        Args:
            minimised: Name of a cost; of several ones, the largest is minimised.
            bounds: Name of another cost -> its largest total.

        Raises:
            Unreachable: No choice meets the bounds.
            TimeoutError: No choice was found in a minute; after a minute with a choice, it is returned with its gap.
        """
        for less in (0.0, _FEASIBLE):
            found = self._solved(minimised, bounds, less)
            if found is None:
                break
            if all(found.totals[name] <= most * (1 + _ROUNDING) for name, most in bounds.items()):
                return found
        raise Unreachable(f"No choice meets the bounds. Received: {dict(bounds)}.")

    def _solved(self, minimised: str | Sequence[str], bounds: Mapping[str, float], less: float) -> Choice | None:
        """Returns the best choice within bounds, each smaller by a share; None if there is none."""
        from scipy.optimize import Bounds, LinearConstraint, milp
        from scipy.sparse import csr_array, vstack

        shape = (len(self._sides), self.unknowns)
        equal = csr_array((self._values, (self._rows, self._columns)), shape)
        constraints = [LinearConstraint(equal, self._sides, self._sides)]
        if bounds:
            rows = [self._coefficients(name) for name in bounds]
            # Bounds of all magnitudes, such as bytes and errors, are met to the same relative tolerance.
            scales = [max(abs(bound), 1e-30) for bound in bounds.values()]
            scaled = vstack([csr_array((row / scale)[None]) for row, scale in zip(rows, scales, strict=True)])
            limits = [bound / scale - less for bound, scale in zip(bounds.values(), scales, strict=True)]
            constraints.append(LinearConstraint(scaled, -np.inf, limits))
        binary, most = np.zeros(self.unknowns), np.ones(self.unknowns)
        binary[: self._starts[-1]] = 1
        if isinstance(minimised, str):
            goal = self._coefficients(minimised)
            goal = goal / (float(np.abs(goal).max()) or 1.0)
        else:
            # One more unknown, which no cost exceeds.
            several = np.stack([self._coefficients(name) for name in minimised])
            several = several / (float(np.abs(several).max()) or 1.0)
            constraints = [LinearConstraint(_widened(one.A), one.lb, one.ub) for one in constraints]
            bounded = csr_array(np.hstack([several, -np.ones((len(several), 1))]))
            constraints.append(LinearConstraint(bounded, -np.inf, 0))
            goal = np.append(np.zeros(self.unknowns), 1.0)
            binary, most = np.append(binary, 0), np.append(most, np.inf)
        options = {"mip_rel_gap": _GAP, "time_limit": _SECONDS}
        # HiGHS 1.12 prints a line of its own, asked for or not: https://github.com/ERGO-Code/HiGHS/issues/2783
        with hidden_output(STDOUT):
            found = milp(goal, integrality=binary, bounds=Bounds(0, most), constraints=constraints, options=options)
        if found.x is None:
            if found.status == 1:
                raise TimeoutError(f"No choice was found in {_SECONDS:g} seconds.")
            return None
        levels = tuple(int(found.x[self._of(variable)].argmax()) for variable in range(len(self._sizes)))
        return Choice(levels, totals(self._terms, levels), float(found.mip_gap or 0.0))
