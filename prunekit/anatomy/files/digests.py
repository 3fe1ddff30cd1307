"""Digests of arrays and models: whether two have the same weights, or the same architecture."""

import hashlib
import json
from typing import Any

import keras
import numpy as np

from prunekit.anatomy.layers.model_weights import weights_in
from prunekit.sparsity.array_ops import array_of


def array_digest(array: np.ndarray) -> str:
    """Returns the SHA-256 digest of the dtype, shape and bytes of an array."""
    total = hashlib.sha256(f"{array.dtype.str} {array.shape}".encode())
    total.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return total.hexdigest()


def weight_arrays(model: Any) -> dict[str, np.ndarray]:
    """Returns {readable weight name: NumPy array} for every weight of a model, in layer order."""
    return {weight.name: np.array(array_of(weight.variable)) for weight in weights_in(model)}


def data_digest(structure: Any) -> str:
    """Returns the SHA-256 over the types, shapes and bytes of all arrays and tensors in a structure."""
    total = hashlib.sha256()
    for leaf in keras.tree.flatten(structure):
        array = np.asarray(leaf if leaf is None else keras.ops.convert_to_numpy(leaf))
        total.update(f"{array.dtype} {array.shape}".encode())
        total.update(repr(array.tolist()).encode() if array.dtype == object else np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def model_digest(model: Any) -> str:
    """Returns the SHA-256 over the names, types, shapes and bytes of all weights."""
    total = hashlib.sha256()
    for name, array in weight_arrays(model).items():
        total.update(f"{name} {array_digest(array)}\n".encode())
    return total.hexdigest()


def architecture_digest(model: Any) -> str | None:
    """Returns the SHA-256 of a model's configuration; None without one, as for a subclass without `get_config`."""
    try:
        found = json.loads(model.to_json())
    except (NotImplementedError, TypeError, ValueError):
        return None
    # Automatic names depend on the models built earlier in the process, and look like user names: number all names.
    names: dict[str, int] = {}

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            if isinstance(value.get("name"), str):
                names.setdefault(value["name"], len(names))
            # The recipe defines the compile settings; `shared_object_id` is a memory address, different in each run.
            left_out = ("compile_config", "shared_object_id")
            return {key: plain(item) for key, item in value.items() if key not in left_out}
        if isinstance(value, list):
            return [plain(item) for item in value]
        return f"#{names[value]}" if isinstance(value, str) and value in names else value

    return hashlib.sha256(json.dumps(plain(found)).encode()).hexdigest()
