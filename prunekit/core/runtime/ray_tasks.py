"""Runs a function on the nodes of a Ray cluster, once for each argument."""

import contextlib
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any


def load_ray(purpose: str) -> Any:
    """Returns the module `ray`.

    Args:
        purpose: What needs it, for the message: "a sweep".

    Raises:
        ImportError: Ray is not installed; the message names the extra to install.
    """
    try:
        import ray
    except ImportError as error:
        raise ImportError(
            f"{purpose} by Ray needs Ray, which cannot be imported here ({' '.join(str(error).split())}): "
            "pip install 'prunekit[ray]'."
        ) from error
    return ray


def by_ray(  # noqa: PLR0913
    function: Callable[..., Any],
    arguments: Sequence[Any],
    *,
    purpose: str,
    shared: Any = None,
    address: str | None = None,
    at_once: int | None = None,
    cpus: float | None = None,
    gpus: float = 0.0,
    variables: Mapping[str, str] | None = None,
) -> Generator[tuple[int, Any], None, None]:
    """Yields (index, result) of each call when it ends; the result is the exception of a call that failed.

    Closing the iterator stops all calls.

    Args:
        function: A function of one argument, and of `shared` before it where that is given.
        arguments: The argument of each call.
        purpose: As for `load_ray`.
        shared: An object that is sent to each node once.
        address: Address of the cluster; None = that of RAY_ADDRESS or of this machine, which is started if none exists.
        at_once: Most calls at a time; None = all that fit.
        cpus: Processors that each call asks for; None = Ray's choice.
        gpus: GPUs that each call asks for.
        variables: Environment variables of the calls' processes.

    Raises:
        ImportError: Ray is not installed.
    """
    ray = load_ray(purpose)
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, log_to_driver=False)
    environment = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
    running: dict[Any, int] = {}
    following = iter(enumerate(arguments))
    try:
        # No retries by Ray: a call that crashed its node would crash the next node too.
        remote = ray.remote(function).options(num_cpus=cpus, num_gpus=gpus, max_retries=0, **environment)
        first = () if shared is None else (ray.put(shared),)
        while True:
            while len(running) < (at_once or len(arguments)) and (entry := next(following, None)) is not None:
                running[remote.remote(*first, entry[1])] = entry[0]
            if not running:
                return
            # The time limit lets Python handle an interrupt while Ray waits.
            ready, _ = ray.wait(list(running), num_returns=1, timeout=1.0)
            for reference in ready:
                yield running.pop(reference), _fetched(ray, reference)
    finally:
        for reference in running:
            with contextlib.suppress(Exception):
                ray.cancel(reference, force=True)
        if started:
            ray.shutdown()


def thread_variables(threads: int) -> dict[str, str]:
    """Returns the environment variables of a process that computes in so many threads."""
    return dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "TF_NUM_INTEROP_THREADS", "OMP_NUM_THREADS"), str(threads))


def failure_text(error: Exception) -> str:
    """Returns what is said of a call that failed, in one line: Ray's errors hold a traceback of the node."""
    return " ".join(f"Ray: {type(error).__name__}: {error}".split())[:300]


def _fetched(ray: Any, reference: Any) -> Any:
    try:
        return ray.get(reference)
    except Exception as error:  # noqa: BLE001
        # Catch every exception: Ray has a separate class for each failure, such as a lost node or a lack of memory.
        return error
