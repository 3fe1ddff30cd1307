import copy
import dataclasses
import errno
import json
import os
import re
import shutil
import subprocess
import zipfile

import keras
import numpy as np
import pytest
from backends import BACKEND

from prunekit.cli import run as command
from prunekit.recipe import checkpoint as module
from prunekit.recipe import runner
from prunekit.recipe.checkpoint import from_plain, plain_fields, start_differences
from prunekit.recipe.execution import Record
from prunekit.recipe.loader import RecipeError
from prunekit.recipe.models import architecture_digest, load_model, model_digest
from prunekit.recipe.runner import ExpectationFailed, compress, verify
from prunekit.training.snapshot import Snapshot, read_snapshot, write_snapshot

pytestmark = pytest.mark.every_backend

# Of the criteria, the one with statistics of its own, where there is one.
CRITERION = "movement" if BACKEND == "tensorflow" else "magnitude"
SCHEDULE = {"type": "polynomial_decay", "final_sparsity": 0.8, "end": {"epochs": 2}, "frequency": 2}
WHOLE = {
    "version": 1,
    "name": "tiny",
    "seed": 4,
    "compile": {"optimizer": {"name": "adam", "learning_rate": 0.01}, "batch_size": 16, "from_logits": True},
    "steps": [
        {"train": {"epochs": 2}},
        {"export": {"formats": ["keras"], "name": "dense"}},
        {"prune": {"epochs": 3, "schedule": SCHEDULE, "criterion": CRITERION}},
        {"prune": {"sparsity": 0.9, "include": ["hidden"]}},
        {"finetune": {"epochs": 1}},
        {"export": {"formats": ["keras"]}},
    ],
}


def network():
    keras.utils.set_random_seed(20)
    layers = [
        keras.layers.Dense(16, name="hidden"),
        keras.layers.Dropout(0.3, name="drop"),
        keras.layers.Dense(4, name="logits"),
    ]
    return keras.Sequential([keras.Input((8,), name="features"), *layers], name="tiny")


@pytest.fixture(scope="module")
def pairs():
    rng = np.random.default_rng(3)
    pair = rng.normal(size=(70, 8)).astype("float32"), rng.integers(0, 4, 70)
    return pair, pair


@pytest.fixture(scope="module")
def whole(pairs):
    """A run that was not interrupted."""
    return compress(WHOLE, network(), pairs)


@pytest.fixture(scope="module")
def begun(pairs, tmp_path_factory):
    """An unfinished run, in the middle of its first prune step."""
    return interrupted(pairs, tmp_path_factory.mktemp("begun") / "run")


@pytest.fixture
def unfinished(begun, tmp_path):
    """A copy of it, of a run into tmp_path / "run"."""
    return shutil.copytree(begun, tmp_path / "run.unfinished")


class Stop:
    """Interrupts a run when so many ends of epochs and steps were reported."""

    def __init__(self, ends, error=KeyboardInterrupt):
        self.ends, self.error = ends, error

    def __call__(self, item):
        if item.epoch is not None or item.fraction == 1.0:
            self.ends -= 1
            if not self.ends:
                raise self.error


def interrupted(pairs, path, ends=5, recipe=WHOLE, error=KeyboardInterrupt, **options):
    with pytest.raises(error):
        compress(recipe, network(), pairs, path, progress=Stop(ends, error), **options)
    return path.with_name(f"{path.name}.unfinished")


def told(report):
    """A report without what takes its time."""
    values = report.to_dict()
    for step in values["steps"]:
        del step["seconds"]
    for row in values["exports"]:
        del row["gzip_bytes"]
    return values


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- going on --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", [1, 4, 6, 9])
def test_a_run_that_was_interrupted_ends_as_one_that_was_not(pairs, tmp_path, whole, ends):
    work = interrupted(pairs, tmp_path / "run", ends)
    assert names(tmp_path) == ["run.unfinished"]
    result = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert told(result.report) == told(whole.report) and not work.exists()
    assert model_digest(result.model) == model_digest(whole.model)


def test_a_torn_checkpoint_is_told_and_the_one_before_it_used(pairs, tmp_path, whole, unfinished):
    before, newest = sorted(unfinished.glob("checkpoint-*"))
    newest.write_bytes(newest.read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"{newest.name} is cut short or was changed: {before.name} is used"):
        result = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(result.model) == model_digest(whole.model)


def test_where_no_checkpoint_is_whole_nothing_is_made_up(pairs, tmp_path, unfinished):
    for file in unfinished.glob("checkpoint-*"):
        file.write_bytes(b"")
    with (
        pytest.warns(UserWarning, match="no snapshot of this version of prunekit: no other is left"),
        pytest.raises(RecipeError, match="are damaged: nothing can be resumed. Begin anew with --force"),
    ):
        compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)


@pytest.mark.parametrize("name", ["step", "epoch", "history", "record", "random", "files", "optimizer", "pruner"])
def test_a_checkpoint_that_lacks_something_is_refused_in_one_line(pairs, tmp_path, unfinished, name):
    for file in unfinished.glob("checkpoint-*"):
        found = read_snapshot(file)
        write_snapshot(file, Snapshot(found.values | {name: "something else"}, found.arrays))
    before = contents(unfinished)
    with pytest.raises(RecipeError, match=f"hold no {name} that this version .* Begin anew with --force") as refused:
        compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert "\n" not in str(refused.value) and contents(unfinished) == before


def test_checkpoints_inside_a_step_may_be_rarer(pairs, tmp_path, monkeypatch):
    standing = []
    monkeypatch.setattr(module.Checkpoints, "write", lambda self, model, one: standing.append((one.step, one.epoch)))
    recipe = WHOLE | {"steps": [{"train": {"epochs": 5}}, {"train": {"epochs": 1}}]}
    compress(recipe, network(), pairs, tmp_path / "run", checkpoint_every=2)
    assert standing == [(0, 2), (0, 4), (1, 0), (2, 0)]
    with pytest.raises(ValueError, match="`checkpoint_every` is a whole number above zero. Received"):
        compress(recipe, network(), pairs, tmp_path / "run", checkpoint_every=0)


def test_resume_begins_where_nothing_was_begun_and_returns_what_is_finished(pairs, tmp_path):
    first = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    before = contents(tmp_path / "run")
    again = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert told(again.report) == told(first.report) and contents(tmp_path / "run") == before
    assert model_digest(again.model) == model_digest(first.model)
    other = WHOLE | {"seed": 5}
    with pytest.raises(RecipeError, match=r"finished run of something else: the recipe was edited \(seed: 4 before, 5"):
        compress(other, network(), pairs, tmp_path / "run", resume=True)
    assert contents(tmp_path / "run") == before
    with pytest.raises(RecipeError, match="`resume` goes on with the run into an output directory"):
        compress(WHOLE, network(), pairs, resume=True)


def test_a_finished_run_that_failed_its_expectations_fails_them_again(pairs, tmp_path):
    recipe = WHOLE | {"steps": [{"train": {"epochs": 1}}, {"expect": {"accuracy": {"min": 1.0}}}]}
    for _ in range(2):
        with pytest.raises(ExpectationFailed, match="accuracy .* is below the expected 1"):
            compress(recipe, network(), pairs, tmp_path / "run", resume=True)


# ---- what is refused: nothing lost, nothing overwritten ------------------------------------------------------------


def edited():
    recipe = copy.deepcopy(WHOLE)
    recipe["steps"][2]["prune"]["epochs"] = 4
    return recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("recipe", r"the recipe was edited \(steps\[2\].prune.epochs: 3 before, 4 now\). Put that back"),
        ("step", r"the recipe was edited \(steps: \[.*\.\.\. before, \[.*\.\.\. now\)"),
        ("data", "the data are not what it started from"),
        ("weights", "the model is not what it started from"),
        ("activation", "the model is not what it started from"),
        ("version", "keras was .* and is 3.99"),
        ("unasked", "an unfinished run lies in .* with --resume, or begin anew with --force, which deletes it"),
        ("export", "dense.keras is not as the unfinished run wrote it"),
        ("start", "start.json is damaged"),
        ("start nested", "start.json is damaged"),
        ("start gone", "start.json is missing, so nothing says what the checkpoints there are of"),
        ("run gone", "dense.keras is not as the unfinished run wrote it"),
    ],
)
def test_a_run_that_is_no_longer_the_same_is_not_gone_on_with(
    pairs, tmp_path, unfinished, monkeypatch, change, message
):
    work = unfinished
    if change in ("export", "start"):
        (work / ("run/exports/dense.keras" if change == "export" else "start.json")).write_text("something else")
    if change == "start nested":
        (work / "start.json").write_text("[" * 100_000)
    if change == "start gone":
        (work / "start.json").unlink()
    if change == "run gone":
        shutil.rmtree(work / "run")
    before = contents(work)
    recipe = {"recipe": edited(), "step": WHOLE | {"steps": WHOLE["steps"][1:]}}.get(change, WHOLE)
    data = (pairs[0], (pairs[1][0] + 1, pairs[1][1])) if change == "data" else pairs
    model = network()
    if change == "weights":
        model.layers[0].bias.assign(np.ones(16))
    if change == "activation":
        model.layers[0].activation = keras.activations.relu
    found = runner.environment.versions()
    if change == "version":
        monkeypatch.setattr(runner.environment, "versions", lambda: found | {"keras": "3.99"})
    with pytest.raises(RecipeError, match=message) as caught:
        compress(recipe, model, data, tmp_path / "run", resume=change != "unasked")
    assert "\n" not in str(caught.value)
    assert contents(work) == before and names(tmp_path) == ["run.unfinished"]
    if change == "recipe":
        compress(recipe, model, data, tmp_path / "run", force=True)
        assert names(tmp_path) == ["run"]


@pytest.mark.filterwarnings("default:.* is cut short or was changed")
def test_a_changed_data_file_is_noticed(samples, tmp_path, capsys):
    network().save(tmp_path / "in.keras")
    x, y = samples
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    recipe = WHOLE | {"data": {"npz": str(tmp_path / "d.npz")}, "model": {"file": str(tmp_path / "in.keras")}}
    (tmp_path / "recipe.yaml").write_text(json.dumps(recipe))
    whole = compress(recipe)
    with pytest.raises(KeyboardInterrupt):
        compress(recipe, output=tmp_path / "run", progress=Stop(5))
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=(y + 1) % 4)
    before = contents(tmp_path / "run.unfinished")
    words = ["compress", str(tmp_path / "recipe.yaml"), "-o", str(tmp_path / "run")]
    assert command([*words, "--resume"]) == 2
    error = capsys.readouterr().err.strip()
    assert error.count("\n") == 0 and "the data are not what it started from" in error
    assert command(words) == 2 and "with --resume" in capsys.readouterr().err
    assert contents(tmp_path / "run.unfinished") == before
    np.savez(tmp_path / "d.npz", x_train=x, y_train=y, x_test=x, y_test=y)
    torn = max((tmp_path / "run.unfinished").glob("checkpoint-*"))
    torn.write_bytes(torn.read_bytes()[:-1])
    assert command([*words, "--resume", "--checkpoint-every", "2"]) == 0
    assert model_digest(load_model(tmp_path / "run" / "model.keras")) == model_digest(whole.model)
    (warning,) = (line for line in capsys.readouterr().err.splitlines() if str(torn) in line)
    assert re.fullmatch(
        rf"warning: {re.escape(str(torn))} is cut short or was changed: checkpoint-\d+ is used\.", warning
    )


def test_a_truncated_model_file_is_refused_in_one_line(pairs, tmp_path):
    network().save(tmp_path / "in.keras")
    content = (tmp_path / "in.keras").read_bytes()
    (tmp_path / "in.keras").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecipeError, match="is not a .keras file: it is damaged") as caught:
        compress(WHOLE, tmp_path / "in.keras", pairs, tmp_path / "run")
    assert "\n" not in str(caught.value) and names(tmp_path) == ["in.keras"]
    result = compress(WHOLE, network(), pairs, tmp_path / "run")
    (result.directory / "model.keras").write_bytes(content[: len(content) // 2])
    with pytest.raises(RecipeError, match="is not a .keras file: it is damaged"):
        verify(tmp_path / "run", model=network(), data=pairs)
    with zipfile.ZipFile(result.directory / "model.keras", "w") as archive:
        archive.writestr("config.json", "{}")
    with pytest.raises(RecipeError, match="it has no model.weights.h5"):
        compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)


# ---- disks ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("checkpoint-000001", errno.ENOSPC),
        ("checkpoint-000001", errno.EROFS),
        ("checkpoint-000004", errno.ENOSPC),
        ("checkpoint-000004", errno.EROFS),
        ("model.keras", errno.ENOSPC),
    ],
)
def test_a_full_or_read_only_disk_is_told_in_one_line_and_what_was_saved_is_kept(
    pairs, tmp_path, whole, monkeypatch, name, code
):
    replace = os.replace

    def refused(source, target):
        if os.path.basename(target) == name:
            raise OSError(code, os.strerror(code), str(target))
        replace(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", refused)
        with pytest.raises(OSError, match=os.strerror(code)) as caught:
            compress(WHOLE, network(), pairs, tmp_path / "run")
    assert "\n" not in str(caught.value) and caught.value.errno == code
    if name == "checkpoint-000001":
        assert "Nothing was saved yet, and nothing is left behind." in str(caught.value) and not names(tmp_path)
        return
    assert "What was saved before is kept" in str(caught.value) and names(tmp_path) == ["run.unfinished"]
    result = compress(WHOLE, network(), pairs, tmp_path / "run", resume=True)
    assert model_digest(result.model) == model_digest(whole.model) and names(tmp_path) == ["run"]


@pytest.fixture
def small_disk(tmp_path):
    """A function that gives a file system so many kilobytes; the file system is at tmp_path / "disk"."""
    disk = tmp_path / "disk"
    disk.mkdir()

    def mount(*options):
        return subprocess.run(["mount", *options, str(disk)], capture_output=True, check=False).returncode == 0

    if os.geteuid() != 0 or not mount("-t", "tmpfs", "-o", "size=60k", "none"):
        pytest.skip("a file system can be mounted by root only")
    try:
        yield lambda options: mount("-o", f"remount,{options}")
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=False)


def test_a_disk_that_is_really_full_and_one_that_may_only_be_read(pairs, tmp_path, whole, small_disk):
    with pytest.raises(OSError, match="No space left on device. What was saved before is kept"):
        compress(WHOLE, network(), pairs, tmp_path / "disk" / "run")
    assert names(tmp_path / "disk") == ["run.unfinished"]
    before = contents(tmp_path / "disk")
    assert small_disk("size=500k,ro")
    with pytest.raises((RecipeError, OSError), match="not a folder that you may write to|Read-only file system"):
        compress(WHOLE, network(), pairs, tmp_path / "disk" / "run", resume=True)
    assert contents(tmp_path / "disk") == before
    assert small_disk("size=500k,rw")
    result = compress(WHOLE, network(), pairs, tmp_path / "disk" / "run", resume=True)
    assert model_digest(result.model) == model_digest(whole.model) and names(tmp_path / "disk") == ["run"]


# ---- parts -----------------------------------------------------------------------------------------------------------


def test_what_was_noted_goes_through_json_and_back(pairs, tmp_path):
    record = None

    class Spy(runner.Execution):
        def run(self):
            nonlocal record
            record = super().run()
            return record

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "Execution", Spy)
        compress(WHOLE, network(), pairs, tmp_path / "run")
    values = json.loads(json.dumps(plain_fields(record)))
    again = from_plain(Record, values, weights_before=record.weights_before)
    assert [
        field.name for field in dataclasses.fields(record) if getattr(record, field.name) != getattr(again, field.name)
    ] == []


def test_an_architecture_is_known_by_what_it_computes_and_not_by_automatic_names():
    first, again = (keras.Sequential([keras.Input((8,)), keras.layers.Dense(4, "relu")]) for _ in range(2))
    assert first.name != again.name and first.layers[0].name != again.layers[0].name
    assert architecture_digest(first) == architecture_digest(again)
    again.layers[0].activation = keras.activations.tanh
    assert architecture_digest(first) != architecture_digest(again)

    class Own(keras.Model):
        def __init__(self, size):
            super().__init__()

    assert architecture_digest(Own(3)) is None or isinstance(architecture_digest(Own(3)), str)


def test_differences_are_named_at_the_first_place():
    start = {"recipe": {"steps": [{"a": 1}, {"b": [1, 2]}]}, "model": "m", "data": None, "versions": {"x": "1"}}
    assert start_differences(start, start) == []
    now = copy.deepcopy(start) | {"versions": {"x": "2"}, "data": "d"}
    now["recipe"]["steps"][1]["b"][1] = 3
    assert start_differences(start, now) == [
        "the recipe was edited (steps[1].b[1]: 2 before, 3 now)",
        "the data are not what it started from",
        "x was 1 and is 2",
    ]
