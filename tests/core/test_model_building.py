"""Models that have no weights before `fit`, and models that stay unbuilt for Keras, are pruned like any other."""

import contextlib
import functools
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import h5py
import keras
import numpy as np
import pytest
from clusters import environment
from fit_built_models import BACKEND, KINDS, TENSORFLOW, Subclassed, compiled, features, labels
from fit_built_training import Watch, fit, schedule, values_of

import prunekit as pk
from prunekit.anatomy.layers.layers import sublayers
from prunekit.anatomy.layers.model_weights import weights_in

HERE = [name for name, kind in KINDS.items() if BACKEND in kind.on]
WAITING = [name for name in HERE if KINDS[name].waits]
every_kind = pytest.mark.parametrize("name", HERE)
on_tensorflow = pytest.mark.skipif(BACKEND != TENSORFLOW, reason="elsewhere Keras builds before callbacks run")


def state_of(model):
    """Batch statistics and random seeds."""
    return [np.array(keras.ops.convert_to_numpy(one.value)) for one in model.non_trainable_variables]


@dataclass(frozen=True)
class Trained:
    """A model after two epochs without prunekit, and what it held then."""

    model: keras.Model
    values: dict
    state: list


@functools.cache
def plain_training(name):
    model = compiled(name)
    fit(model, name, epochs=2)
    return Trained(model, values_of(model), state_of(model))


def keys_of(path):
    with h5py.File(path) as file:
        found = []
        file.visit(found.append)
    return sorted(found)


def saved_parts(model):
    """The model, or where Keras does not save it because it is not built, the models inside."""
    return [model] if model.built else [part for part in sublayers(model) if isinstance(part, keras.Model)]


def saved_names(model):
    parts = {id(variable) for part in saved_parts(model) for variable in part.weights}
    return [weight.name for weight in weights_in(model) if id(weight.variable) in parts]


@pytest.mark.every_backend
@pytest.mark.short(cases=3)
@every_kind
def test_counts_are_exact_and_nothing_leaks_after_any_batch(name, tmp_path):
    model, pruned = compiled(name), KINDS[name].pruned
    assert not model.built or not KINDS[name].waits or BACKEND != TENSORFLOW
    pruning, watch = pk.PruningCallback(schedule(), allocation="uniform"), Watch(pruned)
    history = fit(model, name, pruning, watch)
    values = values_of(model)
    assert sorted(pruning.report.targets) == sorted(pruned)
    assert {name: int((values[name] == 0).sum()) for name in pruned} == {
        name: round(0.75 * values[name].size) for name in pruned
    }
    assert (watch.leaks, watch.batches) == (0, 12)
    assert history.history["sparsity"][-1] == pytest.approx(0.75, abs=0.01)
    # The file holds what a model that was never pruned saves, and such a model reads it.
    plain = plain_training(name)
    for part, same in zip(saved_parts(model), saved_parts(plain.model), strict=True):
        part.save_weights(tmp_path / "pruned.weights.h5")
        same.save_weights(tmp_path / "plain.weights.h5")
        assert keys_of(tmp_path / "pruned.weights.h5") == keys_of(tmp_path / "plain.weights.h5")
        same.load_weights(tmp_path / "pruned.weights.h5")
    weights = values_of(plain.model)
    assert all(np.array_equal(weights[key], values[key]) for key in saved_names(model))


@pytest.mark.every_backend
@pytest.mark.short(cases=4)
@every_kind
def test_before_the_schedule_begins_training_is_that_of_keras_to_the_bit(name):
    ours = compiled(name)
    with pytest.warns(UserWarning, match="The schedule lands on sparsity 0.75 at step 99"):
        fit(ours, name, pk.PruningCallback(schedule(begin_step=90, end_step=99), allocation="uniform"), epochs=2)
    plain = plain_training(name)
    assert all(np.array_equal(value, plain.values[key]) for key, value in values_of(ours).items())
    assert all(map(np.array_equal, state_of(ours), plain.state))


@on_tensorflow
def test_a_model_that_fit_builds_is_pruned_like_one_that_was_called_before():
    found = []
    for called in (False, True):
        model = compiled("subclassed")
        if called:
            model(features()[:1])
        # From the first update on, so that masks are there before it.
        fit(model, "subclassed", pk.PruningCallback(schedule(initial_sparsity=0.5), allocation="uniform"))
        found.append(values_of(model))
    assert all(np.array_equal(value, found[1][key]) for key, value in found[0].items())


def batches():
    import tensorflow as tf

    return tf.data.Dataset.from_tensor_slices((features(), labels())).batch(16)


def generator():
    while True:
        for start in range(0, 48, 16):
            yield features()[start : start + 16], labels()[start : start + 16]


class Table(keras.utils.PyDataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return features()[16 * index : 16 * index + 16], labels()[16 * index : 16 * index + 16]


FORMS = {
    "tf.data": lambda: {"x": batches(), "y": None, "batch_size": None},
    "generator": lambda: {"x": generator(), "y": None, "batch_size": None, "steps_per_epoch": 3},
    "PyDataset": lambda: {"x": Table(), "y": None, "batch_size": None},
    "sample weights": lambda: {"sample_weight": np.ones(48, "float32")},
    "validation": lambda: {"validation_data": (features(3), labels())},
}


@on_tensorflow
@pytest.mark.filterwarnings("ignore:.shuffle=")
@pytest.mark.short(cases=3)
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_data_builds_the_model(form):
    model, pruning, watch = (
        compiled("subclassed"),
        pk.PruningCallback(schedule(), allocation="uniform"),
        Watch(KINDS["subclassed"].pruned),
    )
    fit(model, "subclassed", pruning, watch, shuffle=None if form == "generator" else False, **FORMS[form]())
    assert (round(pruning.pruner.sparsity, 3), watch.leaks, watch.batches) == (0.75, 0, 12)


@pytest.mark.short(cases=2)
@on_tensorflow
@pytest.mark.parametrize("name", ["subclassed", "two optimizers"])
@pytest.mark.parametrize("options", [{"run_eagerly": True}, {"steps_per_execution": 3}, {"jit_compile": True}], ids=str)
def test_every_way_to_run_a_step_builds_the_model(name, options):
    model, pruning, watch = (
        compiled(name, **options),
        pk.PruningCallback(schedule(), allocation="uniform"),
        Watch(KINDS[name].pruned),
    )
    fit(model, name, pruning, watch)
    assert round(pruning.pruner.sparsity, 2) == 0.75
    assert watch.leaks == 0
    assert pruning.pruner.step_count == 12


class ReadsValues(Subclassed):
    """A step that cannot be traced: it reads numbers while it runs."""

    seen: list

    def train_step(self, data):
        self.seen.append(float(np.asarray(data[0]).sum()))
        return super().train_step(data)


@on_tensorflow
def test_an_eager_step_that_cannot_be_traced_trains_on_every_batch_once():
    model = ReadsValues()
    model.seen = []
    model.compile("adam", KINDS["subclassed"].compile()["loss"], run_eagerly=True)
    pruning = pk.PruningCallback(schedule(), allocation="uniform")
    fit(model, "subclassed", pruning)
    sums = [float(features()[start : start + 16].sum()) for start in range(0, 48, 16)] * 4
    # Once more for the first batch, which built the model without an update.
    np.testing.assert_allclose(model.seen, [sums[0], *sums], rtol=1e-5)
    assert (round(pruning.pruner.sparsity, 3), pruning.pruner.step_count) == (0.75, 12)


def compiled_parts(branch):
    """A model whose step is made of functions that it compiles itself, one of them with a branch on a value."""
    import tensorflow as tf

    class CompiledParts(Subclassed):
        @tf.function
        def loss_of(self, inputs, targets):
            loss = self.compute_loss(y=targets, y_pred=self(inputs, training=True))
            if branch and loss > 1e6:
                loss = loss * 0.0
            return loss

        @tf.function
        def train_step(self, data):
            with tf.GradientTape() as tape:
                loss = self.loss_of(*data)
            self.optimizer.apply(tape.gradient(loss, self.trainable_weights), self.trainable_weights)
            return {"loss": loss}

    return CompiledParts()


@on_tensorflow
@pytest.mark.parametrize("branch", [False, True], ids=["plain", "a branch on a value"])
def test_functions_that_a_step_compiles_itself_are_enforced(branch):
    model = compiled_parts(branch)
    model.compile("adam", KINDS["subclassed"].compile()["loss"])
    pruning, watch = pk.PruningCallback(schedule(), allocation="uniform"), Watch(KINDS["subclassed"].pruned)
    fit(model, "subclassed", pruning, watch)
    assert (round(pruning.pruner.sparsity, 3), watch.leaks, pruning.pruner.step_count) == (0.75, 0, 12)
    assert np.all(np.array(model.logits.bias.numpy()) != 0)


@on_tensorflow
def test_a_step_that_fails_before_the_weights_are_there_names_the_remedy():
    class Fails(Subclassed):
        def call(self, inputs, training=False):
            raise ArithmeticError("no such thing")

    model = Fails()
    model.compile("adam", KINDS["subclassed"].compile()["loss"])
    message = "could not be built from the first batch.*no such thing.*Call the model once on a batch"
    with pytest.raises(RuntimeError, match=re.compile(message, re.DOTALL)):
        fit(model, "subclassed", pk.PruningCallback(schedule(), allocation="uniform"))


@pytest.mark.short(cases=1)
@on_tensorflow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"include": ["hiden"]}, "matches no layer and no weight of the model.*Did you mean 'hidden'"),
        ({"pattern": "3:12"}, "multiple of 12"),
        ({"criterion": lambda weight: weight[0]}, "one importance per entry"),
    ],
    ids=["name", "pattern", "criterion"],
)
def test_what_does_not_fit_the_weights_is_refused_before_the_first_update(options, message):
    model = compiled("subclassed")
    with pytest.raises(ValueError, match=message):
        fit(model, "subclassed", pk.PruningCallback(schedule(initial_sparsity=0.5), **options))
    assert int(model.optimizer.iterations) == 0
    refused = values_of(model)
    plain = compiled("subclassed")
    plain(features()[:1])
    assert all(np.array_equal(value, refused[key]) for key, value in values_of(plain).items())
    # What is left is a plain model, which trains without a trace of the refusal.
    fit(model, "subclassed", epochs=1)
    fit(plain, "subclassed", epochs=1)
    trained = values_of(model)
    assert all(np.array_equal(value, trained[key]) for key, value in values_of(plain).items())


@on_tensorflow
@pytest.mark.filterwarnings("ignore:The model does not have any trainable weights")
def test_frozen_weights_that_fit_builds_are_refused_by_name():
    model = Subclassed(trainable=False)
    model.compile("sgd", KINDS["subclassed"].compile()["loss"])
    with pytest.raises(ValueError, match="All weights of '.*' are frozen"):
        fit(model, "subclassed", pk.PruningCallback(schedule(), allocation="uniform"))


@on_tensorflow
def test_two_callbacks_prune_each_its_own_weights_of_a_model_that_fit_builds():
    model = compiled("subclassed")
    low = pk.PruningCallback(schedule(final_sparsity=0.5), include=["hidden"], allocation="uniform")
    high = pk.PruningCallback(schedule(), include=["logits"], allocation="uniform")
    watch = Watch(KINDS["subclassed"].pruned)
    fit(model, "subclassed", low, watch, high)
    values = values_of(model)
    assert [int((values[f"{name}/kernel"] == 0).sum()) for name in ("hidden", "logits")] == [64, 48]
    assert watch.leaks == 0


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ["subclassed", "trainer of a functional model"])
def test_a_second_fit_continues_with_the_schedule(name):
    model, pruning = compiled(name), pk.PruningCallback(schedule(), allocation="uniform")
    with pytest.warns(UserWarning, match="The schedule lands"):
        fit(model, name, pruning, epochs=1)
    first = pruning.pruner
    fit(model, name, pruning, epochs=3)
    assert pruning.pruner is first
    assert (first.step_count, round(first.sparsity, 2)) == (12, 0.75)
    # Another callback finds the weights there.
    again = pk.PruningCallback(pk.schedules.ConstantSparsity(0.9, frequency=1), allocation="uniform")
    fit(model, name, again, epochs=1)
    assert round(again.pruner.sparsity, 2) == 0.9


@on_tensorflow
def test_weights_that_two_callbacks_would_prune_are_refused_before_a_mask_is_made():
    model = compiled("subclassed")
    both = [
        pk.PruningCallback(schedule(initial_sparsity=0.5), allocation="uniform"),
        pk.PruningCallback(schedule(), include=["logits"], allocation="uniform"),
    ]
    with pytest.raises(ValueError, match="must prune different weights.*logits/kernel"):
        fit(model, "subclassed", *both)
    assert not any((values_of(model)[name] == 0).any() for name in KINDS["subclassed"].pruned)


@on_tensorflow
def test_callbacks_driven_by_hand_build_the_model_in_train_on_batch():
    model, pruning = compiled("subclassed"), pk.PruningCallback(schedule(), allocation="uniform")
    calling = keras.callbacks.CallbackList([pruning], model=model, epochs=4, steps=3)
    calling.on_train_begin()
    calling.on_epoch_begin(0)
    for batch in range(12):
        calling.on_train_batch_begin(batch)
        model.train_on_batch(features(), labels())
        calling.on_train_batch_end(batch)
    calling.on_epoch_end(0)
    calling.on_train_end()
    assert (pruning.pruner.step_count, round(pruning.pruner.sparsity, 3)) == (12, 0.75)


@on_tensorflow
def test_a_loop_that_bypasses_the_train_function_is_asked_to_build_the_model():
    model, pruning = compiled("subclassed"), pk.PruningCallback(schedule(), allocation="uniform")
    calling = keras.callbacks.CallbackList([pruning], model=model)
    calling.on_train_begin()
    calling.on_train_batch_begin(0)
    model(features()[:4])
    with pytest.raises(RuntimeError, match="Call the model once on a batch of data before training"):
        calling.on_train_batch_end(0)


@on_tensorflow
@pytest.mark.filterwarnings("ignore:.shuffle=", "ignore:Your input ran out of data", "ignore:The schedule lands")
def test_data_without_a_batch_end_as_they_do_without_pruning():
    model, pruning = compiled("subclassed"), pk.PruningCallback(schedule(), allocation="uniform")
    with contextlib.suppress(ValueError):
        fit(model, "subclassed", pruning, x=batches().take(0), y=None, batch_size=None)
    assert all(np.all(np.isfinite(value)) for value in values_of(model).values())


REPLICAS = """
import sys
import numpy as np
from distributed_training import split_cpu
split_cpu(2)
import tensorflow as tf
from fit_built_models import KINDS, compiled
from fit_built_training import Watch, fit, schedule, values_of
import prunekit as pk
with tf.distribute.MirroredStrategy(["CPU:0", "CPU:1"]).scope():
    for name in sys.argv[1:]:
        model, pruning, watch = compiled(name), pk.PruningCallback(schedule()), Watch(KINDS[name].pruned)
        fit(model, name, pruning, watch)
        values = values_of(model)
        pruned = [values[key] for key in KINDS[name].pruned]
        exact = sum((one == 0).sum() for one in pruned) == round(0.75 * sum(one.size for one in pruned))
        print(f"{name}: {exact} {watch.leaks} {watch.batches}")
"""


@on_tensorflow
@pytest.mark.thorough
def test_on_several_replicas_models_are_built_and_pruned(tmp_path):
    names = ["subclassed", "dictionary of inputs"]
    done = subprocess.run(
        [sys.executable, "-c", REPLICAS, *names],
        env=environment(),
        cwd=Path(__file__).parent.parent / "support",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-2:] == [f"{name}: True 0 12" for name in names]
