"""Bytes of LiteRT files: equal vectors, tables and constants once, short names, no metadata of the converter."""

from pathlib import Path

import numpy as np
import pytest
from tensorflow.lite.tools import flatbuffer_utils

from prunekit.delivery.litert.litert_folding import merge_constants
from prunekit.delivery.litert.litert_graph import LiteRTGraph
from prunekit.delivery.litert.litert_writing import shortened, written

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning")


@pytest.fixture(scope="module")
def content(eight):
    _, export, _ = eight
    return Path(export.path).read_bytes()


def plain(one):
    """Returns an object of the schema as nested dictionaries, lists and numbers."""
    if isinstance(one, np.ndarray):
        return [one.dtype.name, one.tolist()]
    if isinstance(one, list):
        return [plain(entry) for entry in one]
    return {key: plain(value) for key, value in vars(one).items()} if hasattr(one, "__dict__") else one


def test_a_file_with_shared_vectors_reads_as_one_without_and_is_smaller(content):
    model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
    apart = bytes(flatbuffer_utils.convert_object_to_bytearray(model))
    assert plain(flatbuffer_utils.convert_bytearray_to_object(bytearray(apart))) == plain(model)
    assert len(content) < 0.92 * len(apart)
    assert written(model) == content


def test_values_of_equal_constants_are_not_shared():
    from tensorflow.lite.python import schema_py_generated as schema

    model = schema.ModelT()
    model.buffers = [schema.BufferT(), schema.BufferT()]
    for one in model.buffers:
        one.data = np.full(4096, 7, "uint8")
    assert len(written(model)) > 2 * 4096


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["a/Relu;a/add;a/conv", "a/Relu;a/add;b/conv", "b/conv"], ["a/Relu", "a/add", "b/conv"]),
        # The scope of all is left out.
        (["a/c/Relu;a/c/add;a/c/conv", "a/c/Relu;a/c/add;a/c/conv", "constant"], ["c/Relu", "c/add", "constant"]),
        (["a/c;a/d", "a/c", "a/d"], ["c;d", "c", "d"]),
        (["a;b", "a;b", "a;b"], ["a", "b", "a;b"]),
        (["b;a", "a", "a"], ["b", "a", "a"]),
        (["a;b", "a", "b"], ["a;b", "a", "b"]),
        ([], []),
    ],
)
def test_names_are_the_first_of_those_merged_that_no_other_tensor_has(names, expected):
    assert shortened(names) == expected


def test_names_in_a_file_differ_as_those_of_the_converter(content):
    model = flatbuffer_utils.convert_bytearray_to_object(bytearray(content))
    graph = model.subgraphs[0]
    ends = {int(index) for index in (*graph.inputs, *graph.outputs)}
    names = [one.name.decode() for index, one in enumerate(graph.tensors) if index not in ends]
    assert len(set(names)) == len(names) and sum(";" in name for name in names) <= 0.1 * len(names)


def test_equal_parameters_of_tensors_and_operations_are_one_table(content):
    from tensorflow.lite.python import schema_py_generated as schema

    graph = schema.Model.GetRootAs(content).Subgraphs(0)
    held = [graph.Tensors(at).Quantization() for at in range(graph.TensorsLength())]
    made = [graph.Operators(at) for at in range(graph.OperatorsLength())]
    grids = [(one._tab.Pos, repr(plain(schema.QuantizationParametersT.InitFromObj(one)))) for one in held if one]
    options = [one.BuiltinOptions().Pos for one in made if one.BuiltinOptions()]
    assert len({place for place, _ in grids}) == len({grid for _, grid in grids}) < len(grids)
    assert len(set(options)) < len(options)


def test_a_file_has_no_metadata_of_the_file_that_the_converter_made(content):
    assert not flatbuffer_utils.convert_bytearray_to_object(bytearray(content)).metadata


@pytest.mark.parametrize("shared", [True, False], ids=["one kernel", "equal kernels"])
def test_equal_biases_are_merged_unless_their_operations_share_a_kernel(content, shared):
    graph = LiteRTGraph(content)
    first = next(one for one in graph.operators if graph.kind(one) == "FULLY_CONNECTED")
    kernel, bias = (int(index) for index in first.inputs[1:3])
    second = graph.copy_operator(first, [graph.new_tensor("copy", graph.shape(int(first.outputs[0])), "int8")])
    copies = [
        graph.new_constant("kernel", graph.codes(kernel)),
        graph.new_constant("bias", graph.integers(bias)),
    ]
    for index, copied in zip((kernel, bias), copies, strict=True):
        graph.copy_scales(index, copied)
    second.inputs = np.array([first.inputs[0], kernel if shared else copies[0], copies[1]], "int32")
    graph.operators.append(second)
    merge_constants(graph)
    assert list(first.inputs[1:3]) == [kernel, bias]
    assert list(second.inputs[1:3]) == ([kernel, copies[1]] if shared else [copies[0], bias])
