"""Files of tf_keras that are damaged, of another kind, or meant to do harm: refused in one line, nothing run."""

import dataclasses
import io
import json
import os
import pickle
import re
import shutil
import zipfile
from pathlib import Path

import h5py
import keras
import legacy_models as old
import numpy as np
import pytest
from legacy_models import L, keras2, saved, their_noise

from prunekit.anatomy.files.archives import LIMITS
from prunekit.interop.tfmot import read_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A plain perceptron in its three files."""
    folder = tmp_path_factory.mktemp("files")
    model = keras2.Sequential(
        [keras2.Input((4,)), L.Dense(3, "relu", name="hidden"), L.Dense(2, name="out")], name="old"
    )
    model.compile("sgd", "mse")
    return {kind: saved(model, folder, name) for kind, name in old.FORMATS.items()}


@pytest.fixture
def copies(files, tmp_path):
    """Copies of the three files, to be spoilt."""
    copied = {}
    for kind, path in files.items():
        target = tmp_path / path.name
        copied[kind] = str((shutil.copytree if path.is_dir() else shutil.copy)(path, target))
    return copied


def assert_refused(path, match=None):
    with pytest.raises(ValueError, match=match) as error:
        read_model(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value), error.value


def with_config(path, change):
    """The h5 or keras file with its config changed by a function from text to text."""
    if path.endswith(".h5"):
        with h5py.File(path, "r+") as file:
            file.attrs["model_config"] = change(file.attrs["model_config"])
        return path
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    members["config.json"] = change(members["config.json"].decode()).encode()
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


# ---------------------------------------------------------------- of another kind


def test_what_is_not_there_or_of_another_kind_is_refused(tmp_path):
    assert_refused(tmp_path / "gone.keras", "no such file")
    assert_refused(tmp_path, "a folder without saved_model.pb")
    (tmp_path / "model.pkl").write_bytes(pickle.dumps({"weights": [1]}))
    assert_refused(tmp_path / "model.pkl", "an unsupported file type. Convert a .h5")
    (tmp_path / "empty.keras").write_bytes(b"")
    assert_refused(tmp_path / "empty.keras", "it is not a .keras file")
    (tmp_path / "text.h5").write_text("not a model")
    assert_refused(tmp_path / "text.h5", "damaged")


def test_a_file_of_keras_3_needs_no_conversion(tmp_path):
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.save(tmp_path / "new.keras")
    assert_refused(tmp_path / "new.keras", r"is of Keras 3\.\S+ already: keras.models.load_model reads it")


def test_weights_without_a_model_are_refused(tmp_path):
    model = keras2.Sequential([keras2.Input((2,)), L.Dense(1)])
    model.save_weights(tmp_path / "weights.h5")
    assert_refused(tmp_path / "weights.h5", "holds weights without a model")


def test_a_saved_model_that_is_not_of_keras_is_refused(copies):
    os.remove(os.path.join(copies["savedmodel"], "keras_metadata.pb"))
    assert_refused(copies["savedmodel"], "no keras_metadata.pb")


# ---------------------------------------------------------------- damaged


@pytest.mark.parametrize("kind", ["h5", "keras"])
@pytest.mark.parametrize("share", [0.05, 0.5, 0.98])
def test_a_truncated_file_is_refused(copies, kind, share):
    content = Path(copies[kind]).read_bytes()
    Path(copies[kind]).write_bytes(content[: int(len(content) * share)])
    assert_refused(copies[kind])


@pytest.mark.parametrize(
    "member", ["keras_metadata.pb", "variables/variables.index", "variables/variables.data-00000-of-00001"]
)
def test_a_damaged_saved_model_is_refused(copies, member):
    path = Path(copies["savedmodel"], member)
    content = path.read_bytes()
    path.write_bytes(content[: len(content) // 3] + b"\xff" * 40)
    assert_refused(copies["savedmodel"])


@pytest.mark.parametrize("kind", ["h5", "keras"])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        "null",
        '{"class_name": "Sequential"}',
        '{"class_name": ["Sequential"], "config": {}}',
        "[" * 100_000,
    ],
)
def test_a_config_that_is_none_is_refused(copies, kind, text):
    assert_refused(with_config(copies[kind], lambda _: text))


@pytest.mark.parametrize("kind", ["h5", "keras"])
def test_weights_of_another_shape_are_refused(copies, kind):
    assert_refused(with_config(copies[kind], lambda text: text.replace('"units": 3', '"units": 5')))


# ---------------------------------------------------------------- meant to do harm


def _layer_of(module, name, config):
    return json.dumps({"module": module, "class_name": name, "config": config, "registered_name": name})


@pytest.mark.parametrize("kind", old.FORMATS)
def test_a_lambda_is_not_run_not_even_unmarshalled(kind, tmp_path, monkeypatch):
    model = keras2.Sequential([keras2.Input((4,)), L.Lambda(lambda x: x + 1, name="plus")], name="old")
    path = saved(model, tmp_path, old.FORMATS[kind])

    def never(*_, **__):
        raise AssertionError("code of the file was read")

    import marshal

    monkeypatch.setattr(marshal, "loads", never)
    assert_refused(
        path, r"cannot be converted to Keras 3: 'plus' \(Lambda: Python code, which is never run from a file\)"
    )


@pytest.mark.parametrize("kind", ["h5", "keras"])
def test_the_modules_that_a_config_names_are_not_imported(copies, kind, tmp_path, monkeypatch):
    (tmp_path / "harm.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(str(tmp_path))

    def change(text):
        config = json.loads(text)
        for layer in config["config"]["layers"]:
            layer |= {"module": "harm", "registered_name": "harm>Dense"}
        return json.dumps(config)

    assert [layer.name for layer in read_model(with_config(copies[kind], change)).model.layers] == ["hidden", "out"]


@pytest.mark.parametrize("kind", ["h5", "keras"])
@pytest.mark.parametrize(
    ("value", "words"),
    [
        ('"system"', "'hidden' .*activation system"),
        (_layer_of("os", "function", "system"), "system"),
        (_layer_of("builtins", "function", "exec"), "exec"),
        (_layer_of("subprocess", "Popen", {"args": "true"}), r"'Popen' \(Popen: not a class of Keras"),
        ('{"class_name": "__lambda__", "config": {"value": "4wAA"}}', "Python code, which is never run"),
    ],
)
def test_a_function_that_is_no_activation_is_refused(copies, kind, value, words):
    change = lambda text: text.replace('"relu"', value, 1)  # noqa: E731
    assert_refused(with_config(copies[kind], change), words)


def test_arrays_outside_the_file_are_not_read(copies, tmp_path):
    secret = tmp_path / "secret.bin"
    secret.write_bytes(np.arange(12, dtype="<f4").tobytes())
    for number, spoil in enumerate((_external_link, _external_storage, _virtual)):
        path = shutil.copy(copies["h5"], tmp_path / f"{number}.h5")
        with h5py.File(path, "r+") as file:
            group = file["model_weights/hidden/hidden"]
            del group["kernel:0"]
            spoil(group, secret)
        assert_refused(path, "in its weights (points to another place or file|stores its data in another file)")


def _external_link(group, secret):
    group["kernel:0"] = h5py.ExternalLink(str(secret), "/kernel")


def _external_storage(group, secret):
    group.create_dataset("kernel:0", (4, 3), "f4", external=[(str(secret), 0, 48)])


def _virtual(group, secret):
    layout = h5py.VirtualLayout((4, 3), "f4")
    layout[:] = h5py.VirtualSource(str(secret), "kernel", (4, 3))
    group.create_virtual_dataset("kernel:0", layout)


def test_arrays_outside_the_file_are_not_read_from_inside_an_archive(copies, tmp_path):
    with zipfile.ZipFile(copies["keras"]) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    weights = io.BytesIO(members["model.weights.h5"])
    with h5py.File(weights, "r+") as file:
        del file["layers/dense/vars/0"]
        file["layers/dense/vars/0"] = h5py.ExternalLink(str(tmp_path / "secret.h5"), "/kernel")
    with zipfile.ZipFile(copies["keras"], "w") as archive:
        for name, content in (members | {"model.weights.h5": weights.getvalue()}).items():
            archive.writestr(name, content)
    assert_refused(copies["keras"], "in its weights points to another place or file")


def test_groups_within_groups_are_walked_once(copies):
    with h5py.File(copies["h5"], "r+") as file:
        group = file
        for _ in range(60):
            # Two ways into each: by another route than the walk's own these are 2 ** 60 groups.
            below = group.create_group("left")
            group["right"] = below
            group = below
        file["left/circle"] = file["/"]
    assert read_model(copies["h5"]).model.count_params()


@pytest.mark.parametrize("kind", ["h5", "keras"])
def test_a_layer_larger_than_its_file_is_not_allocated(copies, kind):
    path = with_config(copies[kind], lambda text: re.sub(r'"units": \d+', '"units": 2000000000000', text, count=1))
    assert_refused(path, r"it describes a model of more than 1,073,741,824 bytes of weights")


def test_archive_members_are_not_unpacked(copies, tmp_path):
    with zipfile.ZipFile(copies["keras"], "a") as archive:
        archive.writestr("assets/big.txt", "x" * 1000)
    assert read_model(copies["keras"]).model.count_params() == 23
    assert not list(tmp_path.rglob("big.txt"))


def test_an_archive_with_a_member_that_leads_out_of_it_is_refused(copies, tmp_path):
    with zipfile.ZipFile(copies["keras"], "a") as archive:
        archive.writestr("../escaped.txt", "x")
    assert_refused(copies["keras"], "the member '../escaped.txt'")
    assert not list(tmp_path.rglob("escaped.txt"))


def test_a_config_of_an_absurd_size_is_not_read(copies, monkeypatch):
    monkeypatch.setattr("prunekit.interop.tfmot.files.LIMITS", dataclasses.replace(LIMITS, config_bytes=1000))
    assert_refused(copies["keras"], "config.json is larger than")


@pytest.mark.parametrize(
    "optimizer",
    [{"class_name": "Popen", "module": "subprocess", "config": {"args": "true"}}, "subprocess", 3, {"class_name": 3}],
)
def test_an_optimizer_that_is_none_is_named_and_not_made(copies, optimizer):
    def change(text):
        config = json.loads(text)
        config["compile_config"]["optimizer"] = optimizer
        return json.dumps(config)

    converted = read_model(with_config(copies["keras"], change))
    assert converted.optimizer is None


def test_the_files_are_what_the_tests_above_take_them_for(files):
    with their_noise():
        for path in files.values():
            assert read_model(path).model.count_params() == 23
