"""Runs that are killed by SIGKILL, inside saving included, and gone on with: they end with the same bytes."""

import json
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import killed_jobs
import numpy as np
import pytest

TESTS = Path(__file__).parent.parent
CHAINS = 12


def killed(job, folder):
    """Kills the job in chains of two; the folders, and how often it was killed."""
    command = [sys.executable, TESTS / "killing.py", f"killed_jobs:{job}", folder, str(CHAINS)]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    moments = [json.loads((folder / f"killed-{number}.json").read_text()) for number in range(CHAINS)]
    assert sum(map(len, moments)) >= 20, "there were too few events for the chosen moments"
    happened = {moment[0] for chain in moments for moment in chain}
    # "dataset" is inside of Keras's own saving: of the model of a recipe, of the backup of a script.
    assert happened >= {"array", "replace", "fsync", "read", "batch", "dataset"}
    return [folder / f"killed-{number}" for number in range(CHAINS)]


def content(file):
    """What of a file is the same in each run: without seconds, dates and addresses in memory."""
    if file.suffix == ".keras":
        with zipfile.ZipFile(file) as archive:
            members = {name: archive.read(name) for name in archive.namelist() if name != "metadata.json"}
        return members | {"config.json": re.sub(rb'"shared_object_id": \d+', b"", members["config.json"])}
    if file.name == "report.json":
        values = json.loads(file.read_text())
        for step in values["steps"]:
            del step["seconds"]
        for row in values["exports"]:
            # Of a file that holds the date.
            del row["gzip_bytes"]
        return values
    # The page shows the report.
    return None if file.name == "report.html" else file.read_bytes()


def files(folder):
    return sorted(path.relative_to(folder) for path in folder.rglob("*"))


@pytest.mark.slow
def test_a_recipe_that_was_killed_ends_with_the_same_bytes(tmp_path):
    killed_jobs.write(tmp_path / "inputs")
    for folder in killed("recipe", tmp_path):
        assert files(folder) == files(tmp_path / "whole"), "a killed run leaves no more behind than a whole one"
        for name in files(folder):
            if (folder / name).is_file():
                assert content(folder / name) == content(tmp_path / "whole" / name), f"{folder.name}: {name}"


@pytest.mark.slow
def test_a_script_with_backup_and_restore_that_was_killed_ends_with_the_same_bytes(tmp_path):
    folders = killed("script", tmp_path)
    whole = np.load(tmp_path / "whole" / "end.npz")
    for folder in folders:
        assert files(folder) == [Path("end.npz")], "the backup goes when the training has ended"
        end = np.load(folder / "end.npz")
        assert [name for name in whole if whole[name].tobytes() != end[name].tobytes()] == [], folder.name
