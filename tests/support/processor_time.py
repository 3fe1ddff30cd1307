"""A bound on the processor time that something takes, for tests of what must be refused at once."""

import contextlib
import gc
import signal

import pytest


@contextlib.contextmanager
def timed(most):
    """Fails where the inside takes more than so many seconds of this process's time; other processes do not count."""

    def ring(*_):
        # No AssertionError: inside a validator pydantic would take one for a mistake in the recipe.
        pytest.fail(f"more than {most} s of processor time")

    # What thousands of tests before left is not looked through again inside: that alone may take a second.
    gc.freeze()
    former = signal.signal(signal.SIGPROF, ring)
    signal.setitimer(signal.ITIMER_PROF, most)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, former)
        gc.unfreeze()
