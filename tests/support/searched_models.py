"""A small network whose weights and channels are measured, and examples."""

import keras
import numpy as np
from keras import layers as L

from prunekit.searching.judge import batched
from prunekit.searching.repaired_scan import RepairedScan
from prunekit.techniques.quantize.options import QuantizationOptions

FLOATS = QuantizationOptions(activation_bits="float")
RNG = np.random.default_rng(5)
FITTED, MEASURED = (RNG.normal(size=(96, 8, 8, 2)).astype("float32") for _ in range(2))


def network():
    keras.utils.set_random_seed(4)
    inputs = keras.Input((8, 8, 2))
    x = L.Conv2D(12, 3, use_bias=False, name="stem")(inputs)
    x = L.ReLU()(L.BatchNormalization(name="norm")(x))
    y = L.Conv2D(12, 3, padding="same", activation="relu", name="branch")(x)
    x = L.Flatten()(L.AveragePooling2D(2)(L.Add()([x, y])))
    x = L.Dense(16, activation="relu", name="hidden")(x)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


def walk(model, subject, fitted=FITTED, measured=MEASURED):
    products = list(subject.products.values())
    return RepairedScan(model, batched(fitted, 32), batched(measured, 48), products, 1e9, subject.activation_bytes)
