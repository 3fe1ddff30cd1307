"""Predicts from a sparse-encoded LiteRT file how XNNPACK computes it on ARM64 and in WebAssembly.

XNNPACK runs sparse 1x1 convolutions channels-first (NCHW). The decision to switch a graph to NCHW is made in
`xnn_subgraph_rewrite_for_nchw`. That pass also switches graphs in which a tensor leaves the channels-first part
through an operator that cannot convert the layout back; such a file silently computes wrong numbers. Processors with
AVX never switch, so a run on x86 does not reveal the error. This module repeats the decision on the file's graph and
predicts the result. It needs neither TensorFlow nor Keras and works for any model that converts.

Source: google/XNNPACK, src/subgraph.c (`xnn_check_nchw_compatibility`, `xnn_subgraph_rewrite_for_nchw`) and
tensorflow/lite/delegates/xnnpack/xnnpack_delegate.cc (a partition asks for sparse inference if one of its operators
reads a tensor that was sparse-encoded in the file).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

# Operators that the XNNPACK delegate supports (its `VisitNode`); any other operator splits the graph.
_UNARY = frozenset(
    "ABS CEIL ELU EXP FLOOR GELU HARD_SWISH LEAKY_RELU LOG LOGISTIC NEG RELU RELU6 RELU_N1_TO_1 ROUND RSQRT SIGN SQRT "
    "SQUARE TANH COS SIN".split()
)
_DELEGATED = _UNARY | frozenset(
    "ADD AVERAGE_POOL_2D BATCH_MATMUL CONCATENATION CONV_2D DEPTH_TO_SPACE DEPTHWISE_CONV_2D DEQUANTIZE DENSIFY DIV "
    "EXPAND_DIMS FULLY_CONNECTED MAX_POOL_2D MAXIMUM MEAN MINIMUM MUL PAD PADV2 PRELU QUANTIZE REDUCE_MAX REDUCE_MIN "
    "RESHAPE RESIZE_BILINEAR SLICE SOFTMAX SPACE_TO_DEPTH SPLIT SQUARED_DIFFERENCE STRIDED_SLICE SUB SUM TRANSPOSE "
    "TRANSPOSE_CONV".split()
)
_FLOATS = {0: np.float32, 1: np.float16}
_SAME = 0
_THERE = "wrong numbers on ARM64 and in WebAssembly, though x86 is right:"


@dataclass(frozen=True)
class Verdict:
    """XNNPACK's behaviour for one file on platforms with sparse kernels (ARM64, WebAssembly).

    Attributes:
        sparse_tensors: Number of constants that are sparse-encoded in the file.
        blocks: Number of sparse-encoded constants whose stored unit is a block of weights.
        switched: True if some convolutions run sparse.
        wrong: Reason why the file fails or computes wrong numbers; None if no reason is known.
        zero_fraction: Fraction of zeros over all 1x1 convolutions together; None without 1x1 convolutions.
    """

    sparse_tensors: int
    blocks: int
    switched: bool
    wrong: str | None
    zero_fraction: float | None


@dataclass
class _Node:
    """XNNPACK operator; `inputs` and `outputs` are tensors computed at run time, `weights` is a constant filter."""

    kind: str
    inputs: list[int]
    outputs: list[int]
    name: str
    part: int
    constants: list[int] = field(default_factory=list)
    weights: int | None = None
    options: Any = None
    padding: tuple[int, int, int, int] | None = (0, 0, 0, 0)  # top, bottom, left, right; None = decided at run time
    nchw: bool = False  # can compute on channels-first
    enters: bool = False  # reads channels-last, can write channels-first
    leaves: bool = False  # reads channels-first, can write channels-last
    incompatible: bool = False
    leader: int = 0
    weights_total: int = 0
    weights_zero: int = 0


class _File:
    """Main graph of a LiteRT flatbuffer; constants are resolved through DENSIFY and DEQUANTIZE."""

    def __init__(self, content: bytes) -> None:
        from ai_edge_litert import schema_py_generated as schema

        model = schema.ModelT.InitFromPackedBuf(content, 0)
        names = {value: name for name, value in vars(schema.BuiltinOperator).items() if isinstance(value, int)}
        codes = [names.get(max(c.builtinCode, c.deprecatedBuiltinCode), "CUSTOM") for c in model.operatorCodes]
        self.graph = model.subgraphs[0]
        self.buffers = model.buffers
        self.tensors = self.graph.tensors
        self.operators: list[tuple[str, Any]] = []
        self.origin: dict[int, int] = {}
        for operator in self.graph.operators:
            code, source = codes[operator.opcodeIndex], int(operator.inputs[0]) if len(operator.inputs) else -1
            if code in ("DENSIFY", "DEQUANTIZE") and self.is_constant(source):
                self.origin[int(operator.outputs[0])] = self.origin.get(source, source)
            else:
                self.operators.append((code, operator))

    def is_constant(self, tensor: int) -> bool:
        if tensor in self.origin:
            return True
        data = self.buffers[self.tensors[tensor].buffer].data
        return data is not None and len(data) > 0

    def is_sparse(self, tensor: int) -> bool:
        return self.tensors[self.origin.get(tensor, tensor)].sparsity is not None

    def is_float(self, tensor: int) -> bool:
        return self.tensors[tensor].type in _FLOATS

    def shape(self, tensor: int) -> tuple[int, ...]:
        shape = self.tensors[tensor].shape
        return tuple(int(length) for length in shape) if shape is not None else ()

    def zeros(self, tensor: int) -> tuple[int, int]:
        """Returns (number of zeros, number of weights) of a constant float tensor, counting zeros in stored blocks."""
        source = self.tensors[self.origin.get(tensor, tensor)]
        total = int(np.prod(self.shape(tensor)))
        stored = np.asarray(self.buffers[source.buffer].data).view(_FLOATS.get(source.type, np.int8))
        return total - int(np.count_nonzero(stored)), total

    def integers(self, tensor: int) -> list[int]:
        return [int(v) for v in np.asarray(self.buffers[self.tensors[tensor].buffer].data).view(np.int32)]

    def name(self, tensor: int) -> str:
        return (self.tensors[tensor].name or b"?").decode(errors="replace").split(";")[0]


def read_verdict(content: bytes) -> Verdict:
    """Returns XNNPACK's behaviour for a LiteRT file on platforms with sparse kernels.

    Args:
        content: The bytes of a `.tflite` file.
    """
    file = _File(content)
    sparse = [t for t in file.tensors if t.sparsity is not None]
    blocks = sum(1 for t in sparse if t.sparsity.blockMap is not None and len(t.sparsity.blockMap))
    nodes = list(_nodes(file))
    pointwise = [file.zeros(n.weights) for n in nodes if _is_pointwise(file, n) and n.weights is not None]
    total = sum(count for _, count in pointwise)
    fraction = sum(zero for zero, _ in pointwise) / total if total else None
    wrong, switched = _wrong_blocks(file, nodes), False
    # Releases differ on whether Dense layers count as 1x1 convolutions: a file must be correct under both rules.
    for dense_counts in (False, True) if sparse else ():
        layout = _layouts(file, nodes, dense_counts)
        switched = switched or bool(layout)
        wrong = wrong or _wrong_exit(file, nodes, layout)
    return Verdict(len(sparse), blocks, switched, wrong, fraction)


def _wrong_blocks(file: _File, nodes: list[_Node]) -> str | None:
    for node in nodes:
        if node.kind == "FULLY_CONNECTED" and node.weights is not None:
            source = file.tensors[file.origin.get(node.weights, node.weights)]
            if source.sparsity is not None and source.type == 1 and len(source.sparsity.blockMap):
                return (
                    f"the Dense kernel of {node.name!r} becomes float16 blocks of 1x4, with which LiteRT gives NaN or "
                    "crashes"
                )
            if source.sparsity is not None and source.type not in _FLOATS:
                return (
                    f"the kernel of {node.name!r} is sparse-encoded int8, which LiteRT cannot load or computes wrongly"
                )
    return None


def _nodes(file: _File) -> Iterator[_Node]:
    """Yields XNNPACK's operators in order, with paddings folded into the convolutions that follow."""
    nodes: list[_Node] = []
    producer: dict[int, _Node] = {}
    for code, operator in file.operators:
        tensors = [int(t) for t in operator.inputs if int(t) >= 0]
        dynamic = [t for t in tensors if not file.is_constant(t)]
        outputs = [int(t) for t in operator.outputs]
        kind = code if code in _DELEGATED else "CUT"
        # Operators that are not delegated split the graph: a chain that leaves XNNPACK and returns starts a new graph.
        before = [producer[t] for t in dynamic if t in producer]
        part = max((p.part + ((p.kind == "CUT") != (kind == "CUT")) for p in before), default=0)
        node = _Node(kind, dynamic, outputs, file.name(outputs[0]), part, [t for t in tensors if file.is_constant(t)])
        node.options = operator.builtinOptions
        if len(tensors) > 1 and code in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            node.weights = tensors[1] if file.is_constant(tensors[1]) else None
        nodes.append(node)
        producer.update(dict.fromkeys(outputs, node))
    consumers = Counter(t for n in nodes for t in n.inputs)
    for node in nodes:
        if node.kind in ("CONV_2D", "DEPTHWISE_CONV_2D"):
            _fold_padding(file, node, producer, consumers)
    folded = {id(n) for n in nodes if n.kind == "FOLDED"}
    yield from (n for n in nodes if id(n) not in folded)


def _fold_padding(file: _File, node: _Node, producer: dict[int, _Node], consumers: Counter[int]) -> None:
    options, (height, width) = node.options, file.shape(node.weights)[1:3] if node.weights is not None else (0, 0)
    if (height, width) == (1, 1) and (options.strideH, options.strideW) == (1, 1):
        return  # converted to a matrix product, which has no padding, before paddings are folded
    if options.padding == _SAME:
        if options.strideH != 1 or options.strideW != 1:
            node.padding = None  # the padding per side depends on the input's size
            return
        tall, wide = (height - 1) * options.dilationHFactor, (width - 1) * options.dilationWFactor
        node.padding = (tall // 2, tall - tall // 2, wide // 2, wide - wide // 2)
    before = producer.get(node.inputs[0]) if node.inputs else None
    if before is None or before.kind != "PAD" or consumers[node.inputs[0]] != 1 or len(before.constants) != 1:
        return
    pads = file.integers(before.constants[0])
    if len(pads) == 8 and pads[:2] == [0, 0] and pads[6:] == [0, 0] and node.padding is not None:
        top, bottom, left, right = node.padding
        node.padding = (top + pads[2], bottom + pads[3], left + pads[4], right + pads[5])
        node.inputs, before.kind = list(before.inputs), "FOLDED"


def _is_pointwise(file: _File, node: _Node) -> bool:
    return node.kind == "CONV_2D" and node.weights is not None and file.shape(node.weights)[1:3] == (1, 1)


def _classify(file: _File, node: _Node) -> None:
    """Sets the operator's channels-first capabilities (`xnn_check_nchw_compatibility`)."""
    node.nchw = node.enters = node.leaves = node.incompatible = False
    kind, ranks = node.kind, [len(file.shape(t)) for t in node.inputs + node.constants]
    if kind == "CUT" or not all(file.is_float(t) for t in node.inputs + node.outputs):
        return
    if kind == "CONV_2D":
        node.nchw, node.enters = _convolution(file, node)
    elif kind == "DEPTHWISE_CONV_2D":
        node.nchw = _depthwise(file, node)
    elif kind == "FULLY_CONNECTED":
        node.nchw = node.weights is not None
    elif kind in _UNARY:
        node.nchw = ranks[:1] == [4]
    elif kind in ("ADD", "MUL"):
        node.nchw = ranks == [4, 4]
    elif kind == "RESIZE_BILINEAR":
        node.nchw = min(file.shape(node.inputs[0])[1:3]) > 1
    elif kind in ("MEAN", "SUM"):
        node.nchw = node.leaves = ranks[:1] == [4]
    elif kind == "DEPTH_TO_SPACE":
        node.leaves = True


def _convolution(file: _File, node: _Node) -> tuple[bool, bool]:
    """Returns (computes channels-first, enters channels-first)."""
    if node.weights is None or (node.options.dilationHFactor, node.options.dilationWFactor) != (1, 1):
        return False, False
    _, height, width, channels = file.shape(node.weights)
    if channels != file.shape(node.inputs[0])[-1]:  # groups
        return False, False
    strides = (node.options.strideH, node.options.strideW)
    if (height, width) == (1, 1):
        return strides == (1, 1) and node.padding == (0, 0, 0, 0), False
    return False, (height, width, channels) == (3, 3, 3) and strides == (2, 2) and node.padding == (1, 1, 1, 1)


def _depthwise(file: _File, node: _Node) -> bool:
    options = node.options
    if node.weights is None or (options.dilationHFactor, options.dilationWFactor, options.depthMultiplier) != (1, 1, 1):
        return False
    _, height, width, _ = file.shape(node.weights)
    strides = (options.strideH, options.strideW)
    return height == width and height in (3, 5) and strides in ((1, 1), (2, 2)) and node.padding == (height // 2,) * 4


def _layouts(file: _File, nodes: list[_Node], dense_counts: bool) -> set[int]:
    """Returns XNNPACK's channels-first tensors (`xnn_subgraph_rewrite_for_nchw`); empty without a switch to NCHW."""
    first: set[int] = set()
    for part in sorted({n.part for n in nodes if n.kind != "CUT"}):
        members = [n for n in nodes if n.part == part and n.kind != "CUT"]
        constants = [t for n in members for t in n.constants]
        if any(file.is_sparse(t) for t in constants):
            first |= _part_layouts(file, nodes, members, dense_counts)
    return first


def _part_layouts(file: _File, nodes: list[_Node], members: list[_Node], dense_counts: bool) -> set[int]:
    inside = {id(n) for n in members}
    external = {int(t) for t in (*file.graph.inputs, *file.graph.outputs)}
    external |= {t for n in nodes if id(n) not in inside for t in (*n.inputs, *n.outputs)}
    producer = {t: n for n in members for t in n.outputs}
    for index, node in enumerate(members):
        _classify(file, node)
        node.leader, node.weights_total, node.weights_zero = index, 0, 0
    if not any([_join(node, producer, external) for node in members if node.leaves]):
        return set()
    while any([_join(n, producer, external) for n in members if not n.incompatible and (n.nchw or n.leaves)]):
        pass
    for node in members:
        members[node.leader].incompatible |= node.incompatible
    consumers = Counter(t for n in members for t in n.inputs)
    takers = [n for n in members if not members[n.leader].incompatible and (n.nchw or n.leaves)]
    compatible = Counter(t for n in takers for t in n.inputs)
    for node in takers:
        if any(compatible[t] != consumers[t] for t in node.inputs):
            members[node.leader].incompatible = True
    for node in members:
        counted = _is_pointwise(file, node) or (dense_counts and node.kind == "FULLY_CONNECTED")
        if counted and node.weights is not None and not members[node.leader].incompatible:
            zeros, total = file.zeros(node.weights)
            members[node.leader].weights_total += total
            members[node.leader].weights_zero += zeros
    ready = [n for n in takers if not members[n.leader].incompatible]
    return {t for n in ready if _mostly_zero(members[n.leader]) for t in n.inputs}


def _mostly_zero(leader: _Node) -> bool:
    return leader.weights_zero * 3 > leader.weights_total * 2


def _join(node: _Node, producer: dict[int, _Node], external: set[int]) -> bool:
    """Merges a node and the producers of its inputs into one cluster; returns True if a cluster changed."""
    changed = False
    for tensor in node.inputs:
        before = producer.get(tensor)
        if tensor in external or before is None or not (before.nchw or before.enters) or before.incompatible:
            node.incompatible = True
            continue
        before.leaves = False
        if before.leader != node.leader:
            before.leader = node.leader = max(before.leader, node.leader)
            changed = True
    return changed


def _wrong_exit(file: _File, nodes: list[_Node], first: set[int]) -> str | None:
    """Returns a description of the first tensor with an unconverted layout change, or None."""
    consumers: dict[int, list[_Node]] = {}
    for node in nodes:
        for tensor in node.inputs:
            consumers.setdefault(tensor, []).append(node)
    for node in nodes:
        reads = [t in first for t in node.inputs]
        if not any(reads) or node.leaves:
            continue
        if not all(reads):
            return f"{_THERE} {node.kind} {node.name!r} reads one channels-first and one channels-last tensor"
        if len(file.shape(node.outputs[0])) != 4:
            continue  # vectors have only one layout
        if not all(t in first for t in node.outputs):
            after = [f"{n.kind} {n.name!r}" for n in consumers.get(node.outputs[0], [])] or ["the model's output"]
            where = f"{node.kind} {node.name!r} computes channels-first"
            return f"{_THERE} {where}, but {after[0]} reads its result as channels-last"
    return None
