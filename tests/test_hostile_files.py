"""Hostile files at every way in, and arrays made to do harm: refused in one line, no code run."""

import ast
import gzip
import io
import struct
import zipfile
from pathlib import Path

import numpy as np
import pytest
from hostile_files import SMALL, packed

import prunekit
from prunekit import cli
from prunekit.recipe.datasets.idx import read_idx
from prunekit.recipe.datasets.npy import read_npy, read_npz
from prunekit.recipe.text.loader import RecipeError

PACKAGE = Path(prunekit.__file__).parent


# ---- every way in ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments",
    [
        ["inspect", "bad.keras"],
        ["compress", "one-shot", "--model", "bad.keras"],
        ["check", "one-shot", "--model", "bad.keras", "--plan"],
        ["compress", "names-it.yaml"],
    ],
    ids=" ".join,
)
def test_every_command_goes_through_the_door(tmp_path, members, monkeypatch, capsys, arguments):
    monkeypatch.chdir(tmp_path)
    packed(tmp_path / "bad.keras", members | {"../outside.txt": b"", "assets/x": b""})
    (tmp_path / "names-it.yaml").write_text("version: 1\nmodel: {file: bad.keras}\nsteps: [prune: {sparsity: 0.5}]\n")
    assert cli.run(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and "not a path inside the archive" in err


# Where a file is opened that prunekit has written itself a moment before, and nobody else could change.
OWN_FILES = {
    ("delivery/packing/keras_tensors.py", "ZipFile"),
    ("delivery/integers/integer_comparison.py", "load"),
    ("delivery/litert/isolated_run.py", "load"),
    ("delivery/litert/keras_file.py", "load_model"),
    ("delivery/litert/latency.py", "load"),
    ("delivery/litert/probe.py", "load"),
    ("delivery/litert/stopwatch.py", "load"),
    ("delivery/litert/tensor_probe.py", "load"),
}
OPENERS = {
    "load_model",
    "load_weights",
    "load",
    "ZipFile",
    "File",
    "loads",
    "load_legacy",
    "unsafe_load",
    "open_archive",
}
OWNERS = {
    "keras.models",
    "keras.saving",
    "model",
    "np",
    "numpy",
    "zipfile",
    "h5py",
    "pickle",
    "marshal",
    "tarfile",
    "tf.data.Dataset",
}


def test_there_is_one_door():
    found = set()
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text()
        tree = ast.parse(text) if any(f".{name}(" in text for name in OPENERS) else ast.Module([], [])
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in OPENERS:
                owner = ast.unparse(node.func.value)
                if owner in OWNERS or owner.endswith(".model"):
                    found.add((path.relative_to(PACKAGE).as_posix(), node.func.attr))
    doors = {
        ("anatomy/files/archives.py", "ZipFile"),
        ("anatomy/files/model_files.py", "load_weights"),
        ("anatomy/files/model_files.py", "File"),
        # The weights of an archive, after the checks of the first two.
        ("delivery/packing/keras_tensors.py", "File"),
        ("recipe/datasets/npy.py", "load"),
        ("recipe/datasets/saved.py", "load"),
        # Of tf_keras; what it opens goes through the checks of the first two.
        ("interop/tfmot/files.py", "File"),
        ("interop/tfmot/files.py", "load_weights"),
    }
    assert found == doors | OWN_FILES


# ---- arrays ----------------------------------------------------------------------------------------------------------


def npy_header(shape, kind="<f4"):
    content = io.BytesIO()
    np.lib.format.write_array_header_1_0(content, {"descr": kind, "fortran_order": False, "shape": shape})
    return content.getvalue()


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (npy_header((10**6, 10**6)) + bytes(100), "declares 4,000,000,000,000 bytes"),
        (npy_header((26,)) + bytes(100), "declares 104 bytes for shape .26,., and 100 follow"),
        (npy_header((2**63, 2**63)), "declares"),
        (npy_header((-1,)), "declares"),
        (npy_header((1,), "|O") + b"cos\nsystem\n(S'touch code-was-run'\ntR.", "Python objects"),
        (b"\x93NUMPY\x03\x00" + bytes(100), "version 3.0"),
        (b"\x93NUMPY\x01\x00\xff\xff{" + b"[" * 60_000, "not a whole"),
        (b"cos\nsystem\n(S'touch code-was-run'\ntR.", "not a whole"),
        (b"", "not a whole"),
    ],
    ids=["bomb", "one number too few", "overflow", "negative", "pickle", "version", "nested", "bare pickle", "empty"],
)
@pytest.mark.parametrize("kind", ["npy", "npz"])
def test_arrays_that_declare_more_than_they_hold_are_refused(tmp_path, monkeypatch, marker, kind, content, match):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / f"data.{kind}"
    if kind == "npy":
        path.write_bytes(content)
    else:
        packed(path, {"x.npy": content}, zipfile.ZIP_DEFLATED)
    with pytest.raises(RecipeError, match=match) as refused:
        read_npy(path) if kind == "npy" else read_npz(path, {"train_inputs": "x"})
    assert "\n" not in str(refused.value) and not marker.exists()


def test_an_array_of_the_declared_size_is_read(tmp_path):
    (tmp_path / "x.npy").write_bytes(npy_header((25,)) + bytes(100))
    assert read_npy(tmp_path / "x.npy").shape == (25,)
    packed(tmp_path / "x.npz", {"x.npy": npy_header((25,)) + bytes(100)})
    assert read_npz(tmp_path / "x.npz", {"inputs": "x"})["inputs"].shape == (25,)
    packed(tmp_path / "long.npz", {"x.npy": npy_header((25,)) + bytes(101)})
    with pytest.raises(RecipeError, match="is followed by other data"):
        read_npz(tmp_path / "long.npz", {"inputs": "x"})


def test_a_packed_idx_file_that_grows_too_much_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("prunekit.recipe.datasets.idx.LIMITS", SMALL)
    for size, wanted in ((SMALL.expanded_bytes, None), (SMALL.expanded_bytes + 1, "more than 10 times the file's")):
        path = tmp_path / "images.gz"
        path.write_bytes(gzip.compress(b"\0\0\x08\1" + struct.pack(">I", size) + bytes(size)))
        if wanted is None:
            assert read_idx(path).shape == (size,)
        else:
            with pytest.raises(RecipeError, match=wanted):
                read_idx(path)
