"""The product behind a kernel: rows @ matrix is what the layer computes before bias and activation."""

import keras
import numpy as np
import pytest
from keras import layers, ops

from prunekit.anatomy.layers.targets import find_targets
from prunekit.core.statistics.layer_products import patches, product_of
from prunekit.sparsity.array_ops import array_of

pytestmark = pytest.mark.every_backend

CASES = {
    "dense": (layers.Dense(5), (4, 7)),
    "dense over a sequence": (layers.Dense(5), (2, 3, 7)),
    "einsum": (layers.EinsumDense("abc,cd->abd", (None, 5), bias_axes="d"), (2, 3, 7)),
    "einsum with ellipsis": (layers.EinsumDense("...x,xy->...y", 5, bias_axes="y"), (2, 3, 2, 7)),
    "einsum of heads": (layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="de"), (2, 3, 7)),
    "einsum of heads, bias of one axis": (layers.EinsumDense("abc,cde->abde", (None, 4, 3), bias_axes="e"), (2, 3, 7)),
    "einsum that joins heads": (layers.EinsumDense("abcd,cde->abe", (None, 5), bias_axes="e"), (2, 3, 4, 3)),
    "einsum with a kernel per head": (layers.EinsumDense("abhc,hcd->abhd", (None, 4, 5), bias_axes="hd"), (2, 3, 4, 6)),
    "einsum with outputs in another order": (layers.EinsumDense("abc,dce->aebd", (4, None, 3)), (2, 5, 7)),
    "convolution": (layers.Conv2D(5, 3), (2, 6, 7, 3)),
    "convolution, same and strides": (layers.Conv2D(5, (3, 2), strides=2, padding="same"), (2, 6, 7, 3)),
    "convolution, dilated": (layers.Conv2D(5, 3, dilation_rate=2, padding="same"), (2, 6, 7, 3)),
    "convolution, grouped": (layers.Conv2D(6, 3, groups=3), (2, 5, 5, 9)),
    "convolution, causal": (layers.Conv1D(5, 3, dilation_rate=2, padding="causal"), (2, 7, 3)),
    "convolution, 3-D": (layers.Conv3D(2, 2, padding="same"), (2, 3, 4, 3, 2)),
    "depthwise": (layers.DepthwiseConv2D(3, depth_multiplier=2, padding="same"), (2, 5, 5, 4)),
    "depthwise with strides": (layers.DepthwiseConv2D(3, strides=2), (2, 6, 6, 4)),
    "transposed": (layers.Conv2DTranspose(5, 3, strides=2, padding="same"), (2, 4, 5, 3)),
    "transposed, valid": (layers.Conv1DTranspose(5, 4, strides=2), (2, 4, 3)),
}


def built(layer, shape):
    """A model of one layer with kernel and bias drawn at random, its input, and the layer's copy."""
    layer = type(layer).from_config(layer.get_config())
    model = keras.Sequential([keras.Input(shape[1:]), layer])
    rng = np.random.default_rng(0)
    for weight in model.weights:
        weight.assign(rng.normal(size=weight.shape))
    return model, ops.convert_to_tensor(rng.normal(size=shape).astype("float32")), layer


@pytest.mark.parametrize("case", CASES)
def test_rows_times_matrix_is_the_output_of_the_layer(case):
    model, x, layer = built(*CASES[case])
    (target,) = find_targets(model, "*/kernel")[0]
    product = product_of(target)
    kernel = ops.convert_to_numpy(target.variable)
    matrix = product.matrix(kernel)
    assert matrix.shape == (product.groups, product.inputs, product.outputs)
    np.testing.assert_array_equal(product.kernel(matrix), kernel)
    rows = ops.convert_to_numpy(product.rows((x,)))
    assert rows.shape[0] == product.groups and rows.shape[2] == product.inputs
    # Each output appears once, in another order: sorted, both sides agree. The order is checked by the bias below.
    without_bias = layer(x) if layer.bias is None else layer(x) - layer(ops.zeros_like(x))
    np.testing.assert_allclose(
        np.sort((rows @ matrix).ravel()), np.sort(ops.convert_to_numpy(without_bias).ravel()), rtol=1e-4, atol=1e-4
    )


WITH_BIAS = [
    name
    for name, (layer, _) in CASES.items()
    if layer.get_config().get("bias_axes", layer.get_config().get("use_bias"))
]


@pytest.mark.parametrize("case", WITH_BIAS)
def test_a_shift_of_all_outputs_is_the_shift_of_the_bias(case):
    model, x, layer = built(*CASES[case])
    (target,) = find_targets(model, "*/kernel")[0]
    product = product_of(target)
    change = np.random.default_rng(1).normal(size=target.shape).astype("float32")
    rows = ops.convert_to_numpy(product.rows((x,)))
    before = ops.convert_to_numpy(layer(x))
    target.variable.assign_add(change)
    difference = ops.convert_to_numpy(layer(x)) - before
    shift = product.bias((rows @ product.matrix(change)).mean(axis=1))
    assert shift.shape == tuple(layer.bias.shape)
    axes = tuple(
        axis
        for axis in range(difference.ndim)
        if axis < difference.ndim - shift.ndim or shift.shape[axis - difference.ndim + shift.ndim] == 1
    )
    np.testing.assert_allclose(shift, difference.mean(axis=axes).reshape(shift.shape), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", [name for name in CASES if name.startswith(("convolution", "depthwise"))])
def test_windows_of_a_tensor_are_those_of_an_array(name):
    layer, shape = CASES[name]
    inputs = np.random.default_rng(0).normal(size=shape).astype("float32")
    np.testing.assert_array_equal(array_of(patches(layer, ops.convert_to_tensor(inputs))), patches(layer, inputs))
