"""Runs the points of a sweep in processes on this machine, or in processes started by tasks of a Ray cluster."""

import contextlib
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace

from prunekit.core.runtime.ray_tasks import by_ray, failure_text
from prunekit.recipe.sweep.sweep_process import DEFECT, Ending, PointProcess, Task, run_task
from prunekit.sparsity.arguments import whole

_PAUSE = 0.05
# What needs Ray, in messages.
PURPOSE = "a sweep"


@dataclass(frozen=True)
class Jobs:
    """Settings for the place and the number of simultaneous points of a sweep.

    Attributes:
        at_once: Maximum number of simultaneous points; None means 1 locally, and with Ray all that fit.
        threads: Compute threads of each process, and CPUs per point requested from Ray. None means 1 with Ray. Without
            Ray, None means the cores divided by `at_once`, or the backend's choice if points run one at a time.
        ray: True uses the Ray cluster of RAY_ADDRESS or of this machine, and starts a cluster here if none exists; a
            string is the address of a cluster.
        gpus: GPUs per point requested from Ray, which hides all other GPUs from the point.
    """

    at_once: int | None = None
    threads: int | None = None
    ray: bool | str = False
    gpus: float = 0.0

    def __post_init__(self) -> None:
        for name in ("at_once", "threads"):
            value = getattr(self, name)
            if value is not None:
                whole(name, value, 1, wrong_type=ValueError)
        if not isinstance(self.ray, bool | str):
            raise TypeError(f"Jobs: ray is True, False or an address. Received: {self.ray!r}.")
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int | float) or not 0 <= self.gpus < 1024:
            raise ValueError(f"Jobs: gpus is a number from 0 on. Received: {self.gpus!r}.")
        if self.gpus and self.ray is False:
            raise ValueError(f"Jobs: gpus are assigned by Ray: set ray as well. Received: gpus={self.gpus!r}.")

    @property
    def by_ray(self) -> bool:
        """True if Ray runs the points."""
        return self.ray is not False

    def process_threads(self) -> int | None:
        """Returns the compute threads of each process; None leaves the choice to the backend."""
        if self.threads is not None:
            return self.threads
        if self.by_ray:
            return 1
        return None if self.at_once in (None, 1) else max(1, (os.cpu_count() or 1) // (self.at_once or 1))


def endings(tasks: Sequence[Task], jobs: Jobs) -> Generator[tuple[int, Ending], None, None]:
    """Runs the tasks; yields (index, ending) of each task when the task ends.

    Closing the iterator stops all running tasks.

    Raises:
        ImportError: `jobs` requires Ray, which is not installed.
    """
    tasks = [replace(task, threads=jobs.process_threads()) for task in tasks]
    return _by_ray(tasks, jobs) if jobs.by_ray else _by_processes(tasks, jobs.at_once or 1)


def _by_processes(tasks: Sequence[Task], at_once: int) -> Generator[tuple[int, Ending], None, None]:
    running: dict[int, PointProcess] = {}
    following = iter(enumerate(tasks))
    try:
        while True:
            while len(running) < at_once and (entry := next(following, None)) is not None:
                running[entry[0]] = PointProcess(entry[1])
            if not running:
                return
            ended = {index: ending for index, process in running.items() if (ending := process.poll()) is not None}
            for index in ended:
                del running[index]
            yield from ended.items()
            if not ended:
                time.sleep(_PAUSE)
    finally:
        for process in running.values():
            process.stop()


def _by_ray(tasks: Sequence[Task], jobs: Jobs) -> Generator[tuple[int, Ending], None, None]:
    calls = by_ray(
        run_task,
        tasks,
        purpose=PURPOSE,
        address=jobs.ray if isinstance(jobs.ray, str) else None,
        at_once=jobs.at_once,
        cpus=jobs.process_threads(),
        gpus=jobs.gpus,
    )
    with contextlib.closing(calls):
        for index, found in calls:
            yield index, found if isinstance(found, Ending) else Ending(DEFECT, failure_text(found))
