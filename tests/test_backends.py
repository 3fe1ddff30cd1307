"""What is promised of every backend: the same masks, exact zeros after any batch."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
from pathlib import Path

import backend_masks
import keras
import numpy as np
import pytest
from backends import (
    BACKEND,
    as_on_an_accelerator,
    batches_read_ahead,
    jax_only,
    sync_model_state,
    tensorflow_only,
    zero_counts,
)

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay
from prunekit.techniques.pruning.masks.mask_store import LeakError
from prunekit.techniques.pruning.training.callbacks import PruningCallback
from prunekit.techniques.pruning.training.pruner import Pruner

pytestmark = pytest.mark.every_backend
HERE = Path(__file__).parent
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
RISE = PolynomialDecay(0.2, 0.75, begin_step=0, end_step=8, frequency=3)


@pytest.fixture
def compiled(perceptron):
    perceptron.compile(keras.optimizers.Adam(0.01), LOSS)
    return perceptron


class Audit(keras.callbacks.Callback):
    """Looks at every weight, slot and optimizer variable after each batch, with NumPy alone."""

    def __init__(self, pruning, hand_over):
        super().__init__()
        self.pruning, self.hand_over = pruning, hand_over
        self.sparsities, self.counts, self.left_in_fit = [], [], 0

    @staticmethod
    def handed_back(model):
        return BACKEND != "jax" or model._jax_state_synced

    def on_train_batch_end(self, batch, logs=None):
        # A callback that looks at `self.model` has Keras hand the state back on JAX; this one may not.
        model = self._model
        if self.hand_over:
            sync_model_state(model)
        values = [variable.numpy() for variable in model.trainable_variables] if self.handed_back(model) else None
        if values is None:
            self.left_in_fit += 1
            values = map(np.asarray, model._jax_state["trainable_variables"])
        kernels = [value for v, value in zip(model.trainable_variables, values, strict=True) if v.name == "kernel"]
        self.counts.append([int((kernel == 0).sum()) for kernel in kernels])
        self.sparsities.append(self.pruning.pruner.events[-1].asked)


@pytest.mark.parametrize("hand_over", [True, pytest.param(False, marks=jax_only)], ids=["asked for", "left in fit"])
@pytest.mark.parametrize("optimizer", ["adam", "muon"])
def test_after_every_batch_exactly_what_was_asked_is_zero(compiled, samples, optimizer, hand_over):
    compiled.compile(optimizer, LOSS)
    pruning = PruningCallback(RISE, allocation="uniform")
    audit = Audit(pruning, hand_over)
    compiled.fit(*samples, batch_size=16, epochs=3, verbose=0, callbacks=[pruning, audit])
    sizes = [layer.kernel.numpy().size for layer in compiled.layers]
    assert audit.counts == [[round(asked * size) for size in sizes] for asked in audit.sparsities]
    assert audit.sparsities == [RISE(RISE.latest_update(step)) for step in range(1, 16)]
    assert zero_counts(compiled) == [96, 48]
    assert (audit.left_in_fit > 0) != hand_over


OPTIMIZERS = {
    name: kind
    for name, kind in sorted(vars(keras.optimizers).items())
    if inspect.isclass(kind) and issubclass(kind, keras.optimizers.Optimizer) and kind is not keras.optimizers.Optimizer
}
# Each is tried with some optimizers: (its arguments, those of `compile`, policy).
VARIANTS = {
    "plain": ({}, {}, "float32"),
    "EMA overwrite": ({"use_ema": True, "ema_overwrite_frequency": 2}, {}, "float32"),
    "accumulation": ({"gradient_accumulation_steps": 2}, {}, "float32"),
    "mixed_float16": ({}, {}, "mixed_float16"),
    "eagerly": ({"weight_decay": 0.1}, {"run_eagerly": True}, "float32"),
    "not compiled": ({"global_clipnorm": 0.05}, {"jit_compile": False}, "float32"),
    # Keras refuses more than one on PyTorch.
    "steps per execution": ({"clipnorm": 0.1}, {"steps_per_execution": 1 if BACKEND == "torch" else 3}, "float32"),
}
PAIRS = [(name, list(VARIANTS)[i % len(VARIANTS)]) for i, name in enumerate(OPTIMIZERS)]
PAIRS += [("SGD", variant) for variant in VARIANTS if ("SGD", variant) not in PAIRS]
WRAPPED = ("LossScaleOptimizer", "MultiOptimizer")


def build_optimizer(name, arguments):
    if name == "LossScaleOptimizer":
        return keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.01, **arguments), initial_scale=1024.0)
    if name == "MultiOptimizer":
        chosen = {"hidden/.*": keras.optimizers.SGD(0.1, momentum=0.9, **arguments)}
        return keras.optimizers.MultiOptimizer(
            keras.optimizers.OptimizerMap(keras.optimizers.Adam(0.01, **arguments), chosen)
        )
    return OPTIMIZERS[name](**arguments)


# The leak matrix has these cells, too; here they are checked in another way.
@pytest.mark.thorough
@pytest.mark.parametrize(("name", "variant"), PAIRS, ids=lambda value: value)
def test_zeros_hold_with_every_optimizer(samples, name, variant):
    arguments, settings, policy = VARIANTS[variant]
    layers = [
        keras.layers.Dense(16, "relu", name="hidden", dtype=policy),
        keras.layers.Dense(4, name="logits", dtype=policy),
        keras.layers.Activation("linear", dtype="float32"),
    ]
    model = keras.Sequential([keras.Input((8,)), *layers])
    optimizer = build_optimizer(name, arguments)
    if policy == "mixed_float16" and name not in WRAPPED:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=1024.0)
    model.compile(optimizer, LOSS, **settings)
    # 8 updates, also where two batches make one.
    pruning = PruningCallback(RISE, allocation="uniform")
    audit = Audit(pruning, hand_over=True)
    model.fit(*samples, batch_size=16, epochs=4, verbose=0, callbacks=[pruning, audit])
    zeroed = [[round(asked * size) for size in (128, 64)] for asked in audit.sparsities]
    # Ftrl makes zeros of its own.
    assert audit.counts == zeroed or name == "Ftrl"
    assert all(now[i] >= asked[i] for now, asked in zip(audit.counts, zeroed, strict=True) for i in (0, 1))
    assert {name: int((~mask).sum()) for name, mask in pruning.pruner.masks.items()} == {
        "hidden/kernel": 96,
        "logits/kernel": 48,
    }
    assert not any(pruning.pruner.audit().values())
    for variable in [*model.variables, *optimizer.variables]:
        assert np.isfinite(np.asarray(variable.numpy(), "float64")).all(), variable.path
    assert not any("mask" in variable.name for variable in optimizer.variables)


# ---------------------------------------------------------------- the same masks


@tensorflow_only
@pytest.mark.parametrize("every", [3, pytest.param(1, marks=pytest.mark.thorough)], ids=["some cases", "all cases"])
@pytest.mark.parametrize("other", [pytest.param("jax", marks=pytest.mark.thorough), "torch"])
def test_masks_are_the_same_to_the_bit_on_every_backend(other, every):
    if importlib.util.find_spec(other) is None:
        pytest.skip(f"{other} is not installed")
    environment = {**os.environ, "KERAS_BACKEND": other, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    command = [sys.executable, str(HERE / "support" / "backend_masks.py"), str(every)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout.splitlines()[-1]) == backend_masks.digests(every)


@pytest.mark.skipif(BACKEND == "tensorflow", reason="is about machines without TensorFlow")
def test_what_every_backend_has_needs_no_tensorflow(tmp_path):
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parent), *sys.path])}
    command = [sys.executable, str(HERE / "support" / "without_tensorflow.py"), str(tmp_path)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    found = json.loads(run.stdout.splitlines()[-1])
    assert found.pop("tensorflow") == []
    (_, status, _), (_, refused, note) = found.pop("export")
    assert (status, refused) == ("ok", "refused") and "KERAS_BACKEND=tensorflow" in note
    assert found.pop("gradients").startswith("prunekit.gradients.hvp needs the package tensorflow, which is not")
    recipes = found.pop("recipes")
    for name, setting in (
        ("images", "data.images"),
        ("tfds_saved", "data.tfds_saved"),
        ("lookup", "data.preprocessing: IntegerLookup"),
    ):
        code, (line,) = recipes.pop(name)
        wanted = f"{setting} needs TensorFlow on every backend of Keras."
        assert code == 2 and line.startswith("error: ") and wanted in line, line
    assert recipes == dict.fromkeys(["check", "compress", "report", "csv", "csv on disk"], [0, []])
    pruned = {"fit": [96, 48], "loop": [64, 32], "prune": [64, 32], "inspect": 0.6792, "loaded": [96, 48]}
    assert found == {**pruned, "quantize": [True, True]}


# ---------------------------------------------------------------- further fits, and errors in a fit


def test_a_second_fit_with_averages_continues(compiled, samples):
    compiled.compile(build_optimizer("LossScaleOptimizer", {"use_ema": True}), LOSS)
    # At its end Keras has weights and averages share arrays, which JAX alone minds.
    compiled.fit(*samples, batch_size=16, verbose=0)
    pruning = PruningCallback(ConstantSparsity(0.5, begin_step=0), allocation="uniform")
    for _ in range(2):
        compiled.fit(*samples, batch_size=16, verbose=0, callbacks=[pruning])
        compiled.evaluate(*samples, verbose=0)
        assert zero_counts(compiled) == [64, 32] and not any(pruning.pruner.audit().values())
    with Pruner(compiled, ConstantSparsity(0.75, begin_step=0), allocation="uniform") as pruner:
        compiled.train_on_batch(*samples)
        pruner.step()
    assert zero_counts(compiled) == [96, 48]


@pytest.mark.every_backend(cases=2)
@pytest.mark.parametrize("together", [1, 2], ids=["one callback", "two callbacks"])
@pytest.mark.parametrize(
    "accelerator", [False, pytest.param(True, marks=jax_only)], ids=["this device", "as on an accelerator"]
)
def test_an_error_while_a_batch_is_read_leaves_weights_as_the_newest_masks_have_them(
    compiled, samples, together, accelerator, monkeypatch
):
    if accelerator:
        as_on_an_accelerator(monkeypatch)
    updates = 5 - batches_read_ahead()
    x, y = (array[:16] for array in samples)
    batches = (pair if pair is not None else 1 / 0 for pair in [(x, y)] * 5 + [None])
    every_step = PolynomialDecay(0.2, 0.75, begin_step=0, end_step=8, frequency=1)
    pruning = [
        PruningCallback(every_step, include=[name], allocation="uniform") for name in ("hidden", "logits")[:together]
    ]
    # TensorFlow has an error of its own for it.
    with pytest.raises(Exception, match="division by zero"):
        compiled.fit(batches, steps_per_epoch=8, shuffle=False, verbose=0, callbacks=pruning)
    # What a schedule asks after so many updates, of the layers that are pruned.
    share = 0.75 + (0.2 - 0.75) * (1 - updates / 8) ** 3
    assert zero_counts(compiled)[:together] == [round(share * 128), round(share * 64)][:together]
    assert [sum(each.pruner.audit().values()) for each in pruning] == [0] * together
    held = [*compiled.trainable_variables, *compiled.optimizer.variables]
    assert not any("mask" in variable.path for variable in held)
    slots = [v.numpy() for v in compiled.optimizer.variables if "hidden_kernel" in v.path]
    assert len(slots) == 2 and all(not slot[compiled.layers[0].kernel.numpy() == 0].any() for slot in slots)


# ---------------------------------------------------------------- JAX: loops that are not as they should be


@jax_only
def test_a_loop_that_took_the_optimizers_variables_before_the_pruner_is_refused_by_keras(compiled, samples):
    optimizer = compiled.optimizer
    optimizer.build(compiled.trainable_variables)
    early = [variable.value for variable in optimizer.variables]
    values = [variable.value for variable in compiled.trainable_variables]
    with Pruner(compiled, ConstantSparsity(0.5), allocation="uniform"):
        assert len(optimizer.variables) == len(early) + 2
        with pytest.raises(ValueError, match="Received list with length 10, but expected 12"):
            optimizer.stateless_apply(early, [value * 0 for value in values], values)
    assert len(optimizer.variables) == len(early)


@jax_only
def test_a_loop_that_never_writes_its_state_into_the_variables_is_detected(compiled, samples):
    optimizer = compiled.optimizer
    optimizer.build(compiled.trainable_variables)
    with Pruner(compiled, ConstantSparsity(0.5, frequency=1), allocation="uniform") as pruner:
        trainable, own = [[v.value for v in each] for each in (compiled.trainable_variables, optimizer.variables)]
        trainable, own = optimizer.stateless_apply(own, [value * 0 + 1 for value in trainable], trainable)
        # Enforced all the same: the masks are in the state.
        assert [int((np.asarray(trainable[i]) == 0).sum()) for i in (0, 2)] == [64, 32]
        with pytest.raises(LeakError, match="no update passed through Adam"):
            pruner.step()


def test_an_optimizer_saved_while_a_pruner_is_attached_loads_without_it(compiled, samples, tmp_path):
    with Pruner(compiled, ConstantSparsity(0.5), allocation="uniform") as pruner:
        compiled.train_on_batch(*samples)
        pruner.step()
        compiled.save(tmp_path / "model.keras")
        inside = [variable.path for variable in compiled.optimizer.variables]
    loaded = keras.models.load_model(tmp_path / "model.keras")
    own = [variable.path for variable in compiled.optimizer.variables]
    assert len(loaded.optimizer.variables) == len(own)
    assert (len(inside) > len(own)) == (BACKEND == "jax")
    for one, other in zip(loaded.optimizer.variables, compiled.optimizer.variables, strict=True):
        np.testing.assert_array_equal(one.numpy(), other.numpy())
