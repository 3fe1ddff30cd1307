"""A small network with each kind of fused layer, data that it learns, and its training on integers."""

import keras
import numpy as np
from keras import layers as L

import prunekit as pk

CLASSES = 4
LOSS = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def data(examples=256):
    """Images of 8x8 pixels, one wave for each class in noise, and labels."""
    generator = np.random.default_rng(0)
    labels = generator.integers(0, CLASSES, examples).astype("int32")
    waves = np.sin(np.arange(8) * (1 + np.arange(CLASSES)[:, None]) * 0.7)[labels]
    noise = generator.normal(size=(examples, 8, 8, 1), scale=0.3)
    return (noise + waves[:, None, :, None]).astype("float32"), labels


def network(optimizer=None, *, compiled=True, **options):
    """A convolution with batch normalization and ReLU, a depthwise one with ReLU6, pooling and a Dense layer."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 1), name="image")
    y = L.Conv2D(6, 3, padding="same", use_bias=False, name="conv")(x)
    y = L.ReLU(name="relu")(L.BatchNormalization(momentum=0.8, name="norm")(y))
    y = L.DepthwiseConv2D(3, name="depthwise")(y)
    y = L.ReLU(6.0, name="relu6")(L.BatchNormalization(momentum=0.8, name="norm_2")(y))
    y = L.Flatten(name="flat")(L.MaxPooling2D(name="pool")(y))
    model = keras.Model(x, L.Dense(CLASSES, name="logits")(L.Dropout(0.1, name="dropout")(y)))
    if compiled:
        model.compile(optimizer or keras.optimizers.Adam(0.01), LOSS, metrics=["accuracy"], **options)
    return model


X, Y = data()
KERNELS = {"conv/kernel", "depthwise/kernel", "logits/kernel"}


def quantizing(data=X[:64], **options):
    """A callback that freezes no batch normalization: each part of a training is traced anew."""
    return pk.QuantizationCallback(data, **{"freeze_step": -1, **options})


def fit(model, *callbacks, epochs=3, **options):
    return model.fit(X, Y, batch_size=32, epochs=epochs, verbose=0, callbacks=list(callbacks), shuffle=False, **options)


def kernels(model):
    return {one.path: np.array(keras.ops.convert_to_numpy(one)) for one in model.weights if one.path in KERNELS}


def is_on_a_grid_of(values, bits):
    """Whether each output channel has at most 2^bits - 1 values, and they are multiples of one number."""
    # The kernel of a depthwise convolution ends with (channels, 1).
    rows = values.reshape(-1, values.shape[-2] if values.shape[-1] == 1 else values.shape[-1]).T
    highest = 2 ** (bits - 1) - 1
    return all(np.unique(row).size <= 2 * highest + 1 and has_a_scale(row, highest) for row in rows)


def has_a_scale(row, highest):
    largest = np.abs(row).max()
    steps = [row / (largest / code) for code in range(1, highest + 1)] if largest else [row]
    return any(np.abs(one - np.round(one)).max() < 1e-3 for one in steps)
