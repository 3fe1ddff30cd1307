"""A small network whose masks move, its data, and the recipes and records of its trainings."""

from pathlib import Path

import keras
import numpy as np
from keras import ops
from networks import dense_network

import prunekit as pk

STEADY = pk.schedules.ConstantSparsity(0.75, begin_step=0, frequency=4)


def make_data():
    """Inputs of 10 numbers and targets of 3, linear in them."""
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(120, 10)).astype("float32")
    return inputs, inputs @ rng.normal(size=(10, 3)).astype("float32")


def network(optimizer=None):
    """A perceptron with 160 and 48 weights."""
    model = dense_network(10, seed=0, hidden=16, head=3)
    model.compile(optimizer or keras.optimizers.Adam(0.01), "mse")
    return model


def values(model):
    """The kernels by the names of their layers."""
    return {name: ops.convert_to_numpy(model.get_layer(name).kernel) for name in ("hidden", "head")}


class Watch(keras.callbacks.Callback):
    """Records masks and leaks after each batch."""

    def __init__(self, pruning):
        super().__init__()
        self.pruning, self.masks, self.leaks = pruning, [], 0

    def on_train_batch_end(self, batch, logs=None):
        pruner = self.pruning.pruner
        self.masks.append(pruner.masks)
        self.leaks += sum(pruner.audit().values())


def trained(policy, examples, epochs=2, schedule=STEADY, optimizer=None, **options):
    """(model, callback, watch) after a training in 12 batches of 10 for each epoch."""
    model = network(optimizer)
    pruning = pk.PruningCallback(schedule, policy=policy, **{"allocation": "uniform"} | options)
    watch = Watch(pruning)
    model.fit(*examples, batch_size=10, epochs=epochs, verbose=0, shuffle=False, callbacks=[pruning, watch])
    return model, pruning, watch


def whole_and_resumed(policy, schedule, data, folder: Path):
    """Weights after a recipe of 3 epochs, and after the same one interrupted in the second epoch and resumed."""
    document = {
        "version": 1,
        "seed": 2,
        "compile": {"optimizer": "adam", "loss": "mse", "batch_size": 10},
        "steps": [{"prune": {"epochs": 3, "schedule": schedule, "policy": policy, "allocation": "uniform"}}],
    }
    whole = pk.compress(document, network(), (data, data), folder / "whole").model.get_weights()

    class Stop(Exception):
        pass

    def stop(progress):
        if progress.epoch == 2:
            raise Stop

    try:
        pk.compress(document, network(), (data, data), folder / "parts", progress=stop)
    except Stop:
        resumed = pk.compress(document, network(), (data, data), folder / "parts", resume=True)
        return whole, resumed.model.get_weights()
    raise RuntimeError("the run was not interrupted")
