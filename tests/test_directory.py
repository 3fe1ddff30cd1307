import os
import subprocess
import sys

import pytest

from prunekit.recipe.directory import LOCK, MODEL, REPORT, check_output, check_run, run_directory
from prunekit.recipe.loader import RecipeError


def made(path, text="old"):
    path.mkdir()
    for name in (MODEL, REPORT, LOCK):
        (path / name).write_text(text)
    (path / "exports").mkdir()
    return path


def write(path, text="new", *, force=False):
    with run_directory(check_output(path, force=force), force=force) as folder:
        for name in (MODEL, REPORT, LOCK):
            (folder / name).write_text(text)


def names(folder):
    return sorted(entry.name for entry in folder.iterdir())


def test_a_run_directory_appears_only_when_it_is_whole(tmp_path):
    path = tmp_path / "runs" / "one"
    with run_directory(check_output(path, force=False), force=False) as folder:
        assert folder.parent == path.parent and folder.name.startswith(".one.partial-")
        assert not path.exists()
        (folder / MODEL).write_text("new")
    assert names(path.parent) == ["one"] and names(path) == [MODEL]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, SystemExit, OSError])
@pytest.mark.parametrize("force", [False, True], ids=["new", "over an older run"])
def test_a_run_that_breaks_leaves_nothing_and_an_older_run_as_it_was(tmp_path, error, force):
    path = made(tmp_path / "one") if force else tmp_path / "one"
    with pytest.raises(error), run_directory(check_output(path, force=force), force=force) as folder:
        (folder / MODEL).write_text("new")
        raise error("broken")
    assert names(tmp_path) == (["one"] if force else [])
    if force:
        assert (path / MODEL).read_text() == "old"


def test_an_older_run_is_replaced_with_force_only(tmp_path):
    path = made(tmp_path / "one")
    with pytest.raises(RecipeError, match="exists. Choose another output directory, or replace it with --force"):
        write(path)
    write(path, force=True)
    assert (path / MODEL).read_text() == "new" and names(tmp_path) == ["one"]


def test_force_replaces_an_empty_folder_but_never_what_no_run_has_written(tmp_path):
    (tmp_path / "empty").mkdir()
    write(tmp_path / "empty", force=True)
    path = made(tmp_path / "one")
    (path / "thesis.tex").write_text("years of work")
    with pytest.raises(RecipeError, match="holds 'thesis.tex', which no run has written"):
        check_output(path, force=True)
    assert (path / "thesis.tex").exists()


def test_what_appears_in_an_older_run_meanwhile_is_not_destroyed(tmp_path):
    path = made(tmp_path / "one")
    with pytest.raises(RecipeError, match="notes.txt"), run_directory(check_output(path, force=True), force=True):
        (path / "notes.txt").write_text("mine")
    assert (path / "notes.txt").exists() and (path / MODEL).read_text() == "old" and names(tmp_path) == ["one"]


def test_a_directory_that_somebody_else_makes_meanwhile_stays_theirs(tmp_path):
    path = tmp_path / "one"
    with pytest.raises(RecipeError, match="made by somebody else"), run_directory(path, force=False):
        made(path, "theirs")
    assert (path / MODEL).read_text() == "theirs" and names(tmp_path) == ["one"]


def test_an_older_run_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    path = made(tmp_path / "one")
    rename = type(path).rename

    def failing(self, target):
        if ".partial-" in self.name:
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        write(path, force=True)
    assert (path / MODEL).read_text() == "old" and names(tmp_path) == ["one"]


def test_leftovers_of_killed_runs_go_and_those_of_running_ones_stay(tmp_path):
    killed = "import os, sys; from prunekit.recipe.directory import run_directory; from pathlib import Path\n" + (
        "with run_directory(Path(sys.argv[1]), force=False) as folder:\n"
        "    (folder / 'model.keras').write_text('half'); print(folder, flush=True); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path / "one"], check=False, capture_output=True)
    (leftover,) = names(tmp_path)
    assert leftover.startswith(".one.partial-")
    running = tmp_path / leftover.replace(leftover.split("-")[-2], str(os.getppid()))
    running.mkdir()
    elsewhere = tmp_path / ".one.partial-another_machine-1-00ff00ff"
    elsewhere.mkdir()
    write(tmp_path / "one")
    assert names(tmp_path) == sorted([running.name, elsewhere.name, "one"])


def test_an_older_run_that_a_killed_run_had_moved_comes_back_first(tmp_path):
    probe = tmp_path / "probe"
    with run_directory(probe, force=False) as folder:
        pattern = folder.name
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    moved = pattern.replace(".probe.partial", ".one.older").replace(f"-{os.getpid()}-", f"-{dead.stdout.strip()}-")
    made(tmp_path / moved)
    path = tmp_path / "one"
    with pytest.raises(ValueError, match="broken"), run_directory(path, force=True):
        raise ValueError("broken")
    assert (path / MODEL).read_text() == "old" and names(tmp_path) == ["one", "probe"]


def test_a_link_to_a_run_directory_is_followed(tmp_path):
    made(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / MODEL).read_text() == "new"


def test_places_that_cannot_hold_a_run_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="is a file"):
        check_output(tmp_path / "file", force=True)
    with pytest.raises(RecipeError, match="is not a folder that you may write to"):
        check_output(tmp_path / "file" / "one", force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecipeError, match="may write to"):
        check_output(tmp_path / "one", force=False)


def test_only_whole_run_directories_are_taken_for_one(tmp_path):
    assert check_run(made(tmp_path / "one")) == tmp_path / "one"
    with pytest.raises(RecipeError, match="no such folder"):
        check_run(tmp_path / "none")
    (tmp_path / "one" / REPORT).unlink()
    with pytest.raises(RecipeError, match="it has no report.json"):
        check_run(tmp_path / "one")
