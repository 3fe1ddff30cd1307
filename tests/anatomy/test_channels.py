"""Groups of channels: which axes of which weights shrink together, and what keeps channels."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import layers, ops
from networks import sequential

from prunekit.anatomy.channels.channel_axes import blocks, components, split_axis
from prunekit.anatomy.channels.channels import find_channels


def groups_of(model):
    return {group.name: group for group in find_channels(model).groups}


def axes_of(group):
    return {(member.weight, member.axis) for member in group.members}


def reasons_of(model):
    return {stop.name: stop.reason for stop in find_channels(model).stops}


def through(*between, shape=(8, 8, 4)):
    """A convolution, the given layers, and a convolution that reads them."""
    inputs = keras.Input(shape)
    x = layers.Conv2D(6, 3, name="before", padding="same")(inputs)
    for layer in between:
        x = layer(x)
    return keras.Model(inputs, layers.Conv2D(5, 1, name="after")(x))


def test_a_dense_layer_its_bias_and_the_next_kernel_shrink_together(perceptron):
    (group,) = find_channels(perceptron).groups
    assert group.name == "hidden" and group.channels.size == 16
    assert axes_of(group) == {("hidden/kernel", 1), ("hidden/bias", 0), ("logits/kernel", 0)}


def test_flatten_maps_each_channel_to_all_its_places():
    model = sequential((3, 2, 1), layers.Conv2D(4, 1, name="conv"), layers.Flatten(), layers.Dense(2, name="head"))
    group = groups_of(model)["conv"]
    rows = next(member.channels for member in group.members if member.weight == "head/kernel")
    np.testing.assert_array_equal(rows.reshape(6, 4), np.tile(group.channels, (6, 1)))


def test_concatenated_channels_keep_their_offsets():
    inputs = keras.Input((4, 4, 2))
    one, two = layers.Conv2D(3, 1, name="one")(inputs), layers.Conv2D(5, 1, name="two")(inputs)
    model = keras.Model(inputs, layers.Conv2D(2, 1, name="head")(layers.Concatenate()([one, two])))
    groups = groups_of(model)
    rows = next(member.channels for member in groups["two"].members if member.weight == "head/kernel")
    np.testing.assert_array_equal(rows, np.concatenate([groups["one"].channels, groups["two"].channels]))


def test_layers_joined_by_a_residual_are_one_group():
    assert {"stem/kernel", "stage0_block0_second/kernel"} <= {
        name for name, _ in axes_of(groups_of(ARCHITECTURES["resnet20"]())["stem"])
    }


def test_a_grouped_convolution_loses_as_many_channels_in_each_group():
    groups = groups_of(ARCHITECTURES["grouped"]())
    assert {group.parts for group in groups.values()} == {4}


def test_query_heads_go_with_their_key_and_value_heads():
    group = groups_of(ARCHITECTURES["rms_decoder"]())["attention0 (heads)"]
    heads = {member.weight.rpartition("/")[0]: member.channels.size for member in group.members}
    assert group.channels.size == 2 and heads["attention0/query"] == 4 and heads["attention0/key"] == 2


WALLS = {
    "layer normalization": (layers.LayerNormalization, "subtracts the mean of all channels"),
    "softmax": (layers.Softmax, "softmax over the channels"),
    "one group": (lambda: layers.GroupNormalization(1), "over all channels"),
    "maximum": (lambda: lambda x: x * ops.max(x, axis=-1, keepdims=True), "max over the channels"),
    "mean": (lambda: lambda x: x - ops.mean(x, axis=-1, keepdims=True), "mean over the channels"),
    "sort": (lambda: lambda x: ops.sort(x, axis=-1), "sort along the channels"),
    "constant": (lambda: lambda x: x + np.arange(6.0), "fixed length"),
    "sum of a constant": (lambda: lambda x: x * ops.sum(ops.sigmoid(x), axis=-1, keepdims=True), "over the channels"),
    "normalised constant": (lambda: lambda x: layers.RMSNormalization()(ops.sigmoid(x)), "not zero"),
    "unknown operation": (lambda: lambda x: ops.cumprod(ops.flip(x, -1), axis=-1), "along the channels"),
    "unknown layer": (lambda: layers.RandomFlip(seed=1), ""),
}


@pytest.mark.parametrize("name", WALLS)
def test_what_mixes_channels_keeps_them_and_says_why(name):
    make, reason = WALLS[name]
    channels = find_channels(through(make()))
    assert "before" not in {group.name for group in channels.groups}
    assert any(reason in stop.reason and "before" in stop.layers for stop in channels.stops)


PASSES = {
    "batch normalization": layers.BatchNormalization,
    "group normalization": lambda: layers.GroupNormalization(3),
    "rms normalization": layers.RMSNormalization,
    "unit normalization": layers.UnitNormalization,
    "prelu": lambda: layers.PReLU(shared_axes=[1, 2]),
    "depthwise": lambda: layers.DepthwiseConv2D(3, depth_multiplier=2),
    "permuted and back": lambda: lambda x: layers.Permute((2, 3, 1))(layers.Permute((3, 1, 2))(x)),
    "moved and back": lambda: lambda x: ops.moveaxis(ops.moveaxis(x, -1, 1), 1, -1),
    "swapped and back": lambda: lambda x: ops.swapaxes(ops.swapaxes(x, 1, 3), 1, 3),
    "reshaped and back": lambda: lambda x: layers.Reshape((8, 8, 6))(layers.Reshape((64, 6))(x)),
    "flattened and back": lambda: lambda x: ops.reshape(ops.reshape(x, (-1, 384)), (-1, 8, 8, 6)),
    "split and joined": lambda: lambda x: ops.concatenate(ops.split(x, [2, 3], axis=-1), axis=-1),
    "repeated": lambda: lambda x: ops.repeat(x, 2, axis=-1),
    "tiled": lambda: lambda x: ops.tile(x, (1, 1, 1, 2)),
    "padded": lambda: lambda x: ops.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0))),
    "gated by its mean": lambda: lambda x: x * ops.sigmoid(ops.mean(x, axis=(1, 2), keepdims=True)),
    "sum of squares": lambda: lambda x: x * ops.sum(ops.square(x), axis=-1, keepdims=True),
}


@pytest.mark.parametrize("name", PASSES)
def test_what_keeps_channels_apart_is_followed(name):
    assert groups_of(through(PASSES[name]()))["before"].channels.size in (3, 6)


@pytest.mark.every_backend
def test_a_constant_tensor_that_is_added_is_read_on_every_backend():
    """On PyTorch neither a tensor on a GPU nor one with gradients has an array of NumPy."""
    constant = ops.convert_to_tensor(2.0)
    if keras.backend.backend() == "torch":
        constant.requires_grad_()
    inputs = keras.Input((3,))
    hidden = ops.add(layers.Dense(4, name="first")(inputs), constant)
    model = keras.Model(inputs, layers.Dense(2, name="second")(hidden))
    (group,) = find_channels(model).groups
    assert group.name == "first" and group.channels.size == 4


def test_outputs_stay():
    model = keras.Sequential([keras.Input((3,)), layers.Dense(4, name="only")])
    channels = find_channels(model)
    assert not channels.groups and [stop.reason for stop in channels.stops] == ["an output of the model"]


def test_channels_that_are_also_an_output_stay():
    assert "hidden" not in groups_of(ARCHITECTURES["multi_output"]())


def test_a_subclass_that_computes_the_same_is_followed_like_its_base():
    class Named(layers.Dense):
        """A Dense layer."""

    class Doubled(layers.Dense):
        def call(self, inputs, training=None):
            return 2 * super().call(inputs)

    model = keras.Sequential([keras.Input((3,)), Named(4, name="named"), layers.Dense(5), layers.Dense(2)])
    assert groups_of(model)["named"].channels.size == 4
    model = keras.Sequential([keras.Input((3,)), Named(4, name="named"), Doubled(5, name="doubled"), layers.Dense(2)])
    assert not groups_of(model) and "Doubled" in reasons_of(model)["doubled"]


def test_weights_that_are_quantized_or_have_lora_keep_their_channels():
    model = keras.Sequential([keras.Input((8,)), layers.Dense(8, name="one"), layers.Dense(4, name="two")])
    model.get_layer("one").enable_lora(2)
    channels = find_channels(model)
    (stop,) = (stop for stop in channels.stops if "LoRA" in stop.reason)
    assert not channels.groups and stop.layers == ("one",)


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [
        ((2, 3), (6,), [([0, 1], [0])]),
        ((6,), (2, 3), [([0], [0, 1])]),
        ((4, 6), (4, 2, 3), [([0], [0]), ([1], [1, 2])]),
        ((2, 6, 2), (4, 3, 2), [([0, 1], [0, 1]), ([2], [2])]),
        ((1, 5), (5, 1, 1), [([0, 1], [0, 1, 2])]),
    ],
)
def test_a_reshape_falls_into_blocks_of_equal_size(before, after, found):
    assert blocks(before, after) == found


def test_the_axis_with_the_most_separate_channels_carries_them():
    numbers = np.tile(np.arange(3), 8)
    axis, entries = split_axis(numbers, (2, 4, 3))
    assert axis == 2
    np.testing.assert_array_equal(entries, np.repeat(np.arange(3)[:, None], 8, axis=1))


def test_components_are_those_of_a_search():
    rng = np.random.default_rng(0)
    first, second = rng.integers(0, 200, (2, 120))
    wanted = np.arange(200)
    for _ in range(200):
        low = np.minimum(wanted[first], wanted[second])
        np.minimum.at(wanted, first, low)
        np.minimum.at(wanted, second, low)
    np.testing.assert_array_equal(components(200, first, second), wanted)
