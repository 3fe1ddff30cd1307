"""The process of one point: how it starts, how it ends with its sweep, what it says when it fails."""

import json
import sys
import types
from dataclasses import asdict

import pytest
from sweep_stand_in import wait_for

from prunekit.recipe.sweep import sweep_process
from prunekit.recipe.sweep.sweep_process import Ending, PointProcess, Task


def test_a_mistake_is_its_one_line(tmp_path):
    (tmp_path / "one.yaml").write_text("version: 1\nmodel: {file: no.keras}\nsteps: [prune: {sparsity: 0.5}]\n")
    ending = sweep_process.run_task(Task(str(tmp_path / "one.yaml"), str(tmp_path / "run"), str(tmp_path / "log")))
    assert ending.code == 2 and ending.reason.endswith("no.keras does not exist.")


def test_a_node_that_does_not_see_the_folder_is_an_error(tmp_path):
    ending = sweep_process.run_task(Task(str(tmp_path / "no.yaml"), "", ""))
    assert ending.code == 2 and "does not see" in ending.reason and "on a folder of all nodes" in ending.reason


def test_it_imports_from_where_its_sweep_imports(monkeypatch, tmp_path):
    script = tmp_path / "paths.py"
    script.write_text("import sys, json; print('error: ' + json.dumps(sys.path)); sys.exit(9)")
    monkeypatch.setattr(sweep_process, "COMMAND", (sys.executable, "-P", str(script)))
    monkeypatch.syspath_prepend(tmp_path / "somewhere")
    process = PointProcess(Task("", "", str(tmp_path / "log")))
    wait_for(lambda: (process.poll()) is not None)
    assert process.poll().code == 9
    paths = json.loads((tmp_path / "log").read_text().removeprefix("error: "))
    assert paths[0] == str(tmp_path / "somewhere") and str(tmp_path) not in paths


WAITS = """
import sys, time, types
from pathlib import Path

def compress(recipe, *, output, trust, force, resume):
    Path(output).mkdir()
    try:
        time.sleep(100)
    finally:
        Path(output).rmdir()

sys.modules["prunekit.recipe.run.runner"] = types.SimpleNamespace(compress=compress, ExpectationError=KeyError)
from prunekit.recipe.sweep import sweep_process
sys.exit(sweep_process.main(sys.argv[1:]))
"""


def test_it_clears_up_and_ends_when_its_sweep_is_gone(monkeypatch, tmp_path):
    monkeypatch.setattr(sweep_process, "COMMAND", (sys.executable, "-c", WAITS))
    process = PointProcess(Task("", str(tmp_path / "run"), str(tmp_path / "log")))
    wait_for((tmp_path / "run").exists)
    assert process.poll() is None
    process.stop()
    assert process.poll() == Ending(sweep_process.INTERRUPTED, "interrupted")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("force", [False, True])
def test_a_run_that_was_killed_is_resumed_unless_it_is_to_be_replaced(monkeypatch, tmp_path, force):
    given = {}
    stand_in = types.SimpleNamespace(
        compress=lambda recipe, **options: given.update(options), ExpectationError=KeyError
    )
    monkeypatch.setitem(sys.modules, "prunekit.recipe.run.runner", stand_in)
    monkeypatch.setattr(sweep_process, "_end_with_parent", lambda: None)
    task = Task("one.yaml", str(tmp_path / "run"), str(tmp_path / "log"), force=force)
    assert sweep_process.main([json.dumps(asdict(task))]) == 0
    assert (given["resume"], given["force"]) == (not force, force)
