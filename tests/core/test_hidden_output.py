"""What C code prints is hidden for a while, and nothing else."""

import ctypes
import os

import pytest

from prunekit.core.runtime.hidden_output import STDERR, STDOUT, hidden_output

pytestmark = [pytest.mark.one_backend, pytest.mark.short(cases=1)]


def printed(text):
    ctypes.CDLL(None).printf(text)


@pytest.mark.parametrize("descriptor", [STDOUT, STDERR])
def test_what_c_code_prints_is_hidden_and_what_was_printed_before_is_not(capfd, descriptor):
    print("python before")
    printed(b"before\n")
    with pytest.raises(KeyError), hidden_output(descriptor):
        printed(b"hidden\n")
        os.write(descriptor, b"hidden\n")
        raise KeyError
    with hidden_output(STDOUT + STDERR - descriptor):
        os.write(descriptor, b"other\n")
    printed(b"after\n")
    ctypes.CDLL(None).fflush(None)
    found = capfd.readouterr()[descriptor - 1]
    # Of standard output, all of it is C's and Python's; of standard error, what was written to it.
    assert "hidden" not in found and "other" in found
    assert ("before" in found and "after" in found) == (descriptor == STDOUT)


@pytest.mark.thorough
def test_a_program_without_standard_output_goes_on():
    saved = os.dup(STDOUT)
    os.close(STDOUT)
    try:
        with hidden_output(STDOUT):
            done = True
    finally:
        os.dup2(saved, STDOUT)
        os.close(saved)
    assert done
