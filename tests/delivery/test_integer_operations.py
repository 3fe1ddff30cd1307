"""Every operation with an integer kernel, in a file between two layers; what has none is named by report and file."""

import re

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from architectures import randomize
from keras import layers as L, ops

import prunekit as pk
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
IMAGES, SEQUENCES, VECTORS = (8, 8, 4), (10, 4), (8,)
CHANNELS = np.linspace(-1, 1, 4, dtype="float32")


def normalized(y):
    """Returns the entries along the last axis, less their mean, divided by their deviation: a layer normalization."""
    deviation = y - ops.mean(y, axis=-1, keepdims=True)
    return deviation * ops.rsqrt(ops.mean(ops.square(deviation), axis=-1, keepdims=True) + 1e-3)


# Name -> (function of the output of a layer, kinds of its operations in the file without moves, shape).
INTEGERS = {
    "abs": (ops.abs, "ABS"),
    "negative": (ops.negative, "MUL"),
    "square": (ops.square, "MUL"),
    "exp": (ops.exp, "EXP", VECTORS),
    "reciprocal square root": (lambda y: ops.rsqrt(ops.square(y) + 0.1), "MUL ADD RSQRT"),
    "normalization of entries": (normalized, "MEAN SUB MUL MEAN ADD RSQRT MUL", SEQUENCES),
    "sum of three": (lambda y: L.Add()([y, y * 0.5, ops.abs(y)]), "MUL ABS ADD ADD"),
    "product of three": (lambda y: L.Multiply()([y, y * 0.5, ops.abs(y)]), "MUL ABS MUL MUL"),
    "average of two": (lambda y: L.Average()([y, ops.abs(y)]), "ABS ADD MUL"),
    "average of three": (lambda y: L.Average()([y, y * 0.5, ops.abs(y)]), "MUL ABS ADD ADD MUL"),
    "hard sigmoid": (L.Activation("hard_sigmoid"), "ADD MUL"),
    "hard sigmoid in a layer": (L.Dense(5, activation="hard_sigmoid"), "FULLY_CONNECTED ADD MUL", VECTORS),
    "hard sigmoid of MobileNetV3": (lambda y: L.ReLU(6.0)(y + 3.0) * (1 / 6), "ADD MUL"),
    "gate": (lambda y: L.Multiply()([L.Activation("hard_sigmoid")(y), y]), "ADD MUL MUL"),
    "divided by a number": (lambda y: y / 3, "MUL"),
    "divided by an array": (lambda y: y / (2 * CHANNELS + 3), "MUL"),
    "plus an array": (lambda y: y + CHANNELS, "ADD"),
    "minus a number": (lambda y: y - 0.5, "SUB"),
    "a number minus it": (lambda y: 1.0 - y, "SUB"),
    "times an array": (lambda y: y * CHANNELS, "MUL"),
    "clip to 6": (lambda y: ops.clip(y, 0, 6), ""),
    "clip to 1": (lambda y: ops.clip(y, -1.0, 1.0), "RELU_N1_TO_1"),
    "clip": (lambda y: ops.clip(y, -0.7, 1.3), "MINIMUM MAXIMUM"),
    "maximum with 0": (lambda y: ops.maximum(y, 0.0), "RELU"),
    "maximum with a number": (lambda y: ops.maximum(y, 0.5), "MAXIMUM"),
    "minimum with an array": (lambda y: ops.minimum(y, CHANNELS), "MINIMUM"),
    "where": (lambda y: ops.where(y > 0, y, -5.0), "GREATER SELECT_V2"),
    "padding with a number": (lambda y: ops.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), constant_values=1.0), "PADV2"),
    "reflection": (lambda y: ops.pad(y, ((0, 0), (1, 1), (1, 1), (0, 0)), mode="reflect"), "MIRROR_PAD"),
    "resize": (lambda y: ops.image.resize(y, (11, 13)), "RESIZE_BILINEAR"),
    "resize to the nearest": (lambda y: L.Resizing(11, 13, interpolation="nearest")(y), "RESIZE_NEAREST_NEIGHBOR"),
    "mean": (lambda y: ops.mean(y, axis=(1, 2), keepdims=True), "MEAN"),
    "rescaling": (L.Rescaling(1 / 2, offset=-1.0), "MUL ADD"),
    "normalization": (L.Normalization(mean=CHANNELS, variance=CHANNELS + 2), "DEPTHWISE_CONV_2D"),
    "normalization of all": (L.Normalization(axis=None, mean=0.3, variance=2.0), "DEPTHWISE_CONV_2D"),
    "inverse normalization": (L.Normalization(mean=CHANNELS, variance=CHANNELS + 2, invert=True), "DEPTHWISE_CONV_2D"),
    "batch normalization": (lambda y: L.BatchNormalization()(ops.abs(y)), "ABS DEPTHWISE_CONV_2D"),
    "of vectors": (lambda y: L.BatchNormalization()(ops.abs(y)), "ABS DEPTHWISE_CONV_2D", VECTORS),
    "of sequences": (lambda y: L.BatchNormalization()(ops.abs(y)), "ABS DEPTHWISE_CONV_2D", SEQUENCES),
    "of one channel": (lambda y: L.BatchNormalization()(ops.abs(y[..., :1])), "ABS DEPTHWISE_CONV_2D"),
    "convolution to one channel": (L.Conv1D(1, 3), "CONV_2D", SEQUENCES),
    "dilated convolution": (L.Conv1D(3, 3, dilation_rate=2), "CONV_2D", SEQUENCES),
    "depthwise convolution": (L.DepthwiseConv1D(3), "DEPTHWISE_CONV_2D", SEQUENCES),
}
MOVES = "RESHAPE EXPAND_DIMS STRIDED_SLICE SPACE_TO_BATCH_ND BATCH_TO_SPACE_ND DEQUANTIZE QUANTIZE".split()
# Name -> (function, names in report and file, shape).
FLOATS = {
    # The reference kernel adds codes without regard to their zero points.
    "sum": (lambda y: ops.sum(y, axis=-1, keepdims=True), ["sum"]),
    "divided by a tensor": (lambda y: y / (ops.abs(y) + 1.0), ["true_divide"]),
    "softplus": (L.Activation("softplus", name="act"), ["act"]),
    "normalization of rows": (L.BatchNormalization(axis=1, name="norm"), ["norm"]),
    "layer normalization": (L.LayerNormalization(name="norm"), ["norm"]),
    "average behind it": (
        lambda y: L.AveragePooling2D(2, name="pool")(L.LayerNormalization(name="norm")(y)),
        ["norm", "pool"],
    ),
    "reshape in floating point": (
        lambda y: L.Reshape((4, 10))(L.LSTM(4, return_sequences=True, name="lstm")(y)),
        ["lstm"],
        SEQUENCES,
    ),
}


def between(function, shape, *, head=True):
    """Returns a model with a function between two layers, and inputs."""
    keras.utils.set_random_seed(0)
    x = keras.Input(shape, name="x")
    y = function(L.Dense(shape[-1], name="stem")(x) if len(shape) == 1 else _convolution(shape)(x))
    model = randomize(keras.Model(x, L.Dense(3, name="head")(L.Flatten()(y)) if head else y))
    return model, np.random.default_rng(1).normal(size=(16, *shape)).astype("float32")


def _convolution(shape):
    kind = L.Conv2D if len(shape) == 3 else L.Conv1D
    return kind(shape[-1], 3, padding="same", name="stem")


def names(left):
    """Returns the names of layers that a file lists."""
    return sorted(_without_number(one.name) for one in left)


def _without_number(name):
    """Returns a name without the number that Keras gives to names that it makes."""
    return re.sub(r"_\d+$", "", name)


@pytest.mark.short(cases=8)
@pytest.mark.parametrize("name", INTEGERS)
def test_the_file_computes_with_integers_within_one_step_of_the_simulation(name, tmp_path):
    function, kinds, *shape = INTEGERS[name]
    model, inputs = between(function, *shape or [IMAGES])
    done = pk.quantize(model, inputs)
    made = done.export(tmp_path / "m.tflite")
    assert made.largest_difference <= 1
    assert made.skipped == done.skipped == ()
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    found = [graph.kind(one) for one in graph.operators]
    first, last = next(at for at, kind in enumerate(found) if kind in ("CONV_2D", "FULLY_CONNECTED")), len(found) - 1
    last -= found[::-1].index("FULLY_CONNECTED")
    lengths = "SHAPE PACK CONCATENATION GATHER REDUCE_PROD".split()
    assert sorted(kind for kind in found[first + 1 : last] if kind not in [*MOVES, *lengths]) == sorted(kinds.split())


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", FLOATS)
def test_report_and_file_name_the_same_layers_in_floating_point(name, tmp_path):
    function, expected, *shape = FLOATS[name]
    model, inputs = between(function, *shape or [IMAGES])
    done = pk.quantize(model, inputs)
    made = done.export(tmp_path / "m.tflite")
    assert names(made.skipped) == names(done.skipped) == sorted(expected)
    assert made.largest_difference <= 1


@pytest.mark.short(cases=4)
@pytest.mark.parametrize("name", [one for one, (_, kinds, *_) in INTEGERS.items() if " " not in kinds and kinds])
def test_kernels_of_both_kinds_round_what_the_layer_computes(name, tmp_path):
    """LiteRT's reference and optimized kernels, on the codes that they read, against Keras in floating point."""
    function, kind, *shape = INTEGERS[name]
    model, inputs = between(function, *shape or [IMAGES], head=False)
    pk.quantize(model, inputs).export(tmp_path / "m.tflite")
    tail = keras.Model(model.get_layer("stem").output, model.output)
    for resolver in (OpResolverType.BUILTIN_REF, OpResolverType.BUILTIN_WITHOUT_DEFAULT_DELEGATES):
        interpreter = Interpreter(
            str(tmp_path / "m.tflite"), experimental_op_resolver_type=resolver, experimental_preserve_all_tensors=True
        )
        interpreter.resize_tensor_input(interpreter.get_input_details()[0]["index"], inputs.shape)
        interpreter.allocate_tensors()
        interpreter.set_tensor(interpreter.get_input_details()[0]["index"], inputs)
        interpreter.invoke()
        calls = interpreter._get_ops_details()
        stem = next(one for one in calls if one["op_name"] in ("CONV_2D", "FULLY_CONNECTED"))
        (read, _), (found, step) = (
            _values(interpreter, stem["outputs"][0]),
            _values(interpreter, calls[-1]["inputs"][0]),
        )
        exact = tail.predict(read.reshape(inputs.shape), verbose=0)
        # Constants and kernels are rounded, too.
        low, high = found.min() - step, found.max() + step
        assert np.abs(found - np.clip(exact, low, high)).max() <= 2 * step


def _values(interpreter, index):
    """Returns the values of a tensor of integers, and the distance of neighbouring ones."""
    scale, zero = interpreter._get_tensor_details(index, 0)["quantization"]
    return (interpreter.get_tensor(index).astype("float32") - zero) * np.float32(scale), scale


def test_two_equal_relus_whose_results_lie_on_two_grids_are_both_integers(tmp_path):
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(4, 3, name="stem")(x)
    # The converter merges the ReLUs; one shares a grid with a larger tensor, the other has one of its own.
    wide = L.Concatenate()([L.ReLU(name="one")(y), L.Conv2D(2, 3, name="large")(x)])
    model = keras.Model(x, [L.Conv2D(2, 1, name="a")(wide), L.Conv2D(2, 1, name="b")(L.ReLU(name="two")(y)), y])
    randomize(model)
    large = model.get_layer("large").kernel
    large.assign(np.array(large) * 20)
    inputs = np.random.default_rng(1).normal(size=(16, 8, 8, 3)).astype("float32")
    done = pk.quantize(model, inputs)
    made = done.export(tmp_path / "m.tflite")
    assert made.skipped == done.skipped == () and made.largest_difference <= 1
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    assert [graph.kind(one) for one in graph.operators].count("RELU") == 2
    assert not any("_of_prunekit/" in graph.name(int(one.outputs[0])) for one in graph.operators)


# ---- tables ----------------------------------------------------------------------------------------------------------


def reading(function, **options):
    """Returns a model of tokens with a table, and tokens."""
    keras.utils.set_random_seed(0)
    x = keras.Input((12,), dtype="int32", name="tokens")
    model = keras.Model(x, L.Dense(3, name="head")(function(L.Embedding(300, 16, name="table", **options)(x))))
    randomize(model)
    return model, np.random.default_rng(0).integers(0, 300, (64, 12)).astype("int32")


def pooled(rows):
    return L.GlobalAveragePooling1D(name="pool")(rows)


def stored_tables(path):
    """Returns the types of the tables that a file reads rows from."""
    graph = LiteRTGraph(path.read_bytes())
    found = [graph.tensor(int(one.inputs[0])).type for one in graph.operators if graph.kind(one) == "GATHER"]
    types = {value: name for name, value in vars(graph._schema.TensorType).items() if isinstance(value, int)}
    return [types[one] for one in found]


@pytest.mark.parametrize("name", ["pooled", "dropped", "flat"])
def test_a_table_that_layers_read_as_integers_is_stored_on_their_grid(name, tmp_path):
    function = {
        "pooled": pooled,
        "dropped": lambda y: pooled(L.Conv1D(4, 3)(L.SpatialDropout1D(0.2)(y))),
        "flat": L.Flatten(),
    }[name]
    done = pk.quantize(*reading(function))
    made = done.export(tmp_path / "m.tflite")
    assert made.skipped == done.skipped == () and made.largest_difference <= 1
    assert stored_tables(tmp_path / "m.tflite") == ["INT8"]
    # The rows are those of the table on the grid on which they are read.
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    (call,) = [one for one in graph.operators if graph.kind(one) == "GATHER"]
    table, rows = graph.tensor(int(call.inputs[0])), graph.tensor(int(call.outputs[0]))
    assert len(table.quantization.scale) == 1 and table.quantization.scale == rows.quantization.scale
    codes = np.asarray(graph._model.buffers[table.buffer].data, "uint8").view("int8").reshape(300, 16)
    scale, zero = table.quantization.scale[0], table.quantization.zeroPoint[0]
    expected = np.array(done.model.get_layer("table").embeddings) / scale + zero
    assert np.abs(codes - np.clip(expected, -128, 127)).max() <= 0.51


@pytest.mark.parametrize(
    ("function", "options", "left"),
    [
        (lambda y: pooled(L.LayerNormalization(name="norm")(y)), {}, ["norm", "table"]),
        (lambda y: pooled(L.Add()([L.LayerNormalization(name="norm")(y), y])), {}, ["norm", "table"]),
        (pooled, {"mask_zero": True}, ["pool", "table"]),
    ],
    ids=["floats", "both", "mask"],
)
def test_a_table_that_another_layer_reads_as_floats_keeps_a_scale_for_each_row(function, options, left, tmp_path):
    done = pk.quantize(*reading(function, **options))
    made = done.export(tmp_path / "m.tflite")
    assert names(made.skipped) == names(done.skipped) == left
    assert stored_tables(tmp_path / "m.tflite") == ["FLOAT32"]


@pytest.mark.parametrize("options", [{"bits": 4}, {"activation_bits": 16}], ids=str)
def test_a_table_with_smaller_codes_than_the_grid_of_its_readers_keeps_them(options, tmp_path):
    done = pk.quantize(*reading(pooled), **options)
    made = done.export(tmp_path / "m.tflite")
    assert names(made.skipped) == names(done.skipped) == ["table"]
    bits = options.get("bits", 8)
    assert done.skipped[0].reason == f"its table has codes of {bits} bits, and a scale for each row"
