"""Factors of channels between layers: which tensors take them."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, stack
from backends import BACKEND
from keras import layers as L, ops
from scaled_models import LAST, assert_unchanged_by_factors, dense_pair, image

from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rescaling.rescaling import rescalable

pytestmark = pytest.mark.every_backend


def found_in(model) -> list[str]:
    """Returns "producer -> readers" of each tensor that can be multiplied."""
    return [
        f"{one.producer.first.name} -> {' '.join(sorted(reader.first.name for reader in one.readers))}"
        for one in rescalable(place(model))
    ]


# ---- which tensors ---------------------------------------------------------------------------------------------------


EXPECTED = {
    "mlp": ["first -> second", "third -> head"],
    "fashion_cnn": ["first -> second", "second -> dense", "dense -> head"],
    # A batch normalization reads the convolution.
    "fashion_cnn_channels_free": ["bn -> dense", "dense -> head"],
    # All other tensors end in ReLU6 or in a residual sum.
    "mobilenetv2": ["block0_project -> block1_expand", "block3_project -> last"],
    "separable": ["separable_2d -> depthwise_2d", "depthwise_2d -> pointwise_2d", "separable_1d -> depthwise_1d"],
    # The channels of the first layer are reshaped to positions and channels.
    "transposed": ["first -> second", "second -> head"],
    "grouped": ["widen -> narrow", "last -> head"],
    "residual_mlp": ["up0 -> down0", "up1 -> down1"],
    "transformer_encoder": [
        "attention_norm0 -> key query value",
        "ffn_norm0 -> up0",
        "attention_norm1 -> key query value",
        "ffn_norm1 -> up1",
        "last_norm -> head",
    ],
    "rms_norm": ["norm -> up"],
    "group_norm": ["second -> head"],
    "prelu": ["conv -> dense", "dense -> head"],
    "einsum": ["stem -> to_heads", "to_heads -> from_heads", "from_heads -> head"],
    "permute": ["first_bn -> second", "second -> head"],
    "shuffle": ["stem -> first", "third -> head"],
    # Inside a model that is called twice, and after it.
    "two_towers": ["hidden -> rating", "tower_hidden -> tower_out"],
    "nested": [
        "inner_hidden -> inner_out",
        "inner_out -> middle_out",
        "middle_out -> head",
        "stem -> inner_hidden",
    ],
    "multi_output": ["after -> final"],
    "subclassed_model": ["first -> second", "second -> head"],
    "subclassed_block": ["after -> head"],
    "inception": [
        "stem -> block0_five_inner block0_one block0_pooled block0_three_inner",
        "block0_five_inner -> block0_five",
        "block0_three_inner -> block0_three",
        "block1_five_inner -> block1_five",
        "block1_three_inner -> block1_three",
    ],
    "lstm_stack": [],
    "tied": [],
    "broadcast": [],
    "slices": [],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_tensors_of_architectures(name):
    assert sorted(found_in(ARCHITECTURES[name]())) == sorted(EXPECTED[name])


FOUND = {
    "convolution": lambda: image(L.Conv2D(4, 3, name="first"), L.Conv2D(5, 3, **LAST)),
    "grouped convolution": lambda: image(L.Conv2D(6, 3, name="first"), L.Conv2D(4, 3, groups=2, **LAST)),
    "from a grouped convolution": lambda: image(
        L.Conv2D(6, 3, groups=3, name="first"), L.LeakyReLU(), L.Conv2D(4, 3, **LAST)
    ),
    "separable convolution": lambda: image(
        L.Conv2D(4, 3, name="first"), L.SeparableConv2D(6, 3, depth_multiplier=2, activation="relu", **LAST)
    ),
    "transposed convolution": lambda: image(
        L.Conv2DTranspose(4, 3, activation="leaky_relu", name="first"), L.Conv2DTranspose(5, 3, **LAST)
    ),
    "with its activation as a layer": lambda: image(
        L.Conv2D(4, 3, activation=L.LeakyReLU(0.1), name="first"), L.Conv2D(5, 3, **LAST)
    ),
    "folded normalization without an offset": lambda: image(
        L.Conv2D(4, 3, name="first"), L.BatchNormalization(center=False), L.ReLU(), L.Conv2D(5, 3, **LAST)
    ),
    "layers of windows": lambda: image(
        L.Conv2D(4, 3, padding="same", name="first"),
        L.ZeroPadding2D(((0, 1), (2, 0))),
        L.MaxPooling2D(2, padding="same"),
        L.UpSampling2D(3, interpolation="bilinear"),
        L.Cropping2D(1),
        L.AveragePooling2D(2, padding="same"),
        L.SpatialDropout2D(0.2),
        L.Dropout(0.2),
        L.GaussianDropout(0.2),
        L.Identity(),
        L.Activation("relu"),
        L.GlobalMaxPooling2D(keepdims=True),
        L.Conv2D(5, 1, **LAST),
    ),
    "sequences": lambda: stack(
        (9, 3),
        L.Conv1D(4, 3, name="first"),
        L.Cropping1D(1),
        L.UpSampling1D(2),
        L.Conv1D(5, 3, padding="causal", **LAST),
        L.Flatten(),
        L.Dense(2, name="head"),
    ),
    "flattened and reshaped": lambda: stack(
        (4, 4, 3), L.Conv2D(5, 3, name="first"), L.Flatten(), L.Reshape((4, 5)), L.Dense(3, **LAST), L.Flatten()
    ),
    "flattened with axes in another order": lambda: stack(
        (4, 5, 3), L.Conv2D(5, 3, name="first"), L.Flatten(data_format="channels_first"), L.Dense(3, **LAST)
    ),
    "channels moved to the first axis and flattened": lambda: stack(
        (4, 5, 3), L.Conv2D(6, 3, name="first"), L.Permute((3, 1, 2)), L.Flatten(), L.Dense(3, **LAST)
    ),
    "equation with an ellipsis": lambda: stack(
        (4, 5),
        L.EinsumDense("...x,xy->...y", 6, bias_axes="y", activation="relu", name="first"),
        L.EinsumDense("...x,xy->...y", 3, **LAST),
    ),
    "equation with parallel axes": lambda: stack(
        (4, 5),
        L.EinsumDense("btd,td->btd", (4, 5), bias_axes="d", name="first"),
        L.EinsumDense("btd,tdo->bto", (4, 3), **LAST),
    ),
    "layer normalization": lambda: stack((4, 5), L.LayerNormalization(name="first"), L.Dense(3, **LAST)),
    "layer normalization without an offset": lambda: stack(
        (4, 5), L.LayerNormalization(center=False, name="first"), L.Dense(3, **LAST)
    ),
    "normalization and ReLU": lambda: image(
        L.BatchNormalization(name="first"), L.ReLU(), L.Conv2D(4, 3, activation="silu", **LAST)
    ),
}


@pytest.mark.parametrize("name", FOUND)
def test_a_tensor_is_found_and_takes_factors(name):
    model = FOUND[name]()
    assert found_in(model)[0].startswith("first -> ")
    assert_unchanged_by_factors(model)


def test_a_depthwise_convolution_reads_channels_and_computes_channels():
    model = image(
        L.Conv2D(4, 3, activation="relu", name="first"),
        L.DepthwiseConv2D(3, depth_multiplier=2, activation="relu", name="middle"),
        L.Conv2D(5, 1, activation="sigmoid", **LAST),
    )
    assert found_in(model) == ["first -> middle", "middle -> last"]
    assert_unchanged_by_factors(model)


def test_channels_on_the_first_axis():
    options = {"data_format": "channels_first"}
    model = stack(
        (3, 9, 8),
        L.Conv2D(4, 3, name="first", **options),
        L.BatchNormalization(axis=1),
        L.ReLU(),
        L.MaxPooling2D(2, **options),
        L.Conv2D(5, 2, activation="relu", name="second", **options),
        L.Flatten(**options),
        L.Dense(3, name="head"),
    )
    assert found_in(model) == ["first -> second", "second -> head"]
    (kernel,) = rescalable(place(model))[1].kernels
    assert kernel.channels.tolist() == [[channel] for channel in range(5)] * 4
    # TensorFlow has no such convolution on the CPU.
    if BACKEND != "tensorflow":
        assert_unchanged_by_factors(model)


# ---- refused ---------------------------------------------------------------------------------------------------------


def functional(function, shape=(7,)):
    """Returns the model of a function of its input."""
    x = keras.Input(shape, name="x")
    return keras.Model(x, function(x))


def residual(x):
    first = L.Dense(7, name="first")(x)
    return L.Dense(3)(L.Add()([first, L.Dense(7, activation="tanh")(first)]))


def concatenated(x):
    return L.Dense(3)(L.Concatenate()([L.Dense(6, name="first")(x), x]))


def gated(x):
    return L.Dense(3)(L.Multiply()([L.Dense(6, name="first")(x), L.Dense(6, activation="sigmoid")(x)]))


def output_too(x):
    first = L.Dense(6, name="first")(x)
    return [first, L.Dense(3)(first)]


def pooled_output(x):
    first = L.Conv2D(4, 3, name="first")(x)
    return [L.GlobalAveragePooling2D()(first), L.Conv2D(2, 3)(first)]


def called_twice(x):
    shared = L.Dense(7, name="first")
    return L.Dense(3)(shared(ops.tanh(shared(x))))


def read_by_one_that_is_called_twice(x):
    first, shared = L.Dense(7, name="first")(x), L.Dense(7, activation="tanh")
    return shared(shared(first))


def read_by_a_model_that_is_called_twice(x):
    tower = stack((7,), L.Dense(3, activation="tanh", name="inside"))
    return [tower(L.Dense(7, name="first")(x)), tower(x)]


def same_kernel(x):
    first, second = L.Dense(7, name="first"), L.Dense(7, name="second")
    y = first(x)
    second.build(y.shape)
    second._tracker.unlock()
    second._kernel = first._kernel
    return second(y)


@keras.saving.register_keras_serializable("tests")
class Holder(L.Layer):
    """A layer that calls a layer which belongs to others too; its calls cannot be followed."""

    def __init__(self, inner, **options):
        super().__init__(**options)
        self.inner = inner

    def call(self, x):
        return self.inner(x) if len(np.shape(ops.convert_to_numpy(x))) else x

    def compute_output_spec(self, x):
        return keras.KerasTensor((*x.shape[:-1], 7), x.dtype)


def called_by_an_unknown_layer(x):
    shared = L.Dense(7, name="first")
    return [L.Dense(3)(shared(x)), Holder(shared)(x)]


class Shifted(L.Activation):
    """An activation that adds a constant."""

    def call(self, x):
        return super().call(x) + 1.0


def lora(x):
    first = L.Dense(6, name="first")
    y = first(x)
    first.enable_lora(2)
    return L.Dense(3, activation="tanh")(y)


REFUSED = {
    "residual sum": lambda: functional(residual),
    "concatenation": lambda: functional(concatenated),
    "product": lambda: functional(gated),
    "output of the model": lambda: functional(output_too),
    "output of the model after pooling": lambda: functional(pooled_output, (8, 8, 3)),
    "only an output": lambda: stack((7,), L.Dense(6, name="first")),
    "layer that is called twice": lambda: functional(called_twice),
    "reader that is called twice": lambda: functional(read_by_one_that_is_called_twice),
    "kernel of two layers": lambda: functional(same_kernel),
    "layer inside an unknown layer": lambda: functional(called_by_an_unknown_layer),
    "kernel inside a wrapper": lambda: stack(
        (7,), L.SpectralNormalization(L.Dense(6, name="first")), L.Dense(3, name="head")
    ),
    "ReLU6": lambda: dense_pair(L.ReLU(6.0)),
    "ReLU6 in the layer": lambda: dense_pair(activation="relu6"),
    "ReLU with a threshold": lambda: dense_pair(L.ReLU(threshold=0.5)),
    "softmax": lambda: dense_pair(L.Softmax()),
    **{name: lambda name=name: dense_pair(activation=name) for name in ("sigmoid", "silu", "gelu", "elu", "tanh")},
    "layer of the user": lambda: dense_pair(Shifted("relu")),
    "layer of the user as activation": lambda: dense_pair(activation=Shifted("relu")),
    "input of a model that is called twice": lambda: functional(read_by_a_model_that_is_called_twice),
    "activity regularizer": lambda: dense_pair(activity_regularizer="l2"),
    "activity regularizer between": lambda: dense_pair(L.ReLU(activity_regularizer="l2")),
    "regularizing layer": lambda: dense_pair(L.ActivityRegularization(l2=0.1)),
    "constraint of the kernel": lambda: dense_pair(kernel_constraint="unit_norm"),
    "constraint of the bias": lambda: dense_pair(bias_constraint="non_neg"),
    "constraint of the reader": lambda: stack((7,), L.Dense(6), L.Dense(3, kernel_constraint="unit_norm")),
    "LoRA": lambda: functional(lora),
    "normalization without a factor": lambda: dense_pair(L.BatchNormalization(scale=False), L.ReLU()),
    "normalization of features": lambda: stack((7,), L.LayerNormalization(scale=False), L.Dense(3)),
    "normalization of two axes": lambda: stack((5, 7), L.LayerNormalization(axis=(1, 2)), L.Dense(3)),
    "normalization of two axes that are exchanged": lambda: stack(
        (5, 7), L.LayerNormalization(axis=(1, 2)), L.Permute((2, 1)), L.Dense(3)
    ),
    "normalization after the activation": lambda: stack(
        (7,), L.Dense(6, activation="relu"), L.BatchNormalization(scale=False), L.Dense(3)
    ),
    "pooling of the channels": lambda: stack(
        (8, 8, 3), L.Conv2D(4, 3), L.MaxPooling2D(2, data_format="channels_first"), L.Conv2D(4, 1)
    ),
    "mean of the channels": lambda: stack(
        (8, 8, 3), L.Conv2D(4, 3), L.GlobalAveragePooling2D(data_format="channels_first"), L.Dense(4)
    ),
    "channels divided between two axes": lambda: stack((8,), L.Dense(6), L.Reshape((3, 2)), L.Dense(4)),
    "channels on an axis that is not read": lambda: stack((5, 7), L.Dense(6), L.Permute((2, 1)), L.Dense(4)),
    "channels on an axis that an equation does not sum": lambda: stack(
        (5, 7), L.Dense(6), L.Permute((2, 1)), L.EinsumDense("btd,de->bte", (None, 4))
    ),
    "axis of unknown length": lambda: stack((None, 4), L.Conv1D(6, 3), L.Reshape((-1, 3)), L.Dense(4)),
    "offset without the channels": lambda: stack(
        (5, 7), L.EinsumDense("btd,de->bte", (5, 6), bias_axes="t"), L.Dense(4)
    ),
    "equation that sums the channels": lambda: stack(
        (5, 7), L.Dense(6), L.EinsumDense("btd,to->bo", (4,), activation="tanh")
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_tensors_that_take_no_factors(name):
    assert found_in(REFUSED[name]()) == []
