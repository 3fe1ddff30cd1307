"""pk.pack and pk.unpack: LiteRT files come back byte by byte, Keras files with equal weights and configurations."""

import gzip
import json
import lzma
import zipfile

import keras
import numpy as np
import pytest
from keras import layers
from networks import dense_network, sequential

import prunekit as pk
from prunekit.anatomy.files.archives import FileRefused
from prunekit.delivery.packing.decoder import KERAS, PRODUCT
from prunekit.delivery.packing.encoder import Piece, encode
from prunekit.delivery.packing.litert_tensors import litert_pieces
from prunekit.delivery.packing.tensor_forms import text_form


@pytest.fixture(autouse=True)
def most_without_primes(request):
    if "litert_file_comes_back" not in request.node.name:
        request.getfixturevalue("without_primes")


@pytest.fixture(scope="module")
def network():
    keras.utils.set_random_seed(7)
    model = sequential(
        (12, 12, 1),
        layers.Conv2D(8, 3, activation="relu", name="conv"),
        layers.BatchNormalization(name="normalization"),
        layers.Flatten(),
        layers.Dense(24, activation="relu", name="hidden"),
        layers.Dense(4, activation="softmax", name="out"),
    )
    pk.prune(model, 0.9)
    return model


@pytest.fixture(scope="module")
def inputs():
    return np.random.default_rng(0).normal(size=(32, 12, 12, 1)).astype("float32")


def config_of(path):
    with zipfile.ZipFile(path) as archive:
        return archive.read("config.json"), json.loads(archive.read("metadata.json"))


def assert_equal_models(one, other):
    found = keras.saving.load_model(other)
    expected = keras.saving.load_model(one)
    assert config_of(one) == config_of(other)
    for before, after in zip(expected.variables, found.variables, strict=True):
        assert before.path == after.path and before.dtype == after.dtype
        assert keras.ops.convert_to_numpy(before).tobytes() == keras.ops.convert_to_numpy(after).tobytes()
    if getattr(expected, "optimizer", None) is not None:
        for before, after in zip(expected.optimizer.variables, found.optimizer.variables, strict=True):
            np.testing.assert_array_equal(keras.ops.convert_to_numpy(before), keras.ops.convert_to_numpy(after))
    return found


# ---- LiteRT ----------------------------------------------------------------------------------------------------------

FILES = {
    "float32": lambda model, data, path: pk.export(model, path, data),
    "8 bits": lambda model, data, path: pk.quantize(model, data).export(path),
    "4 bits": lambda model, data, path: pk.quantize(model, data, bits=4).export(path),
    "16-bit activations": lambda model, data, path: pk.quantize(model, data, activation_bits=16).export(path),
    "float16": lambda model, data, path: pk.export(model, path, data, ["litert-float16"]),
    "sparse": lambda model, data, path: pk.export(model, path, data, ["litert-sparse"]),
}


@pytest.mark.parametrize("name", ["8 bits", *sorted(set(FILES) - {"8 bits"})])
def test_a_litert_file_comes_back_byte_by_byte(network, inputs, tmp_path, name):
    model = keras.models.clone_model(network)
    model.set_weights(network.get_weights())
    FILES[name](model, inputs, tmp_path / "net.tflite")
    content = (tmp_path / "net.tflite").read_bytes()
    report = pk.pack(tmp_path / "net.tflite", tmp_path / "net.pack")
    assert pk.unpack(tmp_path / "net.pack", tmp_path / "back.tflite") == tmp_path / "back.tflite"
    assert (tmp_path / "back.tflite").read_bytes() == content
    packed = (tmp_path / "net.pack").stat().st_size
    assert (report.kind, report.bytes_before, report.bytes) == ("litert", len(content), packed)
    # A sparse file has its indices in the graph.
    gzipped, xz = (0.8, 0.9) if name == "sparse" else (0.75, 0.88)
    assert packed < gzipped * len(gzip.compress(content, 9)) and packed < xz * len(lzma.compress(content))


def test_scales_of_biases_are_not_stored_twice(network, inputs, tmp_path):
    model = keras.models.clone_model(network)
    model.set_weights(network.get_weights())
    pk.quantize(model, inputs).export(tmp_path / "net.tflite")
    forms = [piece.form for piece in litert_pieces((tmp_path / "net.tflite").read_bytes())]
    # conv and hidden; the scales of `out` are too few to be described apart.
    assert sum(form.form == PRODUCT for form in forms) >= 2


# ---- Keras -----------------------------------------------------------------------------------------------------------


@pytest.mark.every_backend
def test_a_keras_file_keeps_weights_optimizer_and_configuration(network, inputs, tmp_path):
    model = keras.models.clone_model(network)
    model.compile(keras.optimizers.Adam(1e-3), "sparse_categorical_crossentropy")
    model.fit(inputs, np.arange(32) % 4, epochs=1, verbose=0)
    model.save(tmp_path / "net.keras")
    report = pk.pack(tmp_path / "net.keras", tmp_path / "net.pack")
    pk.unpack(tmp_path / "net.pack", tmp_path / "back.keras")
    found = assert_equal_models(tmp_path / "net.keras", tmp_path / "back.keras")
    np.testing.assert_array_equal(found.predict(inputs, verbose=0), model.predict(inputs, verbose=0))
    assert report.kind == "keras" and report.entries == model.count_params()


@pytest.mark.every_backend
def test_a_model_is_packed_as_its_file(network, tmp_path):
    network.save(tmp_path / "net.keras")
    report = pk.pack(network, tmp_path / "net.pack", compare=())
    pk.unpack(tmp_path / "net.pack", tmp_path / "back.keras")
    found = keras.saving.load_model(tmp_path / "back.keras")
    for before, after in zip(network.weights, found.weights, strict=True):
        np.testing.assert_array_equal(keras.ops.convert_to_numpy(before), keras.ops.convert_to_numpy(after))
    kept = sum(int(np.count_nonzero(keras.ops.convert_to_numpy(one))) for one in network.weights)
    assert (report.kept, report.others) == (kept, ())


MODELS = {
    "mixed precision": lambda: sequential((5,), layers.Dense(7, dtype="mixed_float16"), layers.Dense(3)),
    "bfloat16": lambda: sequential((5,), layers.Dense(7, dtype="bfloat16")),
    "float64": lambda: sequential((5,), layers.Dense(7, dtype="float64")),
    "no weights": lambda: sequential((5,), layers.Activation("relu")),
    "one weight": lambda: sequential((1,), layers.Dense(1, use_bias=False)),
    "shared": lambda: _shared(),
    "vocabulary": lambda: keras.Sequential([keras.Input((), dtype="string"), _lookup()]),
}


def _shared():
    layer, inputs = layers.Dense(5), keras.Input((5,))
    return keras.Model(inputs, layer(layer(inputs)))


def _lookup():
    found = layers.StringLookup()
    found.adapt(["one", "two", "two"])
    return found


@pytest.mark.parametrize("name", MODELS)
def test_models_of_other_kinds_come_back(tmp_path, name):
    MODELS[name]().save(tmp_path / "net.keras")
    pk.pack(tmp_path / "net.keras", tmp_path / "net.pack", compare=())
    pk.unpack(tmp_path / "net.pack", tmp_path / "back.keras")
    assert_equal_models(tmp_path / "net.keras", tmp_path / "back.keras")
    with zipfile.ZipFile(tmp_path / "net.keras") as one, zipfile.ZipFile(tmp_path / "back.keras") as other:
        others = [member for member in one.namelist() if not member.endswith((".h5", "/"))]
        assert {member: one.read(member) for member in others} == {member: other.read(member) for member in others}


@pytest.mark.parametrize(
    ("change", "bits"),
    [
        (lambda model, data: pk.quantize(model, data, bits=4), 6),
        (lambda model, data: pk.cluster(model, 8, data), 4.5),
        (lambda model, data: pk.cluster(model, 4, data, granularity="channel"), 5),
    ],
    ids=["grids", "codebooks", "codebooks of channels"],
)
def test_few_bits_and_few_values_are_found_in_plain_floats(tmp_path, change, bits):
    model = dense_network(64, seed=1, hidden=48, out=10)
    data = np.random.default_rng(0).normal(size=(64, 64)).astype("float32")
    change(model, data)
    report = pk.pack(model, tmp_path / "net.pack", compare=())
    assert report.ideal_bits / report.entries < bits


# ---- reports and mistakes --------------------------------------------------------------------------------------------


def test_the_report_has_sizes_beside_those_of_others(network, tmp_path):
    network.save(tmp_path / "net.keras")
    content = (tmp_path / "net.keras").read_bytes()
    report = pk.pack(tmp_path / "net.keras", tmp_path / "net.pack", compare=("gzip -9", "xz -9e"))
    sizes = {one.name: one.bytes for one in report.others}
    assert sizes["gzip -9"] == len(gzip.compress(content, 9))
    assert sizes["xz -9e"] == len(lzma.compress(content, preset=9 | lzma.PRESET_EXTREME))
    text = str(report)
    assert f"{report.bytes_before:,} -> {report.bytes:,} bytes" in text
    assert f"{report.kept:,} of {report.entries:,} weights are not zero" in text
    titles = [section.title for section in report.sections()]
    assert titles == ["Packed file", "Contents"]
    assert report.ideal_bits / 8 + report.text_bytes < report.bytes


def test_other_compressors_are_those_named(network, tmp_path):
    for options in ({}, {"compare": ["gzip -9"]}, {"compare": "gzip -9"}, {"compare": iter(["gzip -9"])}):
        report = pk.pack(network, tmp_path / "net.pack", **options)
        assert [one.name for one in report.others] == ["gzip -9"]
    with pytest.raises(TypeError, match=r"`compare` is a list of names.* Received: 3"):
        pk.pack(network, tmp_path / "net.pack", compare=3)
    with pytest.raises(TypeError, match="`path` is a packed file. Received: NoneType"):
        pk.unpack(None, tmp_path / "net.keras")
    with pytest.raises(ValueError, match="largest must be bytes, such as 500MB"):
        pk.unpack(tmp_path / "net.pack", tmp_path / "net.keras", largest="x")
    with pytest.raises(ValueError, match=r"`compare` takes gzip -9.* Received: 'gzip'"):
        pk.pack(network, tmp_path / "net.pack", compare=["gzip"])


@pytest.fixture
def stored(network, tmp_path):
    network.save(tmp_path / "net.keras")
    pk.pack(tmp_path / "net.keras", tmp_path / "net.pack", compare=())
    return tmp_path


def test_mistakes_name_what_was_expected(stored, monkeypatch):
    monkeypatch.chdir(stored)
    (stored / "text.tflite").write_text("no model at all")
    (stored / "half.keras").write_bytes((stored / "net.keras").read_bytes()[:3000])
    (stored / "half.tflite").write_bytes(b"\xff\xff\xff\x7fTFL3" + bytes(40))
    (stored / "half.pack").write_bytes((stored / "net.pack").read_bytes()[:-30])
    calls = [
        (lambda: pk.pack("nothing.keras", "o.pack"), "nothing.keras, which is no file"),
        (lambda: pk.pack("text.tflite", "o.pack"), "expected a .tflite or .keras file"),
        (lambda: pk.pack("half.keras", "o.pack"), "not a complete zip archive"),
        (lambda: pk.pack("half.tflite", "o.pack"), "not a whole LiteRT file"),
        (lambda: pk.pack("net.pack", "o.pack"), "packed file already"),
        (lambda: pk.pack("net.keras", stored / "net.keras"), "`output` is another file than `model`"),
        (lambda: pk.pack("net.keras", ""), "`output` is the name of a file"),
        (lambda: pk.unpack("nothing.pack", "o.keras"), "expected a packed file"),
        (lambda: pk.unpack("net.pack", "o.tflite"), "net.pack holds a .keras file"),
        (lambda: pk.unpack("net.keras", "o.keras"), "does not begin with the mark"),
        (lambda: pk.unpack("half.pack", "o.keras"), "half.pack cannot be unpacked"),
        (lambda: pk.unpack("net.pack", "o.keras", largest=1000), "declares more bytes than it may hold"),
    ]
    for call, message in calls:
        with pytest.raises(ValueError, match=message):
            call()
            pytest.fail(f"nothing is refused: {message}")
    with pytest.raises(TypeError, match="a .tflite or .keras file, or a Keras model. Received: int"):
        pk.pack(3, "o.pack")
    assert not list(stored.glob("o.*")) and not list(stored.glob(".unfinished*"))


def foreign(names, *texts):
    """A packed Keras file of such members."""
    pieces = [Piece(text_form(text)) for text in (names, *texts)]
    return encode(pieces, b"".join((names, *texts)), KERAS).data


FOREIGN = {
    "a path that leads out": (
        (b'[["../escaped",null],["attributes.json",null]]', b"content", b"{}"),
        "not a path inside the archive",
    ),
    "no attributes": ((b'[["config.json",null]]', b"{}"), "holds no Keras file"),
    "a list": ((b'[["attributes.json",null]]', b"[1]"), "holds no Keras file"),
    "a number": ((b'[["attributes.json",null]]', b'{"a/b": 3}'), "holds no Keras file"),
    "no list": ((b'{"attributes.json": 3}', b"{}"), "cannot be unpacked: it is damaged"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_another_program_packed_is_checked(stored, name):
    texts, message = FOREIGN[name]
    (stored / "hostile.pack").write_bytes(foreign(*texts))
    with pytest.raises(FileRefused, match=message):
        pk.unpack(stored / "hostile.pack", stored / "back.keras")
    assert not list(stored.glob("*back.keras"))
