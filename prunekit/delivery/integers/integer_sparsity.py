"""Encodes kernels of an integer file sparsely, where that makes the file smaller.

A DENSIFY operation before each kernel restores all codes when the file is loaded, so that the file computes the same
numbers with the same kernels in the same time. LiteRT also has a kernel for Dense layers that reads blocks of 16 inputs
as they are stored. On x86 it takes 1.1 to 5.5 times as long as the dense file. It rounds in integers and XNNPACK in
floats, so that some results are a step apart. And it ignored scales of channels once, which no version tells.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from prunekit.delivery.integers.integer_file import IntegerFile
from prunekit.delivery.integers.integer_kernels import Kernels, kernels_for
from prunekit.delivery.litert.litert_folding import LINEAR
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.sparse_encoding import SparseEncoding, smallest_encoding
from prunekit.techniques.quantize.grids.grids import IntegerFormat

# Bytes in the file of the tensor, the operation and the parameters that a kernel gets with its encoding; of the
# operations that turn a Dense layer into a convolution; and of a scale.
_ENCODING, _CONVOLUTION, _SCALE = 250, 350, 4


@dataclass(frozen=True)
class KernelEncoding:
    """How a kernel is stored in a file.

    Attributes:
        name: Kind of the operation and name of the kernel, as "KIND name".
        zeros: Share of the codes that are zero.
        dense: Bytes of its codes, stored one after another.
        sparse: Bytes of those that are not zero and of their indices, with what the file needs to read them.
        reason: Why it is stored densely; "" for a kernel that is stored sparsely.
    """

    name: str
    zeros: float
    dense: int
    sparse: int
    reason: str = ""

    @property
    def bytes(self) -> int:
        """Bytes that it has in the file."""
        return self.dense if self.reason else self.sparse


def sparsely_encoded(made: IntegerFile, activations: IntegerFormat) -> tuple[IntegerFile, tuple[KernelEncoding, ...]]:
    """Returns a file whose kernels are encoded sparsely where that is smaller, and how each is stored.

    Kernels of operations in floating point stay dense: with a DEQUANTIZE between, LiteRT 2.3 gives wrong numbers where
    XNNPACK does not compute the operation behind it.

    Args:
        made: The file.
        activations: Codes of the tensors between operations.
    """
    graph = LiteRTGraph(made.content)
    encoder = _Encoder(graph, kernels_for(activations))
    encoder.run()
    content, places = graph.content()
    moved = [replace(one, index=None if one.index is None else places[one.index]) for one in made.roundings]
    return replace(made, content=content, roundings=tuple(moved)), tuple(encoder.kernels)


class _Encoder:
    """Encodes the kernels of a graph.

    Attributes:
        kernels: How each kernel is stored.
    """

    def __init__(self, graph: LiteRTGraph, kernels: Kernels):
        self._graph, self._kernels = graph, kernels
        self.kernels: list[KernelEncoding] = []
        self._restoring: list[Any] = []
        # Index of a kernel that is encoded -> that of the dense tensor that is restored from it.
        self._dense: dict[int, int] = {}

    def run(self) -> None:
        """Encodes what becomes smaller."""
        graph = self._graph
        for index, readers in graph.readers().items():
            codes = None if index < 0 else graph.codes(index)
            if codes is not None and any(self._kernel(one) == index for one in readers):
                self._encode(index, codes, readers)
        graph.operators = self._restoring + [new for one in graph.operators for new in self._reading_dense(one)]

    def _kernel(self, reader: Any) -> int:
        """Returns the index of the kernel of an operation; -1 for those without, and for the graph that has outputs."""
        kind = "" if reader is self._graph else self._graph.kind(reader)
        return int(reader.inputs[LINEAR[kind].weights]) if kind in LINEAR else -1

    def _encode(self, index: int, codes: np.ndarray, readers: Sequence[Any]) -> None:
        """Encodes a kernel, if the file becomes smaller with the changes of all operations that read it."""
        graph = self._graph
        layers = [one for one in readers if self._kernel(one) == index]
        products = [one for one in layers if graph.kind(one) == "FULLY_CONNECTED"]
        encoding = smallest_encoding(codes[:, None, None] if products else codes)
        dense = -(-codes.size // 2) if graph.is_int4(index) else codes.size
        sparse = encoding.bytes + _ENCODING + sum(map(self._convolution_bytes, products))
        reason = "" if sparse < dense else "sparse encoding is not smaller"
        if any(graph.open_shape(int(one.outputs[0])).count(-1) > 1 for one in products):
            reason = "tensors have several open lengths"
        if len(layers) < len(readers):
            reason = "operations of other kinds read it, too"
        name, zeros = f"{graph.kind(layers[0])} {graph.name(index)}", 1 - np.count_nonzero(codes) / codes.size
        self.kernels.append(KernelEncoding(name, float(zeros), dense, sparse, reason))
        if not reason:
            self._dense[index] = self._restored(index, encoding)

    def _reading_dense(self, operator: Any) -> Sequence[Any]:
        """Returns the operations in the place of one; those of kernels that are encoded read what was restored."""
        kernel = self._dense.get(self._kernel(operator))
        if kernel is None:
            return [operator]
        kind = self._graph.kind(operator)
        if kind == "FULLY_CONNECTED":
            # LiteRT 2.3 refuses files in which a FULLY_CONNECTED reads what a DENSIFY restored.
            return self._as_convolution(operator, kernel)
        places = [int(index) for index in operator.inputs]
        places[LINEAR[kind].weights] = kernel
        operator.inputs = np.array(places, "int32")
        return [operator]

    def _restored(self, weights: int, encoding: SparseEncoding) -> int:
        """Adds a sparse constant, and the operation that restores it; returns the index of the dense tensor."""
        graph, name = self._graph, self._graph.name(weights)
        # Forms of one tensor have its name, which the file holds once.
        constant = graph.new_sparse_constant(name, encoding)
        dense = graph.new_tensor(name, encoding.codes.shape, "int8")
        graph.copy_scales(weights, dense)
        self._restoring.append(graph.new_operator("DENSIFY", [constant], [dense], graph.new_options("DensifyOptions")))
        return dense

    def _as_convolution(self, operator: Any, kernel: int) -> Sequence[Any]:
        """Returns the operations of a Dense layer as a convolution with a window of one entry."""
        graph = self._graph
        values, weights, *others = (int(index) for index in operator.inputs)
        (output,) = (int(index) for index in operator.outputs)
        outputs, inputs = graph.shape(weights)
        bias = self._no_bias(values, weights, outputs) if _lacks_bias(operator) else others[0]
        read, computed = self._as_image(values, inputs), self._as_image(output, outputs)
        options = graph.new_options(
            "Conv2DOptions",
            padding=1,
            strideW=1,
            strideH=1,
            dilationWFactor=1,
            dilationHFactor=1,
            fusedActivationFunction=operator.builtinOptions.fusedActivationFunction,
        )
        convolution = graph.new_operator("CONV_2D", [read, kernel, bias], [computed], options)
        graph.require_op_version(convolution, self._kernels.version_of(graph, convolution))
        return [self._reshape(values, read), convolution, self._reshape(computed, output)]

    def _convolution_bytes(self, operator: Any) -> int:
        """Returns the bytes by which the file grows when a Dense layer becomes a convolution."""
        (outputs, _), size = self._graph.shape(int(operator.inputs[1])), np.dtype(self._kernels.biases).itemsize
        return _CONVOLUTION + (outputs * (size + _SCALE) if _lacks_bias(operator) else 0)

    def _as_image(self, index: int, channels: int) -> int:
        """Adds a tensor with the grid and entries of another one, and one entry for the height and width."""
        graph = self._graph
        rows = -1 if -1 in graph.open_shape(index) else math.prod(graph.shape(index)) // channels
        found = graph.new_tensor(graph.name(index), (rows, 1, 1, channels), graph.dtype(index))
        graph.copy_scales(index, found)
        return found

    def _reshape(self, values: int, target: int) -> Any:
        graph = self._graph
        options = graph.new_options("ReshapeOptions", newShape=np.array(graph.open_shape(target), "int32"))
        return graph.new_operator("RESHAPE", [values], [target], options)

    def _no_bias(self, values: int, weights: int, outputs: int) -> int:
        """Adds a bias of zeros, which a convolution needs; returns its index."""
        graph = self._graph
        bias = graph.new_constant("no bias", np.zeros(outputs, self._kernels.biases))
        scales = graph.scales(values).astype("float64") * graph.scales(weights)
        graph.set_scales(bias, scales, np.zeros(len(scales)))
        return bias


def _lacks_bias(operator: Any) -> bool:
    """Returns True for a Dense layer without bias, which a convolution must have."""
    bias = LINEAR["FULLY_CONNECTED"].bias
    return len(operator.inputs) <= bias or int(operator.inputs[bias]) < 0
