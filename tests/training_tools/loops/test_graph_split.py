"""Where a model's graph is cut: at the end of what is frozen, and at nothing that acts in training."""

import json

import keras
import numpy as np
import pytest
from keras import layers
from prefix_models import BOUNDARIES, CASES, built, data, frozen

import prunekit as pk


@pytest.mark.parametrize("name", CASES)
def test_the_boundary_is_where_the_frozen_part_ends(name):
    assert pk.loops.CachedPrefix(built(name)).boundary == BOUNDARIES[name]


def test_the_user_may_cut_further_down_and_at_several_layers():
    model = built("convolutional")
    x, _, _ = data(model)
    for boundary in ("norm", ["norm"], "pool", "conv_1"):
        prefix = pk.loops.CachedPrefix(model, boundary)
        assert prefix.boundary == (boundary if isinstance(boundary, str) else boundary[0],)
        np.testing.assert_allclose(prefix.upper(prefix.activations(x)), model(x), rtol=1e-4, atol=1e-6)
    model = built("residual")
    assert pk.loops.CachedPrefix(model, ["low", "other"]).boundary == ("x", "low", "other")
    assert pk.loops.CachedPrefix(model, "low").boundary == ("x", "low")
    assert pk.loops.CachedPrefix(built("nested"), "one").boundary == ("backbone/core/one",)
    model = built("shared")
    model.get_layer("between").trainable = False
    assert pk.loops.CachedPrefix(model, ("shared", 0)).boundary == ("shared",)
    assert pk.loops.CachedPrefix(model, ("shared", 1)).upper.count_params() == 36


@pytest.mark.parametrize(
    ("boundary", "reason"),
    [
        ("logits", "'drop' draws random numbers in training; 'logits' has trainable weights"),
        ("drop", "'drop' draws random numbers in training"),
        ("conv1", "No layer of the model .* Did you mean 'conv_1'"),
        ([], "names at least one layer"),
        (("conv_1", 3), "cannot be cut at the outputs of 'conv_1'"),
    ],
)
def test_a_boundary_above_something_that_acts_in_training_is_refused(boundary, reason):
    with pytest.raises(ValueError, match=reason):
        pk.loops.CachedPrefix(built("convolutional"), boundary)


def test_a_shared_layer_needs_the_number_of_its_call():
    with pytest.raises(ValueError, match=r"called several times.*\('shared', 0\)"):
        pk.loops.CachedPrefix(built("shared"), "shared")


@pytest.mark.parametrize(
    ("layer", "ends_before"),
    [
        (layers.Dropout(0.2), True),
        (layers.Dropout(0.0), False),
        (layers.GaussianNoise(0.1), True),
        (layers.SpatialDropout1D(0.1), True),
        (layers.RandomContrast(0.1), True),
        (layers.BatchNormalization(center=False, scale=False), True),
        (layers.BatchNormalization(trainable=False), False),
        (layers.SpectralNormalization(layers.Dense(4), trainable=False), True),
        (layers.LSTM(4, return_sequences=True, trainable=False), False),
        (layers.LSTM(4, return_sequences=True, dropout=0.1, trainable=False), True),
        (layers.Bidirectional(layers.GRU(4, return_sequences=True, recurrent_dropout=0.1), trainable=False), True),
        (layers.TimeDistributed(layers.Dropout(0.5)), True),
        (layers.Dense(4, trainable=False, activity_regularizer="l2"), True),
        (layers.Dense(4, trainable=False, kernel_regularizer="l2"), False),
        (layers.LayerNormalization(trainable=False), False),
        (keras.Sequential([layers.Dense(4, trainable=False), layers.Dropout(0.5)]), True),
    ],
    ids=lambda value: getattr(value, "name", str(value)),
)
def test_what_acts_in_training_ends_the_frozen_part_and_nothing_else_does(layer, ends_before):
    inputs = keras.Input((3, 4))
    x = layer(frozen(layers.Dense(4, name="below"))(inputs))
    x = layers.Activation("tanh", name="after")(x)
    prefix = pk.loops.CachedPrefix(keras.Model(inputs, layers.Dense(2, name="logits")(x)))
    assert (prefix.boundary != ("after",)) == ends_before
    assert prefix.activations(np.ones((2, 3, 4), "float32")).shape[0] == 2


def test_models_without_a_frozen_part_or_without_a_graph_are_refused():
    class Subclassed(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = layers.Dense(2)

        def call(self, x):
            return self.dense(x)

    model = Subclassed()
    model(np.ones((1, 3)))
    with pytest.raises(ValueError, match="a `call` of its own.* Subclassed. Build it as keras.Model"):
        pk.loops.CachedPrefix(model)
    model = built("perceptron")
    model.get_layer("hidden").trainable = True
    with pytest.raises(ValueError, match="is frozen. Received: 'hidden' has trainable weights .*hidden/kernel"):
        pk.loops.CachedPrefix(model)
    model.trainable = False
    with pytest.raises(ValueError, match="All of the model 'sequential' lies below"):
        pk.loops.CachedPrefix(model)
    assert pk.loops.CachedPrefix(model, "hidden").boundary == ("hidden",)
    with pytest.raises(ValueError, match="not built"):
        pk.loops.CachedPrefix(keras.Sequential([layers.Dense(2)]))
    with pytest.raises(TypeError, match="Keras 3 models"):
        pk.loops.CachedPrefix("model")


def test_the_models_can_be_saved_and_read_and_the_whole_one_bears_no_trace(tmp_path):
    model = built("masked_inside")
    before, (x, _, _) = json.dumps(model.get_config(), default=str), data(model)
    prefix = pk.loops.CachedPrefix(model)
    assert json.dumps(model.get_config(), default=str) == before
    model.save(tmp_path / "whole.keras")
    prefix.upper.save(tmp_path / "upper.keras")
    np.testing.assert_allclose(keras.models.load_model(tmp_path / "whole.keras")(x), model(x), rtol=1e-5)
    upper = keras.models.load_model(tmp_path / "upper.keras")
    np.testing.assert_allclose(upper(prefix.activations(x)), model(x), rtol=1e-5)
