"""A `Pruner` whose `step()` is never called says so when it finishes."""

import warnings

import pytest

import prunekit as pk
from prunekit.sparsity.schedules import ConstantSparsity, OneShot, PolynomialDecay
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend
NEVER = r"Pruner.step\(\) was never called.* sparsity is 0.0000.* lands on 0.5. Call pruner.step\(\) "


def trained(model, batches, times=1):
    for _ in range(times):
        model.train_on_batch(batches["x"], batches["y"])


def told(caught):
    """The texts of prunekit's warnings; those that Keras causes on other backends are of other kinds."""
    return [str(one.message) for one in caught if one.category is UserWarning]


@pytest.mark.parametrize("end_step", [4, 1000], ids=["the schedule would have landed", "training is too short"])
def test_finish_says_that_step_was_never_called(compiled, batches, end_step):
    pruner = Pruner(compiled, PolynomialDecay(0.0, 0.5, 0, end_step, frequency=1), allocation="uniform")
    trained(compiled, batches, 5)
    with pytest.warns(UserWarning, match=NEVER + "after each optimizer update") as caught:
        pruner.finish()
    assert len(told(caught)) == 1
    pruner.finish()


def test_leaving_the_with_block_without_a_step_warns_once(perceptron):
    with pytest.warns(UserWarning, match=NEVER + "after each optimizer update") as caught:
        with Pruner(perceptron, PolynomialDecay(0.0, 0.5, 0, 4, frequency=1), allocation="uniform"):
            pass
    assert len(told(caught)) == 1


def test_the_remedy_for_tfmot_differs(perceptron):
    with pytest.warns(UserWarning, match=NEVER + "before each forward pass in training") as caught:
        with Pruner(perceptron, ConstantSparsity(0.5, frequency=1), policy="tfmot"):
            pass
    assert len(told(caught)) == 1


@pytest.mark.parametrize("schedule", [ConstantSparsity(0.5), OneShot(0.5)], ids=["constant", "one shot"])
def test_a_schedule_that_has_done_everything_at_its_start_needs_no_step(compiled, batches, schedule):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        with Pruner(compiled, schedule, allocation="uniform") as pruner:
            trained(compiled, batches)
    assert pruner.sparsity == 0.5


def test_a_loop_that_steps_once_is_not_accused(compiled, batches):
    with pytest.warns(UserWarning, match="lands on sparsity 0.5 at step 9, but training ended after 1 steps") as caught:
        with Pruner(compiled, PolynomialDecay(0.0, 0.5, 0, 9, frequency=1), allocation="uniform") as pruner:
            trained(compiled, batches)
            pruner.step()
    assert len(told(caught)) == 1


def test_a_pruner_beside_which_nothing_trained_tells_that_training_ended_after_no_step(compiled):
    with pytest.warns(UserWarning, match="training ended after 0 steps") as caught:
        with Pruner(compiled, PolynomialDecay(0.0, 0.5, 0, 9, frequency=1), allocation="uniform"):
            pass
    assert len(told(caught)) == 1


def test_one_shot_pruning_and_an_exception_say_nothing(compiled, batches):
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        pk.prune(compiled, 0.5, allocation="uniform")
        with pytest.raises(KeyError):
            with Pruner(compiled, PolynomialDecay(0.0, 0.9, 0, 4, frequency=1), allocation="uniform"):
                trained(compiled, batches)
                raise KeyError
