"""Integer files of pk.quantize: exports that are refused or fail, and notes."""

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from integer_networks import made, stored_weights
from keras import layers as L

import prunekit as pk
from prunekit.delivery.integers import integer_writing
from prunekit.delivery.integers.integer_comparison import TensorDifference
from prunekit.delivery.integers.integer_report import IntegerExport, IntegerExportError

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


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
    model = randomize(stack((6,), L.Dense(4, name="only")))
    return model, inputs_of(model, examples=16)


# ---- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["m.h5", "m", "m.tflite.gz", "m.TFLITE", "m.KERAS"])
def test_another_ending_is_refused(small, name, tmp_path):
    done = pk.quantize(*small)
    with pytest.raises(ValueError, match='"NAME.tflite", or a Keras file, "NAME.keras". Received: .*' + name):
        done.export(tmp_path / name)
    assert not list(tmp_path.iterdir())


def test_a_folder_is_no_name_of_a_file(small, tmp_path):
    done, folder = pk.quantize(*small), tmp_path / "m.tflite"
    folder.mkdir()
    with pytest.raises(ValueError, match="is the name of a file. Received: the folder '.*m.tflite'"):
        done.export(folder)
    assert [*tmp_path.iterdir()] == [folder] and not list(folder.iterdir())


@pytest.mark.parametrize(
    "options, message",
    [
        (dict(integer_io=True), '`integer_io` lists "inputs", "outputs", or both, and "uint8". Received: True'),
        (dict(integer_io=None), '`integer_io` lists "inputs", "outputs", or both, and "uint8". Received: None'),
        (dict(integer_io=[["inputs"]]), "`integer_io` lists"),
        (dict(sparse="no"), "`sparse` is True or False. Received: 'no'"),
    ],
)
def test_options_of_other_types_are_refused(small, options, message, tmp_path):
    done = pk.quantize(*small)
    with pytest.raises(ValueError, match=message):
        done.export(tmp_path / "m.tflite", **options)
    assert not list(tmp_path.iterdir())


def test_an_export_without_any_data_is_compared_on_random_numbers(small, tmp_path):
    made = pk.quantize(small[0], activation_bits="float").export(tmp_path / "m.tflite")
    assert (tmp_path / "m.tflite").exists() and made.simulation.max_error < 1e-5


def test_an_export_without_data_of_an_open_length_is_refused(tmp_path):
    given = keras.Input((None, 4))
    done = pk.quantize(keras.Model(given, L.Dense(3)(given)), activation_bits="float")
    with pytest.raises(ValueError, match="Without data, files are compared on random numbers .* Pass data"):
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
    [("bist", "'bits'"), ("activation_range", "'activation_ranges'"), ("equalise", "'equalize'")],
)
def test_an_unknown_option_is_refused_with_a_hint(small, option, hint):
    before = [np.array(one) for one in small[0].weights]
    with pytest.raises(TypeError, match=rf"Unknown option. Received: '{option}'.*Did you mean {hint}\?"):
        pk.quantize(*small, **{option: 4})
    assert all(np.array_equal(one, other) for one, other in zip(small[0].weights, before, strict=True))


def test_missing_data_are_refused_and_nothing_changes(small):
    before = [np.array(one) for one in small[0].weights]
    with pytest.raises(ValueError, match="activation_bits=8 reads calibration data. Received: data=None"):
        pk.quantize(small[0])
    assert all(np.array_equal(one, other) for one, other in zip(small[0].weights, before, strict=True))


# ---- failures --------------------------------------------------------------------------------------------------------


def two_steps(*_):
    """Stands for the comparison of a file that computes something else."""
    return [TensorDifference("input", 0, 0.0), TensorDifference("only", 2, 0.5), TensorDifference("lost", None, 0.0)]


def broken(*_, **__):
    """Stands for a file that no interpreter loads."""
    from prunekit.delivery.litert.isolated_run import ScriptFailed

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
        patch.setattr(patched if "." in patched else f"{integer_writing.__name__}.{patched}", function)
        with pytest.raises(error, match=message):
            done.export(path)
    assert path.read_bytes() == b"former file" and list(tmp_path.iterdir()) == [path]
    assert isinstance(done.export(path), IntegerExport)
    assert path.read_bytes()[4:8] == b"TFL3" and list(tmp_path.iterdir()) == [path]


def test_outputs_that_are_far_from_the_simulation_are_refused(small, tmp_path, monkeypatch):
    done = pk.quantize(*small)
    answers = integer_writing._Export._answers
    monkeypatch.setattr(integer_writing._Export, "_answers", lambda *given: [-one for one in answers(*given)])
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
    monkeypatch.setattr(done.state.__class__, "check_unchanged", lambda self: None)
    with monkeypatch.context() as patch:
        patch.setattr(integer_writing.keras.backend, "backend", lambda: backend)
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
    assert [one.name for one in done.skipped] == ["norm"]
    (left,) = export.skipped
    assert left.name == "norm" and "RSQRT" in left.reason.split(", ")
    assert export.verdict().endswith("; 1 operation computes in floating point.")
    assert str(export).count("\n  in floating point: ") == 1
    assert {"FULLY_CONNECTED"} == set(stored_weights(tmp_path / "m.tflite"))


def test_merged_tensors_are_noted_and_not_counted():
    export = IntegerExport("m.tflite", 10, 9, 40, (), tuple(two_steps()[::2]), None, None)
    assert export.largest_difference == 0
    assert "lost" in integer_writing._notes(10, 40, two_steps())[0]


def test_other_samples_are_compared_without_the_float_model(eight, tmp_path):
    done, _, inputs = eight
    export = done.export(tmp_path / "m.tflite", data=inputs[:3])
    assert export.float_model is None and export.simulation.max_error < 0.02


def test_quantizing_returns_the_same_model_that_keras_loads_alone(small, tmp_path):
    model, inputs = small
    done = pk.quantize(model, inputs, bits=4)
    assert done.model is model
    model.save(tmp_path / "m.keras")
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_array_equal(loaded.predict(inputs, verbose=0), model.predict(inputs, verbose=0))


@pytest.mark.parametrize("bits", [8, 4])
def test_an_excluded_layer_between_two_others_computes_in_floating_point(bits, tmp_path):
    dense = [L.Dense(32, activation="relu", name=name) for name in "ab"]
    model = randomize(stack((16,), *dense, L.Dense(3, name="c")))
    done = pk.quantize(model, inputs_of(model, examples=16), exclude="b", bits=bits)
    found = done.export(tmp_path / "m.tflite")
    assert [one.name for one in done.skipped] == ["b"]
    assert [(one.name, one.reason) for one in found.skipped] == [("b", "FULLY_CONNECTED")]


def test_a_tensor_that_is_zero_on_the_data_keeps_the_bias_of_the_layer_behind(tmp_path):
    model = randomize(stack((6,), L.Dense(5, activation="relu"), L.Dense(3)))
    with pytest.warns(UserWarning, match="all values are the same"):
        done = pk.quantize(model, np.zeros((8, 6), "float32"), bits=4)
    assert done.export(tmp_path / "m.tflite").largest_difference <= 1


def test_tensors_that_the_converter_shuffles_are_noted(tmp_path):
    model, inputs = made("shuffle", examples=8)
    found = pk.quantize(model, inputs).export(tmp_path / "m.tflite")
    assert found.largest_difference <= 1
    assert any("second_relu" in note for note in found.notes)


def test_weights_in_half_precision_lie_on_their_grids(tmp_path):
    model = randomize(stack((16,), L.Dense(8, dtype="float16", activation="relu"), L.Dense(3, dtype="float16")))
    done = pk.quantize(model, inputs_of(model, examples=16))
    done.state.check_unchanged()
    for weight in done.state.placement.weights():
        grid, values = done.state.weights[id(weight.variable)], np.array(weight.variable, "float32")
        assert np.allclose(grid.nearest(values), values, rtol=2**-11, atol=1e-3 * float(grid.scale.min()))
    with pytest.raises(IntegerExportError, match="in float32. Received: the layer 'dense.*' with weights in float16"):
        done.export(tmp_path / "m.tflite")


def test_the_precision_of_a_container_is_not_that_of_its_weights(tmp_path):
    keras.config.set_dtype_policy("float16")
    try:
        model = stack((16,), L.Dense(8, dtype="float32", activation="relu"), L.Dense(3, dtype="float32"))
    finally:
        keras.config.set_dtype_policy("float32")
    randomize(model)
    assert model.variable_dtype == "float16" and {one.dtype for one in model.weights} == {"float32"}
    found = pk.quantize(model, inputs_of(model, examples=16)).export(tmp_path / "m.tflite")
    assert found.largest_difference <= 1 and (tmp_path / "m.tflite").is_file()


def test_an_interruption_in_the_report_leaves_the_model_as_it_was(monkeypatch):
    from prunekit.techniques.quantize import preparation

    model = stack((6,), L.Dense(4, name="a"))
    before = np.array(model.get_layer("a").kernel)

    def interrupted(*arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(preparation, "report_of", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pk.quantize(model, np.ones((8, 6), "float32"), bits=4)
    np.testing.assert_array_equal(np.array(model.get_layer("a").kernel), before)


@pytest.mark.parametrize("size", [1e-12, 1.0, 10.0])
def test_a_relu6_behind_results_of_any_size_is_exact(size, tmp_path):
    model = randomize(stack((8, 8, 3), L.Conv2D(4, 3, name="conv"), L.ReLU(6.0), L.GlobalAveragePooling2D()))
    conv = model.get_layer("conv")
    for variable in (conv.kernel, conv.bias):
        variable.assign(np.array(variable) * size)
    found = pk.quantize(model, inputs_of(model, examples=16)).export(tmp_path / "m.tflite")
    assert found.largest_difference <= 1 and not found.skipped


@pytest.mark.parametrize("seed", range(4))
def test_outputs_of_few_steps_may_be_a_step_apart(seed, tmp_path):
    keras.utils.set_random_seed(seed)
    hidden = [L.Dense(64, activation="relu") for _ in range(3)]
    model = stack((32,), *hidden, L.Dense(10, activation="softmax", name="head"))
    kernel = model.get_layer("head").kernel
    kernel.assign(np.array(kernel) * 0.03)
    inputs = np.random.default_rng(seed).normal(size=(64, 32)).astype("float32")
    assert pk.quantize(model, inputs, bits=4).export(tmp_path / "m.tflite").largest_difference <= 1


@pytest.mark.parametrize(
    ("samples", "message"), [(np.full((4, 16), np.nan), "NaN or infin"), (np.ones((4, 15)), r"shape.*\(4, 15\)")]
)
def test_samples_that_do_not_fit_are_refused(samples, message, tmp_path):
    model = stack((16,), L.Dense(8))
    done = pk.quantize(model, inputs_of(model, examples=8))
    with pytest.raises(ValueError, match=message):
        done.export(tmp_path / "m.tflite", data=samples.astype("float32"))


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [(keras.Sequential([L.Dense(3)]), ValueError, "not built"), ("m.keras", TypeError, "Keras 3 model")],
    ids=["unbuilt", "a name"],
)
def test_what_is_no_built_model_is_refused(model, kind, message):
    with pytest.raises(kind, match=message):
        pk.quantize(model, np.ones((4, 8), "float32"))


def test_of_many_merged_tensors_the_first_are_named():
    (note,) = integer_writing._notes(1, 2, [TensorDifference(f"layer_{number}", None, 0.0) for number in range(20)])
    assert "layer_0, " in note and "layer_19" not in note and "12 more" in note
