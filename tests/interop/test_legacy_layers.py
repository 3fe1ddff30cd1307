"""Layers of tf_keras, alone and in graphs, carried to Keras 3 with equal outputs."""

import itertools

import keras
import legacy_models as old
import numpy as np
import pytest
from legacy_models import L, keras2, saved, their_noise

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.interop.tfmot import read_model

SEQUENCE, IMAGE, VOLUME, VECTOR = (6, 5), (8, 8, 4), (6, 6, 6, 2), (7,)
ONE_LAYER = {
    "Dense": (
        lambda: L.Dense(5, "gelu", kernel_regularizer="l2", kernel_constraint=keras2.constraints.MaxNorm(3)),
        VECTOR,
    ),
    "Conv1D": (lambda: L.Conv1D(6, 3, padding="causal", dilation_rate=2), SEQUENCE),
    "Conv2D, groups": (lambda: L.Conv2D(6, 3, strides=2, padding="same", groups=2, activation="swish"), IMAGE),
    "Conv3D": (lambda: L.Conv3D(3, 2), VOLUME),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(3, 3, strides=2), SEQUENCE),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(3, 3, strides=2, padding="same"), IMAGE),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(3), SEQUENCE),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(3, depth_multiplier=2, use_bias=False), IMAGE),
    "SeparableConv1D": (lambda: L.SeparableConv1D(5, 3), SEQUENCE),
    "SeparableConv2D": (lambda: L.SeparableConv2D(5, 3, depth_multiplier=2, strides=2), IMAGE),
    "BatchNormalization": (lambda: L.BatchNormalization(epsilon=0.02), IMAGE),
    "BatchNormalization, frozen, no scale": (lambda: L.BatchNormalization(scale=False, trainable=False), VECTOR),
    "LayerNormalization": (lambda: L.LayerNormalization(axis=[1, 2]), SEQUENCE),
    "GroupNormalization": (lambda: L.GroupNormalization(2), IMAGE),
    "Normalization": (lambda: L.Normalization(axis=-1), VECTOR),
    "Normalization, given": (lambda: L.Normalization(axis=None, mean=0.5, variance=2.0), SEQUENCE),
    "UnitNormalization": (lambda: L.UnitNormalization(), VECTOR),
    "LSTM": (lambda: L.LSTM(4, return_sequences=True, implementation=1), SEQUENCE),
    "LSTM, backwards": (lambda: L.LSTM(4, go_backwards=True, unit_forget_bias=False), SEQUENCE),
    "GRU, reset after": (lambda: L.GRU(4), SEQUENCE),
    "GRU, reset before": (lambda: L.GRU(4, reset_after=False), SEQUENCE),
    "SimpleRNN": (lambda: L.SimpleRNN(4, "relu"), SEQUENCE),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(3, 2, recurrent_activation="sigmoid"), (4, 6, 2)),
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(4, return_sequences=True), merge_mode="sum"), SEQUENCE),
    "Bidirectional of two": (
        lambda: L.Bidirectional(L.GRU(4), backward_layer=L.SimpleRNN(4, go_backwards=True)),
        SEQUENCE,
    ),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(3)), SEQUENCE),
    "PReLU": (lambda: L.PReLU(shared_axes=[1, 2], alpha_initializer="ones"), IMAGE),
    "LeakyReLU": (lambda: L.LeakyReLU(alpha=0.25), VECTOR),
    "ELU": (lambda: L.ELU(0.7), VECTOR),
    "ReLU": (lambda: L.ReLU(6.0, negative_slope=0.1, threshold=0.2), VECTOR),
    "Softmax": (lambda: L.Softmax(axis=1), SEQUENCE),
    "Activation": (lambda: L.Activation("selu"), VECTOR),
    "MaxPooling2D": (lambda: L.MaxPooling2D(3, strides=2, padding="same"), IMAGE),
    "AveragePooling3D": (lambda: L.AveragePooling3D(2), VOLUME),
    "GlobalAveragePooling2D": (lambda: L.GlobalAveragePooling2D(keepdims=True), IMAGE),
    "ZeroPadding2D": (lambda: L.ZeroPadding2D(((1, 2), (0, 3))), IMAGE),
    "Cropping1D": (lambda: L.Cropping1D(1), SEQUENCE),
    "UpSampling2D": (lambda: L.UpSampling2D(2, interpolation="bilinear"), IMAGE),
    "Reshape": (lambda: L.Reshape((-1, 2)), IMAGE),
    "Permute": (lambda: L.Permute((2, 1)), SEQUENCE),
    "RepeatVector": (lambda: L.RepeatVector(3), VECTOR),
    "Rescaling": (lambda: L.Rescaling(2.0, offset=1.0), IMAGE),
    "Dropout": (lambda: L.Dropout(0.5, seed=3), VECTOR),
    "SpatialDropout1D": (lambda: L.SpatialDropout1D(0.5), SEQUENCE),
    "GaussianNoise": (lambda: L.GaussianNoise(0.5), VECTOR),
}


def randomised(model):
    """The model with weights of which none is what layers start with; variances stay positive."""
    generator = np.random.default_rng(7)
    for variable in model.weights:
        variable.assign(generator.uniform(0.1, 0.9, variable.shape).astype(variable.dtype.name))
    for layer in model.layers:
        layer.finalize_state()
    return model


def assert_alike(model, new, inputs, tolerance=1e-5):
    theirs, ours = model(inputs, training=False), new(inputs, training=False)
    for one, other in zip(keras.tree.flatten(theirs), keras.tree.flatten(ours), strict=True):
        np.testing.assert_allclose(one, keras.ops.convert_to_numpy(other), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", ONE_LAYER)
def test_a_layer_of_each_type_computes_the_same(name):
    make, shape = ONE_LAYER[name]
    model = randomised(keras2.Sequential([keras2.Input(shape), make()]))
    (old_layer,) = model.layers
    converted = read_model(model)
    (layer,) = converted.model.layers
    assert (type(layer).__name__, layer.name, layer.trainable) == (
        type(old_layer).__name__,
        old_layer.name,
        old_layer.trainable,
    )
    assert [v.numpy().tolist() for v in model.trainable_variables] == [
        keras.ops.convert_to_numpy(v).tolist() for v in converted.model.trainable_variables
    ]
    assert_alike(model, converted.model, np.random.default_rng(0).normal(size=(2, *shape)).astype("float32"))
    assert converted.not_carried == () and converted.masks == {} and converted.step is None


def test_a_layer_of_each_type_computes_the_same_from_a_file(tmp_path):
    """Side by side in one model, but for recurrent ones that the graphs below hold."""
    below = ("LSTM", "GRU, reset after", "SimpleRNN")
    chosen = [ONE_LAYER[name] for name in ONE_LAYER if name not in below]
    inputs = {shape: keras2.Input(shape) for _, shape in chosen}
    layers = [(make(), shape) for make, shape in chosen]
    model = randomised(
        keras2.Model(list(inputs.values()), [layer(inputs[shape]) for layer, shape in layers], name="all")
    )
    converted = read_model(saved(model, tmp_path, "all.keras"))
    for old_layer, _ in layers:
        layer = converted.model.get_layer(old_layer.name)
        assert (type(layer).__name__, layer.trainable) == (type(old_layer).__name__, old_layer.trainable)
        assert [v.numpy().tolist() for v in old_layer.trainable_variables] == [
            keras.ops.convert_to_numpy(v).tolist() for v in layer.trainable_variables
        ]
    generator = np.random.default_rng(0)
    values = [generator.normal(size=(2, *shape)).astype("float32") for shape in inputs]
    assert_alike(model, converted.model, values)
    assert converted.not_carried == () and converted.masks == {} and converted.step is None


def transformer():
    tokens = keras2.Input((9,), name="tokens")
    x = L.Embedding(20, 8, name="embedding")(tokens)
    y = L.MultiHeadAttention(2, 4, value_dim=3, name="attention")(x, x, attention_mask=None)
    x = L.LayerNormalization(name="norm")(L.Add(name="add")([x, y]))
    z, scores = L.MultiHeadAttention(2, 4, name="scored")(x, value=x, return_attention_scores=True)
    x = L.Concatenate(name="both")([x, z])
    x = L.Attention(use_scale=True, name="plain")([x, x])
    return keras2.Model(tokens, {"out": L.GlobalAveragePooling1D(name="mean")(x), "scores": scores}, name="transformer")


def shared_and_nested(beyond=False):
    block = keras2.Sequential(
        [keras2.Input((5,)), L.Dense(4, "relu", name="in"), L.BatchNormalization(name="bn"), L.Dense(5, name="out")],
        name="block",
    )
    inside = keras2.Input((5,), name="inside")
    wide = keras2.Model(inside, [L.Dense(3, name="a")(block(inside)), L.Dense(2, name="b")(inside)], name="wide")
    left, right = keras2.Input((5,), name="left"), keras2.Input((5,), name="right")
    twice = L.Dense(5, name="twice")
    x = L.Multiply(name="product")([twice(block(left) if beyond else left), twice(right)])
    first, _ = wide(left)
    a, b = wide(x)
    return keras2.Model({"l": left, "r": right}, [L.Concatenate(name="cat")([a, b]), first], name="both")


def sequence_to_sequence():
    source, target = keras2.Input((None, 3), name="source"), keras2.Input((4, 3), name="target")
    _, h, c = L.LSTM(5, return_state=True, name="encoder")(source)
    x = L.LSTM(5, return_sequences=True, name="decoder")(target, initial_state=[h, c])
    return keras2.Model([source, target], L.Dense(2, name="out")(x), name="translator")


def masked_stack():
    return keras2.Sequential(
        [
            keras2.Input((6, 3)),
            L.Masking(0.0, name="mask"),
            L.GRU(4, return_sequences=True, name="gru"),
            L.Dropout(0.3),
            L.SimpleRNN(3, name="rnn"),
        ],
        name="stack",
    )


GRAPHS = {
    "transformer": (transformer, [np.arange(18).reshape(2, 9) % 7]),
    "shared and nested": (shared_and_nested, None),
    "sequence to sequence": (sequence_to_sequence, [np.ones((2, 7, 3), "float32"), np.ones((2, 4, 3), "float32")]),
    "masked stack": (masked_stack, [np.ones((2, 6, 3), "float32") * (np.arange(6) < 4)[None, :, None]]),
}


# SavedModels of recurrent layers take tf_keras ten seconds each.
@pytest.mark.parametrize(
    ("name", "file"),
    [*itertools.product(("transformer", "shared and nested"), old.FORMATS)]
    + [("sequence to sequence", "keras"), ("masked stack", "h5")],
)
@pytest.mark.short(cases=4)
def test_a_graph_in_each_kind_of_file_computes_the_same(name, file, tmp_path):
    make, inputs = GRAPHS[name]
    with their_noise():
        model = randomised(make())
    converted = read_model(saved(model, tmp_path, old.FORMATS[file]))
    if inputs is None:
        one = np.random.default_rng(1).normal(size=(2, 3, 5)).astype("float32")
        inputs = {"l": one[0], "r": one[1]}
    elif len(inputs) == 1:
        (inputs,) = inputs
    assert_alike(model, converted.model, inputs)
    assert converted.model.name == model.name
    assert converted.model.count_params() == model.count_params()


def test_shared_layers_stay_one_layer_and_names_are_those_of_the_old_model():
    # tf_keras saves a layer that is shared between a model and one inside it, and cannot load that file.
    model = randomised(shared_and_nested(beyond=True))
    new = read_model(model).model
    names = [weight.name for weight in weights_in(new)]
    assert len(names) == len(set(names)) == len(new.weights) == len(model.weights)
    assert {"block/in/kernel", "twice/bias", "wide/a/kernel"} <= set(names)
    assert new.get_layer("wide").get_layer("block") is new.get_layer("block")


def test_the_precision_of_each_layer_is_carried():
    policy = keras2.mixed_precision.Policy("mixed_float16")
    layers = [keras2.Input((6,)), L.Dense(5, dtype=policy, name="half"), L.Dense(3, dtype="float64", name="double")]
    new = read_model(keras2.Sequential(layers)).model
    assert [layer.dtype_policy.name for layer in new.layers] == ["mixed_float16", "float64"]
    assert keras.config.dtype_policy().name == "float32" and keras2.mixed_precision.global_policy().name == "float32"


def test_integers_and_open_shapes_are_drawn_so_that_the_model_can_be_called():
    image, labels = keras2.Input((None, None, 3), name="image"), keras2.Input((), dtype="int32", name="label")
    x = L.GlobalMaxPooling2D(name="max")(L.Conv2D(4, 3, name="conv")(image))
    model = keras2.Model([image, labels], L.Add(name="add")([x, L.Embedding(3, 4, name="embedding")(labels)]))
    assert read_model(model).difference < 1e-6


# ---------------------------------------------------------------- what is refused


class OwnDense(L.Dense):
    pass


class Subclassed(keras2.Model):
    def __init__(self):
        super().__init__(name="subclassed")
        self.dense = L.Dense(2)

    def call(self, inputs):
        return self.dense(inputs)


def sequential(*layers):
    return lambda: keras2.Sequential([keras2.Input((4,)), *layers], name="old")


def operations():
    inputs = keras2.Input((4,))
    return keras2.Model(inputs, L.Dense(2, name="out")(inputs * 2.0 + 1.0)[:, :1])


REFUSED = {
    "Lambda": (sequential(L.Lambda(lambda x: x + 1, name="plus")), r"'plus' \(Lambda: Python code"),
    "own class": (sequential(OwnDense(3, name="own")), r"'own' \(OwnDense: not a class of Keras"),
    "own activation": (sequential(L.Dense(3, activation=lambda x: x, name="odd")), r"'odd'|__lambda__|<lambda>"),
    "hard sigmoid": (sequential(L.Dense(3, "hard_sigmoid", name="hard")), "'hard' .*another function under that name"),
    "operations": (operations, r"TFOpLambda: .*SlicingOpLambda|SlicingOpLambda: .*TFOpLambda"),
    "a layer without an equal": (sequential(L.ThresholdedReLU(name="cut")), r"'cut' \(ThresholdedReLU"),
}


@pytest.mark.parametrize("file", ["live", "h5", "keras", "savedmodel"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_carried_is_named_with_the_reason_in_one_line(name, file, tmp_path):
    make, words = REFUSED[name]
    model = make()
    source = model if file == "live" else saved(model, tmp_path, old.FORMATS[file])
    if file == "live":
        words = rf"{words.split(' .*')[0]}|OwnDense|activation|OpLambda"
    with pytest.raises(ValueError, match=words) as error, their_noise():
        read_model(source)
    assert "\n" not in str(error.value) and len(str(error.value)) < 600


@pytest.mark.parametrize("file", ["keras", "savedmodel"])
def test_a_subclassed_model_is_refused(file, tmp_path):
    model = Subclassed()
    model(np.ones((1, 3), "float32"))
    with pytest.raises(ValueError, match="a subclassed model, whose code is in no file"):
        read_model(saved(model, tmp_path, old.FORMATS[file]))
    with pytest.raises(ValueError, match="a subclassed model, whose code is in no file"):
        read_model(model)


@pytest.mark.parametrize(
    ("layer", "words"),
    [
        (lambda: L.LSTM(3, time_major=True, name="lstm"), r"'lstm' \(LSTM: Keras 3 has no time_major=True\)"),
        (lambda: L.BatchNormalization(axis=[1, 2], name="bn"), r"'bn' \(BatchNormalization over several axes"),
        (lambda: L.BatchNormalization(virtual_batch_size=2, name="bn"), "'bn' .*virtual_batch_size=2"),
        (lambda: L.TimeDistributed(keras2.Sequential([L.Dense(2)]), name="each"), "'each' .*around a whole model"),
    ],
)
def test_a_setting_that_keras_3_does_not_have_is_named(layer, words):
    try:
        model = keras2.Sequential([keras2.Input((4, 5), batch_size=4), layer()])
    except (TypeError, ValueError):
        pytest.skip("this tf_keras does not have it either")
    with pytest.raises(ValueError, match=words):
        read_model(model)


def test_a_sequential_without_the_shape_of_its_inputs_is_refused():
    with pytest.raises(ValueError, match="whose input shape is not known"):
        read_model(keras2.Sequential([L.Dense(3)], name="open"))


def called_in_a_mode(layer, training):
    inputs = keras2.Input((4,), name="inputs")
    return keras2.Model(inputs, L.Dense(2, name="out")(layer(inputs, training=training)), name="moded")


def _normalising(**options):
    return keras2.Sequential([keras2.Input((4,)), L.BatchNormalization(name="bn"), L.Dense(3)], name="block", **options)


@pytest.mark.parametrize(
    ("layer", "name"),
    [
        (lambda: L.BatchNormalization(name="bn"), "bn"),
        (_normalising, "block"),
        (lambda: L.Dropout(0.5, name="drop"), "drop"),
        (lambda: L.GaussianNoise(0.5, name="noise"), "noise"),
    ],
)
def test_a_layer_that_is_called_as_outside_training_is_named_because_keras_3_trains_it(layer, name):
    """Keras 3 hands `training` of the model to all its layers, whatever the graph says."""
    (line,) = read_model(called_in_a_mode(layer(), training=False)).not_carried
    assert line.startswith(f"the call of {name!r} with training=False")


def test_a_mode_that_changes_nothing_is_not_named():
    frozen = _normalising()
    frozen.trainable = False
    for layer in (frozen, L.Dropout(0.0), keras2.Sequential([keras2.Input((4,)), L.Dense(3)])):
        assert read_model(called_in_a_mode(layer, training=False)).not_carried == ()


def test_a_layer_that_is_always_in_training_is_refused_by_name():
    with pytest.raises(ValueError, match=r"'drop' \(called with training=True: Keras 3"):
        read_model(called_in_a_mode(L.Dropout(0.5, name="drop"), training=True))


def test_nothing_is_trained_in_a_frozen_model_whose_layers_say_otherwise():
    inner = keras2.Sequential([keras2.Input((4,)), L.Dense(3, name="in")], name="inner")
    inner.trainable = False
    inner.layers[0].trainable = True
    inputs = keras2.Input((4,), name="inputs")
    model = keras2.Model(inputs, L.Dense(2, name="out")(inner(inputs)), name="half")
    trained = [weight.path for weight in read_model(model).model.trainable_variables]
    assert len(model.trainable_variables) == len(trained) == 2 and all("out" in path for path in trained)


@pytest.mark.parametrize("name", ["relu", "tanh", "sigmoid", "log_softmax", "silu"])
def test_a_function_of_tensorflow_that_tf_keras_has_too_is_carried(name):
    tensorflow = pytest.importorskip("tensorflow")
    layers = [L.Dense(3, activation=name), L.Dense(3, activation=getattr(tensorflow.nn, name))]
    assert read_model(keras2.Sequential([keras2.Input((4,)), *layers])).difference < 1e-5


@pytest.mark.parametrize("source", [None, 3, keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])])
def test_what_is_no_model_of_tf_keras_is_refused(source):
    with pytest.raises(TypeError, match="needs a path or a model of tf_keras. Received: an object of"):
        read_model(source)


def test_a_model_that_random_inputs_do_not_fit_is_refused_in_one_line():
    """40 open steps of a pooling that the drawn 32 are too few for."""
    inputs = keras2.Input((None, 3))
    x = L.Conv1D(2, 40)(inputs)
    with pytest.raises(ValueError, match="cannot be compared: called on random inputs of shape") as error:
        read_model(keras2.Model(inputs, x))
    assert "\n" not in str(error.value)


def test_a_difference_over_the_tolerance_is_refused_and_a_higher_one_takes_it(monkeypatch):
    monkeypatch.setitem(keras.layers.__dict__, "Dense", type("Dense", (keras.layers.Dense,), {"call": _wrong_call}))
    model = randomised(keras2.Sequential([keras2.Input((4,)), L.Dense(3, name="d")], name="old"))
    with pytest.raises(ValueError, match=r"'old' gives other outputs in Keras 3: .* Expected at most 0.0001"):
        read_model(model)
    assert 0.001 < read_model(model, tolerance=1.0).difference < 1


def _wrong_call(self, inputs, training=None):
    return 1.01 * (inputs @ self.kernel + self.bias)
