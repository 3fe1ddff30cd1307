"""Every schedule goes through the same battery; what only one of them promises comes after it."""

import dataclasses
import json
import math
import pickle
import subprocess
import sys

import numpy as np
import pytest

from prunekit.sparsity.schedules import (
    SCHEDULES,
    ConstantSparsity,
    CosineDecay,
    ExponentialDecay,
    LinearDecay,
    MultiStep,
    OneShot,
    PolynomialDecay,
    Schedule,
    as_schedule,
)

DECAYS = [PolynomialDecay, LinearDecay, CosineDecay, ExponentialDecay]
RANGES = [
    dict(initial_sparsity=0.0, final_sparsity=0.8, begin_step=100, end_step=200, frequency=30),
    dict(initial_sparsity=0.1, final_sparsity=0.95, begin_step=0, end_step=1000, frequency=100),
    dict(initial_sparsity=0.3, final_sparsity=0.7, begin_step=7, end_step=8, frequency=1),
    dict(initial_sparsity=0.1, final_sparsity=0.7, begin_step=3, end_step=40, frequency=1000),
    dict(initial_sparsity=0.2, final_sparsity=0.999999, begin_step=1, end_step=997, frequency=13),
    dict(initial_sparsity=0.5, final_sparsity=math.nextafter(0.5, 1), begin_step=0, end_step=50, frequency=7),
    dict(initial_sparsity=0.6, final_sparsity=0.6, begin_step=5, end_step=50, frequency=7),
    dict(initial_sparsity=0.2, final_sparsity=0.6, begin_step=9, end_step=9, frequency=7),
    dict(initial_sparsity=0.0, final_sparsity=0.0, begin_step=0, end_step=10, frequency=3),
]
FAMILY = (
    [decay(**arguments) for decay in DECAYS for arguments in RANGES]
    + [PolynomialDecay(power=power, end_step=300, frequency=7) for power in (0.5, 1, 2.5, 40)]
    + [decay().fitted(1000) for decay in SCHEDULES.values()]
    + [
        ConstantSparsity(0.5, begin_step=3, end_step=50, frequency=7),
        ConstantSparsity(0.0, begin_step=0, end_step=0),
        ConstantSparsity(0.9, begin_step=11, end_step=-1, frequency=13),
        OneShot(0.75, step=17),
        OneShot(0.0, step=0),
        MultiStep(((0, 0.1),)),
        MultiStep(((5, 0.0), (6, 0.2), (100, 0.9))),
    ]
)


def horizon(schedule: Schedule) -> int:
    return schedule.final_step + 2 * schedule.frequency + 50


@pytest.fixture(params=FAMILY, ids=repr)
def schedule(request) -> Schedule:
    return request.param


def test_every_schedule_of_the_module_is_in_the_table():
    concrete, waiting = set(), [Schedule]
    while waiting:
        waiting += (children := waiting.pop().__subclasses__())
        # What other modules derive for themselves is in memory or not, whichever tests ran before.
        ours = [child for child in children if child.__module__ == Schedule.__module__]
        concrete |= {child for child in ours if not child.__name__.startswith("_")}
    assert set(SCHEDULES.values()) == concrete
    assert {type(schedule) for schedule in FAMILY} == concrete


def test_an_update_comes_at_the_landing_step_whatever_the_frequency(schedule):
    steps = schedule.update_steps(horizon(schedule))
    assert schedule.final_step in steps
    assert schedule(schedule.final_step) == schedule.final_sparsity
    assert schedule(steps[-1]) == schedule.final_sparsity


def test_the_landing_step_is_the_first_with_the_final_sparsity(schedule):
    before = range(schedule.begin_step, schedule.final_step)
    # A double cannot tell the end of a flat curve from its neighbour; the promise then is "not above".
    if schedule.final_sparsity - schedule(schedule.begin_step) > 1e-6 and getattr(schedule, "power", 1) < 10:
        assert all(schedule(step) < schedule.final_sparsity for step in before)
    assert all(schedule(step) <= schedule.final_sparsity for step in before)


def test_sparsity_is_zero_before_begin_final_from_landing_and_never_falls(schedule):
    values = [schedule(step) for step in range(horizon(schedule))]
    assert all(type(value) is float and 0.0 <= value < 1.0 for value in values)
    assert values[: schedule.begin_step] == [0.0] * schedule.begin_step
    assert set(values[schedule.final_step :]) == {schedule.final_sparsity}
    assert values == sorted(values)
    assert schedule(10**12) == schedule.final_sparsity
    assert schedule(-1) == 0.0


def test_update_steps_rise_start_at_begin_and_stay_within_the_training(schedule):
    final = schedule.final_step
    for steps in [0, 1, schedule.begin_step, max(final - 1, 0), final, horizon(schedule)]:
        updates = schedule.update_steps(steps)
        assert all(type(step) is int for step in updates)
        assert updates == sorted(set(updates))
        assert all(schedule.begin_step <= step <= steps for step in updates)
        assert (updates[:1] == [schedule.begin_step]) == (steps >= schedule.begin_step)


def test_update_steps_of_a_short_training_begin_those_of_a_long_one(schedule):
    whole = schedule.update_steps(horizon(schedule))
    for steps in range(0, horizon(schedule), 1 + horizon(schedule) // 40):
        assert schedule.update_steps(steps) == [step for step in whole if step <= steps]


def test_updates_are_frequency_apart_except_for_the_last(schedule):
    if isinstance(schedule, MultiStep):
        return
    distances = np.diff(schedule.update_steps(horizon(schedule)))
    assert set(distances[:-1].tolist()) <= {schedule.frequency}
    assert all(distance <= schedule.frequency for distance in distances)


def test_latest_update_is_the_largest_update_step_not_after_the_step(schedule):
    updates = schedule.update_steps(horizon(schedule))
    for step in range(horizon(schedule)):
        expected = max((update for update in updates if update <= step), default=None)
        assert schedule.latest_update(step) == expected
    assert schedule.latest_update(-1) is None


def test_latest_update_and_sparsity_take_numpy_integers_and_refuse_fractions(schedule):
    assert schedule.latest_update(np.int64(schedule.final_step)) is not None
    assert schedule(np.int32(schedule.final_step)) == schedule.final_sparsity
    with pytest.raises(TypeError):
        schedule(2.5)
    with pytest.raises(TypeError):
        schedule.latest_update(float("nan"))


@pytest.mark.parametrize(("steps", "error"), [(-1, ValueError), (True, TypeError), ("9", TypeError), (9.0, TypeError)])
def test_a_number_of_steps_that_is_none_is_refused(schedule, steps, error):
    with pytest.raises(error, match="steps must be .* Received: steps="):
        schedule.update_steps(steps)


def test_a_schedule_is_frozen_hashable_comparable_and_survives_a_round_trip(schedule):
    assert hash(schedule) == hash(dataclasses.replace(schedule))
    assert schedule == dataclasses.replace(schedule) == pickle.loads(pickle.dumps(schedule))
    with pytest.raises(dataclasses.FrozenInstanceError):
        schedule.frequency = 3
    stored = json.loads(json.dumps(dataclasses.asdict(schedule)))
    assert type(schedule)(**stored) == schedule


def test_schedules_of_different_types_are_not_equal():
    assert len({LinearDecay(), CosineDecay(), ExponentialDecay(), PolynomialDecay(power=1)}) == 4


def test_every_schedule_has_a_docstring_with_its_source():
    assert all("Source:" in schedule.__doc__ for schedule in SCHEDULES.values())


# Arguments -----------------------------------------------------------------------------------------------------------

FRACTIONS = [("initial_sparsity", decay) for decay in DECAYS] + [("final_sparsity", decay) for decay in DECAYS]
FRACTIONS += [("target_sparsity", ConstantSparsity), ("sparsity", OneShot)]
STEPS = [(name, decay) for decay in DECAYS for name in ("begin_step", "end_step", "frequency")]
STEPS += [(name, ConstantSparsity) for name in ("begin_step", "end_step", "frequency")] + [("step", OneShot)]
BAD_KINDS = [True, False, "0.5", None, [0.5], 1j]


@pytest.mark.parametrize(("name", "build"), FRACTIONS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -0.1, 1.0, 1, 80, np.float32("nan")])
def test_a_sparsity_outside_zero_to_one_is_refused(name, build, value):
    with pytest.raises(ValueError, match=rf"{name} must be a fraction removed, in \[0, 1\). Received: {name}="):
        build(**{name: value})


@pytest.mark.parametrize(("name", "build"), FRACTIONS)
@pytest.mark.parametrize("value", BAD_KINDS, ids=repr)
def test_a_sparsity_that_is_no_number_is_refused(name, build, value):
    with pytest.raises(TypeError, match=f"{name} must be .* Received: {name}=.* of type {type(value).__name__}"):
        build(**{name: value})


def test_a_percentage_is_refused_with_the_fraction_it_means():
    with pytest.raises(ValueError, match=r"For 80 %, pass 0.8\."):
        OneShot(80)


@pytest.mark.parametrize(("name", "build"), STEPS)
@pytest.mark.parametrize("value", [*BAD_KINDS, 100.0, float("nan")], ids=repr)
def test_a_step_that_is_no_int_is_refused(name, build, value):
    if value is None and getattr(build(), name) is None:
        assert build(**{name: value}).is_open
        return
    with pytest.raises(TypeError, match=f"{name} must be an int.* Received: {name}="):
        build(**{name: value})


@pytest.mark.parametrize(("name", "build"), STEPS)
def test_a_negative_step_is_refused(name, build):
    with pytest.raises(ValueError, match=f"{name} must be at least .* Received: {name}=-2"):
        build(**{name: -2})


@pytest.mark.parametrize("build", [*DECAYS, ConstantSparsity])
def test_a_frequency_of_zero_and_an_end_before_the_beginning_are_refused(build):
    with pytest.raises(ValueError, match="frequency must be at least 1. Received: frequency=0"):
        build(frequency=0)
    with pytest.raises(ValueError, match="begin_step <= end_step. Received: begin_step=10, end_step=9"):
        build(begin_step=10, end_step=9)


@pytest.mark.parametrize("build", DECAYS)
def test_a_decay_without_end_or_with_falling_sparsity_is_refused(build):
    with pytest.raises(ValueError, match="end_step must be at least 0"):
        build(end_step=-1)
    with pytest.raises(ValueError, match="never restores pruned weights.*initial_sparsity=0.8, final_sparsity=0.5"):
        build(initial_sparsity=0.8, final_sparsity=0.5)


@pytest.mark.parametrize("power", [0, -1, float("nan"), float("inf")])
def test_a_power_that_is_not_above_zero_is_refused(power):
    with pytest.raises(ValueError, match="power must be a finite number above 0. Received: power="):
        PolynomialDecay(power=power)


@pytest.mark.parametrize("power", [True, "3", None])
def test_a_power_that_is_no_number_is_refused(power):
    with pytest.raises(TypeError, match="power must be a number above 0. Received: power="):
        PolynomialDecay(power=power)


def test_numpy_scalars_are_kept_as_plain_numbers():
    steps_per_epoch = np.ceil(1437 / 64).astype(np.int32)
    schedule = PolynomialDecay(np.float64(0.1), np.float64(0.8), np.int64(0), steps_per_epoch * 4, np.int64(3))
    assert schedule == PolynomialDecay(0.1, 0.8, 0, 92)
    assert {type(value) for value in dataclasses.asdict(schedule).values()} == {int, float}


@pytest.mark.parametrize("schedule_type", SCHEDULES.values())
def test_an_unknown_argument_is_refused(schedule_type):
    with pytest.raises(TypeError, match="power_of_two"):
        schedule_type(power_of_two=3)


# One by one ----------------------------------------------------------------------------------------------------------


def test_polynomial_decay_gives_the_values_of_tensorflow_model_optimization_and_lands():
    schedule = PolynomialDecay(0.0, 0.8, 100, 200, 3, 30)
    assert schedule.update_steps(500) == [100, 130, 160, 190, 200]
    assert [schedule(step) for step in schedule.update_steps(500)] == pytest.approx([0, 0.5256, 0.7488, 0.7992, 0.8])
    assert PolynomialDecay(0.2, 0.8, 0, 100, 3)(50) == pytest.approx(0.8 - 0.6 / 8)


def test_the_other_decays_follow_their_formulas():
    arguments = dict(initial_sparsity=0.2, final_sparsity=0.8, begin_step=100, end_step=300)
    for step in range(100, 300):
        p = (step - 100) / 200
        assert LinearDecay(**arguments)(step) == pytest.approx(0.2 + 0.6 * p, abs=1e-12)
        assert CosineDecay(**arguments)(step) == pytest.approx(0.8 - 0.3 * (1 + math.cos(math.pi * p)), abs=1e-12)
        assert ExponentialDecay(**arguments)(step) == pytest.approx(1 - 0.8 ** (1 - p) * 0.2**p, abs=1e-12)


def test_exponential_decay_removes_the_same_share_of_what_is_left_at_every_step():
    schedule = ExponentialDecay(0.0, 0.99, 0, 20, 1)
    density = [1 - schedule(step) for step in range(21)]
    assert np.diff(np.log(density)) == pytest.approx(np.full(20, math.log(0.01) / 20))


def test_a_polynomial_of_power_one_is_linear():
    polynomial, linear = PolynomialDecay(0.1, 0.9, 3, 777, 1), LinearDecay(0.1, 0.9, 3, 777)
    assert [polynomial(s) for s in range(800)] == pytest.approx([linear(s) for s in range(800)], abs=1e-15)


def test_begin_equal_to_end_is_reached_at_once_and_is_no_nan():
    for build in DECAYS:
        schedule = build(0.2, 0.6, 9, 9)
        assert [schedule(8), schedule(9), schedule(10)] == [0.0, 0.6, 0.6]
        assert schedule.update_steps(100) == [9]


def test_constant_sparsity_holds_for_ever_by_default():
    schedule = ConstantSparsity(0.5, begin_step=20, frequency=100)
    assert schedule.end_step == -1 and schedule.last_update is None
    assert schedule.update_steps(350) == [20, 120, 220, 320]
    assert schedule.latest_update(20 + 100 * 10**9 + 99) == 20 + 100 * 10**9
    assert schedule.final_step == 20


def test_constant_sparsity_with_an_end_keeps_its_sparsity_after_the_last_update():
    schedule = ConstantSparsity(0.5, begin_step=20, end_step=150, frequency=100)
    assert schedule.update_steps(10_000) == [20, 120, 150]
    assert schedule.latest_update(10_000) == 150
    assert schedule(10_000) == 0.5


def test_one_shot_updates_once():
    assert OneShot(0.5, 7).update_steps(6) == []
    assert OneShot(0.5, 7).update_steps(1000) == [7]
    assert [OneShot(0.5, 7)(step) for step in (0, 6, 7, 8)] == [0, 0, 0.5, 0.5]


def test_multi_step_holds_each_sparsity_until_the_next():
    schedule = MultiStep([[10, 0.25], [20, 0.5], [400, 0.9]])
    assert schedule.sparsities == ((10, 0.25), (20, 0.5), (400, 0.9))
    assert [schedule(step) for step in (9, 10, 19, 20, 399, 400, 401)] == [0, 0.25, 0.25, 0.5, 0.5, 0.9, 0.9]
    assert schedule.update_steps(399) == [10, 20]
    assert schedule.update_steps(400) == [10, 20, 400]


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ((), ValueError, "at least one"),
        (((200, 0.3), (100, 0.5)), ValueError, r"both rise .* Received: \(200, 0.3\) followed by \(100, 0.5\)"),
        (((100, 0.3), (100, 0.5)), ValueError, "both rise"),
        (((100, 0.5), (200, 0.3)), ValueError, "both rise"),
        (((100, 0.5), (200, 0.5)), ValueError, "both rise"),
        (((100, 0.5), (200, float("nan"))), ValueError, r"sparsities\[1\] sparsity must be a fraction"),
        (((100, 1.0),), ValueError, r"sparsities\[0\] sparsity must be a fraction"),
        (((-1, 0.5),), ValueError, r"sparsities\[0\] step must be at least 0"),
        (((1.0, 0.5),), TypeError, r"sparsities\[0\] step must be an int"),
        (((True, 0.5),), TypeError, r"sparsities\[0\] step must be an int"),
        (((1, "0.5"),), TypeError, r"sparsities\[0\] sparsity must be"),
        (((1, 0.5, 3),), TypeError, r"sparsities\[0\] must be a \(step, sparsity\) pair"),
        ((100, 0.5), TypeError, r"sparsities\[0\] must be a \(step, sparsity\) pair. Received: 100"),
        ("ab", TypeError, "pairs. Received: 'ab' of type str"),
        ({100: 0.5}, TypeError, "pairs. Received: .* of type dict"),
    ],
)
def test_multi_step_refuses_what_does_not_rise_or_is_no_pair(pairs, error, message):
    with pytest.raises(error, match=message):
        MultiStep(pairs)


def test_the_abstract_schedule_cannot_be_made():
    with pytest.raises(TypeError, match="abstract"):
        Schedule()


def test_schedules_import_neither_numpy_nor_keras_nor_tensorflow():
    code = "import sys, prunekit.sparsity.schedules; print(sorted({'numpy','keras','tensorflow'} & set(sys.modules)))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


# The length of a training -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", DECAYS)
def test_a_decay_without_end_takes_three_quarters_of_the_training_and_sixty_updates(decay):
    schedule = decay(final_sparsity=0.9, begin_step=200)
    assert schedule.is_open
    fitted = schedule.fitted(2200)
    assert fitted == decay(final_sparsity=0.9, begin_step=200, end_step=1700, frequency=25)
    assert not fitted.is_open and fitted.fitted(10) is fitted
    assert decay(end_step=40).frequency == 1
    assert decay(frequency=7).fitted(400) == decay(end_step=300, frequency=7)
    # A training that ends before the schedule begins.
    assert schedule.fitted(100).end_step == 200


@pytest.mark.parametrize("decay", DECAYS)
def test_an_open_schedule_names_what_it_needs(decay):
    schedule = decay()
    for ask in (
        lambda: schedule(3),
        lambda: schedule.final_step,
        lambda: schedule.update_steps(9),
        lambda: schedule.latest_update(5),
        lambda: schedule.fitted(None),
    ):
        with pytest.raises(ValueError, match=r"length of the training, .* without end_step. Pass .*end_step=STEPS"):
            ask()


def test_a_sparsity_is_a_schedule_for_the_whole_training():
    assert as_schedule(0.9) == PolynomialDecay(final_sparsity=0.9)
    with pytest.raises(ValueError, match=r"For 80 %, pass 0.8\."):
        as_schedule(80)
    with pytest.raises(TypeError, match="`schedule` must be a schedule"):
        as_schedule(True)
