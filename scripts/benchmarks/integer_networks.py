"""Small networks of all kinds, whose integer files are compared with those of other tools."""

from collections.abc import Callable
from typing import Any


def einsums(keras: Any) -> Any:
    """Products over several axes: a mixer of positions and channels, heads, and a product for each position."""
    layers = keras.layers
    x = keras.Input((16, 32))
    y = layers.EinsumDense("abc,bd->adc", output_shape=(24, 32), bias_axes="d", activation="relu")(x)
    y = layers.EinsumDense("abc,cde->abde", output_shape=(24, 4, 16), bias_axes="de")(y)
    y = layers.EinsumDense("abde,def->abf", output_shape=(24, 32), bias_axes="f", activation="relu")(y)
    y = layers.EinsumDense("abc,bcd->abd", output_shape=(24, 8), bias_axes="bd", activation="relu")(y)
    return keras.Model(x, layers.Dense(10)(layers.Flatten()(y)))


def attention(keras: Any) -> Any:
    """Two blocks of an encoder, with LayerNormalization and gelu."""
    layers = keras.layers
    x = keras.Input((16, 32))
    y = x
    for _ in range(2):
        normal = layers.LayerNormalization()(y)
        y = layers.Add()([y, layers.MultiHeadAttention(4, 8)(normal, normal)])
        wide = layers.Dense(64, activation="gelu")(layers.LayerNormalization()(y))
        y = layers.Add()([y, layers.Dense(32)(wide)])
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling1D()(y)))


def _convolved(keras: Any, x: Any, filters: int, size: int = 3, **options: Any) -> Any:
    layers = keras.layers
    y = layers.Conv2D(filters, size, padding="same", use_bias=False, **options)(x)
    return layers.ReLU()(layers.BatchNormalization()(y))


def u_net(keras: Any) -> Any:
    """A U-Net with transposed convolutions."""
    layers = keras.layers
    x = keras.Input((64, 64, 3))
    y, skips = x, []
    for filters in (8, 16):
        skips.append(_convolved(keras, y, filters))
        y = layers.MaxPooling2D()(skips[-1])
    y = _convolved(keras, y, 32)
    for filters in (16, 8):
        y = layers.Conv2DTranspose(filters, 3, strides=2, padding="same", activation="relu")(y)
        y = _convolved(keras, layers.Concatenate()([y, skips.pop()]), filters)
    return keras.Model(x, layers.Conv2D(1, 1, activation="sigmoid")(y))


def depthwise_sequences(keras: Any) -> Any:
    """Depthwise and pointwise convolutions with one spatial axis, a causal one and a dilated one."""
    layers = keras.layers
    x = keras.Input((128, 16))
    y = layers.Conv1D(32, 5, padding="causal", activation="relu")(x)
    for filters, dilation in ((48, 1), (64, 2)):
        y = layers.DepthwiseConv1D(5, padding="same", dilation_rate=dilation, use_bias=False)(y)
        y = layers.ReLU()(layers.BatchNormalization()(y))
        y = layers.MaxPooling1D(2)(layers.Conv1D(filters, 1, activation="relu")(y))
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling1D()(layers.SeparableConv1D(64, 3)(y))))


def recurrent(keras: Any) -> Any:
    """An LSTM and a GRU."""
    layers = keras.layers
    x = keras.Input((16, 16))
    return keras.Model(x, layers.Dense(10)(layers.GRU(24)(layers.LSTM(24, return_sequences=True)(x))))


def squeeze_and_excitation(keras: Any) -> Any:
    """Convolutions whose channels are multiplied by gates."""
    layers = keras.layers
    x = keras.Input((32, 32, 3))
    y = x
    for filters in (16, 32, 32):
        y = _convolved(keras, y, filters)
        gate = layers.Conv2D(filters // 4, 1, activation="relu")(layers.GlobalAveragePooling2D(keepdims=True)(y))
        y = layers.Multiply()([y, layers.Conv2D(filters, 1, activation="sigmoid")(gate)])
        y = layers.MaxPooling2D()(y)
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling2D()(y)))


def plain(keras: Any) -> Any:
    """Convolutions, pooling and Dense layers."""
    layers = keras.layers
    x = keras.Input((28, 28, 1))
    y = layers.MaxPooling2D()(_convolved(keras, x, 16))
    y = layers.MaxPooling2D()(_convolved(keras, y, 32))
    return keras.Model(x, layers.Dense(10)(layers.Dense(64, activation="relu")(layers.Flatten()(y))))


def residual(keras: Any) -> Any:
    """Residual blocks."""
    layers = keras.layers
    x = keras.Input((32, 32, 3))
    y = _convolved(keras, x, 16)
    for filters, stride in ((16, 1), (32, 2)):
        z = _convolved(keras, _convolved(keras, y, filters, strides=stride), filters)
        y = layers.Add()([z, layers.Conv2D(filters, 1, strides=stride)(y)])
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling2D()(y)))


def inverted_residuals(keras: Any) -> Any:
    """Inverted residuals with ReLU6."""
    layers = keras.layers
    x = keras.Input((32, 32, 3))
    y = _convolved(keras, x, 16, strides=2)
    for _ in range(2):
        z = _convolved(keras, y, 64, 1)
        z = layers.BatchNormalization()(layers.DepthwiseConv2D(3, padding="same", use_bias=False)(z))
        y = layers.Add()([y, layers.Conv2D(16, 1)(layers.ReLU(6.0)(z))])
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling2D()(y)))


def dense_blocks(keras: Any) -> Any:
    """Concatenations of all layers before."""
    layers = keras.layers
    x = keras.Input((32, 32, 3))
    y = _convolved(keras, x, 16)
    for _ in range(2):
        for _ in range(2):
            y = layers.Concatenate()([y, _convolved(keras, y, 8)])
        y = layers.AveragePooling2D(2)(layers.Conv2D(16, 1)(y))
    return keras.Model(x, layers.Dense(10)(layers.GlobalAveragePooling2D()(y)))


NETWORKS: dict[str, Callable[[Any], Any]] = {
    "EinsumDense stack": einsums,
    "attention encoder": attention,
    "U-Net, Conv2DTranspose": u_net,
    "depthwise 1-D": depthwise_sequences,
    "LSTM and GRU": recurrent,
    "squeeze and excitation": squeeze_and_excitation,
    "plain": plain,
    "ResNet": residual,
    "inverted residuals": inverted_residuals,
    "DenseNet": dense_blocks,
}
