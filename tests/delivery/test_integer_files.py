"""Integer files run by LiteRT against the simulation, tensor by tensor: no more than one step apart."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from architectures import ARCHITECTURES, inputs_of, randomize
from integer_files import differences, run
from keras import layers as L

import prunekit as pk
from prunekit.delivery.integers.integer_export import integer_file
from prunekit.delivery.litert.litert import input_specs
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.techniques.quantize.grids.grids import IntegerFormat
from prunekit.techniques.quantize.grids.ranges import MinMax
from prunekit.techniques.quantize.placement.placement import place
from prunekit.techniques.quantize.rounding.calibration import Formats, GridRounding, calibrated
from prunekit.techniques.quantize.rounding.simulation import simulating

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
# Every operation computes with integers.
WHOLE = (
    "mlp fashion_cnn fashion_cnn_channels_free conv1d transposed grouped resnet20 bottleneck mobilenetv2 separable "
    "densenet unet inception efficientnet_v2 squeeze_keepdims prelu einsum split slices nested multi_output "
    "residual_mlp broadcast max_over_channels softmax_hidden subclassed_block subclassed_model"
).split()
# Normalization by the values themselves, recurrent layers and products of attention compute in floating point.
PARTLY = (
    "layer_norm_mlp rms_norm group_norm transformer_encoder rms_decoder two_towers tied lstm_stack gru_stack "
    "simple_rnn bidirectional conv_lstm time_distributed permute"
).split()
# Roundings that the converter merges with others of the same tensor and grid.
MERGED = {"transformer_encoder": 4, "rms_decoder": 6, "two_towers": 2, "tied": 1}


def made(model, inputs, folder, bits=8):
    """Returns (file, placement, formats, grids) of a model, with grids from the inputs."""
    placement, formats = place(model), Formats(IntegerFormat(bits))
    grids = calibrated(model, placement, [inputs], formats.activations, MinMax())
    specs = input_specs(model, inputs)
    file = integer_file(placement, grids, formats, structure=inputs, specs=specs, folder=folder)
    return file, placement, formats, grids


def architecture(name):
    """Returns a model with random weights, and inputs."""
    keras.utils.set_random_seed(0)
    model = randomize(ARCHITECTURES[name]())
    return model, inputs_of(model, examples=8)


def first_of(inputs):
    """Returns the first example."""
    return keras.tree.map_structure(lambda one: one[:1], inputs)


@pytest.mark.short(cases=6)
@pytest.mark.parametrize("name", [*WHOLE, *PARTLY])
def test_no_tensor_is_more_than_one_step_from_the_simulation(name, tmp_path):
    model, inputs = architecture(name)
    file, placement, formats, grids = made(model, inputs, tmp_path)
    assert bool(file.skipped) is (name in PARTLY)
    # The report names what the file computes in floating point.
    assert {one.name for one in file.skipped} == {one.name for one in placement.skipped}
    found = differences(file, placement, formats, grids, first_of(inputs))
    assert [one for one in found if (one.largest or 0) > 1] == []
    assert sum(one.largest is None for one in found) == MERGED.get(name, 0)
    assert np.mean([one.share for one in found]) < 0.12


def test_results_that_are_small_next_to_their_sums_may_be_off_by_the_rounding_of_their_biases(tmp_path):
    # Both inputs are equal and their weights opposite: the results are the biases, in a fifth of the bias' own steps.
    model = keras.Sequential([keras.Input((2,)), L.Dense(32)])
    draw = np.random.default_rng(0)
    weights = draw.uniform(0.5, 1, 32)
    model.set_weights([np.stack([weights, -weights]), draw.uniform(-0.0015, 0.0015, 32)])
    inputs = np.repeat(draw.uniform(-1, 1, (16, 1)), 2, axis=1).astype("float32")
    file, placement, formats, grids = made(model, inputs, tmp_path)
    assert file.roundings[-1].steps == 3
    found = differences(file, placement, formats, grids, first_of(inputs))[-1]
    assert found.largest == 2
    assert pk.quantize(model, inputs).export(tmp_path / "model.tflite").largest_difference == 2


@pytest.mark.short(cases=2)
@pytest.mark.parametrize("name", ["shuffle", "efficientnet_v2", "transformer_encoder", "resnet20", "mobilenetv2"])
def test_outputs_of_several_examples_are_near_those_of_the_simulation(name, tmp_path):
    model, inputs = architecture(name)
    file, placement, formats, grids = made(model, inputs, tmp_path)
    _, (found,) = run(file, model, inputs)
    with simulating(placement, GridRounding(formats, grids)):
        expected = model.predict(inputs, verbose=0)
    assert found.shape == expected.shape
    # Differences of a step add up from layer to layer, to as much as the errors of rounding.
    exact = model.predict(inputs, verbose=0)
    assert np.linalg.norm(found - exact) < 1.5 * np.linalg.norm(expected - exact)


NORM = "norm: MEAN, NEG, SQUARED_DIFFERENCE, ADD, RSQRT, MUL"
# Layers after a Dense layer -> what stays in floating point.
ENDS = {
    "alone": ([], (NORM,)),
    "moved": ([L.Flatten], (NORM,)),
    "read by another": ([lambda: L.Activation(keras.ops.sin, name="sine")], (NORM, "sine: SIN")),
}


@pytest.mark.parametrize("end", ENDS)
def test_operations_that_compute_outputs_are_those_of_their_layer(end, tmp_path):
    makers, expected = ENDS[end]
    x = keras.Input((6, 4))
    y = L.LayerNormalization(name="norm")(L.Dense(4)(x))
    for make in makers:
        y = make()(y)
    model = keras.Model(x, y)
    file, *_ = made(model, inputs_of(model, examples=8), tmp_path)
    assert tuple(f"{one.name}: {one.reason}" for one in file.skipped) == expected


def test_operations_that_compute_several_outputs_are_those_of_their_layers(tmp_path):
    x = keras.Input((6, 4))
    y = L.Dense(4)(x)
    norm, inner = L.LayerNormalization(name="norm")(y), keras.Input((6, 4))
    nested = keras.Model(inner, keras.ops.cos(inner), name="nested")
    model = keras.Model(x, {"b": keras.ops.sin(norm), "a": nested(y), "c": norm})
    file, *_ = made(model, inputs_of(model, examples=8), tmp_path)
    assert sorted(one.reason for one in file.skipped) == ["COS", NORM.partition(": ")[2], "SIN"]


@pytest.mark.parametrize("bits", [8, 4])
def test_zeros_of_a_pruned_kernel_are_zeros_in_the_file(bits, tmp_path):
    x = keras.Input((8, 8, 3), name="x")
    conv, dense = L.Conv2D(4, 3, name="conv"), L.Dense(5, name="dense")
    model = randomize(keras.Model(x, dense(L.Flatten()(L.BatchNormalization()(conv(x))))))
    for layer in (conv, dense):
        kernel = np.array(layer.kernel)
        kernel[np.random.default_rng(0).random(kernel.shape) < 0.7] = 0.0
        layer.kernel.assign(kernel)
    file, *_ = made(model, inputs_of(model, examples=8), tmp_path, bits=bits)
    interpreter, _ = run(file, model, inputs_of(model, examples=1))
    calls = {one["op_name"]: one for one in interpreter._get_ops_details()}
    for kind, layer, order in (("CONV_2D", conv, (3, 0, 1, 2)), ("FULLY_CONNECTED", dense, (1, 0))):
        codes = interpreter.get_tensor(calls[kind]["inputs"][1])
        assert codes.dtype == np.int8
        assert (codes[np.array(layer.kernel).transpose(order) == 0.0] == 0).all()
        assert np.abs(codes).max() == 2 ** (bits - 1) - 1


def test_a_channel_without_weights_keeps_its_bias(tmp_path):
    x = keras.Input((6,), name="x")
    dense = L.Dense(3, name="dense")
    model = keras.Model(x, dense(x))
    kernel = np.random.default_rng(0).normal(size=(6, 3)).astype("float32")
    kernel[:, 1] = 0.0
    dense.kernel.assign(kernel)
    dense.bias.assign([0.1, 0.7, -0.2])
    inputs = np.random.default_rng(1).normal(size=(16, 6)).astype("float32")
    file, _, _, grids = made(model, inputs, tmp_path)
    _, (found,) = run(file, model, inputs)
    step = max(float(grid.scale) for grid in grids.values())
    assert np.abs(found[:, 1] - 0.7).max() <= 0.5 * step + 1e-6


def test_names_of_inputs_and_outputs_stay(tmp_path):
    model, inputs = architecture("multi_output")
    file, *_ = made(model, inputs, tmp_path)
    interpreter, outputs = run(file, model, first_of(inputs))
    runner = interpreter.get_signature_runner()
    assert sorted(runner.get_output_details()) == sorted(model.output_names)
    assert len(outputs) == len(model.outputs)


@pytest.mark.parametrize("form", [IntegerFormat(8), IntegerFormat(4, symmetric=False)], ids=str)
def test_other_codes_of_activations_are_refused(form, tmp_path):
    x = keras.Input((3,), name="x")
    placement, inputs = place(keras.Model(x, L.Dense(2)(x))), np.ones((2, 3), "float32")
    specs = input_specs(placement.graphs.main.model, inputs)
    with pytest.raises(ValueError, match="activations of 8 bits with a zero point, of 16 bits without"):
        formats = Formats(IntegerFormat(8), form)
        integer_file(placement, {}, formats, structure=inputs, specs=specs, folder=tmp_path)


@keras.saving.register_keras_serializable("tests")
class Whole(L.Layer):
    """A layer with weights of its own, which the simulation does not open."""

    def __init__(self, function, **options):
        super().__init__(**options)
        self._function = function

    def build(self, shape):
        self.shift = self.add_weight(shape=(1,), initializer="zeros")

    def call(self, x):
        return self._function(x) + self.shift * 0.0


@pytest.mark.parametrize("name", ["sigmoid", "softmax", "tanh", "avg_pool2d"])
def test_a_kernel_inside_a_layer_that_stays_whole_gets_the_grid_that_it_needs(name, tmp_path):
    functions = {
        "sigmoid": tf.sigmoid,
        "softmax": tf.nn.softmax,
        "tanh": tf.tanh,
        "avg_pool2d": lambda x: tf.nn.avg_pool2d(x, 2, 2, "VALID"),
    }
    x = keras.Input((6, 6, 3), name="x")
    y = Whole(functions[name])(L.Conv2D(4, 3, name="conv")(x))
    model = randomize(keras.Model(x, L.Conv2D(2, 1, name="head")(y)))
    inputs = inputs_of(model, examples=8)
    file, placement, formats, grids = made(model, inputs, tmp_path)
    _, (found,) = run(file, model, inputs)
    with simulating(placement, GridRounding(formats, grids)):
        expected = model.predict(inputs, verbose=0)
    exact = model.predict(inputs, verbose=0)
    step = max(float(grid.scale) for place, grid in grids.items() if place.name == "head")
    assert np.abs(found - expected).max() < max(3 * step, 2 * np.abs(expected - exact).max())


def test_operations_have_the_versions_of_their_integer_kernels(tmp_path):
    model, inputs = architecture("efficientnet_v2")
    file, *_ = made(model, inputs, tmp_path)
    graph = LiteRTGraph(file.content)
    versions = {graph.kind(one): graph.version(one) for one in graph.operators}
    assert versions["CONV_2D"] >= 3 and versions["DEPTHWISE_CONV_2D"] >= 3 and versions["FULLY_CONNECTED"] >= 4
    assert versions["ADD"] >= 2 and versions["MUL"] >= 2 and versions["LOGISTIC"] >= 2 and versions["MEAN"] >= 2
