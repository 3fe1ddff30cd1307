import inspect
import re

import keras
import numpy as np
import pytest
from keras import layers as L

from prunekit.anatomy.layers import layers as table
from prunekit.anatomy.layers.layers import LayerShapes, own_variables, register_layer, spec_of, weights_of
from prunekit.anatomy.layers.weight_spec import WeightSpec

# Layers that hold another framework's code or file; their weights are unknown on purpose, and said to be so.
FOREIGN = {"FlaxLayer", "JaxLayer", "TorchModuleWrapper", "TFSMLayer"}
# No layer of their own: base classes, and the graph's entry.
ABSTRACT = {"Layer", "Wrapper", "InputLayer"}

IMAGE, SEQUENCE, VIDEO = (2, 8, 8, 3), (2, 5, 4), (2, 3, 6, 6, 6, 2)
EXAMPLES = {
    "Bidirectional": (lambda: L.Bidirectional(L.LSTM(3)), SEQUENCE),
    "Conv1D": (lambda: L.Conv1D(3, 2), SEQUENCE),
    "Conv1DTranspose": (lambda: L.Conv1DTranspose(3, 2), SEQUENCE),
    "Conv2D": (lambda: L.Conv2D(4, 2), IMAGE),
    "Conv2DTranspose": (lambda: L.Conv2DTranspose(3, 2), IMAGE),
    "Conv3D": (lambda: L.Conv3D(3, 2), VIDEO[1:]),
    "Conv3DTranspose": (lambda: L.Conv3DTranspose(3, 2), VIDEO[1:]),
    "ConvLSTM1D": (lambda: L.ConvLSTM1D(3, 2), (2, 3, 6, 2)),
    "ConvLSTM2D": (lambda: L.ConvLSTM2D(3, 2), (2, 3, 6, 6, 2)),
    "ConvLSTM3D": (lambda: L.ConvLSTM3D(3, 2), VIDEO),
    "Dense": (lambda: L.Dense(3), (2, 4)),
    "DepthwiseConv1D": (lambda: L.DepthwiseConv1D(2), SEQUENCE),
    "DepthwiseConv2D": (lambda: L.DepthwiseConv2D(2), IMAGE),
    "EinsumDense": (lambda: L.EinsumDense("abc,cde->abde", (None, 2, 3), bias_axes="de"), SEQUENCE),
    "Embedding": (lambda: L.Embedding(7, 3), (2, 5)),
    "GRU": (lambda: L.GRU(3), SEQUENCE),
    "GRUCell": (lambda: L.GRUCell(3), (2, 4)),
    "GroupNormalization": (lambda: L.GroupNormalization(groups=3), IMAGE),
    "GroupedQueryAttention": (lambda: L.GroupQueryAttention(4, 4, 2), [SEQUENCE, SEQUENCE]),
    "LSTM": (lambda: L.LSTM(3), SEQUENCE),
    "LSTMCell": (lambda: L.LSTMCell(3), (2, 4)),
    "MultiHeadAttention": (lambda: L.MultiHeadAttention(2, 3), [SEQUENCE, SEQUENCE]),
    "RNN": (lambda: L.RNN(L.GRUCell(3), stateful=True), SEQUENCE),
    "ReversibleEmbedding": (lambda: L.ReversibleEmbedding(7, 3, tie_weights=False), (2, 5)),
    "STFTSpectrogram": (lambda: L.STFTSpectrogram("log", 8, 4, 8), (2, 32)),
    "SeparableConv1D": (lambda: L.SeparableConv1D(3, 2), SEQUENCE),
    "SeparableConv2D": (lambda: L.SeparableConv2D(4, 2), IMAGE),
    "SimpleRNN": (lambda: L.SimpleRNN(3), SEQUENCE),
    "SimpleRNNCell": (lambda: L.SimpleRNNCell(3), (2, 4)),
    "SpectralNormalization": (lambda: L.SpectralNormalization(L.Dense(3)), (2, 4)),
    "StackedRNNCells": (lambda: L.StackedRNNCells([L.LSTMCell(3), L.GRUCell(2)]), (2, 4)),
    "TimeDistributed": (lambda: L.TimeDistributed(L.Dense(3)), SEQUENCE),
    # Every weight that an option adds.
    "Attention": (lambda: L.Attention(use_scale=True, score_mode="concat"), [SEQUENCE, SEQUENCE]),
    "AdditiveAttention": (lambda: L.AdditiveAttention(), [SEQUENCE, SEQUENCE]),
    "BatchNormalization": (lambda: L.BatchNormalization(renorm=True), IMAGE),
    "LayerNormalization": (lambda: L.LayerNormalization(), IMAGE),
    "Normalization": (lambda: L.Normalization(), (2, 4)),
    "PReLU": (lambda: L.PReLU(), (2, 4)),
    "RMSNormalization": (lambda: L.RMSNormalization(), (2, 4)),
    # Without weights, but with arguments that have no default.
    "ActivityRegularization": (lambda: L.ActivityRegularization(0.1), (2, 4)),
    "Discretization": (lambda: L.Discretization(bin_boundaries=[0.0, 1.0]), None),
    "StringLookup": (lambda: L.StringLookup(vocabulary=["a", "b"]), None),
    "IntegerLookup": (lambda: L.IntegerLookup(vocabulary=[1, 2]), None),
    "TextVectorization": (lambda: L.TextVectorization(vocabulary=["a", "b"]), None),
    "Lambda": (lambda: L.Lambda(lambda x: x), (2, 4)),
    "Pipeline": (lambda: L.Pipeline([built_dense(), L.Rescaling(2.0)]), None),
    "Activation": (lambda: L.Activation("relu"), (2, 4)),
    "Reshape": (lambda: L.Reshape((2, 2)), (2, 4)),
    "Permute": (lambda: L.Permute((2, 1)), SEQUENCE),
    "Dot": (lambda: L.Dot(1), [(2, 4), (2, 4)]),
}
# Constructors of the rest, tried in turn: nothing, one size, two sizes.
GUESSES = ((), (2,), (2, 2), (0.5,), (0.5, 0.5))


def public_layers():
    found = {cls.__name__: cls for _, cls in inspect.getmembers(L, inspect.isclass) if issubclass(cls, L.Layer)}
    return sorted(found.items())


# What the source of a layer says that creates variables, or layers that may have some.
CREATES = re.compile(r"add_weight\(|add_variable\(|\bVariable\(|Dense\(|Conv\dD\(|self\.cell\b|self\.layer\b")


def may_own_weights(cls):
    bases = cls.__mro__[: cls.__mro__.index(L.Layer)]
    sources = [inspect.getsource(base) for base in bases if base.__module__.startswith("keras")]
    return any(CREATES.search(re.sub(r'""".*?"""', "", source, flags=re.DOTALL)) for source in sources)


def construct(cls):
    for arguments in GUESSES:
        try:
            return cls(*arguments)
        except (TypeError, ValueError):
            continue
    raise AssertionError(f"give {cls.__name__} a row in EXAMPLES")


def try_to_build(layer):
    """Builds a layer that should have no weights on whatever shape it takes."""
    for shape in (IMAGE, SEQUENCE, (2, 4), [SEQUENCE, SEQUENCE], VIDEO[1:]):
        try:
            layer.build(shape)
            break
        except (TypeError, ValueError, AttributeError, IndexError, NotImplementedError):
            continue
    return layer


def built_dense():
    dense = L.Dense(3)
    dense.build((2, 4))
    return dense


def build(layer, shape):
    """Builds on one shape, on a list of them by calling, or not at all on None."""
    if isinstance(shape, tuple):
        layer.build(shape)
    elif shape is not None:
        arrays = [np.zeros(each) for each in shape]
        layer(*arrays) if "value" in inspect.signature(layer.call).parameters else layer(arrays)
    return layer


def all_layers(layer):
    return [layer] + [inner for child in table.sublayers(layer) for inner in all_layers(child)]


@pytest.mark.parametrize(("name", "cls"), public_layers(), ids=[name for name, _ in public_layers()])
def test_the_table_has_every_weight_of_every_layer_of_keras(name, cls):
    if name in FOREIGN | ABSTRACT:
        return
    if name in EXAMPLES:
        make, shape = EXAMPLES[name]
        layer = build(make(), shape)
    else:
        assert not may_own_weights(cls), f"{name} may own weights: give it a row in EXAMPLES"
        layer = try_to_build(construct(cls))
    owned = [(inner, *found) for inner in all_layers(layer) for found in weights_of(inner)]
    assert {id(variable) for _, variable, _, _ in owned} == {id(variable) for variable in layer.weights}
    unknown = [f"{type(inner).__name__}.{label}" for inner, _, label, spec in owned if spec.role == "unknown"]
    assert unknown == []
    if name not in EXAMPLES:
        assert owned == []


def test_the_table_has_the_weights_of_layers_that_keras_applications_define():
    layer = inspect.getmodule(keras.applications.ConvNeXtTiny).LayerScale(1e-6, 3)
    assert {label: spec.role for label, spec in specs(layer, IMAGE).items()} == {"gamma": "normalization"}


def specs(layer, shape):
    return {label: spec for inner in all_layers(build(layer, shape)) for _, label, spec in weights_of(inner)}


@pytest.mark.parametrize(
    ("layer", "shape", "attribute", "in_axes", "out_axes", "kernel_shape"),
    [
        (L.Dense(3), (2, 4), "kernel", (0,), (1,), (4, 3)),
        (L.Conv1D(3, 2), SEQUENCE, "kernel", (1,), (2,), (2, 4, 3)),
        (L.Conv2D(6, 2, groups=3), IMAGE, "kernel", (2,), (3,), (2, 2, 1, 6)),
        (L.Conv3D(5, 2), VIDEO[1:], "kernel", (3,), (4,), (2, 2, 2, 2, 5)),
        (L.Conv1DTranspose(3, 2), SEQUENCE, "kernel", (2,), (1,), (2, 3, 4)),
        (L.Conv2DTranspose(5, 2), IMAGE, "kernel", (3,), (2,), (2, 2, 5, 3)),
        (L.Conv3DTranspose(5, 2), VIDEO[1:], "kernel", (4,), (3,), (2, 2, 2, 5, 2)),
        (L.DepthwiseConv1D(2, depth_multiplier=2), SEQUENCE, "kernel", (), (1, 2), (2, 4, 2)),
        (L.DepthwiseConv2D(2), IMAGE, "kernel", (), (2, 3), (2, 2, 3, 1)),
        (L.SeparableConv2D(5, 2), IMAGE, "depthwise_kernel", (), (2, 3), (2, 2, 3, 1)),
        (L.SeparableConv2D(5, 2), IMAGE, "pointwise_kernel", (2,), (3,), (1, 1, 3, 5)),
        (L.Embedding(7, 3), (2, 5), "embeddings", (0,), (1,), (7, 3)),
        (L.ReversibleEmbedding(7, 3, tie_weights=False), (2, 5), "reverse_embeddings", (0,), (1,), (3, 7)),
        (L.LSTM(3), SEQUENCE, "kernel", (0,), (1,), (4, 12)),
        (L.GRU(3), SEQUENCE, "recurrent_kernel", (0,), (1,), (3, 9)),
        (L.ConvLSTM2D(3, 2), (2, 3, 6, 6, 2), "recurrent_kernel", (2,), (3,), (2, 2, 3, 12)),
        (L.EinsumDense("ab,bc->ac", 3), (2, 4), "kernel", (0,), (1,), (4, 3)),
        (L.EinsumDense("...x,xy->...y", 3), (2, 5, 4), "kernel", (0,), (1,), (4, 3)),
        (L.EinsumDense("abc,cde->abde", (None, 2, 3)), SEQUENCE, "kernel", (0,), (1, 2), (4, 2, 3)),
        (L.EinsumDense("abcd,cde->abe", (None, 3)), (2, 5, 4, 2), "kernel", (0, 1), (2,), (4, 2, 3)),
        (L.EinsumDense("abc,bcd->abd", (5, 3)), SEQUENCE, "kernel", (1,), (2,), (5, 4, 3)),
        (L.EinsumDense("ab,cb->ac", 3), (2, 4), "kernel", (1,), (0,), (3, 4)),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, L.Layer) else None,
)
def test_kernels_know_their_input_and_output_axes(layer, shape, attribute, in_axes, out_axes, kernel_shape):
    build(layer, shape)
    variables = {label: variable for inner in all_layers(layer) for variable, label, _ in weights_of(inner)}
    spec = specs(layer, None)[attribute]
    assert (spec.in_axes, spec.out_axes) == (in_axes, out_axes)
    assert tuple(variables[attribute].shape) == kernel_shape


def test_roles_and_what_is_pruned_by_default():
    found = specs(L.SeparableConv2D(5, 2), IMAGE)
    assert {label: (spec.role, spec.prunable) for label, spec in found.items()} == {
        "depthwise_kernel": ("depthwise_kernel", False),
        "pointwise_kernel": ("kernel", True),
        "bias": ("bias", False),
    }
    found = specs(L.LSTM(3), SEQUENCE)
    assert {label: (spec.role, spec.prunable) for label, spec in found.items()} == {
        "kernel": ("kernel", True),
        "recurrent_kernel": ("recurrent_kernel", True),
        "bias": ("bias", False),
    }
    found = specs(L.BatchNormalization(), IMAGE)
    assert {label: (spec.role, bool(spec.refused)) for label, spec in found.items()} == {
        "gamma": ("normalization", False),
        "beta": ("normalization", False),
        "moving_mean": ("normalization", True),
        "moving_variance": ("normalization", True),
    }
    assert specs(L.PReLU(), (2, 4))["alpha"].refused


def test_the_state_of_random_seeds_and_metrics_is_no_weight():
    dropout = build(L.Dropout(0.5), (2, 4))
    assert dropout.variables != []
    assert weights_of(dropout) == []
    model = keras.Sequential([keras.Input((3,)), L.Dropout(0.5), L.Dense(2)])
    model.compile("adam", "mse", metrics=["mae"])
    model.train_on_batch(np.ones((2, 3)), np.ones((2, 2)))
    assert [label for inner in all_layers(model) for _, label, _ in weights_of(inner)] == ["kernel", "bias"]


def test_a_wrapper_that_holds_its_layers_kernel_does_not_own_it():
    wrapper = build(L.SpectralNormalization(L.Conv2D(2, 2)), IMAGE)
    assert [label for _, label, _ in weights_of(wrapper)] == ["vector_u"]
    assert [label for _, label, _ in weights_of(wrapper.layer)] == ["kernel", "bias"]


def test_a_subclass_inherits_and_what_it_adds_is_unknown():
    class Gated(L.Dense):
        def build(self, shape):
            super().build(shape)
            self.gate = self.add_weight(shape=(2, 3, 5))

    found = specs(Gated(3), (2, 4))
    assert (found["kernel"].role, found["kernel"].in_axes) == ("kernel", (0,))
    assert (found["gate"].role, found["gate"].in_axes, found["gate"].out_axes) == ("unknown", (0, 1), (2,))
    assert not found["gate"].prunable


def test_a_registered_layer_can_count_from_the_end_and_may_have_a_leading_underscore(monkeypatch):
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))

    class Twice(L.Layer):
        def build(self, shape):
            self._matrix = self.add_weight(shape=(2, shape[-1], 3))

        def call(self, inputs):
            return keras.ops.sum(keras.ops.einsum("bi,kiu->kbu", inputs, self._matrix), axis=0)

    register_layer(Twice, uses=lambda layer, call: call.inputs[0][0], _matrix=WeightSpec())
    layer = build(Twice(), (2, 4))
    ((variable, label, spec),) = weights_of(layer)
    assert (label, spec.in_axes, spec.out_axes) == ("matrix", (1,), (2,))
    assert table.macs(layer, LayerShapes(((5, 4),), ((5, 3),))) == ({"matrix": 5}, ())


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"role": "kernal"}, ValueError, "role is one of kernel, .*Received: role='kernal'"),
        ({"in_axes": (0,), "out_axes": (0,)}, ValueError, "must all be different"),
        ({"prunable": True, "refused": "no"}, ValueError, "refused cannot be prunable"),
        ({"groups": 0}, ValueError, "at least one group of output units. Received: groups=0"),
    ],
)
def test_an_impossible_spec_is_refused(arguments, error, message):
    with pytest.raises(error, match=message):
        WeightSpec(**arguments)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (WeightSpec("kernel", (2,), (1,)), r"do not exist in it. Received: axes \[2\] for shape \(4, 3\)"),
        (WeightSpec("kernel", (-1,), (1,)), "both as input and as output"),
        (WeightSpec(parallel_axes=(5,)), r"do not exist in it. Received: axes \[5\]"),
        (WeightSpec(groups=2), r"do not fall into 2 equal groups. Received: out_axes=\(-1,\) for shape \(4, 3\)"),
    ],
)
def test_registered_axes_that_the_weight_does_not_have_are_refused_where_it_is_met(monkeypatch, spec, message):
    monkeypatch.setattr(table, "_TABLE", dict(table._TABLE))

    class Mine(L.Dense):
        pass

    register_layer(Mine, kernel=spec)
    with pytest.raises(ValueError, match=message):
        specs(Mine(3), (2, 4))


def test_only_layer_types_and_weight_specs_can_be_registered():
    with pytest.raises(TypeError, match="subclass of keras.layers.Layer. Received: 'Dense'"):
        register_layer("Dense")
    with pytest.raises(TypeError, match="takes a WeightSpec for each weight. Received: kernel='kernel'"):
        register_layer(L.Dense, kernel="kernel")


def test_weights_that_are_in_no_attribute_go_by_their_own_name():
    class Hidden(L.Layer):
        def build(self, shape):
            self.add_weight(shape=(2,), name="nameless")

    layer = build(Hidden(), (2, 4))
    assert [(attribute, label) for _, attribute, label in own_variables(layer)] == [("nameless", "nameless")]
    assert spec_of(layer, "nameless", layer.weights[0]).out_axes == (0,)
