"""The command line given what it cannot use: exit code 1 or 2, one clear line, no traceback, whatever the command."""

import copy
import json
import os
import random
import shutil
import socket

import click
import keras
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from recipe_mutations import VALUES

from prunekit import cli

COMMANDS = sorted(cli.cli.commands)
ARGUMENTS = [
    (name, parameter.name)
    for name in COMMANDS
    for parameter in cli.cli.commands[name].params
    if isinstance(parameter, click.Argument)
]
ONE_SHOT = "version: 1\nname: once\nmodel: {file: sound.keras}\nvariables: {s: 0.5}\nsteps: [prune: {sparsity: $s}]\n"
# What a word may be that names no file of the right kind.
BAD_PATHS = {
    "missing": "missing",
    "empty": "",
    "blank": " ",
    "dot": ".",
    "folder": "folder",
    "folder called a model": "folder.keras",
    "empty file": "empty.keras",
    "garbage": "garbage.keras",
    "text": "text.yaml",
    "garbage without ending": "garbage",
    "garbage called a recipe": "garbage.yaml",
    "inside a file": "garbage/inside",
    "device": "/dev/null",
    "endless device": "/dev/zero",
    "socket": "socket",
    "broken link": "broken",
    "link to itself": "circle",
    "long name": "x" * 300,
    "long path": "x/" * 3000,
    "not UTF-8": os.fsdecode(b"caf\xe9.keras"),
    "missing and not UTF-8": os.fsdecode(b"no\xff\xfe.yaml"),
    "line break": "a\nb",
    "escape sign": "a\x1b[31mb.keras",
    "address": "https://example.org/model.keras",
    "hub": "hf://some/model",
    "bucket": "gs://bucket/model.keras",
    "home": "~nobody-of-that-name/x",
    "unicode": "\u202emodel\U0001f600.keras",
    "surrogates in pairs": "\udce9\udcff",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with a sound model, a run directory and many bad files."""
    folder = tmp_path_factory.mktemp("arguments")
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3, name="fc"), keras.layers.Dense(2, name="out")])
    model.save(folder / "sound.keras")
    (folder / "once.yaml").write_text(ONE_SHOT)
    (folder / "folder").mkdir()
    (folder / "folder.keras").mkdir()
    (folder / "empty.keras").write_bytes(b"")
    noise = random.Random(0).randbytes(2000)
    for name in ("garbage", "garbage.keras", "garbage.yaml", os.fsdecode(b"caf\xe9.keras")):
        (folder / name).write_bytes(noise)
    (folder / "text.yaml").write_text("just text\n")
    (folder / "broken").symlink_to("nowhere")
    (folder / "circle").symlink_to("circle")
    with socket.socket(socket.AF_UNIX) as unix:
        before = os.getcwd()
        os.chdir(folder)
        try:
            unix.bind("socket")
            assert cli.run(["compress", "once.yaml", "-o", "run"]) == 0
        finally:
            os.chdir(before)
    return folder


@pytest.fixture
def run(place, monkeypatch, capsys):
    """Runs the command line there: (exit code, standard output, standard error)."""
    monkeypatch.chdir(place)
    capsys.readouterr()

    def run_there(arguments):
        code = cli.run(arguments)
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return run_there


def assert_one_line(outcome, codes=(1, 2)):
    code, out, err = outcome
    assert code in codes, (code, out, err)
    assert err.startswith("error: ") and err.endswith("\n") and err.count("\n") == 1, err
    assert err.rstrip("\n").isprintable() and len(err) < 9000, err
    assert "Traceback" not in out


# ---- words in the place of files -------------------------------------------------------------------------------------


def test_every_command_is_covered():
    assert {name for name, _ in ARGUMENTS} >= {"compress", "check", "inspect", "report", "verify", "recipes"}


@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS)
@pytest.mark.parametrize(("name", "argument"), ARGUMENTS, ids=lambda value: str(value))
@pytest.mark.parametrize("as_json", [False, True], ids=["text", "json"])
def test_a_word_that_names_nothing_of_use(run, name, argument, path, as_json):
    parameters = cli.cli.commands[name].params
    # Other arguments of the command are words that name nothing either.
    words = [
        path if parameter.name == argument else "missing"
        for parameter in parameters
        if isinstance(parameter, click.Argument) and (parameter.required or parameter.name == argument)
    ]
    json_option = ["--json"] if as_json and any("--json" in p.opts for p in parameters) else []
    code, out, err = run([name, *json_option, "--", *words])
    assert_one_line((code, out, err))
    if out:
        assert json.loads(out)["ok"] is False


@pytest.mark.parametrize("path", BAD_PATHS.values(), ids=BAD_PATHS)
@pytest.mark.parametrize("command", [["compress", "one-shot"], ["check", "one-shot", "--plan"]], ids=" ".join)
def test_a_model_that_is_none(run, command, path):
    assert_one_line(run([*command, f"--model={path}"]))


NO_OUTPUTS = [
    "garbage/inside",
    "garbage",
    "",
    "/proc/prunekit/run",
    "x" * 300,
    "x/" * 3000,
    "/dev/null/run",
    "circle",
    "circle/run",
]


@pytest.mark.parametrize("path", [*NO_OUTPUTS, "folder"], ids=lambda path: path[:20] or "empty")
def test_an_output_that_cannot_be_made(run, place, path):
    assert_one_line(run(["compress", "once.yaml", f"--output={path}"]))
    assert sorted(place.glob(".*")) == []


# A folder that is there may hold a sweep; a run may not.
@pytest.mark.parametrize("path", [*NO_OUTPUTS, "run"], ids=lambda path: path[:20] or "empty")
def test_an_output_of_a_sweep_that_cannot_be_made(run, place, path):
    before = sorted(place.rglob("*"))
    outcome = run(["sweep", "once.yaml", "--over", "s=0.5", f"--output={path}"])
    assert_one_line(outcome, codes=(2,))
    assert sorted(place.rglob("*")) == before and outcome[1] == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["inspect", "x.tflite"], "only .keras files are read"),
        (["check", "nothere.yaml"], "nothere.yaml: no such file, and no built-in recipe"),
        (["compress", "once.yaml", "--set", "s=nan"], "prune.sparsity: expected a number. Received: 'nan'"),
        (["sweep", "once.yaml", "--over", "ss=0.5"], "variable 'ss' is set, but not declared"),
        (["sweep", "once.yaml", "--over", "s=nan"], "prune.sparsity: expected a number. Received: 'nan'"),
        (["report", "folder"], "folder: not a run directory"),
        (["report", "missing"], "missing: not a run directory"),
        (["verify", "folder"], "folder is not a run directory"),
        (["compress", "once.yaml", "--checkpoint-every", "0"], "'--checkpoint-every': 0 is not in the range x>=1"),
        (["compress", "once.yaml", "--checkpoint-every", "-1"], "'--checkpoint-every': -1 is not in the range x>=1"),
        (["compress", "once.yaml", "--checkpoint-every", "1.5"], "'--checkpoint-every': '1.5' is not a valid"),
    ],
    ids=lambda value: " ".join(value) if type(value) is list else "",
)
def test_a_mistake_is_reported_and_nothing_written(run, place, words, message):
    (place / "x.tflite").write_bytes(b"\x1c\0\0\0TFL3")
    before = sorted(place.rglob("*"))
    outcome = run(words)
    assert_one_line(outcome, codes=(2,))
    assert message in outcome[2] and outcome[1] == "" and sorted(place.rglob("*")) == before


@pytest.mark.parametrize("path", ["garbage/inside", "garbage", "/proc/x/y.yaml", "x" * 300, "circle", "/dev/null/x"])
def test_a_copy_that_cannot_be_made(run, path):
    assert_one_line(run(["recipes", "digits", "-o", path]))


@pytest.mark.parametrize("path", ["", " "], ids=["empty", "blank"])
def test_a_copy_without_a_name_is_refused(run, place, path):
    before = sorted(place.iterdir())
    assert_one_line(run(["recipes", "digits", "-o", path]), codes=(2,))
    assert sorted(place.iterdir()) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="the administrator may read and write everything")
def test_files_that_may_not_be_read(run, place):
    for name in ("once.yaml", "sound.keras"):
        shutil.copy(place / name, place / f"locked-{name}")
        (place / f"locked-{name}").chmod(0)
    assert_one_line(run(["check", "locked-once.yaml"]))
    assert_one_line(run(["inspect", "locked-sound.keras"]))


def test_files_that_cannot_be_read(run, monkeypatch):
    def refuse(*_, **__):
        raise PermissionError(13, "Permission denied", "sound.keras")

    monkeypatch.setattr("prunekit.anatomy.files.model_files.zipfile.is_zipfile", refuse)
    assert_one_line(run(["inspect", "sound.keras"]))
    assert_one_line(run(["compress", "once.yaml"]))


# ---- options ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize(
    "options",
    [
        ["--no-such-option"],
        ["--jsn"],
        ["-z"],
        ["--json=3"],
        ["one", "too", "many", "words"],
        ["--\udce9"],
        ["--" + "x" * 5000],
    ],
    ids=lambda options: options[0][:20],
)
def test_an_option_that_there_is_not(run, name, options):
    assert_one_line(run([name, *options]), codes=(2,))


@pytest.mark.parametrize("name", COMMANDS)
def test_an_option_without_its_value(run, name):
    for parameter in cli.cli.commands[name].params:
        if isinstance(parameter, click.Option) and not parameter.is_flag and not parameter.count:
            assert_one_line(run([name, "missing", parameter.opts[-1]]), codes=(2,))


@pytest.mark.parametrize("words", [["chekc"], [""], ["--no-such"], ["digits"], ["\udce9"], ["x" * 5000]], ids=ascii)
def test_a_command_that_there_is_not(run, words):
    assert_one_line(run(words), codes=(2,))


def test_a_missing_word(run):
    for name in COMMANDS:
        if any(isinstance(p, click.Argument) and p.required for p in cli.cli.commands[name].params):
            assert_one_line(run([name]), codes=(2,))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "=",
        "=0.5",
        "final",
        "final:0.5",
        "final=",
        "final=x",
        "final=2",
        "final=-0.1",
        "final=1",
        "final=nan",
        "final=.nan",
        "final=1e999",
        "final=" + "9" * 5000,
        "final=" + "x" * 50_000,
        "final='",
        'final="\\ud800"',
        "final=\udce9",
        "final=\x1b[31m",
        "final=a\nb",
        "final=$final",
        "final=$$",
        "final=[1, 2]",
        "final={a: 1}",
        "final=!!python/object/apply:os.system [x]",
        "final=true",
        "final=null",
        "final=0x10",
        "fnal=0.5",
        "x" * 5000 + "=1",
        "\udce9=1",
        "a\nb=1",
    ],
    ids=lambda text: ascii(text[:24]),
)
def test_a_variable_that_cannot_be_set(run, text):
    code, out, err = run(["check", "digits", "--set", text])
    assert_one_line((code, out, err), codes=(2,))


@settings(derandomize=True, database=None, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(st.text(st.characters(codec=None), max_size=20), st.booleans())
def test_any_words_in_the_place_of_a_value(run, text, named):
    code, out, err = run(["check", "digits", "--set", f"final={text}" if named else text])
    if code:
        assert_one_line((code, out, err), codes=(2,))


@settings(derandomize=True, database=None, deadline=None, max_examples=150, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.sampled_from([*COMMANDS, "--json", "--plan", "-o", "--", "-", "--set", "a=1", "--trust", "x", "--force"]),
        max_size=6,
    )
)
def test_any_order_of_words(run, words):
    # None of these words names a recipe, a model or a run; `recipes` and `doctor` do their work.
    code, out, err = run(words)
    if code and words and "Usage:" not in err:
        assert_one_line((code, out, err))


# ---- run directories -------------------------------------------------------------------------------------------------


def branches_of(tree, path=()):
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, item in list(items):
        yield (*path, key)
        yield from branches_of(item, (*path, key))


def changed_at(tree, path, value=None, delete=False):
    copied = copy.deepcopy(tree)
    parent = copied
    for part in path[:-1]:
        parent = parent[part]
    if delete:
        del parent[path[-1]]
    else:
        parent[path[-1]] = value
    return copied


@pytest.fixture
def damaged(place, tmp_path):
    """A copy of the run directory, to be damaged."""
    shutil.copytree(place / "run", tmp_path / "run")
    return tmp_path / "run"


@pytest.mark.parametrize("value", [*VALUES[:10], "x", [], {}, [None], {"a": 1}, [[1, 2]], float("nan")], ids=repr)
def test_a_report_with_a_wrong_value_is_shown_or_refused(run, damaged, value):
    report = json.loads((damaged / "report.json").read_text())
    paths = list(branches_of(report))
    for path in random.Random(repr(value)).sample(paths, min(60, len(paths))):
        (damaged / "report.json").write_text(json.dumps(changed_at(report, path, value)))
        code, out, err = run(["report", str(damaged)])
        if code:
            assert_one_line((code, out, err), codes=(2,))


def test_a_report_that_lacks_something_is_shown_or_refused(run, damaged):
    report = json.loads((damaged / "report.json").read_text())
    for path in branches_of(report):
        (damaged / "report.json").write_text(json.dumps(changed_at(report, path, delete=True)))
        code, out, err = run(["report", str(damaged)])
        if code:
            assert_one_line((code, out, err), codes=(2,))


@pytest.mark.parametrize("name", ["report.json", "recipe.lock.yaml", "model.keras"])
@pytest.mark.parametrize(
    "content",
    [b"", b"{}", b"[]", b"null", b"\xff\xfe\x00", b"[" * 100_000, b"version: 1\n", b'{"hashes": 3, "given": 4}', None],
    ids=lambda content: "folder" if content is None else repr(content[:10]),
)
def test_a_damaged_run_is_not_verified(run, damaged, name, content):
    (damaged / name).unlink()
    if content is None:
        (damaged / name).mkdir()
    else:
        (damaged / name).write_bytes(content)
    code, out, err = run(["verify", str(damaged)])
    if (name, content) == ("report.json", b"{}"):
        # Nothing recorded to compare with: the weights alone decide.
        assert code == 0 and "error" not in err
    else:
        assert_one_line((code, out, err), codes=(2,))


def test_a_report_with_wrong_parts_does_not_break_verify(run, damaged):
    report = json.loads((damaged / "report.json").read_text())
    for key in ("hashes", "versions", "given"):
        for value in (None, 3, "x", [], {}, [1], {"model": 3}, {"python": None}, [["model"]]):
            (damaged / "report.json").write_text(json.dumps({**report, key: value}))
            code, out, err = run(["verify", str(damaged)])
            if code == 2:
                assert_one_line((code, out, err))
            else:
                assert "error" not in err and code in (0, 1)


def test_a_report_beyond_the_limit_is_not_read(run, damaged, monkeypatch):
    size = (damaged / "report.json").stat().st_size
    monkeypatch.setattr("prunekit.recipe.state.directory.LARGEST_REPORT", size)
    assert run(["report", str(damaged)])[0] == 0
    monkeypatch.setattr("prunekit.recipe.state.directory.LARGEST_REPORT", size - 1)
    for command in ("report", "verify"):
        outcome = run([command, str(damaged)])
        assert_one_line(outcome, codes=(2,))
        assert "expected a report of at most" in outcome[2]
