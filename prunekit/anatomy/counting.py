"""How many multiply-accumulates one call of a layer does: the arithmetic to which the table of layer types refers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Shape = tuple[int, ...]

# What a factor of a product comes from: the index of an input of the call, or the name of an attribute of the layer
# (a weight, or a sublayer with weights).
Sources = tuple["int | str", ...]


@dataclass(frozen=True)
class Call:
    """One call of a layer: the tensors that went in, in the order of `call`'s signature, and that came out.

    Attributes:
        inputs: Shapes of the tensors that went in.
        outputs: Shapes of the tensors that came out.
        types: Types of those that went in ("float32", "bool"); empty where they are not known.
    """

    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Product:
    """A product inside a layer that is not one of an activation with a kernel.

    Attributes:
        macs: Its multiply-accumulates in one call; the gradient of either factor needs as many.
        factors: What each of its two factors comes from.
    """

    macs: int
    factors: tuple[Sources, Sources]


@dataclass(frozen=True)
class Steps:
    """An inner layer and the time steps to which another applies it.

    Attributes:
        layer: The inner layer.
        shape: Shape of one step's features, (batch, features ...).
        number: How many steps there are.
        state: For recurrent layers, a function that returns the state before the first step.
    """

    layer: Any
    shape: Shape
    number: int
    state: Callable[[], Any] | None = None


# ---------------------------------------------------------------- uses: MACs per kernel element and call


def per_input_row(layer: Any, call: Call) -> int:
    """All axes of the input but the last."""
    return math.prod(call.inputs[0][:-1])


def per_example(layer: Any, call: Call) -> int:
    """The size of the batch."""
    return call.inputs[0][0]


def _channels(layer: Any, shape: Shape) -> int:
    return shape[-1] if layer.data_format == "channels_last" else shape[1]


def per_output_position(layer: Any, call: Call) -> int:
    """Positions of the output, over the batch."""
    return math.prod(call.outputs[0]) // _channels(layer, call.outputs[0])


def per_input_position(layer: Any, call: Call) -> int:
    """Positions of the input, over the batch."""
    # A transposed convolution spreads every input position over the whole kernel; what padding crops is counted too.
    return math.prod(call.inputs[0]) // _channels(layer, call.inputs[0])


def einsum_labels(layer: Any) -> tuple[str, str, str]:
    """Labels of input, kernel and output of an EinsumDense, spaces removed ("...x", "xy", "...y")."""
    inputs, output = layer.equation.replace(" ", "").split("->")
    data, kernel = inputs.split(",")
    return data, kernel, output


def einsum_uses(layer: Any, call: Call) -> int:
    """Axes of the input that the kernel does not have."""
    data, kernel, _ = einsum_labels(layer)
    shape = call.inputs[0]
    before, dots, after = data.partition("...")
    free = [size for label, size in zip(before, shape, strict=False) if label not in kernel]
    if dots:
        end = len(shape) - len(after)
        free += shape[len(before) : end]
        free += [size for label, size in zip(after, shape[end:], strict=True) if label not in kernel]
    return math.prod(free)


def reversible_uses(layer: Any, call: Call) -> dict[str, int]:
    """Rows of the input of the reverse projection."""
    # A lookup multiplies nothing and adds an axis; the reverse projection keeps the rank.
    rows = math.prod(call.inputs[0][:-1]) if len(call.inputs[0]) == len(call.outputs[0]) else 0
    return {"embeddings": rows} if layer.tie_weights else {"embeddings": 0, "reverse_embeddings": rows}


# ---------------------------------------------------------------- products between activations


def _key(call: Call) -> int:
    """Which input is the key: the third where it is one, and no mask; else the value."""
    return 2 if len(call.types) > 2 and "float" in call.types[2] else 1


def _attended(scores: int, sums: int, query: Sources, key: Sources, value: Sources) -> tuple[Product, ...]:
    """Scores (query times key) and the sum of the values that they weigh."""
    return Product(scores, (query, key)), Product(sums, ((*query, *key), value))


def attention_products(layer: Any, call: Call) -> tuple[Product, ...]:
    """Scores (queries x values x width) plus the weighted sum of the values."""
    query, value = call.inputs[0], call.inputs[1]
    pairs = math.prod(query[:-1]) * value[-2]
    # Scores of the mode "concat" are sums of activations, without a product.
    scores = pairs * query[-1] if layer.score_mode == "dot" else 0
    sums = Product(pairs * value[-1], ((0, _key(call), "scale", "concat_score_weight"), (1,)))
    return Product(scores, ((0,), (_key(call),))), sums


def additive_attention_products(layer: Any, call: Call) -> tuple[Product, ...]:
    """Scores (scale times tanh of each pair's sum) plus the weighted sum of the values."""
    query, value = call.inputs[0], call.inputs[1]
    pairs = math.prod(query[:-1]) * value[-2]
    return _attended(pairs * query[-1], pairs * value[-1], ("scale",), (0, _key(call)), (1,))


def _projected(scores: int, sums: int, call: Call) -> tuple[Product, ...]:
    query, key, value = (0, "_query_dense"), (_key(call), "_key_dense"), (1, "_value_dense")
    return _attended(scores, sums, query, key, value)


def multi_head_products(layer: Any, call: Call) -> tuple[Product, ...]:
    """The two products of every head, between projections."""
    query, value = call.inputs[0], call.inputs[1]
    axes = [axis % len(query) for axis in layer._attention_axes]
    pairs = layer._num_heads * math.prod(query[:-1]) * math.prod(value[axis] for axis in axes)
    return _projected(pairs * layer._key_dim, pairs * layer._value_dim, call)


def group_query_products(layer: Any, call: Call) -> tuple[Product, ...]:
    """The two products of every query head; heads that share a key multiply with it one by one."""
    query, value = call.inputs[0], call.inputs[1]
    each = layer.num_query_heads * math.prod(query[:-1]) * value[1] * layer.head_dim
    return _projected(each, each, call)


def dot_products(layer: Any, call: Call) -> tuple[Product, ...]:
    """The contraction of the two inputs."""
    axis = layer.axes if isinstance(layer.axes, int) else layer.axes[0]
    return (Product(math.prod(call.outputs[0]) * call.inputs[0][axis], ((0,), (1,))),)
