"""Jobs that are killed by SIGKILL in chains of two, inside saving included, and the folders that they leave."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
# Chains by their numbers, which say at what kind of event a process is killed, and how many kills there are to be.
# While an array of a checkpoint is written, then while it is read; while Keras saves, twice.
FEW = (1, 4), 3, {"array", "dataset"}
ALL = range(12), 20, {"array", "replace", "fsync", "read", "batch", "dataset"}
in_chains = pytest.mark.parametrize(
    ("numbers", "kills", "phases"),
    [pytest.param(*FEW, id="some phases"), pytest.param(*ALL, id="all phases", marks=pytest.mark.thorough)],
)


def killed(job, folder, numbers, kills, phases):
    """Kills the job in chains of two; the folders, and how often it was killed."""
    command = [sys.executable, HERE / "killing.py", f"killed_jobs:{job}", folder, *map(str, numbers)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    moments = [json.loads((folder / f"killed-{number}.json").read_text()) for number in numbers]
    assert sum(map(len, moments)) >= kills, "there were too few events for the chosen moments"
    happened = {moment[0] for chain in moments for moment in chain}
    # "dataset" is inside of Keras's own saving: of the model of a recipe, of the backup of a script.
    assert happened >= phases
    return [folder / f"killed-{number}" for number in numbers]


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))
