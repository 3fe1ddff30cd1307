"""Where the two libraries round a model: name of a weight or tensor -> how it is rounded.

A weight has the shape of its scales; a tensor has the name of the first tensor on its grid, which is its own name if it
shares the grid with none, or PRESCRIBED. A tensor has the name of the layer or input that computes it.
"""

import functools

import keras
import original
import tf_keras

from prunekit.techniques.quantize.placement.placement import place

PRESCRIBED = "the grid that the kernel prescribes"
theirs = original.tfmot.quantization.keras


def quantizers_in(model):
    """Yields the layers of a model of `quantize_model` as (layer, weights, before and after its activation, output).

    Weights are triples (weight, quantizer, its variables); the others are lists of quantizers.
    """
    for layer in model.layers:
        if isinstance(layer, tf_keras.layers.InputLayer):
            continue
        if not hasattr(layer, "quantize_config"):
            yield layer, [], [], [], [layer.quantizer] if layer.quantizer is not None else []
            continue
        before = [one.quantizer for one in layer._quantize_activations if one._should_pre_quantize()]
        after = [one.quantizer for one in layer._quantize_activations if one._should_post_quantize()]
        yield layer.layer, layer._weight_vars, before, after, layer._output_quantizers


@functools.cache
def quantized_pair(build):
    """A network of tf_keras and what `quantize_model` makes of it."""
    model = build(tf_keras)
    return model, theirs.quantize_model(model)


def original_places(build):
    """Where `quantize_model` rounds a network."""
    model, quantized = quantized_pair(build)
    names = _names(model, quantized)
    inputs = iter(model.input_names)
    found = {}
    for layer, weights, before, after, output in quantizers_in(quantized):
        name = names.get(layer.name) or next(inputs)
        for weight, _, variables in weights:
            count = variables["min_var"].shape.num_elements()
            shape = [1] * (weight.shape.rank - 1)
            found[_weight(name, weight.name)] = (*shape, count)
        if before:
            found[_before(name)] = _before(name)
        if after or output:
            found[name] = name
    return found


def _names(model, quantized):
    """Name of each wrapped layer -> name of the tensor that it computes; none for layers that round an input."""
    known = {layer.name for layer in model.layers}
    wrapped = [layer.layer.name for layer in quantized.layers if hasattr(layer, "quantize_config")]
    names = {name: name for name in wrapped if name in known}
    # A separable convolution is replaced by two layers with names of their own.
    replaced = [layer.name for layer in model.layers if isinstance(layer, tf_keras.layers.SeparableConv2D)]
    parts = [tensor for name in replaced for tensor in (_inside(name), name)]
    return names | dict(zip([name for name in wrapped if name not in known], parts, strict=True))


def own_places(build):
    """Where prunekit rounds a network."""
    model = build(keras)
    placement = place(model)
    assert not placement.read and not placement.skipped
    units = [unit for each in placement.units.values() for unit in each]
    names = {id(tensor): unit.name for unit in units for tensor in unit.outputs}
    names |= {id(tensor): tensor.name for tensor in model.inputs}
    found = {}
    for unit in units:
        for weight in unit.weights:
            name, _, label = weight.name.rpartition("/")
            shape = weight.granularity.parameter_shape(tuple(weight.variable.shape))
            found[_weight(_inside(name) if label == "depthwise_kernel" else name, label)] = shape
        for one in (unit.between, unit.before_activation):
            if one is not None:
                found[one.name] = one.name
    for tensor, shared in placement.written.items():
        found[names[tensor]] = names[id(shared.tensors[0])] if shared.signed is None else PRESCRIBED
    return found


def differences(one, other):
    """Names that two mappings do not have with the same value -> both values, None where there is none."""
    return {name: (one.get(name), other.get(name)) for name in {**one, **other} if one.get(name) != other.get(name)}


def _weight(layer, name):
    """Both libraries round kernels alone, and a layer has one."""
    assert "kernel" in name
    return f"{layer}/kernel"


def _inside(layer):
    return f"{layer} (inside)"


def _before(layer):
    return f"{layer} (before its activation)"
