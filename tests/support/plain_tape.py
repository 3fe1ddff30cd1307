"""The plain tape over a whole model, which gradients in parts are compared with, and a chain to take apart."""

import keras
import tensorflow as tf
from keras import layers, ops


def in_one_go(model, loss, x, y, training=True, scale_loss=lambda value: value):
    with tf.GradientTape() as tape:
        value = loss(y, model(x, training=training))
        value = sum([ops.cast(extra, value.dtype) for extra in model.losses], value)
        scaled = scale_loss(value)
    return value, tape.gradient(scaled, [variable.value for variable in model.trainable_variables])


def chain():
    parts = [layers.Dense(5, "tanh", name=f"link_{number}") for number in range(4)]
    return keras.Sequential([keras.Input((4,)), *parts, layers.Dropout(0.5), layers.Dense(3, "softmax")])
