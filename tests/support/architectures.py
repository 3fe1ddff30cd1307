"""Small models of many architectures, for tests that remove channels.

Widths differ wherever the architecture leaves them independent, so that a cut on the wrong axis or layer shows.
"""

import math

import keras
import numpy as np
from keras import layers as L
from keras import ops

VOCABULARY = 20
ARCHITECTURES = {}


def architecture(function):
    """The function itself, listed in ARCHITECTURES under its own name."""
    ARCHITECTURES[function.__name__] = function
    return function


def inputs_of(model, seed=0, examples=3):
    """Random inputs in the structure that the model takes: normal floats, or tokens in [0, VOCABULARY)."""
    rng = np.random.default_rng(seed)

    def sample(tensor):
        shape = (examples, *tensor.shape[1:])
        if "int" in keras.backend.standardize_dtype(tensor.dtype):
            return rng.integers(0, VOCABULARY, shape).astype("int32")
        return rng.normal(size=shape).astype("float32")

    if hasattr(model, "inputs"):
        return keras.tree.map_structure(sample, model.input)
    # A subclassed model records only the shape that it was built with.
    return sample(keras.KerasTensor(model.get_build_config()["input_shape"]))


def randomize(model, seed=0):
    """Gives every weight random values under which it contributes to the outputs."""
    rng = np.random.default_rng(seed)
    # `weights` leaves out the states of seed generators, `variables` does not.
    for weight in model.weights:
        if weight.name.endswith("kernel"):
            values = rng.normal(size=weight.shape) / math.sqrt(fan_in(weight))
        elif weight.name in ("gamma", "moving_variance"):
            values = rng.uniform(0.5, 1.5, weight.shape)
        else:
            values = rng.normal(size=weight.shape) * 0.3
        weight.assign(values)


def fan_in(kernel):
    """How many inputs one output of the kernel sums, judged by the names in its path."""
    if "depthwise" in kernel.path:
        return math.prod(kernel.shape[:-2])
    if kernel.path.split("/")[-2] in ("query", "key", "value"):
        return kernel.shape[0]
    return math.prod(kernel.shape[:-1])


def chain(x, *layers):
    for layer in layers:
        x = layer(x)
    return x


def stack(shape, *layers):
    """A functional model of one layer after another."""
    inputs = keras.Input(shape)
    return keras.Model(inputs, chain(inputs, *layers))


def conv_bn(x, filters, kernel_size, name, activation="relu", **options):
    """Convolution without bias, batch normalization, and an activation unless it is None."""
    x = L.Conv2D(filters, kernel_size, padding="same", use_bias=False, name=name, **options)(x)
    x = L.BatchNormalization(name=f"{name}_bn")(x)
    return x if activation is None else L.Activation(activation, name=f"{name}_{activation}")(x)


def classify(x, classes=5):
    return chain(x, L.GlobalAveragePooling2D(), L.Dense(classes, name="head"))


# Feed-forward stacks.


@architecture
def mlp():
    """Three hidden Dense layers."""
    return stack(
        (11,),
        L.Dense(16, activation="relu", name="first"),
        L.Dense(13, activation="tanh", name="second"),
        L.Dense(9, name="third"),
        L.ReLU(),
        L.Dropout(0.2),
        L.Dense(5, name="head"),
    )


@architecture
def fashion_cnn():
    """Two convolutions with pooling, then Flatten and Dense."""
    return stack(
        (14, 12, 1),
        L.Conv2D(8, 3, activation="relu", name="first"),
        L.MaxPooling2D(),
        L.Conv2D(13, 3, activation="relu", name="second"),
        L.MaxPooling2D(),
        L.Flatten(),
        L.Dense(18, activation="relu", name="dense"),
        L.Dense(10, name="head"),
    )


@architecture
def fashion_cnn_channels_free():
    """Batch normalization after Flatten: one channel of the convolution is many of its entries."""
    return stack(
        (8, 7, 2),
        L.Conv2D(9, 3, strides=2, activation="relu", name="conv"),
        L.Flatten(),
        L.BatchNormalization(name="bn"),
        L.Dense(14, activation="relu", name="dense"),
        L.Dense(5, name="head"),
    )


@architecture
def conv1d():
    """Conv1D layers, one causal and one dilated."""
    return stack(
        (18, 4),
        L.Conv1D(9, 3, padding="causal", use_bias=False, name="first"),
        L.BatchNormalization(name="first_bn"),
        L.ReLU(),
        L.MaxPooling1D(),
        L.Conv1D(13, 3, dilation_rate=2, activation="relu", name="second"),
        L.GlobalMaxPooling1D(),
        L.Dense(5, name="head"),
    )


@architecture
def conv3d():
    """Conv3D layers."""
    return stack(
        (8, 7, 6, 2),
        L.Conv3D(8, 3, padding="same", name="first"),
        L.BatchNormalization(name="first_bn"),
        L.ReLU(),
        L.AveragePooling3D(2),
        L.Conv3D(11, 2, activation="relu", name="second"),
        L.GlobalAveragePooling3D(),
        L.Dense(5, name="head"),
    )


@architecture
def transposed():
    """A decoder: Dense reshaped to an image, then Conv2DTranspose layers up to an image."""
    return stack(
        (12,),
        L.Dense(4 * 5 * 9, activation="relu", name="dense"),
        L.Reshape((4, 5, 9)),
        L.Conv2DTranspose(14, 3, strides=2, padding="same", use_bias=False, name="first"),
        L.BatchNormalization(name="first_bn"),
        L.LeakyReLU(),
        L.Conv2DTranspose(10, 4, strides=2, padding="same", activation="relu", name="second"),
        L.Conv2DTranspose(3, 3, padding="same", activation="sigmoid", name="head"),
    )


# Convolutional networks.


@architecture
def grouped():
    """Convolutions in four groups, with batch normalization and a residual connection."""
    inputs = keras.Input((10, 9, 3))
    stem = conv_bn(inputs, 12, 3, "stem")
    x = conv_bn(stem, 16, 3, "widen", groups=4)
    x = conv_bn(x, 12, 3, "narrow", activation=None, groups=4)
    x = L.ReLU()(L.Add()([stem, x]))
    x = conv_bn(x, 20, 3, "last", groups=4)
    return keras.Model(inputs, classify(x))


def basic_block(x, filters, inner, name, strides=1):
    y = conv_bn(x, inner, 3, f"{name}_first", strides=strides)
    y = conv_bn(y, filters, 3, f"{name}_second", activation=None)
    if strides > 1:
        x = conv_bn(x, filters, 1, f"{name}_shortcut", activation=None, strides=strides)
    return L.ReLU()(L.Add(name=f"{name}_add")([x, y]))


@architecture
def resnet20():
    """ResNet-20 for small images: three stages of three blocks, with projections where the width changes."""
    inputs = keras.Input((12, 12, 3))
    x = conv_bn(inputs, 8, 3, "stem")
    for stage, filters in enumerate((8, 16, 32)):
        for block in range(3):
            strides = 2 if stage and not block else 1
            x = basic_block(x, filters, filters + 1 + block, f"stage{stage}_block{block}", strides)
    return keras.Model(inputs, classify(x, 10))


def bottleneck_block(x, filters, inner, name, strides=1, project=False):
    y = conv_bn(x, inner, 1, f"{name}_reduce", strides=strides)
    y = conv_bn(y, inner + 3, 3, f"{name}_spatial")
    y = conv_bn(y, filters, 1, f"{name}_expand", activation=None)
    if project:
        x = conv_bn(x, filters, 1, f"{name}_shortcut", activation=None, strides=strides)
    return L.ReLU()(L.Add(name=f"{name}_add")([x, y]))


@architecture
def bottleneck():
    """ResNet-50's bottleneck blocks: two stages of two."""
    inputs = keras.Input((16, 16, 3))
    x = conv_bn(inputs, 10, 7, "stem", strides=2)
    x = L.MaxPooling2D(3, strides=1)(L.ZeroPadding2D(1)(x))
    x = bottleneck_block(x, 18, 8, "stage0_block0", project=True)
    x = bottleneck_block(x, 18, 9, "stage0_block1")
    x = bottleneck_block(x, 23, 13, "stage1_block0", strides=2, project=True)
    x = bottleneck_block(x, 23, 14, "stage1_block1")
    return keras.Model(inputs, classify(x))


def inverted_residual(x, filters, expanded, name, strides=1):
    y = x
    if expanded is not None:
        y = conv_bn(y, expanded, 1, f"{name}_expand", activation=None)
        y = L.ReLU(6.0)(y)
    if strides > 1:
        y = L.ZeroPadding2D(((0, 1), (0, 1)), name=f"{name}_pad")(y)
    padding = "valid" if strides > 1 else "same"
    y = L.DepthwiseConv2D(3, strides, padding, use_bias=False, name=f"{name}_depthwise")(y)
    y = L.BatchNormalization(name=f"{name}_depthwise_bn")(y)
    y = conv_bn(L.ReLU(6.0)(y), filters, 1, f"{name}_project", activation=None)
    return L.Add(name=f"{name}_add")([x, y]) if x.shape == y.shape else y


@architecture
def mobilenetv2():
    """MobileNetV2: inverted residuals with linear bottlenecks."""
    inputs = keras.Input((16, 16, 3))
    x = L.ReLU(6.0)(conv_bn(inputs, 10, 3, "stem", activation=None, strides=2))
    x = inverted_residual(x, 8, None, "block0")
    x = inverted_residual(x, 12, 22, "block1", strides=2)
    x = inverted_residual(x, 12, 18, "block2")
    x = inverted_residual(x, 15, 20, "block3")
    x = L.ReLU(6.0)(conv_bn(x, 24, 1, "last", activation=None))
    return keras.Model(inputs, classify(x))


@architecture
def separable():
    """Separable and depthwise convolutions of images and of sequences, each with a depth multiplier of 2."""
    image, sequence = keras.Input((10, 9, 3)), keras.Input((12, 4))
    x = chain(
        image,
        L.SeparableConv2D(10, 3, depth_multiplier=2, activation="relu", name="separable_2d"),
        L.DepthwiseConv2D(3, depth_multiplier=2, name="depthwise_2d"),
        L.BatchNormalization(name="depthwise_2d_bn"),
        L.ReLU(),
        L.Conv2D(14, 1, activation="relu", name="pointwise_2d"),
        L.GlobalAveragePooling2D(),
    )
    y = chain(
        sequence,
        L.SeparableConv1D(9, 3, depth_multiplier=2, activation="relu", name="separable_1d"),
        L.DepthwiseConv1D(3, depth_multiplier=2, activation="relu", name="depthwise_1d"),
        L.GlobalAveragePooling1D(),
    )
    return keras.Model([image, sequence], L.Dense(5, name="head")(L.Concatenate()([x, y])))


def dense_layer(x, inner, growth, name):
    y = L.ReLU()(L.BatchNormalization(name=f"{name}_bn")(x))
    y = conv_bn(y, inner, 1, f"{name}_inner")
    y = L.Conv2D(growth, 3, padding="same", use_bias=False, name=f"{name}_growth")(y)
    return L.Concatenate(name=f"{name}_concat")([x, y])


@architecture
def densenet():
    """DenseNet: a block of three layers, a transition, and a block of two."""
    inputs = keras.Input((12, 12, 3))
    x = L.Conv2D(10, 3, padding="same", use_bias=False, name="stem")(inputs)
    for layer, (inner, growth) in enumerate([(12, 8), (14, 9), (16, 11)]):
        x = dense_layer(x, inner, growth, f"block0_layer{layer}")
    x = L.ReLU()(L.BatchNormalization(name="transition_bn")(x))
    x = L.AveragePooling2D(2)(L.Conv2D(19, 1, use_bias=False, name="transition")(x))
    for layer, (inner, growth) in enumerate([(15, 17), (13, 18)]):
        x = dense_layer(x, inner, growth, f"block1_layer{layer}")
    x = L.ReLU()(L.BatchNormalization(name="last_bn")(x))
    return keras.Model(inputs, classify(x))


@architecture
def unet():
    """U-Net: an encoder, and a decoder that concatenates the encoder's features; its output is an image."""
    inputs = keras.Input((16, 12, 3))
    high = conv_bn(conv_bn(inputs, 8, 3, "high_first"), 9, 3, "high_second")
    middle = conv_bn(L.MaxPooling2D()(high), 12, 3, "middle")
    x = conv_bn(L.MaxPooling2D()(middle), 18, 3, "low")
    x = conv_bn(L.UpSampling2D()(x), 14, 2, "up_middle")
    x = conv_bn(L.Concatenate()([middle, x]), 13, 3, "merge_middle")
    x = L.Conv2DTranspose(10, 2, strides=2, activation="relu", name="up_high")(x)
    x = conv_bn(L.Concatenate()([x, high]), 11, 3, "merge_high")
    return keras.Model(inputs, L.Conv2D(3, 1, activation="sigmoid", name="head")(x))


def inception_block(x, widths, name):
    one, three_inner, three, five_inner, five, pooled = widths
    branches = [
        conv_bn(x, one, 1, f"{name}_one"),
        conv_bn(conv_bn(x, three_inner, 1, f"{name}_three_inner"), three, 3, f"{name}_three"),
        conv_bn(conv_bn(x, five_inner, 1, f"{name}_five_inner"), five, 5, f"{name}_five"),
        conv_bn(L.AveragePooling2D(3, strides=1, padding="same")(x), pooled, 1, f"{name}_pooled"),
    ]
    return L.Concatenate(name=f"{name}_concat")(branches)


@architecture
def inception():
    """Two Inception blocks of four branches."""
    inputs = keras.Input((10, 10, 3))
    x = L.MaxPooling2D()(conv_bn(inputs, 11, 3, "stem"))
    x = inception_block(x, (8, 12, 13, 9, 10, 14), "block0")
    x = inception_block(x, (15, 17, 18, 16, 19, 20), "block1")
    return keras.Model(inputs, classify(x))


def squeeze_and_excite(x, pooled, reduced, name):
    """The features scaled by a gate, which two 1x1 convolutions compute from their 1x1 mean."""
    gate = L.Conv2D(reduced, 1, activation="swish", name=f"{name}_squeeze")(pooled)
    gate = L.Conv2D(x.shape[-1], 1, activation="sigmoid", name=f"{name}_excite")(gate)
    return L.Multiply(name=f"{name}_scale")([x, gate])


def mbconv(x, filters, expanded, reduced, name, strides=1):
    y = conv_bn(x, expanded, 1, f"{name}_expand", "swish")
    y = L.DepthwiseConv2D(3, strides, "same", use_bias=False, name=f"{name}_depthwise")(y)
    y = L.Activation("swish")(L.BatchNormalization(name=f"{name}_depthwise_bn")(y))
    pooled = L.Reshape((1, 1, expanded))(L.GlobalAveragePooling2D()(y))
    y = squeeze_and_excite(y, pooled, reduced, name)
    y = conv_bn(y, filters, 1, f"{name}_project", activation=None)
    return with_drop_connect(x, y)


def fused_mbconv(x, filters, expanded, name, strides=1):
    y = conv_bn(x, expanded, 3, f"{name}_expand", "swish", strides=strides)
    y = conv_bn(y, filters, 1, f"{name}_project", activation=None)
    return with_drop_connect(x, y)


def with_drop_connect(x, y):
    return L.Add()([L.Dropout(0.2, noise_shape=(None, 1, 1, 1))(y), x]) if x.shape == y.shape else y


@architecture
def efficientnet_v2():
    """EfficientNetV2: fused MBConv blocks, then MBConv blocks with squeeze-and-excitation."""
    inputs = keras.Input((16, 16, 3))
    x = conv_bn(inputs, 9, 3, "stem", "swish", strides=2)
    x = fused_mbconv(x, 9, 14, "fused0")
    x = fused_mbconv(x, 12, 17, "fused1", strides=2)
    x = mbconv(x, 15, 20, 8, "block0", strides=2)
    x = mbconv(x, 15, 22, 10, "block1")
    return keras.Model(inputs, classify(conv_bn(x, 24, 1, "last", "swish")))


@architecture
def squeeze_keepdims():
    """Squeeze-and-excitation whose pooling keeps the spatial axes."""
    inputs = keras.Input((10, 9, 3))
    x = conv_bn(inputs, 14, 3, "stem")
    x = squeeze_and_excite(x, L.GlobalAveragePooling2D(keepdims=True)(x), 8, "gate")
    return keras.Model(inputs, classify(conv_bn(x, 11, 3, "last")))


# Normalizations and activations with weights.


@architecture
def layer_norm_mlp():
    """Layer normalization between Dense layers."""
    return stack(
        (7,), L.Dense(14, activation="relu", name="dense"), L.LayerNormalization(name="norm"), L.Dense(5, name="head")
    )


@architecture
def rms_norm():
    """A residual branch that begins with RMSNormalization."""
    inputs = keras.Input((7,))
    stem = L.Dense(13, name="stem")(inputs)
    x = L.RMSNormalization(name="norm")(stem)
    x = chain(x, L.Dense(17, activation="silu", name="up"), L.Dense(13, name="down"))
    return keras.Model(inputs, L.Dense(5, name="head")(L.Add()([stem, x])))


@architecture
def group_norm():
    """Group normalization in four groups."""
    return stack(
        (10, 9, 3),
        L.Conv2D(16, 3, name="first"),
        L.GroupNormalization(groups=4, name="norm"),
        L.ReLU(),
        L.Conv2D(11, 3, activation="relu", name="second"),
        L.GlobalAveragePooling2D(),
        L.Dense(5, name="head"),
    )


@architecture
def prelu():
    """PReLU with one slope a channel, and after Dense."""
    return stack(
        (10, 9, 3),
        L.Conv2D(11, 3, name="conv"),
        L.PReLU(shared_axes=[1, 2], name="conv_prelu"),
        L.GlobalAveragePooling2D(),
        L.Dense(14, name="dense"),
        L.PReLU(name="dense_prelu"),
        L.Dense(5, name="head"),
    )


# Transformers and other models of tokens.


@keras.saving.register_keras_serializable(package="architectures")
class TokenAndPosition(L.Layer):
    """The sum of a token's embedding and its position's embedding."""

    def __init__(self, vocabulary, length, width, **options):
        super().__init__(**options)
        self.vocabulary, self.length, self.width = vocabulary, length, width
        self.token = L.Embedding(vocabulary, width, name="token")
        self.position = L.Embedding(length, width, name="position")

    def build(self, input_shape):
        self.token.build(input_shape)
        self.position.build(input_shape[1:])

    def call(self, tokens):
        return self.token(tokens) + self.position(ops.arange(tokens.shape[-1]))

    def get_config(self):
        return {**super().get_config(), "vocabulary": self.vocabulary, "length": self.length, "width": self.width}


@architecture
def transformer_encoder():
    """Two encoder blocks with layer normalization first."""
    inputs = keras.Input((10,), dtype="int32")
    x = TokenAndPosition(VOCABULARY, 10, 16, name="embedding")(inputs)
    for block, (heads, key, value, hidden) in enumerate([(3, 5, 7, 22), (4, 6, 5, 23)]):
        y = L.LayerNormalization(name=f"attention_norm{block}")(x)
        x = x + L.MultiHeadAttention(heads, key, value, dropout=0.1, name=f"attention{block}")(y, y)
        y = L.LayerNormalization(name=f"ffn_norm{block}")(x)
        x = x + chain(y, L.Dense(hidden, activation="gelu", name=f"up{block}"), L.Dense(16, name=f"down{block}"))
    x = L.LayerNormalization(name="last_norm")(x)
    return keras.Model(inputs, L.Dense(5, name="head")(L.GlobalAveragePooling1D()(x)))


@architecture
def rms_decoder():
    """Two decoder blocks: causal grouped-query attention, RMSNormalization and gated feed-forward layers."""
    inputs = keras.Input((9,), dtype="int32")
    x = L.Embedding(VOCABULARY, 18, name="embedding")(inputs)
    for block, hidden in enumerate((22, 23)):
        y = L.RMSNormalization(name=f"attention_norm{block}")(x)
        x = x + L.GroupQueryAttention(6, 4, 2, use_bias=False, name=f"attention{block}")(y, y, use_causal_mask=True)
        y = L.RMSNormalization(name=f"ffn_norm{block}")(x)
        gate = ops.silu(L.Dense(hidden, use_bias=False, name=f"gate{block}")(y))
        y = gate * L.Dense(hidden, use_bias=False, name=f"up{block}")(y)
        x = x + L.Dense(18, use_bias=False, name=f"down{block}")(y)
    x = L.RMSNormalization(name="last_norm")(x)
    return keras.Model(inputs, L.Dense(VOCABULARY, use_bias=False, name="logits")(x))


@architecture
def two_towers():
    """One tower shared by two inputs; the outputs are their cosine and a Dense head over both."""
    user, item = keras.Input((7,), name="user"), keras.Input((7,), name="item")
    tower = keras.Sequential(
        [keras.Input((7,)), L.Dense(14, activation="relu", name="tower_hidden"), L.Dense(9, name="tower_out")],
        name="tower",
    )
    left, right = tower(user), tower(item)
    cosine = L.Dot(axes=-1, normalize=True, name="cosine")([left, right])
    hidden = L.Dense(11, activation="relu", name="hidden")(L.Concatenate()([left, right]))
    return keras.Model([user, item], [cosine, L.Dense(1, name="rating")(hidden)])


@architecture
def tied():
    """An embedding whose matrix also computes the logits."""
    inputs = keras.Input((8,), dtype="int32")
    embedding = L.ReversibleEmbedding(VOCABULARY, 14, tie_weights=True, name="embedding")
    x = embedding(inputs)
    x = x + chain(x, L.Dense(17, activation="gelu", name="up"), L.Dense(14, name="down"))
    return keras.Model(inputs, embedding(L.LayerNormalization(name="norm")(x), reverse=True))


# Recurrent networks.


@architecture
def lstm_stack():
    """Two LSTM layers."""
    return stack(
        (6, 4), L.LSTM(11, return_sequences=True, name="first"), L.LSTM(9, name="second"), L.Dense(5, name="head")
    )


@architecture
def gru_stack():
    """A GRU with its reset gate after the product with the recurrent kernel, and a GRU with the gate before."""
    return stack(
        (6, 4),
        L.GRU(11, return_sequences=True, reset_after=True, name="after"),
        L.GRU(9, reset_after=False, name="before"),
        L.Dense(5, name="head"),
    )


@architecture
def simple_rnn():
    """Two SimpleRNN layers."""
    return stack(
        (6, 4),
        L.SimpleRNN(11, return_sequences=True, name="first"),
        L.SimpleRNN(9, name="second"),
        L.Dense(5, name="head"),
    )


@architecture
def bidirectional():
    """A bidirectional LSTM that concatenates its directions, and a bidirectional GRU that adds them."""
    return stack(
        (6, 4),
        L.Bidirectional(L.LSTM(8, return_sequences=True), merge_mode="concat", name="concat"),
        L.Bidirectional(L.GRU(11), merge_mode="sum", name="sum"),
        L.Dense(5, name="head"),
    )


@architecture
def conv_lstm():
    """ConvLSTM2D, then a convolution."""
    return stack(
        (4, 8, 7, 2),
        L.ConvLSTM2D(9, 3, padding="same", name="recurrent"),
        L.Conv2D(11, 3, activation="relu", name="conv"),
        L.GlobalAveragePooling2D(),
        L.Dense(5, name="head"),
    )


@architecture
def time_distributed():
    """TimeDistributed convolution, Flatten and Dense, then LSTM."""
    return stack(
        (4, 7, 6, 3),
        L.TimeDistributed(L.Conv2D(8, 3, strides=2, activation="relu", name="conv"), name="each_conv"),
        L.TimeDistributed(L.Flatten(), name="each_flatten"),
        L.TimeDistributed(L.Dense(14, activation="relu", name="dense"), name="each_dense"),
        L.LSTM(9, name="lstm"),
        L.Dense(5, name="head"),
    )


# Operations between layers.


@architecture
def einsum():
    """EinsumDense to two output axes and back."""
    return stack(
        (6, 10),
        L.Dense(13, name="stem"),
        L.EinsumDense("btd,dhk->bthk", (None, 3, 7), bias_axes="hk", activation="relu", name="to_heads"),
        L.EinsumDense("bthk,hkd->btd", (None, 12), bias_axes="d", activation="relu", name="from_heads"),
        L.Dense(5, name="head"),
    )


@architecture
def split():
    """The two halves of a Dense layer's output multiplied."""
    inputs = keras.Input((7,))
    left, right = ops.split(L.Dense(18, name="both")(inputs), 2, axis=-1)
    x = L.Dense(11, activation="relu", name="hidden")(left * right)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


@architecture
def slices():
    """Two slices of a Dense layer's output, each added to the output of another Dense layer."""
    inputs = keras.Input((7,))
    x = L.Dense(13, activation="relu", name="sliced")(inputs)
    left = ops.relu(x[..., :5] + L.Dense(5, name="left")(inputs))
    right = ops.relu(x[..., 5:] + L.Dense(8, name="right")(inputs))
    x = L.Concatenate()([L.Dense(10, name="left_out")(left), L.Dense(9, name="right_out")(right)])
    return keras.Model(inputs, L.Dense(4, name="head")(x))


@architecture
def shuffle():
    """ShuffleNet: channels shuffled between grouped convolutions, once by layers and once by operations."""
    inputs = keras.Input((8, 7, 3))
    x = conv_bn(inputs, 12, 3, "stem")
    x = conv_bn(x, 20, 1, "first", groups=4)
    x = chain(x, L.Reshape((8, 7, 4, 5)), L.Permute((1, 2, 4, 3)), L.Reshape((8, 7, 20)))
    x = conv_bn(x, 24, 3, "second", groups=4)
    x = ops.transpose(ops.reshape(x, (-1, 8, 7, 4, 6)), (0, 1, 2, 4, 3))
    x = conv_bn(ops.reshape(x, (-1, 8, 7, 24)), 16, 1, "third", groups=4)
    return keras.Model(inputs, classify(x))


@architecture
def permute():
    """Channels moved to the first axis, normalized there, and moved back."""
    return stack(
        (10, 9, 3),
        L.Conv2D(11, 3, name="first"),
        L.Permute((3, 1, 2)),
        L.BatchNormalization(axis=1, name="first_bn"),
        L.ReLU(),
        L.Permute((2, 3, 1)),
        L.Conv2D(14, 3, data_format="channels_last", activation="relu", name="second"),
        L.GlobalAveragePooling2D(),
        L.Dense(5, name="head"),
    )


@architecture
def stacked_ops():
    """Layers connected by functions of keras.ops, among them contractions of hidden channels."""
    inputs = keras.Input((8, 6, 3))
    x = ops.add(L.Conv2D(9, 3, padding="same", name="one")(inputs), L.Conv2D(9, 1, name="two")(inputs))
    x = ops.concatenate([ops.relu(x), L.Conv2D(14, 3, padding="same", name="three")(inputs)], axis=-1)
    pooled = ops.mean(x, axis=(1, 2))
    query = L.Dense(11, name="query")(pooled)
    scores = ops.einsum("bhwc,bc->bhw", L.Conv2D(11, 1, name="key")(x), query)
    context = ops.einsum("bhw,bhwv->bv", ops.tanh(scores) / 48, L.Conv2D(13, 1, name="value")(x))
    row = ops.expand_dims(L.Dense(10, name="row")(context), 1)
    columns = ops.transpose(ops.mean(L.Conv2D(10, 1, name="columns")(x), axis=2), (0, 2, 1))
    x = ops.squeeze(ops.matmul(row, columns), axis=1)
    return keras.Model(inputs, L.Dense(5, name="head")(x))


@architecture
def nested():
    """A functional model inside a Sequential inside a functional model."""
    inner = stack((9,), L.Dense(14, activation="relu", name="inner_hidden"), L.Dense(11, name="inner_out"))
    middle = keras.Sequential([keras.Input((9,)), inner, L.ReLU(), L.Dense(10, name="middle_out")], name="middle")
    return stack((7,), L.Dense(9, activation="relu", name="stem"), middle, L.ReLU(), L.Dense(5, name="head"))


@architecture
def multi_output():
    """Two inputs in a dict; a hidden layer is an output as well as the final layer."""
    image, facts = keras.Input((10, 9, 3), name="image"), keras.Input((6,), name="facts")
    x = L.GlobalAveragePooling2D()(conv_bn(image, 12, 3, "conv"))
    x = L.Concatenate()([x, L.Dense(8, activation="relu", name="facts_hidden")(facts)])
    hidden = L.Dense(11, activation="relu", name="hidden")(x)
    x = L.Dense(14, activation="relu", name="after")(hidden)
    return keras.Model({"image": image, "facts": facts}, {"hidden": hidden, "final": L.Dense(5, name="final")(x)})


@architecture
def residual_mlp():
    """Residual connections up to the output, whose width is thus that of three Dense layers."""
    inputs = keras.Input((7,))
    x = L.Dense(9, name="stem")(inputs)
    for block, hidden in enumerate((14, 12)):
        y = L.Dense(hidden, activation="relu", name=f"up{block}")(x)
        x = L.Add()([x, L.Dense(9, name=f"down{block}")(y)])
    return keras.Model(inputs, x)


@architecture
def broadcast():
    """Features multiplied by a gate of width 1."""
    inputs = keras.Input((7,))
    gate = L.Dense(1, activation="sigmoid", name="gate")(inputs)
    x = L.Multiply()([L.Dense(12, activation="relu", name="features")(inputs), gate])
    return keras.Model(inputs, L.Dense(5, name="head")(x))


@architecture
def max_over_channels():
    """A maximum over the channels of a convolution, whose channels can thus not be removed."""
    inputs = keras.Input((10, 9, 3))
    x = L.Conv2D(12, 3, name="reduced")(inputs)
    x = L.Conv2D(11, 3, activation="relu", name="conv")(ops.max(x, axis=-1, keepdims=True))
    return keras.Model(inputs, classify(x))


@architecture
def softmax_hidden():
    """A softmax over hidden channels."""
    return stack((7,), L.Dense(12, name="hidden"), L.Softmax(), L.Dense(9, name="after"), L.Dense(5, name="head"))


# Subclasses.


@keras.saving.register_keras_serializable(package="architectures")
class GatedBlock(L.Layer):
    """Residual feed-forward block with a gate, built from Dense sublayers."""

    def __init__(self, hidden, **options):
        super().__init__(**options)
        self.hidden = hidden
        self.gate = L.Dense(hidden, activation="sigmoid", name="gate")
        self.up = L.Dense(hidden, name="up")

    def build(self, input_shape):
        self.gate.build(input_shape)
        self.up.build(input_shape)
        self.down = L.Dense(input_shape[-1], name="down")
        self.down.build((*input_shape[:-1], self.hidden))

    def call(self, inputs):
        return inputs + self.down(self.gate(inputs) * self.up(inputs))

    def get_config(self):
        return {**super().get_config(), "hidden": self.hidden}


@architecture
def subclassed_block():
    """A custom layer with Dense sublayers between Dense layers."""
    return stack(
        (7,),
        L.Dense(12, activation="relu", name="stem"),
        GatedBlock(15, name="block"),
        L.Dense(10, activation="relu", name="after"),
        L.Dense(5, name="head"),
    )


@keras.saving.register_keras_serializable(package="architectures")
class Perceptron(keras.Model):
    """Two hidden Dense layers, the first with batch normalization."""

    def __init__(self, **options):
        super().__init__(**options)
        self.first = L.Dense(14, name="first")
        self.norm = L.BatchNormalization(name="norm")
        self.second = L.Dense(11, activation="relu", name="second")
        self.head = L.Dense(5, name="head")

    def call(self, inputs, training=False):
        x = ops.relu(self.norm(self.first(inputs), training=training))
        return self.head(self.second(x))


@architecture
def subclassed_model():
    """A subclass of keras.Model, built by a call."""
    model = Perceptron()
    model(np.zeros((1, 7), "float32"))
    return model
