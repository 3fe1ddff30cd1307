"""Description of the machine, peak memory of a process, and times of several functions that run in turns."""

import os
import platform
import re
import resource
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any


def machine() -> str:
    """Processor, cores, memory and versions; nothing that names the machine."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        name = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        name = platform.machine()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    packages = ("tensorflow", "keras", "tf_keras", "tensorflow-model-optimization", "numpy", "prunekit")
    versions = ", ".join(f"{package} {version(package)}" for package in packages)
    return f"{name}, {cores} cores, {platform.system()}, Python {platform.python_version()}, {versions}"


def peak_memory() -> float:
    """Most resident memory this process ever had, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def peak(reset: bool = False) -> int:
    """The most bytes of memory that this process has held, since the last reset where the system can do that."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    text = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"VmHWM:\s+(\d+)", text)[1]) * 1024


def timed(function: Callable[..., Any], *arguments: Any) -> tuple[float, float]:
    """Returns the seconds and the CPU seconds of a call."""
    began, spent = time.perf_counter(), time.process_time()
    function(*arguments)
    return time.perf_counter() - began, time.process_time() - spent


def turns(smoke: bool) -> int:
    """Returns the number of measurements of each way: nine, or one in a smoke test."""
    return 1 if smoke else 9


def numbered(repeats: int) -> range:
    """Returns the numbers of the turns, from 1; with several turns, turn 0 comes first and is not counted."""
    return range(0 if repeats > 1 else 1, repeats + 1)


def in_turns(ways: dict[str, Callable[[], Any]], repeats: int) -> dict[str, list[float]]:
    """Returns seconds of each run of each way; with several runs, a first run is not counted."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for turn in numbered(repeats):
        for name, way in ways.items():
            began = time.perf_counter()
            way()
            if turn:
                seconds[name].append(time.perf_counter() - began)
    return seconds
