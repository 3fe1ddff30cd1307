"""Models with one weight, and the masks that prunekit makes for it."""

import functools

import keras
import numpy as np

from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner_run import PrunerRun


def holding(weight):
    """A model with a Dense or Conv layer that has the weight for its only one."""
    *window, inputs, outputs = weight.shape
    kinds = {0: keras.layers.Dense, 1: keras.layers.Conv1D, 2: keras.layers.Conv2D, 3: keras.layers.Conv3D}
    sizes = [tuple(window)] if window else []
    layer = kinds[len(window)](outputs, *sizes, use_bias=False)
    model = keras.Sequential([keras.Input((*[8] * len(window), inputs)), layer])
    model.set_weights([weight])
    return model


@functools.lru_cache(maxsize=64)
def _pruner(shape, options):
    return PrunerRun(holding(np.ones(shape, "float32")), OneShot(0.5), options)


def tfmot_mask(weight, asked, **options):
    """The mask with policy="tfmot" at a sparsity, by a pruner that is kept for all weights of this shape."""
    pruner = _pruner(weight.shape, PruningOptions(policy="tfmot", **options))
    pruner.model.set_weights([weight])
    asked = pruner.policy.check(OneShot(asked), pruner.options)(0)
    calculator = pruner.policy.calculator(pruner.model, pruner.targets, pruner.options, asked)
    return np.array(calculator.choose(asked, [pruner.store.mask(0)]).masks[0])
