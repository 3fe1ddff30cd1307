"""The models that several sections train, and the sparsity that they are pruned to."""

from collections.abc import Callable
from typing import Any

FINAL_SPARSITY = 0.9


def perceptron(keras, width: int = 2048):
    """784-width-width-10, ReLU: 5.8 M weights at the full width; its step is bound by memory."""
    layers = keras.layers
    return keras.Sequential(
        [
            keras.Input((784,)),
            layers.Dense(width, activation="relu", name="hidden_1"),
            layers.Dense(width, activation="relu", name="hidden_2"),
            layers.Dense(10, name="logits"),
        ]
    )


def resnet20(keras, width: int = 16):
    """ResNet-20 for 32x32x3 (He et al. 2015, section 4.2) with batch normalisation and 1x1 convolution shortcuts."""
    layers = keras.layers

    def convolution(x, filters, size, stride, name):
        x = layers.Conv2D(filters, size, strides=stride, padding="same", use_bias=False, name=name)(x)
        return layers.BatchNormalization(name=f"{name}_norm")(x)

    inputs = keras.Input((32, 32, 3))
    x = layers.Activation("relu")(convolution(inputs, width, 3, 1, "stem"))
    for stage in range(3):
        for block in range(3):
            filters, stride, name = width << stage, 2 if stage and not block else 1, f"stage{stage}_block{block}"
            y = layers.Activation("relu")(convolution(x, filters, 3, stride, f"{name}_a"))
            y = convolution(y, filters, 3, 1, f"{name}_b")
            if stride > 1:
                x = convolution(x, filters, 1, stride, f"{name}_shortcut")
            x = layers.Activation("relu")(layers.Add()([x, y]))
    x = layers.GlobalAveragePooling2D()(x)
    return keras.Model(inputs, layers.Dense(10, name="logits")(x))


def mobilenetv2(keras, width: int = 35):
    """MobileNetV2 for 96x96x3 with `width` percent of the channels (Sandler et al. 2018)."""
    return keras.applications.MobileNetV2((96, 96, 3), alpha=width / 100, weights=None, classes=10)


def text_encoder(keras, width: int = 384, blocks: int = 8, words: int = 30522, length: int = 128):
    """The encoder of BERT (Devlin et al. 2019, arXiv:1810.04805), of a medium size: 26 M weights, 12 M in its table."""
    layers = keras.layers
    tokens = keras.Input((length,), dtype="int32")
    places = layers.Embedding(512, width, name="places")(keras.ops.arange(length))[None]
    x = layers.LayerNormalization()(layers.Add()([layers.Embedding(words, width, name="words")(tokens), places]))
    for _ in range(blocks):
        attended = layers.MultiHeadAttention(width // 64 or 1, min(width, 64))(x, x)
        x = layers.LayerNormalization()(layers.Add()([x, attended]))
        y = layers.Dense(width)(layers.Dense(4 * width, activation="gelu")(x))
        x = layers.LayerNormalization()(layers.Add()([x, y]))
    return keras.Model(tokens, x)


# name -> (builder, batch size, shape of one input, optimizer as (class name, arguments), width for a smoke test)
MODELS: dict[str, tuple[Callable, int, tuple[int, ...], tuple[str, dict], int]] = {
    "perceptron": (perceptron, 64, (784,), ("Adam", {"learning_rate": 1e-4}), 32),
    "resnet20": (resnet20, 32, (32, 32, 3), ("SGD", {"learning_rate": 1e-3, "momentum": 0.9}), 2),
    "mobilenetv2": (mobilenetv2, 16, (96, 96, 3), ("SGD", {"learning_rate": 1e-3, "momentum": 0.9}), 5),
}


def network(name: str, smoke: bool) -> Any:
    """A model with weights drawn at random; in a smoke test a tiny perceptron, whatever the name."""
    import keras

    keras.utils.set_random_seed(0)
    if smoke:
        build, *_, width = MODELS["perceptron"]
        return build(keras, width=width)
    return keras.applications.ResNet50(weights=None) if name == "resnet50" else MODELS[name][0](keras)


def images_for(model: Any, count: int) -> Any:
    """Inputs drawn from the normal distribution, in the model's shape."""
    import numpy as np

    return np.random.default_rng(0).normal(size=(count, *model.input_shape[1:])).astype("float32")
