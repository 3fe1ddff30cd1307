"""Which tensors are rounded, which share a grid, and which layers an integer kernel computes as one."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES
from keras import layers as L, ops
from placements import ranges_of, reads_of, units_of_main

from prunekit.techniques.quantize.placement.placement import place

CASES = {}


def case(ranges, units=None, reads=(), left=()):
    """Lists a function that returns a model, with what its placement must be."""

    def listed(function):
        CASES[function.__name__] = (function, ranges, units, list(reads), list(left))
        return function

    return listed


def functional(inputs, outputs):
    """Returns a model."""
    return keras.Model(inputs, outputs)


# ---- units -----------------------------------------------------------------------------------------------------------


@case(["x", "relu", "head"], ["conv+bn+relu", "head"])
def normalization_and_relu_belong_to_the_convolution():
    x = keras.Input((8, 8, 3), name="x")
    y = L.ReLU(name="relu")(L.BatchNormalization(name="bn")(L.Conv2D(4, 3, use_bias=False, name="conv")(x)))
    return functional(x, L.Conv2D(2, 1, name="head")(y))


@case(["x", "relu6"], ["conv+bn+relu6"])
def relu6_too():
    x = keras.Input((8, 8, 3), name="x")
    y = L.BatchNormalization(name="bn")(L.DepthwiseConv2D(3, name="conv")(x))
    return functional(x, L.Activation("relu6", name="relu6")(y))


@case(["x", "bn", "act"], ["conv+bn", "act"])
def another_activation_has_a_kernel_of_its_own():
    x = keras.Input((8, 8, 3), name="x")
    y = L.BatchNormalization(name="bn")(L.Conv2D(4, 3, name="conv")(x))
    return functional(x, L.Activation("silu", name="act")(y))


@case(["x", "dense (before its activation)", "dense [0, 1)"], ["dense"])
def an_activation_in_a_layer_that_needs_a_kernel_of_its_own():
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(3, activation="softmax", name="dense")(x))


@case(["x", "dense"], ["dense"])
def a_relu_in_a_layer_belongs_to_it():
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(3, activation="relu", name="dense")(x))


@case(["x", "conv", "relu", "add"], ["conv", "bn+relu", "add"])
def an_output_that_others_read_is_rounded():
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(3, 3, padding="same", name="conv")(x)
    z = L.ReLU(name="relu")(L.BatchNormalization(name="bn")(y))
    return functional(x, L.Add(name="add")([y, z]))


@case(["x", "conv", "bn", "relu"], ["conv", "bn", "relu"])
def outputs_of_the_model_are_rounded():
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(3, 3, padding="same", name="conv")(x)
    z = L.BatchNormalization(name="bn")(y)
    return functional(x, [y, z, L.ReLU(name="relu")(z)])


@case(["x", "relu", "bn"], ["conv+relu", "bn"])
def a_normalization_after_the_activation_stays_alone():
    x = keras.Input((8, 8, 3), name="x")
    y = L.ReLU(name="relu")(L.Conv2D(4, 3, name="conv")(x))
    return functional(x, L.BatchNormalization(name="bn")(y))


@case(["x", "conv"], ["conv", "bn"], left=["bn"])
def a_normalization_of_another_axis_stays_alone_and_in_floating_point():
    x = keras.Input((8, 8, 3), name="x")
    return functional(x, L.BatchNormalization(axis=1, name="bn")(L.Conv2D(4, 3, name="conv")(x)))


@case(["x", "conv", "first", "conv", "second", "add"], ["conv", "first", "conv", "second", "add"])
def a_convolution_that_is_called_twice_keeps_its_weights():
    x = keras.Input((8, 8, 3), name="x")
    conv = L.Conv2D(3, 1, name="conv")
    y = L.BatchNormalization(name="first")(conv(x))
    return functional(x, L.Add(name="add")([y, L.BatchNormalization(name="second")(conv(y))]))


@case(["x", "left", "right", "relu"], ["left", "right", "add+relu"])
def the_relu_after_a_sum_belongs_to_the_sum():
    x = keras.Input((8,), name="x")
    y = L.Add(name="add")([L.Dense(4, name="left")(x), L.Dense(4, name="right")(x)])
    return functional(x, L.ReLU(name="relu")(y))


@case(["x", "conv (inside)", "bn"], ["conv+bn"])
def between_the_two_convolutions_of_a_separable_one_is_a_range():
    x = keras.Input((8, 8, 3), name="x")
    return functional(x, L.BatchNormalization(name="bn")(L.SeparableConv2D(4, 3, name="conv")(x)))


@case(["x", "scale (inside)", "scale", "dense"], ["scale", "dense"])
def a_rescaling_multiplies_and_then_adds():
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(3, name="dense")(L.Rescaling(1 / 127.5, offset=-1, name="scale")(x)))


# ---- one grid for several tensors ------------------------------------------------------------------------------------


@case(["x", "left right (joined) (pooled) (flat)", "head"])
def concatenation_pooling_and_reshaping_share_a_grid():
    x = keras.Input((8, 8, 3), name="x")
    y = L.Concatenate(name="joined")([L.Conv2D(2, 3, name="left")(x), L.Conv2D(2, 3, name="right")(x)])
    y = L.Flatten(name="flat")(L.MaxPooling2D(name="pooled")(y))
    return functional(x, L.Dense(2, name="head")(y))


@case(["x (padded)", "conv average"])
def padding_shares_the_grid_of_an_input_and_an_average_is_rounded_on_it():
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(2, 3, name="conv")(L.ZeroPadding2D(name="padded")(x))
    return functional(x, L.AveragePooling2D(2, name="average")(y))


@case(["x", "a b (first) c (second)", "head"])
def joined_ranges_are_joined_again():
    x = keras.Input((8,), name="x")
    first = L.Concatenate(name="first")([L.Dense(2, name="a")(x), L.Dense(2, name="b")(x)])
    second = L.Concatenate(name="second")([first, L.Dense(2, name="c")(first)])
    return functional(x, L.Dense(1, name="head")(second))


@case(["x", "tanh [-1, 1)", "dense (joined)"], reads=["joined <- tanh"])
def a_prescribed_grid_is_left_where_others_are_joined():
    x = keras.Input((8,), name="x")
    y = L.Activation("tanh", name="tanh")(x)
    return functional(x, L.Concatenate(name="joined")([y, L.Dense(2, name="dense")(x)]))


@case(["x", "one two (joined) [0, 1)"])
def two_prescribed_grids():
    x = keras.Input((8,), name="x")
    y = [L.Activation("sigmoid", name=name)(x) for name in ("one", "two")]
    return functional(x, L.Concatenate(name="joined")(y))


@case(["x", "dense (dropped)", "head"])
def dropout_rounds_nothing():
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(1, name="head")(L.Dropout(0.5, name="dropped")(L.Dense(4, name="dense")(x))))


@case(["x (pooled)", "mean", "head"])
def an_average_over_positions_has_a_grid_of_its_own():
    x = keras.Input((8, 8, 3), name="x")
    y = L.GlobalAveragePooling2D(name="mean")(L.MaxPooling2D(name="pooled")(x))
    return functional(x, L.Dense(1, name="head")(y))


# ---- floating point --------------------------------------------------------------------------------------------------


@case(["x", "dense", "(norm)", "head"], reads=["head <- norm"], left=["norm"])
def a_tensor_in_floating_point_is_rounded_where_a_kernel_reads_it():
    x = keras.Input((4, 8), name="x")
    y = L.LayerNormalization(name="norm")(L.Dense(8, name="dense")(x))
    return functional(x, L.Dense(1, name="head")(y))


@case(["(norm)", "a", "b"], reads=["a <- norm", "b <- norm"], left=["norm"])
def an_input_that_no_kernel_reads_stays_in_floating_point():
    x = keras.Input((8,), name="x")
    y = L.LayerNormalization(name="norm")(x)
    return functional(x, [L.Dense(1, name="a")(y), L.Dense(1, name="b")(y)])


@case(["x", "dense (before its activation)"], left=["dense"])
def an_activation_without_a_kernel_leaves_its_results_in_floating_point():
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(3, activation="softplus", name="dense")(x))


@case(["(lstm)", "head"], reads=["head <- lstm"], left=["lstm"])
def recurrent_layers_compute_in_floating_point():
    x = keras.Input((4, 8), name="x")
    return functional(x, L.Dense(1, name="head")(L.LSTM(3, name="lstm")(x)))


@case(["x", "dense (where)", "total"])
def tokens_and_masks_are_no_values():
    x = keras.Input((4,), name="x")
    tokens = keras.Input((4,), dtype="int32", name="tokens")
    y = L.Dense(4, name="dense")(x)
    kept = ops.where(ops.greater(tokens, 0), y, 0.0)
    return functional([x, tokens], L.Dense(1, name="total")(kept))


@case(["x (lstm) (joined)", "(after)", "head"], reads=["joined <- lstm", "head <- after"], left=["lstm", "after"])
def an_input_that_shares_its_grid_with_a_float_tensor_keeps_it():
    x = keras.Input((4, 3), name="x")
    joined = L.Concatenate(name="joined")([x, L.LSTM(4, return_sequences=True, name="lstm")(x)])
    return functional(x, L.Dense(1, name="head")(L.LSTM(4, name="after")(joined)))


@case(["x dense (joined)"])
def an_input_that_shares_its_grid_with_outputs_of_a_kernel_keeps_it():
    x = keras.Input((3,), name="x")
    return functional(x, L.Concatenate(name="joined")([x, L.Dense(3, name="dense")(x)]))


@case(["x", "one [0, 1)", "two [-1, 1)", "(joined)"], reads=["joined <- one", "joined <- two"])
def different_prescribed_grids_are_rounded_again_on_one_from_the_data():
    x = keras.Input((8,), name="x")
    y = L.Activation("sigmoid", name="one")(x)
    return functional(x, L.Concatenate(name="joined")([y, L.Activation("tanh", name="two")(y)]))


@case(["x", "dense where", "total"])
def results_that_may_be_constants_are_rounded():
    x = keras.Input((4,), name="x")
    y = L.Dense(4, name="dense")(x)
    return functional(x, L.Dense(1, name="total")(ops.where(ops.greater(y, 0.0), y, -5.0)))


@case(["x", "dense pad", "total"])
def padding_with_a_number_is_rounded():
    x = keras.Input((4,), name="x")
    y = ops.pad(L.Dense(4, name="dense")(x), ((0, 0), (1, 1)), constant_values=1.0)
    return functional(x, L.Dense(1, name="total")(y))


@case(["x", "dense (pad)", "total"])
def padding_with_zeros_rounds_nothing():
    x = keras.Input((4,), name="x")
    y = ops.pad(L.Dense(4, name="dense")(x), ((0, 0), (1, 1)))
    return functional(x, L.Dense(1, name="total")(y))


@case(["x", "conv", "norm"], ["conv", "norm"])
def a_layer_with_a_loss_of_its_outputs_keeps_them():
    x = keras.Input((8, 8, 3), name="x")
    y = L.Conv2D(4, 3, activity_regularizer="l2", name="conv")(x)
    return functional(x, L.BatchNormalization(name="norm")(y))


# ---- nested models ---------------------------------------------------------------------------------------------------


@case(["x", "stem (inner_x)", "inside (inner)", "head"])
def a_nested_model_continues_the_grids_around_it():
    inner_x = keras.Input((8,), name="inner_x")
    inner = keras.Model(inner_x, L.Dense(4, name="inside")(inner_x), name="inner")
    x = keras.Input((8,), name="x")
    return functional(x, L.Dense(1, name="head")(inner(L.Dense(8, name="stem")(x))))


@case(
    ["tower_x", "inside (tower) (tower)", "sum"],
    reads=["tower <- x", "tower <- y"],
)
def a_model_that_is_called_twice_has_one_grid_for_its_input():
    tower_x = keras.Input((8,), name="tower_x")
    tower = keras.Model(tower_x, L.Dense(4, name="inside")(tower_x), name="tower")
    x, y = keras.Input((8,), name="x"), keras.Input((8,), name="y")
    return functional([x, y], L.Add(name="sum")([tower(x), tower(y)]))


@case(["(norm)", "inside (tower) (tower)", "sum"], reads=["inside <- norm"], left=["norm"])
def a_model_that_is_called_twice_and_starts_in_floating_point():
    tower_x = keras.Input((8,), name="tower_x")
    tower = keras.Model(tower_x, L.Dense(4, name="inside")(L.LayerNormalization(name="norm")(tower_x)), name="tower")
    x, y = keras.Input((8,), name="x"), keras.Input((8,), name="y")
    return functional([x, y], L.Add(name="sum")([tower(x), tower(y)]))


@case(["(tower)", "(tower)", "sum"], reads=["sum <- tower", "sum <- tower"], left=["inside"])
def a_model_of_tokens_that_is_called_twice():
    tower_x = keras.Input((8,), dtype="int32", name="tower_x")
    tower = keras.Model(tower_x, L.Embedding(5, 4, name="inside")(tower_x), name="tower")
    x, y = (keras.Input((8,), dtype="int32", name=name) for name in "xy")
    return functional([x, y], L.Add(name="sum")([tower(x), tower(y)]))


@pytest.mark.parametrize("name", CASES)
def test_ranges_and_units(name):
    model, ranges, units, reads, left = CASES[name]
    placement = place(model())
    # Keras orders calls of the same depth.
    assert sorted(ranges_of(placement)) == sorted(ranges)
    assert sorted(reads_of(placement)) == sorted(reads)
    assert [one.name for one in placement.skipped] == left
    if units is not None:
        assert units_of_main(placement) == units


# ---- families --------------------------------------------------------------------------------------------------------


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_tensor_that_an_integer_kernel_reads_is_on_a_grid(name):
    placement = place(ARCHITECTURES[name]())
    on_grid = {id(tensor) for one in placement.ranges for tensor in one.tensors if placement.written.get(id(tensor))}
    moved = {id(t) for units in placement.units.values() for u in units if u.rule.moves for t in u.outputs}
    inner = {id(t) for graph in placement.graphs.nested.values() for t in keras.tree.flatten(graph.inputs)}
    on_grid |= (moved | inner) & {id(tensor) for one in placement.ranges for tensor in one.tensors}
    for units in placement.units.values():
        for unit in units:
            if not unit.is_linear and unit.rule.output not in ("own", "fixed"):
                continue
            for tensor in unit.first.inputs:
                held = id(tensor) in on_grid or (id(unit), id(tensor)) in placement.read
                assert held or "float" not in tensor.dtype, (unit.name, tensor)


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_kernel_is_rounded_with_a_scale_for_each_of_its_outputs(name):
    model = ARCHITECTURES[name]()
    placement = place(model)
    rounded = {id(one.variable): one for one in placement.weights()}
    kernels = [one for one in model.weights if one.name.endswith(("kernel", "embeddings")) and len(one.shape) > 1]
    assert {id(one) for one in kernels} <= rounded.keys()
    for weight in rounded.values():
        shape = weight.granularity.parameter_shape(tuple(weight.variable.shape))
        assert 1 < np.prod(shape) < np.prod(weight.variable.shape) or 1 in weight.variable.shape


def test_the_model_and_its_graph_stay_as_they_are():
    model = ARCHITECTURES["transformer_encoder"]()
    layers = model._flatten_layers()
    nodes = {id(layer): len(layer._inbound_nodes) for layer in layers}
    names = [layer.name for layer in model._flatten_layers()]
    place(model)
    assert [layer.name for layer in model._flatten_layers()] == names
    assert all(len(layer._inbound_nodes) == nodes.get(id(layer), 0) for layer in model._flatten_layers())


def test_a_model_that_cannot_be_followed_is_refused():
    @keras.saving.register_keras_serializable("tests")
    class Branching(keras.Model):
        def call(self, x):
            return x * 2.0 if float(ops.sum(x)) > 0 else x

    model = Branching()
    model(np.ones((2, 3), "float32"))
    with pytest.raises(ValueError, match="has no graph of layers, and its `call` cannot be followed"):
        place(model)


def test_layers_with_lora_weights_stay_in_floating_point():
    model = keras.Sequential([keras.Input((8,)), L.Dense(4, name="dense"), L.Dense(2, name="head")])
    model.layers[0].enable_lora(2)
    placement = place(model)
    assert [(one.name, one.reason) for one in placement.skipped] == [("dense", "it has LoRA weights")]
