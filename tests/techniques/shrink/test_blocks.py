"""Blocks are found where shapes allow it, ranked by the change of the outputs, and removed."""

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from block_models import built, relative_change, rows_by_name
from keras import layers as L, ops

import prunekit as pk
from prunekit.techniques.shrink.graph.layer_graph import LayerGraph
from prunekit.techniques.shrink.layers.blocks import LAYERS, RESIDUAL, find_blocks


def found_in(model):
    blocks, left = find_blocks(LayerGraph(model))
    return [(block.name, block.kind) for block in blocks], left


WITH_BLOCKS = {
    "grouped": 1,
    "resnet20": 7,
    "bottleneck": 2,
    "mobilenetv2": 4,
    "efficientnet_v2": 5,
    "squeeze_keepdims": 1,
    "rms_norm": 1,
    "transformer_encoder": 4,
    "rms_decoder": 4,
    "tied": 1,
    "residual_mlp": 2,
    "subclassed_block": 1,
}


@pytest.mark.short(cases=12)
@pytest.mark.parametrize("name", [name for name in ARCHITECTURES if name != "subclassed_model"])
def test_the_blocks_of_every_architecture_are_found(name):
    assert len(found_in(ARCHITECTURES[name]())[0]) == WITH_BLOCKS.get(name, 0)


@pytest.mark.parametrize("name", WITH_BLOCKS)
def test_the_measured_change_is_that_of_the_new_model(name):
    model, inputs = built(name)
    before = model.get_weights()
    number = min(2, WITH_BLOCKS[name])
    smaller, report = pk.remove_blocks(model, number, inputs)
    last = next(row for row in report.blocks if row.removed == number)
    assert relative_change(model, smaller, inputs) == pytest.approx(last.total_change, rel=1e-3, abs=1e-9)
    assert report.parameters == (model.count_params(), smaller.count_params())
    removed = [row for row in report.blocks if row.removed]
    assert smaller.count_params() >= model.count_params() - sum(row.parameters for row in removed)
    for one, other in zip(model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_first_removed_block_is_the_one_with_the_least_change():
    model, inputs = built("resnet20")
    _, report = pk.remove_blocks(model, 1, inputs)
    least = min(report.blocks, key=lambda row: row.change)
    assert report.removed == (least.name,)
    assert least.total_change == least.change


@pytest.mark.thorough
def test_each_change_is_that_of_removing_the_block_alone():
    model, inputs = built("transformer_encoder")
    _, report = pk.remove_blocks(model, 1, inputs)
    for row in report.blocks:
        smaller, alone = pk.remove_blocks(model, 1, inputs, include=row.name)
        assert alone.removed == (row.name,)
        assert relative_change(model, smaller, inputs) == pytest.approx(row.change, rel=1e-3)


def test_blocks_are_ranked_again_after_each_removal():
    inputs = keras.Input((6,))
    x = inputs
    # The second branch undoes the first, so that each alone matters, and neither does without the other.
    for number in range(3):
        x = L.Add(name=f"add{number}")([x, L.Dense(6, use_bias=False, name=f"dense{number}")(x)])
    model = randomize(keras.Model(inputs, L.Dense(4, name="head")(x)))
    shift = np.zeros((6, 6), "float32")
    shift[0, 5] = 2
    model.get_layer("dense0").kernel.assign(shift)
    model.get_layer("dense1").kernel.assign(-shift)
    model.get_layer("dense2").kernel.assign(np.eye(6) * 0.3)
    found = np.random.default_rng(0).normal(size=(50, 6)).astype("float32")
    smaller, report = pk.remove_blocks(model, 3, found)
    rows = rows_by_name(report)
    assert rows["add0"].change > 0.1 and rows["add1"].change > 0.1
    assert report.removed[0] == "add2" and rows[report.removed[2]].total_change == pytest.approx(
        rows["add2"].total_change, rel=1e-3
    )
    assert [layer.name for layer in smaller.layers[1:]] == ["head"]


def test_the_parameters_and_multiply_accumulates_of_a_block_are_those_that_go():
    model, inputs = built("resnet20")
    smaller, report = pk.remove_blocks(model, 1, inputs)
    (row,) = [row for row in report.blocks if row.removed]
    assert model.count_params() - smaller.count_params() == row.parameters
    assert pk.cost(model).macs - pk.cost(smaller).macs == row.macs
    assert report.macs == (pk.cost(model).macs, pk.cost(smaller).macs)


def test_a_layer_that_is_called_outside_the_block_too_is_not_counted():
    inputs = keras.Input((6,))
    shared = L.Dense(6, name="shared")
    x = L.Add(name="sum")([inputs, L.Dense(6, name="own")(ops.tanh(shared(inputs)))])
    model = keras.Model(inputs, L.Dense(3)(shared(x)))
    _, report = pk.remove_blocks(model, 1, inputs_of(model), include="sum")
    row = rows_by_name(report)["sum"]
    assert row.parameters == 42 and "shared" not in row.layers and "own" in row.layers


# ---- what is found ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("add", [lambda *xs: L.Add(name="sum")(list(xs)), ops.add, lambda x, y: x + y])
@pytest.mark.parametrize("first", ["shortcut", "branch"])
def test_either_summand_may_be_the_shortcut(add, first):
    inputs = keras.Input((6,))
    x = L.Dense(5)(inputs)
    y = L.Dense(5)(L.ReLU()(L.Dense(9)(x)))
    model = keras.Model(inputs, L.Dense(3)(add(x, y) if first == "shortcut" else add(y, x)))
    assert [kind for _, kind in found_in(model)[0]] == [RESIDUAL]


def test_a_run_of_layers_ends_where_the_shape_is_the_first_one():
    model = stack(
        (8, 7, 6),
        L.Conv2D(5, 3, padding="same", name="one"),
        L.BatchNormalization(),
        L.ReLU(),
        L.Conv2D(5, 3, padding="same", name="two"),
        L.BatchNormalization(name="two_bn"),
        L.ReLU(name="two_relu"),
        L.MaxPooling2D(),
        L.Conv2D(9, 1, name="wide"),
        L.Conv2D(5, 1, name="narrow"),
        L.Flatten(),
        L.Dense(4, name="head"),
    )
    blocks, _ = find_blocks(LayerGraph(model))
    assert [(block.name, block.kind) for block in blocks] == [("two", LAYERS), ("wide", LAYERS)]
    assert [call.name for call in blocks[0].calls] == ["two", "two_bn", "two_relu"]
    assert [call.name for call in blocks[1].calls] == ["wide", "narrow"]


def test_overlapping_runs_are_not_both_removed():
    model = stack((6,), *(L.Dense(width, activation="tanh", name=f"d{i}") for i, width in enumerate((4, 9, 4, 9, 3))))
    randomize(model)
    inputs = inputs_of(model)
    _, report = pk.remove_blocks(model, 1, inputs)
    assert len(report.blocks) == 2
    with pytest.raises(ValueError, match="blocks=2; 1 can be removed: d"):
        pk.remove_blocks(model, 2, inputs)


def test_blocks_inside_a_nested_model_are_removed_there():
    inner_input = keras.Input((5,))
    y = L.Add(name="inner_sum")([inner_input, L.Dense(5, name="inner_dense")(L.LayerNormalization()(inner_input))])
    inner = keras.Model(inner_input, L.ReLU(name="inner_relu")(y), name="inner")
    model = randomize(stack((6,), L.Dense(5, name="stem"), inner, L.Dense(3, name="head")))
    inputs = inputs_of(model)
    smaller, report = pk.remove_blocks(model, 1, inputs, include="inner_sum")
    assert [layer.name for layer in smaller.get_layer("inner").layers[1:]] == ["inner_relu"]
    assert relative_change(model, smaller, inputs) == pytest.approx(report.blocks[0].change, rel=1e-3)


def test_a_nested_model_that_is_called_twice_is_no_place_for_removals():
    inner_input = keras.Input((5,))
    inner = keras.Model(inner_input, L.ReLU()(inner_input + L.Dense(5)(inner_input)), name="inner")
    one, two = keras.Input((5,)), keras.Input((5,))
    blocks, left = found_in(keras.Model([one, two], L.Dot(-1)([inner(one), inner(two)])))
    assert not blocks
    assert ("inner", "the model is called several times") in [(item.name, item.reason) for item in left]


def branch_with_output(x):
    hidden = L.Dense(5, name="hidden")(x)
    return [hidden, L.Dense(3)(L.Add(name="sum")([x, L.Dense(5)(hidden)]))]


def branch_read_outside(x):
    hidden = L.Dense(5, name="hidden")(x)
    return L.Concatenate()([hidden, L.Add(name="sum")([x, L.Dense(5)(hidden)])])


def branch_reading_outside(x):
    other = ops.tanh(x)
    return L.Concatenate()([other, L.Add(name="sum")([x, L.Dense(5)(ops.sin(x) * other)])])


def projection(x):
    return L.Dense(3)(L.Add(name="sum")([L.Dense(6)(x), L.Dense(6)(ops.tanh(x))]))


@pytest.mark.parametrize("make", [branch_with_output, branch_read_outside, branch_reading_outside, projection])
def test_a_branch_that_others_need_is_no_candidate(make):
    inputs = keras.Input((5,))
    x = L.Activation("tanh")(inputs)
    assert ("sum", RESIDUAL) not in found_in(keras.Model(inputs, make(x)))[0]


def test_a_layer_with_several_outputs_is_no_part_of_a_block():
    inputs = keras.Input((6, 4))
    x = L.Dense(5)(inputs)
    sequence, _ = L.GRU(5, return_sequences=True, return_state=True)(x)
    model = keras.Model(inputs, L.Dense(3)(L.Flatten()(L.Add(name="sum")([x, sequence]))))
    blocks, left = found_in(model)
    assert ("sum", RESIDUAL) not in blocks
    assert any(one.name == "sum" and "several outputs" in one.reason for one in left)


@pytest.mark.filterwarnings("ignore:Layer 'reshape:UserWarning")
def test_a_block_that_changes_the_mask_is_no_candidate():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 4, mask_zero=True)(inputs)
    x = L.Add(name="sum")([x, L.Reshape((6, 4), name="reshape")(L.Dense(4)(x))])
    blocks, left = found_in(keras.Model(inputs, L.GlobalAveragePooling1D()(x)))
    assert not blocks
    assert any(one.name == "sum" and "mask" in one.reason for one in left)


def test_a_masked_block_that_keeps_the_mask_is_removed():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 4, mask_zero=True)(inputs)
    for number in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add(name=f"sum{number}")([x, L.MultiHeadAttention(2, 3)(y, y)])
    model = randomize(keras.Model(inputs, L.GlobalAveragePooling1D()(x)))
    tokens = np.array([[3, 4, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]], "int32")
    smaller, report = pk.remove_blocks(model, 1, tokens)
    assert [row.name for row in report.blocks] == ["sum0", "sum1"]
    total = max(row.total_change or 0 for row in report.blocks)
    assert relative_change(model, smaller, tokens) == pytest.approx(total, rel=1e-3)


def test_the_head_is_no_candidate():
    model = stack((5,), L.Dense(5, name="first"), L.Dense(5, name="head"))
    blocks, left = found_in(model)
    assert blocks == [("first", LAYERS)]
    assert [(one.name, one.reason) for one in left] == [("head", "it computes an output of the model")]
