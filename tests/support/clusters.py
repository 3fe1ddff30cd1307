"""Starts Python processes as workers of one cluster on 127.0.0.1, waits for them, and leaves none behind."""

import contextlib
import ctypes
import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass(frozen=True)
class Ended:
    """A process that ended: its exit code, negative for a signal, and all that it printed."""

    code: int
    output: str


def environment(**more):
    """What a process of the tests runs with: this prunekit, the tests' modules, no GPU, no TensorFlow chatter."""
    ours = {
        "PYTHONPATH": f"{ROOT}{os.pathsep}{HERE}",
        "KERAS_BACKEND": "tensorflow",
        "CUDA_VISIBLE_DEVICES": "-1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    return {**os.environ, **ours, **more}


def run(*arguments, seconds=600, **more):
    """One process to its end; fails the test, with what it printed, unless it succeeds."""
    done = subprocess.run(
        [sys.executable, *map(str, arguments)],
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=seconds,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def run_workers(count, *arguments, seconds=600, after_a_death=3):
    """Runs the same command as `count` workers; returns how each ended, in the order of their indices.

    Args:
        count: How many.
        *arguments: For the Python interpreter.
        seconds: How long the whole may take before all are killed.
        after_a_death: How long the others may live on when one was killed: a cluster manager would end them then.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(_alone())
        addresses = [f"127.0.0.1:{port}" for port in _free_ports(count)]
        workers = []
        for index in range(count):
            config = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": index}}
            workers.append(stack.enter_context(_worker(arguments, json.dumps(config))))
        _wait([worker for worker, _ in workers], time.monotonic() + seconds, after_a_death)
        return [Ended(worker.returncode, _read(output)) for worker, output in workers]


@contextlib.contextmanager
def _alone():
    """Context manager in which no other test process has a cluster, so free ports remain free."""
    with open(Path(tempfile.gettempdir()) / f"prunekit-tests-{os.getuid()}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _worker(arguments, config):
    # A file, not a pipe: a worker would block on a full pipe that is not read.
    with tempfile.TemporaryFile() as output:
        worker = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=environment(TF_CONFIG=config),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_die_with_parent,
        )
        try:
            yield worker, output
        finally:
            worker.kill()
            worker.wait()


def _die_with_parent():
    # So that workers go even where the tests themselves are killed. PR_SET_PDEATHSIG is 1, and Linux's.
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)


def _wait(workers, deadline, after_a_death):
    while any(worker.poll() is None for worker in workers) and time.monotonic() < deadline:
        if any((worker.returncode or 0) < 0 for worker in workers):
            deadline, after_a_death = min(deadline, time.monotonic() + after_a_death), float("inf")
        time.sleep(0.1)
    for worker in workers:
        worker.kill()
        worker.wait()


def _read(output):
    output.seek(0)
    return output.read().decode(errors="replace")


def _free_ports(count):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]
