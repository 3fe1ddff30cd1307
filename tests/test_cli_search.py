"""The command search."""

import contextlib
import io
import json

import keras
import numpy as np
import pytest
from command_lines import assert_mistake
from networks import dense_network

from prunekit.commands.output import step_lines


@pytest.fixture
def stored(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = dense_network(64, seed=1, hidden=24, out=10)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile("adam", loss, metrics=["accuracy"])
    rng = np.random.default_rng(0)
    x = rng.normal(size=(600, 64)).astype("float32")
    y = x[:, :10].argmax(1)
    np.savez("data.npz", x=x, y=y)
    model.fit(x, y, epochs=8, verbose=0)
    model.save("net.keras")
    return "net.keras"


def test_the_folder_has_the_file_and_another_question_reads_its_table(run, stored, tmp_path):
    code, out, err = run("search", stored, "--data", "data.npz", "--drop", "0.1", "-o", "best")
    assert code == 0 and "Files that were made" in out and out.splitlines()[-1].endswith("Written to best")
    assert "measured hidden/kernel" in err and "a file of" in err
    names = {path.name for path in (tmp_path / "best").iterdir()}
    kept = {"scan-litert.json", "files-litert.json"}
    assert names == {"model.keras", "model.tflite", "search.json", "search.png"} | kept
    code, out, err = run("search", stored, "--data", "data.npz", "--bytes", "20kB", "-o", "best", "--json")
    found = json.loads(out)
    assert code == 0 and found["bytes"] <= 20_000 and "measured" not in err
    assert found["asked_bytes"] == 20_000 and found["target"] == "litert"


def test_an_interrupted_search_says_where_it_continues_and_steps_have_the_time_left(run, stored, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("prunekit.searching.search_run.build", stop)
    # Bytes of an arena are few, and need no unit.
    arguments = ("--data", "data.npz", "--drop", "0.1", "--arena", "9000", "--time", "1 h", "-o", "best")
    code, _, err = run("search", stored, *arguments)
    assert code == 130 and "What was measured is kept in best: the same command continues." in err
    monkeypatch.setattr("prunekit.recipe.state.progress.time.monotonic", iter((0.0, 40.0, 90.0)).__next__)
    say = step_lines()
    with contextlib.redirect_stderr(io.StringIO()) as lines:
        say(1, 3, "first")
        say(2, 3, "second")
        say(1, 2, "anew")
    assert lines.getvalue().splitlines() == ["[1/3] first", "[2/3] second, about 40.0 s left", "[1/2] anew"]


def test_bolder_files_are_trained_on_the_examples_that_were_not_drawn(run, stored):
    arguments = ("--data", "data.npz", "--drop", "0.2", "--examples", "400", "--epochs", "1", "--json")
    code, out, err = run("search", stored, *arguments)
    assert code == 0 and "after training" in err
    report = json.loads(out)
    fitted, _, choosing, judging = report["examples"]
    assert any(one["trained"] for one in report["points"]) and fitted + choosing + judging == 400


@pytest.mark.thorough
def test_of_inputs_alone_the_drop_is_one_of_agreement(run, stored):
    np.savez("inputs.npz", x=np.load("data.npz")["x"])
    code, out, _ = run("search", stored, "--data", "inputs.npz", "--drop", "0.1", "--json")
    report = json.loads(out)
    assert code == 0 and report["metric"]["name"] == "agreement" and report["drop"] <= 0.1
    arguments = ("--data", "inputs.npz", "--drop", "0.1", "--epochs", "1")
    assert_mistake(run("search", stored, *arguments), "--epochs trains on labels", "'inputs.npz'")


def test_too_few_bytes_are_answered_with_what_is_possible(run, stored):
    code, out, err = run("search", stored, "--data", "data.npz", "--bytes", "0.3kB")
    assert (code, out) == (2, "") and "error: No file meets all bounds without training. Received: bytes=300;" in err


@pytest.mark.short(cases=2)
@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], ["Missing option '--drop', '--bytes', '--latency' or '--arena'"]),
        (["--latency", "2 seconds"], ["--latency", "a time, such as 2ms"]),
        (["--drop", "0.1", "--epochs", "1"], ["--epochs trains on other examples", "all of 'data.npz' drawn"]),
        (["--drop", "-1"], ["--drop"]),
        (["--drop", "1%"], ["--drop is a number in the unit of the metric", "'1%'"]),
        (["--bytes", "small"], ["--bytes"]),
        (["--arena", "-5"], ["--arena"]),
        (["--time", "soon"], ["--time must be a time, such as 90s, 20min or 2h. Received: 'soon'"]),
        (["--workers", "dask"], ["--workers", "'ray'"]),
        (["--drop", "0.1", "--techniques", "shrink,quantise"], ["`techniques`", "quantize"]),
    ],
)
def test_a_mistake_is_one_line(run, stored, arguments, words):
    assert_mistake(run("search", stored, "--data", "data.npz", *arguments), *words)
