"""A model without some channels computes what the model computes with zeros in all their weight entries."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize
from networks import sequential
from removed_channels import arrays, difference, drawn, outputs_with, zeroed

import prunekit as pk
from prunekit.anatomy.channels.channels import find_channels
from prunekit.techniques.shrink.graph.rebuild import without_channels

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


@pytest.mark.short(cases=12)
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
    model = sequential(
        (6,),
        keras.layers.Dense(8, "relu", name="one", kernel_regularizer="l2", dtype="mixed_bfloat16"),
        keras.layers.Dense(3, name="two"),
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


@pytest.mark.parametrize("name", [None, "pixels"])
@pytest.mark.parametrize(
    "smaller_of",
    [
        lambda model: pk.shrink(model, channels=0.5)[0],
        lambda model: pk.simplify(model)[0],
        lambda model: pk.remove_blocks(model, 1, np.ones((2, 6), "float32"))[0],
    ],
    ids=["shrink", "simplify", "remove_blocks"],
)
def test_inputs_keep_their_names_and_settings(smaller_of, name):
    inputs = keras.Input((6,), name=name, batch_size=2, dtype="float16")
    x = keras.layers.Dense(6, "relu", dtype="float32")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(keras.layers.Dense(6, "relu")(x)))
    smaller = smaller_of(model)
    for one, other in ((model.inputs[0], smaller.inputs[0]), (model.layers[0], smaller.layers[0])):
        assert one.name == other.name and one.dtype == other.dtype
    assert smaller.inputs[0].shape == (2, 6)


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
    stop = next(stop for stop in channels.stops if "gain" in stop.name)
    assert "Gain" in stop.reason and "one" in stop.layers


class Halves(keras.layers.Layer):
    """Writes a number into its config that its constructor does not take, and reads open lengths."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.dense, self.never = keras.layers.Dense(units), keras.layers.Dense(3, name="never")

    def build(self, shape):
        self.dense.build(shape)
        self.never.build(shape)

    def get_config(self):
        return {**super().get_config(), "units": self.dense.units, "half": self.dense.units // 2}

    def call(self, x):
        x = self.dense(x)
        batch, length, units = keras.ops.shape(x)
        factor = keras.ops.convert_to_tensor(0.5)
        return keras.ops.reshape(x, (batch, length, 2, units // 2)) * factor


def halves():
    inputs = keras.Input((None, 5))
    x = Halves(6, name="halves")(inputs)
    return keras.Model(inputs, keras.layers.Dense(4, name="after")(x))


@pytest.mark.every_backend
def test_a_layer_without_a_config_that_works_is_replaced_by_the_layers_inside_it(tmp_path):
    model = halves()
    inputs = np.random.default_rng(0).normal(size=(3, 7, 5)).astype("float32")
    found, smaller = largest_difference(model, inputs)
    assert found <= 1e-5 and any(
        "dense" in one.name and one.units < 6 for one in smaller.layers if hasattr(one, "units")
    )
    channels = find_channels(model)
    same, _ = without_channels(channels, np.zeros(0, int))
    same.save(tmp_path / "same.keras")
    loaded = keras.models.load_model(tmp_path / "same.keras")
    assert difference(arrays(model(inputs)), arrays(loaded(inputs))) <= 1e-6


def test_layers_that_no_call_uses_are_noted():
    _, report = pk.shrink(halves(), channels=0.5)
    assert "Layers that no call uses are not in the smaller model: halves/never." in report.notes


@pytest.mark.every_backend
def test_copies_of_one_entry_are_removed_with_what_reads_them():
    inputs = keras.Input((5,))
    one = keras.layers.Dense(1, name="one")(inputs)
    x = keras.ops.repeat(one, 6, axis=-1) * keras.layers.Dense(6, name="six")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(x))
    found, smaller = largest_difference(model, np.ones((2, 5), "float32"))
    assert found <= 1e-5 and smaller.get_layer("six").units == 3


def moved_blocks(data_format="channels_last"):
    """Convolutions around `space_to_depth` and `depth_to_space`."""
    last = data_format == "channels_last"
    inputs = keras.Input((4, 6, 2))
    turned, back = (
        (lambda x: x, lambda x: x) if last else (keras.layers.Permute((3, 1, 2)), keras.layers.Permute((2, 3, 1)))
    )
    x = keras.layers.Conv2D(6, 3, padding="same", activation="relu", name="one")(inputs)
    x = back(keras.ops.space_to_depth(turned(x), 2, data_format=data_format))
    x = keras.layers.Conv2D(20, 1, activation="sigmoid", name="two")(x)
    x = back(keras.ops.depth_to_space(turned(x), 2, data_format=data_format))
    return keras.Model(inputs, keras.layers.Conv2D(3, 3, name="three")(x))


@pytest.mark.every_backend
@pytest.mark.parametrize("data_format", ["channels_last", "channels_first"])
def test_a_channel_of_a_block_of_pixels_goes_as_a_whole(data_format):
    model = moved_blocks(data_format)
    groups = {group.name: group.channels.size for group in find_channels(model).groups}
    assert groups == {"one": 6, "two": 5}
    inputs = np.random.default_rng(0).normal(size=(2, 4, 6, 2)).astype("float32")
    found, smaller = largest_difference(model, inputs)
    assert found <= 1e-5
    assert smaller.get_layer("one").filters == 3 and smaller.get_layer("two").filters == 12


def shared_with_a_nested_model():
    table = keras.layers.ReversibleEmbedding(9, 6, name="table")
    tokens = keras.Input((4,), dtype="int32")
    inner = keras.Model(tokens, keras.layers.Dense(6, name="dense")(table(tokens)), name="inner")
    outer = keras.Input((4,), dtype="int32")
    return keras.Model(outer, table(inner(outer), reverse=True))


@pytest.mark.parametrize("smaller_of", [lambda model: pk.shrink(model, channels=0.5), pk.simplify])
def test_a_nested_model_that_shares_a_layer_with_the_outer_one_loads_from_the_file(smaller_of, tmp_path):
    model = shared_with_a_nested_model()
    inputs = np.arange(8).reshape(2, 4)
    assert largest_difference(model, inputs)[0] <= 1e-5
    smaller, _ = smaller_of(model)
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.models.load_model(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(inputs)), arrays(loaded(inputs))) == 0


def two_lengths():
    entry = keras.Input((None, 3))
    x = keras.layers.Conv1D(8, 3, padding="same", activation="relu", name="convolution")(entry)
    encoder = keras.Model(entry, keras.layers.GlobalAveragePooling1D()(x), name="encoder")
    short, long = keras.Input((10, 3)), keras.Input((20, 3))
    both = keras.layers.Concatenate()([encoder(short), encoder(long)])
    return keras.Model([short, long], keras.layers.Dense(4)(both))


@pytest.mark.every_backend
def test_a_nested_model_that_is_called_twice_stays_one_model_for_inputs_of_any_length(tmp_path):
    model = two_lengths()
    inputs = [np.random.default_rng(n).normal(size=(2, n, 3)).astype("float32") for n in (10, 20)]
    found, smaller = largest_difference(model, inputs)
    assert found <= 1e-5
    assert [layer.name for layer in smaller.layers] == [layer.name for layer in model.layers]
    encoder = smaller.get_layer("encoder")
    assert encoder.input_shape == (None, None, 3) and encoder.get_layer("convolution").filters == 4
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.models.load_model(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(inputs)), arrays(loaded(inputs))) == 0


class Factor(keras.layers.Layer):
    """Multiplies by a number that is a tensor, and has an inner layer of the name of another one."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.dense = keras.layers.Dense(units, name="dense")

    def build(self, shape):
        self.dense.build(shape)

    def call(self, x):
        return self.dense(x) * keras.ops.convert_to_tensor(0.5)


def test_layers_that_replace_another_get_names_of_their_own(tmp_path):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(6, "relu", name="factor_dense")(inputs)
    x = Factor(6, name="factor")(x)
    shared = Factor(6, name="twice")
    model = keras.Model(inputs, keras.layers.Dense(3)(shared(shared(x))))
    found, smaller = largest_difference(model, np.random.default_rng(0).normal(size=(4, 5)).astype("float32"))
    names = [layer.name for layer in smaller.layers]
    assert (
        found <= 1e-5
        and len(set(names)) == len(names)
        and {"factor_dense", "factor_dense_1", "twice_dense"} <= set(names)
    )
    assert sum(isinstance(layer, keras.layers.Rescaling) for layer in smaller.layers) == 3
    smaller.save(tmp_path / "smaller.keras")
    assert keras.models.load_model(tmp_path / "smaller.keras").count_params() == smaller.count_params()


@keras.saving.register_keras_serializable("prunekit_tests")
class Block(keras.layers.Layer):
    """A residual block with a model inside it, and an operation outside of layers."""

    def __init__(self, units, **options):
        super().__init__(**options)
        self.units = units
        self.mlp = keras.Sequential([keras.layers.Dense(units, "relu"), keras.layers.Dense(units)], name="mlp")

    def build(self, shape):
        self.mlp.build(shape)

    def get_config(self):
        return {**super().get_config(), "units": self.units}

    def call(self, x):
        return self.mlp(x) + x


def test_models_and_operations_inside_opened_layers_get_names_that_are_not_taken(tmp_path):
    inputs = keras.Input((5,))
    x = keras.layers.Dense(6, name="stem")(inputs)
    y = keras.layers.Dense(6)(inputs) + x
    model = keras.Model(inputs, keras.layers.Dense(3)(Block(6, name="two")(Block(6, name="one")(y))))
    model.save(tmp_path / "model.keras")
    # The layers of a loaded model have the names in the file, which Keras may give to new operations, too.
    keras.backend.clear_session()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    found, smaller = largest_difference(loaded, np.random.default_rng(0).normal(size=(4, 5)).astype("float32"))
    names = [layer.name for layer in smaller.layers]
    assert found <= 1e-5 and len(set(names)) == len(names) and {"stem", "mlp", "two_mlp"} <= set(names)
    smaller.save(tmp_path / "smaller.keras")
    assert keras.models.load_model(tmp_path / "smaller.keras").count_params() == smaller.count_params()


def test_an_adapted_layer_of_a_model_that_shares_layers_keeps_what_it_has_learnt():
    shared = keras.layers.Dense(6, name="dense")
    normalization = keras.layers.Normalization(name="norm")
    normalization.adapt(np.random.default_rng(0).normal(5.0, 3.0, (50, 6)))
    entry = keras.Input((6,))
    inner = keras.Model(entry, normalization(shared(entry)), name="inner")
    inputs = keras.Input((6,))
    model = keras.Model(inputs, keras.layers.Dense(2, name="norm_2")(inner(keras.ops.relu(shared(inputs)))))
    x = np.random.default_rng(1).normal(size=(4, 6)).astype("float32")
    smaller, _ = pk.simplify(model)
    assert difference(arrays(model(x)), arrays(smaller(x))) <= 1e-6
    assert {"dense", "norm", "norm_2"} <= {layer.name for layer in smaller.layers}


class Sigmoid(keras.layers.MultiHeadAttention):
    def _masked_softmax(self, attention_scores, attention_mask=None):
        return keras.ops.sigmoid(attention_scores)


class Unmasked(keras.layers.MultiHeadAttention):
    def _compute_attention(self, query, key, value, *args, **options):
        scores = keras.ops.sigmoid(keras.ops.einsum(self._dot_product_equation, key, query))
        return keras.ops.einsum(self._combine_equation, scores, value), scores


@pytest.mark.parametrize("kind", [Sigmoid, Unmasked])
def test_attention_with_an_inside_of_its_own_is_followed_by_the_calls_inside_it(kind):
    inputs = keras.Input((5, 8))
    h = keras.layers.Dense(8, name="before")(inputs)
    model = keras.Model(inputs, keras.layers.Dense(3)(kind(2, 4, name="attention")(h, h)))
    data = np.random.default_rng(0).normal(size=(2, 5, 8)).astype("float32")
    assert largest_difference(model, data)[0] <= 1e-5


class Eager(keras.layers.MultiHeadAttention):
    def _compute_attention(self, query, key, value, *args, **options):
        raise RuntimeError("not on symbolic tensors")

    def compute_output_spec(self, query, *args, **options):
        return keras.KerasTensor(query.shape, dtype=query.dtype)


def test_attention_whose_inside_cannot_be_followed_keeps_its_channels_and_says_so():
    inputs = keras.Input((5, 8))
    h = keras.layers.Dense(8, name="before")(inputs)
    channels = find_channels(keras.Model(inputs, keras.layers.Dense(3)(Eager(2, 4, name="attention")(h, h))))
    stop = next(stop for stop in channels.stops if stop.name == "attention")
    assert not channels.groups and "Eager is not known" in stop.reason


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
    with pytest.raises(ValueError, match=r"'raw' has no .*build it as keras.Model\(inputs, outputs\)"):
        find_channels(model)


@keras.saving.register_keras_serializable("prunekit_tests")
class Twice(Block):
    """Calls one layer without weights twice."""

    def __init__(self, units, **options):
        super().__init__(units, **options)
        self.first, self.second = keras.layers.Dense(2 * units), keras.layers.Dense(units)
        self.relu = keras.layers.ReLU()

    def build(self, shape):
        self.first.build(shape)
        self.second.build((*shape[:-1], 2 * self.units))

    def call(self, x):
        return self.relu(self.second(self.relu(self.first(x))))


def test_a_layer_that_is_called_twice_in_a_chain_is_in_the_file_twice(tmp_path):
    model = keras.Sequential([keras.Input((5,)), Twice(6, name="block"), keras.layers.Dense(3)])
    x = np.random.default_rng(0).normal(size=(4, 5)).astype("float32")
    found, smaller = largest_difference(model, x)
    assert found <= 1e-5
    smaller.save(tmp_path / "smaller.keras")
    loaded = keras.models.load_model(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(x)), arrays(loaded(x))) == 0


def test_a_model_of_several_inputs_that_shares_a_layer_loads_from_the_file(tmp_path):
    dense = keras.layers.Dense(4)
    first, second = keras.Input((4,)), keras.Input((4,))
    inner = keras.Model([first, second], keras.layers.Add()([dense(first), dense(second)]), name="inner")
    one, other = keras.Input((4,)), keras.Input((4,))
    model = keras.Model([one, other], keras.layers.Dense(2)(dense(inner([one, other]))))
    data = [np.random.default_rng(n).normal(size=(3, 4)).astype("float32") for n in range(2)]
    smaller, _ = pk.simplify(model)
    assert difference(arrays(model(data)), arrays(smaller(data))) <= 1e-6
    smaller.save(tmp_path / "smaller.keras")
    assert difference(arrays(smaller(data)), arrays(keras.models.load_model(tmp_path / "smaller.keras")(data))) == 0


def test_a_nested_model_that_gets_an_axis_less_is_made_again():
    inner = keras.Sequential([keras.Input((4, 4, 1)), keras.layers.Flatten(), keras.layers.Dense(6)])
    inputs = keras.Input((4, 4))
    model = keras.Model(inputs, keras.layers.Dense(3)(inner(inputs)))
    x = np.random.default_rng(0).normal(size=(2, 4, 4)).astype("float32")
    smaller, _ = pk.simplify(model)
    assert difference(arrays(model(x)), arrays(smaller(x))) <= 1e-6


def test_a_mask_that_ends_at_a_product_ends_there_in_the_simpler_model():
    tokens = keras.Input((5,), dtype="int32")
    x = keras.layers.Embedding(9, 8, mask_zero=True)(tokens) * keras.ops.convert_to_tensor(0.5)
    model = keras.Model(tokens, keras.layers.Dense(2)(keras.layers.GlobalAveragePooling1D()(x)))
    ids = np.array([[1, 2, 0, 0, 0]])
    assert difference(arrays(model(ids)), arrays(pk.simplify(model)[0](ids))) <= 1e-6


def test_two_layers_that_hold_one_weight_both_get_its_value():
    block = Block(5, name="block")
    inputs = keras.Input((5,))
    x = block(inputs)
    model = keras.Model(inputs, keras.layers.Dense(2)(block.mlp.layers[1](x)))
    data = np.random.default_rng(0).normal(size=(3, 5)).astype("float32")
    assert difference(arrays(model(data)), arrays(pk.simplify(model)[0](data))) <= 1e-6


def test_a_nested_model_that_gets_its_inputs_by_keyword_is_opened_too(tmp_path):
    dense = keras.layers.Dense(4)
    entry = keras.Input((4,))
    inner = keras.Model(entry, keras.layers.Add(name="sum")([entry, dense(entry)]), name="inner")
    inputs = keras.Input((4,))
    model = keras.Model(inputs, keras.layers.Dense(2)(dense(inner(inputs=inputs))))
    x = np.random.default_rng(0).normal(size=(3, 4)).astype("float32")
    smaller, _ = pk.simplify(model)
    smaller.save(tmp_path / "smaller.keras")
    assert difference(arrays(model(x)), arrays(keras.models.load_model(tmp_path / "smaller.keras")(x))) <= 1e-6
    assert "sum" in pk.remove_blocks(model, 1, x)[1].removed
