"""A small network with each kind of fused layer, and data that it learns, for tests of quantization in training."""

import keras
import numpy as np
from keras import layers as L

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
