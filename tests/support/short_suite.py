"""Which tests the short suite leaves out: those marked `thorough`, and further cases of large families."""

import collections
import math
from collections.abc import Sequence

# Cases of one test that the short suite runs on a backend other than TensorFlow.
ON_OTHER_BACKENDS = 1


def cover(cases: Sequence[Sequence[str]], at_most: float = math.inf) -> list[int]:
    """Places of the cases to keep: each value of each axis occurs, or as many values as `at_most` cases can have.

    Greedy, and always the same: the first case, then the case with the most values that no case before has.

    Args:
        cases: For each case, the name of its value on each axis, as `pytest.mark.parametrize` has axes.
        at_most: How many cases to keep; of more than that, cases evenly spread over the cover.
    """
    values = [set(enumerate(case)) for case in cases]
    missing = set().union(*values)
    kept: list[int] = []
    while missing:
        best = max(range(len(values)), key=lambda i: len(values[i] & missing))
        missing -= values[best]
        kept.append(best)
    kept = sorted(kept) or [0]
    if len(kept) > at_most:
        kept = [kept[math.floor(i * len(kept) / at_most)] for i in range(int(at_most))]
    return kept


def left_out(items: Sequence, backend: str) -> list:
    """The collected tests that the short suite on a backend leaves out, in their order."""
    families = collections.defaultdict(list)
    for item in items:
        families[item.nodeid.partition("[")[0]].append(item)
    gone = {id(item) for item in items if item.get_closest_marker("thorough")}
    for family in families.values():
        family = [item for item in family if id(item) not in gone]
        if family and _at_most(family[0], backend) == 0:
            gone |= set(map(id, family))
            continue
        if not family or not hasattr(family[0], "callspec"):
            continue
        # One name per axis: `callspec.id` is the same joined with dashes, which names may have themselves.
        kept = cover([item.callspec._idlist for item in family], _at_most(family[0], backend))
        gone |= {id(item) for i, item in enumerate(family) if i not in kept}
    return [item for item in items if id(item) in gone]


def _at_most(item, backend: str) -> float:
    short, everywhere = (item.get_closest_marker(name) for name in ("short", "every_backend"))
    most = short.kwargs["cases"] if short else math.inf
    if everywhere is None or backend == "tensorflow":
        return most
    return min(most, everywhere.kwargs.get("cases", ON_OTHER_BACKENDS))
