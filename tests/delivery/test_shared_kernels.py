"""Kernels of layers that are called several times: one copy in the file, and the outputs of files with copies."""

import keras
import numpy as np
import pytest
from ai_edge_litert.interpreter import Interpreter, OpResolverType
from keras import layers as L

import prunekit as pk
from prunekit.delivery.integers import integer_constants
from prunekit.delivery.litert.litert_graph import LiteRTGraph

pytestmark = [pytest.mark.one_backend, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


def network(*, bias=True):
    """Returns a model that calls a convolution and a Dense layer three times each, with random weights; and data."""
    rng = np.random.default_rng(0)
    x = keras.Input((8, 8, 16))
    convolution = L.Conv2D(16, 3, padding="same", activation="relu", use_bias=bias)
    dense = L.Dense(16, activation="relu", use_bias=bias)
    y = L.GlobalAveragePooling2D()(convolution(convolution(convolution(x))))
    model = keras.Model(x, dense(dense(dense(y))))
    for one in model.weights:
        one.assign(0.3 * rng.normal(size=one.shape) * (rng.random(one.shape) < 0.2))
    return model, rng.normal(size=(16, 8, 8, 16)).astype("float32")


def operators_of(path):
    """Returns {kind: the indices of the kernels that the operations of this kind read}."""
    graph = LiteRTGraph(path.read_bytes())
    found = {}
    for one in graph.operators:
        if graph.kind(one) in ("CONV_2D", "FULLY_CONNECTED"):
            found.setdefault(graph.kind(one), []).append(int(one.inputs[1]))
    return found


def outputs_of(path, data, resolver):
    """Returns what LiteRT computes from the data."""
    found = Interpreter(model_path=str(path), experimental_op_resolver_type=resolver)
    (read,), (computed,) = found.get_input_details(), found.get_output_details()
    found.resize_tensor_input(read["index"], data.shape)
    found.allocate_tensors()
    found.set_tensor(read["index"], data)
    found.invoke()
    return found.get_tensor(computed["index"])


class Forgetful(dict):
    """Keeps nothing under the key that is looked for first."""

    def __contains__(self, key):
        return False


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("activations", [8, 16])
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no bias"])
def test_all_calls_of_a_layer_read_one_kernel(tmp_path, monkeypatch, activations, bits, bias):
    model, data = network(bias=bias)
    done = pk.quantize(model, data, activation_bits=activations, bits=bits)
    shared = done.export(tmp_path / "shared.tflite")
    assert {kind: len(set(read)) for kind, read in operators_of(tmp_path / "shared.tflite").items()} == {
        "CONV_2D": 1,
        "FULLY_CONNECTED": 1,
    }
    plain = integer_constants.IntegerConstants.__init__

    def forgetful(self, *arguments):
        plain(self, *arguments)
        self._kernel_of = Forgetful()

    monkeypatch.setattr(integer_constants.IntegerConstants, "__init__", forgetful)
    apart = done.export(tmp_path / "apart.tflite")
    codes = 2304 + 256 if bits == 8 else 1152 + 128
    assert apart.bytes - shared.bytes > 2 * (codes if activations == 8 or bits == 8 else 2304 + 128)
    for resolver in (OpResolverType.BUILTIN, OpResolverType.BUILTIN_REF):
        one, other = (outputs_of(tmp_path / f"{name}.tflite", data, resolver) for name in ("shared", "apart"))
        assert one.any() and np.array_equal(one, other)


def test_operations_without_a_bias_that_share_a_kernel_have_biases_of_zeros(tmp_path):
    # By which XNNPACK's cache of packed weights, whose scales differ, tells them.
    model, data = network(bias=False)
    done = pk.quantize(model, data, correct_biases=False)
    done.export(tmp_path / "w.tflite")
    found = operators_of(tmp_path / "w.tflite")
    assert {kind: len(set(read)) for kind, read in found.items()} == {"CONV_2D": 1, "FULLY_CONNECTED": 1}
    graph = LiteRTGraph((tmp_path / "w.tflite").read_bytes())
    biases = [int(one.inputs[2]) for one in graph.operators if graph.kind(one) == "FULLY_CONNECTED"]
    assert len({graph.tensor(one).buffer for one in biases}) == 3


def test_an_operation_without_a_bias_that_has_a_kernel_alone_gets_none(tmp_path):
    model = keras.Sequential([keras.Input((16,)), L.Dense(8, use_bias=False)])
    pk.quantize(model, np.random.default_rng(0).normal(size=(8, 16)), correct_biases=False).export(
        tmp_path / "w.tflite"
    )
    graph = LiteRTGraph((tmp_path / "w.tflite").read_bytes())
    (dense,) = [one for one in graph.operators if graph.kind(one) == "FULLY_CONNECTED"]
    assert list(dense.inputs)[2:] in ([], [-1])


def test_a_shared_kernel_is_encoded_sparsely_once(tmp_path):
    model, data = network()
    done = pk.quantize(model, data, method="nearest")
    dense, sparse = (done.export(tmp_path / f"{name}.tflite", sparse=name == "sparse") for name in ("dense", "sparse"))
    assert [one.reason == "" for one in sparse.kernels] == [True, False]
    # One kernel is smaller by that much, not three; the operation that restores it takes some bytes.
    saved = sparse.kernels[0].dense - sparse.kernels[0].bytes
    assert 0 < dense.bytes - sparse.bytes <= saved
    floats = [outputs_of(tmp_path / f"{name}.tflite", data, OpResolverType.BUILTIN) for name in ("dense", "sparse")]
    assert np.array_equal(*floats)
