"""Who runs the points: processes of this machine, Ray (a stand-in, and the real one where it is installed)."""

import importlib.util
import json
import sys
import time

import pytest
import sweep_stand_in
from stand_in_ray import StandInRay
from sweep_stand_in import outcomes, prunekit

from prunekit.recipe.sweep import sweep_process, workers
from prunekit.recipe.sweep.sweep import sweep
from prunekit.recipe.sweep.sweep_process import Ending, Task
from prunekit.recipe.sweep.workers import Jobs

ONCE = """
version: 1
variables: {final: 0.5}
model: {builtin: digits-cnn}
steps: [prune: {sparsity: $final, include: ["fc/*"]}]
"""


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    """A recipe whose point processes are stand-ins; its variable `kind` says what becomes of them."""
    return sweep_stand_in.take_over(monkeypatch, tmp_path)


def test_at_most_so_many_run_at_once(monkeypatch):
    running, most = set(), []

    class Process:
        def __init__(self, task):
            running.add(task.output)
            most.append(len(running))
            self.task, self.polls = task, int(task.output)

        def poll(self):
            self.polls -= 1
            if self.polls:
                return None
            running.remove(self.task.output)
            return Ending(0)

    monkeypatch.setattr(workers, "PointProcess", Process)
    tasks = [Task("", str(polls), "") for polls in (3, 1, 4, 2, 5, 9, 6)]
    found = list(workers.endings(tasks, Jobs(at_once=3)))
    assert sorted(index for index, _ in found) == list(range(7))
    assert max(most) == 3 and [index for index, _ in found][:2] == [1, 0]


class TestRay:
    @pytest.fixture
    def ray(self, monkeypatch):
        ray = StandInRay()
        monkeypatch.setitem(sys.modules, "ray", ray)
        return ray

    def test_points_run_as_tasks_with_what_they_ask_for(self, ray, recipe, tmp_path):
        kinds = ["ok", "crash", "unmet"]
        report = sweep(recipe, {"kind": kinds}, tmp_path / "out", jobs=Jobs(ray="auto", threads=2, gpus=0.5))
        assert [found.outcome for found in report.points] == ["done", "failed", "not met"]
        assert "SIGKILL" in report.points[1].reason
        assert ray.asked == {"num_cpus": 2, "num_gpus": 0.5, "max_retries": 0}
        assert ray.calls == [("init", "auto"), ("shutdown",)]
        assert (tmp_path / "out" / "kind=ok" / "model.keras").read_text().split()[1] == "2"

    def test_a_cluster_that_is_connected_stays_connected(self, ray, recipe, tmp_path):
        ray.init()
        assert sweep(recipe, {"final": [0.5]}, tmp_path / "out", jobs=Jobs(ray=True)).complete
        assert ray.calls == [("init", None)] and ray.running

    def test_a_lost_node_is_a_point_that_failed(self, ray, recipe, tmp_path, monkeypatch):
        class NodeDiedError(Exception):
            pass

        def lost(task):
            if "crash" in task.output:
                raise NodeDiedError("node 10.0.0.3\nis gone")
            return sweep_process.run_task(task)

        monkeypatch.setattr(workers, "run_task", lost)
        report = sweep(recipe, {"kind": ["crash", "ok"]}, tmp_path / "out", jobs=Jobs(ray=True))
        assert outcomes(report) == {
            "kind=crash": ("failed", "Ray: NodeDiedError: node 10.0.0.3 is gone"),
            "kind=ok": ("done", ""),
        }

    def test_at_most_so_many_are_handed_to_ray_at_once(self, ray, monkeypatch):
        running, most = set(), []

        def run(task):
            running.add(task.output)
            most.append(len(running))
            time.sleep(0.01)
            running.remove(task.output)
            return Ending(0)

        monkeypatch.setattr(workers, "run_task", run)
        tasks = [Task("", str(index), "") for index in range(8)]
        found = list(workers.endings(tasks, Jobs(ray=True, at_once=2)))
        assert sorted(index for index, _ in found) == list(range(8)) and max(most) == 2

    def test_an_interrupted_sweep_takes_its_tasks_back(self, ray, recipe, tmp_path):
        def interrupt(event):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            sweep(recipe, {"kind": ["ok", "1s", "2s"]}, tmp_path / "out", jobs=Jobs(ray=True), progress=interrupt)
        assert ray.calls == [("init", None), ("cancel", True), ("cancel", True), ("shutdown",)]
        ray.tasks.shutdown()

    def test_without_ray_the_extra_is_named_and_nothing_is_written(self, recipe, tmp_path, monkeypatch):
        monkeypatch.setitem(sys.modules, "ray", None)
        with pytest.raises(ImportError, match=r"a sweep by Ray needs Ray.*pip install 'prunekit\[ray\]'"):
            sweep(recipe, {"final": [0.5]}, tmp_path / "out", jobs=Jobs(ray=True))
        assert not (tmp_path / "out").exists()

    @pytest.mark.thorough
    def test_the_real_ray_runs_the_same_points(self, tmp_path):
        if importlib.util.find_spec("ray") is None:
            pytest.skip("ray is in the extra `ray`")
        (tmp_path / "once.yaml").write_text(ONCE)
        arguments = ["sweep", "once.yaml", "--over", "final=0.5,0.9", "--ray=local", "-o", "out", "--json"]
        # In a process of its own: Ray leaves warnings and threads behind.
        table = json.loads(prunekit(tmp_path, *arguments))
        assert [(found["outcome"], round(found["sparsity"], 4)) for found in table["points"]] == [
            ("done", 0.5),
            ("done", 0.9),
        ]

    @pytest.mark.parametrize(
        ("arguments", "kind", "message"),
        [
            ({"ray": 3}, TypeError, "ray is True, False or an address. Received: 3"),
            ({"gpus": 1}, ValueError, "gpus are assigned by Ray: set ray as well. Received: gpus=1"),
            ({"ray": True, "gpus": -1}, ValueError, "gpus is a number from 0 on. Received: -1"),
            ({"ray": True, "gpus": float("nan")}, ValueError, "gpus is a number from 0 on. Received: nan"),
            ({"threads": 0}, ValueError, "threads must be at least 1. Received: threads=0"),
            ({"at_once": True}, ValueError, "at_once must be an int. Received: at_once=True"),
        ],
    )
    def test_jobs_cannot_be_in_a_bad_state(self, arguments, kind, message):
        with pytest.raises(kind, match=message):
            Jobs(**arguments)
