import keras
import pytest
from keras import layers as L

from prunekit.anatomy.graph.tracing import checked_trace, item_bytes


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [
        ("float64", 8),
        ("float32", 4),
        ("bfloat16", 2),
        ("float8_e4m3fn", 1),
        ("int64", 8),
        ("uint8", 1),
        ("bool", 1),
        ("complex64", 8),
        ("string", 0),
    ],
)
def test_types_have_their_bytes(dtype, expected):
    assert item_bytes(dtype) == expected


def test_what_tensorflow_alone_has_has_no_bytes():
    tf = pytest.importorskip("tensorflow")
    assert item_bytes(tf.variant) == item_bytes(tf.resource) == 0


class Cell(L.Layer):
    """Has a step of its own in training."""

    state_size = 3

    def __init__(self, **options):
        super().__init__(**options)
        self.inner, self.drop = L.Dense(3, name="inner"), L.Dropout(0.5, name="drop")

    def build(self, shape):
        self.inner.build(shape)

    def call(self, inputs, states):
        hidden = self.drop(self.inner(inputs))
        return hidden, [hidden + states[0]]


@pytest.mark.parametrize("layer", [L.RNN(Cell()), L.TimeDistributed(L.Dropout(0.5))], ids=["RNN", "TimeDistributed"])
def test_training_reaches_the_steps_of_a_layer(layer):
    model = keras.Sequential([keras.Input((5, 3)), L.PReLU(), layer])
    dropout = layer.cell.drop if isinstance(layer, L.RNN) else layer.layer
    at_rest, in_training = checked_trace(model, 2, None), checked_trace(model, 2, None, training=True)
    assert id(dropout) not in at_rest.output_bytes
    assert in_training.output_bytes[id(dropout)] == in_training.gradient_bytes[id(dropout)] == 5 * 2 * 3 * 4


def test_a_pass_leaves_the_outputs_of_the_model_to_whoever_made_them():
    block = keras.Sequential([keras.Input((4,)), L.Dense(3, name="inner")], name="block")
    model = keras.Sequential([keras.Input((4,)), L.Identity(name="nothing"), block])
    found = checked_trace(model, 2, None)
    assert found.output_bytes == {id(block.layers[-1]): 2 * 3 * 4}
