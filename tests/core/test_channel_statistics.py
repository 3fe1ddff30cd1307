"""Statistics of output units: against NumPy on the outputs of layers that the test looks up by hand."""

import keras
import numpy as np
import pytest
from keras import ops

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.statistics import Collectors

# On JAX each operation is compiled by itself, which takes ten seconds here.
pytestmark = pytest.mark.every_backend(cases=0)

LAYERS = keras.layers
INPUTS = np.random.default_rng(5).normal(size=(6, 5, 5, 2)).astype("float32")


@pytest.fixture
def network():
    """Activations inside a layer, behind batch normalisation, and none; two scales, one of them on a branch."""
    keras.utils.set_random_seed(3)
    inputs = keras.Input((5, 5, 2))
    x = LAYERS.Conv2D(3, 2, name="inside", activation="relu")(inputs)
    x = LAYERS.BatchNormalization(name="after_inside")(x)
    y = LAYERS.Conv2D(4, 2, name="behind")(x)
    y = LAYERS.Dropout(0.5)(y)
    y = LAYERS.BatchNormalization(name="after_behind")(y)
    y = LAYERS.ReLU(name="relu")(y)
    z = LAYERS.Conv2D(4, 1, name="branch")(y)
    y = LAYERS.BatchNormalization(name="after_branch")(z)
    outputs = LAYERS.Dense(2, name="last")(LAYERS.Flatten()(LAYERS.Add()([y, z])))
    model = keras.Model(inputs, outputs)
    for layer in model.layers:
        if isinstance(layer, LAYERS.BatchNormalization):
            layer.gamma.assign(np.linspace(-2, 1, layer.gamma.shape[0]))
            layer.beta.assign(np.linspace(-0.5, 0.5, layer.beta.shape[0]))
    return model


def collected(model, name, data=None, **options):
    targets, _ = find_targets(model, **options)
    found = Collectors({name}, model, targets, data).values()
    return {target.name: ops.convert_to_numpy(each[name]) for target, each in zip(targets, found, strict=True)}


def outputs_of(model, layer):
    found = keras.Model(model.input, model.get_layer(layer).output)(INPUTS)
    return ops.convert_to_numpy(found).reshape(-1, found.shape[-1])


MEASURED = {"inside/kernel": "inside", "behind/kernel": "relu", "branch/kernel": "branch", "last/kernel": "last"}


@pytest.mark.parametrize(
    ("name", "of"),
    [
        ("zero_share", lambda outputs: (outputs == 0).mean(axis=0)),
        ("mean_activation", lambda outputs: outputs.mean(axis=0)),
    ],
    ids=["zero_share", "mean_activation"],
)
def test_activations_are_those_after_the_activation_function(network, name, of):
    found = collected(network, name, [INPUTS[:4], INPUTS[4:]])
    for weight, layer in MEASURED.items():
        np.testing.assert_allclose(found[weight], of(outputs_of(network, layer)), rtol=1e-4, atol=1e-6)
    assert name == "mean_activation" or 0 < found["behind/kernel"].mean() < 1


@pytest.mark.one_backend
def test_activations_are_collected_from_data(network):
    with pytest.raises(ValueError, match="statistic 'zero_share' is collected from data. Received: no data"):
        collected(network, "zero_share")


@pytest.mark.one_backend
def test_activations_inside_loops_are_refused():
    model = keras.Sequential([keras.Input((4, 3)), LAYERS.LSTM(2, name="lstm")])
    with pytest.raises(ValueError, match="called outside of loops. Received: lstm/kernel of LSTMCell"):
        collected(model, "mean_activation", np.zeros((2, 4, 3), "float32"))


def test_scales_are_those_of_the_batch_normalization_that_follows(network):
    found = collected(network, "batch_normalization_scale", include=["inside", "behind"])
    np.testing.assert_array_equal(found["inside/kernel"], np.linspace(-2, 1, 3, dtype="float32"))
    np.testing.assert_array_equal(found["behind/kernel"], np.linspace(-2, 1, 4, dtype="float32"))


@pytest.mark.one_backend
@pytest.mark.parametrize("name", ["branch", "last"])
def test_a_weight_without_a_scale_of_its_own_is_named(network, name):
    with pytest.raises(ValueError, match=f"into one BatchNormalization .* Received: {name}/kernel.*exclude"):
        collected(network, "batch_normalization_scale", include=[name])


@pytest.mark.one_backend
def test_scales_of_a_convolution_on_images_of_any_size_and_of_a_nested_model():
    block = keras.Sequential([LAYERS.Conv2D(3, 2, name="conv"), LAYERS.BatchNormalization()], name="block")
    model = keras.Sequential([keras.Input((None, None, 2)), block, LAYERS.GlobalAveragePooling2D()])
    found = collected(model, "batch_normalization_scale")
    np.testing.assert_array_equal(found["block/conv/kernel"], np.ones(3))
