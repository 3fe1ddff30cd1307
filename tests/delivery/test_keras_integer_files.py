"""Keras files of pk.quantize: Keras's own int8 layers with the codes and scales of the quantization, and refusals."""

import json
import zipfile

import keras
import numpy as np
import pytest
from keras import layers as L
from networks import sequential
from without_prunekit import outputs_in_folder

import prunekit as pk
from prunekit.anatomy.records.reports import Skipped
from prunekit.delivery.integers import keras_integers
from prunekit.delivery.integers.integer_report import IntegerExportError

pytestmark = [
    pytest.mark.every_backend,
    pytest.mark.filterwarnings("ignore:.*does not have a `quantize` method:UserWarning"),
]
TOKENS = 21


@keras.saving.register_keras_serializable("keras-integer-files")
class OwnDense(L.Dense):
    """A subclass, which Keras does not quantize."""


class Unregistered(L.Layer):
    """A layer without weights that a file cannot name."""

    def call(self, x):
        return 2.0 * x


class Subclassed(keras.Model):
    """A model without a graph and without a config."""

    def __init__(self):
        super().__init__()
        self.one, self.two = L.Dense(8, activation="relu", name="one"), L.Dense(3, name="two")

    def call(self, x):
        return self.two(self.one(x)) + self.two(self.one(2.0 * x))


def numbers(*shape):
    return np.random.default_rng(0).normal(size=shape).astype("float32")


def tokens():
    return np.random.default_rng(0).integers(1, TOKENS, (16, 6)).astype("int32")


def values(tensor):
    return np.array(keras.ops.convert_to_numpy(tensor))


def outputs(model, inputs):
    return values(model(keras.ops.convert_to_tensor(inputs)))


def transformer(mask_zero=False):
    """Returns a model of attention, a nested model, and a layer that is called twice."""
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32", name="tokens")
    y = L.Embedding(TOKENS, 16, mask_zero=mask_zero, name="table")(x)
    y = L.MultiHeadAttention(2, 8, name="attention")(y, y)
    y = L.EinsumDense("abc,cde->adbe", (2, None, 5), bias_axes="de", name="heads")(y)
    y = L.Flatten(name="flat")(y)
    nested = keras.Sequential([keras.Input((60,)), L.Dense(12, activation="relu", name="inner")], name="nested")
    shared = L.Dense(12, activation="tanh", name="shared")
    return keras.Model(x, L.Dense(3, name="out")(shared(shared(nested(y)))))


def dense(*layers, inputs=24, dtype=None):
    keras.utils.set_random_seed(0)
    return keras.Sequential([keras.Input((inputs,), dtype=dtype), *layers], name="net")


def reversible(**options):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32")
    table = L.ReversibleEmbedding(TOKENS, 10, name="table", **options)
    return keras.Model(x, table(table(x), reverse=True))


def assert_computes_the_same(path, model, inputs):
    found = outputs(keras.models.load_model(path), inputs)
    np.testing.assert_allclose(found, outputs(model, inputs), rtol=1e-4, atol=1e-5)


def int8_layers(path):
    """Returns {name: layer} of the int8 layers in a file."""
    model = keras.models.load_model(path, compile=False)
    return {layer.name: layer for layer in model._flatten_layers() if layer.quantization_mode == "int8"}


def dequantized(layer, attribute):
    """Returns (codes, codes / scale) of a weight, in float32 as Keras divides."""
    codes, scale = values(getattr(layer, f"_{attribute}")), values(getattr(layer, f"{attribute}_scale"))
    if isinstance(layer, L.Embedding):
        scale = scale[:, None]
    if isinstance(layer, L.EinsumDense):
        # Of one length for each axis of the outputs; the kernels here have their output axes last, in that order.
        scale = scale.reshape(
            (1,) * (codes.ndim - np.count_nonzero(np.array(scale.shape) > 1))
            + tuple(length for length in scale.shape if length > 1)
        )
    return codes, codes.astype("float32") / scale


# ---- files -----------------------------------------------------------------------------------------------------------


def test_a_file_has_int8_layers_for_weights_alone_and_loads_without_prunekit(tmp_path):
    model, inputs = transformer(), tokens()
    done = pk.quantize(model, activation_bits="float")
    before = [values(one) for one in model.variables]
    exported = done.export(tmp_path / "model.keras", data=inputs)
    attention = [f"attention_{name}" for name in ("query", "key", "value", "attention_output")]
    names = {"table", *attention, "heads", "inner", "shared", "out"}
    found = int8_layers(tmp_path / "model.keras")
    assert set(exported.int8_layers) == set(found) == names and exported.skipped == ()
    assert all(getattr(layer, "inputs_quantizer", None) is None for layer in found.values())
    assert "inside them, whose int8 settings Keras would not save: attention." in "".join(exported.notes)

    loaded = outputs_in_folder(inputs, tmp_path)
    with done.simulating():
        expected = outputs(model, inputs)
    np.testing.assert_allclose(loaded, expected, rtol=1e-4, atol=2e-6)
    assert exported.simulation.max_error < 1e-5 and exported.tensors == ()
    assert all(np.array_equal(one, values(other)) for one, other in zip(before, model.variables, strict=True))
    assert not any(layer.quantization_mode for layer in model._flatten_layers())
    assert {path.name for path in tmp_path.iterdir()} == {"model.keras", "inputs.npy", "found.npy"}


@pytest.mark.parametrize("bits", [8, 5, 4, 2])
def test_codes_and_scales_are_those_of_the_quantization(bits, tmp_path):
    model, inputs = transformer(), tokens()
    for name in ("shared", "out"):
        kernel = model.get_layer(name).kernel
        value = values(kernel)
        value[np.abs(value) < 0.2] = 0.0
        value[:, 1] = 0.0
        kernel.assign(value)
    done = pk.quantize(model, activation_bits="float", bits=bits)
    exported = done.export(tmp_path / "m.keras", data=inputs)
    found = int8_layers(tmp_path / "m.keras")
    attention = {f"attention_{layer.name}": layer for layer in model.get_layer("attention")._flatten_layers()}
    kept = {**attention, **{layer.name: layer for layer in model._flatten_layers()}}
    assert len(found) == 9
    for name, layer in found.items():
        attribute = "embeddings" if name == "table" else "kernel"
        expected, (codes, got) = values(getattr(kept[name], attribute)), dequantized(layer, attribute)
        assert codes.dtype == "int8" and np.abs(codes.astype(int)).max() <= 2 ** (bits - 1) - 1
        assert ((codes == 0) == (expected == 0.0)).all()
        # One rounding of the scale and one of the quotient, each by half a unit in the last place.
        assert (np.abs(got - expected) <= 2 * np.spacing(np.abs(expected))).all()
    assert any("takes 8 bits in the file" in note for note in exported.notes) == (bits < 8)


@pytest.mark.every_backend(cases=0)
@pytest.mark.short(cases=1)
@pytest.mark.parametrize("bits", [4, 3])
def test_groups_of_at_most_4_bits_are_int4_layers_with_exactly_the_weights(bits, tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((6,), dtype="int32", name="tokens")
    y = L.Embedding(TOKENS, 40, name="table")(x)
    y = L.MultiHeadAttention(3, 11, output_shape=20, name="attention")(y, y)
    # 20 inputs, of which each group has a scale, and the last a shorter one; and 15 inputs, with one scale.
    y = L.EinsumDense("abc,cde->abde", (6, 3, 5), bias_axes="de", name="heads")(y)
    y = L.EinsumDense("abde,dec->abc", (6, 7), name="whole")(y)
    model, inputs = keras.Model(x, L.Dense(3, name="out")(L.Flatten()(y))), tokens()
    value = values(model.get_layer("heads").kernel)
    value[np.abs(value) < 0.05] = 0.0
    model.get_layer("heads").kernel.assign(value)
    done = pk.quantize(model, activation_bits="float", bits=bits, group_size=16)
    exported = done.export(tmp_path / "model.keras", data=inputs)
    attention = [f"attention_{name}" for name in ("query", "key", "value", "attention_output")]
    assert set(exported.int4_layers) == {"table", *attention, "heads", "out"}
    assert exported.int8_layers == ("whole",) and exported.skipped == ()
    assert "7 layers have int4 weights" in exported.verdict() and "1 layer has int8 weights" in exported.verdict()
    loaded = keras.models.load_model(tmp_path / "model.keras")
    for name, kernel in (("heads", model.get_layer("heads").kernel), ("out", model.get_layer("out").kernel)):
        layer, grid = loaded.get_layer(name), done.state.weights[id(kernel)]
        assert layer.dtype_policy.name == "int4/16_from_float32"
        codes = values(keras.quantizers.unpack_int4(layer._kernel, int(np.prod(kernel.shape[1:])), axis=-1))
        scale, zero = values(layer.kernel_scale), values(layer.kernel_zero)
        found = (codes - zero[np.arange(len(codes)) // 16]).astype("float32") * scale[np.arange(len(codes)) // 16]
        np.testing.assert_array_equal(found.reshape(kernel.shape), values(kernel))
        assert not zero.any() and scale.size == grid.scale.size
    with done.simulating():
        expected = outputs(model, inputs)
    np.testing.assert_allclose(outputs_in_folder(inputs, tmp_path), expected, rtol=1e-4, atol=2e-6)


def test_groups_that_keras_does_not_have_stay_in_floating_point(tmp_path):
    model = sequential(
        (6, 20),
        L.Conv1D(4, 6, name="conv"),
        L.EinsumDense("abc,dc->abd", (1, 40), name="inputs_last"),
        L.Flatten(),
        L.Dense(3, name="out"),
    )
    inputs = numbers(8, 6, 20)
    bits = {"out": 4, "inputs_last": 4, "conv": 4}
    options = dict(activation_bits="float", group_size=16)
    value = values(model.get_layer("inputs_last").kernel)
    assert value.shape == (40, 4)
    exported = pk.quantize(model, inputs, bits=bits, **options).export(tmp_path / "model.keras")
    assert exported.int4_layers == ("out",) and exported.int8_layers == ("inputs_last",)
    assert exported.skipped == (Skipped("conv/kernel", "Keras has no int8 form of Conv1D"),)
    assert_computes_the_same(tmp_path / "model.keras", model, inputs)

    keras.utils.set_random_seed(1)
    last = L.EinsumDense("abc,dc->abd", (6, 4), name="inputs_last")
    model = sequential((6, 40), last, L.Dense(20, name="few"), L.Dense(40, name="wide"), L.Dense(3))
    bits = {"inputs_last": 4, "few": 4, "wide": 8}
    exported = pk.quantize(model, numbers(8, 6, 40), bits=bits, **options).export(tmp_path / "model.keras")
    reason = "Keras has groups with at most 4 bits, in Dense, Embedding, and EinsumDense with its inputs first"
    assert {Skipped("inputs_last/kernel", reason), Skipped("wide/kernel", reason)} <= {*exported.skipped}


@pytest.mark.parametrize("activations", [8, 16])
def test_ranges_of_tensors_are_left_out_and_the_report_says_so(activations, tmp_path):
    model, inputs = dense(L.Dense(40, activation="relu"), L.Dense(5, name="out")), numbers(40, 24)
    done = pk.quantize(model, inputs, activation_bits=activations)
    exported = done.export(tmp_path / "model.keras")
    assert "tensors between layers stay in floating point" in exported.notes[0]
    assert_computes_the_same(tmp_path / "model.keras", model, inputs)
    assert 0.0 < exported.float_model.mean_error < 0.01


@pytest.mark.parametrize(("options", "weights"), [({}, 1), ({"tie_weights": False}, 2)])
def test_a_reversible_embedding_is_int8_in_both_directions(options, weights, tmp_path):
    model, inputs = reversible(**options), tokens()
    exported = pk.quantize(model, activation_bits="float").export(tmp_path / "model.keras", data=inputs)
    assert exported.int8_layers == ("table",)
    table = int8_layers(tmp_path / "model.keras")["table"]
    assert [one.dtype for one in table.weights].count("int8") == weights
    assert_computes_the_same(tmp_path / "model.keras", model, inputs)


def test_a_subclassed_model_becomes_one_of_layers(tmp_path):
    keras.utils.set_random_seed(0)
    model, inputs = Subclassed(), numbers(16, 24)
    model(inputs)
    exported = pk.quantize(model, inputs, activation_bits="float").export(tmp_path / "model.keras")
    assert exported.int8_layers == ("one", "two")
    assert "keras.Model of layers, without the methods of Subclassed" in exported.notes[0]
    assert_computes_the_same(tmp_path / "model.keras", model, inputs)


_NEEDS_64_BITS = pytest.mark.skipif(keras.backend.backend() == "jax", reason="JAX computes with 32 bits by default")


@pytest.mark.parametrize("policy", [pytest.param("float64", marks=_NEEDS_64_BITS), "bfloat16", "mixed_bfloat16"])
def test_other_types_are_kept(policy, tmp_path):
    layers = (L.Dense(40, activation="relu", dtype=policy, name="one"), L.Dense(5, dtype=policy, name="two"))
    inputs = numbers(16, 24).astype("float64" if policy == "float64" else "float32")
    model = dense(*layers, dtype=str(inputs.dtype))
    exported = pk.quantize(model, inputs, activation_bits="float").export(tmp_path / "m.keras")
    found = int8_layers(tmp_path / "m.keras")
    assert exported.int8_layers == ("one", "two")
    assert {layer.dtype_policy.name for layer in found.values()} == {f"int8_from_{policy}"}
    assert np.array_equal(values(found["one"]._kernel), np.round(127 * _relative(model.layers[0].kernel)))


def _relative(kernel):
    value = values(keras.ops.cast(kernel, "float32"))
    return value / np.abs(value).max(axis=0)


def test_a_compiled_and_trained_model_stays_so_and_its_optimizer_is_not_in_the_file(tmp_path):
    model, inputs = dense(L.Dense(8, name="one")), numbers(16, 24)
    model.compile("adam", "mse")
    model.fit(inputs, inputs[:, :8], verbose=0)
    optimizer, state = model.optimizer, [values(one) for one in model.optimizer.variables]
    calls = [len(layer._inbound_nodes) for layer in model.layers]
    pk.quantize(model, activation_bits="float").export(tmp_path / "m.keras", data=inputs)
    assert model.compiled and model.optimizer is optimizer
    assert all(np.array_equal(one, values(other)) for one, other in zip(state, optimizer.variables, strict=True))
    assert [len(layer._inbound_nodes) for layer in model.layers] == calls
    with zipfile.ZipFile(tmp_path / "m.keras") as archive:
        text = archive.read("config.json").decode()
    config = json.loads(text)
    assert "prunekit" not in text and not config.get("compile_config")
    (layer,) = [one for one in config["config"]["layers"] if one["class_name"] == "Dense"]
    settings = layer["config"]["quantization_config"]
    assert settings["class_name"] == "Int8QuantizationConfig"
    assert settings["config"] == {"weight_quantizer": None, "activation_quantizer": None}


def test_an_existing_file_is_replaced_and_a_folder_made(tmp_path):
    done, path = pk.quantize(dense(L.Dense(40, name="one")), activation_bits="float"), tmp_path / "new" / "m.keras"
    for _ in range(2):
        exported = done.export(path, data=numbers(4, 24))
        assert exported.bytes == path.stat().st_size and exported.path == str(path)
    assert [one.name for one in path.parent.iterdir()] == ["m.keras"]


# ---- the report ------------------------------------------------------------------------------------------------------


def test_the_report_tells_sizes_and_what_stays_in_floating_point(tmp_path):
    keras.utils.set_random_seed(0)
    x = keras.Input((4, 30))
    y = L.TimeDistributed(L.Dense(10, name="timed"), name="each")(x)
    y = L.LSTM(12, name="lstm")(y)
    model, inputs = keras.Model(x, OwnDense(3, name="own")(L.Dense(500, name="wide")(y))), numbers(16, 4, 30)
    exported = pk.quantize(model, inputs, activation_bits="float").export(tmp_path / "m.keras")
    left = {one.name: one.reason for one in exported.skipped}
    assert set(left) == {"each/timed/kernel", "lstm/kernel", "lstm/recurrent_kernel", "own/kernel"}
    assert left["own/kernel"] == "Keras has no int8 form of OwnDense" and left["lstm/kernel"].endswith("LSTMCell")
    assert left["each/timed/kernel"].startswith("it is inside of a layer that")
    assert exported.verdict().endswith("; 1 layer has int8 weights, 4 weights are in floating point.")
    assert json.loads(json.dumps(exported.to_dict()))["int8_layers"] == ["wide"]
    assert exported.sections()[0].rows[0][:2] == ("m.keras", exported.bytes)
    assert exported.gzip_bytes < exported.bytes < exported.float_bytes and exported.float_model.mean_error < 0.01


def test_a_large_file_has_a_quarter_of_the_bytes(tmp_path):
    model = dense(L.Dense(600, activation="relu"), L.Dense(400), inputs=600)
    exported = pk.quantize(model, activation_bits="float").export(tmp_path / "m.keras", data=numbers(4, 600))
    assert exported.bytes < 0.28 * exported.float_bytes == 0.28 * 4 * model.count_params()
    assert exported.notes == ()


def test_a_file_that_is_larger_than_in_float32_says_so(tmp_path):
    model, inputs = dense(L.Dense(1, name="one")), numbers(4, 24)
    model.save(tmp_path / "float.keras")
    exported = pk.quantize(model, activation_bits="float").export(tmp_path / "m.keras", data=inputs)
    assert exported.float_bytes == (tmp_path / "float.keras").stat().st_size < exported.bytes
    assert exported.notes[-1].startswith("The file is not smaller than the float32 file")


@pytest.mark.filterwarnings("ignore:Layer 'heads' .of type EinsumDense. was passed an input with a mask")
def test_attention_with_a_mask_stays_whole_and_in_floating_point(tmp_path):
    model, inputs = transformer(mask_zero=True), tokens()
    inputs[:, 4:] = 0
    exported = pk.quantize(model, activation_bits="float").export(tmp_path / "m.keras", data=inputs)
    loaded = keras.models.load_model(tmp_path / "m.keras")
    np.testing.assert_allclose(outputs(loaded, inputs), outputs(model, inputs), rtol=1e-4, atol=2e-6)
    assert exported.int8_layers == ("table", "heads", "inner", "shared", "out")
    assert [one.name for one in exported.skipped] == [
        f"attention/{name}/kernel" for name in ("query", "key", "value", "attention_output")
    ]
    assert isinstance(loaded.get_layer("attention"), L.MultiHeadAttention)


# ---- refusals --------------------------------------------------------------------------------------------------------


def _convolutions():
    return keras.Sequential([keras.Input((8, 8, 3)), L.Conv2D(4, 3, name="conv"), L.GlobalAveragePooling2D()])


@pytest.mark.parametrize(
    ("build", "shape", "reason"),
    [
        (_convolutions, (8, 8, 3), r"conv/kernel \(Keras has no int8 form of Conv2D\)"),
        (lambda: dense(OwnDense(3, name="own")), (24,), r"own/kernel \(Keras has no int8 form of OwnDense\)"),
        (lambda: dense(L.Dense(3, name="one", dtype="mixed_float16")), (24,), "no int8 form for float16"),
        (
            lambda: keras.Sequential([keras.Input((4, 6)), L.TimeDistributed(L.Dense(3, name="in"), name="each")]),
            (4, 6),
            r"each/in/kernel \(it is inside of a layer that does not compute or save it in int8\)",
        ),
    ],
    ids=["convolutions", "a subclass", "float16", "TimeDistributed"],
)
def test_a_model_without_an_int8_layer_is_refused_with_the_other_file(build, shape, reason, tmp_path):
    done = pk.quantize(build(), activation_bits="float")
    with pytest.raises(IntegerExportError, match=f'{reason}.*Write a LiteRT file, export."NAME.tflite"'):
        done.export(tmp_path / "m.keras", data=numbers(4, *shape))
    assert not list(tmp_path.iterdir())


def test_lora_is_refused_by_the_names_of_layers(tmp_path):
    model = dense(L.Dense(8, name="one"), L.Dense(3, name="two"))
    model.layers[0].enable_lora(2)
    done = pk.quantize(model, activation_bits="float")
    with pytest.raises(IntegerExportError, match="Received: LoRA in the layers one. Assign the sums"):
        done.export(tmp_path / "m.keras", data=numbers(4, 24))
    assert not list(tmp_path.iterdir())


def test_a_file_that_does_not_load_is_not_kept(tmp_path):
    done = pk.quantize(dense(Unregistered(), L.Dense(3, name="two")), activation_bits="float")
    path = tmp_path / "m.keras"
    path.write_bytes(b"former")
    with pytest.raises(IntegerExportError, match="not written: the file does not load in safe mode"):
        done.export(path, data=numbers(4, 24))
    assert path.read_bytes() == b"former" and len(list(tmp_path.iterdir())) == 1


def test_a_file_that_computes_something_else_is_not_kept(tmp_path, monkeypatch):
    done, right = (
        pk.quantize(dense(L.Dense(3, name="two")), activation_bits="float"),
        keras_integers._GivenCodes.__call__,
    )

    def wrong(self, x, to_numpy=True):
        codes, scale = right(self, x, to_numpy)
        return codes, 1.01 * scale

    monkeypatch.setattr(keras_integers._GivenCodes, "__call__", wrong)
    with pytest.raises(IntegerExportError, match="are those of the model. Received: a largest difference of 0.0"):
        done.export(tmp_path / "m.keras", data=numbers(4, 24))
    assert not list(tmp_path.iterdir())


def test_weights_that_changed_and_integer_inputs_are_refused(tmp_path):
    model, inputs = dense(L.Dense(8, name="one")), numbers(8, 24)
    done = pk.quantize(model, inputs)
    with pytest.raises(ValueError, match="as each Keras file is, has inputs and outputs in floating point"):
        done.export(tmp_path / "m.keras", integer_io="inputs")
    model.layers[0].kernel.assign(1.01 * values(model.layers[0].kernel))
    with pytest.raises(ValueError, match="Received: one/kernel with other values"):
        done.export(tmp_path / "m.keras")
    assert not list(tmp_path.iterdir())


def test_a_layer_with_the_kernel_of_another_one_is_named_since_the_file_holds_a_copy(tmp_path):
    first, tied, x = L.Dense(8, name="first"), L.Dense(8, name="tied", use_bias=False), keras.Input((8,))
    first.build((None, 8))
    tied._kernel, tied.bias, tied.built = first.kernel, None, True
    made = pk.quantize(keras.Model(x, tied(first(x))), activation_bits="float").export(
        tmp_path / "m.keras", data=numbers(16, 8)
    )
    assert made.int8_layers == ("first",)
    assert made.skipped == (Skipped("tied", "the file holds a copy of the weight that it shares with first"),)


# ---- models that Keras has quantized ---------------------------------------------------------------------------------

_WEIGHTS_ALONE = keras.quantizers.Int8QuantizationConfig(activation_quantizer=None)


@pytest.mark.parametrize("settings", ["int8", "int4", _WEIGHTS_ALONE], ids=["int8", "int4", "weights alone"])
def test_layers_that_keras_has_quantized_are_refused_by_name(settings, tmp_path):
    model, inputs = dense(L.Dense(8, name="one"), L.Dense(3, name="two")), numbers(8, 24)
    named = {"mode": settings} if isinstance(settings, str) else {"config": settings}
    model.layers[0].quantize(**named)
    mode = model.layers[0].quantization_mode
    for options in ({}, {"exclude": "one"}, {"activation_bits": "float"}):
        with pytest.raises(ValueError, match=rf"Keras has quantized already: one \({mode}\)\. Quantize the model as"):
            pk.quantize(model, inputs, **options)
    kept, refused = pk.export(model, tmp_path, inputs, ["keras", "litert"])
    assert (kept.status, refused.status) == ("ok", "refused")
    if keras.backend.backend() == "tensorflow":
        assert refused.note.startswith(f"Keras has quantized its layers one ({mode}). The converter fails on int8")
    assert [path.name for path in tmp_path.iterdir()] == ["model.keras"]
