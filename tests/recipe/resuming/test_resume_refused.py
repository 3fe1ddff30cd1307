"""What is refused or breaks where a run is gone on with: nothing is lost, and nothing overwritten."""

import copy
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
from unfinished_runs import WHOLE, Stop, contents, names, network

from prunekit.anatomy.files.digests import model_digest
from prunekit.cli import run as command
from prunekit.recipe.run import runner
from prunekit.recipe.run.runner import compress, verify
from prunekit.recipe.state.models import load_model
from prunekit.recipe.text.loader import RecipeError

pytestmark = pytest.mark.every_backend


def edited():
    recipe = copy.deepcopy(WHOLE)
    recipe["steps"][2]["prune"]["epochs"] = 4
    return recipe


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("recipe", r"the recipe was edited \(steps\[2\].prune.epochs: 3 before, 4 now\). Undo these changes"),
        ("step", r"the recipe was edited \(steps: \[.*\.\.\. before, \[.*\.\.\. now\)"),
        ("data", "the data are not what it started from"),
        ("weights", "the model is not what it started from"),
        ("activation", "the model is not what it started from"),
        ("version", "keras was .* and is 3.99"),
        ("unasked", "contains an unfinished run: continue with --resume .resume=True., or start over with --force"),
        ("export", "dense.keras has changed since the unfinished run wrote it"),
        ("start", "start.json is damaged"),
        ("start nested", "start.json is damaged"),
        ("start gone", "start.json is missing, and only this file describes the checkpoints"),
        ("run gone", "dense.keras has changed since the unfinished run wrote it"),
    ],
)
@pytest.mark.short(cases=6)
@pytest.mark.every_backend(cases=0)
def test_a_run_that_has_changed_is_not_resumed(pairs, tmp_path, unfinished, monkeypatch, change, message):
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


@pytest.mark.filterwarnings("default:.* is truncated or was modified")
@pytest.mark.every_backend(cases=0)
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
        rf"warning: {re.escape(str(torn))} is truncated or was modified: checkpoint-\d+ is used\.", warning
    )


@pytest.mark.every_backend(cases=0)
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


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("checkpoint-000001", errno.ENOSPC),
        pytest.param("checkpoint-000001", errno.EROFS, marks=pytest.mark.thorough),
        pytest.param("checkpoint-000004", errno.ENOSPC, marks=pytest.mark.thorough),
        ("checkpoint-000004", errno.EROFS),
        pytest.param("model.keras", errno.ENOSPC, marks=pytest.mark.thorough),
    ],
)
@pytest.mark.short(cases=1)
def test_a_full_or_read_only_disk_is_reported_in_one_line_and_what_was_saved_is_kept(
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
    assert "The earlier checkpoints are kept" in str(caught.value) and names(tmp_path) == ["run.unfinished"]
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


@pytest.mark.thorough
def test_a_disk_that_is_really_full_and_one_that_may_only_be_read(pairs, tmp_path, whole, small_disk):
    with pytest.raises(OSError, match="No space left on device. The earlier checkpoints are kept"):
        compress(WHOLE, network(), pairs, tmp_path / "disk" / "run")
    assert names(tmp_path / "disk") == ["run.unfinished"]
    before = contents(tmp_path / "disk")
    assert small_disk("size=500k,ro")
    with pytest.raises((RecipeError, OSError), match="Read-only file system"):
        compress(WHOLE, network(), pairs, tmp_path / "disk" / "run", resume=True)
    assert contents(tmp_path / "disk") == before
    assert small_disk("size=500k,rw")
    result = compress(WHOLE, network(), pairs, tmp_path / "disk" / "run", resume=True)
    assert model_digest(result.model) == model_digest(whole.model) and names(tmp_path / "disk") == ["run"]
