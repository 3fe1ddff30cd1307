"""Loading of model files: checks `.keras` archives and HDF5 files before Keras opens them.

Keras itself refuses many of these files, each version more of them; the checks here do not depend on the version.
"""

import inspect
import io
import json
import math
import os
import re
import struct
import threading
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO, Any, BinaryIO

import h5py
import keras

from prunekit.anatomy.files.archives import LIMITS, FileRefused, Limits, checked_archive
from prunekit.anatomy.files.keras_hub_files import is_hub_layer
from prunekit.anatomy.graph.tracing import item_bytes

CONFIG = "config.json"
WEIGHTS = "model.weights.h5"
# Modules whose functions a config may name; functions in others, such as keras.utils, may do more than compute.
FUNCTIONS = frozenset(
    "builtins keras.activations keras.constraints keras.initializers keras.layers keras.losses keras.metrics "
    "keras.ops keras.optimizers keras.quantizers keras.random keras.regularizers".split()
)
PACKAGES = ("keras", "builtins")
# Layers that run code from another file; safe mode refuses them too, unless it is switched off.
FOREIGN = frozenset({"TFSMLayer", "TorchModuleWrapper"})
_IN_PYTHON = "build the model in a factory instead: model: {factory: package.module:function}"
_LOCAL_HEADER = 30
_UNTRAINED_OPTIMIZER = r"Skipping variable loading for optimizer .* whereas the saved optimizer has [0-2] variables"
_PATCHED = threading.RLock()


def check_model_file(path: str | os.PathLike[str], limits: Limits = LIMITS) -> None:
    """Raises unless `path` is a `.keras` file that may be opened; builds no model and changes nothing.

    Args:
        path: The file.
        limits: Limits on the sizes that the file may declare.

    Raises:
        FileRefused: The file is missing, damaged, hostile, or of another kind.
    """
    path = os.fspath(path)
    if not path.endswith(".keras"):
        raise FileRefused(f"only .keras files are read (in safe mode). Received: {path}.")
    if os.path.isdir(path):
        raise FileRefused(f"the model file {path} is a folder.")
    if "\0" in path or not os.path.isfile(path):
        raise FileRefused(f"the model file {path} does not exist.")
    try:
        if not zipfile.is_zipfile(path):
            raise FileRefused(f"{path} is not a .keras file: it is damaged, or has another format.")
        with checked_archive(path, limits) as archive:
            for name in (CONFIG, WEIGHTS):
                if name not in archive.namelist():
                    raise FileRefused(
                        f"{path} cannot be read: it has no {name}; it is damaged, or not a Keras 3 model."
                    )
            _check_config_member(path, archive, limits)
            with weights_member(path, archive) as file:
                check_h5(file, path, limits)
    except OSError as error:
        raise FileRefused(f"{path} cannot be read: {error.strerror or error}.") from error


def load_model(
    path: str | os.PathLike[str],
    *,
    compile: bool = True,
    limits: Limits = LIMITS,
    load: Callable[..., Any] | None = None,
) -> Any:
    """Returns the model in a `.keras` file, checked first and read in safe mode: no code in the file is run.

    Args:
        path: The file.
        compile: True also restores the compile configuration that the model had when it was saved.
        limits: Limits on the sizes that the file may declare.
        load: Function that opens the file after the checks, called as `load(path, compile=..., safe_mode=True)`.

    Raises:
        FileRefused: The file is missing, damaged, hostile, or needs classes that are not registered.
    """
    check_model_file(path, limits)
    path = os.fspath(path)
    with _reasons(path), bounded_weights(limits.allowance(os.path.getsize(path))), warnings.catch_warnings():
        # A model that was compiled and not trained: its optimizer has a step count and a learning rate, and no slots.
        warnings.filterwarnings("ignore", _UNTRAINED_OPTIMIZER)
        return (load or keras.models.load_model)(path, compile=compile, safe_mode=True)


def load_weights(model: keras.Model, path: str | os.PathLike[str], limits: Limits = LIMITS) -> None:
    """Loads the weights in a `.keras`, `.weights.h5` or `.h5` file into `model`, after checking the file.

    Args:
        model: A built model with the same layers as the saved model.
        path: The file.
        limits: Limits on the sizes that the file may declare.

    Raises:
        FileRefused: The file is missing, damaged or hostile, or holds the weights of another model.
    """
    (check_legacy_h5 if os.fspath(path).endswith(".h5") else check_model_file)(path, limits=limits)
    with _reasons(os.fspath(path)):
        model.load_weights(path)


@contextmanager
def _reasons(path: str) -> Iterator[None]:
    try:
        yield
    except FileRefused as error:
        raise FileRefused(f"{path} cannot be read: {error}") from error
    except Exception as error:  # a damaged file makes layers raise exceptions of every kind
        raise FileRefused(f"{path} cannot be read: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    text = str(error)
    if "safe_mode" in text or "unsafe" in text.lower():
        return f"it holds Python code (a Lambda layer), which safe mode does not run. If you trust it, {_IN_PYTHON}."
    unknown = re.search(r"Could not locate (?:class|function) '([^']+)'", text)
    if unknown is not None:
        return f"it needs {unknown[1]}, which is not registered here. Register it, or {_IN_PYTHON}."
    line = (text.strip() or type(error).__name__).splitlines()[0].rstrip(".")[:300]
    return f"the file is damaged or not a Keras 3 model: {line}."


# ---- the description of the model ------------------------------------------------------------------------------------


def check_config(text: str | bytes, path: str, packages: tuple[str, ...] = PACKAGES, limits: Limits = LIMITS) -> None:
    """Raises if a model's description (JSON) holds code, names foreign modules, or is beyond the limits.

    Args:
        text: The description.
        path: The file with the description, for error messages.
        packages: Packages that may define the classes and functions, besides registered classes and functions.
        limits: Limits on the description's size and nesting.

    Raises:
        FileRefused: The check failed; the message gives the reason.
    """
    _check_config_size(path, len(text), limits)
    try:
        pending = [(json.loads(text), 1)]
    except (ValueError, RecursionError) as error:
        raise FileRefused(f"{path} cannot be read: its description of the model is damaged: {error}.") from error
    if not isinstance(pending[0][0], dict):
        raise FileRefused(f"{path} cannot be read: its model description is not a mapping.")
    while pending:
        value, level = pending.pop()
        if level > limits.config_levels:
            raise FileRefused(f"{path}: expected at most {limits.config_levels} levels in the model's description.")
        if isinstance(value, dict):
            _check_object(value, path, packages)
            pending += [(item, level + 1) for item in value.values()]
        elif isinstance(value, list):
            pending += [(item, level + 1) for item in value]


def _check_config_size(path: str, size: int, limits: Limits) -> None:
    if size > limits.config_bytes:
        raise FileRefused(
            f"{path}: expected a description of the model of at most {limits.config_bytes:,} bytes. Received: {size:,}."
        )


def _check_object(value: dict[str, Any], path: str, packages: tuple[str, ...]) -> None:
    """Raises if an object of a description names code, a class or a function that Keras must not look up and call."""
    kind, module, config = value.get("class_name"), value.get("module"), value.get("config")
    # Safe mode alone is not enough: the process may have disabled it for all files.
    if kind == "__lambda__" or (kind == "Lambda" and isinstance(config, dict) and _is_legacy_code(config)):
        raise FileRefused(
            f"{path} cannot be read: it holds Python code (a Lambda layer), which is never run. If you trust it, "
            f"{_IN_PYTHON}."
        )
    if isinstance(kind, str) and kind in FOREIGN:
        raise FileRefused(f"{path} cannot be read: it holds a {kind}, which runs code of another file.")
    if kind is None or module is None or "config" not in value:
        return
    name, registered = config if kind == "function" else kind, value.get("registered_name")
    if not (isinstance(kind, str) and isinstance(module, str) and isinstance(name, str)):
        raise FileRefused(f"{path} cannot be read: its model description has a class name that is not text.")
    lookup = keras.saving.get_registered_object
    if is_hub_layer(value, path) or any(isinstance(item, str) and lookup(item) for item in (name, registered)):
        return
    if module.partition(".")[0] not in packages:
        raise FileRefused(
            f"{path} cannot be read: it needs {name[:80]}, which is not registered here (module {module[:80]}). "
            f"Register it, or {_IN_PYTHON}."
        )
    if kind == "function" and not _offers_functions(module):
        raise FileRefused(f"{path} cannot be read: it names {module[:80]}.{name[:80]}, which is not part of a model.")


def _offers_functions(module: str) -> bool:
    package, _, rest = module.partition(".")
    public = f"keras.{rest.removeprefix('src.')}" if rest else package
    return any(f"{public}.".startswith(f"{allowed}.") for allowed in FUNCTIONS)


def _is_legacy_code(config: dict[str, Any]) -> bool:
    """Returns True if a Lambda layer of an `.h5` file holds its function as bytes: [code, defaults, closure]."""
    return any(
        isinstance(config.get(name), list) and config.get(f"{name}_type", "lambda") in ("lambda", "raw")
        for name in ("function", "output_shape", "mask")
        if name == "function" or f"{name}_type" in config
    )


def _check_config_member(path: str, archive: zipfile.ZipFile, limits: Limits) -> None:
    _check_config_size(path, archive.getinfo(CONFIG).file_size, limits)
    try:
        text = archive.read(CONFIG)
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError) as error:
        raise FileRefused(f"{path} cannot be read: {CONFIG} is damaged: {error}.") from error
    check_config(text, path, limits=limits)


# ---- the weights -----------------------------------------------------------------------------------------------------


def check_h5(file: str | os.PathLike[str] | IO[bytes], path: str | None = None, limits: Limits = LIMITS) -> None:
    """Raises if an HDF5 file links to another place or file, or declares more numbers than it holds.

    Args:
        file: The file, or its path.
        path: Name of the file in error messages.
        limits: Limits on the sizes that the file may declare.

    Raises:
        FileRefused: The check failed; the message gives the place inside the file.
    """
    path = os.fspath(file) if path is None else path  # type: ignore[arg-type]
    try:
        with h5py.File(file, "r") as root:
            stored = root.id.get_filesize()
            declared = sum(_declared_bytes(item, path) for item in _objects(root, path, limits))
    except FileRefused:
        raise
    except (OSError, ValueError, KeyError, RuntimeError, TypeError) as error:
        line = (str(error).strip("\"' \n") or type(error).__name__).splitlines()[0].rstrip(".")
        raise FileRefused(f"{path} cannot be read: its weights are damaged: {line}.") from error
    if declared > limits.allowance(stored):
        raise FileRefused(
            f"{path}: its weights declare {declared:,} bytes, more than {limits.expansion} times the {stored:,} that "
            "are stored."
        )


def check_legacy_h5(
    path: str | os.PathLike[str], packages: tuple[str, ...] = ("keras", "tf_keras", "builtins"), limits: Limits = LIMITS
) -> None:
    """Raises if an `.h5` model of older Keras holds code, links to another place or file, or is beyond the limits.

    Args:
        path: The file.
        packages: Packages that may define its classes.
        limits: Limits on the sizes that the file may declare.

    Raises:
        FileRefused: The check failed; the message gives the reason.
    """
    path = os.fspath(path)
    if not os.path.isfile(path):
        raise FileRefused(f"the model file {path} does not exist.")
    check_h5(path, limits=limits)
    with h5py.File(path, "r") as root:
        texts = [root.attrs[name] for name in ("model_config", "training_config") if name in root.attrs]
    for text in texts:
        if not isinstance(text, str | bytes):
            raise FileRefused(f"{path} cannot be read: its model description is not text.")
        check_config(text, path, packages, limits)


def _objects(root: h5py.File, path: str, limits: Limits) -> Iterator[h5py.Group | h5py.Dataset]:
    """Yields every group and dataset once, even if several paths lead to it."""
    pending, seen = [root], {_address(root)}
    while pending:
        group = pending.pop()
        for name in group:
            if not isinstance(group.get(name, getlink=True), h5py.HardLink):
                raise FileRefused(f"{path}: {ascii(name)[:80]} in its weights points to another place or file.")
            item = group[name]
            if _address(item) in seen:
                continue
            seen.add(_address(item))
            if len(seen) > limits.objects:
                raise FileRefused(f"{path}: expected at most {limits.objects:,} groups and arrays of weights.")
            yield item
            if isinstance(item, h5py.Group):
                pending.append(item)


def _address(item: Any) -> int:
    return h5py.h5o.get_info(item.id).addr


def _declared_bytes(item: Any, path: str) -> int:
    if not isinstance(item, h5py.Dataset):
        return 0
    if item.external or item.is_virtual:
        raise FileRefused(f"{path}: {ascii(item.name)[:80]} in its weights stores its data in another file.")
    return math.prod(item.shape or ()) * item.dtype.itemsize


@contextmanager
def weights_member(path: str, archive: zipfile.ZipFile) -> Iterator[BinaryIO]:
    """Yields the weights of an archive as a seekable file.

    Raises:
        FileRefused: The weights are damaged.
    """
    member = archive.getinfo(WEIGHTS)
    try:
        # `open` compares the member's two descriptions: in the central directory and in front of the data.
        with archive.open(member) as packed:
            if member.compress_type == zipfile.ZIP_DEFLATED:
                yield io.BytesIO(packed.read())
                return
        with open(path, "rb") as file:
            file.seek(member.header_offset)
            header = file.read(_LOCAL_HEADER)
            start = member.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[-4:]))
            yield io.BufferedReader(_Window(file, start, member.file_size))
    except (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError, NotImplementedError, struct.error) as error:
        raise FileRefused(f"{path} cannot be read: {WEIGHTS} is damaged: {error}.") from error


class _Window(io.RawIOBase):
    """A byte range of a file, as a file; the zip archive's own reader reads from the start after each backward seek."""

    def __init__(self, file: BinaryIO, start: int, size: int):
        self._file, self._start, self._size, self._at = file, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._at = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence] + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        self._file.seek(self._start + self._at)
        content = self._file.read(max(0, min(len(buffer), self._size - self._at)))
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@contextmanager
def bounded_weights(most: int, layers: Any = keras.layers.Layer) -> Iterator[None]:
    """Limits the weights that layers built by this thread create inside the scope to `most` bytes in total.

    Args:
        most: Maximum number of bytes.
        layers: The class whose `add_weight` creates the weights; legacy Keras has its own class.

    Raises:
        FileRefused: A weight would exceed the bound; it is not allocated.
    """
    with _PATCHED:
        original, thread, made = layers.add_weight, threading.get_ident(), 0
        # In legacy Keras the first argument is the name, in Keras 3 the shape.
        bound = inspect.signature(original).bind_partial

        def counted(layer: Any, *args: Any, **kwargs: Any) -> Any:
            nonlocal made
            if threading.get_ident() == thread:
                given = bound(layer, *args, **kwargs).arguments
                made += _bytes_of(given.get("shape"), given.get("dtype") or layer.variable_dtype)
                if made > most:
                    raise FileRefused(
                        f"it describes a model of more than {most:,} bytes of weights, which the file cannot hold."
                    )
            return original(layer, *args, **kwargs)

        layers.add_weight = counted
        try:
            yield
        finally:
            layers.add_weight = original


def _bytes_of(shape: Any, dtype: Any) -> int:
    lengths = [shape] if isinstance(shape, int) else list(shape or ())
    if not all(isinstance(length, int) for length in lengths):
        return 0
    return math.prod(lengths) * item_bytes(dtype)
