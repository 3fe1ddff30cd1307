"""Which operations LiteRT's kernels compute with integers of 8 or 16 bits, since which versions, and how exactly.

Source: op_version.cc and the kernels of LiteRT.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prunekit.delivery.litert.litert_folding import LINEAR, NO_ACTIVATION
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.placement.rules import ONLY_8_BITS, SOFTMAX_ENTRIES

# Operations whose results lie on the grid of their input.
ON_INPUT_GRID = ("AVERAGE_POOL_2D", "RESIZE_BILINEAR")
# Operations whose results are entries of their inputs, on the same grid.
MOVES = frozenset(
    "RESHAPE TRANSPOSE SQUEEZE EXPAND_DIMS PAD MIRROR_PAD MAX_POOL_2D CONCATENATION SLICE STRIDED_SLICE SPLIT SPLIT_V "
    "PACK UNPACK GATHER TILE RESIZE_NEAREST_NEIGHBOR MAXIMUM MINIMUM REDUCE_MAX REDUCE_MIN REVERSE_V2 BROADCAST_TO "
    "SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND SELECT_V2 PADV2 DEPTH_TO_SPACE SPACE_TO_DEPTH".split()
)
# Operations whose results lie on a prescribed grid, with whether that has a sign.
PRESCRIBED = {"LOGISTIC": False, "SOFTMAX": False, "TANH": True}
_COMPUTES = frozenset(
    "ADD SUB MUL MEAN BATCH_MATMUL RELU RELU6 LEAKY_RELU LOGISTIC TANH SOFTMAX AVERAGE_POOL_2D RESIZE_BILINEAR".split()
) | frozenset(LINEAR)
# Steps that an LSTM may be off: one step of the state of 8 bits changes later ones.
LSTM_STEPS = 2
# Steps of 2 ** -15 by which the softmax of 16 bits is off for each entry: it takes exponentials from a table that ends
# at exp(-10), 1.5 steps, and rounds them. The reciprocal of their sum, and the products with it, are rounded, too.
_SOFTMAX_STEPS = 2


@dataclass(frozen=True)
class Kernels:
    """The kernels for tensors of one width.

    Attributes:
        computes: Operations that round their results on a grid of their own.
        constants: Codes of constants.
        biases: Type of biases.
        bias_bits: Bits of the largest code of a bias: fewer than an accumulator has, whose sum must not overflow.
        versions: The first versions with integers of this width.
        version: That of other operations.
        wide_versions: The first versions with tensors of more than four axes.
        four_bits: The versions that read weights of 4 bits, two in each byte.
        steps: Steps that kernels may be off, where these are more than one.
        float_moves: Operations of `MOVES` without a kernel.
        softmax_entries: Most entries of a softmax whose kernel is precise enough; None = any.
        softmax_step: Step of the input of a softmax at which the kernel still aborts the process; longer ones are fine.
    """

    computes: frozenset[str]
    constants: IntegerFormat
    biases: str
    bias_bits: int
    versions: Mapping[str, int]
    version: int
    wide_versions: Mapping[str, int]
    four_bits: Mapping[str, int]
    steps: Mapping[str, int] = field(default_factory=dict)
    float_moves: frozenset[str] = frozenset()
    softmax_entries: int | None = None
    softmax_step: float = 0.0

    @property
    def dequantize(self) -> int:
        """The version of DEQUANTIZE."""
        return self.versions.get("DEQUANTIZE", self.version)

    def compute(self, graph: LiteRTGraph, operator: Any, step: float) -> bool:
        """Returns True for an operation that has a kernel which rounds its results on a grid of their own.

        Args:
            graph: The graph of the operation.
            operator: The operation.
            step: Scale of the values that it reads.
        """
        kind = graph.kind(operator)
        if kind != "SOFTMAX":
            return kind in self.computes
        most = self.softmax_entries
        return step > self.softmax_step and (most is None or 0 < _entries(graph, operator) <= most)

    def steps_of(self, graph: LiteRTGraph, operator: Any) -> int:
        """Returns how many steps the results of an operation may be off those of exact numbers, rounded."""
        kind = graph.kind(operator)
        if kind == "SOFTMAX" and self.softmax_entries is not None:
            return _SOFTMAX_STEPS * (_entries(graph, operator) + 1)
        return self.steps.get(kind, 1)

    def version_of(self, graph: LiteRTGraph, operator: Any) -> int:
        """Returns the version of an operation that computes with integers, by which older runtimes refuse it.

        Args:
            graph: The graph of the operation.
            operator: The operation.
        """
        kind = graph.kind(operator)
        version = self.versions.get(kind, self.version)
        if kind in self.four_bits and any(graph.is_int4(int(index)) for index in operator.inputs if index >= 0):
            return self.four_bits[kind]
        if kind == "FULLY_CONNECTED" and operator.builtinOptions.keepNumDims:
            return max(version, 5)
        if kind == "TRANSPOSE_CONV" and operator.builtinOptions.fusedActivationFunction != NO_ACTIVATION:
            return 4
        rank = max(len(graph.shape(int(index))) for index in (*operator.inputs, *operator.outputs) if index >= 0)
        if kind == "TRANSPOSE" and rank > 5:
            return 6
        return max(version, self.wide_versions.get(kind, 1)) if rank > 4 else version


def _entries(graph: LiteRTGraph, operator: Any) -> int:
    """Returns the length of the last axis of the results; -1 if it is open."""
    return graph.open_shape(int(operator.outputs[0]))[-1]


_WITHOUT_VERSION = dict.fromkeys("RESHAPE SQUEEZE EXPAND_DIMS SELECT_V2 PRELU ELU HARD_SWISH DEPTH_TO_SPACE".split(), 1)
_INT8 = Kernels(
    # Without SUM, whose reference kernel adds codes without regard to their zero points.
    computes=_COMPUTES | frozenset(ONLY_8_BITS) | {"GATHER"},
    constants=IntegerFormat(8, symmetric=False),
    biases="int32",
    bias_bits=30,
    versions={
        **_WITHOUT_VERSION,
        **{"LEAKY_RELU": 1, "QUANTIZE": 1, "FULLY_CONNECTED": 4, "RELU_N1_TO_1": 1},
        **dict.fromkeys("CONV_2D DEPTHWISE_CONV_2D TRANSPOSE_CONV".split(), 3),
        **dict.fromkeys("TILE REVERSE_V2 BROADCAST_TO RESIZE_BILINEAR".split(), 3),
    },
    version=2,
    wide_versions={
        **{"PAD": 4, "PADV2": 4, "SLICE": 5, "STRIDED_SLICE": 4, "TRANSPOSE": 4},
        **dict.fromkeys("SUB MUL MAXIMUM MINIMUM".split(), 3),
    },
    four_bits={"CONV_2D": 7, "DEPTHWISE_CONV_2D": 7, "FULLY_CONNECTED": 10},
    # The kernel checks that step * 2 ** 26 is larger than 1, and ends the process otherwise.
    softmax_step=2.0**-26,
)
_INT16 = Kernels(
    # Without SUM, whose kernel adds codes without regard to scales.
    computes=_COMPUTES,
    constants=IntegerFormat(16),
    biases="int64",
    # Products of accumulators and multipliers are right below 2 ** 47.
    bias_bits=46,
    versions={
        **_WITHOUT_VERSION,
        # op_version.cc names no version with int16 for the last two: those that LiteRT's converter writes.
        **dict.fromkeys("LEAKY_RELU QUANTIZE SPLIT_V STRIDED_SLICE".split(), 2),
        **dict.fromkeys("CONV_2D MUL SPLIT SLICE UNPACK GATHER MAXIMUM MINIMUM".split(), 4),
        **dict.fromkeys("RESIZE_BILINEAR RESIZE_NEAREST_NEIGHBOR SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND".split(), 4),
        **{"DEPTHWISE_CONV_2D": 5, "FULLY_CONNECTED": 7, "SUB": 5, "TRANSPOSE": 5},
    },
    version=3,
    wide_versions={"PAD": 4, "PADV2": 4, "SLICE": 5, "STRIDED_SLICE": 4},
    # DEPTHWISE_CONV_2D computes nonsense from codes of 4 bits; CONV_2D has no version that says that it reads them.
    four_bits={"FULLY_CONNECTED": 13},
    steps={
        # Sums of 64 bits are multiplied by factors of 15 bits: up to 2 ** -15 of the result, a step at the end of the
        # range. The simulation adds numbers of 24 bits, which is a small part of a step, and may round to the next.
        **dict.fromkeys((*LINEAR, "BATCH_MATMUL"), 2),
        # Interpolated in a table of the sigmoid, 24 entries for each unit: 0.7 steps. Its entries (0.3), the factor of
        # the input (0.2) and the input itself (0.3) are rounded: 1.5 steps in all. For tanh(x) = 2 sigmoid(2x) - 1
        # these are 1.4, 0.5, 0.5 and 1.3.
        "LOGISTIC": 2,
        "TANH": 4,
    },
    float_moves=frozenset(("DEPTH_TO_SPACE", "SPACE_TO_DEPTH")),
    softmax_entries=SOFTMAX_ENTRIES,
)


def kernels_for(activations: IntegerFormat) -> Kernels:
    """Returns the kernels that read and compute tensors of these codes."""
    return _INT16 if activations.bits == 16 else _INT8
