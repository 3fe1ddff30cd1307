"""Schedules at every step, beside those of tensorflow-model-optimization."""

import numpy as np
import original
import pytest
import tensorflow as tf

from prunekit.interop.tfmot.arithmetic import ForwardPassSchedule, kept_count
from prunekit.sparsity.schedules import ConstantSparsity, LinearDecay, OneShot, PolynomialDecay

# (initial, final, begin, end, power, frequency): frequencies that divide the length and that do not, lengths of one
# step, begins at 0, powers that TensorFlow's graph optimiser rewrites and powers that it leaves.
POLYNOMIALS = [
    (0.0, 0.8, 100, 200, 3, 30),
    (0.0, 0.8, 0, 100, 3, 7),
    (0.2, 0.9, 7, 413, 3, 13),
    (0.5, 0.95, 0, 299, 2, 300),
    (0.3, 0.3, 1, 50, 3, 1),
    (0.0, 0.9, 3, 177, 1, 174),
    (0.1, 0.7, 0, 150, 0.5, 11),
    (0.0, 0.8, 2, 133, 4, 2),
    (0.0, 0.8, 0, 133, 2.5, 5),
    (0.1, 0.6, 41, 42, 3, 100),
]
CONSTANTS = [(0.5, 0, -1, 100), (0.9, 3, 77, 10), (0.35, 0, 7, 8), (0.0, 5, 5, 1), (0.95, 1, -1, 1), (0.7, 0, 60, 30)]


def followed(schedule, steps):
    """Whether masks change at each step, the first being a forward pass, as `Pruner` asks for it."""
    return [schedule.latest_update(step) == step for step in steps]


@pytest.mark.parametrize("arguments", POLYNOMIALS, ids=str)
def test_a_polynomial_decay_is_the_compiled_one_at_every_step_to_the_bit(arguments):
    *values, frequency = arguments
    steps = np.arange(1, 450)
    due, sparsities = original.at_steps(original.sparsity.PolynomialDecay(*values, frequency=frequency), steps)
    ours = ForwardPassSchedule(PolynomialDecay(*values, frequency=frequency))
    np.testing.assert_array_equal(followed(ours, steps), due)
    asked = np.array([ours(int(step)) for step in steps])
    # It computes with the density; that the last bit of a density is the right one, the kept counts below can tell.
    np.testing.assert_allclose(asked, sparsities, rtol=0, atol=2**-23)


@pytest.mark.parametrize("arguments", POLYNOMIALS, ids=str)
def test_kept_counts_on_the_way_are_the_compiled_ones_where_a_bit_is_many_weights(arguments):
    *values, frequency = arguments
    schedule = original.sparsity.PolynomialDecay(*values, frequency=frequency)
    ours = ForwardPassSchedule(PolynomialDecay(*values, frequency=frequency))
    step = tf.Variable(0, dtype=tf.int64)
    size = 300_000_007

    @tf.function
    def kept():
        # As in Pruning._update_mask: sorting so many weights would take a minute.
        density = 1 - schedule(step)[1]
        return tf.math.maximum(tf.math.round(tf.cast(tf.constant(size), tf.float32) * density), 1)

    for each in ours.update_steps(300):
        step.assign(each)
        assert kept_count(ours(each), size) == int(kept().numpy()), each


def test_eager_calls_of_the_original_round_otherwise_than_its_own_training_step():
    schedule = original.sparsity.PolynomialDecay(0.2, 0.9, 7, 413, frequency=1)
    steps = np.arange(7, 414)
    compiled = original.at_steps(schedule, steps)[1]
    eager = original.at_steps(schedule, steps, compiled=False)[1]
    assert 0 < (compiled != eager).mean() < 0.5
    np.testing.assert_allclose(compiled, eager, rtol=0, atol=2**-22)


@pytest.mark.parametrize("arguments", CONSTANTS, ids=str)
def test_a_constant_sparsity_is_the_same_at_every_step(arguments):
    *values, frequency = arguments
    steps = np.arange(1, 250)
    due, sparsities = original.at_steps(original.sparsity.ConstantSparsity(*values, frequency=frequency), steps)
    ours = ForwardPassSchedule(ConstantSparsity(*values, frequency=frequency))
    np.testing.assert_array_equal(followed(ours, steps), due)
    np.testing.assert_array_equal(
        [np.float32(1) - np.float32(1 - ours(int(step))) for step in steps],
        [np.float32(1) - (np.float32(1) - value) for value in sparsities],
    )
    assert ours.update_steps(249) == steps[due].tolist()


@pytest.mark.parametrize("arguments", POLYNOMIALS, ids=str)
def test_the_decay_of_prunekit_has_the_same_values_and_lands(arguments):
    *values, frequency = arguments
    ours = PolynomialDecay(*values, frequency=frequency)
    theirs = original.sparsity.PolynomialDecay(*values, frequency=frequency)
    steps = np.arange(ours.begin_step, 450)
    due, sparsities = original.at_steps(theirs, steps)
    np.testing.assert_allclose([ours(int(step)) for step in steps], sparsities, rtol=0, atol=2**-22)
    assert set(ours.update_steps(449)) == {*steps[due].tolist(), ours.end_step}
    assert ours(ours.update_steps(449)[-1]) == ours.final_sparsity


# ---- differences: (tensorflow-model-optimization, policy="tfmot", prunekit's own)


def test_difference_a_final_sparsity_that_frequency_steps_over():
    theirs = original.sparsity.PolynomialDecay(0.0, 0.8, 100, 200, frequency=30)
    ours = PolynomialDecay(0.0, 0.8, 100, 200, frequency=30)
    steps = np.arange(1, 400)
    due, sparsities = original.at_steps(theirs, steps)
    assert steps[due].tolist() == [100, 130, 160, 190]
    assert sparsities[due][-1] == pytest.approx(0.7992)
    compat = ForwardPassSchedule(ours)
    assert compat.update_steps(400) == [100, 130, 160, 190]
    assert (compat.final_step, compat.final_sparsity) == (190, pytest.approx(0.7992))
    assert ours.update_steps(400) == [100, 130, 160, 190, 200]
    assert ours(200) == 0.8


def test_difference_an_update_before_the_first_batch():
    theirs, ours = original.sparsity.ConstantSparsity(0.5, 0), ConstantSparsity(0.5, 0)
    assert np.flatnonzero(original.at_steps(theirs, range(1, 201))[0])[0] + 1 == 100  # the first batch is step 1
    assert ForwardPassSchedule(ours).update_steps(200) == [100, 200]
    assert ours.update_steps(200) == [0, 100, 200]


def test_difference_a_decay_without_length():
    theirs = original.Masker(np.ones((2, 8), "float32"), original.sparsity.PolynomialDecay(0.0, 0.5, 1, 1, frequency=1))
    with pytest.raises(tf.errors.InvalidArgumentError, match="is not in"):
        theirs.at(1)
    ours = PolynomialDecay(0.0, 0.5, 1, 1, frequency=1)
    with pytest.raises(ValueError, match=r"divides by the length.*Received: begin_step=end_step=1"):
        ForwardPassSchedule(ours)
    assert ours(1) == 0.5


def test_difference_a_decay_that_falls():
    falling = original.at_steps(original.sparsity.PolynomialDecay(0.8, 0.5, 0, 10), range(11))[1]
    np.testing.assert_allclose(falling, [0.5 + 0.3 * (1 - step / 10) ** 3 for step in range(11)], atol=1e-6)
    assert (np.diff(falling) < 0).all()
    # And it is followed: a mask grows by what the sparsity fell.
    weight = np.arange(1, 41, dtype="float32").reshape(10, 4)
    masker = original.Masker(weight, original.sparsity.PolynomialDecay(0.8, 0.5, 1, 11, frequency=10))
    assert [masker.at(step).sum() for step in (1, 11)] == [8, 20]
    with pytest.raises(ValueError, match="never restores pruned weights"):
        PolynomialDecay(0.8, 0.5, 0, 10)


@pytest.mark.parametrize(
    "begin, end, frequency, asked", [(-1, 5, 1, 0.5), (5, 4, 1, 0.5), (0, 5, 0, 0.5), (0, 5, 1, 1.0)]
)
def test_both_refuse_the_same_numbers(begin, end, frequency, asked):
    for schedule in (original.sparsity.ConstantSparsity, ConstantSparsity):
        with pytest.raises(ValueError):
            schedule(asked, begin, end, frequency)
    for schedule in (original.sparsity.PolynomialDecay, PolynomialDecay):
        with pytest.raises(ValueError):
            schedule(0.0, asked, begin, end, frequency=frequency)


def test_schedules_that_it_never_had_are_refused():
    with pytest.raises(ValueError, match=r"has two schedules.*Received: LinearDecay"):
        ForwardPassSchedule(LinearDecay())


def test_one_shot_is_a_single_update_at_its_own_step():
    assert ForwardPassSchedule(OneShot(0.5)).update_steps(9) == [0]
    assert ForwardPassSchedule(OneShot(0.5, step=3), once=True).update_steps(9) == [3]
