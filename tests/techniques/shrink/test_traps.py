"""Models in which a careless rule removes channels wrongly and silently: results are exact, or the channels stay."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize
from keras import layers, ops
from removed_channels import arrays, difference, drawn, outputs_with, zeroed

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels
from prunekit.techniques.shrink.graph.rebuild import without_channels

register = keras.saving.register_keras_serializable("traps")
dense = layers.Dense


def functional(body, shape=(6,), dtype="float32"):
    """A model of one input; `body` is a function of the input."""
    inputs = keras.Input(shape, dtype=dtype)
    return keras.Model(inputs, body(inputs))


def summed(x):
    """A reader that adds channels up without weights: exact only where removed channels are zero."""
    return dense(3)(ops.sum(x, axis=-1, keepdims=True))


@register
def doubled_relu(x):
    return 2 * ops.relu(x)


@register
class DividedByWidth(layers.Layer):
    def call(self, x):
        return x / x.shape[-1]


@register
class TwoLayers(layers.Layer):
    """Two dense layers, 9 and 5 wide."""

    def build(self, shape):
        self.up, self.down = dense(9, name="up"), dense(5, name="down")
        self.up.build(shape)
        self.down.build((*shape[:-1], 9))

    def call(self, x):
        return self.down(ops.relu(self.up(x)))


@register
class OtherInTraining(TwoLayers):
    def call(self, x, training=None):
        return super().call(x) * (0.5 if training else 1.0)


@register
class Tempered(TwoLayers):
    def build(self, shape):
        super().build(shape)
        self.temperature = self.add_weight(shape=(), name="temperature")

    def call(self, x):
        return super().call(x) * ops.exp(self.temperature)


@register
class Counting(TwoLayers):
    def build(self, shape):
        super().build(shape)
        self.calls = self.add_weight(shape=(), name="calls", trainable=False)

    def call(self, x):
        self.calls.assign_add(1.0)
        return super().call(x)


@register
class AddsLoss(TwoLayers):
    def call(self, x):
        self.add_loss(0.1 * ops.mean(ops.square(x)))
        return super().call(x)


@register
class CentredKernel(layers.Dense):
    @property
    def kernel(self):
        return self._kernel - ops.mean(self._kernel, axis=0)


@register
class Standardized(layers.Conv2D):
    def convolution_op(self, inputs, kernel):
        return super().convolution_op(inputs, kernel - ops.mean(kernel, axis=(0, 1, 2), keepdims=True))


@register
class ScaledSum(layers.Add):
    def _merge_function(self, inputs):
        return inputs[0] * ops.mean(inputs[1], axis=-1, keepdims=True)


@register
class WithOpenLengths(TwoLayers):
    def call(self, x):
        batch, time, width = ops.shape(x)
        return super().call(ops.reshape(ops.reshape(x, (batch, time * width)), (batch, time, width)))


def turned(layer, *more):
    """Channels at the first axis, which the layer mixes."""
    return functional(lambda i: dense(3)(layer(layers.Permute((2, 1))(dense(8)(i)), *more)), (6, 4))


def with_itself(layer):
    def body(i):
        x = layers.Permute((2, 1))(dense(8)(i))
        return dense(3)(layer(x, x))

    return functional(body, (6, 4))


def shared_on_fixed_and_hidden():
    def body(i):
        layer = dense(6)
        return dense(3)(layer(ops.relu(layer(i))))

    return functional(body)


def shared_by_two_layers():
    up, down = dense(8), dense(5)

    @register
    class Both(layers.Layer):
        def __init__(self, **options):
            super().__init__(**options)
            self.up, self.down = up, down

        def build(self, shape):
            if not self.up.built:
                self.up.build(shape)
                self.down.build((None, 8))

        def call(self, x):
            return self.down(ops.relu(self.up(x)))

    return functional(lambda i: dense(3)(Both()(Both()(i))), (5,))


def of_images(body, shape=(6, 6, 2)):
    return functional(lambda i: dense(3)(layers.GlobalAveragePooling2D()(body(i))), shape)


def conv(filters, size=3, **options):
    return layers.Conv2D(filters, size, padding="same", **options)


def grouped_after_unequal_parts():
    return of_images(lambda i: conv(8, groups=4)(layers.Concatenate()([conv(5)(i), conv(7)(i)])))


def grouped_and_sliced():
    def body(i):
        x = conv(8, groups=2)(i)
        return layers.Concatenate()([conv(5)(x), conv(4)(x[..., :3])])

    return of_images(body)


def nested_with_mask():
    inner_input = keras.Input((6, 5))
    inner = keras.Model(inner_input, layers.LSTM(7)(inner_input))
    return functional(lambda i: dense(3)(inner(layers.Embedding(20, 5, mask_zero=True)(i))), (6,), "int32")


MODELS = {
    "image from features": lambda: functional(
        lambda i: layers.Conv2DTranspose(2, 3, strides=2)(layers.Reshape((4, 4, 3))(dense(48)(i)))
    ),
    "channels in front of a convolution": lambda: turned(layers.Conv1D(5, 3)),
    "channels in front of a depthwise convolution": lambda: turned(layers.DepthwiseConv1D(3)),
    "channels in front of a separable convolution": lambda: turned(layers.SeparableConv1D(5, 3)),
    "channels in front of a transposed convolution": lambda: turned(layers.Conv1DTranspose(5, 3)),
    "channels in front of an LSTM": lambda: turned(layers.LSTM(5)),
    "channels in front of attention": lambda: with_itself(layers.MultiHeadAttention(2, 3)),
    "channels in front of plain attention": lambda: with_itself(lambda x, y: layers.Attention()([x, y])),
    "channels in front of an attention function": lambda: with_itself(
        lambda x, y: ops.dot_product_attention(x[:, :, None], y[:, :, None], y[:, :, None])
    ),
    "channels in front of a group normalization": lambda: turned(layers.GroupNormalization(2)),
    "channels in front of a dense layer, summed": lambda: functional(
        lambda i: dense(3)(ops.sum(dense(5)(layers.Permute((2, 1))(dense(8)(i))), axis=1)), (6, 4)
    ),
    "channels in front of a batch normalization, summed": lambda: functional(
        lambda i: dense(3)(ops.sum(layers.BatchNormalization()(layers.Permute((2, 1))(dense(8)(i))), axis=1)), (6, 4)
    ),
    "channels as examples": lambda: functional(
        lambda i: dense(3)(
            ops.reshape(dense(5)(ops.reshape(layers.Permute((2, 1))(dense(8)(i)), (-1, 6))), (-1, 8, 5))
        ),
        (6, 4),
    ),
    "a layer that divides by the width": lambda: functional(lambda i: dense(3)(DividedByWidth()(dense(8)(i)))),
    "a function that divides by the width": lambda: functional(
        lambda i: dense(3)(layers.Lambda(lambda x: x / x.shape[-1])(dense(8)(i)))
    ),
    "one value added to all channels": lambda: functional(lambda i: summed(layers.Add()([dense(8)(i), dense(1)(i)]))),
    "one value added by an operation": lambda: functional(lambda i: summed(dense(8)(i) + dense(1)(i))),
    "a constant added": lambda: functional(lambda i: summed(dense(8)(i) + 1.0)),
    "outer sum": lambda: functional(
        lambda i: dense(3)(ops.sum(ops.relu(dense(8)(i)[:, :, None] + dense(5)(i)[:, None, :]), axis=2))
    ),
    "outer product": lambda: functional(
        lambda i: dense(3)(ops.sum(dense(8)(i)[:, :, None] * ops.sigmoid(dense(5)(i))[:, None, :], axis=2))
    ),
    "logarithm of a sum": lambda: functional(lambda i: summed(ops.logsumexp(dense(8)(i), axis=1)), (6, 4)),
    "maximum with a first value": lambda: functional(lambda i: summed(ops.max(dense(8)(i), 1, initial=2.0)), (6, 4)),
    "order of places": lambda: functional(
        lambda i: summed(ops.cast(ops.argsort(dense(8)(i), axis=1), "float32")), (6, 4)
    ),
    "padded by a constant": lambda: functional(
        lambda i: summed(ops.pad(dense(8)(i), ((0, 0), (1, 1), (0, 0)), constant_values=1.0)), (6, 4)
    ),
    "numbers of channels as indices": lambda: functional(
        lambda i: dense(3)(ops.one_hot(ops.cast(ops.abs(dense(8)(i)), "int32"), 5)), (6,)
    ),
    "a kernel that is computed": lambda: functional(lambda i: dense(3)(CentredKernel(5)(dense(8)(i)))),
    "a convolution that is standardized": lambda: of_images(lambda i: Standardized(5, 3)(conv(8)(i))),
    "a sum that is scaled": lambda: functional(lambda i: dense(3)(ScaledSum()([dense(8)(i), dense(8)(i)]))),
    "a shared layer on fixed and hidden inputs": shared_on_fixed_and_hidden,
    "layers shared by two custom layers": shared_by_two_layers,
    "open lengths written in the graph": lambda: functional(lambda i: dense(3)(WithOpenLengths()(dense(8)(i))), (6, 4)),
    "groups over unequal parts": grouped_after_unequal_parts,
    "groups of which some are sliced": grouped_and_sliced,
    "a nested model with a mask": nested_with_mask,
    "attention by keyword": lambda: functional(
        lambda i: dense(3)(layers.Attention()(inputs=[dense(8)(i), dense(8)(i)])), (6, 4)
    ),
    "additive attention": lambda: functional(
        lambda i: dense(3)(layers.AdditiveAttention()([dense(8)(i), dense(8)(i)])), (6, 4)
    ),
    "an activation with weights": lambda: functional(lambda i: dense(3)(dense(8, activation=layers.PReLU())(i))),
    "an activation of one's own": lambda: functional(lambda i: dense(3)(dense(8, activation=doubled_relu)(i))),
    "an array as initializer": lambda: functional(
        lambda i: dense(3)(dense(8, kernel_initializer=keras.initializers.Constant(np.ones((6, 8))))(i))
    ),
    "a repeated nested model": lambda: functional(
        lambda i: dense(3)(layers.TimeDistributed(keras.Sequential([keras.Input((4,)), dense(8)]))(dense(4)(i))), (6, 4)
    ),
}


@pytest.mark.filterwarnings("ignore:.*does not support masking")
@pytest.mark.parametrize("name", MODELS)
def test_the_smaller_model_is_exact(name):
    model = MODELS[name]()
    inputs = inputs_of(model, seed=1, examples=8)
    # Layers that are activations make their weights at the first call.
    model(inputs)
    randomize(model)
    channels = find_channels(model)
    for seed in (0, 1):
        removed = drawn(channels, seed)
        smaller, _ = without_channels(channels, removed)
        wanted = outputs_with(model, zeroed(channels, removed), inputs)
        assert difference(wanted, arrays(smaller(inputs))) <= 1e-5


@pytest.mark.parametrize("kind", [OtherInTraining, Tempered, Counting, AddsLoss])
def test_a_layer_that_does_more_than_its_inner_layers_is_not_replaced_by_them(kind):
    model = functional(lambda i: dense(3)(kind(name="own")(dense(8)(i))))
    smaller, report = pk.shrink(functional(lambda i: dense(3)(dense(4)(kind(name="own")(dense(8)(i))))), channels=0.5)
    assert type(smaller.get_layer("own")) is kind
    assert any(stop.name == "own" and kind.__name__ in stop.reason for stop in report.skipped)
    assert len(smaller.trainable_variables) == len(model.trainable_variables) + 2


def test_a_layer_with_a_call_of_its_own_on_the_object_is_refused():
    model = functional(lambda i: dense(3)(dense(8, name="patched")(i)))
    layer = model.get_layer("patched")
    layer.call = lambda x, call=layer.call: 3 * call(x)
    with pytest.raises(ValueError, match="'patched' .*whose `call` was replaced on the object"):
        pk.shrink(functional(lambda i: dense(3)(dense(8)(layer(i)))), channels=0.5)


ADAPTED = {
    "normalization": (layers.Normalization(), np.random.default_rng(0).normal(5, 2, (64, 4)).astype("float32")),
    "discretization": (
        layers.Discretization(num_bins=4, output_mode="one_hot"),
        np.random.default_rng(0).normal(size=(64, 1)),
    ),
    "lookup": (layers.IntegerLookup(output_mode="one_hot"), np.arange(8)[:, None]),
}


@pytest.mark.parametrize("name", ADAPTED)
def test_what_a_preprocessing_layer_learned_carries_over(name):
    layer, data = ADAPTED[name]
    layer.adapt(data)
    inputs = keras.Input(data.shape[1:], dtype="int64" if name == "lookup" else "float32")
    model = keras.Model(inputs, dense(3)(dense(8)(layer(inputs))))
    smaller, _ = pk.shrink(model, channels=1.0)
    assert difference(arrays(model(data)), arrays(smaller(data))) == 0


def test_a_frozen_variable_stays_frozen():
    model = functional(lambda i: dense(3)(dense(8, name="one")(i)))
    model.get_layer("one")._kernel.trainable = False
    smaller, _ = pk.shrink(model, channels=0.5)
    assert not smaller.get_layer("one")._kernel.trainable
    assert len(smaller.trainable_variables) == len(model.trainable_variables) == 3


def test_a_train_step_that_is_lost_is_said():
    class Trained(keras.Model):
        def __init__(self, width, **options):
            inputs = keras.Input((6,))
            super().__init__(inputs, dense(3)(dense(width)(inputs)), **options)

        def train_step(self, data):
            return super().train_step(data)

    _, report = pk.shrink(Trained(8), channels=0.5)
    assert any("without the train_step of Trained" in note for note in report.notes)


def test_a_rule_that_is_wrong_is_found_before_the_model_is_returned(monkeypatch):
    """As if the rule of LayerNormalization kept no channels."""
    from prunekit.anatomy.channels import channel_layers

    monkeypatch.setitem(channel_layers._TABLE, layers.LayerNormalization, lambda walk, call: [call.x])
    model = functional(lambda i: dense(3)(dense(8)(i) * 1.0))
    pk.shrink(model, channels=0.5)
    model = randomize(functional(lambda i: dense(3)(layers.LayerNormalization(center=False, scale=False)(dense(8)(i)))))
    with pytest.raises(ValueError, match="computes other outputs than the model"):
        pk.shrink(model, channels=0.5)
