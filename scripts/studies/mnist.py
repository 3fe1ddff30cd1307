"""The pretrained MNIST network and the images, as files that scripts/study fetches."""

import zipfile
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

FOLDER = Path(".study")


def network() -> keras.Sequential:
    """The network with its trained weights: two convolutions and two dense layers, 421,642 parameters."""
    model = keras.Sequential(
        [
            keras.Input((28, 28, 1)),
            layers.Conv2D(32, 3, padding="same", activation="relu", name="conv_1"),
            layers.MaxPooling2D(),
            layers.Conv2D(64, 3, padding="same", activation="relu", name="conv_2"),
            layers.MaxPooling2D(),
            layers.Flatten(),
            layers.Dense(128, activation="relu", name="hidden"),
            layers.Dense(10, name="logits"),
        ]
    )
    shapes = [(32, 1, 3, 3), (32,), (64, 32, 3, 3), (64,), (128, 64, 7, 7), (128,), (10, 128), (10,)]
    with zipfile.ZipFile(FOLDER / "mnist.pth") as archive:
        stored = [
            np.frombuffer(archive.read(f"mnist/data/{i}"), "<f4").reshape(shape) for i, shape in enumerate(shapes)
        ]
    # PyTorch keeps outputs first, and flattens channels before positions.
    kernels = [weight.transpose(*range(2, weight.ndim), 1, 0) for weight in stored[::2]]
    kernels[2] = kernels[2].reshape(-1, 128)
    model.set_weights([weight for pair in zip(kernels, stored[1::2], strict=True) for weight in pair])
    model.compile("sgd", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    return model


def images(part: str) -> tuple[Any, Any]:
    """Images normalised as the network was trained, shape (examples, 28, 28, 1), and labels; `part`: train or t10k."""
    data = FOLDER / "package" / "data"
    pixels = np.frombuffer((data / f"{part}-images-idx3-ubyte").read_bytes(), np.uint8, offset=16)
    labels = np.frombuffer((data / f"{part}-labels-idx1-ubyte").read_bytes(), np.uint8, offset=8)
    scaled = (pixels.reshape(-1, 28, 28, 1).astype("float32") / 255 - 0.1307) / 0.3081
    return scaled, labels.astype("int32")
