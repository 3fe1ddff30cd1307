"""Networks to export, and what an export left in its folder."""

import keras
import numpy as np
from backends import BACKEND
from keras import layers

# One format of each kind that the backend can write.
KINDS = ["keras", "litert"] if BACKEND == "tensorflow" else ["keras"]


def prune(model, sparsity, block=1):
    """Sets the smallest weights of all kernels to zero, on Dense kernels in blocks of (block, 1)."""
    for variable in model.trainable_variables:
        weight = variable.numpy()
        if weight.ndim < 2 or not sparsity:
            continue
        height = block if weight.ndim == 2 else 1
        rows = np.abs(weight).reshape(-1, height, weight.shape[-1]).mean(1)
        order = np.argsort(rows, axis=None, kind="stable")[: round(sparsity * rows.size)]
        rows.flat[order] = 0
        variable.assign(np.where(np.repeat(rows != 0, height, 0).reshape(weight.shape), weight, 0))
    return model


def mobile_network(middle, sparsity=0.9, stem=True, head="dense"):
    """A network in the shape that XNNPACK runs sparse, with something in its middle."""
    inputs = x = keras.Input((16, 16, 3))
    x = layers.ZeroPadding2D(1)(x) if stem else x
    x = layers.Conv2D(16, 3, strides=2, padding="valid" if stem else "same", activation="relu")(x)
    x = middle(layers.Conv2D(32, 1, activation="relu")(x))
    x = layers.Conv2D(32, 1, activation="relu")(x)
    outputs = {
        "dense": lambda: layers.Dense(5)(layers.GlobalAveragePooling2D()(x)),
        "convolution": lambda: layers.Flatten()(layers.Conv2D(5, 1)(layers.GlobalAveragePooling2D(keepdims=True)(x))),
        "flatten": lambda: layers.Dense(5)(layers.Flatten()(x)),
        "two outputs": lambda: [layers.Dense(5)(layers.GlobalAveragePooling2D()(x)), layers.Conv2D(2, 1)(x)],
    }[head]()
    return prune(keras.Model(inputs, outputs), sparsity)


def identity(x):
    return x


def left_in(folder):
    return sorted(path.name for path in folder.iterdir())
