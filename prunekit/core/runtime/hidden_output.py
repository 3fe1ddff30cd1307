"""Hides what C++ code writes to standard output or standard error, which Python cannot catch."""

import contextlib
import ctypes
import os
import sys
from collections.abc import Iterator

STDOUT, STDERR = 1, 2


@contextlib.contextmanager
def hidden_output(descriptor: int) -> Iterator[None]:
    """Context manager that hides what is written to a file descriptor; Python exceptions pass through.

    Args:
        descriptor: `STDOUT` or `STDERR`.
    """
    _flush(descriptor)
    # Where the program has none, nothing can appear.
    saved = None
    with contextlib.suppress(OSError):
        saved = os.dup(descriptor)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, descriptor)
        os.close(nowhere)
    try:
        yield
    finally:
        _flush(descriptor)
        if saved is not None:
            os.dup2(saved, descriptor)
            os.close(saved)


def _flush(descriptor: int) -> None:
    """Writes what Python and the C library still keep."""
    with contextlib.suppress(AttributeError, ValueError, OSError):
        {STDOUT: sys.stdout, STDERR: sys.stderr}[descriptor].flush()
    # Windows has no library of the program itself.
    with contextlib.suppress(AttributeError, TypeError, OSError):
        ctypes.CDLL(None).fflush(None)
