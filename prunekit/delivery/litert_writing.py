"""Writes LiteRT files without what they would hold several times: equal vectors, and names of merged operations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

# By which readers know a file of LiteRT's schema.
_IDENTIFIER = b"TFL3"


def written(model: Any) -> bytes:
    """Returns the bytes of a LiteRT model, in which equal vectors, such as zero points of kernels, are stored once.

    Tables of a flatbuffer may refer to the same vector or string, and readers do not notice. Fewer zero points than
    scales would be smaller still, but LiteRT refuses such files, and XNNPACK does not compute convolutions whose biases
    have no scales.

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
    builder.Finish(model.Pack(builder), file_identifier=_IDENTIFIER)
    return bytes(builder.Output())


def shortened(names: Sequence[str]) -> list[str]:
    """Returns names of tensors without those of the operations that the converter merged, as far as they differ.

    The converter joins the names of merged operations by semicolons, in a convolution's result and in its bias. Of
    these the first one that no other tensor has is kept.

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
    return found
