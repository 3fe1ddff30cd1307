"""Runs pytest again and again, each time in a fork of one process, which has imported what takes long.

`python fresh_pytest.py MODULE ...` imports the modules. Then each line that it reads is one run, as JSON: the folder,
the arguments of pytest, and how many seconds it may take. Each is answered by a line: pytest's exit code, null where
the time was over, and all that was printed.
"""

import atexit
import importlib
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from typing import NoReturn

import pytest


def main(modules: Sequence[str]) -> None:
    """Imports the modules, and runs pytest for each line of standard input."""
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        print(json.dumps(run(**json.loads(line))), flush=True)


def run(folder: str, arguments: Sequence[str], seconds: float) -> dict[str, object]:
    """Runs pytest in a fork: {"code", "output"}."""
    with tempfile.TemporaryFile() as output:
        process = os.fork()
        if process == 0:
            _run_here(folder, arguments, output.fileno())
        code = _waited(process, time.monotonic() + seconds)
        output.seek(0)
        return {"code": code, "output": output.read().decode(errors="replace")}


def _run_here(folder: str, arguments: Sequence[str], output: int) -> NoReturn:
    code = 70
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(folder)
        # What is imported from here on is that of the folder, also in processes that tests start. No byte code: a file
        # that changed twice within a second would be taken for the compiled one.
        sys.path.insert(0, folder)
        sys.dont_write_bytecode = True
        os.environ.update(PYTHONPATH=folder, PYTHONDONTWRITEBYTECODE="1")
        code = int(pytest.main(list(arguments)))
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 (a fork must not go on as its parent)
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def _waited(process: int, until: float) -> int | None:
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.killpg(process, signal.SIGKILL)
            os.waitpid(process, 0)
            return None
        time.sleep(0.05)


if __name__ == "__main__":
    main(sys.argv[1:])
