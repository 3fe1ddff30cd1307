"""AC/DC: phases by steps, all weights in the dense ones, clean starts, an exactly sparse end, and resumption."""

import keras
import numpy as np
import pytest
from keras import ops
from moving_masks import make_data, network, trained, values, whole_and_resumed

import prunekit as pk

PHASES = pk.schedules.ConstantSparsity(0.75, begin_step=4, end_step=20, frequency=4)


@pytest.fixture(scope="module")
def data():
    return make_data()


@pytest.mark.every_backend
def test_phases_alternate_by_steps_and_the_end_is_sparse(data):
    model, pruning, watch = trained("ac_dc", data, schedule=PHASES, allocation="erk")
    pruned = [sum(int((~mask).sum()) for mask in masks.values()) for masks in watch.masks]
    # Batch i ends at step i + 1: steps 4 to 7 and 12 to 15 are pruned, 20 begins the last phase.
    assert pruned == [0] * 3 + ([156] * 4 + [0] * 4) * 2 + [156] * 5
    assert watch.leaks == 0
    assert sum(np.count_nonzero(kernel) for kernel in values(model).values()) == 52
    asked = [(event.step, event.asked, event.reached) for event in pruning.pruner.events]
    assert asked == [(4, 0.75, 0.75), (8, 0, 0), (12, 0.75, 0.75), (16, 0, 0), (20, 0.75, 0.75)]


def test_a_dense_phase_starts_pruned_weights_at_zero_with_empty_slots_and_the_next_masks_differ(data):
    model = network(keras.optimizers.Adam(0.1))
    with pk.Pruner(model, PHASES, policy="ac_dc", include="hidden", allocation="uniform") as pruner:
        for step in range(1, 25):
            start = 10 * (step % 12)
            model.train_on_batch(*(array[start : start + 10] for array in data))
            before, weight = pruner.masks["hidden/kernel"], np.abs(values(model)["hidden"])
            pruner.step()
            if step == 8:
                first = before
                slots = [v for v in model.optimizer.variables if tuple(v.shape) == (10, 16) and v.dtype == "float32"]
                assert len(slots) == 2
                for held in [model.get_layer("hidden").kernel, *slots]:
                    assert not ops.convert_to_numpy(held)[~first].any() and ops.convert_to_numpy(held)[first].any()
            if step == 12:
                # All weights have trained since, and the masks are those of the largest.
                assert np.count_nonzero(weight) > 80
                expected = np.zeros(160, bool)
                expected[np.argsort(-weight, axis=None)[:40]] = True
                np.testing.assert_array_equal(pruner.masks["hidden/kernel"].ravel(), expected)
                assert (pruner.masks["hidden/kernel"] != first).any()


@pytest.mark.thorough
@pytest.mark.parametrize("frequency", [4, 8])
def test_an_interrupted_recipe_ends_with_the_bytes_of_a_whole_one(frequency, data, tmp_path):
    schedule = {
        "type": "constant",
        "target_sparsity": 0.75,
        "begin": {"steps": 2},
        "end": {"steps": 30},
        "frequency": frequency,
    }
    assert all(map(np.array_equal, *whole_and_resumed("ac_dc", schedule, data, tmp_path)))


@pytest.mark.one_backend
def test_what_cannot_alternate_is_refused(data):
    with pytest.raises(ValueError, match="AC/DC alternates between phases of a ConstantSparsity schedule with an end"):
        pk.Pruner(network(), pk.schedules.PolynomialDecay(0.0, 0.5, 0, 10), policy="ac_dc", allocation="uniform")
    with pytest.raises(ValueError, match=r"Received: ConstantSparsity\(.*end_step=-1"):
        pk.Pruner(network(), pk.schedules.ConstantSparsity(0.5), policy="ac_dc", allocation="uniform")
    with pytest.raises(ValueError, match="AC/DC alternates .* Received: OneShot"):
        pk.prune(network(), 0.5, policy="ac_dc", allocation="uniform")
    with pytest.raises(ValueError, match="Received: keep_zeros=True"):
        pk.Pruner(network(), PHASES, policy="ac_dc", keep_zeros=True, allocation="uniform")


@pytest.mark.thorough
def test_a_second_fit_goes_on_with_the_phases(data):
    with pytest.warns(UserWarning, match="lands on sparsity 0.75 at step 20"):
        model, pruning, _ = trained("ac_dc", data, schedule=PHASES, epochs=1)
    model.fit(*data, batch_size=10, epochs=1, verbose=0, callbacks=[pruning])
    assert [event.step for event in pruning.pruner.events] == [4, 8, 12, 16, 20]
    assert keras.ops.convert_to_numpy(model.get_layer("head").kernel).size == 48 and pruning.pruner.sparsity == 0.75
