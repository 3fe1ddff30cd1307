import os
import re
import shutil
import socket
import subprocess
import sys

import pytest

from prunekit.core.runtime.snapshot import Snapshot, Snapshots
from prunekit.recipe.state.directory import (
    CHECKPOINT,
    LOCK,
    MODEL,
    REPORT,
    check_output,
    check_run,
    clear_up,
    is_finished,
    kept_checkpoints_line,
    run_directory,
    unfinished,
)
from prunekit.recipe.text.loader import RecipeError


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
        assert folder == path.parent / "one.unfinished" / "run"
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


def test_a_directory_that_another_process_makes_meanwhile_is_not_replaced(tmp_path):
    path = tmp_path / "one"
    with pytest.raises(RecipeError, match="created by another process"), run_directory(path, force=False):
        made(path, "theirs")
    assert (path / MODEL).read_text() == "theirs" and names(tmp_path) == ["one"]


def test_an_older_run_comes_back_when_the_last_rename_fails(tmp_path, monkeypatch):
    path = made(tmp_path / "one")
    rename = type(path).rename

    def failing(self, target):
        if self.parent.name == "one.unfinished":
            raise OSError("disk full")
        return rename(self, target)

    monkeypatch.setattr(type(path), "rename", failing)
    with pytest.raises(OSError, match="disk full"):
        write(path, force=True)
    assert (path / MODEL).read_text() == "old" and names(tmp_path) == ["one"]


def dead_process():
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    return dead.stdout.strip()


def test_an_unfinished_run_without_a_checkpoint_is_removed_by_the_next_run(tmp_path):
    killed = "import os, sys; from prunekit.recipe.state.directory import run_directory; from pathlib import Path\n" + (
        "with run_directory(Path(sys.argv[1]), force=False) as folder:\n"
        "    (folder / 'model.keras').write_text('half'); print(folder, flush=True); os._exit(9)"
    )
    subprocess.run([sys.executable, "-c", killed, tmp_path / "one"], check=False, capture_output=True)
    assert names(tmp_path) == ["one.unfinished"] and names(tmp_path / "one.unfinished") == ["lock", "run"]
    with run_directory(check_output(tmp_path / "one", force=False), force=False) as folder:
        assert names(folder) == []
    assert names(tmp_path) == ["one"]


def test_two_processes_do_not_work_on_one_run(tmp_path):
    with run_directory(tmp_path / "one", force=False):
        with pytest.raises(RecipeError, match=r"another process works on the run in .*one\.unfinished"):
            write(tmp_path / "one")
        write(tmp_path / "two")
    assert names(tmp_path) == ["one", "two"]


def interrupted(path, force=False):
    """An unfinished run with a checkpoint."""
    with (
        pytest.raises(KeyboardInterrupt),
        run_directory(check_output(path, force=force), force=force) as folder,
    ):
        (folder / "exports").mkdir()
        Snapshots(folder.parent, CHECKPOINT).write(Snapshot({}, {}))
        raise KeyboardInterrupt


def test_an_unfinished_run_with_a_checkpoint_is_neither_deleted_nor_resumed_without_an_option(tmp_path):
    path = tmp_path / "one"
    interrupted(path)
    with pytest.raises(RecipeError, match=r"one\.unfinished contains an unfinished run: continue with --resume"):
        check_output(path, force=False)
    assert kept_checkpoints_line(path).endswith("continue with --resume.\n")
    with run_directory(check_output(path, force=False, resume=True), force=False, resume=True) as folder:
        assert names(folder) == ["exports"]
    assert names(tmp_path) == ["one"] and kept_checkpoints_line(path) == ""


def test_an_unfinished_run_without_the_folder_of_its_files_is_still_one(tmp_path):
    path = tmp_path / "one"
    interrupted(path)
    shutil.rmtree(unfinished(path) / "run")
    with pytest.raises(RecipeError, match=r"one\.unfinished contains an unfinished run"):
        check_output(path, force=False)
    with run_directory(check_output(path, force=False, resume=True), force=False, resume=True) as folder:
        assert Snapshots(folder.parent, CHECKPOINT).newest() is not None


def test_force_begins_an_unfinished_run_again(tmp_path):
    interrupted(tmp_path / "one")
    with run_directory(check_output(tmp_path / "one", force=True), force=True) as folder:
        assert names(folder) == [] and names(folder.parent) == ["lock", "run"]
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("resume", [False, True], ids=["force", "resume"])
@pytest.mark.parametrize("saved", [False, True], ids=["somebody's folder", "an unfinished run"])
def test_what_no_run_has_written_is_not_removed_with_an_unfinished_run(tmp_path, saved, resume):
    path = tmp_path / "one"
    if saved:
        interrupted(path)
    unfinished(path).mkdir(exist_ok=True)
    (unfinished(path) / "thesis.tex").write_text("years of work")
    before = names(unfinished(path))
    with pytest.raises(RecipeError, match=r"one\.unfinished holds 'thesis.tex', which no run has written"):
        check_output(path, force=not resume, resume=resume)
    assert names(unfinished(path)) == before


def test_what_appears_beside_a_run_meanwhile_is_not_removed_with_it(tmp_path):
    with run_directory(check_output(tmp_path / "one", force=False), force=False) as folder:
        (folder / MODEL).write_text("new")
        (folder.parent / "notes.txt").write_text("mine")
    assert names(tmp_path) == ["one", "one.unfinished"] and names(tmp_path / "one.unfinished") == ["notes.txt"]


def test_a_checkpoint_that_was_cut_off_is_no_stranger(tmp_path):
    interrupted(tmp_path / "one")
    for name in ("start.json", "start.json.partial", "checkpoint-000002.partial", "checkpoint-1000000"):
        (tmp_path / "one.unfinished" / name).touch()
    check_output(tmp_path / "one", force=False, resume=True)
    with run_directory(check_output(tmp_path / "one", force=True), force=True):
        pass
    assert names(tmp_path) == ["one"]


@pytest.mark.parametrize("kind", ["file", "link"])
def test_a_file_where_an_unfinished_run_would_be_is_reported_before_anything_runs(tmp_path, kind):
    if kind == "file":
        (tmp_path / "one.unfinished").write_text("mine")
    else:
        (tmp_path / "one.unfinished").symlink_to("nowhere")
    for options in ({"force": False}, {"force": True}, {"force": False, "resume": True}):
        with pytest.raises(RecipeError, match=r"one\.unfinished is not a folder, .* Move it away"):
            check_output(tmp_path / "one", **options)


def test_an_unfinished_run_is_named_by_what_it_becomes(tmp_path):
    interrupted(tmp_path / "one")
    for options in ({"force": True}, {"force": False, "resume": True}):
        with pytest.raises(
            RecipeError, match="has the name of an unfinished run into one. Pass that name to resume it"
        ):
            check_output(tmp_path / "one.unfinished", **options)


def test_an_unfinished_run_that_replaces_an_older_one_needs_force_again(tmp_path):
    path = made(tmp_path / "one")
    interrupted(path, force=True)
    assert (path / MODEL).read_text() == "old"
    with pytest.raises(RecipeError, match="replace it at the end of the resumed run with --resume --force"):
        check_output(path, force=False, resume=True)
    with run_directory(check_output(path, force=True, resume=True), force=True, resume=True) as folder:
        (folder / MODEL).write_text("new")
    assert (path / MODEL).read_text() == "new" and names(tmp_path) == ["one"]


def test_what_a_run_leaves_that_was_killed_in_its_last_moment_is_no_unfinished_run(tmp_path):
    path = made(tmp_path / "one")
    interrupted(tmp_path / "other")
    (tmp_path / "other.unfinished").rename(unfinished(path))
    (unfinished(path) / "run" / "exports").rmdir()
    (unfinished(path) / "run").rmdir()
    assert is_finished(path) and check_output(path, force=False, resume=True) == path
    clear_up(path)
    assert names(tmp_path) == ["one"]


def test_an_older_run_that_a_killed_run_had_moved_comes_back_first(tmp_path):
    older = f".one.older-{re.sub('[^A-Za-z0-9]', '_', socket.gethostname())}-{{}}-00ff00ff"
    made(tmp_path / older.format(dead_process()))
    running = made(tmp_path / older.format(os.getppid()))
    elsewhere = made(tmp_path / f".one.older-another_machine-{dead_process()}-00ff00ff")
    path = tmp_path / "one"
    with pytest.raises(ValueError, match="broken"), run_directory(path, force=True):
        raise ValueError("broken")
    assert (path / MODEL).read_text() == "old" and names(tmp_path) == sorted([running.name, elsewhere.name, "one"])


def test_a_link_to_a_run_directory_is_followed(tmp_path):
    made(tmp_path / "real")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write(tmp_path / "link", force=True)
    assert (tmp_path / "link").is_symlink() and (tmp_path / "real" / MODEL).read_text() == "new"


def test_places_that_cannot_hold_a_run_are_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RecipeError, match="is a file"):
        check_output(tmp_path / "file", force=True)
    with pytest.raises(RecipeError, match="file is not a folder"):
        check_output(tmp_path / "file" / "one", force=False)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_parent_without_write_permission_is_refused(tmp_path):
    tmp_path.chmod(0o500)
    with pytest.raises(RecipeError, match="cannot be written: no file can be made there"):
        check_output(tmp_path / "one", force=False)


def test_only_whole_run_directories_are_taken_for_one(tmp_path):
    assert check_run(made(tmp_path / "one")) == tmp_path / "one"
    with pytest.raises(RecipeError, match="no such folder"):
        check_run(tmp_path / "none")
    (tmp_path / "one" / REPORT).unlink()
    with pytest.raises(RecipeError, match="it has no report.json"):
        check_run(tmp_path / "one")
