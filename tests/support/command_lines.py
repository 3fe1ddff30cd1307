"""Runs the command line in its own processes, and checks its error messages."""

import os
from pathlib import Path

import prunekit

ROOT = Path(prunekit.__file__).parent.parent
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT)}


def assert_mistake(outcome, *words):
    """A user's mistake: exit code 2, nothing on standard output, one line on standard error."""
    code, out, err = outcome
    assert (code, out) == (2, "")
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    for word in words:
        assert word in err
