"""tensorflow-model-optimization on given numbers: the other half of every comparison in this folder."""

import os
import warnings

import numpy as np
import tensorflow as tf

_former = os.environ.get("TF_USE_LEGACY_KERAS")
with warnings.catch_warnings():
    # It compares versions with distutils, which warns.
    warnings.simplefilter("ignore", DeprecationWarning)
    import tensorflow_model_optimization as tfmot
    from tensorflow_model_optimization.python.core.sparsity.keras.pruning_impl import Pruning
# Its import turns tf.keras into tf_keras for this process and for all that it starts.
os.environ.pop("TF_USE_LEGACY_KERAS", None)
if _former is not None:
    os.environ["TF_USE_LEGACY_KERAS"] = _former

sparsity = tfmot.sparsity.keras


def at_steps(schedule, steps, compiled=True):
    """(whether masks change, sparsity) at each step, as two arrays: of eager calls, or of a graph as in `fit`."""
    step = tf.Variable(0, dtype=tf.int64)

    def asked():
        return schedule(step)

    ask = tf.function(asked) if compiled else asked
    rows = []
    for each in steps:
        step.assign(each)
        rows.append([one.numpy() for one in ask()])
    due, values = zip(*rows, strict=True)
    return np.array(due), np.array(values)


class Masker:
    """One weight, with the mask and the threshold that the wrapper holds for it."""

    def __init__(self, weight, schedule=None, block=(1, 1), pooling="AVG", m_by_n=None):
        self.weight = tf.Variable(weight)
        self.mask = tf.Variable(tf.ones_like(self.weight))
        self.step = tf.Variable(0, dtype=tf.int64)
        variables = [(self.weight, self.mask, tf.Variable(tf.zeros((), self.weight.dtype)))]
        schedule = schedule or sparsity.ConstantSparsity(0.5, 1, frequency=1)
        self._pruning = Pruning(lambda: self.step, variables, schedule, block, pooling, m_by_n)
        self._compiled = tf.function(self._update)

    def _update(self):
        self._pruning.conditional_mask_update()

    def at(self, step, compiled=False):
        """The mask after a forward pass that is counted as `step`, True = kept; the weight stays as it is."""
        self.step.assign(step)
        (self._compiled if compiled else self._update)()
        return self.mask.numpy().astype(bool)

    def masked(self):
        """The weight after a forward pass that changed no mask."""
        self._pruning.weight_mask_op()
        return self.weight.numpy()


def mask_of(weight, asked=0.5, **options):
    """The mask of a weight at a constant sparsity."""
    return Masker(weight, sparsity.ConstantSparsity(asked, 1, frequency=1), **options).at(1)
