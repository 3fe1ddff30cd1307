"""Models whose weights are drawn again, and their kernels."""

import keras
from keras import layers

from prunekit.anatomy.layers.targets import find_targets


def built(layer, shape, dtype="float32"):
    return keras.Sequential([keras.Input(shape, dtype=dtype), layer])


def kernels(model):
    return {target.name: target.variable.numpy() for target in find_targets(model, also=("depthwise_kernel",))[0]}


def wide(dtype="float32", units=(300, 200)):
    sizes = [layers.Dense(n, dtype=dtype, name=f"dense_{i}") for i, n in enumerate(units)]
    return keras.Sequential([keras.Input((400,), dtype=dtype), *sizes])
