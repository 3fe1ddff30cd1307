"""Converts schedules of tensorflow-model-optimization, which it recognises by name without importing the package."""

from numbers import Integral
from typing import Any

from prunekit.sparsity.schedules import ConstantSparsity, MultiStep, PolynomialDecay, Schedule

_THEIRS = "tensorflow_model_optimization."
_MOST_CALLS = 10_000
_REMEDY = "Write it as pk.schedules.MultiStep or as a subclass of prunekit.sparsity.schedules.Schedule."


def adopted(schedule: Any) -> Any:
    """Returns a `Schedule` for a schedule of tensorflow-model-optimization, and any other value unchanged.

    `PolynomialDecay` and `ConstantSparsity` become prunekit schedules with the same numbers: steps are optimizer
    updates, and the sparsity reaches its final value. A user's class with `begin_step`, `end_step` and `frequency` is
    called immediately at each of its update steps and becomes a `MultiStep`.

    Raises:
        ValueError: The schedule has numbers that no prunekit schedule can have, such as a decreasing sparsity.
    """
    names = [base.__name__ for base in type(schedule).__mro__ if base.__module__.startswith(_THEIRS)]
    if "PruningSchedule" not in names:
        return schedule
    own_class = not type(schedule).__module__.startswith(_THEIRS)
    if own_class:
        return _tabulated(schedule)
    if names[0] == "ConstantSparsity":
        return ConstantSparsity(**_numbers(schedule, "target_sparsity", "begin_step", "end_step", "frequency"))
    if names[0] == "PolynomialDecay":
        ours = ("initial_sparsity", "final_sparsity", "power", "begin_step", "end_step", "frequency")
        return PolynomialDecay(**_numbers(schedule, *ours))
    raise _refused(schedule, "a class that prunekit does not know")


def _numbers(schedule: Any, *names: str) -> dict[str, Any]:
    return {name: getattr(schedule, name) for name in names}


def _tabulated(schedule: Any) -> Schedule:
    found = [getattr(schedule, name, None) for name in ("begin_step", "end_step", "frequency")]
    begin, end, frequency = (int(number) if isinstance(number, Integral) else -1 for number in found)
    if not all(isinstance(number, Integral) for number in found):
        raise _refused(schedule, "no begin_step, end_step and frequency")
    if frequency < 1 or not 0 <= begin <= end:
        raise _refused(schedule, f"begin_step={begin}, end_step={end}, frequency={frequency}, which never ends")
    if (end - begin) // frequency >= _MOST_CALLS:
        raise _refused(schedule, f"more than {_MOST_CALLS:,} update steps")
    pairs: list[tuple[int, float]] = []
    for step in range(begin, end + 1, frequency):
        due, sparsity = (float(value) for value in schedule(step))
        # The schedule returns single precision, in which 0.8 is 0.800000011920929.
        sparsity = round(sparsity, 7)
        reached = pairs[-1][1] if pairs else 0.0
        if due and sparsity < reached:
            raise _refused(schedule, f"a sparsity that falls, from {reached:g} to {sparsity:g} at step {step}")
        if due and sparsity > reached:
            pairs.append((step, sparsity))
    if not pairs:
        raise _refused(schedule, "no step at which it prunes")
    return MultiStep(tuple(pairs))


def _refused(schedule: Any, received: str) -> ValueError:
    return ValueError(
        "A custom schedule of tensorflow-model-optimization is evaluated at begin_step, "
        f"begin_step + frequency, ... end_step. Received: {type(schedule).__name__} with {received}. {_REMEDY}"
    )
