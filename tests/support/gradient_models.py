"""Small models of every kind that gradients are taken of, and the plain loop that they are compared with."""

import keras
import numpy as np
import tensorflow as tf
from keras import layers

SPARSE = keras.losses.SparseCategoricalCrossentropy(from_logits=True)


def _sequential(*parts):
    return keras.Sequential(list(parts))


def perceptron():
    return _sequential(keras.Input((5,)), layers.Dense(7, "tanh", name="hidden"), layers.Dense(3, name="logits"))


def convolutional():
    return _sequential(
        keras.Input((8, 8, 2)),
        layers.Conv2D(4, 3, padding="same", strides=2, activation="relu"),
        layers.Conv2D(3, (2, 3), dilation_rate=(2, 1), use_bias=False),
        layers.Flatten(),
        layers.Dense(3, activation="softmax"),
    )


def convolutional_1d():
    return _sequential(
        keras.Input((6, 4)),
        layers.Conv1D(5, 3, padding="causal", dilation_rate=2, activation="gelu"),
        layers.Conv1D(3, 2, strides=2, padding="same"),
        layers.GlobalAveragePooling1D(),
        layers.Dense(3),
    )


def convolutional_3d():
    return _sequential(
        keras.Input((4, 5, 4, 2)),
        layers.Conv3D(3, (3, 2, 1), strides=(1, 2, 1), padding="same"),
        layers.Conv3D(2, 2),
        layers.Flatten(),
        layers.Dense(3),
    )


def unusual_convolutions():
    return _sequential(
        keras.Input((8, 8, 4)),
        layers.DepthwiseConv2D(3, padding="same", depth_multiplier=2, strides=2),
        layers.SeparableConv2D(5, 2),
        layers.Conv2DTranspose(3, 2),
        layers.GlobalMaxPooling2D(),
        layers.Dense(3),
    )


def normalised():
    return _sequential(
        keras.Input((6, 6, 4)),
        layers.BatchNormalization(),
        layers.GroupNormalization(2),
        layers.LayerNormalization(axis=(1, 3)),
        layers.PReLU(),
        layers.Flatten(),
        layers.RMSNormalization(),
        layers.Dense(3),
    )


def recurrent():
    return _sequential(
        keras.Input((4, 3)),
        layers.TimeDistributed(layers.Dense(3)),
        layers.LSTM(3),
        layers.Dense(3),
    )


def masked():
    return _sequential(keras.Input((5,)), layers.Embedding(7, 4, mask_zero=True), layers.SimpleRNN(3), layers.Dense(3))


def residual_attention():
    inputs = keras.Input((5, 4))
    x = layers.Add()([layers.MultiHeadAttention(2, 3)(inputs, inputs), inputs])
    x = layers.EinsumDense("...x,xy->...y", output_shape=3, bias_axes="y", activation="relu")(x)
    return keras.Model(inputs, layers.Dense(3)(layers.GlobalAveragePooling1D()(x)))


def shared():
    inputs = keras.Input((5,))
    layer, norm = layers.Dense(5, "tanh", name="shared"), layers.LayerNormalization()
    inner = keras.Sequential([layer, layers.Dense(5, name="inner")], name="block")
    x = norm(layer(norm(inner(layer(inputs)))))
    return keras.Model(inputs, layers.Dense(3)(layers.Add()([x, inputs])))


def two_embeddings_of_one_table():
    inputs = keras.Input((5,), dtype="int64")
    table = layers.Embedding(7, 4)
    x = layers.Concatenate()([table(inputs), table(7 - 1 - inputs)])
    return keras.Model(inputs, layers.Dense(3)(layers.Flatten()(x)))


@keras.saving.register_keras_serializable("prunekit_tests")
class Tied(keras.Model):
    """Positions without examples, a weight of the model itself, and a matrix used outside of its layer."""

    def __init__(self):
        super().__init__()
        self.tokens, self.positions = layers.Embedding(7, 4, name="tokens"), layers.Embedding(5, 4, name="positions")
        self.mix = layers.Dense(4, "tanh", name="mix")
        self.scale = self.add_weight(shape=(4,), initializer="random_normal", name="scale")

    def call(self, x):
        hidden = self.mix(self.tokens(x) + self.positions(keras.ops.arange(5))) * self.scale
        return keras.ops.matmul(hidden, keras.ops.transpose(self.tokens.embeddings))


@keras.saving.register_keras_serializable("prunekit_tests")
class Folded(keras.Model):
    """Steps folded into the batch, and steps put before it."""

    def __init__(self):
        super().__init__()
        self.step, self.logits = layers.Dense(4, "tanh", name="step"), layers.Dense(3, name="logits")

    def call(self, x):
        x = keras.ops.reshape(self.step(keras.ops.reshape(x, (-1, 4))), (-1, 5, 4))
        x = keras.ops.transpose(self.step(keras.ops.transpose(x, (1, 0, 2))), (1, 0, 2))
        return self.logits(keras.ops.sum(x, 1))


def _called(model, shape):
    model(np.zeros((2, *shape), "int64" if isinstance(model, Tied) else keras.config.floatx()))
    return model


def tied():
    return _called(Tied(), (5,))


def folded():
    return _called(Folded(), (5, 4))


# name: (model, shape of one input, number of different integers or 0, shape of one label)
CASES = {
    "perceptron": (perceptron, (5,), 0, ()),
    "convolutional": (convolutional, (8, 8, 2), 0, ()),
    "convolutional 1D": (convolutional_1d, (6, 4), 0, ()),
    "convolutional 3D": (convolutional_3d, (4, 5, 4, 2), 0, ()),
    "unusual convolutions": (unusual_convolutions, (8, 8, 4), 0, ()),
    "normalised": (normalised, (6, 6, 4), 0, ()),
    "recurrent": (recurrent, (4, 3), 0, ()),
    "masked": (masked, (5,), 7, ()),
    "residual attention": (residual_attention, (5, 4), 0, ()),
    "shared": (shared, (5,), 0, ()),
    "two embeddings of one table": (two_embeddings_of_one_table, (5,), 7, ()),
    "tied": (tied, (5,), 7, (5,)),
    "folded": (folded, (5, 4), 0, ()),
}


def case(name, examples=5):
    """(model, x, y, loss): random biases and scales too, which Keras starts at 0 and 1."""
    build, shape, integers, labels = CASES[name]
    model, rng = build(), np.random.default_rng(7)
    for weight in model.trainable_variables:
        weight.assign(weight + rng.normal(scale=0.1, size=weight.shape))
    if integers:
        x = rng.integers(0, integers, (examples, *shape))
    else:
        x = rng.normal(size=(examples, *shape)).astype(keras.config.floatx())
    loss = "sparse_categorical_crossentropy" if name == "convolutional" else SPARSE
    if loss is SPARSE and keras.config.floatx() == "float64":
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, dtype="float64")
    return model, x, rng.integers(0, 3, (examples, *labels)), loss


def one_by_one(model, loss, x, y):
    """Gradients of batches of one, by a plain tape, stacked."""
    loss, rows = keras.losses.get(loss), []
    for example in range(len(y)):
        with tf.GradientTape() as tape:
            value = loss(y[example : example + 1], model(x[example : example + 1], training=False))
        gradients = tape.gradient(value, [variable.value for variable in model.trainable_variables])
        rows.append([np.asarray(tf.convert_to_tensor(gradient)) for gradient in gradients])
    return [np.stack(column) for column in zip(*rows, strict=True)]
