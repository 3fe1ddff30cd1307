"""Architectures with normalizations, tokens, recurrence, operations, nested models and subclasses."""

import keras
import numpy as np
from architecture_parts import VOCABULARY, architecture, chain, classify, conv_bn, stack
from keras import layers as L, ops
from networks import sequential

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
    tower = sequential(
        (7,), L.Dense(14, activation="relu", name="tower_hidden"), L.Dense(9, name="tower_out"), name="tower"
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
