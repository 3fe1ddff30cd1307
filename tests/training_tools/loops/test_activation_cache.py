"""Stores of activations: bounded, whole or not there, safe beside other processes."""

import os
import shutil

import numpy as np
import pytest

from prunekit.training_tools.loops.activation_cache import FileStore, MemoryStore


@pytest.mark.parametrize("kind", [MemoryStore, FileStore])
def test_stores_stay_below_their_limit_whatever_is_kept(kind, tmp_path):
    store = MemoryStore(1000) if kind is MemoryStore else FileStore(tmp_path, 1000)
    rng = np.random.default_rng(0)
    for number in range(30):
        rows = int(rng.integers(1, 100))
        store.keep(f"{number:064x}", iter([[np.ones((rows, 2), "float32")], [np.ones((1, 2), "float32")]]))
        kept = sum(file.stat().st_size for file in tmp_path.glob("*/[0-9]*")) if kind is FileStore else store.size
        assert rows * 8 + 8 <= kept <= 1000
        assert store.find(f"{number:064x}").sizes == (rows, 1)
    with pytest.raises(ValueError, match="float32 of shape .batch, 2., then float32 of shape .batch, 3."):
        store.keep("a" * 64, iter([[np.ones((1, 2), "float32")], [np.ones((1, 3), "float32")]]))
    assert store.find("a" * 64) is None


def test_two_processes_that_write_the_same_do_not_hurt_each_other(tmp_path):
    key, rows = "b" * 64, np.arange(12, dtype="float32").reshape(6, 2)
    one, other = FileStore(tmp_path, 1000), FileStore(tmp_path, 1000)

    def interrupted():
        yield [rows[:3]]
        other.keep(key, iter([[rows[:2]], [rows[2:]]]))
        yield [rows[3:]]

    mine = one.keep(key, interrupted())
    theirs = other.find(key)
    assert np.array_equal(mine.arrays[0], rows) and np.array_equal(theirs.arrays[0], rows)
    assert [entry.name for entry in tmp_path.iterdir()] == [f"{key}.activations"]


def test_files_of_others_stay_and_leftovers_of_killed_processes_go(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    old, fresh = tmp_path / "old.partial", tmp_path / "fresh.partial"
    for folder in (old, fresh):
        folder.mkdir()
    os.utime(old, (0, 0))
    FileStore(tmp_path, 1000).keep("c" * 64, iter([[np.ones((3, 2), "float32")]]))
    assert sorted(entry.name for entry in tmp_path.iterdir()) == sorted(
        ["notes.txt", "fresh.partial", "c" * 64 + ".activations"]
    )


def test_what_another_process_removes_while_it_is_read_is_missing_and_not_damaged(tmp_path, monkeypatch):
    key, rows = "d" * 64, np.ones((3, 2), "float32")
    store, other = FileStore(tmp_path, 1000), FileStore(tmp_path, 1000)
    kept = store.keep(key, iter([[rows]]))
    original = np.memmap

    def removed_first(path, *arguments, **options):
        shutil.rmtree(tmp_path / f"{key}.activations")
        return original(path, *arguments, **options)

    monkeypatch.setattr(np, "memmap", removed_first)
    assert other.find(key) is None
    monkeypatch.undo()
    assert store.find(key) is None
    assert np.array_equal(kept.arrays[0], rows), "a map that is open stays"


@pytest.mark.parametrize(
    "text",
    [
        "[" * 100_000,
        '{"key": "%s", "arrays": [{"dtype": "O", "shape": [1]}], "sizes": [1]}',
        '{"key": "%s", "arrays": [{"dtype": "<f4", "shape": [1e999]}], "sizes": [1]}',
    ],
    ids=["nested", "objects", "endless"],
)
def test_a_hostile_manifest_is_damage_and_nothing_is_read(tmp_path, text):
    key = "e" * 64
    FileStore(tmp_path, 1000).keep(key, iter([[np.ones((3, 2), "float32")]]))
    (tmp_path / f"{key}.activations" / "manifest.json").write_text(text.replace("%s", key))
    with pytest.warns(UserWarning, match="is damaged .* computed again"):
        assert FileStore(tmp_path, 1000).find(key) is None
