"""Runs a job in processes that kill themselves, and again until it ends: `python killing.py JOB FOLDER CHAIN ...`.

TensorFlow is imported once and not started; each process is a fork of that one, which saves most of the time. A moment
is just before, or just after, the n-th event of a kind in its process: a batch, an array written into a checkpoint, one
of the calls with which files are put in their places.
"""

import importlib
import json
import os
import random
import signal
import sys
import traceback
from pathlib import Path

_AT_ONCE = 2
CALLS = ("fsync", "replace", "rename", "unlink", "mkdir")
# In turn. A process that goes on after a first kill also reads, and has fewer events before it ends.
FIRST = ("batch", "array", "replace", "fsync", "dataset", "save", "rename", "unlink", "epoch", "end")
SECOND = ("batch", "read", "array", "fsync", "dataset", "mkdir", "replace", "epoch")


class Events:
    """Counts events, notes them, and kills the process at one of them: (kind, number, "before" or "after")."""

    def __init__(self, moment, log):
        self._moment, self._log, self._counts = moment, log, {}

    def listen(self):
        """Makes events of functions, in this process for good."""
        import h5py
        import keras

        from prunekit.core.runtime import snapshot

        for name in CALLS:
            self._around(os, name, name)
        self._around(snapshot, "_raw", "array")
        self._around(snapshot, "read_snapshot", "read")
        self._around(h5py.Group, "create_dataset", "dataset")
        self._around(keras.Model, "save", "save")
        for name in ("batch", "epoch", "end"):
            self._around(keras.callbacks.CallbackList, "on_train_end" if name == "end" else _LIST[name], name)

    def _around(self, owner, name, kind):
        inner = getattr(owner, name)

        def event(*args, **kwargs):
            self._happens(kind, "before")
            result = inner(*args, **kwargs)
            self._happens(kind, "after")
            return result

        setattr(owner, name, event)

    def _happens(self, kind, when):
        number = self._counts[kind, when] = self._counts.get((kind, when), 0) + 1
        if when == "before" and self._log is not None:
            self._log.write(f"{kind}\n")
        if (kind, number, when) == self._moment:
            os.kill(os.getpid(), signal.SIGKILL)


_LIST = {"batch": "on_train_batch_end", "epoch": "on_epoch_end"}


def in_fork(function):
    """The number of a process that calls the function and ends."""
    sys.stdout.flush()
    process = os.fork()
    if process == 0:
        code = 3
        try:
            function()
            code = 0
        except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
            traceback.print_exc()
        os._exit(code)
    return process


def run(job, folder, moment=None, log=None):
    """Runs the job in its own process; returns False if it was killed at the moment."""

    def work():
        with open(log or os.devnull, "w") as file:
            Events(moment, file if log else None).listen()
            job(Path(folder))

    _, status = os.waitpid(in_fork(work), 0)
    if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL:
        return False
    if status:
        raise RuntimeError(f"{job.__name__} failed in {folder} after {moment}")
    return True


def chain(job, folder, happened, number):
    """Kills the job twice and lets it end; the moments at which it was killed."""
    folder.mkdir()
    draw, killed = random.Random(number), []
    for kinds, share in ((FIRST, 1), (SECOND, 4)):
        kinds = [kind for kind in kinds if kind in happened or kind == "read"]
        kind = kinds[number % len(kinds)]
        moment = (kind, draw.randint(1, max(1, happened.get(kind, 1) // share)), draw.choice(("before", "after")))
        if run(job, folder, moment):
            return killed
        killed.append(moment)
    if not run(job, folder):
        raise RuntimeError("killed by another process")
    return killed


def main(name, folder, numbers):
    """Writes what happened, as JSON, into FOLDER/killed-N.json; FOLDER/whole is the job that was not killed."""
    module, _, function = name.partition(":")
    job = getattr(importlib.import_module(module), function)
    folder = Path(folder)
    (folder / "whole").mkdir()
    run(job, folder / "whole", log=folder / "log")
    events = (folder / "log").read_text().split()
    happened = {kind: events.count(kind) for kind in events}

    def some_chains(first):
        for number in numbers[first::_AT_ONCE]:
            killed = chain(job, folder / f"killed-{number}", happened, number)
            (folder / f"killed-{number}.json").write_text(json.dumps(killed))

    processes = [in_fork(lambda first=first: some_chains(first)) for first in range(_AT_ONCE)]
    sys.exit(max(os.waitpid(process, 0)[1] for process in processes) != 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], [int(number) for number in sys.argv[3:]])
