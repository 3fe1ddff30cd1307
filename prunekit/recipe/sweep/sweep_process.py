"""Runs each point of a sweep in a separate process, so a crash or a lack of memory ends only that point.

The process runs this module as a script, with a `Task` as JSON.
"""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import asdict, dataclass
from pathlib import Path

from prunekit.core.runtime.ray_tasks import thread_variables
from prunekit.recipe.text.yaml_reader import one_line

# -P keeps the working directory from shadowing modules in the import path of the starting process.
COMMAND = (sys.executable, "-P", "-m", "prunekit.recipe.sweep.sweep_process")
NOT_MET = 1
MISTAKE = 2
DEFECT = 70
INTERRUPTED = 130
# Seconds for a process to remove its temporary folder after its sweep has ended.
_GRACE = 5.0


@dataclass(frozen=True)
class Task:
    """Task of one process.

    Attributes:
        recipe: Path of the recipe file, with the point's values written into it.
        output: Path of the run directory.
        log: Path of the log file for the process's output; deleted when the run completes.
        trust: True allows importing the recipe's Python factories.
        force: True replaces an older run directory.
        threads: Number of compute threads; None leaves the choice to the backend.
    """

    recipe: str
    output: str
    log: str
    trust: bool = False
    force: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class Ending:
    """Ending of a process: exit code (negative: the number of the killing signal), and one-line reason of a failure."""

    code: int
    reason: str = ""


class PointProcess:
    """A running process of one task; the process ends whenever the process that started it ends."""

    def __init__(self, task: Task):
        self.task = task
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        threads = {} if task.threads is None else thread_variables(task.threads)
        with open(task.log, "wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, json.dumps(asdict(task))],
                # Nothing is written to this pipe: closing it is the signal for the process to end.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": paths, **threads},
            )

    def poll(self) -> Ending | None:
        """Returns the ending of the process; None while the process runs."""
        code = self._process.poll()
        if code is None:
            return None
        self.stop()
        if code in (0, NOT_MET):
            Path(self.task.log).unlink(missing_ok=True)
            return Ending(code)
        return Ending(code, _reason(code, Path(self.task.log)))

    def stop(self) -> None:
        """Ends the process and waits: closes its stdin first, and kills the process if it does not end in time."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_task(task: Task) -> Ending:
    """Runs a task in a process, waits, and returns its ending; the function that each node of a cluster runs."""
    if not Path(task.recipe).is_file():
        return Ending(
            MISTAKE, f"{socket.gethostname()} does not see {task.recipe}: the output must be on a folder of all nodes."
        )
    process = PointProcess(task)
    try:
        while (ending := process.poll()) is None:
            time.sleep(0.1)
        return ending
    finally:
        process.stop()


def _reason(code: int, log: Path) -> str:
    if code == -signal.SIGKILL:
        return "killed with SIGKILL, as systems do when memory runs out"
    if code < 0:
        return f"killed with {signal.Signals(-code).name}"
    try:
        lines = log.read_bytes()[-16_384:].decode("utf-8", "replace").splitlines()
    except OSError:
        lines = []
    told = [line.removeprefix("error: ") for line in lines if line.startswith("error: ")]
    return one_line(told[-1])[:300] if told else f"ended with exit code {code}"


# ---- inside the process ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> int:
    """Runs the task that the first argument describes; returns the exit code."""
    task = Task(**json.loads(arguments[0]))
    # If a shell started the sweep in the background, the sweep and its child processes ignore SIGINT by default.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from prunekit.recipe.run.runner import ExpectationError, compress
    from prunekit.recipe.text.loader import RecipeError

    try:
        compress(task.recipe, output=task.output, trust=task.trust, force=task.force, resume=not task.force)
    except ExpectationError:
        return NOT_MET
    except RecipeError as error:
        return _told(MISTAKE, str(error))
    except KeyboardInterrupt:
        return _told(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001
        # Catch every exception: the other points must continue.
        traceback.print_exc()
        return _told(DEFECT, f"{type(error).__name__}: {error}")
    return 0


def _told(code: int, message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    return code


def _end_with_parent() -> None:
    # Do not read sys.stdin: a thread that holds its lock would abort the interpreter at shutdown.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
