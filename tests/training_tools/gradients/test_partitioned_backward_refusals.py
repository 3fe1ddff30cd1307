"""Gradients in parts: boundaries and data that are refused."""

import keras
import numpy as np
import pytest
from keras import layers
from plain_tape import chain, in_one_go

import prunekit as pk

RNG = np.random.default_rng(5)
LOSS = "sparse_categorical_crossentropy"


class Own(keras.Model):
    def __init__(self):
        super().__init__()
        self.only = layers.Dense(3, "softmax", name="only")

    def call(self, x):
        return self.only(x)


class Astray(keras.Model):
    def call(self, x, training=None):
        return self.layers[-1](x)


def nested():
    inputs = keras.Input((3,))
    return keras.Model(inputs, layers.Dense(3, name="outer")(keras.Sequential([layers.Dense(3, name="inner")])(inputs)))


def around():
    inputs = keras.Input((3,))
    left, right = layers.Dense(3, name="left")(inputs), layers.Dense(3, name="right")(inputs)
    return keras.Model(inputs, layers.Add()([left, right]))


def alternating():
    inputs, drop = keras.Input((3,)), layers.Dropout(0.5, name="drop")
    ends = [layers.Dense(3, name=name)(drop(layers.Dense(3)(drop(inputs)))) for name in ("left", "right")]
    return keras.Model(inputs, layers.Add()(ends))


def astray():
    inputs = keras.Input((3,))
    return Astray(inputs=inputs, outputs=layers.Dense(3, name="end")(inputs))


def own():
    model = Own()
    model(np.ones((2, 3)))
    return model


@pytest.mark.parametrize(
    ("build", "boundary", "error", "message"),
    [
        (nested, "inner", ValueError, "of the model's own graph. Received: boundary='inner', which is inside another"),
        (nested, "iner", ValueError, "No layer of the model .* called 'iner'.*boundary='iner'. Did you mean"),
        (nested, 3, TypeError, "`boundary` takes names of layers. Received: 3"),
        (nested, [3], TypeError, "`boundary` takes a layer's name.*Received: 3"),
        (nested, [], ValueError, r"at least one layer. Received: boundary=\[\]"),
        (
            around,
            "left",
            ValueError,
            r"All paths .* Received: boundary=\['left'\], bypassed by 'right'. Add these layers",
        ),
        (alternating, ["drop"], ValueError, r"'drop' is called 4 times.*Say which call.*\('drop', 0\)"),
        (alternating, [("drop", 4)], ValueError, r"'drop' is called 4 times.*boundary=\('drop', 4\)"),
        (alternating, ["left", "right"], ValueError, "'drop', whose calls in several branches alternate"),
        (astray, ["end"], ValueError, "Received: Astray, whose own `call` does not run its graph"),
        (own, ["only"], ValueError, "Functional or Sequential model. Received: Own.*recomputing"),
        (lambda: keras.Sequential([layers.Dense(3)]), "dense", ValueError, "is not built"),
        (lambda: "model", "dense", TypeError, "works on Keras 3 models"),
    ],
)
def test_boundaries_that_do_not_cut_are_refused_in_one_line(build, boundary, error, message):
    with pytest.raises(error, match=message) as caught:
        pk.gradients.in_parts(build(), "mse", np.ones((2, 3)), np.ones((2, 3)), boundary, training=True)
    assert "\n" not in str(caught.value)


def test_layers_in_another_order_are_fine_where_they_draw_nothing():
    model, x = alternating(), RNG.normal(size=(2, 3)).astype("float32")
    _, found = pk.gradients.in_parts(model, "mse", x, x, ["left", "right"])
    _, expected = in_one_go(model, keras.losses.MeanSquaredError(), x, x, training=False)
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


def test_data_of_other_lengths_is_refused():
    with pytest.raises(ValueError, match="one row per example.*x with 2, y with 3"):
        pk.gradients.in_parts(chain(), LOSS, np.ones((2, 4)), np.ones(3), "link_0")
    with pytest.raises(ValueError, match="at least one"):
        pk.gradients.in_parts(chain(), LOSS, np.ones((0, 4)), np.ones(0), "link_0")
