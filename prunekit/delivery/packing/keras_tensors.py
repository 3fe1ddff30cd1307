"""A Keras file as tensors and texts, and back."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from prunekit.anatomy.files.archives import FileRefused, checked_archive
from prunekit.anatomy.files.model_files import WEIGHTS, check_h5, weights_member
from prunekit.delivery.packing.encoder import Piece
from prunekit.delivery.packing.tensor_forms import best_form, text_form

# Beside the members of the archive: {path: {name: value}} of groups and arrays of the weights.
ATTRIBUTES = "attributes.json"
# Name in an array's attributes for the type of arrays that HDF5 knows as bytes alone: bfloat16, float8.
_OPAQUE = "opaque type"
# Larger members, such as vocabularies, are not part of the text.
_TEXT_LIMIT = 1 << 20


def keras_pieces(path: str | os.PathLike[str]) -> tuple[list[Piece], bytes]:
    """Returns the parts of a `.keras` file, and their bytes, one after another.

    Raises:
        FileRefused: The file is damaged or hostile, or holds arrays that are not numbers.
    """
    texts, arrays = _contents(os.fspath(path))
    names = [[name, None] for name in texts] + [[name, list(array.shape)] for name, array in arrays.items()]
    first = json.dumps(names, separators=(",", ":")).encode()
    pieces = [Piece(text_form(first)), *(Piece(_member(text)) for text in texts.values())]
    for name, array in arrays.items():
        try:
            pieces.append(Piece(best_form(array), array.shape, *_weights_in(name, array)))
        except TypeError as error:
            raise FileRefused(f"{os.fspath(path)} cannot be packed: {ascii(name)[:80]}: {error}") from error
    return pieces, b"".join([first, *texts.values(), *(array.tobytes() for array in arrays.values())])


def _weights_in(name: str, array: np.ndarray) -> tuple[int, int]:
    """Returns the number of entries of a weight, and of those that are not zero; (0, 0) for an optimizer's."""
    return (0, 0) if name.startswith("optimizer/") else (array.size, int(np.count_nonzero(array)))


def _member(content: bytes) -> Any:
    return text_form(content) if len(content) < _TEXT_LIMIT else best_form(np.frombuffer(content, np.uint8))


def _contents(path: str) -> tuple[dict[str, bytes], dict[str, np.ndarray]]:
    """Returns the members but the weights, with the attributes of the weights, and the weights."""
    with checked_archive(path) as archive:
        if WEIGHTS not in archive.namelist():
            raise FileRefused(f"{path} cannot be packed: it has no {WEIGHTS}; it is damaged, or not a Keras 3 model.")
        texts = {name: archive.read(name) for name in archive.namelist() if name != WEIGHTS and name[-1] != "/"}
        with weights_member(path, archive) as file:
            check_h5(file, path)
            file.seek(0)
            with h5py.File(file, "r") as root:
                arrays, attributes = _weights(root)
    return texts | {ATTRIBUTES: json.dumps(attributes, separators=(",", ":")).encode()}, arrays


def _weights(root: h5py.File) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    arrays, attributes = {}, {}

    def visit(name: str, item: Any) -> None:
        found = {key: value.item() if isinstance(value, np.generic) else value for key, value in item.attrs.items()}
        if isinstance(item, h5py.Dataset):
            array = np.asarray(item[()], order="C")
            if array.dtype.kind == "V" and array.dtype.names is None:
                found[_OPAQUE] = array.dtype.str
                array = array.view(f"<u{array.dtype.itemsize}")
            arrays[name] = array
        # A group with members is made with them.
        if found or (isinstance(item, h5py.Group) and not len(item)):
            attributes[name] = found

    root.visititems(visit)
    attributes[""] = dict(root.attrs.items())
    return arrays, {name: found for name, found in attributes.items() if found or name}


def write_keras(path: Path, contents: Mapping[str, Any]) -> None:
    """Writes a `.keras` file from what `decoder.decode` returns.

    Raises:
        FileRefused: The contents are no Keras file, or one with members of unsafe names.
    """
    try:
        _write(path, contents)
    except OSError:
        raise
    except Exception as error:  # contents that another program made raise exceptions of every kind
        raise FileRefused("the packed file is damaged: it holds no Keras file.") from error
    with checked_archive(path):
        pass


def _write(path: Path, contents: Mapping[str, Any]) -> None:
    attributes = json.loads(contents[ATTRIBUTES])
    file = io.BytesIO()
    with h5py.File(file, "w") as root:
        for name, value in contents.items():
            if isinstance(value, np.ndarray):
                opaque = attributes.get(name, {}).pop(_OPAQUE, None)
                root.create_dataset(name, data=value if opaque is None else value.view(opaque))
        for name, found in attributes.items():
            item = root[name] if not name or name in root else root.create_group(name)
            for key, value in found.items():
                item.attrs[key] = value
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED) as archive:
        for name, value in contents.items():
            if isinstance(value, bytes) and name != ATTRIBUTES:
                archive.writestr(name, value)
        archive.writestr(WEIGHTS, file.getbuffer())
