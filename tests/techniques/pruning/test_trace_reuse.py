"""A new PruningCallback on a model that was pruned before uses the former trace, and only where it is the same."""

import gc
import weakref

import keras
import numpy as np
import pytest

from prunekit.sparsity.schedules import ConstantSparsity
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

HALF = ConstantSparsity(0.5)


class Counting(keras.layers.Layer):
    """Counts its traces in training, in a private attribute: public ones are compared before a trace is used again."""

    _traces = 0

    @property
    def traces(self):
        return self._traces

    def call(self, x, training=False):
        self._traces += bool(training)
        return x


def make():
    layers = [keras.layers.Dense(16, "relu", name="hidden"), Counting(), keras.layers.Dense(4, name="logits")]
    model = keras.Sequential([keras.Input((8,)), *layers])
    compile_(model)
    return model, layers[1]


def compile_(model):
    model.compile(keras.optimizers.Adam(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))


def fit(model, samples, *callbacks):
    x, y = (array[:64] for array in samples)
    model.fit(x, y, batch_size=16, epochs=1, verbose=0, callbacks=list(callbacks))


def zeros(model):
    return [int((model.get_layer(name).kernel.numpy() == 0).sum()) for name in ("hidden", "logits")]


class NeverLeaks(keras.callbacks.Callback):
    """Requires after every batch that at least so many entries are zero."""

    def __init__(self, least):
        super().__init__()
        self._least = least

    def on_train_batch_end(self, batch, logs=None):
        assert all(found >= least for found, least in zip(zeros(self.model), self._least, strict=True))


def test_a_second_callback_traces_nothing_and_prunes_exactly(samples):
    model, counting = make()
    fit(model, samples, PruningCallback(HALF, allocation="uniform"), NeverLeaks([64, 32]))
    before = counting.traces
    fit(model, samples, PruningCallback(ConstantSparsity(0.75), allocation="uniform"), NeverLeaks([96, 48]))
    fit(model, samples, PruningCallback(ConstantSparsity(0.75), allocation="uniform"))
    assert counting.traces == before
    assert zeros(model) == [96, 48]


def test_a_second_callback_enforces_its_own_masks_only(samples):
    model, counting = make()
    fit(model, samples, PruningCallback(ConstantSparsity(0.75), allocation="uniform"))
    before = counting.traces
    generator = np.random.default_rng(0)
    for name in ("hidden", "logits"):
        kernel = model.get_layer(name).kernel
        kernel.assign(generator.normal(size=tuple(kernel.shape)))
    fit(model, samples, PruningCallback(HALF, allocation="uniform"), NeverLeaks([64, 32]))
    assert counting.traces == before
    assert zeros(model) == [64, 32]


def test_the_former_callback_keeps_its_masks_and_can_be_used_again(samples):
    model, _ = make()
    former = PruningCallback(HALF, allocation="uniform")
    fit(model, samples, former)
    masks = former.pruner.masks
    fit(model, samples, PruningCallback(ConstantSparsity(0.75), allocation="uniform"))
    for name, mask in former.pruner.masks.items():
        np.testing.assert_array_equal(mask, masks[name])
    assert former.report.events[-1].reached == 0.5
    for variable in model.trainable_variables:
        variable.assign(np.random.default_rng(1).normal(size=tuple(variable.shape)))
    former.pruner.enforce()
    fit(model, samples, former, NeverLeaks([64, 32]))
    assert zeros(model) == [64, 32]


def recompile(model):
    compile_(model)


def freeze(model):
    model.get_layer("hidden").bias.trainable = False


def constrain(model):
    model.get_layer("hidden").kernel.constraint = keras.constraints.NonNeg()


def change_activation(model):
    model.get_layer("hidden").activation = keras.activations.tanh


def clip(model):
    model.optimizer.clipnorm = 1.0


@pytest.mark.parametrize(
    "change", [recompile, freeze, constrain, change_activation, clip], ids=lambda one: one.__name__
)
def test_what_changes_the_step_is_traced_again(samples, change):
    model, counting = make()
    fit(model, samples, PruningCallback(HALF, allocation="uniform"))
    before = counting.traces
    change(model)
    fit(model, samples, PruningCallback(HALF, allocation="uniform"), NeverLeaks([64, 32]))
    assert counting.traces > before
    before = counting.traces
    fit(model, samples, PruningCallback(ConstantSparsity(0.75), allocation="uniform"), NeverLeaks([96, 48]))
    assert counting.traces == before
    assert zeros(model) == [96, 48]


def test_other_weights_are_traced_again(samples):
    model, counting = make()
    fit(model, samples, PruningCallback(HALF, include="hidden", allocation="uniform"))
    before = counting.traces
    fit(model, samples, PruningCallback(HALF, allocation="uniform"), NeverLeaks([64, 32]))
    assert counting.traces > before
    assert zeros(model) == [64, 32]


def test_a_trace_made_beside_another_callback_is_not_used_again(samples):
    model, counting = make()
    fit(
        model,
        samples,
        PruningCallback(HALF, include="hidden", allocation="uniform"),
        PruningCallback(HALF, include="logits", allocation="uniform"),
    )
    assert zeros(model) == [64, 32]
    generator = np.random.default_rng(0)
    model.get_layer("hidden").kernel.assign(generator.normal(size=(8, 16)))
    before = counting.traces
    fit(model, samples, PruningCallback(HALF, include="logits", allocation="uniform"))
    assert counting.traces > before
    assert zeros(model) == [0, 32]


def test_a_pruner_that_is_attached_is_not_forgotten(samples):
    model, _ = make()
    fit(model, samples, PruningCallback(HALF, include="logits", allocation="uniform"))
    with Pruner(model, HALF, include="hidden", allocation="uniform") as pruner:
        fit(model, samples, PruningCallback(HALF, include="logits", allocation="uniform"), NeverLeaks([64, 32]))
        pruner.step()
    assert zeros(model) == [64, 32]


def test_a_fit_without_a_callback_is_dense_again(samples):
    model, _ = make()
    fit(model, samples, PruningCallback(HALF, allocation="uniform"))
    fit(model, samples)
    assert max(zeros(model)) < 4


def test_what_is_kept_keeps_no_model_alive_and_enters_no_file(samples, tmp_path):
    model, _ = make()
    fit(model, samples, PruningCallback(HALF, allocation="uniform"))
    clean = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
    compile_(clean)
    fit(clean, samples, PruningCallback(HALF, allocation="uniform"))
    clean.save(tmp_path / "model.keras")
    assert b"prunekit" not in (tmp_path / "model.keras").read_bytes()
    assert len(keras.models.load_model(tmp_path / "model.keras").variables) == len(clean.variables)
    watched = weakref.ref(model)
    del model, _
    gc.collect()
    assert watched() is None
