"""Batch normalization is folded into its neighbours where the outputs stay equal, and named where it stays."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from keras import layers as L, ops
from networks import outputs
from simplified_models import check_equal

import prunekit as pk
from prunekit.techniques.shrink.graph.folding import FOLDED
from prunekit.techniques.shrink.layers.identities import DROPPED


@pytest.fixture
def float64():
    """Layers compute in float64, where the backend does: JAX only in its 64-bit mode."""
    if keras.backend.backend() == "jax":
        yield
        return
    before = keras.config.dtype_policy()
    keras.config.set_dtype_policy("float64")
    yield
    keras.config.set_dtype_policy(before)


# ---- batch normalization into the layer before it --------------------------------------------------------------------

SHAPES = {1: (9, 6), 2: (8, 7, 6), 3: (5, 6, 5, 6)}
BEFORE = {
    "Conv1D": (1, lambda: L.Conv1D(8, 3, use_bias=False)),
    "Conv1D, causal": (1, lambda: L.Conv1D(8, 3, padding="causal")),
    "Conv2D": (2, lambda: L.Conv2D(8, 3, padding="same", strides=2)),
    "Conv2D in groups": (2, lambda: L.Conv2D(8, 3, groups=2, use_bias=False)),
    "Conv3D": (3, lambda: L.Conv3D(8, 2)),
    "Conv1DTranspose": (1, lambda: L.Conv1DTranspose(8, 3, strides=2)),
    "Conv2DTranspose": (2, lambda: L.Conv2DTranspose(8, 3, padding="same", use_bias=False)),
    "Conv3DTranspose": (3, lambda: L.Conv3DTranspose(8, 2)),
    "DepthwiseConv1D": (1, lambda: L.DepthwiseConv1D(3, depth_multiplier=2)),
    "DepthwiseConv2D": (2, lambda: L.DepthwiseConv2D(3, padding="same", depth_multiplier=3, use_bias=False)),
    "SeparableConv1D": (1, lambda: L.SeparableConv1D(8, 3, depth_multiplier=2)),
    "SeparableConv2D": (2, lambda: L.SeparableConv2D(8, 3, padding="same", use_bias=False)),
    "Dense": (1, lambda: L.Dense(8)),
    "Dense without bias": (2, lambda: L.Dense(8, use_bias=False)),
    "EinsumDense": (1, lambda: L.EinsumDense("abc,cd->abd", (None, 8), bias_axes="d")),
    "EinsumDense without bias": (1, lambda: L.EinsumDense("...c,cd->...d", 8)),
    "EinsumDense to heads": (1, lambda: L.EinsumDense("abc,cde->abde", (None, 3, 8), bias_axes="d")),
}


@pytest.mark.parametrize("options", [{}, {"scale": False}, {"center": False}], ids=str)
@pytest.mark.parametrize("kind", BEFORE)
def test_batch_normalization_is_folded_into_the_layer_before_it(kind, options, float64):
    rank, make = BEFORE[kind]
    model = stack(SHAPES[rank], make(), L.BatchNormalization(**options), L.Activation("tanh"))
    simplified, report = check_equal(model, 1e-12)
    assert report.counts() == {FOLDED: 1}
    assert report.layers == (3, 2)
    assert len(simplified.layers) == 3


def test_a_batch_normalization_over_an_inner_axis_is_folded_into_einsum_dense(float64):
    model = stack(
        (4, 6), L.EinsumDense("abc,cde->abde", (None, 3, 8), bias_axes="e"), L.BatchNormalization(axis=2), L.ReLU()
    )
    assert check_equal(model, 1e-12)[1].counts() == {FOLDED: 1}


def test_the_channels_may_come_first(float64):
    model = stack(
        (6, 8, 7), L.Conv2D(5, 3, data_format="channels_first"), L.BatchNormalization(axis=1), L.ReLU(), L.Flatten()
    )
    bn, conv = model.layers[2], model.layers[1]
    bn.moving_variance.assign(np.arange(1, 6))
    simplified, report = pk.simplify(model)
    assert report.counts() == {FOLDED: 1}
    scale = 1 / np.sqrt(np.arange(1, 6) + bn.epsilon)
    np.testing.assert_allclose(simplified.layers[1].kernel, np.asarray(conv.kernel) * scale, rtol=1e-6)


def test_two_batch_normalizations_are_folded_one_after_another(float64):
    model = stack((7,), L.Dense(6), L.BatchNormalization(), L.BatchNormalization(), L.ReLU())
    assert check_equal(model, 1e-12)[1].counts() == {FOLDED: 2}


def test_dropout_between_the_layer_and_the_batch_normalization_does_not_prevent_folding():
    model = stack((7,), L.Dense(6), L.Dropout(0.5), L.BatchNormalization(), L.ReLU())
    assert check_equal(model)[1].counts() == {DROPPED: 1, FOLDED: 1}


def test_pruned_weights_stay_exactly_zero():
    model = randomize(stack((7,), L.Dense(6), L.BatchNormalization(), L.ReLU()))
    kernel = np.asarray(model.layers[1].kernel).copy()
    kernel[::2] = 0
    model.layers[1].kernel.assign(kernel)
    model.layers[2].gamma.assign(-np.ones(6))
    found = np.asarray(pk.simplify(model)[0].layers[1].kernel)
    np.testing.assert_array_equal(found == 0, kernel == 0)
    assert not np.signbit(found[::2]).any()


# ---- batch normalization into the layer after it ---------------------------------------------------------------------

AFTER = {
    "Dense": (1, lambda: L.Dense(8)),
    "Dense without bias": (1, lambda: L.Dense(8, use_bias=False)),
    "Conv1D": (1, lambda: L.Conv1D(8, 3)),
    "Conv2D": (2, lambda: L.Conv2D(8, 3, strides=2, use_bias=False)),
    "Conv2D in groups": (2, lambda: L.Conv2D(8, 3, groups=2)),
    "1x1 with padding": (2, lambda: L.Conv2D(8, 1, strides=2, padding="same")),
    "Conv3D": (3, lambda: L.Conv3D(8, 2)),
    "DepthwiseConv2D": (2, lambda: L.DepthwiseConv2D(3, depth_multiplier=2)),
    "SeparableConv2D": (2, lambda: L.SeparableConv2D(8, 3, depth_multiplier=2)),
}


@pytest.mark.parametrize("kind", AFTER)
def test_batch_normalization_is_folded_into_the_layer_after_it(kind, float64):
    rank, make = AFTER[kind]
    model = stack(SHAPES[rank], L.ReLU(), L.BatchNormalization(), make())
    assert check_equal(model, 1e-12)[1].counts() == {FOLDED: 1}


def test_a_shift_is_not_folded_through_padding_and_the_report_says_so():
    model = stack((8, 7, 6), L.ReLU(), L.BatchNormalization(), L.Conv2D(8, 3, padding="same", name="conv"))
    report = check_equal(model)[1]
    assert not report.rewrites
    assert "conv pads its inputs with zeros" in report.skipped[0].reason


@pytest.mark.parametrize("kind", [L.Conv2D, L.Conv2DTranspose])
def test_a_scale_without_shift_is_folded_through_padding(kind):
    model = randomize(stack((8, 7, 6), L.ReLU(), L.BatchNormalization(center=False), kind(8, 3, padding="same")))
    model.layers[2].moving_mean.assign(np.zeros(6))
    inputs = inputs_of(model)
    simplified, report = pk.simplify(model)
    assert report.counts() == {FOLDED: 1}
    np.testing.assert_allclose(outputs(simplified, inputs)[0], outputs(model, inputs)[0], atol=1e-5)


# ---- what is not folded ----------------------------------------------------------------------------------------------


def two_readers(x):
    y = L.Dense(6, name="dense")(x)
    return L.Add()([ops.tanh(L.BatchNormalization()(y)), y])


def output_before(x):
    y = L.Dense(6, name="dense")(x)
    return [y, ops.tanh(L.BatchNormalization()(y))]


def shared_layer(x):
    dense = L.Dense(6, name="dense")
    return L.Concatenate()([ops.tanh(L.BatchNormalization()(dense(x))), dense(ops.tanh(x))])


def shared_normalization(x):
    norm = L.BatchNormalization(name="norm")
    return L.Concatenate()([norm(L.Dense(6)(x)), norm(L.Dense(6)(ops.tanh(x)))])


REFUSED = {
    "activation": (
        lambda x: ops.tanh(L.BatchNormalization()(L.Dense(6, "relu", name="dense")(x))),
        "activation 'relu'",
    ),
    "two readers": (two_readers, "other layers read the output of dense too"),
    "output": (output_before, "the output of dense is an output of the model"),
    "shared layer": (shared_layer, "dense is called several times"),
    "shared normalization": (shared_normalization, "it is called several times"),
    "input": (lambda x: ops.tanh(L.BatchNormalization()(x)), "it reads an input of the model"),
    "recurrent": (lambda x: ops.tanh(L.BatchNormalization()(L.LSTM(4)(L.Reshape((7, 1))(x)))), "LSTM is not a Dense"),
    "training": (lambda x: ops.tanh(L.BatchNormalization()(L.Dense(6)(x), training=True)), "training=True"),
    "axis": (
        lambda x: ops.tanh(L.BatchNormalization(axis=1)(L.Conv1D(4, 2, name="conv")(L.Reshape((7, 1))(x)))),
        "axis 1 is not the axis of the channels of conv",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_report_names_each_batch_normalization_that_stays(case):
    make, reason = REFUSED[case]
    inputs = keras.Input((7,))
    model = keras.Model(inputs, make(inputs))
    simplified, report = check_equal(model)
    assert FOLDED not in report.counts()
    assert any(reason in one.reason for one in report.skipped), report
    assert any(isinstance(layer, L.BatchNormalization) for layer in simplified.layers)


def test_a_batch_normalization_with_values_that_are_not_finite_stays():
    model = stack((7,), L.Dense(6), L.BatchNormalization(), L.ReLU())
    model.layers[2].moving_variance.assign(-np.ones(6))
    assert "not finite" in pk.simplify(model)[1].skipped[0].reason


def test_a_batch_normalization_inside_a_layer_is_named():
    model = stack((4, 7), L.TimeDistributed(L.BatchNormalization(name="inner"), name="each"), L.Dense(3))
    report = pk.simplify(model)[1]
    assert [(one.name, one.reason) for one in report.skipped] == [("inner", "it is inside the layer 'each'")]
