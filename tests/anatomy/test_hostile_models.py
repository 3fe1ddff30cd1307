"""Descriptions and weights of models, made to do harm: refused in one line, no code run, no memory taken."""

import io
import json
import warnings
import zipfile
from dataclasses import replace

import h5py
import keras
import numpy as np
import pytest
from hostile_files import SMALL, assert_refused, packed

from prunekit.anatomy.files import model_files
from prunekit.anatomy.files.archives import FileRefused
from prunekit.anatomy.files.model_files import (
    CONFIG,
    WEIGHTS,
    check_config,
    check_h5,
    check_legacy_h5,
    check_model_file,
    load_model,
    load_weights,
)


def h5_with(write):
    content = io.BytesIO()
    with h5py.File(content, "w") as root:
        write(root)
    return content.getvalue()


# ---- descriptions of models ------------------------------------------------------------------------------------------


def described(path, members, change):
    config = json.loads(members[CONFIG])
    change(config)
    return packed(path, members | {CONFIG: json.dumps(config).encode()})


def first_dense(config):
    return config["config"]["layers"][1]


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("os", "system"),
        ("builtins", "eval"),
        ("posix", "system"),
        ("subprocess", "check_output"),
        ("importlib", "import_module"),
        ("keras.utils", "get_file"),
        ("keras.config", "enable_unsafe_deserialization"),
        ("keras.models", "load_model"),
        ("keras.src.saving.saving_lib", "load_model"),
        ("keras.src.utils.file_utils", "get_file"),
        ("keras_hub.models", "anything"),
        ("prunekit.recipe.text.factories", "call_factory"),
    ],
)
@pytest.mark.parametrize("unsafe", [False, True], ids=["safe mode", "safe mode switched off"])
def test_a_function_that_is_no_part_of_a_model_is_refused(tmp_path, members, marker, module, name, unsafe):
    def change(config):
        first_dense(config)["config"]["activation"] = {
            "module": module,
            "class_name": "function",
            "config": name,
            "registered_name": name,
        }

    path = described(tmp_path / "model.keras", members, change)
    if unsafe:
        keras.config.enable_unsafe_deserialization()
    try:
        assert_refused(path, "is not registered here|is not part of a model|damaged or not a Keras 3 model")
    finally:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute("safe_mode_saving", None)


@pytest.mark.parametrize(
    "change",
    [
        {"module": "os", "class_name": "_Environ"},
        {"module": "subprocess", "class_name": "Popen", "config": {"args": "touch code-was-run", "shell": True}},
        {"module": "subprocess", "class_name": "Popen", "registered_name": "Dense"},
        {"module": "collections", "class_name": "OrderedDict", "registered_name": None},
        {"class_name": "TFSMLayer", "module": "keras.layers", "config": {"filepath": "somewhere"}},
        {"class_name": "TorchModuleWrapper", "module": "keras.layers", "config": {"module": "gASV"}},
        {"class_name": ["Dense"], "module": "keras.layers"},
        {"class_name": "Dense", "module": {"x": 1}},
        {"class_name": "function", "module": "builtins", "config": {"x": 1}},
        {"module": "keras.layers", "class_name": "NoSuchLayer"},
    ],
    ids=lambda change: str(change)[:60],
)
def test_a_class_that_is_no_layer_is_refused(tmp_path, members, monkeypatch, marker, change):
    monkeypatch.chdir(tmp_path)
    path = described(tmp_path / "model.keras", members, lambda config: first_dense(config).update(change))
    assert_refused(path, "cannot be read: ")
    assert not marker.exists()


@pytest.mark.parametrize("module", ["os\n", "\x1b[31m", "a\u2028b"], ids=ascii)
def test_a_name_that_would_break_the_line_is_escaped(tmp_path, members, module):
    path = described(tmp_path / "m.keras", members, lambda config: first_dense(config).update(module=module))
    with pytest.raises(FileRefused, match="is not registered here .module ") as refused:
        load_model(path)
    assert str(refused.value).isprintable() and ascii(module)[1:-1] in str(refused.value)


def lambda_that_writes(marker):
    source = f"lambda inputs: [open({str(marker)!r}, 'w'), inputs][1]"
    model = keras.Sequential([keras.Input((3,)), keras.layers.Lambda(eval(source), output_shape=(3,))])
    marker.unlink(missing_ok=True)
    return model


@pytest.mark.parametrize("unsafe", [False, True], ids=["safe mode", "safe mode switched off"])
def test_python_code_in_a_file_is_never_run(tmp_path, marker, unsafe):
    lambda_that_writes(marker).save(tmp_path / "code.keras")
    marker.unlink(missing_ok=True)
    if unsafe:
        keras.config.enable_unsafe_deserialization()
    try:
        assert_refused(tmp_path / "code.keras", "it holds Python code .a Lambda layer., which is never run")
    finally:
        from keras.src.backend.common import global_state

        global_state.set_global_attribute("safe_mode_saving", None)
    assert not marker.exists()


def test_python_code_in_a_legacy_file_is_refused(tmp_path, marker):
    with warnings.catch_warnings(action="ignore"):
        lambda_that_writes(marker).save(tmp_path / "code.h5")
    marker.unlink(missing_ok=True)
    assert_refused(tmp_path / "code.h5", "it holds Python code", check_legacy_h5)
    assert not marker.exists()


@pytest.mark.parametrize(
    "config",
    [
        {"function": ["4wEAAAA=", None, None], "function_type": "lambda"},
        {"function": ["4wEAAAA=", None, None]},
        {"function": "named", "function_type": "function", "output_shape": ["4w", None], "output_shape_type": "lambda"},
    ],
)
def test_code_as_tf_keras_writes_it_is_refused(tmp_path, config):
    text = json.dumps({"class_name": "Sequential", "config": {"layers": [{"class_name": "Lambda", "config": config}]}})

    def write(root):
        root.attrs["model_config"] = text

    (tmp_path / "code.h5").write_bytes(h5_with(write))
    assert_refused(tmp_path / "code.h5", "it holds Python code", check_legacy_h5)


def test_a_sound_legacy_file_passes(tmp_path):
    def write(root):
        layer = {"class_name": "Dense", "module": "tf_keras.layers", "config": {"units": 3}, "registered_name": None}
        root.attrs["model_config"] = json.dumps({"class_name": "Sequential", "config": {"layers": [layer]}})
        root["model_weights/dense/kernel:0"] = np.ones((4, 3), "float32")

    (tmp_path / "sound.h5").write_bytes(h5_with(write))
    check_legacy_h5(tmp_path / "sound.h5")
    assert_refused(tmp_path / "missing.h5", "does not exist", check_legacy_h5)


def test_a_vocabulary_is_not_read_from_elsewhere(tmp_path):
    (tmp_path / "secret.txt").write_text("secret\nwords\n")
    layer = keras.layers.StringLookup(vocabulary=["a", "b"])
    keras.Sequential([keras.Input((1,), dtype="string"), layer]).save(tmp_path / "sound.keras")
    with zipfile.ZipFile(tmp_path / "sound.keras") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}

    def change(config):
        first_dense(config)["config"]["vocabulary"] = str(tmp_path / "secret.txt")

    assert load_model(tmp_path / "sound.keras").layers[0].get_vocabulary() == ["[UNK]", "a", "b"]
    assert_refused(described(tmp_path / "m.keras", members, change), "cannot be read")


def test_a_registered_class_is_welcome(tmp_path):
    @keras.saving.register_keras_serializable("hostile_tests")
    class Welcome(keras.layers.Layer):
        def call(self, inputs):
            return inputs * 2

    keras.Sequential([keras.Input((3,)), Welcome()]).save(tmp_path / "model.keras")
    assert type(load_model(tmp_path / "model.keras").layers[0]) is Welcome


def test_a_description_at_the_limits_and_one_more():
    text = '{"a": ' + "[" * (SMALL.config_levels - 2) + "1" + "]" * (SMALL.config_levels - 2) + "}"
    check_config(text, "m.keras", limits=SMALL)
    with pytest.raises(FileRefused, match="m.keras: expected at most 30 levels"):
        check_config(text.replace("1", "[1]"), "m.keras", limits=SMALL)
    text = "{" + " " * (SMALL.config_bytes - 2) + "}"
    check_config(text, "m.keras", limits=SMALL)
    with pytest.raises(FileRefused, match="at most 4,096 bytes. Received: 4,097"):
        check_config(f"{text} ", "m.keras", limits=SMALL)


def test_a_large_description_is_not_unpacked(tmp_path, members, monkeypatch):
    path = packed(tmp_path / "m.keras", members | {CONFIG: b" " * 5000}, zipfile.ZIP_DEFLATED)
    monkeypatch.setattr(zipfile.ZipFile, "read", None)
    with pytest.raises(FileRefused, match="at most 4,096 bytes. Received: 5,000"):
        check_model_file(path, SMALL)


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"a":' * 100_000, b"9" * 5000, b'{"a": "\\ud800"}'],
    ids=lambda content: repr(content[:12]),
)
def test_a_description_that_is_none_is_refused(tmp_path, members, content):
    assert_refused(packed(tmp_path / "model.keras", members | {CONFIG: content}), "cannot be read|levels")


@pytest.mark.parametrize("units", [10**6, 10**12, 2**63, -5, "many", [3]], ids=str)
def test_a_layer_larger_than_its_file_is_not_allocated(tmp_path, members, units):
    def change(config):
        first_dense(config)["config"]["units"] = units
        first_dense(config)["build_config"]["input_shape"] = [None, 10**6]
        config["config"]["layers"][0]["config"]["batch_shape"] = [None, 10**6]
        config["config"]["build_input_shape"] = config["build_config"]["input_shape"] = [None, 10**6]

    assert_refused(described(tmp_path / "model.keras", members, change), "cannot be read")


def test_weights_at_the_bound_and_one_more():
    with model_files.bounded_weights(400):
        keras.layers.Dense(10, use_bias=False).build((None, 10))
    with pytest.raises(FileRefused, match="more than 400 bytes of weights"), model_files.bounded_weights(400):
        keras.layers.Dense(10).build((None, 10))
    keras.layers.Dense(10).build((None, 10))


# ---- HDF5 ------------------------------------------------------------------------------------------------------------


def external_link(root):
    root["layers/dense/vars/0"] = h5py.ExternalLink("/etc/hostname.h5", "/secret")


def soft_link(root):
    root["layers/dense/vars/0"] = h5py.SoftLink("/other")


def external_storage(root):
    root.create_dataset("layers/dense/vars/0", (4,), "uint8", external=[("/etc/passwd", 0, 4)])


def virtual_data_set(root):
    layout = h5py.VirtualLayout((4,), "uint8")
    layout[:] = h5py.VirtualSource("/tmp/other.h5", "x", (4,))
    root.create_virtual_dataset("layers/dense/vars/0", layout)


def shape_bomb(root):
    root.create_dataset("layers/dense/vars/0", (10**7, 10**7), "float32", chunks=(1000, 1000), compression="gzip")


@pytest.mark.parametrize(
    ("write", "match"),
    [
        (external_link, "'0' in its weights points to another place or file"),
        (soft_link, "'0' in its weights points to another place or file"),
        (external_storage, "'/layers/dense/vars/0' in its weights stores its data in another file"),
        (virtual_data_set, "'/layers/dense/vars/0' in its weights stores its data in another file"),
        (shape_bomb, "its weights declare 400,000,000,000,000 bytes, more than 100 times the"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_weights_that_point_elsewhere_or_declare_too_much_are_refused(tmp_path, members, perceptron, write, match):
    path = packed(tmp_path / "m.keras", members | {WEIGHTS: h5_with(write)})
    assert_refused(path, match)
    assert_refused(path, match, lambda path: load_weights(perceptron, path))


def test_groups_that_contain_themselves_are_walked_once():
    def write(root):
        root.create_group("a")["b"] = root
        root["a/c"] = root["a"]

    content = h5_with(write)
    # The root and one group: a walk around the circle would count more.
    check_h5(io.BytesIO(content), "circle.h5", replace(SMALL, objects=2))
    with pytest.raises(FileRefused, match="circle.h5: expected at most 1 groups and arrays"):
        check_h5(io.BytesIO(content), "circle.h5", replace(SMALL, objects=1))


def test_objects_of_weights_at_the_limit_and_one_more():
    def write(count):
        return io.BytesIO(h5_with(lambda root: [root.create_group(f"g{i}") for i in range(count)]))

    check_h5(write(SMALL.objects - 1), "groups.h5", SMALL)
    with pytest.raises(FileRefused, match="groups.h5: expected at most 50 groups and arrays"):
        check_h5(write(SMALL.objects), "groups.h5", SMALL)


def test_declared_weights_at_the_limit_and_one_more():
    def write(count):
        return io.BytesIO(h5_with(lambda root: root.create_dataset("x", (count,), "u1", chunks=(64,))))

    check_h5(write(SMALL.expanded_bytes), "numbers.h5", SMALL)
    with pytest.raises(FileRefused, match="its weights declare 65,537 bytes"):
        check_h5(write(SMALL.expanded_bytes + 1), "numbers.h5", SMALL)


@pytest.mark.parametrize(
    "content", [b"", b"garbage", b"\x89HDF\r\n\x1a\n" + bytes(100)], ids=["empty", "text", "zeros"]
)
def test_weights_that_are_none_are_refused(tmp_path, members, content):
    assert_refused(packed(tmp_path / "m.keras", members | {WEIGHTS: content}), "its weights are damaged")


def test_weights_of_another_model_are_refused(model_file):
    other = keras.Sequential([keras.Input((8,)), keras.layers.Dense(3)])
    before = other.get_weights()
    with pytest.raises(FileRefused, match="cannot be read"):
        load_weights(other, model_file)
    assert len(before) == 2


def test_the_optimizer_of_a_model_that_was_never_trained_gives_no_warning(tmp_path):
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3)])
    model.compile("adam", "mse")
    model.save(tmp_path / "net.keras")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert type(load_model(tmp_path / "net.keras").optimizer) is keras.optimizers.Adam
