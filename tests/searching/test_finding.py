"""Which files a search makes and trains: those between an answer and the next bolder one, until one holds the drop."""

import math
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest

from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.searching.choice import Unreachable
from prunekit.searching.costs import Mixture
from prunekit.searching.finding import _SMALLER, FEWER, FEWER_TRAINED, TRAINED, Finder
from prunekit.searching.question import Made, Question
from prunekit.searching.time_limit import OutOfTime

pytestmark = [pytest.mark.one_backend, pytest.mark.short(cases=1)]


class Costs:
    """Mixtures of every error: the larger it is, the smaller is the file, by the techniques."""

    errors, counted, whole, techniques = (0.001, 1.0), ("bytes",), {"bytes": 1.0}, ()

    def __init__(self, size=100.0):
        self.size = size

    def least(self, goal, bounds):
        error = bounds.get("error", 1.0) if goal == "bytes" else self.size / bounds["bytes"]
        return Mixture({}, {str(self.size): round(1e9 * error)}, error, {"bytes": self.size / error}, 0)


def made(mixture, factors, *, is_trained=False):
    drops = tuple(factor * mixture.error for factor in factors)
    return Made(mixture, "a model", drops, mixture.error, round(mixture.costs["bytes"]), is_trained=is_trained)


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
    assert sum(one.is_trained for one in search.files.made) <= TRAINED


# Size of the files of some techniques -> drop for each unit of the error: 500 are far too large.
FACTORS = {"100.0": 10, "120.0": 3, "130.0": 9, "500.0": 0.1}


def of_some_techniques(mixture, *, is_trained=False):
    factor = FACTORS[next(iter(mixture.kept))] / (5 if is_trained else 1)
    return made(mixture, (factor, factor), is_trained=is_trained)


def techniques_of(one):
    return float(next(iter(one.mixture.kept)))


def with_fewer(train=None, question=None):
    fewer = [partial(Costs, float(size)) for size in FACTORS][1:]
    return Finder(question or Question(drop=0.05), Costs(), of_some_techniques, train, lambda *told: None, fewer=fewer)


def test_fewer_techniques_are_the_answer_where_they_lose_less_at_the_same_size():
    search = with_fewer()
    found = search.found()
    # All techniques have 20,000 bytes, 120 at most 7,200.
    assert techniques_of(found) == 120 and 7200 <= found.bytes < 10500
    sizes = [techniques_of(one) for one in search.files.made]
    assert len([one for one in sizes if one > 100]) <= FEWER and 500 not in sizes


@pytest.mark.thorough
def test_a_search_whose_time_ends_before_the_last_choice_is_not_complete():
    limit, asked = SimpleNamespace(left=math.inf), []

    def slow():
        asked.append(limit.left)
        limit.left = 0.0 if len(asked) == len(_SMALLER) else math.inf
        return Costs(500.0)

    search = with_fewer()
    search.files.limit, search._fewer = limit, [slow, partial(Costs, 120.0)]
    assert search.found().is_trained is False
    assert asked == [math.inf] * len(_SMALLER) and not search.files.is_complete


@pytest.mark.thorough
def test_fewer_techniques_are_trained_too():
    search = with_fewer(lambda before: of_some_techniques(before.mixture, is_trained=True))
    found = search.found()
    assert found.is_trained and techniques_of(found) == 120
    trained = [techniques_of(one) for one in search.files.made if one.is_trained]
    assert len([one for one in trained if one > 100]) <= FEWER_TRAINED and len(trained) <= TRAINED + FEWER_TRAINED


@pytest.mark.thorough
def test_within_bytes_the_techniques_that_lose_least_are_the_answer():
    found = with_fewer(question=Question(bytes=20000)).found()
    assert techniques_of(found) == 120 and found.bytes <= 20000


class Folder:
    """Files that were made, kept without their models."""

    def __init__(self):
        self.known, self.begun = [], 0

    def finder(self, drop, costs=None, **options):
        told = lambda *told: None  # noqa: E731
        return Finder(Question(drop=drop), costs or Costs(), self.make, None, told, known=self.known, **options)

    def make(self, mixture):
        self.begun += 1
        if self.begun > 100:
            raise AssertionError("It does not end.")
        return made(mixture, (10, 10))

    def search(self, drop, **options):
        search = self.finder(drop, **options)
        found = search.found()
        self.known = [replace(one, built=None) for one in search.files.made]
        return found


def test_files_of_earlier_questions_leave_no_gap_before_the_answer():
    # The examples for the choice allow a larger error than those that judge.
    make = lambda mixture: made(mixture, (8, 10))  # noqa: E731
    fresh, folder = Folder(), Folder()
    fresh.make = folder.make = make
    expected = fresh.search(0.2)
    for number, drop in enumerate((0.02, 0.05, 0.1)):
        folder.search(drop, answered=(0.02, 0.05)[:number])
    assert len(folder.known) >= 9
    found = folder.search(0.2, answered=(0.02, 0.05, 0.1))
    assert found.bytes < 1.06 * expected.bytes


@pytest.mark.thorough
def test_a_known_file_without_any_error_is_where_a_search_begins():
    class Free(Costs):
        errors = (0.0, 1.0)

    folder = Folder()
    free = Mixture({}, {"100.0": 0}, 0.0, {"bytes": 1e6}, 0)
    for known in (
        [made(free, (10, 10))],
        [made(free, (10, 10)), made(Costs().least("bytes", {"error": 0.1}), (10, 10))],
    ):
        folder.known = [replace(one, built=None) for one in known]
        search = folder.finder(0.05, costs=Free(), answered=(0.0,))
        assert 0.004 <= search.found().mixture.error <= 0.005


class Failing:
    """Writes no file, or trains none."""

    def __init__(self, error):
        self.error = error

    def __call__(self, *arguments):
        raise self.error


@pytest.mark.thorough
def test_within_bytes_a_file_that_cannot_be_made_ends_nothing():
    search = finder((2, 2), Question(bytes=20000))
    search.files.train = Failing(FloatingPointError("It diverges."))
    found = search.found()
    assert not found.is_trained and search.files.notes == ["A file was not made: It diverges."]
    search = finder((2, 2), Question(bytes=20000))
    search.files.make = Failing(IntegerExportError("It differs."))
    with pytest.raises(ValueError, match="No file could be made. Received: bytes=20,000. A file was not made: It diff"):
        search.found()


@pytest.mark.thorough
def test_within_bytes_the_next_smaller_file_is_made_where_one_cannot_be():
    search, asked = finder((2, 2), Question(bytes=20000)), []

    def failing_first(mixture):
        asked.append(mixture)
        if len(asked) == 1:
            raise IntegerExportError("It differs.")
        return made(mixture, (10, 10))

    search.files.make, search.files.train = failing_first, None
    assert 19000 < search.found().bytes <= 20000 and search.files.notes == ["A file was not made: It differs."]


class Bounded(Costs):
    """Mixtures that are no smaller than their error says."""

    def least(self, goal, bounds):
        if 100 / bounds.get("error", 1.0) > bounds.get("bytes", math.inf):
            raise Unreachable("No choice meets the bounds.")
        return super().least(goal, bounds)


@pytest.mark.thorough
def test_a_known_file_that_holds_the_drop_and_has_too_many_bytes_is_no_failure():
    make = lambda mixture: made(mixture, (0.1, 0.1))  # noqa: E731
    # 1,250 and 719 bytes.
    known = [replace(make(Costs().least("bytes", {"error": error})), built=None) for error in (0.08, 0.139)]
    question = Question(drop=0.012, bytes=1220)
    search = Finder(question, Bounded(), make, None, lambda *told: None, known=known, answered=(0.02,))
    assert 0.0819 <= search.found().mixture.error <= 0.12


@pytest.mark.thorough
def test_after_the_time_the_file_of_least_error_within_the_other_bounds_is_made():
    make = lambda mixture: made(mixture, (10, 10))  # noqa: E731
    limit = SimpleNamespace(left=0.0)
    search = Finder(Question(drop=0.05, bytes=25000), Bounded(), make, None, lambda *told: None, limit)
    found = search.found()
    assert found.mixture.error == pytest.approx(0.004) and len(search.files.made) == 1


@pytest.mark.thorough
def test_after_the_time_no_training_is_begun_where_every_mixture_holds_the_drop():
    search, limit, begun = finder((2, 2), Question(drop=100.0)), SimpleNamespace(left=math.inf), []

    def last(mixture):
        limit.left = 0.0
        return made(mixture, (10, 10))

    search.files.make, search.files.limit = last, limit
    search.files.train = lambda before: begun.append(before) or before
    assert search.found().mixture.error == 1.0 and not begun


@pytest.mark.thorough
def test_a_trained_file_without_its_model_is_trained_again_and_one_that_fails_is_forgotten():
    files = finder((2, 2)).files
    trained = files.file_of(Costs().least("bytes", {"error": 0.01}), trains=True)
    trained.built = None
    files.make_again(trained)
    (again,) = [one for one in files.made if one.is_trained]
    assert again.built is not None and again is not trained
    files.make, files.known = Failing(IntegerExportError("It differs.")), [again]
    files.make_again(again)
    assert again not in files.made and again not in files.known and files.notes == ["A file was not made: It differs."]


def test_another_drop_begins_between_the_files_that_are_known():
    folder = Folder()
    first = folder.search(0.05)
    before, folder.begun = folder.begun, 0
    second = folder.search(0.08, answered=(0.05,))
    # Without them, the search begins with an error of 0.32.
    assert 0.0066 <= second.mixture.error <= 0.008 and folder.begun < before and second.built is not None
    assert second.bytes < first.bytes


@pytest.mark.thorough
def test_the_same_question_makes_one_file_again():
    folder = Folder()
    first = folder.search(0.05)
    folder.begun = 0
    again = folder.search(0.05, answered=(0.05,))
    assert folder.begun == 1 and again.built is not None and again.bytes == first.bytes


@pytest.mark.thorough
def test_an_interrupted_search_makes_the_files_that_lack():
    whole, folder = Folder(), Folder()
    expected = whole.search(0.05)
    folder.known = whole.known[:3]
    found = folder.search(0.05)
    sizes = [{one.bytes for one in each.known} for each in (whole, folder)]
    assert found.bytes == expected.bytes and sizes[0] == sizes[1]
    assert folder.begun <= whole.begun - 2


@pytest.mark.thorough
def test_where_training_helps_nothing_the_file_before_is_the_answer():
    search = finder((20, 20))
    found = search.found()
    assert not found.is_trained and 0.0045 <= found.mixture.error <= 0.005
    assert 0 < sum(one.is_trained for one in search.files.made) <= 4


@pytest.mark.thorough
def test_after_a_training_that_would_take_too_long_none_is_begun():
    search, begun = finder((2, 2)), []
    search.files.train = lambda before: (
        begun.append(before) or (_ for _ in ()).throw(OutOfTime("It takes an hour.", 1e9))
    )
    search.files.limit = type("Limit", (), {"left": 3600.0})()
    found = search.found()
    assert len(begun) == 1 and not found.is_trained and search.files.notes == ["It takes an hour."]
