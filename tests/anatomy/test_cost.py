import json
import threading

import keras
import numpy as np
import pytest
from cost_models import lenet, sequential
from keras import layers as L

from prunekit.anatomy.cost.cost import cost
from prunekit.anatomy.layers import layers as table
from prunekit.anatomy.layers.layers import register_layer
from prunekit.anatomy.layers.weight_spec import WeightSpec


def rows(model, **options):
    return {row.layer: row.macs for row in cost(model, **options).layers if row.macs != 0}


def test_a_lenet_costs_what_paper_and_pencil_say():
    # c1: 28x28 positions x 5x5x1 x 6; c2: 10x10 x 5x5x6 x 16; dense layers: inputs x outputs.
    expected = {"c1": 117_600, "c2": 240_000, "f1": 48_000, "f2": 10_080, "f3": 840}
    model = lenet()
    counted = cost(model)
    assert {row.layer: row.macs for row in counted.layers if row.macs} == expected
    assert counted.macs == counted.sparse_macs == 416_520
    # Weights and inputs, but for the inputs of c1, which nothing trained comes before.
    assert counted.backward_macs == counted.sparse_backward_macs == 833_040 - 117_600
    assert counted.parameters == model.count_params() == 61_706
    assert counted.unknown == ()
    first = counted.layers[0]
    assert (first.layer, first.type, first.parameters, first.output_shape) == ("c1", "Conv2D", 156, (1, 28, 28, 6))
    assert counted.layers[1].output_shape == (1, 14, 14, 6)


def test_every_count_scales_with_the_batch():
    one, many = cost(lenet()), cost(lenet(), batch_size=7)
    assert [7 * row.macs for row in one.layers] == [row.macs for row in many.layers]
    assert many.backward_macs == 7 * one.backward_macs
    assert many.parameters == one.parameters
    assert many.layers[0].output_shape == (7, 28, 28, 6)


def test_sparse_macs_follow_the_zeros_of_each_weight_exactly():
    model = lenet()
    for name, zeros in (("c1", 7), ("c2", 2_399), ("f1", 48_000), ("f2", 1)):
        layer = model.get_layer(name)
        kernel = np.ones(layer.kernel.shape, "float32")
        kernel.reshape(-1)[:zeros] = 0
        kernel.reshape(-1)[0] = -0.0
        layer.kernel.assign(kernel)
    sparse = {row.layer: row.sparse_macs for row in cost(model).layers}
    assert (sparse["c1"], sparse["c2"], sparse["f1"]) == (784 * (150 - 7), 100, 0)
    assert (sparse["f2"], sparse["f3"]) == (10_079, 840)
    backward = {row.layer: row.sparse_backward_macs for row in cost(model).layers}
    assert (backward["c1"], backward["c2"], backward["f1"]) == (784 * (150 - 7), 200, 0)
    assert (backward["f2"], backward["f3"]) == (2 * 10_079, 1_680)


def test_a_residual_block_with_strides_and_a_projection():
    inputs = keras.Input((32, 32, 16))
    hidden = L.Conv2D(32, 3, strides=2, padding="same", use_bias=False, name="a")(inputs)
    hidden = L.ReLU()(L.BatchNormalization(name="bn")(hidden))
    hidden = L.Conv2D(32, 3, padding="same", use_bias=False, name="b")(hidden)
    outputs = L.Add(name="add")([hidden, L.Conv2D(32, 1, strides=2, use_bias=False, name="skip")(inputs)])
    model = keras.Model(inputs, outputs)
    # 16x16 positions each: 3x3x16x32, 3x3x32x32, 1x1x16x32.
    assert rows(model) == {"a": 256 * 4_608, "b": 256 * 9_216, "skip": 256 * 512}
    counted = cost(model)
    assert counted.macs == 3_670_016
    assert counted.parameters == 4_608 + 9_216 + 512 + 4 * 32


@pytest.mark.parametrize(
    ("layer", "shape", "expected"),
    [
        (L.Dense(7), (4,), 28),
        (L.Dense(7), (5, 3, 4), 15 * 28),
        (L.Conv1D(6, 3, padding="causal"), (10, 4), 10 * 72),
        (L.Conv2D(6, 3, dilation_rate=2), (9, 9, 4), 25 * 216),
        (L.Conv2D(6, 3, groups=2), (9, 9, 4), 49 * 3 * 3 * 2 * 6),
        (L.Conv3D(5, 2), (4, 4, 4, 3), 27 * 8 * 15),
        (L.Conv2DTranspose(5, 3, strides=2, padding="same"), (4, 4, 3), 16 * 9 * 15),
        (L.DepthwiseConv2D(3, depth_multiplier=2), (6, 6, 4), 16 * 9 * 8),
        (L.SeparableConv2D(5, 3), (6, 6, 4), 16 * (9 * 4 + 4 * 5)),
        (L.SeparableConv1D(5, 3, strides=2, padding="same"), (6, 4), 3 * (3 * 4 + 4 * 5)),
        (L.Embedding(11, 3), (5,), 0),
        (L.EinsumDense("abc,cde->abde", (None, 2, 3)), (5, 4), 5 * 4 * 6),
        (L.EinsumDense("...x,xy->...y", 3), (5, 6, 4), 30 * 12),
        (L.EinsumDense("abc,bcd->abd", (5, 3)), (5, 4), 5 * 4 * 3),
        (L.EinsumDense("abc,cd->abd", (None, 3)), (5, 4), 5 * 12),
        (L.SimpleRNN(7), (5, 4), 5 * (4 * 7 + 7 * 7)),
        (L.GRU(7), (5, 4), 5 * 3 * (4 * 7 + 7 * 7)),
        (L.LSTM(7), (5, 4), 5 * 4 * (4 * 7 + 7 * 7)),
        (L.LSTM(7, unroll=True), (5, 4), 5 * 4 * (4 * 7 + 7 * 7)),
        (L.LSTM(7, return_sequences=True, go_backwards=True), (5, 4), 5 * 4 * (4 * 7 + 7 * 7)),
        (L.Bidirectional(L.LSTM(7)), (5, 4), 2 * 5 * 4 * (4 * 7 + 7 * 7)),
        (L.RNN([L.GRUCell(3), L.LSTMCell(2)]), (5, 4), 5 * (3 * (12 + 9) + 4 * (6 + 4))),
        # ConvLSTM: 4 steps x 5x5 positions x 4 gates x 2x2 x (2 inputs + 3 states) x 3 filters.
        (L.ConvLSTM2D(3, 2), (4, 6, 6, 2), 4 * 25 * 4 * 4 * (2 + 3) * 3),
        (L.ConvLSTM1D(3, 2), (4, 6, 2), 4 * 5 * 4 * 2 * (2 + 3) * 3),
        (L.ConvLSTM3D(3, 2), (4, 3, 3, 3, 2), 4 * 8 * 4 * 8 * (2 + 3) * 3),
        (L.TimeDistributed(L.Conv2D(2, 2)), (4, 5, 5, 3), 4 * 16 * 4 * 6),
        (L.TimeDistributed(L.GRU(2)), (4, 5, 3), 4 * 5 * 3 * (6 + 4)),
        (L.SpectralNormalization(L.Conv2D(2, 2)), (5, 5, 3), 16 * 4 * 6),
        (L.BatchNormalization(), (4, 4, 3), 0),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, L.Layer) else None,
)
@pytest.mark.short(cases=15)
def test_layer_types_cost_what_their_arithmetic_says(layer, shape, expected):
    counted = cost(sequential(layer, shape=shape))
    assert (counted.macs, counted.unknown) == (expected, ())
    assert counted.sparse_macs == expected
    assert counted.sparse_backward_macs == counted.backward_macs <= 2 * expected
    assert cost(sequential(layer, shape=shape), batch_size=3).macs == 3 * expected


def test_channels_first_finds_the_channels():
    layer = L.Conv2D(6, 3, data_format="channels_first")
    layer.build((None, 4, 9, 8))
    call = table.LayerShapes(((2, 4, 9, 8),), ((2, 6, 7, 6),))
    assert table.macs(layer, call) == ({"kernel": 2 * 7 * 6}, ())


@pytest.mark.parametrize("by_name", [False, True])
def test_multi_head_attention_counts_its_projections_and_both_products(by_name):
    query, value = keras.Input((5, 8)), keras.Input((7, 6))
    layer = L.MultiHeadAttention(2, 3, value_dim=4, name="mha")
    outputs = layer(value=value, query=query) if by_name else layer(query, value)
    assert rows(keras.Model([query, value], outputs)) == {
        "mha": 2 * 5 * 7 * 3 + 2 * 5 * 7 * 4,  # QK^T, then weights times V
        "mha/query": 5 * 8 * 6,
        "mha/key": 7 * 6 * 6,
        "mha/value": 7 * 6 * 8,
        "mha/attention_output": 5 * 8 * 8,
    }


def test_other_attentions_and_dot_products():
    query, value = keras.Input((5, 8)), keras.Input((7, 8))
    grouped = L.GroupQueryAttention(3, 4, 2, name="gqa")(query, value)
    assert rows(keras.Model([query, value], grouped)) == {
        "gqa": 2 * 4 * 5 * 7 * 3,
        "gqa/query": 5 * 8 * 12,
        "gqa/key": 7 * 8 * 6,
        "gqa/value": 7 * 8 * 6,
        "gqa/attention_output": 5 * 12 * 8,
    }
    model = keras.Model([query, value], L.Attention(name="a")([query, value]))
    assert rows(model) == {"a": 5 * 7 * 8 + 5 * 7 * 8}
    model = keras.Model([query, value], L.Dot(2, name="dot")([query, value]))
    assert rows(model) == {"dot": 5 * 7 * 8}


def test_the_reverse_projection_of_an_embedding_multiplies_and_the_lookup_does_not():
    for tie in (True, False):
        tokens = keras.Input((5,), dtype="int32")
        embedding = L.ReversibleEmbedding(11, 4, tie_weights=tie, name="tokens")
        model = keras.Model(tokens, embedding(embedding(tokens), reverse=True))
        assert rows(model) == {"tokens": 5 * 4 * 11}


def test_each_call_of_a_shared_layer_counts_and_its_weights_count_once():
    one, two = keras.Input((4,)), keras.Input((6, 4))
    shared = L.Dense(3, name="shared")
    block = keras.Sequential([keras.Input((3,)), L.Dense(2, name="inner")], name="block")
    first, second = shared(one), shared(two)
    model = keras.Model([one, two], [block(first), second])
    counted = cost(model)
    assert {row.layer: row.macs for row in counted.layers if row.macs} == {"shared": 7 * 12, "block/inner": 6}
    assert counted.parameters == model.count_params() == 15 + 8


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first, self.again = L.Dense(4, name="first"), L.Dense(4, name="again")
        self.norm, self.drop = L.BatchNormalization(name="norm"), L.Dropout(0.5, name="drop")

    def call(self, inputs, training=False):
        hidden = self.norm(self.first(inputs), training=training)
        for _ in range(3):
            hidden = self.drop(self.again(hidden), training=training)
        return hidden


def test_a_subclassed_model_is_followed_without_leaving_a_mark_on_it():
    model = Subclassed()
    model(np.ones((2, 5)))
    before = [np.array(weight) for weight in model.get_weights()]
    call = L.Layer.__call__
    assert rows(model, batch_size=3) == {"first": 3 * 20, "again": 3 * 3 * 16}
    assert L.Layer.__call__ is call
    assert model.first._inbound_nodes == []
    for was, now in zip(before, model.get_weights(), strict=True):
        np.testing.assert_array_equal(was, now)


def test_counting_a_functional_model_adds_no_node_to_its_layers():
    model = lenet()
    nodes = [len(layer._inbound_nodes) for layer in model.layers]
    cost(model)
    assert [len(layer._inbound_nodes) for layer in model.layers] == nodes


def test_layers_called_meanwhile_in_another_thread_do_not_count():
    inputs = keras.Input((4,))
    other = L.Dense(3, name="other")
    other.build((None, 4))

    class Calling(L.Layer):
        def call(self, x):
            thread = threading.Thread(target=lambda: other(np.ones((2, 4))))
            thread.start()
            thread.join()
            return x

    assert rows(keras.Model(inputs, L.Dense(2, name="own")(Calling(name="c")(inputs)))) == {"own": 8}


def test_models_that_take_dicts_and_several_arguments():
    class Two(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3, name="dense")

        def build(self, left_shape, right_shape):
            self.dense.build(left_shape)

        def call(self, left, right):
            return self.dense(left) + self.dense(right)

    model = Two()
    model(np.ones((2, 4)), np.ones((2, 4)))
    assert rows(model) == {"dense": 24}

    class Named(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3, name="dense")

        def call(self, inputs):
            return self.dense(inputs["x"])

    model = Named()
    model({"x": np.ones((2, 4)), "unused": np.ones((2, 9))})
    assert rows(model) == {"dense": 12}
    left, right = keras.Input((4,), name="left"), keras.Input((2,), name="right")
    model = keras.Model({"left": left, "right": right}, L.Dense(3, name="d")(L.Concatenate()([left, right])))
    assert rows(model) == {"d": 18}


def test_a_size_that_the_model_leaves_open_is_asked_for():
    model = sequential(L.LSTM(7, return_sequences=True, name="lstm"), L.Dense(2, name="out"), shape=(None, 4))
    with pytest.raises(ValueError, match=r"no fixed size.*Received: input shape \(None, None, 4\).*`inputs`"):
        cost(model)
    assert rows(model, inputs=np.zeros((1, 5, 4))) == {"lstm": 5 * 4 * 77, "out": 5 * 14}


def test_inputs_that_are_no_arrays_are_refused():
    model = sequential(L.Dense(2), shape=(4,))
    for inputs in ("x", [np.ones((1, 4)), 3.0]):
        with pytest.raises(TypeError, match="`inputs` is an array or tensor.*Received: ('x'|3.0)"):
            cost(model, inputs=inputs)


def test_a_text_model_whose_first_layer_loses_the_batch_size_is_counted():
    vectorization = L.TextVectorization(vocabulary=["a", "b"], output_sequence_length=5)
    model = keras.Sequential(
        [keras.Input((), dtype="string"), vectorization, L.Embedding(4, 3), L.LSTM(2, name="r"), L.Dense(1, name="d")]
    )
    assert rows(model, batch_size=3) == {"r": 3 * 5 * 4 * (6 + 4), "d": 3 * 2}


def test_a_fixed_batch_is_counted_as_often_as_it_fits():
    model = keras.Sequential([keras.Input(batch_shape=(4, 5, 3)), L.GRU(2, stateful=True, name="gru")])
    assert rows(model, batch_size=8) == {"gru": 8 * 5 * 3 * (6 + 4)}
    with pytest.raises(ValueError, match="takes batches of 4.*Received: batch_size=6"):
        cost(model, batch_size=6)


class Mixing(L.Layer):
    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[-1], 5))

    def call(self, inputs):
        return keras.ops.matmul(inputs, self.mixing)


def test_an_unknown_layer_counts_in_parameters_and_is_listed():
    model = sequential(L.Dense(3, name="known"), Mixing(name="mix"), shape=(4,))
    counted = cost(model)
    by_name = {row.layer: row for row in counted.layers}
    mix = by_name["mix"]
    assert (mix.macs, mix.sparse_macs, mix.backward_macs, mix.sparse_backward_macs) == (None, None, None, None)
    assert (mix.activation_bytes, mix.backward_activation_bytes) == (20, 20)
    assert (by_name["mix"].parameters, counted.parameters, counted.macs) == (15, 30, 12)
    assert [(item.name, item.reason) for item in counted.unknown] == [
        ("mix", "prunekit has no formula for the multiply-accumulates of Mixing")
    ]


def test_a_registered_layer_tells_its_uses(monkeypatch):
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    register_layer(Mixing, uses=lambda layer, call: call.inputs[0][0], mixing=WeightSpec())
    assert rows(sequential(Mixing(name="mix"), shape=(3,)), batch_size=2) == {"mix": 30}


def test_a_custom_recurrent_cell_is_followed_step_by_step():
    class Cell(L.Layer):
        state_size = 3

        def __init__(self, **options):
            super().__init__(**options)
            self.inner = L.Dense(3, name="inner")

        def build(self, shape):
            self.inner.build(shape)

        def call(self, inputs, states):
            return self.inner(inputs), [states[0]]

    assert rows(sequential(L.RNN(Cell(), name="rnn"), shape=(5, 4))) == {"rnn/inner": 5 * 12}


@pytest.mark.filterwarnings("ignore:`build.*was called on layer")
def test_a_layer_that_is_not_called_has_unknown_macs():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = L.Dense(2, name="used"), L.Dense(2, name="unused")
            self.unused.build((None, 3))

        def call(self, inputs):
            return self.used(inputs)

    model = Half()
    model(np.ones((1, 3)))
    counted = cost(model)
    assert [(item.name, item.reason) for item in counted.unknown] == [("unused", "the model did not call it")]
    assert (counted.macs, counted.parameters) == (6, 16)


def test_frozen_layers_need_no_gradient_of_their_weights():
    model = sequential(L.Dense(3, name="frozen"), L.Dense(2, name="free"), shape=(4,))
    model.get_layer("frozen").trainable = False
    # Nothing trained comes before either: "free" needs the gradient of its weights alone, "frozen" none at all.
    assert [row.backward_macs for row in cost(model).layers] == [0, 6]
    model.get_layer("frozen").trainable, model.get_layer("free").trainable = True, False
    assert [row.backward_macs for row in cost(model).layers] == [12, 6]
    model.trainable = False
    assert (cost(model).backward_macs, cost(model).backward_activation_bytes) == (0, 0)
    assert (cost(model).macs, cost(model).activation_bytes) == (18, 20)


def test_mixed_precision_changes_nothing():
    model = sequential(L.Conv2D(4, 3, dtype="mixed_float16", name="c"), shape=(5, 5, 2))
    assert rows(model) == {"c": 9 * 9 * 8}


def test_a_single_layer_can_be_counted():
    dense = L.Dense(3, name="alone")
    dense.build((None, 4))
    assert rows(dense) == {"alone": 12}


def test_a_cost_becomes_json_with_totals():
    loaded = json.loads(json.dumps(cost(lenet()).to_dict()))
    assert (loaded["macs"], loaded["backward_macs"]) == (416_520, 715_440)
    for total in loaded.keys() & loaded["layers"][0].keys():
        assert loaded[total] == sum(row[total] for row in loaded["layers"])
    assert loaded["layers"][0]["layer"] == "c1"


def test_a_printed_cost_is_a_table_with_totals_and_what_is_not_known():
    lines = str(cost(sequential(L.Dense(3, name="known"), Mixing(name="mix"), shape=(4,)), 1000)).splitlines()
    assert lines[0].startswith("Model 'sequential")
    assert lines[1].split("  ")[0] == "layer"
    cells = [" ".join(line.split()) for line in lines]
    assert "known Dense 15 12,000 12,000 12,000 12,000 12,000 12,000" in cells
    assert "mix Mixing 15 – – – – 20,000 20,000" in cells
    assert "total 30 " + 4 * "at least 12,000 " + "32,000 32,000" in cells
    assert lines[-1] == "not known: mix: prunekit has no formula for the multiply-accumulates of Mixing"


@pytest.mark.parametrize("batch_size", [0, -1, 2.0, True, None])
def test_an_impossible_batch_is_refused(batch_size):
    with pytest.raises(ValueError, match="batch_size must be (at least 1|an int). Received: batch_size="):
        cost(lenet(), batch_size=batch_size)


def test_what_fails_inside_the_users_layers_is_named():
    class Broken(L.Layer):
        failing = False

        def call(self, inputs):
            if self.failing:
                raise RuntimeError("no tensors today")
            return inputs

    broken = Broken()
    model = sequential(broken, L.Dense(2), shape=(3,))
    broken.failing = True
    call = L.Layer.__call__
    with pytest.raises(ValueError, match=r"(?s)could not be traced.*RuntimeError: .*no tensors today"):
        cost(model)
    assert L.Layer.__call__ is call


def test_an_unbuilt_model_is_refused():
    with pytest.raises(ValueError, match="not built"):
        cost(keras.Sequential([L.Dense(2)]))
