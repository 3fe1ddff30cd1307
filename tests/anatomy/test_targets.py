import re

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import sequential

import prunekit as pk
from prunekit.anatomy.layers import layers as table
from prunekit.anatomy.layers.layers import register_layer
from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.anatomy.layers.targets import find_targets
from prunekit.anatomy.layers.weight_spec import WeightSpec
from prunekit.anatomy.records.reports import Skipped, by_reason

# Names and NumPy: two of the tests stand for all on other backends in the short suite.
pytestmark = pytest.mark.every_backend(cases=0)


def names(model, include=(), exclude=()):
    return [target.name for target in find_targets(model, include, exclude)[0]]


def reasons(model, include=(), exclude=()):
    return {item.name: item.reason for item in find_targets(model, include, exclude)[1]}


def small_cnn():
    return sequential(
        (8, 8, 3),
        L.Conv2D(4, 3, name="conv_1"),
        L.BatchNormalization(name="bn_1"),
        L.DepthwiseConv2D(3, name="depthwise_1"),
        L.Flatten(name="flatten"),
        L.Dropout(0.5, name="dropout"),
        L.Dense(5, name="logits"),
        name="small_conv_net",
    )


def nested():
    def block(name):
        return keras.Sequential([keras.Input((6,)), L.Dense(6, name="wide"), L.Dense(6, name="narrow")], name=name)

    inputs = keras.Input((6,))
    return keras.Model(inputs, L.Dense(2, name="head")(block("left")(inputs) + block("right")(inputs)))


class Subclassed(keras.Model):
    def __init__(self):
        super().__init__()
        self.first = L.Dense(4, name="first")
        self.blocks = [L.Dense(4, name="same"), L.Dense(4, name="same")]
        self.by_key = {"out": L.Dense(2, name="out")}
        self.scale = self.add_weight(shape=(2,), name="scale")

    def call(self, inputs):
        hidden = self.first(inputs)
        for block in self.blocks:
            hidden = block(hidden)
        return self.by_key["out"](hidden) * self.scale


class Mixing(L.Layer):
    """A layer that prunekit does not know, with two weights."""

    def build(self, shape):
        self.mixing = self.add_weight(shape=(shape[-1], 3, 5), name="anything")
        self.offset = self.add_weight(shape=(5,))

    def call(self, inputs):
        return keras.ops.einsum("bi,iju->bu", inputs, self.mixing) + self.offset


@pytest.mark.every_backend
def test_kernels_are_in_and_biases_normalisation_and_depthwise_kernels_are_out_with_a_reason():
    model = small_cnn()
    targets, skipped = find_targets(model)
    assert [(t.name, t.role, t.shape, t.in_axes, t.out_axes) for t in targets] == [
        ("conv_1/kernel", "kernel", (3, 3, 3, 4), (2,), (3,)),
        ("logits/kernel", "kernel", (64, 5), (0,), (1,)),
    ]
    assert targets[0].variable is model.layers[0].kernel
    assert targets[0].layer is model.layers[0]
    assert targets[0].size == 108
    assert targets[0].path == "conv_1/kernel"
    assert [item.name for item in skipped] == [
        "conv_1/bias",
        "bn_1/gamma",
        "bn_1/beta",
        "bn_1/moving_mean",
        "bn_1/moving_variance",
        "depthwise_1/kernel",
        "depthwise_1/bias",
        "logits/bias",
    ]
    assert Skipped("depthwise_1/kernel", "a depthwise kernel: out unless include names it") in skipped


@pytest.mark.every_backend
def test_every_weight_of_the_model_is_either_a_target_or_skipped_and_none_is_both():
    for model in (small_cnn(), nested(), functional_shared()):
        targets, skipped = find_targets(model)
        listed = [target.name for target in targets] + [item.name for item in skipped]
        assert len(listed) == len(set(listed)) == len(model.weights)


def test_names_are_the_same_in_every_copy_of_a_model():
    first, second = nested(), nested()
    assert names(first) == names(second) == names(keras.models.clone_model(first))
    assert names(first) == [
        "left/wide/kernel",
        "left/narrow/kernel",
        "right/wide/kernel",
        "right/narrow/kernel",
        "head/kernel",
    ]


def functional_shared():
    one, two = keras.Input((4,), name="one"), keras.Input((4,), name="two")
    shared = L.Dense(3, name="shared")
    embedding = L.Embedding(7, 4, name="embedding")
    tokens = keras.Input((2,), dtype="int32", name="tokens")
    merged = L.Concatenate()([shared(one), shared(two), L.Flatten()(embedding(tokens))])
    return keras.Model(
        {"one": one, "two": two, "tokens": tokens}, [L.Dense(2, name="x")(merged), L.Dense(1, name="y")(merged)]
    )


def test_a_shared_layer_appears_once_in_a_model_with_several_inputs_and_outputs():
    assert names(functional_shared()) == ["embedding/embeddings", "shared/kernel", "x/kernel", "y/kernel"]


def test_a_layer_shared_by_two_nested_models_is_matched_through_either():
    shared = L.Dense(4, name="shared")
    left = keras.Sequential([keras.Input((4,)), shared], name="left")
    right = keras.Sequential([keras.Input((4,)), shared, L.Dense(4, name="own")], name="right")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, left(inputs) + right(inputs))
    assert names(model) == ["left/shared/kernel", "right/own/kernel"]
    assert names(model, include=["right"]) == ["left/shared/kernel", "right/own/kernel"]
    assert names(model, exclude=["right/shared/*"]) == ["right/own/kernel"]


def test_a_tied_weight_belongs_to_the_layer_that_the_table_knows():
    class Tied(L.Layer):
        def __init__(self, dense, **options):
            super().__init__(**options)
            self.matrix = dense.kernel

        def call(self, inputs):
            return keras.ops.matmul(inputs, keras.ops.transpose(self.matrix))

    dense = L.Dense(3, name="encoder")
    dense.build((None, 5))
    model = keras.Sequential([keras.Input((3,)), Tied(dense, name="decoder"), dense])
    targets, _ = find_targets(model)
    assert [(t.name, t.variable is dense.kernel) for t in targets] == [("encoder/kernel", True)]
    assert names(model, include=["decoder"]) == ["encoder/kernel"]


def test_subclassed_models_are_searched_through_attributes_lists_and_dicts():
    model = Subclassed()
    model(np.ones((2, 3)))
    assert names(model) == ["first/kernel", "same/kernel", "same#2/kernel", "out/kernel"]
    assert "pk.register_layer(Subclassed, scale=pk.WeightSpec(" in reasons(model)["scale"]
    assert names(model, include="scale") == ["scale"]


def test_recurrent_layers_own_the_kernels_of_their_cell():
    model = sequential(
        (5, 2),
        L.Bidirectional(L.GRU(3, return_sequences=True, name="gru"), name="both"),
        L.RNN([L.LSTMCell(2, name="one"), L.LSTMCell(3, name="two")], return_sequences=True, name="stack"),
        L.TimeDistributed(L.Dense(4, name="inner"), name="each"),
        L.LSTM(2, name="lstm"),
    )
    assert names(model) == [
        "both/forward_gru/kernel",
        "both/forward_gru/recurrent_kernel",
        "both/backward_gru/kernel",
        "both/backward_gru/recurrent_kernel",
        "stack/one/kernel",
        "stack/one/recurrent_kernel",
        "stack/two/kernel",
        "stack/two/recurrent_kernel",
        "each/inner/kernel",
        "lstm/kernel",
        "lstm/recurrent_kernel",
    ]
    assert names(model, include=["lstm/lstm_cell/kernel"]) == ["lstm/kernel"]
    assert names(model, include=["lstm_cell"]) == ["lstm/kernel", "lstm/recurrent_kernel"]
    assert reasons(model)["lstm/bias"] == "a bias: out unless include names it"


@pytest.mark.parametrize(
    ("include", "expected"),
    [
        (["conv_1"], ["conv_1/kernel"]),
        ("conv_1", ["conv_1/kernel"]),
        (["conv_*"], ["conv_1/kernel"]),
        (["*"], ["conv_1/kernel", "logits/kernel"]),
        (["conv_1/*"], ["conv_1/kernel"]),
        (["re:.*"], ["conv_1/kernel", "logits/kernel"]),
        (["re:(conv|dense)_\\d"], ["conv_1/kernel"]),
        (["*/bias"], ["conv_1/bias", "depthwise_1/bias", "logits/bias"]),
        (["*gamma", "logits"], ["bn_1/gamma", "logits/kernel"]),
        (["bn_1/gamma"], ["bn_1/gamma"]),
        (["re:.*/(gamma|beta)"], ["bn_1/gamma", "bn_1/beta"]),
        (["depthwise_1"], ["depthwise_1/kernel"]),
        (["depthwise_1/kernel"], ["depthwise_1/kernel"]),
        (["*/kernel"], ["conv_1/kernel", "depthwise_1/kernel", "logits/kernel"]),
    ],
)
@pytest.mark.one_backend
def test_include_takes_the_kernels_of_layers_and_the_weights_it_singles_out(include, expected):
    assert names(small_cnn(), include=include) == expected


@pytest.mark.one_backend
def test_a_glob_does_not_match_by_way_of_the_models_own_name_but_a_variable_path_can_be_given():
    model = small_cnn()
    assert names(model, exclude=["*conv*"]) == ["logits/kernel"]
    assert names(model, include=[model.layers[-1].kernel.path]) == ["logits/kernel"]
    renamed = keras.Sequential([keras.Input((3,)), L.Dense(2, name="x")], name="dense_net")
    renamed_path = renamed.layers[0].path
    assert names(renamed, include=[renamed_path]) == ["x/kernel"]


@pytest.mark.parametrize("pattern", ["left", "left/*", "re:left/.*"])
@pytest.mark.one_backend
def test_a_pattern_that_names_a_nested_model_selects_all_kernels_inside(pattern):
    assert names(nested(), include=[pattern]) == ["left/wide/kernel", "left/narrow/kernel"]
    assert names(nested(), exclude=[pattern]) == ["right/wide/kernel", "right/narrow/kernel", "head/kernel"]


@pytest.mark.one_backend
def test_exclude_wins_over_include_and_each_weight_says_why_it_is_out():
    found = reasons(nested(), include=["left", "head"], exclude=["*/wide"])
    assert found["left/wide/kernel"] == "excluded by '*/wide'"
    assert found["right/narrow/kernel"] == "not matched by include"
    assert found["left/narrow/bias"] == "a bias: out unless include names it"


@pytest.mark.one_backend
def test_a_pattern_that_matches_nothing_lists_near_misses():
    with pytest.raises(
        ValueError, match="'covn_1' in `include` matches no layer and no weight .*Did you mean .*'conv_1'"
    ):
        find_targets(small_cnn(), include=["covn_1"])
    with pytest.raises(ValueError, match="'logit/kernel' in `exclude` .*Did you mean 'logits/kernel'"):
        find_targets(small_cnn(), exclude=["logit/kernel"])
    with pytest.raises(ValueError, match="'zzz' in `include` .* Its weights are: 'conv_1/kernel', "):
        find_targets(small_cnn(), include=["zzz"])


@pytest.mark.one_backend
def test_a_layer_without_weights_can_be_excluded_but_not_included():
    assert names(small_cnn(), exclude=["dropout", "logits"]) == ["conv_1/kernel"]
    with pytest.raises(ValueError, match="'dropout' in `include` matches only layers without weights"):
        find_targets(small_cnn(), include=["dropout"])


@pytest.mark.parametrize(
    ("include", "exclude", "message"),
    [
        (["logits", "bn_1"], [], "'bn_1' in `include` matches nothing that is pruned.*name the weight itself"),
        (
            ["conv_1", "logits"],
            ["conv_1"],
            "'conv_1' in `include` matches nothing that is pruned.*excluded by 'conv_1'",
        ),
        (["bn_1/moving_mean"], [], "'bn_1/moving_mean', asked for by .* cannot be pruned: it is state"),
        (["re:("], [], r"'re:\(' in `include` is not a regular expression"),
        ([""], [], "non-empty strings"),
        ([7], [], "non-empty strings. Received: 7"),
        ([], ["*"], "has no weights to prune.*excluded by '\\*'"),
    ],
)
@pytest.mark.one_backend
def test_patterns_that_cannot_be_followed_are_refused(include, exclude, message):
    with pytest.raises(ValueError, match=message):
        find_targets(small_cnn(), include, exclude)


def test_weights_of_an_unknown_layer_are_skipped_with_the_remedy_or_taken_by_name():
    model = keras.Sequential([keras.Input((4,)), Mixing(name="mix"), L.Dense(2, name="dense")])
    found = reasons(model)
    assert found["mix/mixing"] == (
        "prunekit does not know the weights of Mixing: describe them with pk.register_layer(Mixing, "
        'mixing=pk.WeightSpec(), offset=pk.WeightSpec("bias", (), (), prunable=False)), where a WeightSpec() has its '
        'inputs along axis -2 and its outputs along axis -1, or prune its matrices with include="*"'
    )
    assert "mix/offset" in found
    (target,), _ = find_targets(model, include=["mix/mixing"])
    assert (target.role, target.in_axes, target.out_axes) == ("kernel", (0, 1), (2,))


@pytest.mark.parametrize(("include", "names"), [("*", ["mix/mixing", "dense/kernel"]), ("mix", ["mix/mixing"])])
def test_a_pattern_for_whole_layers_takes_the_trained_matrices_of_unknown_layers(include, names):
    model = keras.Sequential([keras.Input((4,)), Mixing(name="mix"), L.Dense(2, name="dense")])
    assert [target.name for target in find_targets(model, include)[0]] == names
    # Quantization needs to know how a weight is used.
    assert "mix/mixing" not in [target.name for target in find_targets(model, "*", verb="quantize")[0]]
    model.get_layer("mix").trainable = False
    if include == "*":
        assert [target.name for target in find_targets(model, include)[0]] == ["dense/kernel"]


def test_the_line_of_code_in_the_reason_describes_the_layer(monkeypatch):
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    model = keras.Sequential([keras.Input((4,)), Mixing(name="mix")])
    with pytest.raises(ValueError, match="no weights to prune") as refused:
        find_targets(model)
    code = re.search(r"pk\.register_layer\(.*\)\)", str(refused.value)).group()
    eval(code, {"pk": pk, "Mixing": Mixing})
    assert [target.name for target in find_targets(model)[0]] == ["mix/mixing"]


def test_an_unknown_layer_type_is_reported_once_and_not_once_for_each_layer():
    blocks = [Mixing(name=f"mix_{index}") for index in range(5)]
    model = keras.Sequential([keras.Input((4,)), *blocks, L.Dense(2, name="dense", use_bias=False)])
    (line,) = by_reason(find_targets(model)[1])
    assert line.startswith("mix_0/mixing, mix_0/offset, mix_1/mixing and 7 more: prunekit does not know the weights of")


def test_a_registered_layer_and_its_subclasses_are_known(monkeypatch):
    class Finer(Mixing):
        pass

    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))
    register_layer(Mixing, mixing=WeightSpec("kernel", (0,), (-1,)), offset=WeightSpec("bias", (), (0,), False))
    model = keras.Sequential([keras.Input((4,)), Finer(name="mix")])
    (target,), skipped = find_targets(model)
    assert (target.name, target.in_axes, target.out_axes) == ("mix/mixing", (0,), (2,))
    assert skipped == [Skipped("mix/offset", "a bias: out unless include names it")]


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # from Keras' own quantize
def test_lora_and_quantized_layers_are_refused_with_a_reason():
    model = keras.Sequential([keras.Input((4,)), L.Dense(4, name="a"), L.Dense(4, name="b"), L.Dense(4, name="c")])
    model.layers[0].enable_lora(2)
    model.layers[1].quantize("int8")
    assert names(model) == ["c/kernel"]
    found = reasons(model)
    assert "LoRA is enabled" in found["a/kernel"]
    assert "LoRA is enabled" in found["a/lora_kernel_b"]
    assert "quantized (int8)" in found["b/kernel"]
    assert "quantized (int8)" in found["b/kernel_scale"]
    for pattern, reason in (("a", "LoRA"), ("*", "LoRA"), ("b/kernel", "quantized")):
        with pytest.raises(ValueError, match=f"asked for by .* cannot be pruned: .*{reason}.*`exclude`"):
            find_targets(model, include=[pattern])
    assert names(model, include=["*"], exclude=["a", "b"]) == ["c/kernel"]


def test_integer_weights_are_never_targets():
    class Counting(L.Layer):
        def build(self, shape):
            self.counts = self.add_weight(shape=(4, 4), dtype="int32", initializer="zeros", trainable=False)

        def call(self, inputs):
            return inputs

    model = keras.Sequential([keras.Input((4,)), Counting(name="count"), L.Dense(2)])
    assert "int32" in reasons(model)["count/counts"]
    with pytest.raises(ValueError, match="cannot be pruned: its type int32"):
        find_targets(model, include=["count/counts"])


@pytest.mark.one_backend
def test_an_unbuilt_model_is_refused_with_the_remedy():
    for model in (keras.Sequential([L.Dense(3)]), Subclassed()):
        with pytest.raises(ValueError, match="not built.*Call it once"):
            find_targets(model)


@pytest.mark.filterwarnings("ignore:`build.*was called on layer")
def test_a_layer_that_the_model_never_called_is_listed():
    class Half(keras.Model):
        def __init__(self):
            super().__init__()
            self.used, self.unused = L.Dense(2, name="used"), L.Dense(2, name="unused")

        def call(self, inputs):
            return self.used(inputs)

    model = Half()
    model(np.ones((1, 2)))
    assert reasons(model)["unused"] == "the layer is not built: the model has not called it yet"


@pytest.mark.one_backend
def test_a_model_without_prunable_weights_is_refused():
    inputs = keras.Input((3,))
    with pytest.raises(ValueError, match="no weights to prune.*no weights at all"):
        find_targets(keras.Model(inputs, L.ReLU()(inputs)))
    with pytest.raises(ValueError, match="Received: only/gamma, only/beta: a normalisation weight"):
        find_targets(keras.Sequential([keras.Input((3,)), L.LayerNormalization(name="only")]))


@pytest.mark.one_backend
def test_other_things_than_keras_3_models_are_refused():
    with pytest.raises(TypeError, match="Keras 3 models. Received: <class 'int'>"):
        find_targets(3)


def test_a_single_layer_is_a_model_too():
    dense = L.Dense(3, name="alone")
    dense.build((None, 4))
    assert names(dense) == ["kernel"]
    assert names(dense, include=["bias"]) == ["bias"]


def test_weights_kept_in_lists_and_dicts_are_named_by_index_and_key():
    class Many(L.Layer):
        def build(self, shape):
            self.experts = [self.add_weight(shape=(2, 3)) for _ in range(2)]
            self.heads = {"left": self.add_weight(shape=(2, 2))}

        def call(self, inputs):
            return inputs

    model = keras.Sequential([keras.Input((2,)), Many(name="many")])
    assert [weight.name for weight in weights_in(model)] == ["many/experts_0", "many/experts_1", "many/heads_left"]
    assert names(model, include=["many/experts_?"]) == ["many/experts_0", "many/experts_1"]


def test_a_model_that_refers_back_to_itself_is_walked_once():
    model = nested()
    model.get_layer("left").parent = model
    assert names(model).count("head/kernel") == 1
