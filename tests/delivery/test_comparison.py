"""Finished runs side by side, in Python and by `prunekit compare`."""

import dataclasses
import json

import pytest
import run_reports

from prunekit import cli
from prunekit.anatomy.records.sections import Column
from prunekit.delivery.reports.comparison import compared_runs
from prunekit.delivery.reports.metrics import Metric
from prunekit.delivery.reports.rows import StageRow


def changed(report, accuracy=None, **recipe):
    metrics = {} if accuracy is None else {**report.metrics, "accuracy_after": accuracy}
    return dataclasses.replace(report, recipe={**report.recipe, **recipe}, metrics=metrics or report.metrics)


@pytest.fixture(scope="module")
def base():
    return run_reports.make()


@pytest.fixture
def folders(base, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, report in {"a": base, "b": changed(base, 0.5, seed=8)}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "report.json").write_text(json.dumps(report.to_dict()))
    return tmp_path


def call(capsys, *arguments):
    code = cli.run(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_settings_that_differ_are_listed_with_the_value_in_each_run(base):
    found = compared_runs({"a": base, "b": changed(base, seed=8, variables={"final": 0.5})})
    assert found.settings["seed"] == (base.recipe.get("seed"), 8)
    assert found.settings["variables.final"][1] == 0.5
    assert not any(path.startswith(("name", "description")) for path in found.settings)
    assert compared_runs({"a": base, "b": changed(base, name="other")}).settings == {}


def test_steps_are_matched_by_kind_and_a_missing_one_is_one_row(base):
    prune = {"prune": {"epochs": 3, "criterion": "magnitude"}}
    shorter = changed(base, steps=[prune, {"export": {"formats": ["keras"]}}])
    longer = changed(
        base,
        steps=[
            {"train": {"epochs": 9, "patience": 2}},
            {"prune": {**prune["prune"], "epochs": 4}},
            *[{"export": {"formats": ["keras"]}}],
        ],
    )
    found = compared_runs({"a": shorter, "b": longer}).settings
    assert found == {"prune.epochs": (3, 4), "train": (None, base.steps[0]["name"])}
    swapped = changed(base, steps=shorter.recipe["steps"][::-1])
    assert compared_runs({"a": shorter, "b": swapped}).settings == {
        "order of the steps": ("prune, export", "export, prune")
    }


def test_the_latency_of_the_fastest_file_is_compared(base):
    stages = tuple(StageRow(name, "file", latency=seconds) for name, seconds in (("litert", 2e-5), ("keras", 1e-5)))
    found = compared_runs({"a": dataclasses.replace(base, stages=stages), "b": dataclasses.replace(base, stages=())})
    assert found.latencies == (1e-5, None) and found.to_dict()["latencies"] == {"a": 1e-5, "b": None}
    table = found.sections()[0]
    assert table.columns[-1] == Column("latency", "latency") and [row[-1] for row in table.rows] == [1e-5, None]


def test_weights_whose_sparsity_is_shown_alike_are_not_listed(base):
    row = dataclasses.replace(base.after.weights[0], size=100_000, zeros=80_000)
    runs = [
        dataclasses.replace(
            base, after=dataclasses.replace(base.after, weights=(dataclasses.replace(row, zeros=zeros),))
        )
        for zeros in (80_000, 80_001, 81_000)
    ]
    assert compared_runs(dict(zip("ab", runs[:2], strict=True))).sparsities == {}
    assert compared_runs(dict(zip("ab", runs[1:], strict=True))).sparsities == {row.name: (0.80001, 0.81)}


def test_weights_of_other_sparsity_are_listed(base):
    row = base.after.weights[0]
    other = dataclasses.replace(
        base, after=dataclasses.replace(base.after, weights=(dataclasses.replace(row, zeros=row.size),))
    )
    found = compared_runs({"a": base, "b": other})
    assert found.sparsities[row.name] == (row.sparsity, 1.0)
    assert found.sparsities[base.after.weights[1].name][1] is None


def test_the_first_runs_main_metric_is_compared(base):
    regression = dataclasses.replace(
        base, metrics={"mae_before": 1.0, "mae_after": 2.0}, measures=(Metric("mae", "min"),)
    )
    found = compared_runs({"a": base, "b": regression})
    assert [point.main for point in found.figures.points] == [base.metrics["accuracy_after"], None]
    assert [point.name for point in found.figures.pareto] == ["a"]
    assert found.notes == (
        "The runs differ in their main metric (a accuracy, b mae): runs without the first run's main metric have no "
        "place in the picture.",
    )


def test_a_picture_needs_the_main_metric_and_a_size(folders, base, capsys):
    for name in ("a", "b"):
        bare = dataclasses.replace(base, exports=())
        (folders / name / "report.json").write_text(json.dumps(bare.to_dict()))
    code, _, err = call(capsys, "a", "b", "-o", "new.png")
    assert code == 2 and "a picture needs runs with the main metric and a size" in err
    assert not (folders / "new.png").exists()


def test_runs_on_other_data_are_noted(base):
    other = dataclasses.replace(base, hashes={**base.hashes, "data": "other"})
    assert compared_runs({"a": base, "b": other}).notes == (
        "The runs differ in their data: figures of different data are not comparable.",
    )


def test_a_comparison_needs_two_runs(base):
    with pytest.raises(ValueError, match="needs at least two runs. Received: a"):
        compared_runs({"a": base})


def test_the_command_prints_tables_and_writes_a_picture(folders, capsys):
    code, out, err = call(capsys, "a", "b", "-o", "pictures/both.png")
    assert (code, err) == (0, "note: the folder pictures does not exist; it is made.\n")
    assert "Settings that differ" in out and "seed" in out
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["run", "a", "b"]
    assert (folders / "pictures" / "both.png").read_bytes().startswith(b"\x89PNG")
    assert call(capsys, "a", "b", "-o", "pictures/both.png")[0] == 2
    assert call(capsys, "a", "b", "-o", "pictures/both.png", "--force")[0] == 0


def test_json_has_the_runs_and_the_settings(folders, capsys):
    code, out, _ = call(capsys, "a", "b", "--json")
    found = json.loads(out)
    assert code == 0
    assert [run["name"] for run in found["runs"]] == ["a", "b"]
    assert all(run.keys().isdisjoint({"values", "directory"}) for run in found["runs"])
    assert found["settings"]["seed"]["b"] == 8
    assert found["main"]["name"] == "accuracy"


def test_runs_of_one_name_are_told_apart_by_their_folders(folders, capsys):
    for folder in ("x", "y"):
        (folders / folder).mkdir()
        (folders / folder / "run").mkdir()
        (folders / folder / "run" / "report.json").write_text((folders / "a" / "report.json").read_text())
    _, out, _ = call(capsys, "x/run", "y/run", "--json")
    assert [run["name"] for run in json.loads(out)["runs"]] == ["x/run", "y/run"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a"], "needs at least two runs. Received: a."),
        (["a", "a"], "compared with other runs. Received twice: a."),
        (["a", "gone"], "gone: not a run directory (no report.json in it)."),
        (["a", "b", "-o", "both.svg"], "the picture is a .png file. Received: -o both.svg."),
        (["a", "b", "--size", "litret"], "No run has a size 'litret'. Did you mean 'litert'? Sizes of these runs: sm"),
    ],
)
def test_what_cannot_be_compared_is_one_line(folders, capsys, arguments, message):
    code, _, err = call(capsys, *arguments)
    assert code == 2 and message in err and err.count("\n") == 1


def test_a_damaged_report_is_named(folders, capsys):
    (folders / "b" / "report.json").write_text('{"title": 3}')
    code, _, err = call(capsys, "a", "b")
    assert code == 2 and "report.json: not a report that this version of prunekit reads" in err


def test_report_opens_the_page_in_a_browser(folders, capsys, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or len(opened) < 2)
    assert cli.run(["report", "a", "--open"]) == 2
    assert "report.html is missing, so there is no page to open" in capsys.readouterr().err
    (folders / "a" / "report.html").write_text("page")
    assert cli.run(["report", "a", "--open"]) == 0
    assert opened == [(folders / "a" / "report.html").resolve().as_uri()]
    assert cli.run(["report", "a", "--open"]) == 0
    assert "no browser was found; open a/report.html yourself" in capsys.readouterr().err
