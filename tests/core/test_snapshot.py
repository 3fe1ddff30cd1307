import errno
import hashlib
import json
import os
import pickle

import keras
import numpy as np
import pytest

from prunekit.core.runtime import snapshot as module
from prunekit.core.runtime.snapshot import (
    DamagedSnapshot,
    Snapshot,
    Snapshots,
    dtype_name,
    read_snapshot,
    write_bytes,
    write_snapshot,
)

BRAIN = keras.ops.convert_to_numpy(keras.ops.ones((1,), "bfloat16")).dtype
ARRAYS = {
    "nothing": np.zeros((0, 3), "float32"),
    "one byte, so that others are not aligned": np.array([7], "uint8"),
    "scalar": np.array(-0.0),
    "nan and infinities": np.array([[np.nan, np.inf], [-np.inf, 1e-45]], "float32"),
    "bool": np.array([True, False, True]),
    "brain float": np.array([1.5, -3.0]).astype(BRAIN),
    "strided": np.arange(24, dtype="int64").reshape(4, 6)[::2, ::3],
    "names / with slashes": np.array([2**63 - 1], "int64"),
}
VALUES = {"float": 0.1 + 0.2, "nan": float("nan"), "none": None, "nested": [{"a": [1, 2.5]}], "text": "ü"}


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_what_is_written_comes_back_bit_for_bit(tmp_path):
    write_snapshot(tmp_path / "one", Snapshot(VALUES, ARRAYS))
    found = read_snapshot(tmp_path / "one")
    assert repr(found.values) == repr(VALUES) and list(found.arrays) == list(ARRAYS)
    for name, array in ARRAYS.items():
        back = found.arrays[name]
        assert (back.dtype, back.shape, back.tobytes()) == (array.dtype, array.shape, array.tobytes()), name
        assert not back.flags.writeable
    assert names(tmp_path) == ["one"]


def test_types_have_names_that_numpy_knows():
    for array in ARRAYS.values():
        assert np.dtype(dtype_name(array.dtype)) == array.dtype


def test_a_file_cut_short_anywhere_or_changed_anywhere_is_damaged(tmp_path):
    write_snapshot(tmp_path / "one", Snapshot({"a": 1}, {"b": np.arange(5)}))
    whole = (tmp_path / "one").read_bytes()
    for length in range(len(whole)):
        (tmp_path / "one").write_bytes(whole[:length])
        with pytest.raises(DamagedSnapshot, match="truncated or was modified|not a snapshot of this version"):
            read_snapshot(tmp_path / "one")
    for place in range(len(whole)):
        (tmp_path / "one").write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(DamagedSnapshot):
            read_snapshot(tmp_path / "one")


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_older_file_and_nothing_else(tmp_path, monkeypatch, call):
    write_bytes(tmp_path / "one", b"old")

    def full(*arguments):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match="No space left"):
        write_snapshot(tmp_path / "one", Snapshot({}, ARRAYS))
    assert names(tmp_path) == ["one"] and (tmp_path / "one").read_bytes() == b"old"


def test_of_a_series_the_two_newest_stay(tmp_path):
    series = Snapshots(tmp_path / "new", "point")
    assert not series and series.newest() is None
    for number in range(4):
        series.write(Snapshot({"number": number}, {}))
        assert series.newest().values == {"number": number}
    assert series and names(tmp_path / "new") == ["point-000003", "point-000004"]
    assert Snapshots(tmp_path / "new", "poi").newest() is None, "a series of another name"


def test_where_the_newest_is_torn_the_one_before_it_is_used_and_stays(tmp_path):
    series = Snapshots(tmp_path, "point")
    for number in range(2):
        series.write(Snapshot({"number": number}, {}))
    (tmp_path / "point-000002").write_bytes((tmp_path / "point-000002").read_bytes()[:-3])
    again = Snapshots(tmp_path, "point")
    with pytest.warns(UserWarning, match="point-000002 is truncated or was modified: point-000001 is used"):
        assert again.newest().values == {"number": 0}
    again.write(Snapshot({"number": 2}, {}))
    assert names(tmp_path) == ["point-000001", "point-000003"], "the last two that are whole"


def test_arrays_are_read_piece_by_piece(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_PIECE", 7)
    write_snapshot(tmp_path / "one", Snapshot(VALUES, ARRAYS))
    assert read_snapshot(tmp_path / "one").arrays["bool"].tolist() == [True, False, True]


def crafted(path, text, data=b""):
    """A file whose digest is right: whoever makes one up can compute that too."""
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    total = hashlib.sha256(text + data)
    path.write_bytes(module._head(total, len(text)) + text + data)
    return path


def of_array(dtype="<f4", shape=(2,), **more):
    return {"values": {}, "arrays": [{"name": "x", "dtype": dtype, "shape": shape, **more}]}


@pytest.mark.parametrize(
    ("described", "data"),
    [
        (of_array(shape=(10**6, 10**6)), bytes(8)),
        (of_array(shape=(3,)), bytes(8)),
        (of_array(shape=(1,)), bytes(8)),
        (of_array(shape=(2**63, 2**63)), bytes(8)),
        (of_array(shape=(-1, -2)), bytes(8)),
        (of_array(shape=(0, 10**30)), b""),
        (of_array(shape=[1] * 100), bytes(4)),
        (of_array(shape=(2.0,)), bytes(8)),
        (of_array(shape=(True, 2)), bytes(8)),
        (of_array(shape=2), bytes(8)),
        (of_array(shape=None), bytes(8)),
        (of_array(shape="2"), bytes(8)),
        (of_array("O", (1,)), bytes(8)),
        (of_array("|O", (0,)), b""),
        (of_array("<U2", (1,)), bytes(8)),
        (of_array("<f4,<f4", (1,)), bytes(8)),
        (of_array("(2,)<f4", (1,)), bytes(8)),
        (of_array("|V8", (1,)), bytes(8)),
        (of_array("os.system"), bytes(8)),
        (of_array([["x", "<f4"]]), bytes(8)),
        (of_array(None), bytes(8)),
        (of_array(name=None), bytes(8)),
        ({"values": {}, "arrays": of_array()["arrays"] * 2}, bytes(16)),
        ({"values": {}, "arrays": None}, b""),
        ({"values": {}, "arrays": ["x"]}, b""),
        ({"values": [], "arrays": []}, b""),
        ({"values": {}}, b""),
        ([], b""),
        (b"", b""),
        (b"\xff\xfe", b""),
        (b"[" * 100_000, b""),
        (b'{"values":' * 100_000, b""),
        (b'{"values": {}, "arrays": [{"shape": [' + b"9" * 5_000 + b"]}]}", b""),
    ],
    ids=lambda value: f"{len(value)} bytes" if type(value) is bytes else "description",
)
def test_a_file_that_claims_more_than_it_holds_is_damaged_in_one_line(tmp_path, described, data):
    crafted(tmp_path / "one", described, data)
    with pytest.raises(DamagedSnapshot, match="one has a header that does not match its contents") as refused:
        read_snapshot(tmp_path / "one")
    assert "\n" not in str(refused.value) and len(str(refused.value)) < 400


def test_a_crafted_file_of_sound_contents_is_read(tmp_path):
    found = read_snapshot(crafted(tmp_path / "one", of_array(), bytes(8)))
    assert found.arrays["x"].tolist() == [0.0, 0.0]


def test_memory_is_not_allocated_for_the_declared_size_of_a_text(tmp_path):
    total = hashlib.sha256(b"{}")
    (tmp_path / "one").write_bytes(module._head(total, 10**15) + b"{}")
    with pytest.raises(DamagedSnapshot, match="truncated or was modified"):
        read_snapshot(tmp_path / "one")


def test_pickles_are_no_snapshots(tmp_path):
    for content in (b"cos\nsystem\n(S'touch code-was-run'\ntR.", pickle.dumps({"values": {}, "arrays": []})):
        (tmp_path / "one").write_bytes(content)
        with pytest.raises(DamagedSnapshot, match="not a snapshot of this version"):
            read_snapshot(tmp_path / "one")


def test_an_error_names_the_file_that_was_asked_for(tmp_path):
    path = tmp_path / "none" / "state"
    with pytest.raises(FileNotFoundError) as missing:
        write_snapshot(path, Snapshot({}, {}))
    assert missing.value.filename == str(path)
