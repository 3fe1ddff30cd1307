"""Digests of masks, one for each case, printed as JSON: run once on each backend, the answers must be equal.

Usage: KERAS_BACKEND=jax python tests/support/backend_masks.py [EVERY]   of the cases only every EVERY-th
"""

import functools
import hashlib
import json
import sys
import warnings

import keras
import numpy as np
from keras import ops
from networks import sequential

from prunekit.operations.prune import prune
from prunekit.sparsity.schedules import OneShot
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.training.pruner_run import PrunerRun

LAYERS = {
    "image": lambda dtype: sequential(
        (6, 6, 3), keras.layers.Conv2D(10, 3, dtype=dtype), keras.layers.DepthwiseConv2D(3, dtype=dtype)
    ),
    "dense": lambda dtype: sequential((36,), keras.layers.Dense(52, dtype=dtype), keras.layers.Dense(7, dtype=dtype)),
    "words": lambda dtype: sequential(
        (5,), keras.layers.Embedding(44, 12, dtype=dtype), keras.layers.LSTM(6, dtype=dtype)
    ),
}
# What weights can look like: no two equal; ties everywhere; a codebook; one whose channels hold the same values, each
# in another order, so that their sums differ by rounding alone; zeros of both signs; values of all magnitudes.
WEIGHTS = {
    "normal": lambda rng, shape: rng.normal(size=shape),
    "all equal": lambda rng, shape: np.full(shape, -0.3),
    "codebook": lambda rng, shape: rng.choice([-0.7, -0.3, 0.1, 0.2, 0.9], shape),
    "shuffled": lambda rng, shape: rng.permuted(np.resize([-0.7, -0.3, 0.1, 0.2, 0.9], shape[::-1]), axis=-1).T,
    "zeros": lambda rng, shape: rng.choice([0.0, -0.0, 1.0, -2.0], shape) * rng.normal(size=shape).round(1),
    "far apart": lambda rng, shape: 10.0 ** rng.uniform(-15, 15, shape) * rng.choice([-1, 1], shape),
}


def least_first(weight):
    return -ops.abs(weight)


# (layers, weights, type, criterion, pattern, allocation)
CASES = [
    ("image", "normal", "float32", "magnitude", "unstructured", "global"),
    ("words", "codebook", "float32", "magnitude", "unstructured", "erk"),
    ("dense", "all equal", "float32", "magnitude", "unstructured", "global"),
    ("dense", "codebook", "float32", "magnitude", "block:4x1", "uniform"),
    ("dense", "shuffled", "float32", "magnitude", "channel", "uniform"),
    ("dense", "shuffled", "float32", "l2", "channel", "uniform"),
    ("dense", "normal", "bfloat16", "l2", "block:3x5", "global"),
    ("image", "codebook", "float32", "l2", "channel", "uniform"),
    ("image", "normal", "float32", "random", "block:2x2:max", "erk"),
    ("dense", "codebook", "float32", "magnitude", "2:4", "uniform"),
    ("dense", "far apart", "float32", "l2", "unstructured", "global"),
    ("image", "zeros", "float32", "magnitude", "unstructured", "global"),
    ("words", "normal", "float32", least_first, "block:4x2", "uniform"),
    ("image", "normal", "float16", "magnitude", "channel", "global"),
]


def digest(layers, weights, dtype, criterion, pattern, allocation) -> str:
    """Of the masks at 0.3 and, on top of these, at 0.6."""
    model, rng = LAYERS[layers](dtype), np.random.default_rng(4)
    for variable in model.trainable_variables:
        variable.assign(WEIGHTS[weights](rng, variable.shape).astype("float32"))
    options = {"criterion": criterion, "pattern": pattern, "allocation": allocation}
    found = hashlib.sha256()
    # N:M patterns have one sparsity.
    for sparsity in (0.5,) if pattern == "2:4" else (0.3, 0.6):
        pruner = PrunerRun(model, OneShot(sparsity=sparsity), PruningOptions(**{"allocation": "uniform"} | options))
        pruner.begin()
        # Not their names: Keras numbers layers on through a process.
        for mask in pruner.masks.values():
            found.update(np.packbits(mask).tobytes())
    with warnings.catch_warnings():
        # Where all weights are equal, the global allocation leaves one entry of a weight: prunekit says so.
        warnings.filterwarnings("ignore", "Sparsity .* leaves")
        prune(model, sparsity, **{"allocation": "uniform"} | options)
    for variable in model.trainable_variables:
        found.update(np.asarray(ops.convert_to_numpy(variable.value), "float32").tobytes())
    return found.hexdigest()


@functools.cache
def digests(every: int = 1) -> dict[str, str]:
    """{case: digest}, of every `every`-th case."""
    return {"/".join(getattr(part, "__name__", part) for part in case): digest(*case) for case in CASES[::every]}


if __name__ == "__main__":
    print(json.dumps(digests(*map(int, sys.argv[1:]))))
