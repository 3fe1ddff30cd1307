import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.anatomy.cost.cost import cost
from prunekit.anatomy.graph import flow, tracing
from prunekit.anatomy.graph.flow import LayerCall, SymbolicPass


def dense(units, name):
    layer = L.Dense(units, name=name)
    layer.build((None, 4))
    return layer


def tensors(number):
    return [np.zeros((1, 4), "float32") for _ in range(number)]


def in_order(calls, inputs, dependent, trained, **options):
    """The flow that is found without a graph: NumPy arrays have none."""
    return flow.gradient_flow(SymbolicPass(calls, inputs, dependent, calls[-1].outputs, trained, **options))


def test_without_a_graph_what_follows_a_trained_weight_depends_on_it():
    first, second, third = dense(4, "a"), dense(4, "b"), dense(4, "c")
    x, early, hidden, made, out = tensors(5)
    calls = [LayerCall(first, (x,), (early,)), LayerCall(second, (x,), (hidden,)), LayerCall(third, (made, x), (out,))]
    found = in_order(calls, [x], [False], second.trainable_variables)
    assert [found.depends(call) for call in calls] == [(False,), (False,), (True, False)]
    assert [found.receives(call) for call in calls] == [(False,), (True,), (True,)]


def test_without_a_graph_integers_get_no_gradient_and_nothing_does_that_is_not_needed():
    layer = dense(4, "a")
    x, out = tensors(2)
    numbers = np.zeros((1, 4), "int32")
    calls = [LayerCall(layer, (x,), (out, numbers))]
    assert in_order(calls, [x], [True], layer.variables).receives(calls[0]) == (True, False)
    assert in_order(calls, [x], [True], layer.variables, needed=False).receives(calls[0]) == (False, False)


def test_without_a_graph_the_state_of_a_step_depends_on_the_step_before():
    layer = dense(4, "a")
    x, state, out = tensors(3)
    calls = [LayerCall(layer, (x, state), (out, out))]
    assert in_order(calls, [x, state], [False, False], (), repeated=True).depends(calls[0]) == (False, True)


def chain():
    layers = [
        L.Conv2D(3, 3),
        L.BatchNormalization(),
        L.ReLU(),
        L.Reshape((9, 12)),
        L.LSTM(5),
        L.Dropout(0.5),
        L.Dense(2),
    ]
    return keras.Sequential([keras.Input((8, 8, 2)), *layers])


def branches():
    inputs = keras.Input((6,))
    scaled = keras.ops.tanh(inputs)
    return keras.Model(inputs, L.Add()([L.Dense(3)(inputs), L.Dense(3)(scaled)]))


def test_the_order_of_calls_is_exact_for_chains_and_an_upper_bound_for_branches(monkeypatch):
    pytest.importorskip("tensorflow")
    exact = [cost(model(), 2) for model in (chain, branches)]
    monkeypatch.setattr(tracing, "gradient_flow", flow._InOrder)
    bounds = [cost(model(), 2) for model in (chain, branches)]
    for name in ("macs", "backward_macs", "activation_bytes", "backward_activation_bytes"):
        assert getattr(exact[0], name) == getattr(bounds[0], name)
        assert getattr(exact[1], name) <= getattr(bounds[1], name)
    assert (exact[1].backward_macs, bounds[1].backward_macs) == (2 * 36, 2 * (36 + 18))


class Scaled(L.Layer):
    """Hands a weight of its own to another layer as if it were data."""

    def __init__(self, **options):
        super().__init__(**options)
        self.inner = L.Dense(3, name="inner", use_bias=False)

    def build(self, shape):
        self.rows = self.add_weight(shape=(2, 4), name="rows")
        self.inner.build((2, 4))

    def call(self, inputs):
        return inputs + self.inner(self.rows)


@pytest.mark.parametrize("trainable", [True, False])
def test_a_variable_used_as_data_has_a_gradient_if_it_is_trained(trainable):
    scaled = Scaled(name="scaled")
    model = keras.Sequential([keras.Input((3,)), scaled])
    scaled.rows.trainable = trainable
    rows = {row.layer: row.backward_macs for row in cost(model, 2).layers}
    assert rows["scaled/inner"] == 24 * (2 if trainable else 1)


def test_calls_inside_a_function_of_the_users_own_count():
    tf = pytest.importorskip("tensorflow")

    class Compiled(keras.Model):
        def __init__(self):
            super().__init__()
            self.dense = L.Dense(3, name="dense")

        def call(self, inputs):
            return tf.function(lambda x: self.dense(x))(inputs)

    model = Compiled()
    model(np.zeros((2, 4)))
    # Its inputs may depend on trained weights for all that is known of another graph.
    assert (cost(model).macs, cost(model).backward_macs) == (12, 24)


def test_variables_of_a_distribution_strategy_are_followed():
    tf = pytest.importorskip("tensorflow")
    plain = cost(chain(), 2)
    with tf.distribute.MirroredStrategy(["CPU:0"]).scope():
        model = chain()
    mirrored = cost(model, 2)
    assert (mirrored.backward_macs, mirrored.backward_activation_bytes) == (
        plain.backward_macs,
        plain.backward_activation_bytes,
    )
