"""Sweeps: their runs, what a second command finds done, the table, the command line. A stand-in trains for most."""

import csv
import fcntl
import json
import os
import signal
import subprocess
import sys
import time

import pytest
import run_reports
import sweep_stand_in
from sweep_stand_in import RECIPE, SCRIPT, contents, environment, outcomes, prunekit, wait_for

from prunekit import cli
from prunekit.recipe.run import build_report
from prunekit.recipe.sweep import workers
from prunekit.recipe.sweep.sweep import sweep
from prunekit.recipe.sweep.workers import Jobs
from prunekit.recipe.text.loader import RecipeError, load_recipe


@pytest.fixture(autouse=True)
def recipe(tmp_path, monkeypatch):
    """A recipe whose point processes are stand-ins; its variable `kind` says what becomes of them."""
    return sweep_stand_in.take_over(monkeypatch, tmp_path)


class TestRunning:
    def test_each_point_is_a_run_directory_with_its_own_recipe(self, recipe, tmp_path):
        report = sweep(recipe, {"final": [0.5, 0.8], "width": [1, 2]}, tmp_path / "out")
        assert set(outcomes(report).values()) == {("done", "")} and report.complete
        for found in report.points:
            locked = load_recipe(tmp_path / "out" / found.name / "recipe.lock.yaml")
            assert locked.variables == {**found.values, "kind": "ok"}
            assert locked == load_recipe(recipe, found.values)
        assert [found.accuracy for found in report.points] == [0.99 - f**4 / 8 + 0.001 * w
                                                               for f in (0.5, 0.8) for w in (1, 2)]  # fmt: skip
        assert [found.size for found in report.points] == [5100, 10100, 2100, 4100]
        left = sorted(entry.name for entry in (tmp_path / "out").iterdir() if not entry.is_dir())
        assert left == [".sweep.lock", "sweep.csv", "sweep.json", "sweep.png"]
        assert not (tmp_path / "out" / "logs").exists()
        assert (tmp_path / "out" / "sweep.png").read_bytes().startswith(b"\x89PNG")

    def test_a_point_that_fails_says_why_and_the_others_continue(self, recipe, tmp_path):
        kinds = ["ok", "crash", "mistake", "silent", "lying", "unmet"]
        report = sweep(recipe, {"kind": kinds}, tmp_path / "out")
        folder = tmp_path / "out"
        assert outcomes(report) == {
            "kind=ok": ("done", ""),
            "kind=crash": ("failed", "killed with SIGKILL, as systems do when memory runs out"),
            "kind=mistake": ("failed", "no such weight"),
            "kind=silent": ("failed", "ended with exit code 3"),
            "kind=lying": ("failed", f"{folder / 'kind=lying'} is not a run directory: no such folder."),
            "kind=unmet": ("not met", "not as expected: accuracy"),
        }
        assert not report.complete
        assert sorted(p.name for p in (folder / "logs").iterdir()) == [f"kind={k}.log" for k in ("crash", "mistake", "silent")]  # fmt: skip  # noqa: E501
        assert "chatter" in (folder / "logs" / "kind=mistake.log").read_text()

    def test_the_next_command_runs_only_what_is_missing(self, recipe, tmp_path):
        first = sweep(recipe, {"kind": ["ok", "unmet", "crash"]}, tmp_path / "out")
        before = contents(tmp_path / "out" / "kind=ok") | contents(tmp_path / "out" / "kind=unmet")
        told = []
        again = sweep(recipe, {"kind": ["0s", "ok", "unmet", "crash"]}, tmp_path / "out", progress=told.append)
        assert contents(tmp_path / "out" / "kind=ok") | contents(tmp_path / "out" / "kind=unmet") == before
        assert outcomes(again) == {"kind=0s": ("done", ""), **outcomes(first)}
        assert [(event.point.name, event.ended, event.points) for event in told] == [
            ("kind=ok", 1, 4),
            ("kind=unmet", 2, 4),
            ("kind=0s", 3, 4),
            ("kind=crash", 4, 4),
        ]

    def test_an_edited_recipe_is_refused_at_the_first_point_that_differs_unless_forced(self, recipe, tmp_path):
        over = {"final": [0.5, 0.8]}
        sweep(recipe, over, tmp_path / "out")
        before = contents(tmp_path / "out")
        recipe.write_text(RECIPE.replace("sparsity: $final", "sparsity: $final, pattern: channel"))
        wanted = r"final=0.5 was made with another recipe: steps\[0\].prune.pattern was 'unstructured' then, and is 'c"
        with pytest.raises(RecipeError, match=wanted):
            sweep(recipe, over, tmp_path / "out")
        assert contents(tmp_path / "out") == before
        sweep(recipe, over, tmp_path / "out", force=True)
        for name in ("final=0.5", "final=0.8"):
            locked = load_recipe(tmp_path / "out" / name / "recipe.lock.yaml")
            assert locked.steps[0].settings.pattern == "channel"
        # Forced once more, what is as it should be stays.
        before = contents(tmp_path / "out" / "final=0.5")
        sweep(recipe, over, tmp_path / "out", force=True)
        assert contents(tmp_path / "out" / "final=0.5") == before

    def test_another_value_outside_the_grid_is_another_recipe(self, recipe, tmp_path):
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        with pytest.raises(
            RecipeError, match=r"final=0.5 was made with another recipe: variables.width was 1 then, an"
        ):
            sweep(recipe, {"final": [0.5]}, tmp_path / "out", overrides={"width": 2})

    def test_a_comment_is_no_edit(self, recipe, tmp_path):
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        before = contents(tmp_path / "out" / "final=0.5")
        recipe.write_text("# the same\n" + RECIPE)
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        assert contents(tmp_path / "out" / "final=0.5") == before

    @pytest.mark.parametrize("force", [False, True])
    def test_a_folder_that_is_no_run_is_never_replaced(self, recipe, tmp_path, force):
        (tmp_path / "out" / "final=0.5").mkdir(parents=True)
        (tmp_path / "out" / "final=0.5" / "mine.txt").write_text("mine")
        with pytest.raises(RecipeError, match="which no run has written" if force else "is not a run directory"):
            sweep(recipe, {"final": [0.5]}, tmp_path / "out", force=force)
        assert (tmp_path / "out" / "final=0.5" / "mine.txt").read_text() == "mine"

    def test_several_points_at_once_share_the_cores(self, recipe, tmp_path, monkeypatch):
        monkeypatch.setattr(os, "cpu_count", lambda: 9)
        report = sweep(recipe, {"final": [0.1, 0.2, 0.3, 0.4]}, tmp_path / "out", jobs=2)
        told = [(tmp_path / "out" / found.name / "model.keras").read_text().split() for found in report.points]
        assert [threads for _, threads, _ in told] == ["4"] * 4 and len({process for process, *_ in told}) == 4

    def test_a_report_tells_the_number_of_threads_where_a_sweep_has_set_it(self, monkeypatch):
        before = build_report.versions()["processor"]
        monkeypatch.setenv("TF_NUM_INTRAOP_THREADS", "3")
        assert build_report.versions()["processor"] == f"{before}, TF_NUM_INTRAOP_THREADS=3"

    def test_an_interrupted_sweep_stops_its_processes(self, recipe, tmp_path):
        def interrupt(event):
            raise KeyboardInterrupt

        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            sweep(recipe, {"kind": ["hang", "ok"]}, tmp_path / "out", jobs=2, progress=interrupt)
        assert (tmp_path / "out" / "it-was-told-to-end").exists() and time.monotonic() - began < 60
        waiting = json.loads((tmp_path / "out" / "sweep.json").read_text())["points"]
        assert [found["outcome"] for found in waiting] == ["waiting", "done"]

    def test_a_folder_with_the_name_of_an_unfinished_run_is_refused(self, recipe, tmp_path):
        (tmp_path / "one.unfinished").mkdir()
        with pytest.raises(RecipeError, match="has the name of an unfinished run into one"):
            sweep(recipe, {"final": [0.5]}, tmp_path / "one.unfinished")
        assert not list((tmp_path / "one.unfinished").iterdir())

    def test_two_sweeps_on_one_folder_are_refused(self, recipe, tmp_path):
        (tmp_path / "out").mkdir()
        with (tmp_path / "out" / ".sweep.lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            with pytest.raises(RecipeError, match="another sweep is running on .*out: wait for it"):
                sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        assert sweep(recipe, {"final": [0.5]}, tmp_path / "out").complete

    @pytest.mark.parametrize(
        ("options", "kind", "message"),
        [
            ({"model": 3}, TypeError, "`model` must be the path of a .keras file. Received: int"),
            ({"model": "no.keras"}, RecipeError, "the model file no.keras does not exist"),
            (
                {"size": "litert-sparse"},
                RecipeError,
                "size 'litert-sparse' is not written by every point of this recipe",
            ),
            ({"jobs": 0}, ValueError, "at_once must be at least 1. Received: at_once=0"),
            ({"jobs": Jobs}, ValueError, "at_once must be an int"),
        ],
    )
    def test_what_can_be_refused_is_refused_before_anything_is_written(self, recipe, tmp_path, options, kind, message):
        with pytest.raises(kind, match=message):
            sweep(recipe, {"final": [0.5]}, tmp_path / "out", **options)
        assert not (tmp_path / "out").exists()

    def test_code_is_imported_only_with_trust(self, tmp_path):
        source = {
            "version": 1,
            "variables": {"final": 0.5},
            "model": {"factory": "m:f"},
            "steps": [{"prune": {"sparsity": "$final", "allocation": "uniform", "repair": "none"}}],
        }
        with pytest.raises(RecipeError, match=r"imports and runs Python code \(model: m:f\)"):
            sweep(source, {"final": [0.5]}, tmp_path / "out")
        sweep(source, {"final": [0.5]}, tmp_path / "out", trust=True)
        assert (tmp_path / "out" / "final=0.5" / "model.keras").read_text().endswith("True")

    @pytest.mark.parametrize(
        ("kind", "message"), [("file", "is not a folder"), ("run", "is a run directory. Choose another")]
    )
    def test_the_output_is_a_folder_and_no_run(self, recipe, tmp_path, kind, message):
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        output = tmp_path / "out" / "final=0.5" if kind == "run" else recipe
        with pytest.raises(RecipeError, match=message):
            sweep(recipe, {"final": [0.5]}, output)

    def test_a_damaged_report_is_named(self, recipe, tmp_path, monkeypatch):
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        report = tmp_path / "out" / "final=0.5" / "report.json"
        monkeypatch.setattr("prunekit.recipe.state.directory.LARGEST_REPORT", report.stat().st_size)
        assert sweep(recipe, {"final": [0.5]}, tmp_path / "out").complete
        for text in ("{", "[" * 100_000, "[1]", " " + report.read_text()):
            report.write_text(text)
            with pytest.raises(RecipeError, match="report.json is damaged: .* Remove that run directory"):
                sweep(recipe, {"final": [0.5]}, tmp_path / "out")


DRIVER = """
import os, sys
from prunekit.recipe.sweep import sweep_process
from prunekit.recipe.sweep.sweep import sweep
sweep_process.COMMAND = (sys.executable, sys.argv[1])
sweep(sys.argv[2], {"kind": sys.argv[4:]}, sys.argv[3])
"""


@pytest.mark.thorough
def test_a_killed_sweep_ends_its_processes_and_continues_where_it_stopped(recipe, tmp_path):
    out = tmp_path / "out"
    arguments = [sys.executable, "-c", DRIVER, str(SCRIPT), str(recipe), str(out), "ok", "hang"]
    with subprocess.Popen(arguments, env=environment(), stderr=subprocess.DEVNULL) as process:
        try:
            # Not its log, which is opened before its process exists.
            wait_for((out / "it-hangs").exists, process)
            before = contents(out / "kind=ok")
            process.send_signal(signal.SIGKILL)
            process.wait(60)
        finally:
            process.kill()
    wait_for(lambda: (out / "it-was-told-to-end").exists())
    table = json.loads((out / "sweep.json").read_text())
    assert [found["outcome"] for found in table["points"]] == ["done", "waiting"]
    report = sweep(recipe, {"kind": ["ok", "0s"]}, out)
    assert outcomes(report) == {"kind=ok": ("done", ""), "kind=0s": ("done", "")}
    assert contents(out / "kind=ok") == before and len(before) == 3


class TestTable:
    def test_json_and_csv_hold_the_same_points(self, recipe, tmp_path):
        report = sweep(recipe, {"kind": ["ok", "crash"], "final": [0.5, 0.9]}, tmp_path / "out")
        table = json.loads((tmp_path / "out" / "sweep.json").read_text())
        assert table == report.to_dict() and table["size"] == "smallest"
        with (tmp_path / "out" / "sweep.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["directory"] for row in rows] == [found["name"] for found in table["points"]]
        for row, found in zip(rows, table["points"], strict=True):
            assert (row["kind"], float(row["final"])) == (found["values"]["kind"], found["values"]["final"])
            assert row["pareto"] == ("yes" if found["name"] in table["pareto"] else "no")
            if found["outcome"] == "done":
                assert float(row["accuracy"]) == found["metrics"]["accuracy_after"]
                assert {k.removeprefix("bytes "): int(v) for k, v in row.items() if k.startswith("bytes ")} == found[
                    "sizes"
                ]

    def test_the_table_can_be_read_while_the_sweep_continues(self, recipe, tmp_path):
        seen = []

        def look(event):
            table = json.loads((tmp_path / "out" / "sweep.json").read_text())
            seen.append([found["outcome"] for found in table["points"]])

        sweep(recipe, {"final": [0.5, 0.7, 0.9]}, tmp_path / "out", progress=look)
        assert seen == [["done", "waiting", "waiting"], ["done", "done", "waiting"], ["done"] * 3]

    def test_without_an_accuracy_there_is_a_table_and_no_picture(self, recipe, tmp_path, monkeypatch):
        sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        assert (tmp_path / "out" / "sweep.png").exists()
        file = tmp_path / "out" / "final=0.5" / "report.json"
        file.write_text(json.dumps({**json.loads(file.read_text()), "metrics": {}}))
        report = sweep(recipe, {"final": [0.5]}, tmp_path / "out")
        assert report.pareto == () and report.points[0].accuracy is None and report.complete
        assert not (tmp_path / "out" / "sweep.png").exists()

    @pytest.mark.parametrize(
        ("size", "expected"), [(None, (5100, "litert")), ("litert-gzip", (900, "litert-gzip")), ("weights-gzip", None)]
    )
    def test_the_size_is_of_what_was_asked_for(self, recipe, tmp_path, size, expected):
        report = sweep(recipe, {"final": [0.5]}, tmp_path / "out", size=size)
        total = sum(found["after"] for found in run_reports.make().compressed.values())
        assert (report.points[0].size, report.points[0].size_of) == (expected or (total, "weights-gzip"))

    def test_where_nothing_but_a_keras_file_is_exported_the_weights_are_compared(self, recipe, tmp_path):
        recipe.write_text(RECIPE.replace("[keras, litert]", "[keras]"))
        assert sweep(recipe, {"final": [0.5]}, tmp_path / "out").size == "weights-gzip"


class TestCommandLine:
    @pytest.fixture
    def run(self, capsys, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)

        def run(*arguments):
            code = cli.run(["sweep", *map(str, arguments)])
            return (code, *capsys.readouterr())

        return run

    def test_points_are_reported_as_they_end_and_the_table_at_the_end(self, run, recipe, tmp_path):
        code, out, err = run(recipe, "--over", "final=0.5,0.9", "--over", "kind=ok", "--set", "width=2")
        assert code == 0, err
        lines = err.splitlines()
        assert lines[0] == "[1/2] final 0.5, kind ok: done, accuracy 0.9842, 10.1 kB litert"
        rows = out.splitlines()
        assert rows[0].split() == "final kind accuracy loss sparsity size of best took outcome why".split()
        assert rows[1].split()[:2] == ["0.5", "ok"] and len(rows) == 5
        assert rows[-1] == "Written to runs/small-sweep; the picture is runs/small-sweep/sweep.png."
        assert (tmp_path / "runs" / "small-sweep" / "final=0.5,kind=ok" / "report.json").exists()

    @pytest.mark.parametrize("kind", ["unmet", "crash"])
    def test_a_point_that_fails_or_is_not_met_is_exit_code_1(self, run, recipe, kind):
        code, out, _ = run(recipe, "--over", f"kind=ok,{kind}", "-o", "out", "--json")
        table = json.loads(out)
        assert code == 1 and [found["outcome"] for found in table["points"]][0] == "done"

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ([], "needs at least one variable to go over, such as --over final=0.5,0.9"),
            (["--over", "final"], "expected name=value. Received: 'final'"),
            (["--over", "final=0.5,"], "final: expected values with commas between them, and one is empty"),
            (["--over", "final=0.5", "--over", "final=0.8"], "'final' is set twice"),
            (["--over", "final=0.5,1.5"], "(At the point final=1.5.)"),
            (["--over", "final=0.5", "--gpus", "1"], "gpus are assigned by Ray"),
            (["--over", "final=0.5", "--jobs", "0"], "--jobs"),
            (["--over", "final=0.5", "--size", "litrt"], "Did you mean 'litert'?"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_mistake_is_one_line_and_exit_code_2(self, run, recipe, arguments, words):
        code, out, err = run(recipe, *arguments)
        assert (code, out) == (2, "") and err.count("\n") == 1 and words in err, err

    def test_a_mistake_in_the_grid_is_found_without_tensorflow(self, recipe):
        code = (
            f"import sys; from prunekit.cli import run\ncode = run(['sweep', {str(recipe)!r}, '--over', 'final=2,3'])\n"
            "print(code, [name for name in ('keras', 'numpy', 'matplotlib', 'ray') if name in sys.modules])"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment())
        assert done.stdout == "2 []\n", done.stderr

    @pytest.mark.parametrize(("words", "ray"), [(["--ray"], True), (["--ray=auto"], "auto"), ([], False)])
    def test_the_address_of_a_cluster_may_be_left_out(self, run, recipe, monkeypatch, words, ray):
        seen = []
        monkeypatch.setattr("prunekit.recipe.sweep.sweep.load_ray", lambda purpose: None)
        monkeypatch.setattr(workers, "endings", lambda tasks, jobs: seen.append(jobs) or (x for x in ()))
        run(recipe, "--over", "final=0.5", *words, "--jobs", "3", "--threads", "2")
        assert seen == [Jobs(at_once=3, threads=2, ray=ray)]


REAL = """
version: 1
name: tiny
seed: 3
variables: {final: 0.9}
model: {builtin: digits-cnn}
data: {builtin: digits, limit: 200}
compile: {optimizer: adam, metrics: [accuracy]}
steps:
  - prune: {epochs: 1, schedule: {type: one_shot, sparsity: $final}, exclude: [logits]}
  - expect: {metrics: {accuracy: {min: 0.0}}}
"""


@pytest.mark.thorough
def test_a_real_sweep_of_two_points_is_two_runs_that_compress_makes_too(tmp_path):
    (tmp_path / "tiny.yaml").write_text(REAL)
    table = json.loads(prunekit(tmp_path, "sweep", "tiny.yaml", "--over", "final=0.5,0.9", "-o", "out", "--json"))
    assert [found["outcome"] for found in table["points"]] == ["done", "done"]
    assert [round(found["sparsity"], 3) for found in table["points"]] == [0.5, 0.9]
    assert all(found["size_of"] == "weights-gzip" for found in table["points"])
    assert table["points"][0]["size"] > table["points"][1]["size"] > 0
    prunekit(tmp_path, "compress", "tiny.yaml", "-o", "alone", "--set", "final=0.9")
    weights = [json.loads((tmp_path / run / "report.json").read_text())["hashes"] for run in ("alone", "out/final=0.9")]
    assert weights[0] == weights[1]
    locks = [(tmp_path / run / "recipe.lock.yaml").read_bytes() for run in ("alone", "out/final=0.9")]
    assert locks[0] == locks[1]
