"""Trained networks of different kinds, small ones and those for MNIST and Fashion-MNIST, for studies of defaults."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import keras
import numpy as np
from keras import layers

from studies import fashion, mnist

TRAINED = Path(".study") / "kinds"
Data = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Kind:
    """A network, its data, and what is measured of it.

    Attributes:
        title: What it is, in a few words.
        build: Returns the untrained network.
        data: Returns the data for training and those for the measurement, each (inputs, labels).
        score: (outputs, labels) -> a number up to 1, higher = better.
        loss: The loss of its training.
        epochs: Epochs of its training with Adam; 0 for a network that `build` returns trained.
    """

    title: str
    build: Callable[[], Any]
    data: Callable[[], tuple[Data, Data]]
    score: Callable[[np.ndarray, np.ndarray], float]
    loss: Any = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    epochs: int = 0


# Measures --------------------------------------------------------------------------------------------------------


def accuracy(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Share of examples whose largest output is that of the label."""
    return float(np.mean(outputs.argmax(axis=-1) == labels))


def explained(outputs: np.ndarray, labels: np.ndarray) -> float:
    """R²: 1 - squared error / squared deviation from the mean, over all values; never below 0."""
    error = np.square(outputs.reshape(labels.shape) - labels).sum()
    return max(float(1 - error / np.square(labels - labels.mean(axis=0)).sum()), 0.0)


def overlap(outputs: np.ndarray, labels: np.ndarray) -> float:
    """Intersection over union of the pixels whose output is above 0 with those of the labels."""
    found, wanted = outputs > 0, labels > 0.5
    return float((found & wanted).sum() / max((found | wanted).sum(), 1))


# Data ------------------------------------------------------------------------------------------------------------


def _halves(inputs: np.ndarray, labels: np.ndarray, held_out: int) -> tuple[Data, Data]:
    order = np.random.default_rng(0).permutation(len(inputs))
    train, test = order[held_out:], order[:held_out]
    return (inputs[train], labels[train]), (inputs[test], labels[test])


@cache
def digits() -> tuple[Data, Data]:
    """Images of digits, shape (8, 8, 1), values in [0, 1]."""
    from sklearn.datasets import load_digits

    inputs, labels = load_digits(return_X_y=True)
    return _halves((inputs / 16).reshape(-1, 8, 8, 1).astype("float32"), labels.astype("int32"), 600)


@cache
def pixels() -> tuple[Data, Data]:
    """The same images, as inputs and as labels, shape (64,)."""
    (train, _), (test, _) = digits()
    flat = [images.reshape(-1, 64) for images in (train, test)]
    return (flat[0], flat[0]), (flat[1], flat[1])


@cache
def waves() -> tuple[Data, Data]:
    """Sines, squares, saws and triangles of random frequency and phase with noise, shape (128, 1)."""
    random = np.random.default_rng(1)
    labels = random.integers(4, size=4000).astype("int32")
    turns = np.linspace(0, 1, 128) * random.uniform(2, 6, (4000, 1)) + random.uniform(0, 1, (4000, 1))
    saw = 2 * (turns % 1) - 1
    shapes = np.stack([np.sin(2 * np.pi * turns), np.sign(saw), saw, 2 * np.abs(saw) - 1])
    signals = shapes[labels, np.arange(4000)] + random.normal(0, 0.3, (4000, 128))
    return _halves(signals[..., None].astype("float32"), labels, 1000)


@cache
def shapes() -> tuple[Data, Data]:
    """Noisy images of two ellipses, shape (32, 32, 1), and their pixels."""
    random = np.random.default_rng(2)
    rows, columns = np.mgrid[:32, :32]
    masks = np.zeros((1500, 32, 32), bool)
    for _ in range(2):
        middle, radius = random.uniform(6, 26, (2, 1500, 1, 1)), random.uniform(3, 8, (2, 1500, 1, 1))
        masks |= ((rows - middle[0]) / radius[0]) ** 2 + ((columns - middle[1]) / radius[1]) ** 2 < 1
    images = masks * random.uniform(0.4, 1, (1500, 1, 1)) + random.normal(0, 0.35, masks.shape)
    return _halves(images[..., None].astype("float32"), masks[..., None].astype("float32"), 400)


@cache
def friedman() -> tuple[Data, Data]:
    """Friedman's first regression problem, ten inputs, noise 0.5."""
    from sklearn.datasets import make_friedman1

    inputs, labels = make_friedman1(4000, noise=0.5, random_state=0)
    return _halves(inputs.astype("float32"), labels[:, None].astype("float32"), 1000)


@cache
def words() -> tuple[Data, Data]:
    """Sequences of 24 of 400 words; the class (of 4) has words of its own, about a quarter of the sequence."""
    random = np.random.default_rng(3)
    labels = random.integers(4, size=4000).astype("int32")
    own = 300 + 25 * labels[:, None] + random.integers(25, size=(4000, 24))
    tokens = np.where(random.uniform(size=own.shape) < 0.25, own, random.integers(400, size=own.shape))
    return _halves(tokens.astype("int32"), labels, 1000)


def _images(source: Any) -> Callable[[], tuple[Data, Data]]:
    return cache(lambda: (source.images("train"), source.images("t10k")))


# Networks ----------------------------------------------------------------------------------------------------------


def _normalized(x: Any, layer: Any) -> Any:
    return layers.ReLU()(layers.BatchNormalization(momentum=0.9)(layer(x)))


def plain_cnn() -> Any:
    """Four convolutions and two dense layers."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            *(layers.Conv2D(n, 3, padding="same", activation="relu") for n in (16, 32)),
            layers.MaxPooling2D(),
            *(layers.Conv2D(n, 3, padding="same", activation="relu") for n in (32, 64)),
            layers.Flatten(),
            layers.Dense(64, activation="relu"),
            layers.Dense(10),
        ]
    )


def depthwise_1d() -> Any:
    """Depthwise and pointwise convolutions of signals, with batch normalization."""
    x = inputs = keras.Input((128, 1))
    x = _normalized(x, layers.Conv1D(16, 7, strides=2, padding="same", use_bias=False))
    for filters in (32, 32, 64):
        x = _normalized(x, layers.DepthwiseConv1D(5, strides=2, padding="same", use_bias=False))
        x = _normalized(x, layers.Conv1D(filters, 1, use_bias=False))
    return keras.Model(inputs, layers.Dense(4)(layers.GlobalAveragePooling1D()(x)))


def unet() -> Any:
    """Two levels down and up, with skips, batch normalization and transposed convolutions."""

    def block(x: Any, filters: int) -> Any:
        for _ in range(2):
            x = _normalized(x, layers.Conv2D(filters, 3, padding="same", use_bias=False))
        return x

    inputs = keras.Input((32, 32, 1))
    first = block(inputs, 8)
    second = block(layers.MaxPooling2D()(first), 16)
    x = block(layers.MaxPooling2D()(second), 32)
    for skip, filters in ((second, 16), (first, 8)):
        x = layers.Conv2DTranspose(filters, 2, strides=2)(x)
        x = block(layers.Concatenate()([x, skip]), filters)
    return keras.Model(inputs, layers.Conv2D(1, 1)(x))


def regression() -> Any:
    """A perceptron with one output."""
    hidden = [layers.Dense(n, activation="relu") for n in (64, 64, 32)]
    return keras.Sequential(
        [keras.Input((10,)), layers.Normalization(mean=0.5, variance=1 / 12), *hidden, layers.Dense(1)]
    )


def autoencoder() -> Any:
    """A perceptron that reproduces its inputs through 12 units."""
    sizes = ((128, "relu"), (64, "relu"), (12, None), (64, "relu"), (128, "relu"), (64, "sigmoid"))
    return keras.Sequential([keras.Input((64,)), *(layers.Dense(n, activation=name) for n, name in sizes)])


def transformer() -> Any:
    """Two encoder blocks with attention, over the rows of an image."""
    inputs = keras.Input((8, 8, 1))
    x = layers.Dense(32)(layers.Reshape((8, 8))(inputs))
    x = layers.Add()([x, layers.Embedding(8, 32)(keras.ops.arange(8))[None]])
    for _ in range(2):
        x = layers.Add()([x, layers.MultiHeadAttention(4, 8)(*[layers.LayerNormalization()(x)] * 2)])
        y = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.Dense(32)(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.LayerNormalization()(x))))


def recurrent() -> Any:
    """An LSTM in both directions and a GRU, over the rows of an image."""
    return keras.Sequential(
        [
            keras.Input((8, 8, 1)),
            layers.Reshape((8, 8)),
            layers.Bidirectional(layers.LSTM(24, return_sequences=True)),
            layers.GRU(32),
            layers.Dense(10),
        ]
    )


def text() -> Any:
    """An embedding, a convolution and a dense layer."""
    return keras.Sequential(
        [
            keras.Input((24,), dtype="int32"),
            layers.Embedding(400, 16),
            layers.Conv1D(32, 3, activation="relu"),
            layers.GlobalMaxPooling1D(),
            layers.Dense(32, activation="relu"),
            layers.Dense(4),
        ]
    )


def mixer() -> Any:
    """Two blocks that mix tokens and channels by EinsumDense."""
    inputs = keras.Input((8, 8, 1))
    x = layers.EinsumDense("btc,cd->btd", (8, 32), bias_axes="d")(layers.Reshape((8, 8))(inputs))
    for _ in range(2):
        y = layers.EinsumDense("btc,ts->bsc", (16, 32), activation="relu")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.EinsumDense("bsc,st->btc", (8, 32))(y)])
        y = layers.EinsumDense("btc,cd->btd", (8, 64), activation="relu", bias_axes="d")(layers.LayerNormalization()(x))
        x = layers.Add()([x, layers.EinsumDense("btd,dc->btc", (8, 32), bias_axes="c")(y)])
    return keras.Model(inputs, layers.Dense(10)(layers.GlobalAveragePooling1D()(x)))


_PIXELS = keras.losses.BinaryCrossentropy(from_logits=True)
KINDS = {
    "digits-cnn": Kind("convolutions, digits", plain_cnn, digits, accuracy, epochs=30),
    "depthwise": Kind("depthwise 1-D convolutions, waves", depthwise_1d, waves, accuracy, epochs=15),
    "unet": Kind(
        "U-Net, segmentation: IoU", unet, shapes, overlap, keras.losses.BinaryCrossentropy(from_logits=True), 15
    ),
    "regression": Kind("perceptron, regression: R²", regression, friedman, explained, "mse", epochs=40),
    "autoencoder": Kind("autoencoder, digits: R²", autoencoder, pixels, explained, "mse", epochs=60),
    "transformer": Kind("attention, digits", transformer, digits, accuracy, epochs=40),
    "recurrent": Kind("LSTM and GRU, digits", recurrent, digits, accuracy, epochs=30),
    "text": Kind("embedding and convolution, words", text, words, accuracy, epochs=15),
    "mixer": Kind("EinsumDense, digits", mixer, digits, accuracy, epochs=40),
    "mnist": Kind("convolutions, MNIST", mnist.network, _images(mnist), accuracy),
    **{
        f"fashion-{name}": Kind(f"{title}, Fashion-MNIST", lambda name=name: _fashion(name), _images(fashion), accuracy)
        for name, title in {
            "mlp": "perceptron",
            "cnn": "convolutions",
            "resnet8": "ResNet-8",
        }.items()
    },
}


def _fashion(name: str) -> Any:
    return fashion.trained(keras, name, KINDS[f"fashion-{name}"].data()[0])


def trained(name: str) -> Any:
    """Returns the trained, compiled network of a kind; its weights are kept in .study, and trained once."""
    kind = KINDS[name]
    keras.utils.clear_session()
    keras.utils.set_random_seed(0)
    model = kind.build()
    if not kind.epochs:
        return model
    model.compile(keras.optimizers.Adam(0.002), kind.loss)
    path = TRAINED / f"{name}.weights.h5"
    if path.exists():
        model.load_weights(path)
        return model
    halving = keras.callbacks.LearningRateScheduler(lambda epoch: 0.002 * (0.2 if epoch > 0.7 * kind.epochs else 1))
    model.fit(*kind.data()[0], epochs=kind.epochs, batch_size=64, verbose=0, callbacks=[halving])
    path.parent.mkdir(parents=True, exist_ok=True)
    model.save_weights(path)
    return model


def score(name: str, model: Any) -> float:
    """Returns what is measured of a kind, on the data that were not trained on."""
    kind = KINDS[name]
    inputs, labels = kind.data()[1]
    return kind.score(model.predict(inputs, batch_size=500, verbose=0), labels)
