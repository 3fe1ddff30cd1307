"""Training of the models of `fit_built_models`, and what is read from them meanwhile."""

import keras
import numpy as np
from fit_built_models import BACKEND, KINDS

import prunekit as pk
from prunekit.anatomy.layers.model_weights import weights_in


def schedule(**options):
    return pk.schedules.PolynomialDecay(**{"final_sparsity": 0.75, "end_step": 9, "frequency": 2, **options})


def fit(model, name, *callbacks, epochs=4, **arguments):
    options = {"batch_size": 16, "shuffle": False, "verbose": 0, "epochs": epochs, **KINDS[name].arguments()}
    return model.fit(callbacks=list(callbacks), **{**options, **arguments})


def values_of(model):
    """{weight name: array}, read from the variables themselves."""
    return {weight.name: np.array(keras.ops.convert_to_numpy(weight.variable.value)) for weight in weights_in(model)}


class Watch(keras.callbacks.Callback):
    """After each batch: how many weights that were zero before are zero no more."""

    def __init__(self, names):
        super().__init__()
        self.names, self.zeros, self.leaks, self.batches = names, {}, 0, 0

    def on_train_batch_end(self, batch, logs=None):
        if BACKEND == "jax":
            self.model.jax_state_sync()
        self.batches += 1
        for name, value in values_of(self.model).items():
            if name in self.names:
                now = value == 0
                self.leaks += int((self.zeros.get(name, now) & ~now).sum())
                self.zeros[name] = now
