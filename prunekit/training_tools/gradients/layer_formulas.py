"""Formulas for per-example gradients, from inputs and output gradients, of layers that are linear in their weights.

Each formula is the derivative of one `call` method, so formulas are looked up by that method: for a subclass with its
own `call` there is no formula, and its gradients are computed by general differentiation.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import keras
import tensorflow as tf

from prunekit.anatomy.layers.counting import einsum_labels
from prunekit.anatomy.layers.layers import refusal
from prunekit.core.statistics.layer_products import channels_last, full_labels, patches
from prunekit.training_tools.gradients.gradient_factors import Contribution, Lookups, Products, Whole
from prunekit.training_tools.gradients.layer_capture import substituted_variables

Formula = Callable[[Any, Any, Any], Mapping[str, Contribution]]


@dataclass(frozen=True)
class LayerFormula:
    """Rule for the per-example gradients of a layer type.

    Attributes:
        formula: Function (layer, inputs, output gradient) -> contribution per attribute.
        before_activation: True if the formula takes the gradient at the input of `layer.activation`.
        applies: Function (layer) -> True if the formula holds for a layer with these options.
    """

    formula: Formula
    before_activation: bool = True
    applies: Callable[[Any], bool] = lambda layer: True


def rule_of(layer: Any) -> LayerFormula | None:
    """Returns the rule for a layer, or None if its gradients need general differentiation."""
    # LoRA and quantization change the result of a call; `refusal` detects both. Rematerialised calls are unobserved.
    if "call" in vars(layer) or refusal(layer) or getattr(layer, "_remat_mode", None) is not None:
        return None
    rules = (rule for method, rule in _RULES if type(layer).call is method and rule.applies(layer))
    return next(rules, None)


def _rows(tensor: Any, features: int) -> Any:
    """Returns the tensor in shape (batch, uses, features), with all axes between merged into uses."""
    between = tensor.shape[1:]
    if between.is_fully_defined():
        return tf.reshape(tensor, (-1, between.num_elements() // features, features))
    return tf.reshape(tensor, (tf.shape(tensor)[0], -1, features))


def _bias(layer: Any, gradient: Any) -> dict[str, Contribution]:
    """Returns the bias's contribution: the output gradient, summed over the axes along which the bias is broadcast."""
    if layer.bias is None:
        return {}
    shape = tuple(layer.bias.shape)
    first = gradient.shape.rank - len(shape)
    axes = [axis for axis in range(1, gradient.shape.rank) if axis < first or shape[axis - first] == 1]
    return {"bias": Whole(tf.reshape(tf.reduce_sum(gradient, axes), (-1, *shape)))}


def _dense(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    kernel = Products(_rows(inputs, inputs.shape[-1]), _rows(gradient, layer.units))
    return {"kernel": kernel, **_bias(layer, gradient)}


def _einsum_dense(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    data, kernel, output = full_labels(layer, inputs.shape.rank)
    batch, ins = data[0], "".join(label for label in kernel if label in data and label not in output)
    outs = "".join(label for label in kernel if label in output and label not in data)
    if kernel == ins + outs:
        uses = "".join(label for label in output[1:] if label not in kernel)
        sizes = dict(zip(kernel, layer.kernel.shape, strict=True))
        a = _rows(tf.einsum(f"{data}->{batch}{uses}{ins}", inputs), math.prod(sizes[label] for label in ins))
        g = _rows(tf.einsum(f"{output}->{batch}{uses}{outs}", gradient), math.prod(sizes[label] for label in outs))
        found: Contribution = Products(a, g)
    else:
        found = Whole(tf.einsum(f"{data},{output}->{batch}{kernel}", inputs, gradient))
    return {"kernel": found, **_bias(layer, gradient)}


def _examples_first(layer: Any) -> bool:
    """Returns True if the first label of the inputs is also the first of the outputs, and not in the kernel."""
    data, kernel, output = einsum_labels(layer)
    return data[0] == output[0] and data[0] not in kernel


def _embedding(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    indices = tf.cast(inputs, "int64")
    indices = tf.where(indices < 0, indices + layer.input_dim, indices)
    return {"embeddings": Lookups(_rows(indices, 1)[:, :, 0], _rows(gradient, layer.output_dim))}


def _convolution(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    inputs, gradient = channels_last(layer, inputs), channels_last(layer, gradient)
    channels, groups, size = inputs.shape[-1], layer.groups, math.prod(layer.kernel_size)
    seen, g = _patches(layer, inputs, gradient), _rows(gradient, layer.filters)
    if groups == 1:
        kernel: Contribution = Products(tf.reshape(seen, (-1, seen.shape[1], size * channels)), g)
    else:
        seen = tf.reshape(seen, (-1, seen.shape[1], size, groups, channels // groups))
        g = tf.reshape(g, (-1, seen.shape[1], groups, layer.filters // groups))
        kernel = Whole(tf.reshape(tf.einsum("btkgi,btgo->bkigo", seen, g), (-1, *layer.kernel.shape)))
    return {"kernel": kernel, **_bias(layer, gradient)}


def _depthwise_convolution(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    inputs, gradient = channels_last(layer, inputs), channels_last(layer, gradient)
    seen = _patches(layer, inputs, gradient)
    g = tf.reshape(gradient, (-1, seen.shape[1], inputs.shape[-1], layer.depth_multiplier))
    kernel = Whole(tf.reshape(tf.einsum("btkc,btcm->bkcm", seen, g), (-1, *layer.kernel.shape)))
    return {"kernel": kernel, **_bias(layer, gradient)}


def _patches(layer: Any, inputs: Any, outputs: Any) -> Any:
    """Returns the receptive field of each output position: (batch, positions, kernel size, channels)."""
    seen = patches(layer, inputs)
    return tf.reshape(seen, (-1, math.prod(outputs.shape[1:-1]), *seen.shape[-2:]))


def _normalisation(layer: Any, inputs: Any, gradient: Any) -> Mapping[str, Contribution]:
    """Uses that the output is affine in gamma and beta: with gamma 1 and beta 0, it is the factor of gamma."""
    scales = {name: getattr(layer, name, None) for name in ("gamma", "scale", "beta")}
    weights = {name: weight for name, weight in scales.items() if isinstance(weight, keras.Variable)}
    neutral = [(w, (tf.zeros if name == "beta" else tf.ones)(w.shape, w.dtype)) for name, w in weights.items()]
    with substituted_variables(neutral):
        normal = tf.cast(layer(inputs), gradient.dtype)
    axes = [layer.axis] if isinstance(layer.axis, int) else list(layer.axis)
    kept = {0, *(axis % gradient.shape.rank for axis in axes)}
    summed = [axis for axis in range(gradient.shape.rank) if axis not in kept]
    return {name: Whole(tf.reduce_sum(gradient if name == "beta" else gradient * normal, summed)) for name in weights}


def _first_rules() -> list[tuple[Any, LayerFormula]]:
    layers = keras.layers
    rules: list[tuple[Any, LayerFormula]] = [
        (layers.Dense.call, LayerFormula(_dense)),
        (layers.EinsumDense.call, LayerFormula(_einsum_dense, applies=_examples_first)),
        (layers.Conv1D.call, LayerFormula(_convolution)),
        (layers.Conv2D.call, LayerFormula(_convolution)),
        (layers.DepthwiseConv2D.call, LayerFormula(_depthwise_convolution)),
        (layers.Embedding.call, LayerFormula(_embedding, before_activation=False)),
    ]
    names = ("BatchNormalization", "LayerNormalization", "GroupNormalization", "RMSNormalization")
    known = [getattr(layers, name) for name in names if hasattr(layers, name)]
    normalisation = LayerFormula(_normalisation, False, applies=lambda layer: not getattr(layer, "rms_scaling", False))
    return rules + [(layer.call, normalisation) for layer in known]


_RULES = _first_rules()


def formulated(layer: Any, inputs: Any, gradient: Any, variables: Mapping[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yields (variable, contribution) for each requested weight of one call.

    Args:
        layer: A layer that has a rule.
        inputs: The inputs of the call.
        gradient: The gradient at the point that the rule names.
        variables: The requested weights, by attribute.
    """
    rule = rule_of(layer)
    dtype = next(iter(variables.values())).dtype
    if inputs.dtype.is_floating:
        # Rounded to the layer's compute dtype, then cast to the weights' dtype: sums of squares overflow float16.
        inputs = tf.cast(tf.cast(inputs, layer.compute_dtype), dtype)
    if rule is not None:
        found = rule.formula(layer, inputs, tf.cast(gradient, dtype))
        yield from ((variable, found[name]) for name, variable in variables.items() if name in found)
