"""Prints tables and progress on a terminal, and hides other libraries' start-up messages.

Does not import heavy modules at import time: `prunekit --help` must be fast.
"""

import contextlib
import importlib
import os
import sys
import warnings
from collections.abc import Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import click

from prunekit.core.runtime.hidden_output import STDERR, hidden_output

if TYPE_CHECKING:
    from rich.console import Console

    from prunekit.delivery.reports.sweeps import Swept
    from prunekit.recipe.state.progress import Progress

TRACEBACK = "PRUNEKIT_TRACEBACK"
# Seconds below which the time left is not shown.
_LITTLE_TIME = 10.0


def console() -> "Console":
    """Returns a rich console on standard output, for tables."""
    from rich.console import Console

    # A pipe has no width, and rich's default of 80 columns would cut tables that `grep` must read whole.
    return Console(width=None if sys.stdout.isatty() else 160, highlight=False)


def load_keras_quietly() -> None:
    """Imports Keras and its backend without TensorFlow's start-up messages, unless the user enabled the messages.

    C++ code writes some messages directly to file descriptor 2 before TensorFlow reads TF_CPP_MIN_LOG_LEVEL.
    """
    asked = os.environ.get("TF_CPP_MIN_LOG_LEVEL", "3") != "3" or os.environ.get(TRACEBACK)
    if asked or "keras" in sys.modules:
        return
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "3"
    with hidden_output(STDERR):
        importlib.import_module("keras")


@contextlib.contextmanager
def warnings_in_lines() -> Iterator[None]:
    """Context manager that prints each warning as one line on standard error, without the source line."""
    if os.environ.get(TRACEBACK):
        yield
        return
    with warnings.catch_warnings():
        warnings.showwarning = _show_warning
        yield


def _show_warning(message: Warning | str, *where: Any, **more: Any) -> None:
    from prunekit.recipe.text.yaml_reader import one_line

    click.echo(f"warning: {one_line(str(message))}", err=True)


def show_point(event: "Swept") -> None:
    """Prints one line on standard error for a sweep point that has ended."""
    from prunekit.delivery.reports.sweeps import point_line

    click.echo(point_line(event), err=True)


def with_time_left(text: str, seconds: float | None) -> str:
    """Returns a status with the time left, if that is known and worth reading."""
    if seconds is None or seconds < _LITTLE_TIME:
        return text
    from prunekit.delivery.reports.formatting import duration

    return f"{text}, about {duration(seconds)} left"


def _status(event: "Progress") -> str:
    return with_time_left(event.text, getattr(event, "seconds_left", None))


class Display:
    """Shows progress on standard error: a live bar on a terminal, plain lines in a pipe."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._tasks: dict[int, Any] = {}
        self._last: str | None = None

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[text]}"),
            )
            self._bar = Progress(*columns, console=Console(stderr=True), redirect_stdout=False)
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: "Progress") -> None:
        """Shows one progress event of a run."""
        if self._bar is None:
            self._print(event)
            return
        from rich.markup import escape

        if event.step not in self._tasks:
            name = f"{event.step}/{event.steps} {event.kind}"
            self._tasks[event.step] = self._bar.add_task(name, total=1.0, text="")
        task = self._tasks[event.step]
        if event.finished:
            self._bar.update(task, completed=1.0)
        else:
            self._bar.update(task, completed=event.fraction, text=escape(_status(event)))

    def _print(self, event: "Progress") -> None:
        """Prints one line at the start of a step, at the end of each epoch and at the end of the step."""
        turning_point = event.epoch is not None or event.fraction in (0.0, 1.0)
        line = f"[{event.step}/{event.steps} {event.kind}] {_status(event)}"
        if turning_point and not event.finished and line != self._last:
            self._last = line
            click.echo(line, err=True)
