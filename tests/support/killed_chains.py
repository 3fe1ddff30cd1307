"""Jobs that are killed by SIGKILL in chains of two, inside saving included, and the folders that they leave."""

import json
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
CHAINS = 12


def killed(job, folder):
    """Kills the job in chains of two; the folders, and how often it was killed."""
    command = [sys.executable, HERE / "killing.py", f"killed_jobs:{job}", folder, str(CHAINS)]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    moments = [json.loads((folder / f"killed-{number}.json").read_text()) for number in range(CHAINS)]
    assert sum(map(len, moments)) >= 20, "there were too few events for the chosen moments"
    happened = {moment[0] for chain in moments for moment in chain}
    # "dataset" is inside of Keras's own saving: of the model of a recipe, of the backup of a script.
    assert happened >= {"array", "replace", "fsync", "read", "batch", "dataset"}
    return [folder / f"killed-{number}" for number in range(CHAINS)]


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))
