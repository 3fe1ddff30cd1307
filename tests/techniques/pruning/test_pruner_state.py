import keras
import numpy as np
import pytest
from backends import tensorflow_only
from networks import dense_network

import prunekit as pk
from prunekit.core.runtime.snapshot import Snapshot, read_snapshot, write_snapshot
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.techniques.pruning.training.pruner_run import PrunerRun
from prunekit.techniques.pruning.training.pruner_state import PrunerState

pytestmark = pytest.mark.every_backend

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RISE = pk.schedules.PolynomialDecay(initial_sparsity=0.25, final_sparsity=0.75, begin_step=1, end_step=5, frequency=3)


def pruner_state(pruner):
    return pruner.run.state().to_snapshot()


def restore_pruner(pruner, snapshot):
    pruner.run.restore(PrunerState.from_snapshot(snapshot, pruner.targets))


def trained(samples, criterion="magnitude"):
    """A pruner after five updates, and its model."""
    model = dense_network(8, hidden=16, logits=4)
    model.compile("adam", LOSS)
    pruning = pk.PruningCallback(RISE, criterion=criterion, allocation="uniform")
    model.fit(*samples, batch_size=14, epochs=1, verbose=0, callbacks=[pruning])
    return pruning.pruner, model


def other(model, criterion="magnitude", **options):
    """A new pruner of a copy of the model, with a built optimizer in the same state."""
    copy = dense_network(8, hidden=16, logits=4)
    copy.set_weights(model.get_weights())
    copy.compile("adam", LOSS)
    copy.optimizer.build(copy.trainable_variables)
    for mine, theirs in zip(copy.optimizer.variables, model.optimizer.variables, strict=True):
        mine.assign(theirs)
    return Pruner.following(PrunerRun(copy, RISE, PruningOptions(**{"criterion": criterion, **options})))


@pytest.mark.parametrize("criterion", ["magnitude", pytest.param("movement", marks=tensorflow_only)])
def test_a_state_goes_through_a_file_into_another_pruner(samples, tmp_path, criterion):
    pruner, model = trained(samples, criterion)
    write_snapshot(tmp_path / "state", pruner_state(pruner))
    found = other(model, criterion)
    restore_pruner(found, read_snapshot(tmp_path / "state"))
    assert (found.run.counter.origin, found.step_count, found.events) == (0, 5, pruner.events) and len(
        found.events
    ) == 3
    assert found.sparsity == pruner.sparsity > 0
    for name, mask in pruner.masks.items():
        np.testing.assert_array_equal(found.masks[name], mask)
    again = pruner_state(found)
    assert repr(again.values) == repr(pruner_state(pruner).values)
    for name, array in pruner_state(pruner).arrays.items():
        assert again.arrays[name].tobytes() == array.tobytes(), name


def test_a_weight_that_is_kept_and_zero_by_chance_stays_kept_with_its_momentum(samples):
    pruner, model = trained(samples)
    kernel = model.get_layer("hidden").kernel
    place = tuple(np.argwhere(pruner.masks["hidden/kernel"])[0])
    kernel.assign(np.where(np.indices(kernel.shape).transpose(1, 2, 0) == place, 0, 1).any(-1) * kernel.numpy())
    assert kernel.numpy()[place] == 0
    slots = [v for v in model.optimizer.variables if v.shape == kernel.shape]
    before = [float(slot.numpy()[place]) for slot in slots]
    found = other(model)
    restore_pruner(found, pruner_state(pruner))
    assert found.masks["hidden/kernel"][place], "zeros alone would say that it is pruned"
    copied = [v for v in found.model.optimizer.variables if v.shape == kernel.shape]
    assert [float(slot.numpy()[place]) for slot in copied] == before and any(before)


def test_a_state_of_other_weights_is_refused(samples):
    pruner, model = trained(samples)
    with pytest.raises(
        ValueError, match=r"Received: logits/kernel, which was of shape \(16, 4\) and is not among them"
    ):
        restore_pruner(other(model, exclude=["logits"]), pruner_state(pruner))
    state = pruner_state(pruner)
    state.values["targets"]["hidden/kernel"] = [8, 17]
    with pytest.raises(ValueError, match=r"hidden/kernel, which was of shape \(8, 17\) and is of shape \(8, 16\) now"):
        restore_pruner(other(model), state)


def test_a_state_that_lacks_something_is_refused_in_one_line(samples):
    pruner, model = trained(samples)
    for name in ("targets", "origin", "done", "calls", "last_update", "events", "statistics"):
        state = pruner_state(pruner)
        state.values[name] = "something else"
        with pytest.raises(ValueError, match=f"The saved state of a pruner lacks {name}, or"):
            restore_pruner(other(model), state)
    state = pruner_state(pruner)
    del state.arrays["mask/logits/kernel"]
    with pytest.raises(ValueError, match="lacks the mask of logits/kernel"):
        restore_pruner(other(model), state)


@tensorflow_only
def test_movements_are_not_made_up(samples):
    pruner, model = trained(samples)
    with pytest.raises(ValueError, match="needs the values collected before the interruption"):
        restore_pruner(other(model, "movement"), pruner_state(pruner))


def test_masks_take_a_bit_for_each_weight(samples):
    pruner, _ = trained(samples)
    state = pruner_state(pruner)
    assert isinstance(state, Snapshot) and state.arrays["mask/hidden/kernel"].nbytes == 8 * 16 / 8
