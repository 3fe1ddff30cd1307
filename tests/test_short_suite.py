"""The selection of the short suite: what it leaves out of the collected tests."""

import itertools
import types
from collections import Counter

import keras
import pytest
from short_suite import ON_OTHER_BACKENDS, cover, left_out

GRID = list(itertools.product("abc", "xy", ["one", "two"]))


def test_each_value_of_each_axis_occurs_in_as_few_cases_as_the_longest_axis_has_values():
    kept = [GRID[i] for i in cover(GRID)]
    assert [set(axis) for axis in zip(*kept, strict=True)] == [set("abc"), set("xy"), {"one", "two"}]
    assert len(kept) == 3 and kept[0] == GRID[0]


def test_the_cases_of_a_single_axis_are_all_kept():
    assert cover([(name,) for name in "abcdef"]) == [0, 1, 2, 3, 4, 5]


def test_fewer_cases_are_spread_over_the_cover():
    assert cover([(name,) for name in "abcdef"], at_most=3) == [0, 2, 4]
    assert cover([(name,) for name in "ab"], at_most=3) == [0, 1]
    assert cover([()]) == [0]


def item(name, case=None, **marks):
    """What a collected test shows of itself."""
    found = {mark: types.SimpleNamespace(kwargs=kwargs) for mark, kwargs in marks.items()}
    test = types.SimpleNamespace(nodeid=name, get_closest_marker=found.get)
    if case is not None:
        test.nodeid, test.callspec = f"{name}[{'-'.join(case)}]", types.SimpleNamespace(_idlist=list(case))
    return test


def test_tests_marked_thorough_and_further_cases_are_left_out():
    alone, slow = item("alone"), item("slow", thorough={})
    family = [item("grid", case) for case in GRID]
    gone = left_out([alone, slow, *family], "tensorflow")
    assert slow in gone and alone not in gone and family[0] not in gone
    assert len(gone) == 1 + len(GRID) - 3


def test_the_values_of_a_case_marked_thorough_are_kept_in_other_cases():
    family = [item("grid", case, **({"thorough": {}} if case[0] == "a" else {})) for case in GRID]
    kept = [GRID[family.index(one)] for one in family if one not in left_out(family, "tensorflow")]
    assert {case[0] for case in kept} == {"b", "c"} and {case[1] for case in kept} == {"x", "y"}


def test_a_mark_limits_the_cases_of_a_test():
    family = [item("family", name, short={"cases": 3}, every_backend={"cases": 4}) for name in "abcdefgh"]
    assert [len(left_out(family, backend)) for backend in ("tensorflow", "jax")] == [5, 5]


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_other_backends_run_fewer_cases_as_the_mark_says(backend):
    usual = [item("usual", name, every_backend={}) for name in "abcdefgh"]
    more = [item("more", name, every_backend={"cases": 5}) for name in "abcdefgh"]
    assert len(left_out(usual, backend)) == 8 - ON_OTHER_BACKENDS
    assert len(left_out(more, backend)) == 3
    assert left_out([*usual, *more], "tensorflow") == []


@pytest.mark.parametrize(
    "alone", [item("alone", every_backend={"cases": 0}), item("one", "a", every_backend={"cases": 0})]
)
def test_a_test_of_no_cases_elsewhere_runs_on_tensorflow_only(alone):
    assert [len(left_out([alone], backend)) for backend in ("tensorflow", "jax", "torch")] == [0, 1, 1]


# A file of the short suite has at most so many cases on TensorFlow, and all files together so many; arithmetic of a
# hundredth of a second a case may have more.
MOST_OF_A_FILE, MOST = 150, 10_300
OF_ARITHMETIC = {
    "sparsity/test_schedules.py": 700,
    "sparsity/test_patterns.py": 500,
    "sparsity/test_scores.py": 200,
    "anatomy/test_layers.py": 200,
    "test_bad_arguments.py": 250,
}


def test_no_file_outgrows_its_share_of_the_short_suite(request):
    items = request.session.items
    if not request.config.getoption("--short") or keras.backend.backend() != "tensorflow":
        pytest.skip("counts the cases of the short suite on TensorFlow")
    tests = request.config.rootpath / "tests"
    counts = Counter(item.path.relative_to(tests).as_posix() for item in items if item.path.is_relative_to(tests))
    large = {name: count for name, count in counts.items() if count > OF_ARITHMETIC.get(name, MOST_OF_A_FILE)}
    assert not large, "mark cases `thorough` or `short(cases=...)`: a test must justify its second second"
    assert len(items) <= MOST
