"""The arithmetic of policy="tfmot" by plain loops; tests/parity compares it with the original itself."""

import math

import numpy as np
import pytest
from keras import ops

from prunekit.interop.tfmot.arithmetic import ForwardPassSchedule, SamePoolingBlock, TailedNM, kept_count
from prunekit.sparsity.patterns import NM
from prunekit.sparsity.schedules import ConstantSparsity, MultiStep, OneShot, PolynomialDecay


@pytest.mark.parametrize("n", [1, 2, 5, 7, 10, 1001])
def test_what_is_kept_is_rounded_to_even_and_never_nothing(n):
    for percent in range(100):
        kept = kept_count(percent / 100, n)
        assert 1 <= kept <= n
        assert abs(kept - n * (1 - percent / 100)) <= 0.5001 or kept == 1
    assert [kept_count(0.5, size) for size in (1, 3, 5, 7)] == [1, 2, 2, 4]


def test_steps_of_a_schedule_are_its_grid_without_step_0():
    for begin, end, frequency in [(0, 10, 3), (4, 10, 3), (0, 10, 20), (7, 8, 100), (0, 30, 1)]:
        schedule = ForwardPassSchedule(PolynomialDecay(0.1, 0.9, begin, end, frequency=frequency))
        grid = [step for step in range(1, 31) if begin <= step <= end and (step - begin) % frequency == 0]
        assert schedule.update_steps(30) == grid
        assert [step for step in range(31) if schedule.latest_update(step) == step] == grid
        latest = [max((due for due in grid if due <= step), default=None) for step in range(31)]
        assert [schedule.latest_update(step) for step in range(31)] == latest
        if grid:
            assert schedule.final_step == grid[-1]
            assert schedule.final_sparsity == schedule(grid[-1])


def test_a_constant_sparsity_lands_with_its_first_update():
    schedule = ForwardPassSchedule(ConstantSparsity(0.5, 0, frequency=10))
    assert (schedule.begin_step, schedule.final_step, schedule.last_update) == (10, 10, None)
    assert schedule.final_sparsity == 0.5


def test_the_one_update_of_m_by_n_is_at_step_1():
    schedule = ForwardPassSchedule(ConstantSparsity(0.5, 700), once=True)
    assert schedule.update_steps(1000) == [1]
    assert (schedule.begin_step, schedule.final_step, schedule.last_update) == (1, 1, 1)


def test_densities_are_float32():
    schedule = ForwardPassSchedule(PolynomialDecay(0.0, 0.8, 0, 7, frequency=1))
    for step in range(1, 8):
        density = 1.0 - schedule(step)
        assert np.float32(density) == density
        assert math.isclose(density, 0.2 + 0.8 * (1 - step / 7) ** 3, abs_tol=2e-7)


def test_other_schedules_are_refused():
    with pytest.raises(ValueError, match=r"has two schedules: .*Received: MultiStep"):
        ForwardPassSchedule(MultiStep())
    assert ForwardPassSchedule(OneShot(0.3, step=4)).update_steps(9) == [4]


def same_windows(length, window):
    """First and last index of each window, with half of what is missing before the first."""
    missing = -length % window
    starts = range(-(missing // 2), length + missing - missing // 2, window)
    return [(max(start, 0), min(start + window, length)) for start in starts][: -(-length // window)]


@pytest.mark.every_backend
@pytest.mark.parametrize("pooling", ["average", "max"])
@pytest.mark.parametrize("shape, block", [((8, 6), (4, 3)), ((9, 7), (4, 3)), ((5, 10), (2, 4)), ((33, 3), (16, 2))])
def test_windows_are_pooled_by_halves_like_a_plain_loop(shape, block, pooling):
    importance = np.random.default_rng(0).random(shape).astype("float32")
    pattern = SamePoolingBlock(*block, pooling)
    pattern.check(shape, (0,), (1,), 0.5, "kernel")
    pooled = ops.convert_to_numpy(pattern.pool(ops.convert_to_tensor(importance), (0,), (1,)))
    reduce = np.max if pooling == "max" else np.mean
    expected = [
        # The mean of means: windows are pooled along one axis, then along the other.
        [reduce([reduce(importance[top:bottom, column]) for column in range(left, right)]) for left, right in columns]
        for columns in [same_windows(shape[1], block[1])]
        for top, bottom in same_windows(shape[0], block[0])
    ]
    assert pooled.shape == (1, *np.shape(expected))
    np.testing.assert_allclose(pooled[0], expected, rtol=1e-6)
    units = np.arange(pooled.size).reshape(pooled.shape)
    mask = ops.convert_to_numpy(pattern.expand(ops.convert_to_tensor(units), shape, (0,), (1,)))
    for row, column in np.ndindex(shape):
        assert mask[row, column] == units[0, row // block[0], column // block[1]]


@pytest.mark.every_backend
def test_a_group_that_the_end_cuts_off_keeps_as_many_as_the_others():
    weight = np.arange(1.0, 12.0, dtype="float32").reshape(11, 1)
    pattern = TailedNM(2, 4)
    mask = ops.convert_to_numpy(pattern.pool(ops.convert_to_tensor(weight), (0,), (1,)))
    assert mask.ravel().tolist() == [False, False, True, True] * 2 + [False, True, True]
    with pytest.raises(ValueError, match="multiple of 4"):
        NM(2, 4).check((11, 1), (0,), (1,), 0.5, "kernel")
    with pytest.raises(ValueError, match=r"2 or 4 axes\. Received: k of shape \(3, 8, 4\)"):
        pattern.check((3, 8, 4), (1,), (2,), 0.5, "k")
