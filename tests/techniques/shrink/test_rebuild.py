"""A model without some channels computes what the model computes with zeros in all their weight entries."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from removed_channels import arrays, difference, drawn, outputs_with, zeroed

from prunekit.anatomy.channels import find_channels
from prunekit.techniques.shrink.rebuild import without_channels

# Keras computes attention scores in float32 whatever the model's type; TensorFlow has no Conv3D in float64 here.
NOT_IN_FLOAT64 = ("transformer_encoder", "rms_decoder", "conv3d")


@pytest.fixture
def float64():
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


def largest_difference(model, inputs, seeds=(0, 1)):
    """(the largest relative difference of the smaller models and the zeroed ones, the last smaller model)."""
    randomize(model)
    channels = find_channels(model)
    found = []
    for seed in seeds:
        removed = drawn(channels, seed)
        smaller, _ = without_channels(channels, removed)
        wanted = outputs_with(model, zeroed(channels, removed), inputs)
        found.append(difference(wanted, arrays(smaller(inputs))))
    return max(found), smaller


@pytest.mark.every_backend
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_smaller_model_computes_what_the_zeroed_one_does(name):
    model = ARCHITECTURES[name]()
    assert largest_difference(model, inputs_of(model, seed=1, examples=8))[0] <= 1e-5


@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name not in NOT_IN_FLOAT64])
def test_in_float64_to_twelve_digits(name, float64):
    model = ARCHITECTURES[name]()
    assert largest_difference(model, inputs_of(model, seed=1, examples=8), seeds=(2,))[0] <= 1e-12


@pytest.mark.parametrize("name", ["resnet20", "efficientnet_v2", "transformer_encoder", "subclassed_model", "nested"])
def test_the_smaller_model_loads_from_its_file(name, tmp_path):
    model = ARCHITECTURES[name]()
    inputs = inputs_of(model, seed=1, examples=4)
    _, smaller = largest_difference(model, inputs, seeds=(0,))
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.models.load_model(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(inputs)), arrays(loaded(inputs))) == 0


@pytest.mark.parametrize("name", ["nested", "subclassed_block", "bidirectional"])
def test_the_given_model_stays_as_it_was(name):
    model = ARCHITECTURES[name]()
    weights = model.get_weights()

    def calls():
        return [(len(one._inbound_nodes), len(one._outbound_nodes)) for one in model._flatten_layers()]

    before, trainable = calls(), [one.trainable for one in model._flatten_layers()]
    channels = find_channels(model)
    without_channels(channels, drawn(channels, 0))
    assert calls() == before
    assert [one.trainable for one in model._flatten_layers()] == trainable
    for one, other in zip(weights, model.get_weights(), strict=True):
        np.testing.assert_array_equal(one, other)


def test_names_types_and_frozen_layers_carry_over():
    model = keras.Sequential(
        [
            keras.Input((6,)),
            keras.layers.Dense(8, "relu", name="one", kernel_regularizer="l2", dtype="mixed_bfloat16"),
            keras.layers.Dense(3, name="two"),
        ],
        name="small",
    )
    model.get_layer("one").trainable = False
    channels = find_channels(model)
    smaller, _ = without_channels(channels, drawn(channels, 0))
    assert isinstance(smaller, keras.Sequential)
    assert [layer.name for layer in smaller.layers] == ["one", "two"] and smaller.name == "small"
    one = smaller.get_layer("one")
    assert one.units == 4 and not one.trainable and smaller.get_layer("two").trainable
    assert one.dtype_policy.name == "mixed_bfloat16" and isinstance(one.kernel_regularizer, keras.regularizers.L2)


class Gain(keras.layers.Layer):
    """Has a weight of its own and no config that gives its size."""

    def build(self, shape):
        self.gain = self.add_weight(shape=shape[1:], initializer="ones", name="gain")

    def call(self, x):
        return x * self.gain


def test_a_layer_whose_own_weight_meets_the_channels_keeps_them():
    inputs = keras.Input((6,))
    x = keras.layers.Dense(8, name="one")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3, name="two")(Gain(name="gain")(x)))
    channels = find_channels(model)
    assert not channels.groups
    stop = next(stop for stop in channels.stops if "gain" in stop.place)
    assert "Gain" in stop.reason and "one" in stop.layers


def test_a_model_that_cannot_be_followed_is_refused_by_name():
    class Raw(keras.Model):
        def __init__(self):
            super().__init__(name="raw")
            self.dense = keras.layers.Dense(4)

        def call(self, x):
            return keras.ops.convert_to_tensor(np.asarray(self.dense(x)) * 2)

    model = Raw()
    model.dense.build((None, 3))
    model.built = True
    with pytest.raises(ValueError, match=r"'raw' has no .*Build it as keras.Model\(inputs, outputs\)"):
        find_channels(model)
