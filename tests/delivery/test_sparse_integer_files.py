"""Integer files with sparsely encoded kernels compute what the dense files compute."""

import itertools
from pathlib import Path

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from keras import layers as L

import prunekit as pk
from prunekit.delivery.integers import integer_writing
from prunekit.delivery.integers.integer_file import IntegerFile
from prunekit.delivery.integers.integer_report import IntegerExportError
from prunekit.delivery.integers.integer_sparsity import sparsely_encoded
from prunekit.delivery.litert.isolated_run import ExportRejected
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.sparse_encoding import SparseEncoding, smallest_encoding
from prunekit.delivery.litert.tensor_probe import opened
from prunekit.techniques.quantize.grids.grids import IntegerFormat

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")
KINDS = ("AUTO", "BUILTIN_WITHOUT_DEFAULT_DELEGATES")


def network(*layers, shape, zeros=0.9):
    """Returns a network whose kernels have zeros, and inputs."""
    keras.utils.set_random_seed(3)
    model, rng = keras.Sequential([keras.Input(shape), *layers]), np.random.default_rng(0)
    for one in model.weights:
        values = rng.normal(size=one.shape).astype("float32")
        one.assign(np.where(rng.random(one.shape) < zeros, 0.0, values) if len(one.shape) > 1 else values)
    return model, rng.normal(size=(12, *shape)).astype("float32")


def images():
    """A network with all kinds of kernels that are encoded."""
    layers = [
        L.Conv2D(24, 3, activation="relu", name="conv"),
        L.DepthwiseConv2D(5, name="depthwise"),
        L.Conv2DTranspose(12, 3, strides=(1, 2), name="transposed"),
        L.Dense(96, activation="relu", name="each"),
        L.GlobalAveragePooling2D(),
        L.Dense(48, name="hidden"),
        L.Dense(40, use_bias=False, name="last"),
    ]
    return network(*layers, shape=(12, 12, 16))


def outputs(path, inputs, kind):
    runner = Interpreter(str(path), experimental_op_resolver_type=getattr(OpResolverType, kind)).get_signature_runner()
    ((name, _),) = runner.get_input_details().items()
    (found,) = runner(**{name: inputs}).values()
    return found


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(dense file, sparse file, export of the sparse one, inputs)."""
    folder, (model, inputs) = tmp_path_factory.mktemp("files"), images()
    done = pk.quantize(model, inputs)
    done.export(folder / "dense.tflite")
    return folder / "dense.tflite", folder / "sparse.tflite", done.export(folder / "sparse.tflite", sparse=True), inputs


def decoded(one):
    """Decodes an encoding entry by entry, as the schema says."""
    shape, found = [one.codes.shape[axis] for axis in one.order], np.zeros_like(one.codes).transpose(one.order)
    values, place = one.values.tolist(), 0
    for row, index in enumerate(itertools.product(*map(range, shape[:-1]))):
        for block in one.indices[one.segments[row] : one.segments[row + 1]]:
            for entry in range(one.block):
                found[(*index, int(block) * one.block + entry)] = values[place]
                place += 1
    assert place == len(values)
    return found.transpose(np.argsort(one.order))


def codes(*shape, zeros=0.8):
    rng = np.random.default_rng(len(shape))
    return np.where(rng.random(shape) < zeros, 0, rng.integers(-127, 128, shape)).astype("int8")


def blocks():
    """Zeros in blocks of 4 along the second axis."""
    return np.where(np.repeat(codes(24, 8) == 0, 4, axis=1), 0, 5).astype("int8")


@pytest.mark.parametrize(
    "array",
    [codes(5, 7), codes(3, 3, 3, 8), codes(1, 3, 3, 5), codes(2, 600), codes(600, 2), blocks(), codes(4, 4, zeros=0)]
    + [np.zeros((6, 6), "int8"), codes(9, zeros=0.5), codes(1, 1, zeros=0)],
    ids=str,
)
def test_an_encoding_has_all_entries_and_the_bytes_that_it_tells(array):
    for axis, block in itertools.product(range(array.ndim), (1, 2, 4)):
        if array.shape[axis] % block == 0:
            one = SparseEncoding(array, axis, block)
            assert (decoded(one) == array).all()
            assert one.bytes == one.values.nbytes + one.segments.nbytes + one.indices.nbytes
            assert one.bytes >= smallest_encoding(array).bytes and len(one.values)


def test_indices_have_the_smallest_type_that_holds_them():
    assert smallest_encoding(codes(2, 600)).axis == 1
    assert SparseEncoding(codes(2, 600), 1, 1).indices.dtype == "uint16"
    assert SparseEncoding(codes(2, 100), 1, 1).indices.dtype == "uint8"
    assert SparseEncoding(np.ones((700, 100), "int8"), 1, 1).segments.dtype == "int32"
    assert smallest_encoding(blocks()).block == 4


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [1, 12])
def test_a_sparse_file_computes_bit_for_bit_what_the_dense_file_computes(files, kind, count):
    dense, sparse, _, inputs = files
    found = outputs(sparse, inputs[:count], kind)
    assert np.ptp(found) > 0
    np.testing.assert_array_equal(found, outputs(dense, inputs[:count], kind))


def test_a_sparse_file_is_smaller_and_lists_its_kernels(files):
    dense, sparse, export, _ = files
    assert [one.name.split()[0] for one in export.kernels] == [
        *("CONV_2D", "DEPTHWISE_CONV_2D", "TRANSPOSE_CONV"),
        *["FULLY_CONNECTED"] * 3,
    ]
    assert all(one.reason == "" and 0.85 < one.zeros < 0.95 and one.bytes == one.sparse for one in export.kernels)
    saved = dense.stat().st_size - sparse.stat().st_size
    told = sum(one.dense - one.bytes for one in export.kernels)
    assert export.bytes == sparse.stat().st_size and abs(saved - told) < 0.1 * told
    assert "6 of 6 kernels encoded sparsely" in export.verdict()
    assert [row[-1] for row in export.sections()[-1].rows] == ["sparsely"] * 6
    assert export.to_dict()["kernels"][0]["zeros"] == export.kernels[0].zeros


def test_litert_restores_every_kernel(files):
    dense, sparse, *_ = files
    expected = LiteRTGraph(dense.read_bytes())
    kernels = [
        found for one in expected.operators for index in one.inputs if (found := expected.codes(int(index))) is not None
    ]
    interpreter, graph = opened(str(sparse), {}), LiteRTGraph(sparse.read_bytes())
    interpreter.invoke()
    places = [int(one.outputs[0]) for one in graph.operators if graph.kind(one) == "DENSIFY"]
    assert len(places) == len(kernels) == 6
    for place, kernel in zip(places, kernels, strict=True):
        np.testing.assert_array_equal(interpreter.get_tensor(place).reshape(kernel.shape), kernel)


@pytest.mark.parametrize(("weights", "activations"), [(4, 8), (8, 16)])
def test_codes_of_4_bits_and_tensors_of_16_bits_are_near_the_dense_file(weights, activations, tmp_path):
    model, inputs = images()
    done = pk.quantize(model, inputs, bits=weights, activation_bits=activations, method="nearest")
    dense, found = done.export(tmp_path / "d.tflite"), done.export(tmp_path / "s.tflite", sparse=True)
    assert found.bytes < 0.9 * dense.bytes and sum(one.reason == "" for one in found.kernels) >= 3
    assert all((one.largest or 0) <= one.allowed for one in found.tensors)
    exact = outputs(tmp_path / "d.tflite", inputs, "AUTO")
    steps = 255 if activations == 8 else 2**15
    assert np.abs(outputs(tmp_path / "s.tflite", inputs, "AUTO") - exact).max() <= 4 / steps * np.ptp(exact)


def test_a_kernel_that_would_not_be_smaller_stays_dense_with_the_reason(tmp_path):
    model, inputs = network(L.Dense(64, name="full"), L.Dense(64, name="few"), L.Dense(4), shape=(64,), zeros=0.0)
    few = model.get_layer("few").kernel
    few.assign(np.where(np.arange(64)[:, None] < 56, 0.0, few.numpy()))
    done = pk.quantize(model, inputs)
    found = done.export(tmp_path / "m.tflite", sparse=True)
    reasons = ["sparse encoding is not smaller", "", "sparse encoding is not smaller"]
    assert [one.reason for one in found.kernels] == reasons and found.kernels[0].bytes == 64 * 64


def test_a_file_without_zeros_is_the_dense_file(eight, tmp_path):
    done, plain, _ = eight
    found = done.export(tmp_path / "m.tflite", sparse=True)
    assert f"0 of {len(found.kernels)} kernels encoded sparsely" in found.verdict() and plain.kernels == ()
    assert (tmp_path / "m.tflite").read_bytes() == Path(plain.path).read_bytes()


def test_a_kernel_without_weights_is_restored(tmp_path):
    model, inputs = network(L.Dense(64, name="none"), L.Dense(4), shape=(64,))
    model.get_layer("none").kernel.assign(np.zeros((64, 64)))
    found = pk.quantize(model, inputs).export(tmp_path / "m.tflite", sparse=True)
    assert found.kernels[0].zeros == 1.0 and found.kernels[0].reason == "" and found.largest_difference <= 1


def test_zeros_in_blocks_of_inputs_need_an_index_for_each_block_alone(tmp_path):
    model, inputs = network(L.Dense(128, name="dense"), shape=(128,), zeros=0.0)
    done = pk.quantize(model, inputs, sparsity=0.75, pattern="block:16x1")
    (kernel,) = done.export(tmp_path / "m.tflite", sparse=True).kernels
    assert abs(kernel.zeros - 0.75) < 0.02 and kernel.bytes < 0.35 * 128 * 128


def test_kernels_of_operations_in_floating_point_stay_dense(tmp_path):
    x = keras.Input((20,), dtype="int32", name="words")
    table = L.Embedding(200, 64, name="table")
    model = keras.Model(x, L.Dense(64, name="dense")(L.GlobalAveragePooling1D()(L.LayerNormalization()(table(x)))))
    for one in (table.embeddings, model.get_layer("dense").kernel):
        one.assign(np.where(np.random.default_rng(0).random(one.shape) < 0.9, 0.0, one.numpy()))
    done = pk.quantize(model, np.random.default_rng(0).integers(0, 200, (16, 20)))
    found = done.export(tmp_path / "m.tflite", sparse=True)
    graph = LiteRTGraph((tmp_path / "m.tflite").read_bytes())
    restored = {int(one.outputs[0]) for one in graph.operators if graph.kind(one) == "DENSIFY"}
    readers = {graph.kind(one) for one in graph.operators if restored & {*map(int, one.inputs)}}
    assert readers == {"CONV_2D"} and [one.name.split()[0] for one in found.kernels] == ["FULLY_CONNECTED"]


def test_files_without_integer_kernels_are_refused(tmp_path):
    model, inputs = network(L.Dense(64), shape=(64,))
    done = pk.quantize(model, inputs, activation_bits="float", method="nearest")
    with pytest.raises(ValueError, match="sparse=True for a file with activations in floating point"):
        done.export(tmp_path / "m.tflite", sparse=True)
    with pytest.raises(ValueError, match="sparse=True for a Keras file"):
        done.export(tmp_path / "m.keras", sparse=True)
    assert not list(tmp_path.iterdir())


def test_a_sparse_file_that_differs_or_is_wrong_elsewhere_is_refused(tmp_path, monkeypatch):
    model, inputs = network(L.Dense(64), shape=(64,))
    done, answers = pk.quantize(model, inputs), integer_writing._Export._answers

    def apart(export, path, made, *given):
        kinds = {LiteRTGraph(made.content).kind(one) for one in LiteRTGraph(made.content).operators}
        return [one * (-1.0 if "DENSIFY" in kinds else 1.0) for one in answers(export, path, made, *given)]

    def broken(*_):
        raise ExportRejected("failed", "the model converts, but does not run: no memory")

    def verdict(content):
        return type("Verdict", (), {"wrong": "wrong numbers on ARM64"})

    for target, replacement, message in (
        ("_Export._answers", apart, "computes what the dense file computes. Received: .*in batches of 1 .*Leave"),
        ("_Export._answers", broken, "was made, but the model converts, but does not run: no memory.*Leave `sparse`"),
        ("read_verdict", verdict, "sparsely encoded kernels gives wrong numbers on ARM64.*gzip compresses"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(f"{integer_writing.__name__}.{target}", replacement)
            with pytest.raises(IntegerExportError, match=message):
                done.export(tmp_path / "m.tflite", sparse=True)
    assert not list(tmp_path.iterdir())


def test_a_dense_layer_whose_results_have_several_open_lengths_stays_dense(files):
    dense, *_ = files
    graph = LiteRTGraph(dense.read_bytes())
    (last,) = [one for one in graph.operators if graph.kind(one) == "FULLY_CONNECTED"][-1:]
    graph.tensor(last.outputs[0]).shapeSignature = np.array([-1, -1], "int32")
    activations = IntegerFormat(8, symmetric=False)
    _, kernels = sparsely_encoded(IntegerFile(graph.content()[0], (), ()), activations)
    assert [one.reason for one in kernels] == [""] * 5 + ["tensors have several open lengths"]


def shared(files, layer):
    """(graph of the dense file with one of its Dense layers twice, that layer, output of the second)."""
    graph = LiteRTGraph(files[0].read_bytes())
    found = [one for one in graph.operators if graph.kind(one) == "FULLY_CONNECTED"][layer]
    (output,) = (int(index) for index in found.outputs)
    added = graph.new_tensor("again", graph.shape(output), "int8")
    graph.copy_scales(output, added)
    graph.operators.append(graph.copy_operator(found, [added]))
    return graph, found, added


def encoded(graph):
    return sparsely_encoded(IntegerFile(graph.content()[0], (), ()), IntegerFormat(8, symmetric=False))


def kinds(made):
    graph = LiteRTGraph(made.content)
    return [graph.kind(one) for one in graph.operators]


# A second convolution and its reshapes; that of the layer without a bias has one of 40 zeros, with scales.
@pytest.mark.parametrize(("layer", "added", "reason"), [(1, 350, ""), (2, 670, "sparse encoding is not smaller")])
def test_a_kernel_of_two_layers_is_stored_once_with_the_bytes_of_both(files, layer, added, reason):
    made, kernels = encoded(shared(files, layer)[0])
    once, alone = encoded(LiteRTGraph(files[0].read_bytes()))
    assert kernels == (*alone[: 3 + layer], kernels[3 + layer], *alone[4 + layer :])
    assert kernels[3 + layer].sparse - alone[3 + layer].sparse == added and kernels[3 + layer].reason == reason
    more = {"FULLY_CONNECTED": 2, "CONV_2D": -1, "DENSIFY": -1} if reason else {"CONV_2D": 1}
    for kind in ("FULLY_CONNECTED", "CONV_2D", "DENSIFY"):
        assert kinds(made).count(kind) - kinds(once).count(kind) == more.get(kind, 0)


def test_a_kernel_stays_dense_if_any_of_its_layers_needs_it_so(files):
    graph, _, added = shared(files, 1)
    graph.tensor(added).shapeSignature = np.array([-1, -1], "int32")
    made, kernels = encoded(graph)
    assert kernels[4].reason == "tensors have several open lengths" and kinds(made).count("FULLY_CONNECTED") == 2


def test_a_kernel_that_other_operations_read_stays_dense(files):
    graph, layer, added = shared(files, 1)
    # As the rows of a table that an Embedding and the output layer share.
    graph.operators[-1] = graph.new_operator("GATHER", [int(layer.inputs[1]), int(layer.inputs[0])], [added])
    _, kernels = encoded(graph)
    assert kernels[4].reason == "operations of other kinds read it, too"
