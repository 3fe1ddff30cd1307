"""Integer files of pk.quantize: what is in them, what they compute, and exports that are refused."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L

import prunekit as pk
from prunekit.delivery import quantizing
from prunekit.delivery.integer_comparison import TensorDifference
from prunekit.delivery.litert_graph import LiteRTGraph
from prunekit.delivery.quantizing import IntegerExport, IntegerExportError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
INT8, INT4 = 9, 17
# Layer, its operation in the file, and the order of the axes of its kernel there.
OPERATIONS = (
    ("conv", "CONV_2D", (3, 0, 1, 2)),
    ("depthwise", "DEPTHWISE_CONV_2D", (3, 0, 1, 2)),
    ("head", "FULLY_CONNECTED", (1, 0)),
)


def made(name, examples=32):
    """Returns an architecture with random weights, and inputs."""
    keras.utils.set_random_seed(0)
    model = ARCHITECTURES[name]()
    randomize(model)
    return model, inputs_of(model, examples=examples)


def network():
    """Returns a model of a convolution, a depthwise convolution and a Dense layer, all biased and none normalized."""
    keras.utils.set_random_seed(0)
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(8, 3, activation="relu", name="conv")(x)
    y = L.DepthwiseConv2D(3, activation="relu", name="depthwise")(y)
    model = keras.Model(x, L.Dense(6, name="head")(L.Flatten(name="flat")(y)))
    randomize(model)
    return model


def outputs_of(path, inputs) -> np.ndarray:
    """Returns the output of a file with one input, as LiteRT runs it by default."""
    runner = Interpreter(model_path=str(path)).get_signature_runner()
    (name,) = runner.get_input_details()
    (found,) = runner(**{name: inputs}).values()
    return found


def stored_weights(path):
    """Returns {kind of an operation with weights: (type, codes, scales)}, of the operation or its DEQUANTIZE."""
    graph, found = LiteRTGraph(Path(path).read_bytes()), {}
    made_by = {int(index): one for one in graph.operators for index in one.outputs}
    for one in graph.operators:
        kind = graph.kind(one)
        if kind not in ("CONV_2D", "DEPTHWISE_CONV_2D", "FULLY_CONNECTED"):
            continue
        index = int(one.inputs[1])
        while index in made_by:
            assert graph.kind(made_by[index]) == "DEQUANTIZE"
            index = int(made_by[index].inputs[0])
        tensor = graph.tensor(index)
        data = np.asarray(graph._model.buffers[tensor.buffer].data, "uint8")
        if tensor.type == INT4:
            assert len(data) == -(-np.prod(graph.shape(index)) // 2)
            # The first of two codes lies in the lower bits.
            data = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[: np.prod(graph.shape(index))]
            codes = np.where(data > 7, data.astype("int32") - 16, data)
        else:
            codes = data.view("int8").astype("int32")
        scales = np.asarray(tensor.quantization.scale)
        found[kind] = tensor.type, codes.reshape(graph.shape(index)), scales
    return found


@pytest.fixture(scope="module")
def eight(tmp_path_factory):
    """(Quantized, IntegerExport, inputs) of a convolutional network with 8 bits."""
    model, inputs = made("fashion_cnn")
    done = pk.quantize(model, inputs)
    return done, done.export(tmp_path_factory.mktemp("eight") / "m.tflite"), inputs


@pytest.fixture(scope="module")
def normalized():
    """(model, inputs) with a layer normalization between Dense layers."""
    keras.utils.set_random_seed(0)
    model = stack((8,), L.Dense(12, name="first"), L.LayerNormalization(name="norm"), L.Dense(3, name="head"))
    randomize(model)
    return model, inputs_of(model, examples=16)


@pytest.fixture
def small():
    """(model, inputs) of a Dense layer."""
    model = stack((6,), L.Dense(4, name="only"))
    randomize(model)
    return model, inputs_of(model, examples=16)


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


def test_the_fields_of_an_export_describe_the_file(eight):
    done, export, inputs = eight
    content = Path(export.path).read_bytes()
    assert export.bytes == len(content) and export.gzip_bytes < export.bytes < export.float_bytes
    assert export.left_float == () and export.largest_difference <= 1
    assert [one.name for one in export.tensors] == [one.name for one in done.report.ranges]
    assert 0.0 < export.float_model.mean_error < 0.02 and export.float_model.agreement > 0.9
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
    assert export.left_float == () and export.largest_difference <= 1
    assert export.simulation.mean_error < 0.01 and export.float_model.mean_error < 0.05
    assert [one.name for one in (tmp_path / "new").iterdir()] == ["m.tflite"]


def test_the_file_of_a_model_with_a_fixed_batch_size_is_compared(tmp_path):
    x = keras.Input(batch_shape=(4, 6), name="x")
    model = keras.Model(x, L.Dense(4, name="only")(x))
    randomize(model)
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
    done = pk.quantize(model, weights=bits, activations=None)
    export = done.export(tmp_path / "m.tflite", samples=inputs)
    expected = model.predict(inputs, verbose=0)
    assert np.abs(outputs_of(export.path, inputs) - expected).max() <= 1e-5 * np.abs(expected).max()
    assert (export.tensors, export.float_model, export.left_float) == ((), None, ())
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
    done = pk.quantize(model, inputs_of(model, examples=32), weights=bits)
    export = done.export(tmp_path / "m.tflite")
    assert export.left_float == () and export.largest_difference <= 1
    stored = stored_weights(tmp_path / "m.tflite")
    for name, operation, order in OPERATIONS:
        found, codes, scales = stored[operation]
        layer = model.get_layer(name)
        grid, kernel = done.found.weights[id(layer.kernel)], np.array(layer.kernel)
        expected = grid.codes(kernel).transpose(order).reshape(codes.shape)
        assert found == INT4 and np.array_equal(codes, expected)
        assert (codes.reshape(zeros[name].shape)[zeros[name]] == 0).all() and codes.any()
        assert np.allclose(np.sort(scales), np.sort(grid.scale.reshape(-1)), rtol=1e-5)


def test_a_file_of_4_bits_is_smaller_than_one_of_8(tmp_path):
    sizes = {}
    for bits in (8, 4):
        keras.utils.set_random_seed(0)
        model = stack((64,), L.Dense(128, activation="relu"), L.Dense(10))
        done = pk.quantize(model, inputs_of(model, examples=16), weights=bits, method="nearest")
        sizes[bits] = done.export(tmp_path / f"{bits}.tflite").bytes
    assert 0.45 * (64 * 128 + 1280) < sizes[8] - sizes[4] < 0.51 * (64 * 128 + 1280)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.h5", "m", "m.tflite.gz", "m.TFLITE", "m.KERAS"])
def test_another_ending_is_refused(small, name, tmp_path):
    done = pk.quantize(*small)
    with pytest.raises(ValueError, match='"NAME.tflite", or a Keras file, "NAME.keras". Received: .*' + name):
        done.export(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_an_export_without_samples_is_refused(small, tmp_path):
    done = pk.quantize(small[0], activations=None)
    with pytest.raises(ValueError, match="Received: no samples, .* Pass some inputs as `samples`"):
        done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


def test_weights_that_changed_since_are_refused_by_name(small, tmp_path):
    model, inputs = small
    done = pk.quantize(model, inputs)
    model.get_layer("only").kernel.assign(np.array(model.get_layer("only").kernel) * 1.01)
    with pytest.raises(ValueError, match="Received: only/kernel with other values"):
        done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "option, hint",
    [("wieghts", "'weights'"), ("activation_range", "'activation_ranges'"), ("equalise", "'equalize'")],
)
def test_an_unknown_option_is_refused_with_a_hint(small, option, hint):
    before = [np.array(one) for one in small[0].weights]
    with pytest.raises(TypeError, match=rf"Unknown option. Received: '{option}'.*Did you mean {hint}\?"):
        pk.quantize(*small, **{option: 4})
    assert all(np.array_equal(one, other) for one, other in zip(small[0].weights, before, strict=True))


def test_missing_data_are_refused_and_nothing_changes(small):
    before = [np.array(one) for one in small[0].weights]
    with pytest.raises(ValueError, match="activations=8 reads calibration data. Received: data=None"):
        pk.quantize(small[0])
    assert all(np.array_equal(one, other) for one, other in zip(small[0].weights, before, strict=True))


# ---- failures --------------------------------------------------------------------------------------------------------


def two_steps(*_):
    """Stands for the comparison of a file that computes something else."""
    return [TensorDifference("input", 0, 0.0), TensorDifference("only", 2, 0.5), TensorDifference("lost", None, 0.0)]


def broken(*_, **__):
    """Stands for a file that no interpreter loads."""
    from prunekit.delivery.isolated_run import ScriptFailed

    raise ScriptFailed("does not run: no message")


def without_space(*_, **__):
    """Stands for a disk that is full."""
    raise OSError("No space left on device")


@pytest.mark.parametrize(
    "patched, function, error, message",
    [
        ("tensor_differences", two_steps, IntegerExportError, "Received: 'only' with 2 steps, and 0 more. The file is"),
        ("tensor_differences", broken, IntegerExportError, "The file was made, but does not run.*It is not written"),
        ("os.replace", without_space, OSError, "No space left"),
    ],
    ids=["two steps", "does not run", "disk full"],
)
def test_an_export_that_fails_leaves_an_existing_file_as_it_was(
    small, patched, function, error, message, tmp_path, monkeypatch
):
    path = tmp_path / "m.tflite"
    path.write_bytes(b"former file")
    done = pk.quantize(*small)
    with monkeypatch.context() as patch:
        patch.setattr(f"{quantizing.__name__}.{patched}", function)
        with pytest.raises(error, match=message):
            done.export(path)
    assert path.read_bytes() == b"former file" and list(tmp_path.iterdir()) == [path]
    assert isinstance(done.export(path), IntegerExport)
    assert path.read_bytes()[4:8] == b"TFL3" and list(tmp_path.iterdir()) == [path]


def test_outputs_that_are_far_from_the_simulation_are_refused(small, tmp_path, monkeypatch):
    done = pk.quantize(*small)
    answers = quantizing._Export._answers
    monkeypatch.setattr(quantizing._Export, "_answers", lambda *given: [-one for one in answers(*given)])
    with pytest.raises(IntegerExportError, match="Received: a largest difference of .*allowed: 0.25 and 0.02"):
        done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


def test_an_operation_that_lite_rt_lacks_is_a_failed_export(tmp_path):
    x = keras.Input((3, 3), name="x")
    model = keras.Model(x, L.Dense(2)(keras.ops.reshape(keras.ops.det(x), (-1, 1))))
    done = pk.quantize(model, np.random.default_rng(0).normal(size=(8, 3, 3)).astype("float32"))
    with pytest.raises(IntegerExportError, match="The model cannot be converted: .*Determinant"):
        done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ["jax", "torch"])
def test_on_other_backends_an_export_names_the_one_that_writes_files(small, backend, tmp_path, monkeypatch):
    done = pk.quantize(*small)
    monkeypatch.setattr(done.found.__class__, "check_unchanged", lambda self: None)
    with monkeypatch.context() as patch:
        patch.setattr(quantizing.keras.backend, "backend", lambda: backend)
        with pytest.raises(IntegerExportError, match=f"Received: the backend '{backend}'. .* KERAS_BACKEND=tensorflow"):
            done.export(tmp_path / "m.tflite")
    assert not list(tmp_path.iterdir())


# ---- notes -----------------------------------------------------------------------------------------------------------


def test_a_file_that_is_not_smaller_than_the_float_file_says_so(small, tmp_path):
    export = pk.quantize(*small).export(tmp_path / "m.tflite")
    assert export.bytes >= export.float_bytes > 4 * small[0].count_params()
    (note,) = export.notes
    assert note.startswith(
        f"The file is not smaller than the float32 file ({export.bytes:,} and {export.float_bytes:,}"
    )
    assert f"  note: {note}" in str(export)


def test_operations_in_floating_point_are_named(normalized, tmp_path):
    model, inputs = normalized
    done = pk.quantize(model, inputs)
    export = done.export(tmp_path / "m.tflite")
    assert [one.name for one in done.report.left_float] == ["norm"]
    assert export.left_float and all("/norm" in one for one in export.left_float)
    assert any(one.startswith("RSQRT ") for one in export.left_float)
    left = len(export.left_float)
    assert export.verdict().endswith(f"; {left} operations compute in floating point.")
    assert str(export).count("\n  in floating point: ") == left
    assert {"FULLY_CONNECTED"} == set(stored_weights(tmp_path / "m.tflite"))


def test_merged_tensors_are_noted_and_not_counted():
    export = IntegerExport("m.tflite", 10, 9, 40, (), tuple(two_steps()[::2]), None, None)
    assert export.largest_difference == 0
    assert "lost" in quantizing._notes(10, 40, two_steps())[0]


def test_other_samples_are_compared_without_the_float_model(eight, tmp_path):
    done, _, inputs = eight
    export = done.export(tmp_path / "m.tflite", samples=inputs[:3])
    assert export.float_model is None and export.simulation.max_error < 0.02


def test_quantizing_returns_the_same_model_that_keras_loads_alone(small, tmp_path):
    model, inputs = small
    done = pk.quantize(model, inputs, weights=4)
    assert done.model is model
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))


@pytest.mark.parametrize("bits", [8, 4])
def test_an_excluded_layer_between_two_others_computes_in_floating_point(bits, tmp_path):
    dense = [L.Dense(32, activation="relu", name=name) for name in "ab"]
    model = stack((16,), *dense, L.Dense(3, name="c"))
    randomize(model)
    done = pk.quantize(model, inputs_of(model, examples=16), exclude="b", weights=bits)
    found = done.export(tmp_path / "m.tflite")
    assert [one.name for one in done.report.left_float] == ["b"]
    assert [one.partition(" ")[0] for one in found.left_float] == ["FULLY_CONNECTED"]


def test_a_tensor_that_is_zero_on_the_data_keeps_the_bias_of_the_layer_behind(tmp_path):
    model = stack((6,), L.Dense(5, activation="relu"), L.Dense(3))
    randomize(model)
    done = pk.quantize(model, np.zeros((8, 6), "float32"), weights=4)
    assert done.export(tmp_path / "m.tflite").largest_difference <= 1


def test_tensors_that_the_converter_shuffles_are_noted(tmp_path):
    model, inputs = made("shuffle", examples=8)
    found = pk.quantize(model, inputs).export(tmp_path / "m.tflite")
    assert found.largest_difference <= 1
    assert any("second_relu" in note for note in found.notes)


def test_weights_in_half_precision_lie_on_their_grids(tmp_path):
    model = stack((16,), L.Dense(8, dtype="float16", activation="relu"), L.Dense(3, dtype="float16"))
    randomize(model)
    done = pk.quantize(model, inputs_of(model, examples=16))
    done.found.check_unchanged()
    for weight in done.found.placement.weights():
        grid, values = done.found.weights[id(weight.variable)], np.array(weight.variable, "float32")
        assert np.allclose(grid.nearest(values), values, rtol=2**-11, atol=1e-3 * float(grid.scale.min()))
    with pytest.raises(IntegerExportError, match="compute in float32. Received: the layer .* in float16"):
        done.export(tmp_path / "m.tflite")


def test_an_interruption_in_the_report_leaves_the_model_as_it_was(monkeypatch):
    from prunekit.techniques.quantize import preparation

    model = stack((6,), L.Dense(4, name="a"))
    before = np.array(model.get_layer("a").kernel)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "report_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pk.quantize(model, np.ones((8, 6), "float32"), weights=4)
    np.testing.assert_array_equal(np.array(model.get_layer("a").kernel), before)


@pytest.mark.parametrize("size", [1e-12, 1.0, 10.0])
def test_a_relu6_behind_results_of_any_size_is_exact(size, tmp_path):
    model = stack((8, 8, 3), L.Conv2D(4, 3, name="conv"), L.ReLU(6.0), L.GlobalAveragePooling2D())
    randomize(model)
    conv = model.get_layer("conv")
    for variable in (conv.kernel, conv.bias):
        variable.assign(np.array(variable) * size)
    found = pk.quantize(model, inputs_of(model, examples=16)).export(tmp_path / "m.tflite")
    assert found.largest_difference <= 1 and not found.left_float


@pytest.mark.parametrize("seed", range(4))
def test_outputs_of_few_steps_may_be_a_step_apart(seed, tmp_path):
    keras.utils.set_random_seed(seed)
    hidden = [L.Dense(64, activation="relu") for _ in range(3)]
    model = stack((32,), *hidden, L.Dense(10, activation="softmax", name="head"))
    kernel = model.get_layer("head").kernel
    kernel.assign(np.array(kernel) * 0.03)
    inputs = np.random.default_rng(seed).normal(size=(64, 32)).astype("float32")
    assert pk.quantize(model, inputs, weights=4).export(tmp_path / "m.tflite").largest_difference <= 1


@pytest.mark.parametrize(
    ("samples", "message"), [(np.full((4, 16), np.nan), "NaN or infin"), (np.ones((4, 15)), r"shape.*\(4, 15\)")]
)
def test_samples_that_do_not_fit_are_refused(samples, message, tmp_path):
    model = stack((16,), L.Dense(8))
    done = pk.quantize(model, inputs_of(model, examples=8))
    with pytest.raises(ValueError, match=message):
        done.export(tmp_path / "m.tflite", samples=samples.astype("float32"))


def test_the_report_and_the_file_agree_on_a_normalization_of_vectors(tmp_path):
    model = stack((8,), L.Dense(16, activation="relu"), L.BatchNormalization(name="norm"), L.Dense(3))
    randomize(model)
    done = pk.quantize(model, inputs_of(model, examples=16))
    found = done.export(tmp_path / "m.tflite")
    assert [one.name for one in done.report.left_float] == ["norm"]
    assert [one.partition(" ")[0] for one in found.left_float] == ["MUL", "ADD"]


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [(keras.Sequential([L.Dense(3)]), ValueError, "not built"), ("m.keras", TypeError, "Keras 3 model")],
    ids=["unbuilt", "a name"],
)
def test_what_is_no_built_model_is_refused(model, kind, message):
    with pytest.raises(kind, match=message):
        pk.quantize(model, np.ones((4, 8), "float32"))


def test_of_many_merged_tensors_the_first_are_named():
    (note,) = quantizing._notes(1, 2, [TensorDifference(f"layer_{number}", None, 0.0) for number in range(20)])
    assert "layer_0, " in note and "layer_19" not in note and "12 more" in note
