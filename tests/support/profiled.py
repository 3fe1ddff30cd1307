"""Multiply-accumulates of TensorFlow graphs: from the shapes of operands, and by TensorFlow's profiler.

Knows nothing of layers. It walks the operations that a result depends on, through function calls and loops, and finds
every matrix product, einsum and convolution, those in the body of a loop as often as the loop runs.
"""

import math
from collections import Counter

import tensorflow as tf
from tensorflow.python.ops import while_v2

LOOPS = ("While", "StatelessWhile")
CALLS = ("PartitionedCall", "StatefulPartitionedCall")


def _matrix_product(operation):
    attributes = operation.node_def.attr
    transposed = attributes["transpose_a"].b or attributes["adj_x"].b
    return math.prod(operation.outputs[0].shape) * operation.inputs[0].shape[-2 if transposed else -1]


def _einsum(operation):
    labels = operation.get_attr("equation").decode().split("->")[0].split(",")
    sizes = {}
    for names, tensor in zip(labels, operation.inputs, strict=True):
        before, dots, after = names.partition("...")
        shape = tensor.shape.as_list()
        end = len(shape) - len(after)
        sizes |= dict(zip(before, shape, strict=False)) | dict(zip(after, shape[end:], strict=True))
        if dots:
            sizes["..."] = max(math.prod(shape[len(before) : end]), sizes.get("...", 1))
    return math.prod(sizes.values()) if len(labels) == 2 else 0  # with one operand it only transposes or sums


def _convolution(find):
    """At every position of the side that a stride makes small, each element of the kernel is used once."""

    def count(operation):
        result, kernel = find(operation)
        channels = result.shape[1 if operation.get_attr("data_format").startswith(b"NC") else -1]
        return math.prod(result.shape) // channels * math.prod(kernel.shape)

    return count


_forward = _convolution(lambda operation: (operation.outputs[0], operation.inputs[1]))
_to_inputs = _convolution(lambda operation: (operation.inputs[2], operation.inputs[1]))
_to_filter = _convolution(lambda operation: (operation.inputs[2], operation.outputs[0]))
CONTRACTIONS = {
    "MatMul": _matrix_product,
    "BatchMatMulV2": _matrix_product,
    "Einsum": _einsum,
    "Conv2D": _forward,
    "Conv2DBackpropInput": _to_inputs,
    "Conv2DBackpropFilter": _to_filter,
    "Conv3D": _forward,
    "Conv3DBackpropInputV2": _to_inputs,
    "Conv3DBackpropFilterV2": _to_filter,
    "DepthwiseConv2dNative": _forward,
    "DepthwiseConv2dNativeBackpropInput": _to_inputs,
    "DepthwiseConv2dNativeBackpropFilter": _to_filter,
}


def macs_of(operations, kinds=CONTRACTIONS):
    """Multiply-accumulates of {operation: times}, from shapes."""
    return sum(times * kinds[operation.type](operation) for operation, times in operations.items())


# ---------------------------------------------------------------- what a result depends on


def contractions(concrete_function, steps=1, kinds=CONTRACTIONS):
    """{operation: times} of what the function's results depend on; every loop runs `steps` times."""
    found = Counter()
    graph = concrete_function.graph
    _visit(graph, {tensor.name for tensor in graph.outputs}, steps, 1, found)
    others = {operation.type for operation in found} - CONTRACTIONS.keys()
    assert not [kind for kind in others if "Conv" in kind or "MatMul" in kind]
    return {operation: times for operation, times in found.items() if operation.type in kinds}


def _visit(graph, live, steps, times, found):
    """Adds the operations that the live tensors depend on; returns the names of everything live."""
    live = set(live)
    for operation in reversed(graph.get_operations()):
        wanted = [index for index, tensor in enumerate(operation.outputs) if tensor.name in live]
        if not wanted:
            continue
        if operation.type in LOOPS:
            wanted = _visit_loop(operation, wanted, steps, times, found)
        elif operation.type in CALLS:
            wanted = _visit_call(operation, wanted, steps, times, found)
        else:
            found[operation] += times
            wanted = range(len(operation.inputs))
        live.update(operation.inputs[index].name for index in wanted)
    return live


def _visit_call(operation, wanted, steps, times, found):
    inner = operation.graph._get_function(operation.get_attr("f").name).graph
    live = _visit(inner, {inner.outputs[index].name for index in wanted}, steps, times, found)
    return [index for index, tensor in enumerate(inner.inputs) if tensor.name in live]


def _visit_loop(operation, wanted, steps, times, found):
    """What a variable of the loop needs in one step, it needs in the next: repeated until nothing is added."""
    condition = while_v2._get_graph(operation, "cond", "_cond_graph")
    body = while_v2._get_graph(operation, "body", "_body_graph")
    tested = _visit(condition, {condition.outputs[0].name}, steps, 0, Counter())
    needed = set(wanted) | {index for index, tensor in enumerate(condition.inputs) if tensor.name in tested}
    while True:
        inside = Counter()
        live = _visit(body, {body.outputs[index].name for index in needed}, steps, times * steps, inside)
        grown = needed | {index for index, tensor in enumerate(body.inputs) if tensor.name in live}
        if grown == needed:
            found.update(inside)
            return sorted(needed)
        needed = grown


# ---------------------------------------------------------------- TensorFlow's own figures


PROFILED = {
    "MatMul",
    "BatchMatMulV2",
    "Conv2D",
    "Conv2DBackpropInput",
    "Conv2DBackpropFilter",
    "Conv3D",
    "DepthwiseConv2dNative",
}


def profiled(graph):
    """{name of an operation: FLOPs} of one graph by TensorFlow's profiler; what is called from it is not in it."""
    options = tf.compat.v1.profiler.ProfileOptionBuilder(tf.compat.v1.profiler.ProfileOptionBuilder.float_operation())
    figures, pending = {}, [tf.compat.v1.profiler.profile(graph, options=options.with_empty_output().build())]
    while pending:
        node = pending.pop()
        figures[node.name] = node.float_ops
        pending.extend(node.children)
    return figures


def flops_by_formula(operation):
    """FLOPs by the formula of the profiler, which is exact but for two kinds of operations."""
    flops = 2 * CONTRACTIONS[operation.type](operation)
    if operation.type == "BatchMatMulV2" and operation.get_attr("adj_x"):
        # It sums over the last axis of the first operand, transposed or not.
        shape = operation.inputs[0].shape
        return flops // shape[-2] * shape[-1]
    if operation.type in ("Conv2DBackpropInput", "Conv2DBackpropFilter"):
        # It divides the positions of the side that the stride leaves large by the strides, where the other side's are
        # meant: the same for "same" padding and strides that divide the size.
        to_inputs = operation.type == "Conv2DBackpropInput"
        large, kernel = (
            (operation.outputs[0], operation.inputs[1])
            if to_inputs
            else (
                operation.inputs[0],
                operation.outputs[0],
            )
        )
        positions = math.prod(large.shape) // large.shape[-1]
        return int(2 * positions * math.prod(kernel.shape) / math.prod(operation.get_attr("strides")))
    return flops
