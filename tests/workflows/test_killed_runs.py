"""Recipes that are killed by SIGKILL, inside saving included, and gone on with: they end with the same bytes."""

import json
import re
import zipfile

import killed_jobs
import pytest
from killed_chains import files, in_chains, killed


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
        # Latencies.
        del values["stages"], values["stage_notes"]
        return values
    # The page shows the report.
    return None if file.name == "report.html" else file.read_bytes()


def check(folders, whole):
    folders = list(folders)
    assert folders and files(whole), "at least one run was killed, and the whole one has files"
    for folder in folders:
        assert files(folder) == files(whole), "a killed run leaves no more behind than a whole one"
        for name in files(folder):
            if (folder / name).is_file():
                assert content(folder / name) == content(whole / name), f"{folder.name}: {name}"


@in_chains
def test_a_recipe_that_was_killed_ends_with_the_same_bytes(tmp_path, numbers, kills, phases):
    killed_jobs.write(tmp_path / "inputs")
    check(killed("recipe", tmp_path, numbers, kills, phases), tmp_path / "whole")


@pytest.mark.thorough
def test_a_recipe_that_was_killed_in_its_rounds_ends_with_the_same_bytes(tmp_path):
    killed_jobs.write(tmp_path / "inputs", [{"train": {"epochs": 1}}, {"rounds": killed_jobs.IN_ROUNDS}])
    check(killed("recipe", tmp_path, range(8), 12, {"array", "replace", "read", "batch"}), tmp_path / "whole")


@pytest.mark.thorough
def test_a_recipe_that_was_killed_while_it_removes_channels_ends_with_the_same_bytes(tmp_path):
    shrink = {"channels": 0.5, "rounds": 2, "epochs_per_round": 2, "repair": "outputs"}
    killed_jobs.write(
        tmp_path / "inputs",
        [
            {"train": {"epochs": 1}},
            {"prune": {"sparsity": 0.5, "allocation": "uniform", "repair": "none"}},
            {"shrink": shrink},
        ],
    )
    check(killed("recipe", tmp_path, range(8), 8, {"array", "replace", "read", "batch"}), tmp_path / "whole")


@pytest.mark.thorough
def test_a_recipe_that_was_killed_in_its_training_on_integers_ends_with_the_same_bytes(tmp_path):
    prune = {"epochs": 2, "schedule": {"type": "constant", "target_sparsity": 0.5, "end": {"epochs": 1}}}
    quantize = {"bits": 4, "epochs": 3, "examples": 32}
    steps = [{"train": {"epochs": 1}}, {"prune": prune}, {"quantize": quantize}, {"export": {"formats": ["keras"]}}]
    killed_jobs.write(tmp_path / "inputs", steps)
    check(killed("recipe", tmp_path, range(8), 8, {"array", "replace", "read", "batch"}), tmp_path / "whole")
    (exported,) = (tmp_path / "whole").rglob("*.tflite")
    assert exported.name == "model-int4.tflite"


@pytest.mark.thorough
@pytest.mark.parametrize("policy", ["rigl", "set", "ac_dc", {"type": "straight_through", "decay": 0.01}], ids=str)
def test_a_recipe_whose_masks_move_ends_with_the_same_bytes(tmp_path, policy):
    schedule = {"type": "constant", "target_sparsity": 0.7, "end": {"steps": 15}, "frequency": 3}
    prune = {"epochs": 4, "schedule": schedule, "policy": policy, "examples": 32}
    if policy != "rigl":
        del prune["examples"]
    killed_jobs.write(tmp_path / "inputs", [{"train": {"epochs": 1}}, {"prune": prune}, {"finetune": {"epochs": 1}}])
    check(killed("recipe", tmp_path, range(4), 6, {"array"}), tmp_path / "whole")


@pytest.mark.thorough
def test_a_sensitivity_scan_that_was_killed_ends_with_the_same_bytes(tmp_path):
    killed_jobs.write(tmp_path / "inputs")
    for folder in killed("scan", tmp_path, range(6), 6, {"replace"}):
        assert files(folder) == files(tmp_path / "whole")
        for name in files(folder):
            if (folder / name).is_file():
                assert (folder / name).read_bytes() == (tmp_path / "whole" / name).read_bytes(), (
                    f"{folder.name}: {name}"
                )
