"""Simplified models compute the same outputs with fewer layers."""

import math

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L, ops
from networks import outputs
from simplified_models import check_equal, names
from without_prunekit import outputs_of_file

import prunekit as pk
from prunekit.techniques.shrink.graph.folding import FOLDED
from prunekit.techniques.shrink.layers.identities import DROPPED


@pytest.mark.short(cases=20)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_architecture_computes_the_same(name):
    model = ARCHITECTURES[name]()
    simplified, report = check_equal(model)
    assert report.layers[1] <= report.layers[0]
    if hasattr(model, "inputs"):
        keras.tree.assert_same_structure(model.input, simplified.input)
        keras.tree.assert_same_structure(model.output, simplified.output)
    again, second = pk.simplify(simplified)
    assert not second.rewrites


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "size", "folded"), [("ResNet50", 32, 53), ("MobileNetV2", 32, 52), ("EfficientNetB0", 32, 49)]
)
def test_models_of_keras_applications_lose_every_batch_normalization(name, size, folded):
    model = getattr(keras.applications, name)(weights=None, input_shape=(size, size, 3), classes=7)
    simplified, report = check_equal(model)
    assert report.counts()[FOLDED] == folded
    assert not report.skipped
    assert not any(isinstance(layer, L.BatchNormalization) for layer in simplified.layers)


@pytest.mark.thorough
def test_densenet_keeps_the_batch_normalizations_before_activations():
    model = keras.applications.DenseNet121(weights=None, input_shape=(32, 32, 3), classes=7)
    _, report = check_equal(model, 3e-5)
    assert report.counts()[FOLDED] == 59
    assert len(report.skipped) == 62


# ---- identities ------------------------------------------------------------------------------------------------------

IMAGE = (8, 7, 6)
IDENTITIES = {
    "Identity": L.Identity,
    "Dropout": lambda: L.Dropout(0.3),
    "SpatialDropout2D": lambda: L.SpatialDropout2D(0.3),
    "AlphaDropout": lambda: L.AlphaDropout(0.3),
    "GaussianDropout": lambda: L.GaussianDropout(0.3),
    "GaussianNoise": lambda: L.GaussianNoise(0.3),
    "ActivityRegularization": lambda: L.ActivityRegularization(0.1),
    "linear Activation": lambda: L.Activation("linear"),
    "Reshape": lambda: L.Reshape((8, -1, 6)),
    "Permute": lambda: L.Permute((1, 2, 3)),
    "ZeroPadding2D": lambda: L.ZeroPadding2D(0),
    "Cropping2D": lambda: L.Cropping2D(0),
    "UpSampling2D": lambda: L.UpSampling2D(1),
    "MaxPooling2D": lambda: L.MaxPooling2D(1),
    "Rescaling": lambda: L.Rescaling(1.0),
    "ReLU of ReLU": L.ReLU,
    "relu of ReLU": lambda: L.Activation("relu"),
    "ops.relu of ReLU": lambda: ops.relu,
    "ops.reshape": lambda: lambda x: ops.reshape(x, (-1, *IMAGE)),
    "ops.transpose": lambda: lambda x: ops.transpose(x, (0, 1, 2, 3)),
}


@pytest.mark.parametrize("kind", IDENTITIES)
def test_layers_that_change_nothing_are_dropped(kind):
    model = stack(IMAGE, L.Conv2D(6, 1), L.ReLU(), IDENTITIES[kind](), L.Conv2D(3, 2))
    simplified, report = check_equal(model)
    assert report.counts() == {DROPPED: 1}
    assert report.layers == (4, 3)


CHANGING = {
    "Reshape": lambda: L.Reshape((7, 8, 6)),
    "Permute": lambda: L.Permute((2, 1, 3)),
    "ZeroPadding2D": lambda: L.ZeroPadding2D(((0, 1), (0, 0))),
    "Rescaling": lambda: L.Rescaling(1.0, 0.5),
    "tanh": lambda: L.Activation("tanh"),
    "negative ReLU": lambda: L.ReLU(max_value=0.5),
    "MaxPooling2D": lambda: L.MaxPooling2D(2, strides=1, padding="same"),
}


@pytest.mark.parametrize("kind", CHANGING)
def test_layers_that_change_something_stay(kind):
    model = stack(IMAGE, L.Conv2D(6, 1), L.ReLU(), CHANGING[kind](), L.Conv2D(3, 2))
    assert not check_equal(model)[1].rewrites


@pytest.mark.parametrize("kind", [L.Add, L.Multiply, L.Maximum, L.Average, L.Concatenate])
def test_a_merge_of_a_single_tensor_is_dropped(kind):
    inputs = keras.Input((7,))
    try:
        merged = kind()([L.Dense(5)(inputs)])
    except ValueError:
        pytest.skip("Keras refuses a single tensor")
    assert check_equal(keras.Model(inputs, L.Dense(3)(merged)))[1].counts() == {DROPPED: 1}


def test_a_merge_of_one_tensor_with_itself_stays():
    inputs = keras.Input((7,))
    x = L.Dense(5)(inputs)
    assert not check_equal(keras.Model(inputs, L.Dense(3)(L.Add()([x, x]))))[1].rewrites


def test_dropout_that_always_acts_stays():
    inputs = keras.Input((7,))
    x = L.Dropout(0.5)(L.Dense(5)(inputs), training=True)
    report = pk.simplify(keras.Model(inputs, L.Dense(3)(x)))[1]
    assert not report.rewrites
    assert "training=True" in report.skipped[0].reason


@pytest.mark.filterwarnings("ignore:Layer 'reshape:UserWarning")
def test_a_layer_that_ends_a_mask_stays():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 4, mask_zero=True)(inputs)
    x = L.Reshape((6, 4))(x)
    report = check_equal(keras.Model(inputs, L.GlobalAveragePooling1D()(x)))[1]
    assert not report.rewrites
    assert "mask" in report.skipped[0].reason


def test_masks_pass_through_dropped_layers():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Dropout(0.1)(L.Embedding(20, 4, mask_zero=True)(inputs))
    assert check_equal(keras.Model(inputs, L.LSTM(5)(x)))[1].counts() == {DROPPED: 1}


def test_a_model_that_would_return_its_input_keeps_a_layer():
    report = check_equal(stack((7,), L.Dropout(0.1)))[1]
    assert not report.rewrites
    assert "input" in report.skipped[0].reason


@keras.saving.register_keras_serializable(package="test_simplify")
class Doubled(L.Dropout):
    def call(self, inputs, training=False):
        return 2 * inputs


def test_a_subclass_with_a_call_of_its_own_is_no_identity():
    assert not check_equal(stack((7,), L.Dense(5), Doubled(0.1), L.Dense(2)))[1].rewrites


# ---- dead branches ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [lambda *xs: L.Add()(list(xs)), ops.add], ids=["Add", "ops.add"])
def test_a_branch_of_zeros_disappears_from_a_sum(add):
    inputs = keras.Input((8, 7, 3))
    x = L.Conv2D(6, 3, padding="same", name="stem")(inputs)
    y = L.Conv2D(6, 3, padding="same", activation="relu", name="first")(x)
    y = L.ReLU()(L.Conv2D(6, 3, padding="same", name="dead")(y))
    model = randomize(keras.Model(inputs, L.Conv2D(4, 2, name="head")(add(x, y))))
    for weight in model.get_layer("dead").weights:
        weight.assign(np.zeros(weight.shape))
    simplified, report = pk.simplify(model)
    assert names(simplified) == ["stem", "head"]
    assert set(report.rewrites[0].layers) > {"first", "dead"}
    images = inputs_of(model)
    np.testing.assert_allclose(outputs(simplified, images)[0], outputs(model, images)[0], atol=1e-6)


def test_a_residual_block_whose_last_normalization_is_zero_disappears():
    model = randomize(ARCHITECTURES["resnet20"]())
    for name in ("gamma", "beta"):
        getattr(model.get_layer("stage0_block1_second_bn"), name).assign(np.zeros(8))
    norm = model.get_layer("stage0_block1_second_bn")
    norm.moving_mean.assign(np.zeros(8))
    simplified, report = pk.simplify(model)
    assert "stage0_block1_first" not in names(simplified)
    images = inputs_of(model)
    np.testing.assert_allclose(outputs(simplified, images)[0], outputs(model, images)[0], atol=1e-5)


def test_a_sum_of_three_keeps_the_other_two():
    inputs = keras.Input((7,))
    branches = [L.Dense(5, name=name)(inputs) for name in ("one", "dead", "two")]
    model = randomize(keras.Model(inputs, L.Dense(3, name="head")(L.Add(name="sum")(branches))))
    for weight in model.get_layer("dead").weights:
        weight.assign(np.zeros(weight.shape))
    simplified, _ = pk.simplify(model)
    assert names(simplified) == ["one", "two", "sum", "head"]
    found = inputs_of(model)
    np.testing.assert_allclose(outputs(simplified, found)[0], outputs(model, found)[0], atol=1e-6)


@pytest.mark.parametrize("activation", ["sigmoid", "softplus"])
def test_a_branch_whose_activation_makes_ones_of_zeros_stays(activation):
    inputs = keras.Input((7,))
    y = L.Dense(5, activation=activation, name="dead")(inputs)
    model = keras.Model(inputs, L.Dense(3)(L.Add()([L.Dense(5)(inputs), y])))
    for weight in model.get_layer("dead").weights:
        weight.assign(np.zeros(weight.shape))
    assert not pk.simplify(model)[1].rewrites


# ---- duplicates ------------------------------------------------------------------------------------------------------


def test_equal_operations_on_one_tensor_are_merged():
    inputs = keras.Input((8, 7, 3))
    left, right = (L.Conv2D(5, 1, name=name)(L.MaxPooling2D()(inputs)) for name in ("left", "right"))
    third = L.Conv2D(5, 1, name="third")(ops.tanh(L.AveragePooling2D(2)(inputs)))
    model = keras.Model(inputs, L.Add()([left, right, third]))
    report = check_equal(model)[1]
    assert [(one.kind, len(one.layers)) for one in report.rewrites] == [("duplicate merged", 1)]
    assert report.layers == (8, 7)


def test_layers_with_equal_weights_are_merged_and_others_are_not():
    inputs = keras.Input((7,))
    layers = [L.Dense(5, activation="relu", name=name) for name in ("one", "same", "other")]
    model = randomize(keras.Model(inputs, L.Concatenate()([layer(inputs) for layer in layers])))
    layers[1].set_weights(layers[0].get_weights())
    simplified, report = pk.simplify(model)
    assert [(one.layers, one.what) for one in report.rewrites] == [(("same",), "with one")]
    found = inputs_of(model)
    np.testing.assert_array_equal(outputs(simplified, found)[0], outputs(model, found)[0])
    assert report.parameters == (120, 80)


def test_sums_with_different_constants_are_not_merged():
    inputs = keras.Input((3,))
    tensors = [inputs + np.float32([1, 2, 3]), inputs + np.float32([1, 2, 3]), inputs + np.float32([1, 2, 4])]
    report = check_equal(keras.Model(inputs, L.Concatenate()(tensors)))[1]
    assert report.counts() == {"duplicate merged": 1}


def test_two_equal_outputs_both_stay():
    inputs = keras.Input((7,))
    model = keras.Model(inputs, [L.ReLU(name="one")(inputs), L.ReLU(name="two")(inputs)])
    simplified, report = check_equal(model)
    assert not report.rewrites
    assert report.skipped[0].name in ("one", "two")
    assert simplified.output_names == model.output_names


def test_random_layers_are_not_merged():
    inputs = keras.Input((8, 7, 3))
    flipped = [L.RandomFlip("horizontal", seed=0)(inputs) for _ in range(2)]
    assert not pk.simplify(keras.Model(inputs, L.Add()(flipped)))[1].rewrites


# ---- models ----------------------------------------------------------------------------------------------------------


def test_a_nested_sequential_is_simplified_inside_and_stays_sequential():
    inner = keras.Sequential([keras.Input((9,)), L.Dense(8), L.BatchNormalization(), L.ReLU()], name="inner")
    model = randomize(keras.Sequential([keras.Input((7,)), L.Dense(9), L.Dropout(0.1), inner, L.Dense(3)]))
    simplified, report = pk.simplify(model)
    found = np.random.default_rng(0).normal(size=(4, 7)).astype("float32")
    np.testing.assert_allclose(outputs(simplified, found)[0], outputs(model, found)[0], atol=1e-5)
    assert report.counts() == {FOLDED: 1, DROPPED: 1}
    assert isinstance(simplified, keras.Sequential) and isinstance(simplified.get_layer("inner"), keras.Sequential)
    assert len(simplified.get_layer("inner").layers) == 2


def test_a_nested_model_that_is_called_twice_is_simplified_once():
    tower = stack((7,), L.Dense(8), L.BatchNormalization(), L.ReLU())
    one, two = keras.Input((7,)), keras.Input((7,))
    model = keras.Model([one, two], L.Dot(-1)([tower(one), tower(two)]))
    simplified, report = check_equal(model)
    assert report.counts() == {FOLDED: 1}


def test_frozen_layers_stay_frozen():
    model = stack((7,), L.Dense(6, name="frozen"), L.BatchNormalization(), L.ReLU(), L.Dense(3, name="head"))
    model.get_layer("frozen").trainable = False
    simplified, _ = pk.simplify(model)
    assert not simplified.get_layer("frozen").trainable
    assert simplified.get_layer("head").trainable


def test_normalization_keeps_its_statistics():
    inputs = keras.Input((7,))
    norm = L.Normalization()
    norm.adapt(np.random.default_rng(0).normal(3, 2, (50, 7)).astype("float32"))
    model = keras.Model(inputs, L.Dense(3)(L.Dropout(0.1)(norm(inputs))))
    found = inputs_of(model)
    np.testing.assert_allclose(outputs(pk.simplify(model)[0], found)[0], outputs(model, found)[0], atol=1e-6)


def test_a_lambda_layer_is_made_again():
    model = stack((7,), L.Dense(6), L.Lambda(lambda x: x * 2), L.Dropout(0.1), L.Dense(2))
    simplified, report = check_equal(model)
    assert report.counts() == {DROPPED: 1}
    assert simplified.layers[2] is not model.layers[2]


def test_the_given_model_has_the_calls_that_it_had():
    model = ARCHITECTURES["nested"]()
    before = [len(layer._inbound_nodes) for layer in model._flatten_layers()]
    pk.simplify(model)
    assert [len(layer._inbound_nodes) for layer in model._flatten_layers()] == before


def test_the_result_is_compiled_and_can_be_trained():
    model = stack((7,), L.Dense(6), L.BatchNormalization(), L.ReLU(), L.Dense(1, name="y"), L.Dropout(0.2, name="out"))
    model.compile(keras.optimizers.Adam(0.03), {"out": "mse"}, metrics={"out": ["mae"]})
    inputs, labels = np.ones((8, 7), "float32"), np.ones((8, 1), "float32")
    model.fit(inputs, labels, verbose=0)
    wanted = model.evaluate(inputs, labels, verbose=0, return_dict=True)
    simplified, report = pk.simplify(model)
    found = simplified.evaluate(inputs, labels, verbose=0, return_dict=True)
    assert found == pytest.approx(wanted, rel=1e-4)
    assert float(simplified.optimizer.learning_rate) == pytest.approx(0.03)
    simplified.fit(inputs, labels, verbose=0)
    notes = " ".join(report.notes)
    assert "optimizer starts anew" in notes and "out -> y" in notes and "does not act in a later training" in notes


def test_regularizers_act_on_the_folded_weights_and_a_note_says_so():
    model = stack((7,), L.Dense(6, kernel_regularizer="l2", name="dense"), L.BatchNormalization(), L.ReLU())
    assert any("regularizers" in note and "dense" in note for note in pk.simplify(model)[1].notes)


def test_a_mixed_precision_model_keeps_its_dtypes():
    options = {"dtype": "mixed_float16"}
    model = stack((7,), L.Dense(6, **options), L.BatchNormalization(**options), L.ReLU(**options), L.Dense(2))
    simplified, report = check_equal(model, 5e-3)
    assert report.counts() == {FOLDED: 1}
    assert simplified.layers[1].dtype_policy.name == "mixed_float16"


def test_the_saved_file_loads_without_prunekit(tmp_path):
    model = randomize(ARCHITECTURES["mobilenetv2"]())
    simplified, _ = pk.simplify(model)
    images = inputs_of(model)
    np.testing.assert_allclose(outputs_of_file(simplified, images, tmp_path), outputs(simplified, images)[0], atol=1e-6)


# ---- refusals and the report -----------------------------------------------------------------------------------------


class Opaque(keras.Model):
    def __init__(self):
        super().__init__()
        self.dense = L.Dense(3)

    def call(self, inputs):
        return self.dense(inputs) * float(np.random.default_rng(0).normal()) if inputs.shape[0] else None


class Unmade(L.Layer):
    def __init__(self, width):
        super().__init__()
        self.width = width

    def build(self, shape):
        self.kernel = self.add_weight((shape[-1], self.width))

    def call(self, inputs):
        return inputs @ self.kernel

    def get_config(self):
        return {"name": self.name}


def test_a_model_whose_call_cannot_be_followed_is_refused():
    model = Opaque()
    model(np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match=r"cannot be followed.*Opaque.*keras.Model\(inputs, outputs\)"):
        pk.simplify(model)


def test_a_layer_that_cannot_be_made_again_is_named():
    with pytest.raises(ValueError, match=r"(?s)Unmade.*cannot be made again.*Define get_config"):
        pk.simplify(stack((7,), Unmade(4), L.Dense(2)))


def test_anything_but_a_built_model_is_refused():
    with pytest.raises(TypeError, match="Keras 3 models"):
        pk.simplify("model.keras")
    with pytest.raises(ValueError, match="not built"):
        pk.simplify(keras.Sequential([L.Dense(3)]))


def test_the_report_lists_rewrites_and_counts():
    model = ARCHITECTURES["efficientnet_v2"]()
    report = pk.simplify(model)[1]
    text = str(report)
    assert "batch normalization folded: fused0_expand_bn into fused0_expand" in text
    found = report.to_dict()
    assert found["layers"] == [48, 34] and len(found["rewrites"]) == 14
    rows = report.sections()[0].rows
    assert len(rows) == 14 and all(math.isfinite(len(row[1])) for row in rows)
    assert "Simplified" in report._repr_html_()
