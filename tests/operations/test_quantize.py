"""Integer files of pk.quantize: what is in them, and what they compute."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from architectures import inputs_of, randomize, stack
from integer_networks import INT4, INT8, made, stored_weights
from keras import layers as L

import prunekit as pk
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.litert.export_reference import ReferenceModel

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


# Layer, its operation in the file, and the order of the axes of its kernel there.
OPERATIONS = (
    ("conv", "CONV_2D", (3, 0, 1, 2)),
    ("depthwise", "DEPTHWISE_CONV_2D", (3, 0, 1, 2)),
    ("head", "FULLY_CONNECTED", (1, 0)),
)


def network():
    """Returns a model of a convolution, a depthwise convolution and a Dense layer, all biased and none normalized."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(8, 3, activation="relu", name="conv")(x)
    y = L.DepthwiseConv2D(3, activation="relu", name="depthwise")(y)
    return randomize(keras.Model(x, L.Dense(6, name="head")(L.Flatten(name="flat")(y))))


def outputs_of(path, inputs) -> np.ndarray:
    """Returns the output of a file with one input, as LiteRT runs it by default."""
    runner = Interpreter(model_path=str(path)).get_signature_runner()
    (name,) = runner.get_input_details()
    (found,) = runner(**{name: inputs}).values()
    return found


# ---- 8 bits ----------------------------------------------------------------------------------------------------------


def test_a_file_of_8_bits_computes_what_the_simulation_does(eight):
    done, export, inputs = eight
    with done.simulating() as model:
        expected = model.predict(inputs, verbose=0)
    found = outputs_of(export.path, inputs)
    error = np.abs(found - expected).max() / np.ptp(expected)
    assert error == pytest.approx(export.simulation.max_error, abs=1e-6) and error < 0.02
    assert {kind: row[0] for kind, row in stored_weights(export.path).items()} == {
        "CONV_2D": INT8,
        "FULLY_CONNECTED": INT8,
    }


def test_the_simulation_is_not_run_again_for_a_file_on_the_calibration_data(tmp_path, monkeypatch):
    model = network()
    inputs = inputs_of(model)
    done = pk.quantize(model, inputs)
    expected = done.export(tmp_path / "again.tflite", data=inputs)
    runs = []
    answers = ReferenceModel.answers
    monkeypatch.setattr(ReferenceModel, "answers", lambda self, model: runs.append(1) or answers(self, model))
    found = done.export(tmp_path / "m.tflite")
    assert not runs
    assert found.simulation.max_error == pytest.approx(expected.simulation.max_error, abs=0.005)
    # A bias lies on no grid, so that the weights are still those of the quantization.
    bias = model.get_layer("conv").bias
    bias.assign(bias.numpy() + 1.0)
    changed = done.export(tmp_path / "changed.tflite")
    assert runs and changed.simulation.max_error < 0.02


def test_the_result_shows_what_was_done(eight):
    done, _, _ = eight
    assert repr(done) == f"<QuantizationResult {done.model_name!r}: {done.verdict()}>"


def test_the_fields_of_an_export_describe_the_file(eight):
    done, export, inputs = eight
    content = Path(export.path).read_bytes()
    assert export.bytes == len(content) and export.gzip_bytes < export.bytes < export.float_bytes
    assert export.skipped == () and export.largest_difference <= 1
    assert [one.name for one in export.tensors] == [one.name for one in done.ranges]
    assert 0.0 < export.float_model.mean_error < 0.02
    start = f"{export.path}: {export.bytes:,} bytes ({export.bytes / export.float_bytes:.3f} of the float32 file)"
    assert export.verdict().startswith(start)
    assert export.verdict().endswith("; 0 operations compute in floating point.")
    assert f"{len(export.tensors)} tensors at most 1 step from the simulation" in export.verdict()
    found = json.loads(json.dumps(export.to_dict()))
    assert (found["bytes"], found["largest_difference"]) == (export.bytes, export.largest_difference)
    assert [one.title for one in export.sections()] == ["Integer file", "Tensors of the file and of the simulation"]


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", ["multi_output", "mobilenetv2", "einsum", "conv1d"])
def test_other_architectures_have_files_of_8_bits(name, tmp_path):
    model, inputs = made(name)
    export = pk.quantize(model, inputs).export(tmp_path / "new" / "m.tflite")
    assert export.skipped == () and export.largest_difference <= 1
    assert export.simulation.mean_error < 0.01 and export.float_model.mean_error < 0.05
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["m.tflite"]


def test_the_file_of_a_model_with_a_fixed_batch_size_is_compared(tmp_path):
    x = keras.Input(batch_shape=(4, 6), name="x")
    model = randomize(keras.Model(x, L.Dense(4, name="only")(x)))
    data = np.random.default_rng(0).normal(size=(16, 6)).astype("float32")
    export = pk.quantize(model, [data[:4], data[4:8], data[8:12]]).export(tmp_path / "m.tflite")
    assert export.largest_difference <= 1
    runner = Interpreter(model_path=export.path).get_signature_runner()
    assert runner.get_input_details()["x"]["shape"].tolist() == [4, 6]


# ---- activations in floating point -----------------------------------------------------------------------------------


@pytest.mark.parametrize("bits, kind", [(8, INT8), (4, INT4), (3, INT4)])
def test_with_activations_in_floating_point_the_file_computes_what_the_quantized_model_does(bits, kind, tmp_path):
    model = network()
    inputs = inputs_of(model, examples=16)
    done = pk.quantize(model, bits=bits, activation_bits="float")
    export = done.export(tmp_path / "m.tflite", data=inputs)
    expected = model.predict(inputs, verbose=0)
    assert np.abs(outputs_of(export.path, inputs) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert (export.tensors, export.float_model, export.skipped) == ((), None, ())
    stored = stored_weights(tmp_path / "m.tflite")
    for name, operation, order in OPERATIONS:
        found, codes, scales = stored[operation]
        kernel = np.array(model.get_layer(name).kernel).transpose(order)
        assert found == kind and len(scales) in codes.shape
        spread = scales.reshape([-1 if length == len(scales) else 1 for length in codes.shape])
        assert np.allclose(codes * spread, kernel.reshape(codes.shape), rtol=1e-5, atol=0.0)


# ---- 4 bits ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", [4, 2])
def test_weights_of_4_bits_are_stored_two_in_each_byte_with_the_codes_of_the_model(bits, tmp_path):
    model = network()
    rng = np.random.default_rng(0)
    zeros = {}
    for name, _, order in OPERATIONS:
        kernel = np.array(model.get_layer(name).kernel)
        kernel[rng.random(kernel.shape) < 0.6] = 0.0
        model.get_layer(name).kernel.assign(kernel)
        zeros[name] = kernel.transpose(order) == 0.0
    done = pk.quantize(model, inputs_of(model, examples=32), bits=bits)
    export = done.export(tmp_path / "m.tflite")
    assert export.skipped == () and export.largest_difference <= 1
    stored = stored_weights(tmp_path / "m.tflite")
    for name, operation, order in OPERATIONS:
        found, codes, scales = stored[operation]
        layer = model.get_layer(name)
        grid, kernel = done.state.weights[id(layer.kernel)], np.array(layer.kernel)
        expected = grid.codes(kernel).transpose(order).reshape(codes.shape)
        assert found == INT4 and np.array_equal(codes, expected)
        assert (codes.reshape(zeros[name].shape)[zeros[name]] == 0).all() and codes.any()
        assert np.allclose(np.sort(scales), np.sort(grid.scale.reshape(-1)), rtol=1e-5)


def test_a_file_of_4_bits_is_smaller_than_one_of_8(tmp_path):
    sizes = {}
    for bits in (8, 4):
        keras.utils.set_random_seed(0)
        model = stack((64,), L.Dense(128, activation="relu"), L.Dense(10))
        done = pk.quantize(model, inputs_of(model, examples=16), bits=bits, method="nearest")
        sizes[bits] = done.export(tmp_path / f"{bits}.tflite").bytes
    assert 0.45 * (64 * 128 + 1280) < sizes[8] - sizes[4] < 0.51 * (64 * 128 + 1280)


@pytest.mark.parametrize(("size", "left"), [(1e-12, 1), (1e-7, 0)])
def test_a_softmax_of_almost_constant_logits_computes_in_floating_point(size, left, tmp_path):
    x = keras.Input((8,), name="x")
    logits = L.Dense(6, use_bias=False, name="logits")
    model = keras.Model(x, L.Softmax(name="classes")(logits(x)))
    logits.kernel.assign(30 * size * np.random.default_rng(0).normal(size=(8, 6)))
    inputs = np.random.default_rng(1).normal(size=(16, 8)).astype("float32")
    found = pk.quantize(model, inputs).export(tmp_path / "m.tflite")
    assert list(found.skipped) == [Skipped("classes", "SOFTMAX")] * left
    assert found.largest_difference <= 1


# ---- what no file can hold, and where none can be written ------------------------------------------------------------


class Sampling(L.Layer):
    """Adds noise in inference, as a variational autoencoder does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed_generator = keras.random.SeedGenerator(1)

    def call(self, inputs):
        return inputs + keras.random.normal(keras.ops.shape(inputs), seed=self.seed_generator)


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (Sampling(name="sampling"), "the layers sampling, which draw random numbers in inference"),
        (L.Conv2DTranspose(4, 3, dilation_rate=2, name="up"), "the layers up with dilation_rate above 1"),
    ],
    ids=["random numbers", "a dilation"],
)
def test_layers_that_no_integer_file_can_hold_are_refused_before_the_model_changes(layer, message):
    model = stack((4, 4, 3), L.Conv2D(4, 1), layer, L.Dropout(0.5, seed=1), L.Flatten(), L.Dense(2))
    before = model.get_weights()
    with pytest.raises(ValueError, match=message):
        pk.quantize(model, inputs_of(model))
    assert all(np.array_equal(one, two) for one, two in zip(before, model.get_weights(), strict=True))


def test_a_file_that_cannot_be_written_is_refused_with_the_name_that_was_given(eight, tmp_path):
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file" / "model.tflite", tmp_path / "file" / "model.keras"):
        with pytest.raises(ValueError, match=rf"a folder that you may write to. Received: '{path}'"):
            eight[0].export(path)


# ---- texts -----------------------------------------------------------------------------------------------------------

TEXTS = ["good bad", "bad", "good good", "a b"] * 8


def reader_of_texts():
    keras.utils.set_random_seed(0)
    lookup = L.TextVectorization(max_tokens=10, output_sequence_length=4, name="words")
    lookup.adapt(TEXTS)
    layers = [lookup, L.Embedding(10, 8, name="table"), L.GlobalAveragePooling1D(), L.Dense(3, name="head")]
    return keras.Sequential([keras.Input((1,), dtype="string"), *layers])


@pytest.mark.parametrize("kind", [str, object, bytes])
def test_a_model_that_reads_texts_is_quantized_and_the_part_behind_the_lookup_is_a_file(kind, tmp_path):
    model, texts = reader_of_texts(), np.array(TEXTS).astype("S" if kind is bytes else kind)[:, None]
    done = pk.quantize(model, texts)
    assert {row.name for row in done.weights} == {"table/embeddings", "head/kernel"}
    with pytest.raises(ValueError, match="in which words reads texts. Quantize the part behind it") as refused:
        done.export(tmp_path / "model.tflite")
    code = str(refused.value).split("outputs: ")[1].removesuffix(".")
    behind = eval(code, {"pk": pk, "keras": keras, "model": model, "texts": texts.astype(str)})
    export = behind.export(tmp_path / "model.tflite")
    assert export.largest_difference <= 1 and not export.skipped


def test_the_keras_file_of_a_model_that_reads_texts_is_compared_on_texts(tmp_path):
    (row,) = pk.export(reader_of_texts(), tmp_path, np.array(TEXTS)[:, None], ["keras"])
    assert (row.status, row.max_error) == ("ok", 0.0)


LISTED = {
    "list": TEXTS,
    "pair of lists": (TEXTS, [0, 1] * (len(TEXTS) // 2) + [0] * (len(TEXTS) % 2)),
    "objects": np.array(TEXTS, object),
    "texts": np.array(TEXTS),
    "bytes": np.array([one.encode() for one in TEXTS]),
    "list of bytes": [one.encode() for one in TEXTS],
    "batches": [(TEXTS[:2], [0, 1]), (TEXTS[2:], [1] * (len(TEXTS) - 2))],
}


@pytest.mark.parametrize("data", LISTED.values(), ids=LISTED)
def test_texts_of_each_kind_are_read_and_the_report_names_what_stays_outside(data, tmp_path):
    done = pk.quantize(reader_of_texts(), data)
    (note,) = [one for one in done.notes if "texts" in one]
    assert note.startswith("words reads texts, outside of the integers: a Keras file ")
    assert "model.get_layer('words')(texts)" in note
    assert done.export(tmp_path / "net.keras").bytes > 0
    assert pk.prune(reader_of_texts(), 0.5, data).damage.examples == len(TEXTS)


def test_texts_in_tensors_and_datasets_are_read(tmp_path):
    import tensorflow as tf

    expected = pk.quantize(reader_of_texts(), np.array(TEXTS)).damage.error
    for data in (tf.constant(TEXTS), tf.data.Dataset.from_tensor_slices(TEXTS).batch(2)):
        assert pk.quantize(reader_of_texts(), data).damage.error == pytest.approx(expected, rel=1e-4)
    for samples in (TEXTS, tf.constant(TEXTS), np.array(TEXTS, object)):
        (row,) = pk.export(reader_of_texts(), tmp_path, samples, ["keras"])
        assert row.status == "ok", row.note
