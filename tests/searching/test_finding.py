"""Which files a search makes and trains: those between an answer and the next bolder one, until one holds the drop."""

import pytest

from prunekit.searching.costs import Mixture
from prunekit.searching.finding import TRAINED, Finder, Made, Question
from prunekit.searching.time_limit import OutOfTime

pytestmark = [pytest.mark.one_backend, pytest.mark.short(cases=1)]


class Costs:
    """Mixtures of every error: the larger it is, the smaller is the file."""

    errors, counted, whole = (0.001, 1.0), ("bytes",), {"bytes": 1.0}

    def least(self, goal, bounds):
        return Mixture(
            {}, {"group": round(1e9 * bounds["error"])}, bounds["error"], {"bytes": 100 / bounds["error"]}, 0
        )


def made(mixture, factors, *, is_trained=False):
    drops = tuple(factor * mixture.error for factor in factors)
    return Made(mixture, None, drops, mixture.error, round(mixture.costs["bytes"]), is_trained=is_trained)


def finder(trained, question=None):
    """A search whose untrained files hold a drop of 0.05 up to an error of 0.005, and others after a training."""
    return Finder(
        question or Question(drop=0.05),
        Costs(),
        lambda mixture: made(mixture, (10, 10)),
        lambda before: made(before.mixture, trained, is_trained=True),
        lambda *told: None,
    )


@pytest.mark.parametrize(("judging", "least"), [(2.8, 0.0165), (2.5, 0.019), (4.0, 0.008)])
def test_mixtures_between_the_answer_and_one_that_the_choice_alone_liked_are_trained(judging, least):
    # The examples for the choice allow an error of 0.025 after a training, those that judge 0.05 / judging.
    search = finder((2.0, judging))
    found = search.found()
    assert found.is_trained and least <= found.mixture.error <= 0.05 / judging
    assert sum(one.is_trained for one in search.made) <= TRAINED


@pytest.mark.thorough
def test_where_training_helps_nothing_the_file_before_is_the_answer():
    search = finder((20, 20))
    found = search.found()
    assert not found.is_trained and 0.0045 <= found.mixture.error <= 0.005
    assert 0 < sum(one.is_trained for one in search.made) <= 4


def test_after_a_training_that_would_take_too_long_none_is_begun():
    search, begun = finder((2, 2)), []
    search.train = lambda before: begun.append(before) or (_ for _ in ()).throw(OutOfTime("It takes an hour.", 1e9))
    search.limit = type("Limit", (), {"left": 3600.0})()
    found = search.found()
    assert len(begun) == 1 and not found.is_trained and search.notes == ["It takes an hour."]
