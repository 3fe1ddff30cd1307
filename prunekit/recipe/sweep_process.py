"""One point of a sweep in a process of its own: a crash, or memory that runs out, takes only that point along.

Run as a script, with a `Task` as JSON, it is that process.
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

from prunekit.recipe.yaml_reader import one_line

# -P: the working directory is not put before what the starting process imports from.
COMMAND = (sys.executable, "-P", "-m", "prunekit.recipe.sweep_process")
NOT_MET = 1
MISTAKE = 2
DEFECT = 70
INTERRUPTED = 130
_THREADS = ("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS")
# Seconds that a process has to clear its temporary folder away when its sweep is gone.
_GRACE = 5.0


@dataclass(frozen=True)
class Task:
    """What one process does.

    Attributes:
        recipe: File of the recipe, with its values written into it.
        output: The run directory.
        log: File that takes what the process prints; it goes when the run ends whole.
        trust: The recipe's Python factories may be imported.
        force: An older run directory is replaced.
        threads: Of arithmetic; None leaves the choice to the backend.
    """

    recipe: str
    output: str
    log: str
    trust: bool = False
    force: bool = False
    threads: int | None = None


@dataclass(frozen=True)
class Ending:
    """How a process ended: its exit code (negative: the signal that killed it), and in one line why it failed."""

    code: int
    reason: str = ""


class PointProcess:
    """A running process of one task; it ends with the process that started it, however that one ends."""

    def __init__(self, task: Task):
        self.task = task
        paths = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        threads = {} if task.threads is None else dict.fromkeys(_THREADS, str(task.threads))
        with open(task.log, "wb") as log:
            self._process = subprocess.Popen(
                [*COMMAND, json.dumps(asdict(task))],
                # Never written to: it is the end of this pipe that tells the process to go.
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={**os.environ, "PYTHONPATH": paths, **threads},
            )

    def poll(self) -> Ending | None:
        """How it ended; None while it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self.stop()
        if code in (0, NOT_MET):
            Path(self.task.log).unlink(missing_ok=True)
            return Ending(code)
        return Ending(code, _reason(code, Path(self.task.log)))

    def stop(self) -> None:
        """Ends it, by its own hand where it can, and waits for that."""
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(_GRACE + 5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def run_task(task: Task) -> Ending:
    """Runs a task in a process and waits for it: what a node of a cluster does."""
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
    # A shell that starts a sweep in the background has it and its children ignore interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    from prunekit.recipe.loader import RecipeError
    from prunekit.recipe.runner import ExpectationFailed, compress

    try:
        compress(task.recipe, output=task.output, trust=task.trust, force=task.force, resume=not task.force)
    except ExpectationFailed:
        return NOT_MET
    except RecipeError as error:
        return _told(MISTAKE, str(error))
    except KeyboardInterrupt:
        return _told(INTERRUPTED, "interrupted")
    except Exception as error:  # noqa: BLE001
        # Whatever it is, the other points go on.
        traceback.print_exc()
        return _told(DEFECT, f"{type(error).__name__}: {error}")
    return 0


def _told(code: int, message: str) -> int:
    print(f"error: {one_line(message)}", file=sys.stderr, flush=True)
    return code


def _end_with_parent() -> None:
    # Not sys.stdin: a thread that holds its lock would abort the interpreter's own end.
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(_GRACE)
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
