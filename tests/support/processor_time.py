"""A bound on the processor time that something takes, for tests of what must be refused at once."""

import contextlib
import gc
import signal

import pytest


@contextlib.contextmanager
def timed(most):
    """Fails if the block takes more than `most` seconds of this process's CPU time."""

    def ring(*_):
        # No AssertionError: inside a validator pydantic would take one for a mistake in the recipe.
        pytest.fail(f"more than {most} s of processor time")

    # Objects of earlier tests are excluded from garbage collection, which alone may take a second.
    gc.freeze()
    former = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
        gc.unfreeze()
