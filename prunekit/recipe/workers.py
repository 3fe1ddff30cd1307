"""Who runs the points of a sweep: processes of this machine, or tasks of a Ray cluster that start such processes."""

import contextlib
import os
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from prunekit.recipe.sweep_process import DEFECT, Ending, PointProcess, Task, run_task
from prunekit.recipe.yaml_reader import one_line

_PAUSE = 0.05


@dataclass(frozen=True)
class Jobs:
    """Where the points of a sweep run, and how many at once.

    Attributes:
        at_once: Points at the same time; None is 1 on one machine, and as many as a Ray cluster has room for.
        threads: Of arithmetic, in each process, and CPUs asked of Ray. None is 1 with Ray, divides the cores where
            several points run on one machine, and leaves the choice to the backend where one runs.
        ray: True runs on the Ray cluster of RAY_ADDRESS or of this machine, starting one here where there is none; text
            is a cluster's address.
        gpus: GPUs that each point asks of Ray, which hides all others from it.
    """

    at_once: int | None = None
    threads: int | None = None
    ray: bool | str = False
    gpus: float = 0.0

    def __post_init__(self) -> None:
        for name in ("at_once", "threads"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ValueError(f"Jobs: {name} is a whole number from 1 on, or None. Received: {value!r}.")
        if not isinstance(self.ray, bool | str):
            raise TypeError(f"Jobs: ray is True, False or an address. Received: {self.ray!r}.")
        if isinstance(self.gpus, bool) or not isinstance(self.gpus, int | float) or not 0 <= self.gpus < 1024:
            raise ValueError(f"Jobs: gpus is a number from 0 on. Received: {self.gpus!r}.")
        if self.gpus and self.ray is False:
            raise ValueError(f"Jobs: gpus are shared out by Ray: set ray as well. Received: gpus={self.gpus!r}.")

    @property
    def by_ray(self) -> bool:
        """Whether Ray runs the points."""
        return self.ray is not False

    def process_threads(self) -> int | None:
        """Threads of each process; None leaves the choice to the backend."""
        if self.threads is not None:
            return self.threads
        if self.by_ray:
            return 1
        return None if self.at_once in (None, 1) else max(1, (os.cpu_count() or 1) // (self.at_once or 1))


def endings(tasks: Sequence[Task], jobs: Jobs) -> Generator[tuple[int, Ending], None, None]:
    """Runs the tasks; yields the index and the ending of each, as they end.

    When the iterator is closed, what still runs is stopped.

    Raises:
        ImportError: Ray is asked for and not installed.
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


def load_ray() -> Any:
    """The module `ray`.

    Raises:
        ImportError: It is not installed; names the extra.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"a sweep by Ray needs Ray, which cannot be imported here ({one_line(str(error))}): "
            "pip install 'prunekit[ray]'."
        ) from error
    return ray


def _by_ray(tasks: Sequence[Task], jobs: Jobs) -> Generator[tuple[int, Ending], None, None]:
    ray = load_ray()
    started = not ray.is_initialized()
    if started:
        ray.init(address=jobs.ray if isinstance(jobs.ray, str) else None, log_to_driver=False)
    # No second try by Ray itself: a point that took its node down would take down the next one.
    remote = ray.remote(run_task).options(num_cpus=jobs.process_threads(), num_gpus=jobs.gpus, max_retries=0)
    running: dict[Any, int] = {}
    following = iter(enumerate(tasks))
    try:
        while True:
            while len(running) < (jobs.at_once or len(tasks)) and (entry := next(following, None)) is not None:
                running[remote.remote(entry[1])] = entry[0]
            if not running:
                return
            # With a time limit an interrupt is heard, whatever Ray is waiting for.
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in ready:
                yield running.pop(reference), _fetched(ray, reference)
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def _fetched(ray: Any, reference: Any) -> Ending:
    try:
        return ray.get(reference)
    except Exception as error:  # noqa: BLE001
        # A lost node, a worker out of memory: Ray has a class of its own for each.
        return Ending(DEFECT, f"Ray: {type(error).__name__}: {one_line(str(error))}"[:300])
