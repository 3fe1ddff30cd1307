"""Writes LiteRT files without what they would hold several times: equal vectors, tables, and names of operations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# By which readers know a file of LiteRT's schema.
_IDENTIFIER = b"TFL3"


def written(model: Any) -> bytes:
    """Returns the bytes of a LiteRT model, in which equal vectors, such as zero points of kernels, are stored once.

    So are equal parameters of tensors and of operations. Tables of a flatbuffer may refer to the same vector, string or
    table, and readers do not notice. Fewer zero points than scales would be smaller still, but LiteRT refuses such
    files, and XNNPACK does not compute convolutions whose biases have no scales.

    Args:
        model: A model of LiteRT's schema, as an object.
    """
    # The release of flatbuffers with which TensorFlow writes its files.
    from tensorflow.lite.python.schema_py_generated import flatbuffers

    class Sharing(flatbuffers.Builder):
        """Refers to a vector that was written before instead of writing it again."""

        def __init__(self, size: int):
            super().__init__(size)
            self._written: dict[Any, int] = {}

        def CreateNumpyVector(self, x: np.ndarray) -> int:  # noqa: N802
            # Not the values of constants, which are bytes: runtimes tell constants by their addresses.
            if x.dtype == np.uint8:
                return int(super().CreateNumpyVector(x))
            return self._once((x.dtype.str, x.tobytes()), lambda: super(Sharing, self).CreateNumpyVector(x))

        def CreateString(self, s: Any, *options: Any) -> int:  # noqa: N802
            return self._once(s, lambda: super(Sharing, self).CreateString(s, *options))

        def _once(self, key: Any, write: Callable[[], int]) -> int:
            if key not in self._written:
                self._written[key] = write()
            return self._written[key]

    builder = Sharing(1024)
    builder.Finish(_with_shared_tables(model).Pack(builder), file_identifier=_IDENTIFIER)
    return bytes(builder.Output())


class _Table:
    """A table of the schema that is written once.

    Args:
        table: The table, as an object.
    """

    def __init__(self, table: Any):
        self._table = table
        self._place: int | None = None

    def Pack(self, builder: Any) -> int:  # noqa: N802
        """Writes the table when it is first called; returns its place in the file."""
        if self._place is None:
            self._place = int(self._table.Pack(builder))
        return self._place


def _with_shared_tables(model: Any) -> Any:
    """Returns a copy of a model in which equal parameters of tensors, and of operations, are one `_Table`."""
    tables: dict[Any, _Table] = {}

    def shared(owner: Any, attribute: str) -> Any:
        table, found = getattr(owner, attribute), copy.copy(owner)
        if table is not None:
            setattr(found, attribute, tables.setdefault(_content(table), _Table(table)))
        return found

    made = copy.copy(model)
    made.subgraphs = [copy.copy(graph) for graph in model.subgraphs or ()]
    for graph in made.subgraphs:
        graph.tensors = [shared(one, "quantization") for one in graph.tensors or ()]
        graph.operators = [shared(one, "builtinOptions") for one in graph.operators or ()]
    return made


def _content(value: Any) -> Any:
    """Returns what tells an object of the schema from others."""
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.shape, value.tobytes()
    if isinstance(value, list | tuple):
        return tuple(map(_content, value))
    if hasattr(value, "__dict__"):
        return type(value).__name__, tuple((key, _content(one)) for key, one in vars(value).items())
    return value


def shortened(names: Sequence[str]) -> list[str]:
    """Returns names of tensors without those of the operations that the converter merged, as far as they differ.

    The converter joins the names of merged operations by semicolons, in a convolution's result and in its bias. Of
    these the first one that no other tensor has is kept. The scope that all operations of a model have is left out.

    Args:
        names: Names of all tensors.
    """
    used = {name for name in names if ";" not in name}
    found = []
    for name in names:
        parts = name.split(";")
        short = name if len(parts) == 1 else next((part for part in parts if part not in used), name)
        used.add(short)
        found.append(short)
    scopes = {part.split("/", 1)[0] for name in found for part in name.split(";") if "/" in part}
    if len(scopes) != 1:
        return found
    return [";".join(part.split("/", 1)[-1] for part in name.split(";")) for name in found]
