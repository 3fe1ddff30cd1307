"""When functions are traced, and what is in their graphs."""

import logging

import keras
import numpy as np
import pytest

from prunekit.core.runtime import compilation
from prunekit.sparsity.schedules import ConstantSparsity
from prunekit.sparsity.selection import keep_largest, reading_plan
from prunekit.techniques.pruning.training.pruner import Pruner
from prunekit.training_tools.loops.tape_loop import TapeLoop

tf = pytest.importorskip("tensorflow")
pytestmark = pytest.mark.skipif(keras.backend.backend() != "tensorflow", reason="counts traces of tf.function")

# Operations that leave the device for Python in the middle of a step.
HOST = {"PyFunc", "PyFuncStateless", "EagerPyFunc"}


def ones(*shape, dtype="float32"):
    return np.ones(shape, dtype)


def operations(concrete):
    """The types of all operations of a traced function, and of the functions that it calls."""
    graph = concrete.graph.as_graph_def()
    bodies = [graph.node, *(function.node_def for function in graph.library.function)]
    return {node.op for nodes in bodies for node in nodes}


class TestOpenFunction:
    def test_what_it_is_traced_with_inside_a_scope_stays_there(self):
        factor = [2.0]
        function = compilation.OpenFunction(lambda x: x * factor[0])
        pure = compilation.OpenFunction(lambda x: x + 1, pure=True)
        assert function(ones(2, 3))[0, 0] == 2 and pure(ones(2, 3))[0, 0] == 2
        factor[0] = 5.0
        with compilation.fresh_traces():
            assert function(ones(2, 3))[0, 0] == 5 and pure(ones(2, 3))[0, 0] == 2
            factor[0] = 7.0
            with compilation.fresh_traces():
                assert function(ones(4, 3))[0, 0] == 7
            assert function(ones(4, 3))[0, 0] == 5
            assert (function.traces, pure.traces) == (1, 1)
        assert function(ones(4, 3))[0, 0] == 2 and function.traces == 1
        assert len(function._traced) == 1, "traces go with their scope"

    def test_batches_of_any_size_share_one_trace(self):
        double = compilation.OpenFunction(lambda x: x * 2)
        for size in (1, 7, 32, 7, 0):
            np.testing.assert_array_equal(double(ones(size, 3)), np.full((size, 3), 2.0))
        assert double.traces == 1

    def test_a_keras_variable_is_not_taken_through_numpy(self, monkeypatch):
        variable = keras.Variable(np.ones(4, "float32"))

        def refuse(self, dtype=None):
            raise AssertionError("copied to NumPy")

        monkeypatch.setattr(keras.Variable, "__array__", refuse)
        np.testing.assert_array_equal(compilation.OpenFunction(lambda x: x * 2)(variable), [2.0] * 4)

    def test_scopes_left_out_of_order_take_their_traces_with_them(self):
        factor = [2.0]
        function = compilation.OpenFunction(lambda x: x * factor[0])
        assert function(ones(2, 3))[0, 0] == 2
        outer, inner = compilation.fresh_traces(), compilation.fresh_traces()
        outer.__enter__()
        inner.__enter__()
        factor[0] = 5.0
        assert function(ones(2, 3))[0, 0] == 5
        outer.__exit__(None, None, None)
        factor[0] = 7.0
        assert function(ones(2, 3))[0, 0] == 7, "what was traced inside both scopes has gone"
        inner.__exit__(None, None, None)
        assert function(ones(2, 3))[0, 0] == 2 and len(function._traced) == 1

    @pytest.mark.parametrize(
        "other",
        [ones(5, 4), ones(5, 3, 1), ones(5), ones(5, 3, dtype="float64"), ones(5, 3, dtype="int32")],
        ids=["width", "rank", "no width", "float64", "int32"],
    )
    def test_another_shape_of_an_example_or_another_type_is_traced_again_once(self, other):
        double = compilation.OpenFunction(lambda x: x * 2)
        for batch in (ones(5, 3), other, ones(9, 3), other[:2]):
            answer = double(batch)
            assert answer.dtype.as_numpy_dtype == batch.dtype
            np.testing.assert_array_equal(answer, batch * 2)
        assert double.traces == 2

    def test_a_scalar_has_no_open_axis(self):
        double = compilation.OpenFunction(lambda x: x * 2)
        assert [float(double(value)) for value in (np.float32(1), np.float32(2))] == [2.0, 4.0]
        assert double.traces == 1

    @pytest.mark.parametrize("closed_from", [1, None])
    def test_the_trace_has_the_fixed_lengths(self, closed_from):
        seen = []
        function = compilation.OpenFunction(lambda x: seen.append(tuple(x.shape)) or x, closed_from=closed_from)
        function(ones(4, 3))
        assert seen == [(None, 3) if closed_from == 1 else (None, None)]

    def test_with_every_axis_open_lengths_cost_no_trace_and_ranks_do(self):
        total = compilation.OpenFunction(keras.ops.sum, closed_from=None)
        assert [float(total(ones(*shape))) for shape in ((2, 3), (5, 1), (4, 4))] == [6.0, 5.0, 16.0]
        assert total.traces == 1
        assert float(total(ones(2, 2, 2))) == 8.0
        assert total.traces == 2

    def test_none_among_the_arguments_is_part_of_the_signature(self):
        def weighted(batch, weight):
            return batch["a"] + batch["b"][0] if weight is None else batch["a"] * weight

        function = compilation.OpenFunction(weighted)
        for size in (2, 3):
            batch = {"a": ones(size), "b": [ones(size), None]}
            np.testing.assert_array_equal(function(batch, None), np.full(size, 2.0))
            np.testing.assert_array_equal(function(batch, 3 * ones(size)), np.full(size, 3.0))
        assert function.traces == 2

    def test_what_it_returns_has_the_structure_of_the_function(self):
        function = compilation.OpenFunction(lambda x: {"sum": keras.ops.sum(x), "parts": [x, None]})
        answer = function(ones(3, 2))
        assert float(answer["sum"]) == 6.0
        assert answer["parts"][0].shape == (3, 2) and answer["parts"][1] is None

    def test_tensors_and_arrays_share_a_trace(self):
        double = compilation.OpenFunction(lambda x: x * 2)
        double(ones(4, 2))
        double(tf.ones((6, 2)))
        assert double.traces == 1

    def test_float64_is_computed_in_float64(self):
        function = compilation.OpenFunction(lambda x: x + 1e-12)
        assert float(function(ones(1, dtype="float64"))[0]) == 1.0 + 1e-12
        assert float(function(ones(1))[0]) == 1.0

    def test_compiled_by_xla_it_gives_the_same(self):
        x = np.random.default_rng(0).normal(size=(5, 3)).astype("float32")
        plain, xla = (
            compilation.OpenFunction(lambda x: keras.ops.relu(x) @ ones(3, 2), xla=xla) for xla in (False, True)
        )
        np.testing.assert_allclose(plain(x), xla(x), rtol=1e-6)
        np.testing.assert_allclose(plain(x[:2]), xla(x[:2]), rtol=1e-6)
        assert xla.traces == 1


class TestCompiled:
    def test_with_open_shapes_one_trace_serves_all_lengths(self):
        function = compilation.compiled(lambda x, y: keras.ops.sum(x) + y, open_shapes=True)
        for shape in ((3,), (1000,), (1,)):
            assert float(function(ones(*shape), np.float32(1))) == shape[0] + 1
        assert isinstance(function, compilation.OpenFunction) and function.traces == 1

    def test_a_function_per_shape_is_traced_per_shape_without_a_warning_of_tensorflow(self, caplog):
        shapes = []
        function = compilation.compiled(lambda x: shapes.append(tuple(x.shape)) or x * 2)
        with caplog.at_level(logging.WARNING, logger="tensorflow"):
            for length in [*range(1, 13), *range(1, 13)]:
                assert function(tf.ones((length,))).shape == (length,)
        assert shapes == [(length,) for length in range(1, 13)]
        assert caplog.records == []

    def test_it_stays_one_call_in_the_graph_of_a_caller(self):
        inner = compilation.compiled(lambda x: keras.ops.tanh(x))
        outer = tf.function(lambda x: inner(x) + inner(x), autograph=False)
        graph = outer.get_concrete_function(tf.ones((2,))).graph.as_graph_def()
        called = [function for function in graph.library.function if function.attr["_noinline"].b]
        assert len(called) == 1
        assert [node.op for node in graph.node].count("Tanh") == 0

    def test_an_effect_assigns_variables(self):
        variable = keras.Variable(np.zeros(3, "float32"))
        effect = compilation.compiled_effect(lambda: variable.assign(variable + 1))
        effect()
        effect()
        np.testing.assert_array_equal(variable.numpy(), np.full(3, 2.0))


class TestNothingLeavesTheDevice:
    def test_the_search_finds_python_in_a_graph(self):
        inner = tf.function(lambda x: tf.numpy_function(lambda value: value, [x], tf.float32), autograph=False)
        outer = tf.function(lambda x: inner(x) + 1, autograph=False)
        assert operations(outer.get_concrete_function(tf.ones(2))) & HOST

    @pytest.mark.parametrize("xla", [False, True], ids=["plain", "XLA"])
    def test_in_a_training_step_with_masks(self, perceptron, samples, xla):
        optimizer = keras.optimizers.Adam()
        x, y = samples
        pruner = Pruner(perceptron, ConstantSparsity(0.5, frequency=2), optimizer, allocation="uniform")
        with pruner:
            loop = TapeLoop(perceptron, optimizer, "sparse_categorical_crossentropy", pruner, jit_compile=xla)
            loop.step(x[:16], y[:16])
            traced = loop._train._function.get_concrete_function(tf.constant(x[:16]), tf.constant(y[:16]), None)
        found = operations(traced)
        assert "MatMul" in found and not found & HOST

    def test_in_the_selection_of_masks(self):
        select = compilation.compiled(lambda x, kept: keep_largest(x, kept, how=reading_plan(9)), open_shapes=True)
        mask = select(np.arange(9.0, dtype="float32"), np.int32(4))
        assert mask.numpy().sum() == 4
        traced = select._function.get_concrete_function(tf.TensorSpec([None], tf.float32), tf.TensorSpec([], tf.int32))
        assert not operations(traced) & HOST
