"""What there is time for: the most valuable first, judged by the pace so far."""

import math
from types import SimpleNamespace

import pytest

from prunekit.searching import time_limit
from prunekit.searching.time_limit import Pace, TimeLimit

pytestmark = [pytest.mark.one_backend, pytest.mark.short(cases=1)]


@pytest.fixture
def clock(monkeypatch):
    found = SimpleNamespace(now=100.0)
    monkeypatch.setattr(time_limit, "time", SimpleNamespace(time=lambda: found.now))
    return found


@pytest.mark.thorough
def test_a_share_ends_before_the_whole(clock):
    limit = TimeLimit.after(60)
    assert (limit.left, limit.share(0.5).left, TimeLimit().share(0.5).left) == (60, 30, math.inf)
    clock.now += 100
    assert limit.left == 0


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        # Ten seconds for a unit of cost.
        (70, "ad"),
        (1000, "abcd"),
        (100, "abcd"),
        (90, "acd"),
        (60, "ad"),
        (5, "d"),
    ],
)
def test_the_most_valuable_measurements_are_made(clock, seconds, expected):
    costs, values = {"a": 3.0, "b": 1.0, "c": 3.0, "d": 3.0}, {"a": 3, "b": 1, "c": 2, "d": 4}
    pace, made = Pace(TimeLimit.after(seconds), costs, values), ""
    for name in costs:
        if pace.has_time_for(name):
            made += name
            clock.now += 10 * costs[name]
        pace.note_finished(name, made=name in made)
    # Nothing is known of the pace before the first one, which is begun if any time is left.
    assert made == (expected if expected.startswith("a") else "a" + expected)


@pytest.mark.thorough
def test_nothing_but_the_most_valuable_is_made_when_the_time_is_over(clock):
    limit = TimeLimit.after(1)
    clock.now += 2
    pace = Pace(limit, {"a": 1.0, "b": 1.0}, {"a": 1, "b": 2})
    assert [pace.has_time_for(name) for name in "ab"] == [False, True]
