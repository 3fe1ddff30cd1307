"""Schedules of tensorflow-model-optimization, taken for prunekit's own."""

import keras
import legacy_models as old
import numpy as np
import pytest

import prunekit as pk
from prunekit.interop.tfmot.arithmetic import ForwardPassSchedule
from prunekit.interop.tfmot.schedule_adoption import adopted
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner_run import PrunerRun

sparsity = old.tfmot.sparsity.keras
THEIRS = [
    sparsity.PolynomialDecay(0.1, 0.8, 100, 200, power=2, frequency=30),
    sparsity.PolynomialDecay(0.5, 0.5, 3, 3),
    sparsity.ConstantSparsity(0.5, 10),
    sparsity.ConstantSparsity(0.25, 0, end_step=50, frequency=7),
]
OURS = [
    pk.schedules.PolynomialDecay(0.1, 0.8, 100, 200, power=2, frequency=30),
    pk.schedules.PolynomialDecay(0.5, 0.5, 3, 3, frequency=100),
    pk.schedules.ConstantSparsity(0.5, 10),
    pk.schedules.ConstantSparsity(0.25, 0, end_step=50, frequency=7),
]


class Stairs(sparsity.PruningSchedule):
    """As its users write them: three stairs, the middle one skipped."""

    def __init__(self, begin_step=10, end_step=40, frequency=10, values=(0.2, 0.2, 0.4, 0.8)):
        self.begin_step, self.end_step, self.frequency, self.values = begin_step, end_step, frequency, values

    def __call__(self, step):
        due = self._should_prune_in_step(step, self.begin_step, self.end_step, self.frequency)
        return due, np.float32(self.values[(step - self.begin_step) // self.frequency])

    def get_config(self):
        return {}


@pytest.mark.parametrize(("theirs", "ours"), list(zip(THEIRS, OURS, strict=True)))
def test_a_schedule_becomes_the_one_of_the_same_numbers(theirs, ours):
    assert adopted(theirs) == ours


@pytest.mark.parametrize("theirs", THEIRS[:1] + THEIRS[2:], ids=lambda schedule: type(schedule).__name__)
def test_at_the_steps_at_which_theirs_prunes_ours_asks_for_the_same(theirs):
    ours = adopted(theirs)
    for step in range(0, 250):
        due, asked = theirs(step)
        if due:
            assert ours(step) == pytest.approx(float(asked), abs=1e-6)
            assert ours.latest_update(step) == step


def test_ours_lands_where_frequency_does_not_divide_the_length_and_theirs_does_not():
    theirs = sparsity.PolynomialDecay(0.0, 0.8, 100, 200, frequency=30)
    assert max(float(theirs(step)[1]) for step in range(100, 201) if theirs(step)[0]) < 0.7993
    assert adopted(theirs)(200) == 0.8 and adopted(theirs).update_steps(300)[-1] == 200


def test_a_schedule_of_the_users_own_is_asked_at_its_update_steps():
    assert adopted(Stairs()) == pk.schedules.MultiStep(((10, 0.2), (30, 0.4), (40, 0.8)))


def test_a_subclass_of_theirs_is_asked_and_not_taken_for_its_base():
    class Halved(sparsity.PolynomialDecay):
        def __call__(self, step):
            due, asked = super().__call__(step)
            return due, asked / 2

    assert adopted(Halved(0.0, 0.8, 0, 20, frequency=10)) == pk.schedules.MultiStep(((10, 0.35), (20, 0.4)))


@pytest.mark.parametrize(
    ("schedule", "words"),
    [
        (Stairs(values=(0.4, 0.2, 0.4, 0.8)), "a sparsity that falls, from 0.4 to 0.2 at step 20"),
        (Stairs(values=(0, 0, 0, 0)), "no step at which it prunes"),
        (Stairs(end_step=-1), "which never ends"),
        (Stairs(end_step=10**6), "more than 10,000 update steps"),
        (Stairs(frequency=None), "no begin_step, end_step and frequency"),
        (Stairs(frequency=0), "which never ends"),
    ],
)
def test_what_cannot_be_tabulated_is_refused_with_what_to_write_instead(schedule, words):
    with pytest.raises(ValueError, match=f"Stairs with .*{words}.*Write it as pk.schedules.MultiStep"):
        adopted(schedule)


def test_a_falling_polynomial_is_refused_as_one_of_ours_is():
    with pytest.raises(ValueError, match="never restores pruned weights"):
        adopted(sparsity.PolynomialDecay(0.8, 0.2, 0, 10))


@pytest.mark.parametrize("other", [None, 0.5, "polynomial", pk.schedules.OneShot(0.5), object()])
def test_anything_else_stays_what_it_is(other):
    assert adopted(other) is other


@pytest.mark.parametrize(
    ("policy", "followed", "reached"), [("gradual", lambda ours: ours, 0.75), ("tfmot", ForwardPassSchedule, 0.7383)]
)
def test_callback_and_pruner_take_theirs_where_they_take_ours(policy, followed, reached, perceptron, samples):
    theirs = sparsity.PolynomialDecay(0.0, 0.75, 0, 8, frequency=3)
    ours = pk.schedules.PolynomialDecay(0.0, 0.75, 0, 8, frequency=3)
    callback = pk.PruningCallback(theirs, policy=policy)
    assert callback.schedule == ours
    assert PrunerRun(perceptron, theirs, PruningOptions(policy=policy)).schedule == followed(ours)
    constant = sparsity.ConstantSparsity(0.5, 0, frequency=1)
    with pk.Pruner(perceptron, constant, keras.optimizers.SGD(), policy=policy) as pruner:
        if policy == "tfmot":
            assert pruner.step()
        same = pk.schedules.ConstantSparsity(0.5, 0, frequency=1)
        assert pruner.run.schedule == followed(same) and pruner.sparsity == 0.5
    perceptron.compile("sgd", "sparse_categorical_crossentropy")
    perceptron.fit(*samples, batch_size=16, epochs=2, verbose=0, callbacks=[callback])
    assert callback.pruner.sparsity == pytest.approx(reached, abs=5e-3 if policy == "tfmot" else 0)


def test_a_class_of_the_users_own_is_refused_with_tfmot_in_one_line(perceptron):
    options = {"policy": "tfmot"}
    for refused in (
        lambda: pk.PruningCallback(Stairs(), **options),
        lambda: pk.Pruner(perceptron, Stairs(), **options),
    ):
        with pytest.raises(ValueError, match="does not support custom schedule classes.*Received: MultiStep") as error:
            refused()
        assert "\n" not in str(error.value)


def test_something_that_is_no_schedule_is_still_refused(perceptron):
    with pytest.raises(TypeError, match="`schedule` must be a schedule"):
        pk.PruningCallback(object(), allocation="uniform")
    with pytest.raises(TypeError, match="`schedule` must be a schedule"):
        pk.Pruner(perceptron, object(), allocation="uniform")
