"""Copies of the weights that a callback takes after each batch, and optimizers of every kind to train with."""

import itertools

import keras
import numpy as np
from networks import sequential

OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.1),
    "momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda: keras.optimizers.RMSprop(0.01),
    "adamw": lambda: keras.optimizers.AdamW(0.01, weight_decay=0.1),
    "clipped": lambda: keras.optimizers.Adam(0.01, global_clipnorm=0.1),
    "averaged": lambda: keras.optimizers.SGD(0.1, use_ema=True, ema_overwrite_frequency=3),
    "accumulating": lambda: keras.optimizers.Adam(0.01, gradient_accumulation_steps=2),
    "scaled": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1)),
    "muon": lambda: keras.optimizers.Muon(0.01),
}
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


class Copies(keras.callbacks.Callback):
    """Every trainable weight before the first batch and after each."""

    def on_train_begin(self, logs=None):
        self.taken = [self._now()]

    def on_train_batch_end(self, batch, logs=None):
        self.taken.append(self._now())

    def _now(self):
        return [np.array(variable.numpy(), "float64") for variable in self.model.trainable_variables]

    def changes(self, every=1):
        """(norms of changes, norms of weights), of shape (updates, weights)."""
        pairs = list(itertools.pairwise(self.taken[::every]))
        norms = [[np.linalg.norm(before) for before in old] for old, _ in pairs]
        return np.array([[np.linalg.norm(b - a) for a, b in zip(*pair, strict=True)] for pair in pairs]), np.array(
            norms
        )

    def movements(self):
        pairs = list(itertools.pairwise(self.taken))
        return [sum(old[i] * (new[i] - old[i]) for old, new in pairs) for i in range(len(self.taken[0]))]


def network(constraint=None):
    return sequential(
        (8,),
        keras.layers.Dense(16, "relu", name="hidden", kernel_constraint=constraint),
        keras.layers.Dense(4, name="logits"),
    )
