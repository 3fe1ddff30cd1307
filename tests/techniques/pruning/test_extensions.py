"""Criteria that need data, policies that regrow and allocations that read scores, all from outside the package."""

import json

import keras
import numpy as np
import outside_extensions
import pytest
from backends import tensorflow_only
from outside_extensions import Evolving, InputWeighted

import prunekit as pk
from prunekit.core.data.calibration import batches_of
from prunekit.techniques.pruning.training.pruner_state import PrunerState

pytestmark = pytest.mark.every_backend

LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
STEADY = pk.schedules.ConstantSparsity(0.5, begin_step=1, frequency=2)


@pytest.fixture(autouse=True)
def registered():
    with outside_extensions.registered():
        yield


class Masks(keras.callbacks.Callback):
    """After each batch, the pattern of zeros of the kernels and whether every masked entry is zero."""

    def __init__(self, pruning):
        super().__init__()
        self.pruning, self.seen = pruning, []

    def on_train_batch_end(self, batch, logs=None):
        pruner = self.pruning.pruner
        masks = pruner.masks
        weights = {target.name: np.array(target.variable.numpy()) for target in pruner.targets}
        assert all((weights[name][~mask] == 0).all() for name, mask in masks.items())
        self.seen.append(masks)


def test_one_shot_by_a_criterion_that_needs_data(perceptron, samples):
    features = samples[0] * np.linspace(0.1, 3, 8, dtype="float32")
    first = np.array(perceptron.layers[0].kernel.numpy())
    report = pk.prune(perceptron, 0.5, features, criterion="input_weighted", include="hidden", allocation="uniform")
    scores = np.abs(first) * np.sqrt(np.sum(features.astype("float64") ** 2, axis=0))[:, None]
    kept = np.array(perceptron.layers[0].kernel.numpy()) != 0
    assert kept.sum() == 64 and scores[kept].min() > scores[~kept].max()
    assert json.loads(json.dumps(report.to_dict()))["targets"] == ["hidden/kernel"]


def test_a_criterion_that_needs_data_is_refused_without(perceptron):
    for refused in (
        lambda: pk.prune(perceptron, 0.5, criterion="input_weighted", allocation="uniform"),
        lambda: pk.Pruner(perceptron, STEADY, keras.optimizers.SGD(), criterion=InputWeighted(), allocation="uniform"),
    ):
        with pytest.raises(ValueError, match="statistic 'input_squares' is collected from data. Received: no data"):
            refused()


def test_in_fit_data_are_read_again_at_each_mask_update(compiled, samples):
    callback = pk.PruningCallback(
        pk.schedules.PolynomialDecay(0.0, 0.75, 0, 8, frequency=4),
        "input_weighted",
        data=samples[0],
        include="hidden",
        allocation="uniform",
    )
    checking = Masks(callback)
    compiled.fit(*samples, batch_size=14, epochs=2, verbose=0, callbacks=[callback, checking])
    assert len(callback.report.events) == 3 and callback.pruner.sparsity == 0.75


def test_a_policy_regrows_in_fit_and_counts_stay_exact(compiled, samples):
    callback = pk.PruningCallback(STEADY, policy="evolving", allocation="uniform")
    checking = Masks(callback)
    compiled.fit(*samples, batch_size=14, epochs=2, verbose=0, callbacks=[callback, checking])
    counts = [{name: int(mask.sum()) for name, mask in masks.items()} for masks in checking.seen]
    assert all(count == {"hidden/kernel": 64, "logits/kernel": 32} for count in counts)
    regrown = [
        (new["hidden/kernel"] & ~old["hidden/kernel"]).sum()
        for old, new in zip(checking.seen, checking.seen[1:], strict=False)
    ]
    assert regrown == [0, 16] * 4 + [0]
    assert {event.reached for event in callback.report.events} == {0.5}


def test_a_policy_may_return_new_weight_values(compiled, samples):
    callback = pk.PruningCallback(
        pk.schedules.ConstantSparsity(0.5, begin_step=1, frequency=4), policy=Evolving(value=0.5), allocation="uniform"
    )
    compiled.optimizer.learning_rate = 0.0
    compiled.fit(*samples, batch_size=14, verbose=0, callbacks=[callback])
    kernel = np.array(compiled.layers[0].kernel.numpy())
    assert (kernel == 0.5).sum() == 16 and (kernel == 0).sum() == 64


@tensorflow_only
def test_a_policy_regrows_in_a_tape_loop(compiled, samples):
    with pk.Pruner(compiled, STEADY, policy="evolving", allocation="uniform") as pruner:
        loop = pk.loops.TapeLoop(compiled, compiled.optimizer, LOSS, pruner=pruner)
        loop.fit(*samples, batch_size=14, epochs=2)
    assert pruner.sparsity == 0.5 and not any(pruner.audit().values()) and len(pruner.events) == 5


def test_what_regrew_is_restored_from_a_saved_state(compiled, samples):
    callback = pk.PruningCallback(STEADY, policy="evolving", allocation="uniform")
    compiled.fit(*samples, batch_size=14, verbose=0, callbacks=[callback])
    masks = callback.pruner.masks
    state = callback.pruner.run.state().to_snapshot()
    again = pk.PruningCallback(STEADY, policy="evolving", allocation="uniform")
    again.set_model(compiled)
    again.pruner.run.restore(PrunerState.from_snapshot(state, again.pruner.targets))
    for name, mask in masks.items():
        np.testing.assert_array_equal(again.pruner.masks[name], mask)
    assert again.pruner.events == callback.pruner.events


def test_an_allocation_reads_the_scores(perceptron):
    perceptron.layers[1].kernel.assign(perceptron.layers[1].kernel * 100)
    pk.prune(perceptron, 0.5, allocation="by_mean_score")
    zeros = [int((np.array(layer.kernel.numpy()) == 0).sum()) for layer in perceptron.layers]
    assert zeros == [96, 0]


@pytest.mark.parametrize("kind", ["array", "pair", "dictionary", "list of batches", "PyDataset"])
def test_calibration_data_of_every_kind(kind, samples):
    x, y = samples

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return x[35 * index : 35 * index + 35], y[35 * index : 35 * index + 35]

    data = {
        "array": x,
        "pair": (x, y),
        "dictionary": {"a": x},
        "list of batches": [(x[:30], y[:30]), (x[30:], y[30:])],
        "PyDataset": Batches(),
    }[kind]
    found = list(batches_of(data, batch_size=32))
    inputs = np.concatenate([batch["a"] if kind == "dictionary" else batch for batch, _ in found])
    np.testing.assert_array_equal(inputs, x)
    assert all((labels is None) == (kind in ("array", "dictionary")) for _, labels in found)


@pytest.mark.parametrize(
    "data, error, message",
    [
        (iter([1]), TypeError, "list_iterator. An iterator can be read only once"),
        (3, TypeError, "Received: int"),
        ([], ValueError, "Received: no batches"),
        ((np.zeros((3, 2)), np.zeros(4)), ValueError, r"Received: arrays of lengths \[3, 4\]"),
        (np.zeros((0, 2)), ValueError, r"Received: arrays of lengths \[0\]"),
        ((1, 2, 3, 4), TypeError, "Received: a tuple of 4 parts"),
    ],
    ids=["an iterator", "a number", "no batches", "different lengths", "no examples", "four parts"],
)
def test_other_calibration_data_are_refused(data, error, message):
    with pytest.raises(error, match=message):
        list(batches_of(data))
