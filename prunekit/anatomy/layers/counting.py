"""Formulas for the multiply-accumulates of one layer call, to which the table of layer types refers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]

# Sources of a factor of a product: indices of inputs of the call, or names of attributes of the layer (a weight, or a
# sublayer with weights).
Sources = tuple["int | str", ...]


@dataclass(frozen=True)
class LayerShapes:
    """Shapes of one layer call: inputs in the order of `call`'s signature, and outputs.

    Attributes:
        inputs: Shapes of the input tensors.
        outputs: Shapes of the output tensors.
        types: Dtypes of the input tensors ("float32", "bool"); empty if unknown.
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Product:
    """A product inside a layer, other than that of an activation with a kernel.

    Attributes:
        macs: Multiply-accumulates of the product in one call; the gradient of each factor needs the same number.
        factors: Sources of each of its two factors.
    """

    macs: int
    factors: tuple[Sources, Sources]


@dataclass(frozen=True)
class TimeSteps:
    """An inner layer, and the time steps to which an outer layer applies it.

    Attributes:
        layer: The inner layer.
        shape: Shape of one step's features, (batch, features ...).
        number: Number of time steps.
        state: For recurrent layers, a function that returns the state before the first step.
    """

    layer: Any
    shape: Shape
    number: int
    state: Callable[[], Any] | None = None


# ---------------------------------------------------------------- uses: MACs per kernel element and call


def per_input_row(layer: Any, call: LayerShapes) -> int:
    """Returns the product of the lengths of all input axes except the last."""
    return math.prod(call.inputs[0][:-1])


def per_example(layer: Any, call: LayerShapes) -> int:
    """Returns the batch size."""
    return call.inputs[0][0]


def _channels(layer: Any, shape: Shape) -> int:
    return shape[-1] if layer.data_format == "channels_last" else shape[1]


def per_output_position(layer: Any, call: LayerShapes) -> int:
    """Returns the number of output positions in the whole batch."""
    return math.prod(call.outputs[0]) // _channels(layer, call.outputs[0])


def per_input_position(layer: Any, call: LayerShapes) -> int:
    """Returns the number of input positions in the whole batch."""
    # A transposed convolution spreads every input position over the whole kernel; cropped outputs are counted too.
    return math.prod(call.inputs[0]) // _channels(layer, call.inputs[0])


def einsum_labels(layer: Any, equation: str | None = None) -> tuple[str, str, str]:
    """Returns the labels of input, kernel and output of an EinsumDense, without spaces ("...x", "xy", "...y").

    Args:
        layer: The layer.
        equation: Another equation; None = the layer's own.
    """
    inputs, output = (equation or layer.equation).replace(" ", "").split("->")
    data, kernel = inputs.split(",")
    return data, kernel, output


@dataclass(frozen=True)
class EinsumAxes:
    """The axes of an EinsumDense by what they are for, as labels.

    Attributes:
        data: Those of the inputs.
        kernel: Those of the kernel.
        output: Those of the outputs.
        rows: In inputs and outputs alone: each of their indices is computed by the same kernel.
        groups: In all three: each index has a kernel of its own.
        inputs: Summed over.
        outputs: In kernel and outputs alone.
    """

    data: str
    kernel: str
    output: str
    rows: str
    groups: str
    inputs: str
    outputs: str


def einsum_axes(layer: Any, rank: int) -> EinsumAxes | None:
    """Returns the axes of an EinsumDense; None if it sums over other axes than those of matrix products.

    Args:
        layer: The layer.
        rank: Number of axes of its inputs.
    """
    data, kernel, output = einsum_labels(layer)
    spare = [one for one in "ABCDEFGHIJKLMNOPQRSTUVWXYZ" if one not in layer.equation]
    between = "".join(spare[: rank - len(data.replace("...", ""))])
    data, output = data.replace("...", between), output.replace("...", between)
    if any(len(set(labels)) < len(labels) for labels in (data, kernel, output)):
        return None
    rows = "".join(one for one in data if one not in kernel)
    groups = "".join(one for one in data if one in kernel and one in output)
    inputs = "".join(one for one in data if one in kernel and one not in output)
    outputs = "".join(one for one in output if one not in data)
    complete = set(output) == {*rows, *groups, *outputs} and set(kernel) == {*groups, *inputs, *outputs}
    return EinsumAxes(data, kernel, output, rows, groups, inputs, outputs) if complete and inputs else None


def einsum_uses(layer: Any, call: LayerShapes) -> int:
    """Returns the product of the lengths of the input axes that the kernel does not have."""
    data, kernel, _ = einsum_labels(layer)
    shape = call.inputs[0]
    before, dots, after = data.partition("...")
    free = [size for label, size in zip(before, shape, strict=False) if label not in kernel]
    if dots:
        end = len(shape) - len(after)
        free += shape[len(before) : end]
        free += [size for label, size in zip(after, shape[end:], strict=True) if label not in kernel]
    return math.prod(free)


def reversible_uses(layer: Any, call: LayerShapes) -> dict[str, int]:
    """Returns the input rows of the reverse projection; 0 for a lookup."""
    # A lookup multiplies nothing and adds an axis; the reverse projection keeps the rank.
    rows = math.prod(call.inputs[0][:-1]) if len(call.inputs[0]) == len(call.outputs[0]) else 0
    return {"embeddings": rows} if layer.tie_weights else {"embeddings": 0, "reverse_embeddings": rows}


# ---------------------------------------------------------------- products between activations


def _key(call: LayerShapes) -> int:
    """Returns the index of the key input: the third input if it is a key and not a mask, else the value's."""
    return 2 if len(call.types) > 2 and "float" in call.types[2] else 1


def _attended(scores: int, sums: int, query: Sources, key: Sources, value: Sources) -> tuple[Product, ...]:
    """Returns two products: scores (query times key), and the sum of the values weighted by the scores."""
    return Product(scores, (query, key)), Product(sums, ((*query, *key), value))


def attention_products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
    """Returns the products of the scores (queries x values x width) and of the weighted sum of the values."""
    query, value = call.inputs[0], call.inputs[1]
    pairs = math.prod(query[:-1]) * value[-2]
    # In the mode "concat" scores are sums of activations, without a product.
    scores = pairs * query[-1] if layer.score_mode == "dot" else 0
    sums = Product(pairs * value[-1], ((0, _key(call), "scale", "concat_score_weight"), (1,)))
    return Product(scores, ((0,), (_key(call),))), sums


def additive_attention_products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
    """Returns the products of the scores (scale times tanh of each pair's sum) and of the weighted sum of values."""
    query, value = call.inputs[0], call.inputs[1]
    pairs = math.prod(query[:-1]) * value[-2]
    return _attended(pairs * query[-1], pairs * value[-1], ("scale",), (0, _key(call)), (1,))


def _projected(scores: int, sums: int, call: LayerShapes) -> tuple[Product, ...]:
    query, key, value = (0, "_query_dense"), (_key(call), "_key_dense"), (1, "_value_dense")
    return _attended(scores, sums, query, key, value)


def multi_head_products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
    """Returns the two products between activations of all heads, without the projections."""
    query, value = call.inputs[0], call.inputs[1]
    axes = [axis % len(query) for axis in layer._attention_axes]
    pairs = layer._num_heads * math.prod(query[:-1]) * math.prod(value[axis] for axis in axes)
    return _projected(pairs * layer._key_dim, pairs * layer._value_dim, call)


def group_query_products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
    """Returns the two products of all query heads; each of the heads that share a key multiplies with it."""
    query, value = call.inputs[0], call.inputs[1]
    each = layer.num_query_heads * math.prod(query[:-1]) * value[1] * layer.head_dim
    return _projected(each, each, call)


def dot_products(layer: Any, call: LayerShapes) -> tuple[Product, ...]:
    """Returns the product that contracts the two inputs."""
    axis = layer.axes if isinstance(layer.axes, int) else layer.axes[0]
    return (Product(math.prod(call.outputs[0]) * call.inputs[0][axis], ((0,), (1,))),)
