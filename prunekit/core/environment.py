"""Reports the training environment: backend, devices, processor, precision, XLA, distribution, versions.

Keras is imported inside the functions: that it does not start is something to tell, not to fail at.
"""

import ctypes
import importlib
import importlib.metadata
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
        name: As `keras.device` takes it, such as "GPU:0".
        kind: "CPU", "GPU", "TPU".
        model: What its maker calls it, None where the backend does not say.
        memory: Its own memory in bytes, None where unknown and for processors.
        compute_capability: Of CUDA, such as "9.0"; None for other devices.
    """

    name: str
    kind: str
    model: str | None = None
    memory: int | None = None
    compute_capability: str | None = None


@dataclass(frozen=True)
class Environment:
    """This process as a place to train in; what is not known is None.

    Attributes:
        backend: Of Keras; None where Keras or its backend does not start.
        problem: Why it does not start, in one line; None where it does.
        devices: Those the backend may use.
        cores: Processor cores this process may use.
        memory: Main memory in bytes.
        memory_available: How much of it programs can still have.
        floatx: The default float type of Keras.
        dtype_policy: The default policy of its layers.
        xla: Whether XLA compiled a small function just now; None where the backend does not use XLA.
        xla_problem: Why it did not, in one line.
        strategy: The tf.distribute strategy in scope.
        replicas: How many replicas it updates; 1 where none is in scope.
        versions: Of Python and of packages; None for one that is not installed.
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
        """Where operations run that nobody placed: the first accelerator, else the processor."""
        accelerators = [device.name for device in self.devices if device.kind != "CPU"]
        return next(iter([*accelerators, *(device.name for device in self.devices)]), None)

    def to_dict(self) -> dict[str, Any]:
        """Everything, as JSON can hold it."""
        return {**asdict(self), "devices": [asdict(device) for device in self.devices]}


def describe() -> Environment:
    """The environment of this process; starts the backend and its devices, and compiles a small function."""
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
            raise RuntimeError(f"prunekit works on Keras 3. Received: Keras {keras.__version__}.")
        backend = keras.backend.backend()
        found_devices = devices()
    except Exception as error:  # noqa: BLE001 (each backend fails to start in a way of its own)
        return Environment(**found | {"devices": (), "problem": _line(error)})
    found["xla"], found["xla_problem"] = _try_xla(backend)
    found["strategy"], found["replicas"] = _distribution(backend)
    found |= {"floatx": keras.config.floatx(), "dtype_policy": keras.config.dtype_policy().name}
    return Environment(**found | {"backend": backend, "devices": found_devices})


def devices() -> tuple[Device, ...]:
    """Those that Keras's backend may use; none where prunekit does not know the backend."""
    backend = importlib.import_module("keras").backend.backend()
    return _DEVICES[backend]() if backend in _DEVICES else ()


# ---- packages --------------------------------------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Versions of Python, prunekit and the packages that training, export and the backends come from."""
    own = {"python": platform.python_version(), "prunekit": __version__}
    return {**own, **{package: version_of(package) for package in PACKAGES}}


def version_of(package: str) -> str | None:
    """A package's version, None where it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


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
    """Whether XLA compiles a function here and it answers rightly, and else why not."""
    if backend not in ("tensorflow", "jax"):
        return None, None
    import numpy as np

    from prunekit.core import compilation

    def double(values: Any) -> Any:
        return values * 2.0

    try:
        function = (
            compilation.OpenFunction(double, xla=True) if backend == "tensorflow" else compilation.compiled(double)
        )
        answer = np.asarray(function(np.array([1.0, 3.0], "float32"))).tolist()
    except Exception as error:  # noqa: BLE001 (a missing tool, library or driver: XLA fails in many ways)
        return False, _line(error)
    return (True, None) if answer == [2.0, 6.0] else (False, f"it compiled 2 * [1, 3] to {answer}")


def _distribution(backend: str) -> tuple[str | None, int | None]:
    """The strategy of tf.distribute in scope, and its replicas."""
    if backend != "tensorflow":
        return None, None
    import tensorflow as tf

    strategy = tf.distribute.get_strategy()
    return type(strategy).__name__ if tf.distribute.has_strategy() else None, strategy.num_replicas_in_sync


def _line(error: BaseException) -> str:
    """An error in one line: the first that says anything."""
    lines = [" ".join(line.split()) for line in str(error).splitlines()]
    return next(filter(None, lines), type(error).__name__).rstrip(".")
