"""Models whose cost is counted."""

import keras
import numpy as np
from keras import layers as L


def sequential(*layers, shape):
    return keras.Sequential([keras.Input(shape), *layers])


def lenet():
    return sequential(
        L.Conv2D(6, 5, padding="same", name="c1"),
        L.MaxPooling2D(name="p1"),
        L.Conv2D(16, 5, name="c2"),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dense(120, name="f1"),
        L.Dense(84, name="f2"),
        L.Dense(10, name="f3"),
        shape=(28, 28, 1),
    )


def convolutional():
    return sequential(
        L.Rescaling(2.0),
        L.Conv2D(4, 3, name="frozen", trainable=False),
        L.Conv2D(5, 3, padding="same"),
        L.BatchNormalization(),
        L.ReLU(),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dropout(0.5),
        L.Dense(3),
        shape=(10, 10, 2),
    )


def with_attention():
    inputs = keras.Input((6, 4))
    attended = L.MultiHeadAttention(2, 3, dropout=0.1)(inputs, inputs)
    hidden = L.LayerNormalization()(L.Add()([inputs, attended]))
    block = keras.Sequential([keras.Input((6, 4)), L.Dense(8, activation="gelu"), L.Dense(4)], name="block")
    return keras.Model(inputs, [block(hidden), L.GlobalAveragePooling1D()(hidden)])


def recurrent():
    return sequential(
        L.Bidirectional(L.LSTM(3, return_sequences=True, unroll=True)),
        L.GRU(5, return_sequences=True, unroll=True),
        L.SimpleRNN(2, return_sequences=True, unroll=True, trainable=False),
        shape=(4, 3),
    )


def shared():
    one, two = keras.Input((4,)), keras.Input((4,))
    dense = L.Dense(3)
    return keras.Model([one, two], L.Concatenate()([dense(one), L.Identity()(dense(two)), two]))


class WithOperations(keras.Model):
    """Adds and stops gradients outside its layers; one branch ends before the outputs."""

    def __init__(self):
        super().__init__()
        self.left, self.right, self.unused = (
            L.Dense(3, name="left"),
            L.Dense(3, name="right"),
            L.Dense(5, name="unused"),
        )
        self.block = keras.Sequential([keras.Input((3,)), L.Dense(3, name="inner"), L.ReLU(name="relu")], name="block")

    def call(self, inputs):
        left, right = self.left(inputs), keras.ops.stop_gradient(self.right(inputs))
        self.unused(left)
        return self.block(left + right) + 1.0


def operations():
    model = WithOperations()
    model(np.zeros((1, 4)))
    return model
