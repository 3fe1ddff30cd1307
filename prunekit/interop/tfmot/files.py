"""Loads tf_keras models from files (.h5, .keras, SavedModel) without running or importing code that a file names.

The file's config is read as JSON, rebuilt from known classes, and only then passed to tf_keras. Only arrays are read
from the rest of the file. A SavedModel's graphs are not loaded.
"""

import functools
import json
import os
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from prunekit.anatomy.files.archives import LIMITS, FileRefused, checked_archive
from prunekit.anatomy.files.model_files import WEIGHTS, bounded_weights, check_h5, weights_member
from prunekit.interop.tfmot import legacy
from prunekit.interop.tfmot.config import cleaned

_CONVERT = "Convert a .h5, .hdf5 or .keras file or a SavedModel folder that tf_keras wrote."


@dataclass(frozen=True, eq=False)
class LegacyFile:
    """A model read from a file, with the training settings in the file.

    Attributes:
        model: tf_keras model with wrappers and weights; not compiled.
        training: Loss, metrics and optimizer in the file's format; empty if the model was not compiled.
        slots: Variables of the optimizer in the optimizer's order, the update count first; empty if none are saved.
    """

    model: Any
    training: Mapping[str, Any]
    slots: Sequence[np.ndarray] = ()


def read_file(path: str | os.PathLike[str]) -> LegacyFile:
    """Returns the model in a legacy file or SavedModel folder.

    Raises:
        ValueError: The file is missing, damaged, of another kind, or has layers that cannot be carried.
        ImportError: tf_keras or tensorflow-model-optimization is not installed.
    """
    path = Path(path)
    reader = _reader(path)
    try:
        most, layers = LIMITS.allowance(_stored_bytes(path)), legacy.tf_keras().layers.Layer
        with legacy.tf_keras().utils.custom_object_scope(legacy.wrapper_classes()), bounded_weights(most, layers):
            return reader(path)
    except ImportError:
        raise
    except FileRefused as error:
        raise FileRefused(str(error) if str(path) in str(error) else f"{path}: {error}") from error
    except Exception as error:  # noqa: BLE001 h5py, protobuf, TensorFlow and tf_keras raise many kinds
        raise ValueError(f"{path}: {first_line(error)}") from error


def _reader(path: Path) -> Any:
    if path.is_dir():
        if not (path / "saved_model.pb").is_file():
            raise ValueError(f"{path} is a folder without saved_model.pb. {_CONVERT}")
        return _saved_model
    if not path.exists():
        raise ValueError(f"{path}: no such file.")
    readers = {".h5": _hdf5, ".hdf5": _hdf5, ".keras": _archive}
    if path.suffix not in readers:
        raise ValueError(f"{path} has an unsupported file type. {_CONVERT}")
    return readers[path.suffix]


def _stored_bytes(path: Path) -> int:
    """Returns the size in bytes of a file, or of all files in a folder."""
    return sum(one.stat().st_size for one in (path.rglob("*") if path.is_dir() else (path,)) if one.is_file())


def first_line(error: BaseException) -> str:
    """Returns an exception's message in one line, shortened in case it contains a whole config."""
    lines = str(error).strip().splitlines()
    if isinstance(error, ValueError) and lines:
        return lines[0][:1500]
    return f"it is damaged, or the libraries themselves cannot use it ({type(error).__name__}: {' '.join(lines)[:200]})"


# ---------------------------------------------------------------- .h5


def _hdf5(path: Path) -> LegacyFile:
    import h5py
    from tf_keras.src.saving.legacy import hdf5_format

    check_h5(path)
    with h5py.File(path, "r") as file:
        if file.attrs.get("model_config") is None:
            raise ValueError(
                "the file holds weights without a model. Build the model with tf_keras, load them, and save it whole."
            )
        _refuse_keras_3(_text(file.attrs.get("keras_version", "")))
        model = _model_from_config(json.loads(_text(file.attrs["model_config"])))
        training = json.loads(_text(file.attrs.get("training_config", "{}")))
        slots = []
        if "optimizer_weights" in file:
            slots = [np.asarray(one) for one in hdf5_format.load_optimizer_weights_from_hdf5_group(file)]
    model.load_weights(str(path))
    return LegacyFile(model, training, slots)


def _text(value: Any) -> str:
    return value.decode("utf-8") if isinstance(value, bytes) else str(value)


def _refuse_keras_3(version: str) -> None:
    if version.startswith("3"):
        raise ValueError(f"the file is of Keras {version} already: keras.models.load_model reads it.")


# ---------------------------------------------------------------- .keras


def _archive(path: Path) -> LegacyFile:
    import h5py

    if not zipfile.is_zipfile(path):
        raise ValueError("it is not a .keras file: it is damaged, or has another format.")
    with checked_archive(path) as archive:
        _refuse_keras_3(str(_member(archive, "metadata.json").get("keras_version", "")))
        config = _member(archive, "config.json")
        if WEIGHTS not in archive.namelist():
            raise ValueError(f"the file has no {WEIGHTS}.")
        with weights_member(str(path), archive) as member:
            check_h5(member, str(path))
            with h5py.File(member, "r") as file:
                variables = file["optimizer/vars"] if "optimizer/vars" in file else {}
                slots = [np.asarray(variables[name]) for name in sorted(variables, key=int)]
    training = config.pop("compile_config", None) or {}
    model = _deserialized(cleaned(config))
    _expect_repetitions(model)
    model.load_weights(str(path))
    return LegacyFile(model, training, slots)


def _member(archive: zipfile.ZipFile, name: str) -> dict[str, Any]:
    if archive.getinfo(name).file_size > LIMITS.config_bytes:
        raise ValueError(f"its {name} is larger than {LIMITS.config_bytes >> 20} MiB.")
    return json.loads(archive.read(name))


def _expect_repetitions(model: Any) -> None:
    """Patches quantization wrappers so that they can load their saved variables.

    A wrapper saves its layer's variables before its own if the layer was built before the wrapper. The layer was built
    first when the model was created, but not when the file is read: without the patch, tf_keras cannot load the file.
    """
    for layer in model._flatten_layers():
        if hasattr(layer, "quantize_config"):
            layer.load_own_variables = functools.partial(_load_last_variables, layer)


def _load_last_variables(layer: Any, store: Mapping[str, Any]) -> None:
    own = layer._trainable_weights + layer._non_trainable_weights
    repeated = len(layer._weight_vars) + len(layer.layer.trainable_weights)
    if len(store) not in (len(own), len(own) + repeated):
        raise ValueError(
            f"the quantization of layer {layer.layer.name!r} is not the default one: {len(store)} arrays are saved, "
            f"{len(own)} or {len(own) + repeated} were expected. Save the model as a SavedModel."
        )
    names = sorted(store, key=int)[len(store) - len(own) :]
    for variable, name in zip(own, names, strict=True):
        variable.assign(store[name])


def _deserialized(config: Mapping[str, Any]) -> Any:
    from tf_keras.src.saving import saving_lib, serialization_lib

    former = getattr(saving_lib._SAVING_V3_ENABLED, "value", False)
    saving_lib._SAVING_V3_ENABLED.value = True
    try:
        with serialization_lib.ObjectSharingScope():
            return serialization_lib.deserialize_keras_object(config, safe_mode=True)
    finally:
        saving_lib._SAVING_V3_ENABLED.value = former


# ---------------------------------------------------------------- SavedModel


def _saved_model(path: Path) -> LegacyFile:
    import tensorflow as tf
    from tf_keras.protobuf import saved_metadata_pb2

    file = path / "keras_metadata.pb"
    if not file.is_file():
        raise ValueError("the folder has no keras_metadata.pb, so the layers are not known: only model.save writes it.")
    metadata = saved_metadata_pb2.SavedMetadata()
    metadata.ParseFromString(file.read_bytes())
    root = json.loads(next(node.metadata for node in metadata.nodes if node.node_path == "root"))
    model = _model_from_config({"class_name": root["class_name"], "config": root.get("config") or {}})
    prefix = str(path / "variables" / "variables")
    model.load_weights(prefix).assert_existing_objects_matched().expect_partial()
    return LegacyFile(model, root.get("training_config") or {}, _saved_slots(tf.train.load_checkpoint(prefix)))


def _saved_slots(reader: Any) -> list[np.ndarray]:
    start, end = "optimizer/_variables/", "/.ATTRIBUTES/VARIABLE_VALUE"
    names = reader.get_variable_to_shape_map()
    numbers = sorted(int(name[len(start) : -len(end)]) for name in names if name.startswith(start))
    count = f"optimizer/_iterations{end}"
    if count not in names or numbers != list(range(1, len(numbers) + 1)):
        return []
    return [reader.get_tensor(name) for name in (count, *(f"{start}{number}{end}" for number in numbers))]


def _model_from_config(config: Mapping[str, Any]) -> Any:
    return legacy.tf_keras().models.model_from_config(cleaned(config))
