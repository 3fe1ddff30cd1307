"""Which weights of which layers are pruned, beside tensorflow-model-optimization."""

import keras
import numpy as np
import original
import pytest
import tf_keras

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.techniques.pruning.masks.options import PruningOptions
from prunekit.techniques.pruning.masks.policy import get_policy

REFUSED = None
SEQUENCE, IMAGE, VOLUME, FLAT = (6, 4), (6, 6, 4), (6, 6, 6, 4), (4,)


def attention(layers):
    layer = layers.MultiHeadAttention(2, 3)
    return lambda x: layer(x, x)


def dot_attention(layers):
    layer = layers.Attention(use_scale=True)
    return lambda x: layer([x, x])


# layer -> (how to make it, its input, weights the original prunes or REFUSED, weights prunekit prunes)
LAYERS = {
    "Dense": (lambda k: k.Dense(3), FLAT, 1, 1),
    "Conv1D": (lambda k: k.Conv1D(3, 2), SEQUENCE, 1, 1),
    "Conv2D": (lambda k: k.Conv2D(3, 2), IMAGE, 1, 1),
    "Conv2D in groups": (lambda k: k.Conv2D(4, 2, groups=2), IMAGE, 1, 1),
    "Conv3D": (lambda k: k.Conv3D(3, 2), VOLUME, 1, 1),
    "Conv2DTranspose": (lambda k: k.Conv2DTranspose(3, 2), IMAGE, 1, 1),
    "Conv3DTranspose": (lambda k: k.Conv3DTranspose(3, 2), VOLUME, 1, 1),
    "SeparableConv1D": (lambda k: k.SeparableConv1D(3, 2), SEQUENCE, 1, 1),
    "SeparableConv2D": (lambda k: k.SeparableConv2D(3, 2), IMAGE, 1, 1),
    "Embedding": (lambda k: k.Embedding(5, 3), FLAT, 1, 1),
    "LSTM": (lambda k: k.LSTM(3), SEQUENCE, 2, 2),
    "GRU": (lambda k: k.GRU(3), SEQUENCE, 2, 2),
    "SimpleRNN": (lambda k: k.SimpleRNN(3), SEQUENCE, 2, 2),
    "RNN of cells": (lambda k: k.RNN([k.LSTMCell(3), k.GRUCell(2)]), SEQUENCE, 4, 4),
    "MultiHeadAttention": (attention, SEQUENCE, 4, 4),
    "DepthwiseConv2D": (lambda k: k.DepthwiseConv2D(3), IMAGE, 0, 0),
    "BatchNormalization": (lambda k: k.BatchNormalization(), FLAT, 0, 0),
    "LayerNormalization": (lambda k: k.LayerNormalization(), FLAT, 0, 0),
    "Dropout": (lambda k: k.Dropout(0.5), FLAT, 0, 0),
    "EinsumDense": (lambda k: k.EinsumDense("ab,bc->ac", output_shape=3), FLAT, REFUSED, 1),
    "Conv1DTranspose": (lambda k: k.Conv1DTranspose(3, 2), SEQUENCE, REFUSED, 1),
    "Bidirectional": (lambda k: k.Bidirectional(k.LSTM(3)), SEQUENCE, REFUSED, 4),
    "TimeDistributed": (lambda k: k.TimeDistributed(k.Dense(3)), SEQUENCE, REFUSED, 1),
    "Attention": (dot_attention, SEQUENCE, REFUSED, 0),
    "ConvLSTM1D": (lambda k: k.ConvLSTM1D(3, 2), (5, 6, 4), REFUSED, 2),
    "ConvLSTM2D": (lambda k: k.ConvLSTM2D(3, 2), (5, 6, 6, 4), REFUSED, 2),
    "ConvLSTM3D": (lambda k: k.ConvLSTM3D(3, 2), (3, 4, 4, 4, 2), REFUSED, 2),
    "DepthwiseConv1D": (lambda k: k.DepthwiseConv1D(3), SEQUENCE, REFUSED, 0),
    "GroupNormalization": (lambda k: k.GroupNormalization(2), FLAT, REFUSED, 0),
    "PReLU": (lambda k: k.PReLU(), FLAT, REFUSED, 0),
    "Rescaling": (lambda k: k.Rescaling(2.0), FLAT, REFUSED, 0),
    "UnitNormalization": (lambda k: k.UnitNormalization(), FLAT, REFUSED, 0),
}


def model_of(library, make, shape):
    inputs = library.Input(shape)
    return library.Model(inputs, make(library.layers)(inputs))


def pruned_by_the_original(model):
    try:
        wrapped = original.sparsity.prune_low_magnitude(model)
    except ValueError as error:
        assert "supported layer" in str(error)
        return REFUSED
    return sum(len(getattr(layer, "prunable_weights", [])) for layer in wrapped.layers)


def targets_of(model, policy):
    """Shapes of the weights that prunekit prunes; REFUSED where it says that the original would not."""
    try:
        targets = find_targets(model)[0]
    except ValueError as error:
        assert "has no weights to prune" in str(error)
        return []
    options = PruningOptions(allocation="uniform", policy=policy)
    try:
        get_policy(options.policy).calculator(model, targets, options, 0.5)
    except ValueError as error:
        assert "which it does not prune" in str(error)
        return REFUSED
    return [target.shape for target in targets]


@pytest.mark.parametrize("make, shape, theirs, own", LAYERS.values(), ids=list(LAYERS))
def test_the_layers_that_each_prunes(make, shape, theirs, own):
    assert pruned_by_the_original(model_of(tf_keras, make, shape)) == theirs
    model = model_of(keras, make, shape)
    followed = targets_of(model, "tfmot")
    if theirs is REFUSED:
        assert followed == (REFUSED if own else [])
    else:
        assert len(followed) == theirs
    assert len(targets_of(model, "gradual")) == own


def test_the_weights_of_a_layer_are_the_same_ones():
    for name in ("Conv2DTranspose", "SeparableConv2D", "LSTM", "MultiHeadAttention"):
        make, shape, _, _ = LAYERS[name]
        wrapped = original.sparsity.prune_low_magnitude(model_of(tf_keras, make, shape))
        theirs = [tuple(weight.shape) for weight in wrapped.layers[-1].prunable_weights]
        assert targets_of(model_of(keras, make, shape), "tfmot") == theirs


def test_difference_subclasses_of_known_layers():
    class OldDense(tf_keras.layers.Dense):
        pass

    class NewDense(keras.layers.Dense):
        pass

    assert pruned_by_the_original(tf_keras.Sequential([tf_keras.Input((4,)), OldDense(3)])) is REFUSED
    model = keras.Sequential([keras.Input((4,)), NewDense(3)])
    assert targets_of(model, "tfmot") is REFUSED
    assert targets_of(model, "gradual") == [(4, 3)]


def test_difference_subclassed_models():
    def subclassed(library):
        class Own(library.Model):
            def __init__(self):
                super().__init__()
                self.inner = library.layers.Dense(3)

            def call(self, x):
                return self.inner(x)

        model = Own()
        model(np.zeros((1, 4), "float32"))
        return model

    with pytest.raises(ValueError, match="can only prune an object of the following"):
        original.sparsity.prune_low_magnitude(subclassed(tf_keras))
    # There, layers inside are wrapped one by one; so policy="tfmot" takes them.
    assert targets_of(subclassed(keras), "tfmot") == targets_of(subclassed(keras), "gradual") == [(4, 3)]


def test_nested_models_are_pruned_by_both():
    def nested(library):
        inner = library.Sequential([library.Input((4,)), library.layers.Dense(5)])
        inputs = library.Input((4,))
        return library.Model(inputs, library.layers.Dense(2)(inner(inputs)))

    wrapped = original.sparsity.prune_low_magnitude(nested(tf_keras))
    inner = next(layer for layer in wrapped.layers if isinstance(layer, tf_keras.Model))
    assert [len(layer.prunable_weights) for layer in (inner.layers[-1], wrapped.layers[-1])] == [1, 1]
    assert targets_of(nested(keras), "tfmot") == targets_of(nested(keras), "gradual") == [(4, 5), (5, 2)]


def test_difference_depthwise_kernels_biases_and_normalisation_by_name():
    layers = [keras.layers.DepthwiseConv2D(3, name="depthwise"), keras.layers.BatchNormalization(name="norm")]
    model = keras.Sequential([keras.Input((6, 6, 4)), *layers, keras.layers.Dense(2, name="dense")])
    assert pk.prune(model, 0.5, allocation="uniform").targets == ("dense/kernel",)
    for include in ("depthwise", "dense/bias", "norm/gamma"):
        with pytest.raises(ValueError, match=rf"Received: {include}.*which it does not prune"):
            pk.prune(model, 0.5, include=include, policy="tfmot")
        assert len(pk.prune(model, 0.5, include=include, allocation="uniform").targets) == 1


def test_what_is_left_out_makes_the_rest_prunable():
    layers = [keras.layers.Bidirectional(keras.layers.LSTM(3), name="both"), keras.layers.Dense(2, name="dense")]
    model = keras.Sequential([keras.Input(SEQUENCE), *layers])
    assert pk.prune(model, 0.5, exclude="both", policy="tfmot").targets == ("dense/kernel",)
