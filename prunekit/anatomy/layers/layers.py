"""The table of layer types: each type's weights, their input and output axes, and how often a call uses them.

Lookup follows the method resolution order: a subclass of Dense has the row of Dense. To prune a new layer type, add a
row here or call `register_layer`; what removal and integers do with a type stands in tables of their own
(`channel_layers.py`, `linear_kinds.py`, `placement/rules.py`). The rows of KerasHub's layers are in
`keras_hub_layers.py`.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any

import keras

from prunekit.anatomy.layers import counting, keras_hub_layers
from prunekit.anatomy.layers.counting import LayerShapes, Product, Shape, Sources, TimeSteps
from prunekit.anatomy.layers.layer_rows import (
    BIAS,
    DEPTHWISE,
    EMBEDDING,
    KERNEL,
    NORM,
    NORM_STATE,
    OTHER,
    OTHER_STATE,
    RECURRENT,
    SLOPE,
    TRANSPOSED,
    LayerRow,
    Uses,
    Weights,
)
from prunekit.anatomy.layers.weight_spec import WeightSpec


def _einsum_kernel(layer: Any) -> WeightSpec:
    data, kernel, output = counting.einsum_labels(layer)
    return WeightSpec(
        "kernel",
        in_axes=tuple(axis for axis, label in enumerate(kernel) if label in data and label not in output),
        out_axes=tuple(axis for axis, label in enumerate(kernel) if label in output and label not in data),
        parallel_axes=tuple(axis for axis, label in enumerate(kernel) if label in output and label in data),
    )


def _convolution_kernel(layer: Any) -> WeightSpec:
    return WeightSpec("kernel", (-2,), (-1,), groups=layer.groups)


# ---------------------------------------------------------------- the table

_L = keras.layers


def _types(*names: str) -> Iterator[type]:
    """The layer classes among `names` that the installed Keras version exports."""
    return (getattr(_L, name) for name in names if hasattr(_L, name))


def _base(layer_type: type, name: str) -> type:
    """The base class of a public layer that Keras itself does not export (BaseConv ...)."""
    return next(base for base in layer_type.__mro__ if base.__name__ == name)


def _cell(layer_type: type) -> type:
    """The cell class behind ConvLSTM layers, which Keras does not export."""
    return inspect.getmodule(_base(layer_type, "ConvLSTM")).ConvLSTMCell  # type: ignore[union-attr]


def _first_table() -> dict[type, LayerRow]:
    kernel_and_bias: Weights = {"kernel": KERNEL, "bias": BIAS}
    recurrent: Weights = {"kernel": KERNEL, "recurrent_kernel": RECURRENT, "bias": BIAS}
    table = {
        _L.Dense: LayerRow(kernel_and_bias, counting.per_input_row),
        _L.EinsumDense: LayerRow({"kernel": _einsum_kernel, "bias": BIAS}, counting.einsum_uses),
        _base(_L.Conv2D, "BaseConv"): LayerRow(
            {"kernel": _convolution_kernel, "bias": BIAS}, counting.per_output_position
        ),
        _base(_L.Conv2DTranspose, "BaseConvTranspose"): LayerRow(
            {"kernel": TRANSPOSED, "bias": BIAS}, counting.per_input_position
        ),
        _base(_L.DepthwiseConv2D, "BaseDepthwiseConv"): LayerRow(
            {"kernel": DEPTHWISE, "bias": BIAS}, counting.per_output_position
        ),
        _base(_L.SeparableConv2D, "BaseSeparableConv"): LayerRow(
            {"depthwise_kernel": DEPTHWISE, "pointwise_kernel": KERNEL, "bias": BIAS}, counting.per_output_position
        ),
        _L.Embedding: LayerRow({"embeddings": EMBEDDING}),
        _cell(_L.ConvLSTM2D): LayerRow(recurrent, counting.per_output_position),
        _L.BatchNormalization: LayerRow(
            {"gamma": NORM, "beta": NORM}
            | dict.fromkeys(
                ("moving_mean", "moving_variance", "moving_stddev", "renorm_mean", "renorm_stddev"), NORM_STATE
            )
        ),
        _L.SpectralNormalization: LayerRow({"vector_u": NORM_STATE}),
        _L.Normalization: LayerRow(dict.fromkeys(("adapt_mean", "adapt_variance", "count"), NORM_STATE)),
        _L.PReLU: LayerRow({"alpha": SLOPE}),
        _L.Attention: LayerRow({"scale": OTHER, "concat_score_weight": OTHER}, products=counting.attention_products),
        _L.AdditiveAttention: LayerRow({"scale": OTHER}, products=counting.additive_attention_products),
        _L.MultiHeadAttention: LayerRow({}, products=counting.multi_head_products),
        _L.GroupQueryAttention: LayerRow({}, products=counting.group_query_products),
        _L.Dot: LayerRow({}, products=counting.dot_products),
        _L.STFTSpectrogram: LayerRow({"real_kernel": OTHER_STATE, "imag_kernel": OTHER_STATE}, counted=False),
        _L.MelSpectrogram: LayerRow({}, counted=False),
    }
    table |= {
        cell: LayerRow(recurrent, counting.per_example) for cell in _types("SimpleRNNCell", "GRUCell", "LSTMCell")
    }
    table |= {layer: LayerRow({"gamma": NORM, "beta": NORM}) for layer in _types("LayerNormalization")}
    table |= {layer: LayerRow({"gamma": NORM, "beta": NORM}) for layer in _types("GroupNormalization")}
    table |= {layer: LayerRow({"scale": NORM}) for layer in _types("RMSNormalization")}
    # ConvNeXt scales the channels of its branches; Keras does not export the layer.
    scale = getattr(inspect.getmodule(keras.applications.ConvNeXtTiny), "LayerScale", None)
    table |= {} if scale is None else {scale: LayerRow({"gamma": NORM})}
    table |= {
        layer: LayerRow({"reverse_embeddings": WeightSpec("kernel")}, counting.reversible_uses)
        for layer in _types("ReversibleEmbedding")
    }
    return table


_TABLE: dict[type, LayerRow] = _first_table()


def register_layer(layer_type: type, /, *, uses: Uses | None = None, **weights: WeightSpec) -> None:
    """Adds a layer type to prunekit's table, as in `register_layer(MyDense, kernel=WeightSpec())`.

    Args:
        layer_type: A subclass of `keras.layers.Layer`; its subclasses inherit the table row.
        uses: Function (layer, Call) -> number of multiply-accumulates per kernel element in that call, for `pk.cost`:
            one int, or a dict {attribute: int}. None: an inherited function is used; without an inherited function the
            layer's MACs are reported as unknown. `pk.cost` assumes that the first kernel multiplies the inputs, and
            each later kernel the result of the kernels before it.
        **weights: Attribute name on the layer (without leading underscore) to its `WeightSpec`.

    Raises:
        TypeError: `layer_type` is not a subclass of `keras.layers.Layer`, or a weight's value is not a `WeightSpec`.
    """
    if not (isinstance(layer_type, type) and issubclass(layer_type, keras.layers.Layer)):
        raise TypeError(f"register_layer describes a subclass of keras.layers.Layer. Received: {layer_type!r}.")
    for name, spec in weights.items():
        if not isinstance(spec, WeightSpec):
            raise TypeError(f"register_layer takes a WeightSpec for each weight. Received: {name}={spec!r}.")
    specs = {name.lstrip("_"): spec for name, spec in weights.items()}
    _TABLE[layer_type] = LayerRow(MappingProxyType(specs), uses)


# ---------------------------------------------------------------- looking up


def _rows(layer: Any) -> Iterator[LayerRow]:
    return (row for row in map(_row_of, type(layer).__mro__) if row is not None)


def _row_of(layer_type: type) -> LayerRow | None:
    """The row of a class itself, not of its base classes; a registered row has priority over prunekit's own."""
    row = _TABLE.get(layer_type)
    if row is None and layer_type.__module__.partition(".")[0] == keras_hub_layers.PACKAGE:
        return keras_hub_layers.ROWS.get(layer_type.__name__)
    return row


def sublayers(layer: Any) -> list[Any]:
    """The layers directly inside `layer`, each once, in the order in which they were attached."""
    # Keras has no public list of the sublayers of a layer that is not a Model.
    return layer._flatten_layers(include_self=False, recursive=False)


_BOOKKEEPING = ("_trainable_variables", "_non_trainable_variables", "_tracked")


def own_variables(layer: Any) -> list[tuple[Any, str, str]]:
    """(variable, attribute, label) of the weights that belong to `layer` and to none of its sublayers.

    `attribute` has no leading underscore; `label` adds the index or key where the attribute is a list or dict. Metrics
    and the state of random seeds are not weights.
    """
    inner = {id(variable) for child in sublayers(layer) for variable in child.weights}
    owned = [variable for variable in layer.weights if id(variable) not in inner]
    if not owned:
        return []
    names: dict[int, tuple[str, str]] = {}
    unnamed = {id(variable) for variable in owned}
    # Plain attributes first: Keras and TensorFlow also store the same variables in internal lists and dicts.
    for attribute, value in sorted(vars(layer).items(), key=lambda item: not isinstance(item[1], keras.Variable)):
        if not unnamed:
            break
        if attribute in _BOOKKEEPING or attribute.startswith("_self_"):
            continue
        for variable, suffix in leaves_of(value, keras.Variable):
            names.setdefault(id(variable), (attribute.lstrip("_"), attribute.lstrip("_") + suffix))
            unnamed.discard(id(variable))
    return [(variable, *names.get(id(variable), (variable.name, variable.name))) for variable in owned]


def leaves_of(value: Any, kind: Any, suffix: str = "") -> Iterator[tuple[Any, str]]:
    """(leaf, "_index_key...") of each object of the type `kind` in a value, or in lists and dicts of them."""
    if isinstance(value, kind):
        yield value, suffix
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            yield from leaves_of(item, kind, f"{suffix}_{index}")
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from leaves_of(item, kind, f"{suffix}_{key}")


def spec_of(layer: Any, attribute: str, variable: Any, label: str = "") -> WeightSpec:
    """The `WeightSpec` of one weight, axes counted from the start; role "unknown" for a weight without a row."""
    shape = weight_shape(layer, attribute, variable)
    where = f"{label or attribute!r} of {type(layer).__name__} {layer.name!r}"
    for row in _rows(layer):
        spec = row.weights.get(attribute)
        if spec is not None:
            return (spec if isinstance(spec, WeightSpec) else spec(layer)).at(shape, where)
    rank = len(shape)
    return WeightSpec("unknown", tuple(range(rank - 1)), tuple(range(rank))[-1:], prunable=False)


# For layers quantized to int4 by Keras: the axis along which a variable stores two weights per byte.
_PACKED_AXES = {"kernel": -1, "embeddings": -1, "reverse_embeddings": 0}


def _is_packed(layer: Any, attribute: str) -> bool:
    return getattr(layer, "quantization_mode", None) == "int4" and attribute in _PACKED_AXES


def weight_shape(layer: Any, attribute: str, variable: Any) -> Shape:
    """Shape of the weights in a variable: the variable's shape, except for int4, which packs two weights per byte."""
    shape = tuple(variable.shape)
    if not _is_packed(layer, attribute):
        return shape
    # EinsumDense packs its kernel as a matrix.
    whole = getattr(layer, "original_kernel_shape", None)
    if whole is not None:
        return tuple(whole)
    axis = _PACKED_AXES[attribute]
    return (*shape[:-1], layer._orig_output_dim) if axis == -1 else (layer._orig_output_dim, *shape[1:])


def weight_values(layer: Any, attribute: str, variable: Any) -> Any:
    """The weights in a variable as a tensor of shape `weight_shape`; integers for int4."""
    stored = keras.ops.convert_to_tensor(variable)
    if not _is_packed(layer, attribute):
        return stored
    length = getattr(layer, "_int4_unpacked_column_size", None) or layer._orig_output_dim
    values = keras.quantizers.unpack_int4(stored, length, axis=_PACKED_AXES[attribute])
    zero = getattr(layer, f"{attribute}_zero", None)
    if zero is not None:
        # Group-wise quantization: each group has its own zero point.
        groups = keras.ops.cast(layer.g_idx, "int32")
        values = keras.ops.cast(values, "int32") - keras.ops.cast(
            keras.ops.take(zero, groups, axis=-1 if attribute == "embeddings" else 0), "int32"
        )
    return keras.ops.reshape(values, weight_shape(layer, attribute, variable))


def weights_of(layer: Any) -> list[tuple[Any, str, WeightSpec]]:
    """(variable, name, spec) of the weights that belong to `layer` itself, not to its sublayers."""
    return [
        (variable, label, spec_of(layer, attribute, variable, label))
        for variable, attribute, label in own_variables(layer)
    ]


def owns_kernels(layer: Any) -> bool:
    """Whether layers of this type own weights that are pruned by default, built or not."""
    return any(
        spec.prunable if isinstance(spec, WeightSpec) else True for row in _rows(layer) for spec in row.weights.values()
    )


def makes_weights(layer: Any) -> bool:
    """Whether building `layer` creates weights in it: its table row lists weights, or its class defines `build`."""
    builder = next(base for base in type(layer).__mro__ if "build" in vars(base))
    return owns_kernels(layer) or builder.__module__.split(".")[0] != "keras"


def draws_random_numbers(layer: Any) -> bool:
    """Whether `layer` itself draws random numbers in training: it has a seed generator and no rate of 0.

    A seed generator alone is no proof: recurrent cells without dropout and `Dropout(0)` also have a seed generator.
    """
    if not any(isinstance(value, keras.random.SeedGenerator) for value in vars(layer).values()):
        return False
    rates = [getattr(layer, name, None) for name in ("rate", "stddev", "dropout", "recurrent_dropout")]
    given = [rate for rate in rates if rate is not None]
    return not given or any(given)


def refusal(layer: Any) -> str:
    """The reason why no weight of `layer` may be pruned in its current state; "" if pruning is allowed."""
    if getattr(layer, "lora_enabled", False):
        return (
            "LoRA is enabled on the layer: the effective kernel is kernel + A B, whose zeros training fills again; "
            "prune before enabling LoRA"
        )
    mode = getattr(layer, "quantization_mode", None)
    if mode is not None:
        return f"the layer is quantized ({mode}); prune before quantizing: quantization keeps zeros"
    return ""


def cell_of(layer: Any) -> Any | None:
    """The cell of an RNN layer, whose weights are reported as the RNN's weights; None for other layers."""
    return layer.cell if isinstance(layer, keras.layers.RNN) else None


# ---------------------------------------------------------------- multiply-accumulates


def macs(layer: Any, call: LayerShapes) -> tuple[dict[str, int], tuple[Product, ...]] | None:
    """(uses per attribute, products) of one call of `layer` itself, without its sublayers; None if unknown.

    An attribute's MACs are its uses times its size; `products` are the products between activations. Biases,
    normalisation, activations and pooling have zero MACs.
    """
    rows = list(_rows(layer))
    if not all(row.counted for row in rows):
        return None
    own = [(attribute, spec_of(layer, attribute, variable)) for variable, attribute, _ in own_variables(layer)]
    if any(spec.role == "unknown" for _, spec in own):
        return None
    count = next((row.products for row in rows if row.products is not None), None)
    products = count(layer, call) if count is not None else ()
    kernels = [attribute for attribute, spec in own if spec.prunable or spec.role == "depthwise_kernel"]
    uses = next((row.uses for row in rows if row.uses is not None), None)
    if uses is None:
        counted = all(spec.role == "embedding" for attribute, spec in own if attribute in kernels)
        return ({}, products) if counted else None
    each = uses(layer, call)
    if isinstance(each, int):
        return dict.fromkeys(kernels, each), products
    return dict(each), products


def takes_part_in_products(layer: Any, spec: WeightSpec) -> bool:
    """Returns False if a weight never multiplies, whatever the sizes: biases, scales, lookup tables."""
    if spec.role == "embedding":
        return any(row.uses is not None for row in _rows(layer))
    return spec.prunable or spec.role in ("depthwise_kernel", "unknown")


def multiplied_by(layer: Any, uses: Mapping[str, int]) -> dict[str, Sources]:
    """For each kernel in `uses`, the sources of the activations that the kernel multiplies in a call of `layer`.

    The first kernel multiplies the inputs, a later kernel the result of the kernels before it; a recurrent kernel
    multiplies the state.
    """
    found: dict[str, Sources] = {}
    for variable, attribute, _ in own_variables(layer):
        if uses.get(attribute):
            recurrent = spec_of(layer, attribute, variable).role == "recurrent_kernel"
            found[attribute] = (1,) if recurrent else (0, *found)
    return found


def is_repeater(layer: Any) -> bool:
    """Whether `layer` applies an inner layer to every time step."""
    return isinstance(layer, keras.layers.TimeDistributed | keras.layers.RNN)


def steps_of(layer: Any, call: LayerShapes) -> TimeSteps | None:
    """The time steps of a layer that applies an inner layer to every time step; None for other layers."""
    if not is_repeater(layer):
        return None
    batch, number, *features = call.inputs[0]
    if isinstance(layer, keras.layers.TimeDistributed):
        return TimeSteps(layer.layer, (batch, *features), number)

    def state() -> list[Any]:
        states = layer.get_initial_state(batch)
        return list(states) if isinstance(states, list | tuple) else [states]

    return TimeSteps(layer.cell, (batch, *features), number, state)
