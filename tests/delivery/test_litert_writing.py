"""Bytes of LiteRT files: equal vectors once, short names."""

from pathlib import Path

import numpy as np
import pytest
from tensorflow.lite.tools import flatbuffer_utils

from prunekit.delivery.litert_writing import shortened, written

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
    assert len(content) < 0.97 * len(apart)
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
        (["a/Relu;a/add;a/conv", "a/Relu;a/add;a/conv", "a/conv"], ["a/Relu", "a/add", "a/conv"]),
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
