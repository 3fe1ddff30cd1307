"""Start-up of the command line."""

import subprocess
import sys
import time
from pathlib import Path

from benchmarks.figures import spread
from benchmarks.machine import numbered, turns
from benchmarks.tables import table
from benchmarks.workers import Workers

HEADING = "## Start-up of the command line"


def collect(workers: Workers, smoke: bool) -> dict[str, list[float]]:
    """Returns command -> seconds of each run, from start to end; the commands run in turns."""
    program = Path(sys.executable).with_name("prunekit")
    commands = [[], ["--help"], ["--version"], ["recipes"], ["check", "digits"]]
    found: dict[str, list[float]] = {}
    for turn in numbered(turns(smoke)):
        for words in commands:
            began = time.perf_counter()
            # Without words: what an interpreter that imports nothing takes.
            command = [program, *words] if words else [sys.executable, "-c", "pass"]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            if turn:
                name = f"prunekit {' '.join(words)}" if words else "python -c pass"
                found.setdefault(name, []).append(time.perf_counter() - began)
    return found


def section(found: dict[str, list[float]]) -> str:
    """The section of the page."""
    rows = [[f"`{name}`", spread(values, digits=2)] for name, values in found.items()]
    return "\n\n".join(
        [HEADING, "Wanted: `--help` within 0.4 s, `check` in well under a second.", table(["", "s"], rows)]
    )
