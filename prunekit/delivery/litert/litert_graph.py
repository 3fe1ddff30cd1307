"""A LiteRT file as operations and tensors that can be rewritten."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from prunekit.delivery.litert.litert_writing import shortened, written
from prunekit.delivery.litert.sparse_encoding import SparseEncoding

# Names of metadata.
_OF_CONVERTER = (b"min_runtime_version", b"CONVERSION_METADATA")


class LiteRTGraph:
    """The first graph of a LiteRT file, which is its only one if the model has no loops.

    Args:
        content: The file.

    Attributes:
        operators: Its operations in order of execution.
        inputs: Indices of its inputs.
        outputs: Indices of its outputs.
    """

    def __init__(self, content: bytes):
        from tensorflow.lite.python import schema_py_generated as schema
        from tensorflow.lite.tools import flatbuffer_utils

        self._schema = schema
        self._model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
        self._graph = self._model.subgraphs[0]
        self._names = _constants_of(schema.BuiltinOperator)
        self.operators: list[Any] = list(self._graph.operators)
        self.inputs = [int(index) for index in self._graph.inputs]
        self.outputs = [int(index) for index in self._graph.outputs]

    def content(self) -> tuple[bytes, dict[int, int]]:
        """Returns the file without what nothing refers to, and {index of a tensor: its index in the file}."""
        places = self._drop_unused()
        self._shorten_names()
        return written(self._model), places

    # ---- operations --------------------------------------------------------------------------------------------------

    def kind(self, operator: Any) -> str:
        """Returns the name of an operation in LiteRT, such as "CONV_2D"."""
        return self._kind_of(self._model.operatorCodes[operator.opcodeIndex])

    def _kind_of(self, code: Any) -> str:
        # Names that came after the first 127 are in another field.
        return self._names[max(code.builtinCode, code.deprecatedBuiltinCode)]

    def new_operator(self, kind: str, inputs: Sequence[int], outputs: Sequence[int], options: Any = None) -> Any:
        """Returns an operation, which is not yet among `operators`.

        Args:
            kind: Its name in LiteRT.
            inputs: Indices of the tensors that it reads.
            outputs: Indices of the tensors that it computes.
            options: Its options: an object of the schema, such as that of `new_options`.
        """
        found = self._schema.OperatorT()
        found.opcodeIndex = self._opcode(kind)
        found.inputs, found.outputs = np.array(inputs, "int32"), np.array(outputs, "int32")
        if options is not None:
            found.builtinOptions = options
            name = type(options).__name__.removesuffix("T")
            found.builtinOptionsType = getattr(self._schema.BuiltinOptions, name)
        return found

    def copy_operator(self, operator: Any, outputs: Sequence[int]) -> Any:
        """Returns an operation that reads what another one reads and computes other tensors, not yet in `operators`."""
        found = copy.deepcopy(operator)
        found.outputs = np.array(outputs, "int32")
        return found

    def new_options(self, name: str, **values: Any) -> Any:
        """Returns options of an operation, such as "DepthwiseConv2DOptions"."""
        found = getattr(self._schema, f"{name}T")()
        for key, value in values.items():
            setattr(found, key, value)
        return found

    def _opcode(self, kind: str) -> int:
        codes = self._model.operatorCodes
        for index, code in enumerate(codes):
            if self._kind_of(code) == kind:
                return index
        code = self._schema.OperatorCodeT()
        code.builtinCode = getattr(self._schema.BuiltinOperator, kind)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), 1
        codes.append(code)
        return len(codes) - 1

    def version(self, operator: Any) -> int:
        """Returns the version of an operation's kind."""
        return int(self._model.operatorCodes[operator.opcodeIndex].version)

    def require_op_version(self, operator: Any, version: int) -> None:
        """Raises the version of an operation's kind, by which older runtimes know what they cannot run."""
        code = self._model.operatorCodes[operator.opcodeIndex]
        code.version = max(code.version, version)

    def readers(self) -> dict[int, list[Any]]:
        """Returns {index of a tensor: the operations that read it}, with the graph itself as the reader of outputs."""
        found: dict[int, list[Any]] = {index: [self] for index in self.outputs}
        for operator in self.operators:
            for index in operator.inputs:
                found.setdefault(int(index), []).append(operator)
        return found

    def replace(self, old: int, new: int) -> None:
        """Lets every reader of a tensor, and the outputs, read another one."""
        for operator in self.operators:
            operator.inputs = np.array([new if index == old else index for index in operator.inputs], "int32")
        self._set_outputs([new if index == old else index for index in self.outputs])

    def _set_outputs(self, outputs: list[int]) -> None:
        for signature in self._model.signatureDefs or ():
            for entry in signature.outputs:
                entry.tensorIndex = outputs[self.outputs.index(entry.tensorIndex)]
        self.outputs = outputs

    def map_outputs(self, other: Mapping[int, int]) -> None:
        """Replaces outputs of the graph by other tensors."""
        self._set_outputs([other.get(index, index) for index in self.outputs])

    def map_inputs(self, other: Mapping[int, int]) -> None:
        """Replaces inputs of the graph by other tensors."""
        for signature in self._model.signatureDefs or ():
            for entry in signature.inputs:
                entry.tensorIndex = other.get(entry.tensorIndex, entry.tensorIndex)
        self.inputs = [other.get(index, index) for index in self.inputs]

    def signature_names(self) -> dict[int, str]:
        """Returns {index of an input or output: its name in the signature}."""
        found = {}
        for signature in self._model.signatureDefs or ():
            for entry in (*signature.inputs, *signature.outputs):
                found[int(entry.tensorIndex)] = str(entry.name.decode())
        return found

    # ---- tensors -----------------------------------------------------------------------------------------------------

    def tensor(self, index: int) -> Any:
        """Returns a tensor by its index."""
        return self._graph.tensors[int(index)]

    def name(self, index: int) -> str:
        """Returns the name of a tensor."""
        return str(self.tensor(index).name.decode())

    def shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape of a tensor, with 1 for open lengths."""
        shape = self.tensor(index).shape
        return () if shape is None else tuple(int(length) for length in shape)

    def open_shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape of a tensor, with -1 for open lengths."""
        signature = self.tensor(index).shapeSignature
        return self.shape(index) if signature is None else tuple(int(length) for length in signature)

    def dtype(self, index: int) -> str:
        """Returns the type of a tensor, such as "int8"."""
        return _constants_of(self._schema.TensorType)[self.tensor(index).type].lower()

    def is_float(self, index: int) -> bool:
        """Returns True for a tensor of 32-bit floating-point numbers."""
        return index >= 0 and self.tensor(index).type == self._schema.TensorType.FLOAT32

    def is_int4(self, index: int) -> bool:
        """Returns True for a tensor of codes of 4 bits, two in each byte."""
        return bool(self.tensor(index).type == self._schema.TensorType.INT4)

    def values(self, index: int) -> np.ndarray | None:
        """Returns the values of a constant of floats; None for other tensors."""
        if not self.is_float(index):
            return None
        data = self._model.buffers[self.tensor(index).buffer].data
        if data is None or not len(data):
            return None
        return np.asarray(data, "uint8").view("float32").reshape(self.shape(index))

    def integers(self, index: int) -> np.ndarray | None:
        """Returns the values of a constant of 32-bit integers; None for other tensors."""
        data = self._model.buffers[self.tensor(index).buffer].data
        if data is None or not len(data) or self.tensor(index).type != self._schema.TensorType.INT32:
            return None
        return np.asarray(data, "uint8").view("int32").reshape(self.shape(index))

    def stored(self, index: int) -> tuple[Any, ...] | None:
        """Returns what a file stores of a constant: type, shape, values, scales; None for a tensor that is computed."""
        tensor = self.tensor(index)
        data, scales = self._model.buffers[tensor.buffer].data, getattr(tensor.quantization, "scale", None)
        if data is None or not len(data):
            return None
        held = b"" if scales is None else np.asarray(scales, "float32").tobytes()
        return tensor.type, self.shape(index), np.asarray(data, "uint8").tobytes(), held

    def codes(self, index: int) -> np.ndarray | None:
        """Returns the codes of a constant of 4 or 8 bits as integers of 8 bits; None for other tensors."""
        types = self._schema.TensorType
        data = self._model.buffers[self.tensor(index).buffer].data
        if data is None or not len(data) or self.tensor(index).type not in (types.INT4, types.INT8):
            return None
        stored = np.asarray(data, "uint8")
        if self.is_int4(index):
            # Shifts of signed integers keep the sign.
            pairs = np.stack([stored << 4, stored & 0xF0], axis=-1).view("int8") >> 4
            stored = pairs.reshape(-1)[: math.prod(self.shape(index))]
        return stored.view("int8").reshape(self.shape(index))

    def new_constant(self, name: str, values: np.ndarray) -> int:
        """Adds a constant, and returns its index."""
        data = np.frombuffer(np.ascontiguousarray(values).tobytes(), "uint8")
        return self._new_buffered(name, values.shape, values.dtype.name, data)

    def new_int4_constant(self, name: str, codes: np.ndarray) -> int:
        """Adds a constant of codes from -8 to 7, two in each byte with the first in the lower bits."""
        flat = (codes.reshape(-1) & 15).astype("uint8")
        flat = np.append(flat, np.zeros(len(flat) % 2, "uint8"))
        return self._new_buffered(name, codes.shape, "int4", flat[::2] | (flat[1::2] << 4))

    def new_sparse_constant(self, name: str, encoding: SparseEncoding) -> int:
        """Adds a constant that is stored sparsely, which DENSIFY reads, and returns its index."""
        sparsity = self._schema.SparsityParametersT()
        shape, rank = encoding.codes.shape, encoding.codes.ndim
        metadata = [self._dense_axis(shape[axis]) for axis in encoding.order[:-1]]
        metadata.append(self._sparse_axis(encoding))
        order = [*encoding.order]
        if encoding.block > 1:
            # The axis inside blocks is a further one.
            metadata.append(self._dense_axis(encoding.block))
            order.append(rank)
            sparsity.blockMap = np.array([encoding.axis], "int32")
        sparsity.traversalOrder, sparsity.dimMetadata = np.array(order, "int32"), metadata
        index = self._new_buffered(name, shape, "int8", encoding.values.view("uint8"))
        self.tensor(index).sparsity = sparsity
        return index

    def _dense_axis(self, length: int) -> Any:
        found = self._schema.DimensionMetadataT()
        found.format, found.denseSize = self._schema.DimensionType.DENSE, length
        return found

    def _sparse_axis(self, encoding: SparseEncoding) -> Any:
        found = self._schema.DimensionMetadataT()
        found.format, found.denseSize = self._schema.DimensionType.SPARSE_CSR, 0
        found.arraySegmentsType, found.arraySegments = self._indices(encoding.segments)
        found.arrayIndicesType, found.arrayIndices = self._indices(encoding.indices)
        return found

    def _indices(self, values: np.ndarray) -> tuple[int, Any]:
        kind = f"{values.dtype.name.capitalize()}Vector"
        found = getattr(self._schema, f"{kind}T")()
        found.values = values
        return getattr(self._schema.SparseIndexVector, kind), found

    def _new_buffered(self, name: str, shape: Iterable[int], dtype: str, data: np.ndarray) -> int:
        buffer = self._schema.BufferT()
        buffer.data = data
        self._model.buffers.append(buffer)
        index = self.new_tensor(name, shape, dtype)
        self.tensor(index).buffer = len(self._model.buffers) - 1
        return index

    def new_tensor(self, name: str, shape: Iterable[int], dtype: str) -> int:
        """Adds a tensor that is computed, and returns its index.

        Args:
            name: Its name.
            shape: Its shape, with -1 for open lengths.
            dtype: Its type, such as "int8".
        """
        tensor, lengths = self._schema.TensorT(), [*shape]
        tensor.name, tensor.buffer = name.encode(), 0
        tensor.shape = np.array([1 if length < 0 else length for length in lengths], "int32")
        tensor.shapeSignature = np.array(lengths, "int32") if -1 in lengths else None
        self._graph.tensors.append(tensor)
        self.set_dtype(len(self._graph.tensors) - 1, dtype)
        return len(self._graph.tensors) - 1

    def rename(self, function: Callable[[str], str]) -> None:
        """Gives each tensor the name that a function returns for its present one."""
        for index in range(len(self._graph.tensors)):
            self.tensor(index).name = function(self.name(index)).encode()

    def set_dtype(self, index: int, dtype: str) -> None:
        """Gives a tensor another type, such as "int8"."""
        self.tensor(index).type = getattr(self._schema.TensorType, dtype.upper())

    def set_scales(self, index: int, scales: np.ndarray, zero_points: np.ndarray, axis: int = 0) -> None:
        """Gives a tensor of integers the values that they stand for.

        Args:
            index: The tensor.
            scales: One scale, or one for each index of the axis.
            zero_points: As many zero points.
            axis: The axis.
        """
        found = self._schema.QuantizationParametersT()
        found.scale, found.zeroPoint = scales.astype("float32"), zero_points.astype("int64")
        found.quantizedDimension = axis
        self.tensor(index).quantization = found

    def scales(self, index: int) -> np.ndarray:
        """Returns the scales of a tensor of integers."""
        return np.asarray(self.tensor(index).quantization.scale)

    def copy_scales(self, source: int, target: int) -> None:
        """Gives a tensor the scales and zero points of another one."""
        self.tensor(target).quantization = self.tensor(source).quantization

    # ---- what is left ------------------------------------------------------------------------------------------------

    def _drop_unused(self) -> dict[int, int]:
        model, graph = self._model, self._graph
        used = {*self.inputs, *self.outputs}
        used |= {
            int(index)
            for one in self.operators
            for index in (*one.inputs, *one.outputs, *_intermediates(one))
            if index >= 0
        }
        places = _places(used)
        graph.tensors = [self.tensor(index) for index in places]
        for one in self.operators:
            one.inputs, one.outputs = _moved(one.inputs, places), _moved(one.outputs, places)
            if len(_intermediates(one)):
                one.intermediates = _moved(one.intermediates, places)
        graph.operators = self.operators
        # Further graphs are the bodies of loops.
        operators = [one for part in model.subgraphs for one in part.operators]
        codes = _places({one.opcodeIndex for one in operators})
        model.operatorCodes = [model.operatorCodes[index] for index in codes]
        for one in operators:
            one.opcodeIndex = codes[one.opcodeIndex]
        graph.inputs, graph.outputs = _moved(self.inputs, places), _moved(self.outputs, places)
        for signature in model.signatureDefs or ():
            for entry in (*signature.inputs, *signature.outputs):
                entry.tensorIndex = places[entry.tensorIndex]
        # The converter describes its own file: runtimes that read its operations, and options of the conversion.
        model.metadata = [one for one in model.metadata or () if one.name not in _OF_CONVERTER]
        owners = [*(one for part in model.subgraphs for one in part.tensors), *model.metadata]
        # The first buffer is that of all tensors without values.
        buffers = _places({0, *(one.buffer for one in owners)})
        model.buffers = [model.buffers[index] for index in buffers]
        for one in owners:
            one.buffer = buffers[one.buffer]
        return places

    def _shorten_names(self) -> None:
        # Interpreters without signatures find inputs and outputs by these names.
        kept = {int(index) for index in (*self._graph.inputs, *self._graph.outputs)}
        tensors = [one for index, one in enumerate(self._graph.tensors) if index not in kept]
        for one, name in zip(tensors, shortened([one.name.decode() for one in tensors]), strict=True):
            one.name = name.encode()


def _constants_of(enumeration: Any) -> dict[int, str]:
    return {value: name for name, value in vars(enumeration).items() if isinstance(value, int)}


def _intermediates(operator: Any) -> Sequence[int]:
    """Returns the tensors inside of an operation, whose scales its kernel reads."""
    return () if operator.intermediates is None else operator.intermediates


def _places(used: set[int]) -> dict[int, int]:
    return {index: place for place, index in enumerate(sorted(used))}


def _moved(indices: Sequence[int], places: Mapping[int, int]) -> np.ndarray:
    return np.array([places[int(index)] if index >= 0 else -1 for index in indices], "int32")
