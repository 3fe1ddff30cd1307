"""How much the errors of each technique count, as files had them; and the choice that is made again with that."""

import dataclasses
import math

import numpy as np
import pytest

from prunekit.searching.choice import Term, choose
from prunekit.searching.costs import Mixture
from prunekit.searching.error_scales import error_scales
from prunekit.searching.finding import Finder, Made, Question

pytestmark = [pytest.mark.one_backend, pytest.mark.short(cases=1)]

PARTS = [{"prune": a, "shrink": b} for a, b in [(4.0, 1.0), (3.0, 3.0), (1.0, 2.0), (5.0, 2.0), (2.0, 3.0)]]


def test_the_scales_are_those_of_the_ridge_regression():
    truth = {"prune": 2.4, "shrink": 1.1}
    measured = [sum(truth[name] * error for name, error in errors.items()) for errors in PARTS]
    found = error_scales(PARTS, measured)
    # The same in plain NumPy: normal equations, with the mean ratio as the unit.
    parts, wanted = np.array([[one["prune"], one["shrink"]] for one in PARTS]), np.array(measured)
    mean = np.exp(np.log(wanted / parts.sum(1)).mean())
    shares = mean * parts / wanted[:, None]
    expected = np.linalg.solve(shares.T @ shares + 0.01 * np.eye(2), shares.sum(0) + 0.01)
    assert list(found) == ["prune", "shrink"]
    np.testing.assert_allclose(list(found.values()), expected, rtol=1e-6)
    assert found["prune"] / found["shrink"] == pytest.approx(2.4 / 1.1, rel=0.1)


@pytest.mark.parametrize(
    ("predicted", "measured"),
    [
        (PARTS, [1.9 * sum(one.values()) for one in PARTS]),
        (PARTS[:3], [1.0, 9.0, 2.0]),
        ([{"prune": one} for one in (1.0, 2.0, 3.0, 4.0)], [1.0, 4.0, 9.0, 16.0]),
        ([*PARTS[:3], {"prune": 0.0}], [5.0, 12.0, 3.0, 0.0]),
        ([], []),
    ],
    ids=["well predicted", "too few files", "one technique", "a file without an error", "nothing"],
)
def test_the_table_counts_as_it_is(predicted, measured):
    assert error_scales(predicted, measured) == {}


@pytest.mark.thorough
def test_scales_are_bounded():
    found = error_scales(PARTS, [9 * one["prune"] for one in PARTS])
    assert found["shrink"] == pytest.approx(1 / 3)
    assert 1 < found["prune"] <= 3


class Costs:
    """Ten weights with zeros and ten groups, whose bytes fall alike with their errors; see `prunekit...Costs`."""

    counted = ("bytes",)
    levels = np.arange(5.0)
    # The more error is allowed, the less of it is that of zeros.
    table = {"prune": 0.2 * levels**4, "shrink": levels**2}  # noqa: RUF012

    def __init__(self, scales):
        self.scales = scales
        self.names = ["prune"] * 10 + ["shrink"] * 10
        factors = [self.scales.get(name, 1.0) for name in self.names]
        self.terms = [
            Term((i,), {"error": factors[i] * self.table[name], "bytes": 100 - (10 + i % 3) * self.levels})
            for i, name in enumerate(self.names)
        ]
        self.errors = (0.0, sum(float(term.costs["error"].max()) for term in self.terms))

    def least(self, name, bounds):
        found = choose([5] * 20, self.terms, name, bounds)
        errors = {"prune": 0.0, "shrink": 0.0}
        for technique, level in zip(self.names, found.levels, strict=True):
            errors[technique] += float(self.table[technique][level])
        levels = dict(enumerate(found.levels))
        return Mixture(levels, {}, errors, found.totals["error"], {"bytes": found.totals["bytes"]}, 0.0)

    def error_of(self, mixture):
        return sum(self.scales.get(name, 1.0) * error for name, error in mixture.errors.items())


def made(mixture):
    """In files, zeros cost five times as much as in the table, and more the more of them there are."""
    error = 5 * mixture.errors["prune"] + mixture.errors["shrink"]
    return Made(mixture, None, (error / 10, error / 10), error, round(mixture.costs["bytes"]))


@dataclasses.dataclass
class Found:
    """What a search of the costs above found."""

    finder: Finder
    answer: Made


def search(costs_of):
    finder = Finder(Question(drop=25.0), costs_of, made, None, lambda *told: None)
    return Found(finder, finder.found())


def test_the_choice_is_made_again_with_the_errors_that_files_had():
    again, once = search(Costs), search(lambda scales: Costs({}))
    assert again.answer.drops[1] <= 25
    assert again.answer.bytes < once.answer.bytes
    note = next(note for note in again.finder.notes if note.startswith("Errors count as "))
    assert (
        note
        == f"Errors count as {note.split()[3]} files had them: prune {again.finder.costs.scales['prune']:.2f}, "
        + (f"shrink {again.finder.costs.scales['shrink']:.2f}.")
    )
    # The exact answer, by the true errors.
    best = choose([5] * 20, Costs({"prune": 5.0}).terms, "bytes", {"error": 250.0})
    assert math.isclose(again.answer.bytes, best.totals["bytes"], rel_tol=0.05)


@pytest.mark.thorough
def test_nothing_is_made_again_where_the_table_is_right():
    finder = Finder(
        Question(drop=25.0), Costs, lambda mixture: dataclasses.replace(made(mixture), error=mixture.error), None, print
    )
    finder.found()
    assert (finder.costs.scales, finder.notes) == ({}, [])
