"""Worker processes: the parent names a function and its arguments, the worker answers with lines of JSON.

`python -m benchmarks.workers` reads one task per line, {"call": "module:function", "arguments": {...}}. An answer is a
line that begins with "@"; other lines are what libraries print. A function that returns a generator runs in turns: it
computes an item each time that the parent asks for one.
"""

import contextlib
import inspect
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parents[1]
NOTHING: Mapping[str, str] = MappingProxyType({})


# The parent -----------------------------------------------------------------------------------------------------------


def inherited() -> dict[str, str]:
    """The environment of a worker process that is given no variables: Keras runs on TensorFlow by default."""
    path = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {"KERAS_BACKEND": "tensorflow", **os.environ, "PYTHONPATH": os.pathsep.join(path)}


class Worker:
    """A worker process; a context manager, so that none outlives this script.

    Args:
        environment: Variables that the process gets besides the inherited ones.
    """

    def __init__(self, environment: Mapping[str, str] = NOTHING):
        self._errors = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.workers"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
            env={**inherited(), **environment},
        )

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *exception) -> None:
        self._process.kill()
        self._process.wait()
        self._process.stdin.close()
        self._process.stdout.close()
        self._errors.close()

    def call(self, function: Callable[..., Any], **arguments: Any) -> Any:
        """The value of a function of a module, called in the process."""
        self._start(function, arguments)
        return self._answer()["value"]

    def items(self, function: Callable[..., Any], **arguments: Any) -> Generator[Any, None, Any]:
        """The items of a generator function, each computed when it is asked for; returns the value of the function."""
        self._start(function, arguments)
        while "value" not in (answer := self._answer()):
            yield answer["item"]
            self._tell("")
        return answer["value"]

    def _start(self, function: Callable[..., Any], arguments: dict[str, Any]) -> None:
        name = f"{function.__module__}:{function.__qualname__}"
        self._tell(json.dumps({"call": name, "arguments": arguments}))

    def _tell(self, line: str) -> None:
        with contextlib.suppress(BrokenPipeError):  # `_answer` says why the process ended.
            self._process.stdin.write(f"{line}\n")
            self._process.stdin.flush()

    def _answer(self) -> dict[str, Any]:
        for line in self._process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        self._errors.seek(0)
        raise SystemExit(f"error: a worker ended early. Its last words:\n{self._errors.read()[-3000:]}")


class Workers:
    """Starts worker processes: a new one for each call, or where isolation is not needed one for all of them.

    Args:
        shared: Whether all calls with the same environment run in one process. Their figures then mean nothing.
    """

    def __init__(self, *, shared: bool):
        self.shared = shared
        self._open = contextlib.ExitStack()
        self._kept: dict[frozenset[tuple[str, str]], Worker] = {}

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *exception) -> None:
        self._open.close()

    @contextlib.contextmanager
    def worker(self, environment: Mapping[str, str] = NOTHING) -> Iterator[Worker]:
        """A worker process with these variables in its environment."""
        if not self.shared:
            with Worker(environment) as worker:
                yield worker
            return
        key = frozenset(environment.items() - inherited().items())
        if key not in self._kept:
            self._kept[key] = self._open.enter_context(Worker(environment))
        yield self._kept[key]

    def call(
        self, function: Callable[..., Any], arguments: dict[str, Any], environment: Mapping[str, str] = NOTHING
    ) -> Any:
        """The value of a function of a module, called in a worker process."""
        with self.worker(environment) as worker:
            return worker.call(function, **arguments)

    def map(self, function: Callable[..., Any], tasks: Sequence[dict[str, Any]], at_once: int = 1) -> list[Any]:
        """The values of a function for several dictionaries of arguments, some at once where none shares a process."""
        with ThreadPoolExecutor(1 if self.shared else at_once) as pool:
            return list(pool.map(lambda arguments: self.call(function, arguments), tasks))


# The worker -----------------------------------------------------------------------------------------------------------


def serve() -> None:
    """Does the tasks of the standard input until it ends."""
    for line in sys.stdin:
        task = json.loads(line)
        found = pkgutil.resolve_name(task["call"])(**task["arguments"])
        print("@" + json.dumps({"value": _items(found) if inspect.isgenerator(found) else found}), flush=True)


def _items(found: Generator[Any, None, Any]) -> Any:
    """Answers each item of a generator, and waits for a line after each; returns what the generator returns."""
    while True:
        try:
            item = next(found)
        except StopIteration as end:
            return end.value
        print("@" + json.dumps({"item": item}), flush=True)
        sys.stdin.readline()


if __name__ == "__main__":
    serve()
