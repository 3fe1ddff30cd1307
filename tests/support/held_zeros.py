"""Zeros of a model, counted in the middle of `fit`; and that nothing of prunekit's is left on it."""

import keras
import numpy as np
from backends import sync_model_state

from prunekit.sparsity.schedules import ConstantSparsity, PolynomialDecay

LOSS = keras.losses.SparseCategoricalCrossentropy
RISE = PolynomialDecay(initial_sparsity=0.2, final_sparsity=0.75, begin_step=0, end_step=8, frequency=3)
AT_ONCE = ConstantSparsity(target_sparsity=0.5, frequency=1)


def kernels(model):
    sync_model_state(model)
    return [np.array(v.numpy()) for v in model.trainable_variables if v.name == "kernel"]


def zeros(model):
    return [int(np.count_nonzero(kernel == 0)) for kernel in kernels(model)]


def expected(model, sparsity):
    return [round(sparsity * kernel.size) for kernel in kernels(model)]


def assert_own(owner):
    """No attribute of the object is prunekit's."""
    for name, value in vars(owner).items():
        module = getattr(value, "__module__", None) or type(value).__module__
        assert not module.startswith("prunekit"), f"{type(owner).__name__}.{name} is {value!r}"


def assert_pristine(model, optimizers=None):
    """Nothing of prunekit's is on the model, its layers, its weights or its optimizers."""
    owners = [model, *model.layers, *model.variables, *(optimizers or [model.optimizer])]
    for owner in owners:
        assert_own(owner)
    for optimizer in optimizers or [model.optimizer]:
        assert "apply" not in vars(optimizer), f"{optimizer.name}.apply is {optimizer.apply!r}"


class Spy(keras.callbacks.Callback):
    """Counts zeros after each batch and checks that they never become fewer; True in `zeroed` is forever."""

    def __init__(self):
        super().__init__()
        self.zeroed, self.counts = None, []

    def on_train_batch_end(self, batch, logs=None):
        now = [kernel == 0 for kernel in kernels(self.model)]
        if self.zeroed is not None:
            grown = [int(np.sum(was & ~is_now)) for was, is_now in zip(self.zeroed, now, strict=True)]
            assert not any(grown), f"batch {batch}: of the zeros of each kernel, {grown} are none any more"
        self.zeroed = now
        self.counts.append(zeros(self.model))
        assert_pristine(self.model)
