"""Every layer type that `pk.cost` counts, against TensorFlow's graphs and its profiler, with and without gradients.

`profiled.py` counts what a graph's results depend on, from the shapes of the operands. Where TensorFlow's profiler has
a figure for an operation, it is compared. It has none for einsums, nor for the gradients of depthwise and of
three-dimensional convolutions, and does not know how often a loop runs.
"""

import inspect
import math
from collections import Counter

import keras
import pytest
from keras import layers as L

from prunekit.anatomy.cost.cost import cost
from prunekit.anatomy.layers import layers as table

tf = pytest.importorskip("tensorflow")
profiled = pytest.importorskip("profiled")

BATCH = 2


class Case:
    """A model around one layer, whose inputs `before` makes depend on trained weights, or leaves as they are."""

    def __init__(self, make, *shapes, call=None, steps=1, training=True, dtype="float32"):
        self.make, self.shapes, self.steps, self.training, self.dtype = make, shapes, steps, training, dtype
        self.call = call or (lambda layer, *inputs: layer(inputs[0] if len(inputs) == 1 else list(inputs)))

    def model(self, dependent):
        inputs = [keras.Input(shape, dtype=self.dtype) for shape in self.shapes]
        given = [L.PReLU()(x) if depends else x for x, depends in zip(inputs, dependent, strict=True)]
        return keras.Model(inputs, self.call(self.make(), *given))


def arguments(layer, *inputs):
    return layer(*inputs)


def stepped(cell, inputs, *states):
    return cell(inputs, list(states))[0]


def there_and_back(layer, tokens):
    return layer(layer(tokens), reverse=True)


CASES = {
    "Dense": [Case(lambda: L.Dense(7), (4,)), Case(lambda: L.Dense(7), (5, 3, 4))],
    "EinsumDense": [
        Case(lambda: L.EinsumDense("abc,cde->abde", (None, 2, 3)), (5, 4)),
        Case(lambda: L.EinsumDense("...x,xy->...y", 3), (5, 6, 4)),
        Case(lambda: L.EinsumDense("abc,bcd->abd", (5, 3)), (5, 4)),
    ],
    "Conv1D": [
        Case(lambda: L.Conv1D(6, 3, padding="same", strides=2), (10, 4)),
        Case(lambda: L.Conv1D(6, 3, padding="causal"), (10, 4)),
    ],
    "Conv2D": [
        Case(lambda: L.Conv2D(6, 3, padding="same", strides=2), (8, 8, 4)),
        Case(lambda: L.Conv2D(6, (3, 2), strides=(2, 3)), (9, 8, 4)),
        Case(lambda: L.Conv2D(6, 3, padding="same", groups=2), (6, 6, 4)),
        Case(lambda: L.Conv2D(6, 3, dilation_rate=2), (10, 10, 4)),
    ],
    "Conv3D": [Case(lambda: L.Conv3D(5, 2, strides=2), (5, 5, 5, 3))],
    "Conv1DTranspose": [Case(lambda: L.Conv1DTranspose(5, 3, strides=2, padding="same"), (4, 3))],
    "Conv2DTranspose": [
        Case(lambda: L.Conv2DTranspose(5, 3, strides=2, padding="same"), (4, 4, 3)),
        Case(lambda: L.Conv2DTranspose(5, 3, strides=2), (4, 4, 3)),
    ],
    "Conv3DTranspose": [Case(lambda: L.Conv3DTranspose(5, 3, strides=2), (2, 2, 2, 3))],
    "DepthwiseConv1D": [Case(lambda: L.DepthwiseConv1D(3, depth_multiplier=2), (6, 4))],
    "DepthwiseConv2D": [Case(lambda: L.DepthwiseConv2D(3, strides=2, padding="same", depth_multiplier=2), (6, 6, 4))],
    "SeparableConv1D": [Case(lambda: L.SeparableConv1D(5, 3, strides=2, padding="same"), (6, 4))],
    "SeparableConv2D": [Case(lambda: L.SeparableConv2D(5, 3), (6, 6, 4))],
    "ReversibleEmbedding": [
        Case(lambda: L.ReversibleEmbedding(11, 4), (5,), call=there_and_back, dtype="int32"),
        Case(lambda: L.ReversibleEmbedding(11, 4, tie_weights=False), (5,), call=there_and_back, dtype="int32"),
    ],
    "Attention": [
        Case(lambda: L.Attention(), (5, 8), (7, 8)),
        Case(lambda: L.Attention(use_scale=True), (5, 8), (7, 6), (7, 8)),
        Case(lambda: L.Attention(score_mode="concat"), (5, 8), (7, 8)),
    ],
    "AdditiveAttention": [Case(lambda: L.AdditiveAttention(), (5, 8), (7, 8))],
    "MultiHeadAttention": [
        Case(lambda: L.MultiHeadAttention(2, 3, value_dim=4), (5, 8), (7, 6), call=arguments),
        Case(lambda: L.MultiHeadAttention(2, 3, dropout=0.1), (5, 8), (7, 6), (7, 4), call=arguments),
        Case(lambda: L.MultiHeadAttention(2, 3, attention_axes=(1, 2)), (3, 4, 8), (2, 4, 8), call=arguments),
    ],
    "GroupQueryAttention": [Case(lambda: L.GroupQueryAttention(3, 4, 2), (5, 8), (7, 8), call=arguments)],
    "Dot": [Case(lambda: L.Dot(2), (5, 8), (7, 8)), Case(lambda: L.Dot((1, 2)), (8, 5), (7, 8))],
    "SimpleRNNCell": [Case(lambda: L.SimpleRNNCell(3), (4,), (3,), call=stepped)],
    "GRUCell": [Case(lambda: L.GRUCell(3), (4,), (3,), call=stepped)],
    "LSTMCell": [Case(lambda: L.LSTMCell(3), (4,), (3,), (3,), call=stepped)],
    "SimpleRNN": [Case(lambda: L.SimpleRNN(7), (5, 4), steps=5)],
    "GRU": [
        Case(lambda: L.GRU(7, return_sequences=True), (5, 4), steps=5),
    ],
    "LSTM": [Case(lambda: L.LSTM(7, return_sequences=True, go_backwards=True, recurrent_dropout=0.1), (5, 4), steps=5)],
    "RNN": [Case(lambda: L.RNN(L.GRUCell(3, reset_after=False)), (5, 4), steps=5)],
    "StackedRNNCells": [Case(lambda: L.RNN(L.StackedRNNCells([L.GRUCell(3), L.LSTMCell(2)])), (5, 4), steps=5)],
    "ConvLSTM1D": [Case(lambda: L.ConvLSTM1D(3, 2), (4, 6, 2), steps=4)],
    "ConvLSTM2D": [Case(lambda: L.ConvLSTM2D(3, 3, padding="same"), (4, 6, 6, 2), steps=4)],
    "ConvLSTM3D": [Case(lambda: L.ConvLSTM3D(3, 2), (4, 3, 3, 3, 2), steps=4)],
    "Bidirectional": [Case(lambda: L.Bidirectional(L.SimpleRNN(7)), (5, 4), steps=5)],
    "TimeDistributed": [
        Case(lambda: L.TimeDistributed(L.Conv2D(2, 2)), (4, 5, 5, 3)),
        Case(lambda: L.TimeDistributed(L.SimpleRNN(2)), (2, 5, 3), steps=5),
    ],
    # In training it also multiplies the kernel by vectors, to normalise it, and normalisation is not counted.
    "SpectralNormalization": [Case(lambda: L.SpectralNormalization(L.Conv2D(2, 2)), (5, 5, 3), training=False)],
}
REPEATING = (L.RNN, L.Wrapper, L.Bidirectional, L.StackedRNNCells)


def counted_types():
    """Public layer types with a count in the table, and those that call other layers step by step."""
    for value in vars(L).values():
        if inspect.isclass(value) and issubclass(value, L.Layer) and value is not L.Wrapper:
            rows = [table._TABLE[base] for base in value.__mro__ if base in table._TABLE]
            if issubclass(value, REPEATING) or any(row.uses or row.products for row in rows):
                yield value


def test_every_counted_type_has_its_case():
    assert {getattr(L, name) for name in CASES} == set(counted_types())
    reached = {base for kind in counted_types() for base in kind.__mro__} | {type(L.ConvLSTM2D(1, 1).cell)}
    counted = [kind for kind, row in table._TABLE.items() if row.uses or row.products]
    assert [kind for kind in counted if kind not in reached and kind.__module__.startswith("keras.")] == []


def passes(model, *, training=True):
    """The graphs of a forward pass to a loss, and of a training step."""
    specs = [tf.TensorSpec((BATCH, *tensor.shape[1:]), tensor.dtype) for tensor in model.inputs]

    def forward(*inputs):
        outputs = model(inputs[0] if len(inputs) == 1 else list(inputs), training=training)
        return sum(tf.reduce_sum(tf.square(output)) for output in keras.tree.flatten(outputs))

    def step(*inputs):
        with tf.GradientTape() as tape:
            loss = forward(*inputs)
        return [loss, *tape.gradient(loss, model.trainable_variables)]

    return [tf.function(each, autograph=False).get_concrete_function(*specs) for each in (forward, step)]


def operations_in(model, steps=1, kinds=profiled.CONTRACTIONS, **options):
    """The operations of a forward pass, and of a training step, and how often each is done."""
    return [profiled.contractions(each, steps, kinds) for each in passes(model, **options)]


def the_profiler_agrees_on(operations):
    graphs = {id(operation.graph): operation.graph for operation in operations}
    figures = {key: profiled.profiled(graph) for key, graph in graphs.items()}
    for operation in operations:
        flops = figures[id(operation.graph)].get(operation.name, 0)
        assert flops == (profiled.flops_by_formula(operation) if operation.type in profiled.PROFILED else 0), operation


# Scores of additive attention are a product with a vector and a sum, and no operation that contracts.
def _scores(operation):
    return math.prod(operation.outputs[0].shape) if len(operation.outputs[0].shape) == 4 else 0


def dependences(case):
    """Which inputs depend on trained weights: none, each alone, all."""
    if case.dtype != "float32":
        return [(False,)]
    number = len(case.shapes)
    alone = [tuple(index == one for index in range(number)) for one in range(number)]
    return list(dict.fromkeys([(False,) * number, *alone, (True,) * number]))


PARAMETERS = [
    pytest.param(case, dependent, id=f"{name}-{index}-{''.join('ny'[each] for each in dependent)}")
    for name, cases in CASES.items()
    for index, case in enumerate(cases)
    for dependent in dependences(case)
]


@pytest.mark.parametrize(("case", "dependent"), PARAMETERS)
@pytest.mark.short(cases=20)
def test_counts_are_those_of_the_graphs_and_of_the_profiler(case, dependent):
    model = case.model(dependent)
    kinds = profiled.CONTRACTIONS
    if isinstance(case.make(), L.AdditiveAttention):
        kinds = kinds | {"Mul": _scores}
    forward, step = operations_in(model, case.steps, kinds, training=case.training)
    counted = cost(model, BATCH)
    assert counted.unknown == ()
    assert counted.macs == profiled.macs_of(forward, kinds) > 0
    assert counted.backward_macs == profiled.macs_of(step, kinds) - counted.macs
    the_profiler_agrees_on([operation for operation in step if operation.type in profiled.CONTRACTIONS])


def mixture():
    """A model of many layers, all inputs and weights of which have gradients but the first convolution's inputs."""
    inputs = keras.Input((8, 8, 3))
    hidden = L.BatchNormalization(name="norm")(L.Conv2D(4, 3, padding="same", name="first")(inputs))
    hidden = L.Add()([hidden, L.SeparableConv2D(4, 3, padding="same", name="separable")(hidden)])
    rows = L.Reshape((16, 16))(hidden)
    rows = L.LayerNormalization()(L.MultiHeadAttention(2, 3, name="attention")(rows, rows))
    return keras.Model(inputs, L.Dense(3, name="last")(L.SimpleRNN(5, name="loop")(rows)))


def stacked():
    inputs = keras.Input((16, 4))
    cells = [L.GRUCell(3, name="below"), L.LSTMCell(2, name="above")]
    return keras.Model(inputs, L.RNN(L.StackedRNNCells(cells), name="rnn")(inputs))


@pytest.mark.parametrize(
    ("build", "frozen"),
    [
        (mixture, ""),
        (mixture, "first separable"),
        (mixture, "attention"),
        (mixture, "query key"),
        (mixture, "first norm separable query key"),
        (mixture, "loop last"),
        (stacked, ""),
        (stacked, "below"),
        (stacked, "above"),
    ],
)
@pytest.mark.short(cases=4)
def test_a_frozen_layer_takes_what_no_gradient_needs_away(build, frozen):
    model = build()
    layers = [layer for layer in model._flatten_layers() if layer.name in frozen.split()]
    assert len(layers) == len(frozen.split())
    for layer in layers:
        layer.trainable = False
    forward, step = (profiled.macs_of(each) for each in operations_in(model, 16))
    counted = cost(model, BATCH)
    assert (counted.macs, counted.backward_macs) == (forward, step - forward)


@pytest.mark.parametrize("layer", [L.SimpleRNN, L.LSTM])
def test_an_unrolled_loop_costs_the_same_but_for_the_gradient_of_its_first_state(layer):
    model = keras.Sequential([keras.Input((5, 4)), L.PReLU(), layer(7, unroll=True)])
    forward, step = (profiled.macs_of(each) for each in operations_in(model))
    counted = cost(model, BATCH)
    cell = model.layers[-1].cell
    of_first_state = BATCH * math.prod(cell.recurrent_kernel.shape)
    assert (counted.macs, counted.backward_macs) == (forward, step - forward + of_first_state)


@pytest.mark.parametrize("frozen", ["", "separable loop"])
def test_what_a_step_depends_on_is_what_tensorflow_runs(frozen):
    """The graph after TensorFlow's own optimisation: loops taken apart, and all that no result needs removed."""
    context = pytest.importorskip("tensorflow.python.eager.context").context()
    model = mixture()
    for layer in model.layers:
        layer.trainable = layer.name not in frozen.split()
    step = passes(model)[1]
    wanted = Counter(operation.type for operation in profiled.contractions(step))
    context.enable_graph_collection()
    try:
        step(tf.ones((BATCH, 8, 8, 3)))
        run = context.export_run_metadata()
    finally:
        context.disable_graph_collection()
    # The others ran before, also in other tests.
    ran = Counter(node.op for node in run.function_graphs[-1].post_optimization_graph.node)
    fused = {"_FusedMatMul": "MatMul", "_FusedConv2D": "Conv2D", "_FusedBatchMatMulV2": "BatchMatMulV2"}
    assert wanted == Counter(
        {
            kind: sum(ran[name] for name in (kind, *[old for old, new in fused.items() if new == kind]))
            for kind in wanted
        }
    )


def test_a_dilated_convolution_counts_the_positions_that_it_puts_out():
    """Without such a kernel TensorFlow cuts the image into pieces, and pads them to one size: work that is no use."""
    model = keras.Sequential([keras.Input((9, 9, 4)), L.Conv2D(6, 3, dilation_rate=2)])
    assert cost(model, BATCH).macs == BATCH * 25 * 9 * 4 * 6
    assert profiled.macs_of(operations_in(model)[0]) == BATCH * 36 * 9 * 4 * 6
