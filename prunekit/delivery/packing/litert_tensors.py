"""A LiteRT file as tensors and text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from prunekit.delivery.packing.encoder import Piece
from prunekit.delivery.packing.tensor_forms import Form, best_form, product_form, text_form

# LiteRT's names of types -> NumPy's, in `decoder.DTYPES`.
_TYPES = {
    "FLOAT32": "<f4",
    "FLOAT16": "<f2",
    "FLOAT64": "<f8",
    "INT8": "|i1",
    "UINT8": "|u1",
    "INT16": "<i2",
    "UINT16": "<u2",
    "INT32": "<i4",
    "UINT32": "<u4",
    "INT64": "<i8",
    "UINT64": "<u8",
    "BOOL": "|b1",
    "INT4": "int4",
}
# Shorter vectors stay in the text: a tensor's description takes some 10 bytes.
_FEWEST_BYTES = 24


@dataclass(frozen=True)
class _Region:
    """Bytes of the file that are one vector."""

    start: int
    length: int
    dtype: str
    shape: tuple[int, ...]
    is_weight: bool = False


def litert_pieces(data: bytes) -> list[Piece]:
    """Returns the parts of a LiteRT file, which are its bytes, one after another.

    Args:
        data: The file.

    Raises:
        ValueError: It is no LiteRT file.
    """
    regions = _separate(sorted(_regions(data), key=lambda region: (region.start, -region.length)))
    arrays = [_array(data, region) for region in regions]
    products = _products(regions, arrays)
    pieces: list[Piece] = []
    # A piece of text lies in front of each tensor.
    at = 0
    for i, (region, array) in enumerate(zip(regions, arrays, strict=True)):
        pieces.append(Piece(text_form(data[at : region.start])))
        counts = (array.size, int(np.count_nonzero(array))) if region.is_weight else (0, 0)
        pieces.append(Piece(products.get(i) or best_form(array, region.dtype), array.shape, *counts))
        at = region.start + region.length
    return [*pieces, Piece(text_form(data[at:]))]


def _array(data: bytes, region: _Region) -> np.ndarray:
    content = data[region.start : region.start + region.length]
    if region.dtype != "int4":
        return np.frombuffer(content, region.dtype).reshape(region.shape)
    packed = np.frombuffer(content, np.int8)
    # Lower four bits first, with their sign.
    both = np.stack([packed << 4 >> 4, packed >> 4], axis=1).reshape(-1)
    return both[: int(np.prod(region.shape))].reshape(region.shape)


def _regions(data: bytes) -> Iterator[_Region]:
    from ai_edge_litert import schema_py_generated as schema

    model = schema.Model.GetRootAs(data, 0)
    for i in range(model.SubgraphsLength()):
        graph = model.Subgraphs(i)
        for j in range(graph.TensorsLength()):
            tensor = graph.Tensors(j)
            yield from _of_tensor(model, tensor, _names(schema.TensorType))
            quantization = tensor.Quantization()
            if quantization is not None:
                yield from _vector(quantization, quantization.ScaleLength(), 8, "<f4")
                yield from _vector(quantization, quantization.ZeroPointLength(), 10, "<i8")


def _names(types: Any) -> dict[int, str]:
    return {value: name for name, value in vars(types).items() if isinstance(value, int)}


def _of_tensor(model: Any, tensor: Any, names: dict[int, str]) -> Iterator[_Region]:
    buffer = model.Buffers(tensor.Buffer())
    length, dtype = buffer.DataLength(), _TYPES.get(names[tensor.Type()], "|u1")
    if length < _FEWEST_BYTES:
        return
    shape = tuple(tensor.Shape(i) for i in range(tensor.ShapeLength()))
    count = int(np.prod(shape))
    expected = (count + 1) // 2 if dtype == "int4" else count * np.dtype(dtype).itemsize
    if expected != length:
        # A sparse tensor holds the kept values alone.
        dtype = "|u1" if dtype == "int4" or length % np.dtype(dtype).itemsize else dtype
        shape = (length // np.dtype(dtype).itemsize,)
    yield _Region(_start(buffer, 4), length, dtype, shape, is_weight=True)


def _vector(table: Any, count: int, field: int, dtype: str) -> Iterator[_Region]:
    length = count * np.dtype(dtype).itemsize
    if length >= _FEWEST_BYTES:
        yield _Region(_start(table, field), length, dtype, (count,))


def _start(table: Any, field: int) -> int:
    return table._tab.Vector(table._tab.Offset(field))


def _separate(regions: Sequence[_Region]) -> list[_Region]:
    """Returns the regions without those that overlap an earlier one: files may share vectors."""
    kept: list[_Region] = []
    for region in regions:
        if not kept or region.start >= kept[-1].start + kept[-1].length:
            kept.append(region)
    return kept


def _products(regions: Sequence[_Region], arrays: Sequence[np.ndarray]) -> dict[int, Form]:
    """Returns {index: form} of scales that are those of another tensor times a number: those of biases.

    The scale of a bias is that of the weight times that of the input.
    """
    vectors = [i for i, array in enumerate(arrays) if array.dtype == np.float32 and array.ndim == 1 and len(array) > 2]
    found: dict[int, Form] = {}
    for i in vectors:
        for source in vectors:
            if source == i or source in found or arrays[source].shape != arrays[i].shape:
                continue
            factor = _factor(arrays[source], arrays[i])
            if factor is not None:
                # A piece of text lies in front of each tensor.
                found[i] = product_form(len(arrays[i]), 2 * source + 1, factor)
                break
    return found


def _factor(source: np.ndarray, product: np.ndarray) -> np.ndarray | None:
    """Returns the float32 number by which all of `source` are multiplied, to the bit, or None."""
    if not (source > 0).all() or not (product > 0).all():
        return None
    guess = np.float32(np.median(product.astype(np.float64) / source))
    for ulps in range(-4, 5):
        factor = (np.array([guess]).view(np.int32) + ulps).view(np.float32)
        if (source * factor == product).all():
            return factor.astype("<f4")
    return None
