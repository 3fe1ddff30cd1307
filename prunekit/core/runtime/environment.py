"""Reports the training environment: backend, devices, processor, precision, XLA, distribution, versions.

Keras is imported inside the functions, so that a failed import can be reported.
"""

import ctypes
import importlib
import importlib.metadata
import importlib.util
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from prunekit.version import __version__

PACKAGES = ("keras", "tensorflow", "numpy", "tensorflow-model-optimization", "ai-edge-litert", "jax", "torch")
_MEMORY = Path("/proc/meminfo")


@dataclass(frozen=True)
class Device:
    """A device that the backend may use.

    Attributes:
        name: Name for `keras.device`, such as "GPU:0".
        kind: "CPU", "GPU", "TPU".
        model: Product name; None if the backend does not report it.
        memory: Device memory in bytes; None if unknown, and for CPUs.
        compute_capability: CUDA compute capability, such as "9.0"; None for other devices.
    """

    name: str
    kind: str
    model: str | None = None
    memory: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Environment:
    """The environment of this process; unknown values are None.

    Attributes:
        backend: Backend of Keras; None if Keras or its backend does not start.
        problem: Reason why it does not start, in one line; None if it starts.
        devices: Devices that the backend may use.
        cores: Number of processor cores that this process may use.
        memory: Main memory in bytes.
        memory_available: Main memory in bytes that is available to programs.
        floatx: Default float type of Keras.
        dtype_policy: Default dtype policy of Keras layers.
        xla: True if XLA compiled a small function; None if the backend does not use XLA.
        xla_problem: Reason why XLA failed, in one line.
        strategy: Name of the tf.distribute strategy in scope.
        replicas: Number of replicas of the strategy; 1 without a strategy.
        versions: Versions of Python and of packages; None for a package that is not installed.
    """

    backend: str | None
    problem: str | None
    devices: tuple[Device, ...]
    cores: int | None
    memory: int | None
    memory_available: int | None
    floatx: str | None
    dtype_policy: str | None
    xla: bool | None
    xla_problem: str | None
    strategy: str | None
    replicas: int | None
    versions: dict[str, str | None]

    @property
    def main_device(self) -> str | None:
        """Default device of operations: the first accelerator, or the CPU."""
        accelerators = [device.name for device in self.devices if device.kind != "CPU"]
        return next(iter([*accelerators, *(device.name for device in self.devices)]), None)

    def to_dict(self) -> dict[str, Any]:
        """Returns all fields as JSON-compatible values."""
        return {**asdict(self), "devices": [asdict(device) for device in self.devices]}


def describe() -> Environment:
    """Returns the environment of this process; starts the backend and its devices, and compiles a small function."""
    memory, available = main_memory()
    found: dict[str, Any] = {
        "cores": _cores(),
        "memory": memory,
        "memory_available": available,
        "versions": versions(),
        **dict.fromkeys(("backend", "problem", "floatx", "dtype_policy", "xla", "xla_problem", "strategy", "replicas")),
    }
    try:
        keras = importlib.import_module("keras")
        if int(keras.__version__.split(".")[0]) < 3:
            raise RuntimeError(f"prunekit needs Keras 3. Received: Keras {keras.__version__}.")
        backend = keras.backend.backend()
        found_devices = devices()
    except Exception as error:  # noqa: BLE001 (each backend raises its own exceptions)
        return Environment(**found | {"devices": (), "problem": _line(error)})
    found["xla"], found["xla_problem"] = _try_xla(backend)
    found["strategy"], found["replicas"] = _distribution(backend)
    found |= {"floatx": keras.config.floatx(), "dtype_policy": keras.config.dtype_policy().name}
    return Environment(**found | {"backend": backend, "devices": found_devices})


def devices() -> tuple[Device, ...]:
    """Returns the devices that Keras's backend may use; an empty tuple for an unknown backend."""
    backend = importlib.import_module("keras").backend.backend()
    return _DEVICES[backend]() if backend in _DEVICES else ()


# ---- packages --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Returns the versions of Python, prunekit and the packages for training, export and the backends."""
    own = {"python": platform.python_version(), "prunekit": __version__}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def version_of(package: str) -> str | None:
    """Returns a package's version; None if the package is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def is_installed(module: str) -> bool:
    """Returns True if a module of this name can be imported; does not import it."""
    return importlib.util.find_spec(module) is not None


# ---- the machine -----------------------------------------------------------------------------------------------------


def _cores() -> int | None:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        # macOS and Windows bind no process to cores.
        return os.cpu_count()


def main_memory() -> tuple[int | None, int | None]:
    """Bytes of main memory: all of it, and what is available."""
    try:
        lines = _MEMORY.read_text(encoding="ascii").splitlines()
        kilobytes = {name: int(value.split()[0]) for name, value in (line.split(":", 1) for line in lines)}
    except (OSError, ValueError, IndexError):
        return None, None
    total, available = (kilobytes.get(name) for name in ("MemTotal", "MemAvailable"))
    return total and total * 1024, available and available * 1024


def _tensorflow_devices() -> tuple[Device, ...]:
    import tensorflow as tf

    found = []
    for device in tf.config.get_visible_devices():
        name = device.name.removeprefix("/physical_device:")
        details = tf.config.experimental.get_device_details(device)
        capability = details.get("compute_capability")
        found.append(
            Device(
                name=name,
                kind=device.device_type,
                model=details.get("device_name"),
                memory=_cuda_memory(int(name.rpartition(":")[2])) if capability else None,
                compute_capability=".".join(map(str, capability)) if capability else None,
            )
        )
    return tuple(found)


def _cuda_memory(index: int) -> int | None:
    """Bytes of memory of a CUDA device. TensorFlow has no question for it; the driver counts devices as it does."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    device, size = ctypes.c_int(), ctypes.c_size_t()
    answers = [cuda.cuInit(0), cuda.cuDeviceGet(ctypes.byref(device), index)]
    answers.append(cuda.cuDeviceTotalMem_v2(ctypes.byref(size), device))
    return None if any(answers) else size.value


def _jax_devices() -> tuple[Device, ...]:
    import jax

    found = []
    for device in jax.devices():
        kind = device.platform.upper()
        memory = (device.memory_stats() or {}).get("bytes_limit") if kind != "CPU" else None
        capability = getattr(device, "compute_capability", None)
        model = device.device_kind if kind != "CPU" else None
        found.append(Device(f"{kind}:{device.id}", kind, model, memory, capability and str(capability)))
    return tuple(found)


def _torch_devices() -> tuple[Device, ...]:
    import torch

    found = [Device("CPU:0", "CPU")]
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        found.append(Device(f"GPU:{index}", "GPU", card.name, card.total_memory, f"{card.major}.{card.minor}"))
    return tuple(found)


_DEVICES: dict[str, Callable[[], tuple[Device, ...]]] = {
    "tensorflow": _tensorflow_devices,
    "jax": _jax_devices,
    "torch": _torch_devices,
}


# ---- the backend -----------------------------------------------------------------------------------------------------


def _try_xla(backend: str) -> tuple[bool | None, str | None]:
    """Returns (whether XLA compiles a function that computes correct results, reason of a failure)."""
    if backend not in ("tensorflow", "jax"):
        return None, None
    import numpy as np

    from prunekit.core.runtime import compilation

    def double(values: Any) -> Any:
        return values * 2.0

    try:
        function = (
            compilation.OpenFunction(double, xla=True) if backend == "tensorflow" else compilation.compiled(double)
        )
        answer = np.asarray(function(np.array([1.0, 3.0], "float32"))).tolist()
    except Exception as error:  # noqa: BLE001 (a missing tool, library or driver raises various exceptions)
        return False, _line(error)
    return (True, None) if answer == [2.0, 6.0] else (False, f"it compiled 2 * [1, 3] to {answer}")


def _distribution(backend: str) -> tuple[str | None, int | None]:
    """Returns the name of the tf.distribute strategy in scope, and its number of replicas."""
    if backend != "tensorflow":
        return None, None
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    return type(strategy).__name__ if tf.distribute.has_strategy() else None, strategy.num_replicas_in_sync


def _line(error: BaseException) -> str:
    """Returns the first non-empty line of an error message."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__).rstrip(".")
