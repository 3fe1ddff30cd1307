"""A small network for the digits of scikit-learn, and the examples that it was not trained on."""

import keras
import numpy as np
from keras import layers as L


def digit_network():
    """Returns a trained network, and (images, labels)."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = (images[order] / 16).reshape(-1, 8, 8, 1).astype("float32"), labels[order].astype("int32")
    keras.utils.set_random_seed(1)
    model = keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            L.Conv2D(16, 3, activation="relu", name="conv"),
            L.MaxPooling2D(),
            L.Flatten(),
            L.Dense(48, activation="relu", name="hidden"),
            L.Dense(10, name="logits"),
        ]
    )
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    model.fit(images[:900], labels[:900], epochs=12, batch_size=32, verbose=0)
    return model, (images[900:], labels[900:])
