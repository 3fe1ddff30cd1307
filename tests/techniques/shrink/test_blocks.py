"""Blocks are found where shapes allow it, ranked by the change of the outputs, and removed."""

import json

import keras
import numpy as np
import pytest
from architectures import ARCHITECTURES, inputs_of, randomize, stack
from keras import layers as L
from keras import ops
from without_prunekit import outputs_of_file

import prunekit as pk
from prunekit.techniques.shrink.blocks import LAYERS, RESIDUAL, find_blocks
from prunekit.techniques.shrink.layer_graph import LayerGraph


def outputs(model, inputs):
    return [ops.convert_to_numpy(one) for one in keras.tree.flatten(model(inputs, training=False))]


def relative_change(model, other, inputs):
    pairs = zip(outputs(model, inputs), outputs(other, inputs), strict=True)
    return np.mean([np.square(one - two).sum() / np.square(one).sum() for one, two in pairs])


def built(name):
    model = ARCHITECTURES[name]()
    randomize(model)
    return model, inputs_of(model, seed=1, examples=6)


def found_in(model):
    blocks, left = find_blocks(LayerGraph(model))
    return [(block.name, block.kind) for block in blocks], left


def rows_by_name(report):
    return {row.name: row for row in report.blocks}


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
    model = keras.Model(inputs, L.Dense(4, name="head")(x))
    randomize(model)
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
    with pytest.raises(ValueError, match="number=2; 1 can be removed: d"):
        pk.remove_blocks(model, 2, inputs)


def test_blocks_inside_a_nested_model_are_removed_there():
    inner_input = keras.Input((5,))
    y = L.Add(name="inner_sum")([inner_input, L.Dense(5, name="inner_dense")(L.LayerNormalization()(inner_input))])
    inner = keras.Model(inner_input, L.ReLU(name="inner_relu")(y), name="inner")
    model = stack((6,), L.Dense(5, name="stem"), inner, L.Dense(3, name="head"))
    randomize(model)
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
    assert ("inner", "the model is called several times") in [(item.layer, item.reason) for item in left]


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
    assert any(one.layer == "sum" and "several outputs" in one.reason for one in left)


@pytest.mark.filterwarnings("ignore:Layer 'reshape:UserWarning")
def test_a_block_that_changes_the_mask_is_no_candidate():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 4, mask_zero=True)(inputs)
    x = L.Add(name="sum")([x, L.Reshape((6, 4), name="reshape")(L.Dense(4)(x))])
    blocks, left = found_in(keras.Model(inputs, L.GlobalAveragePooling1D()(x)))
    assert not blocks
    assert any(one.layer == "sum" and "mask" in one.reason for one in left)


def test_a_masked_block_that_keeps_the_mask_is_removed():
    inputs = keras.Input((6,), dtype="int32")
    x = L.Embedding(20, 4, mask_zero=True)(inputs)
    for number in range(2):
        y = L.LayerNormalization()(x)
        x = L.Add(name=f"sum{number}")([x, L.MultiHeadAttention(2, 3)(y, y)])
    model = keras.Model(inputs, L.GlobalAveragePooling1D()(x))
    randomize(model)
    tokens = np.array([[3, 4, 0, 0, 0, 0], [1, 2, 3, 4, 5, 0]], "int32")
    smaller, report = pk.remove_blocks(model, 1, tokens)
    assert [row.name for row in report.blocks] == ["sum0", "sum1"]
    total = max(row.total_change or 0 for row in report.blocks)
    assert relative_change(model, smaller, tokens) == pytest.approx(total, rel=1e-3)


def test_the_head_is_no_candidate():
    model = stack((5,), L.Dense(5, name="first"), L.Dense(5, name="head"))
    blocks, left = found_in(model)
    assert blocks == [("first", LAYERS)]
    assert [(one.layer, one.reason) for one in left] == [("head", "it computes an output of the model")]


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_include_and_exclude_select_by_names_of_blocks_and_layers():
    model, inputs = built("resnet20")
    _, report = pk.remove_blocks(model, 1, inputs, include="stage1*", exclude=["stage1_block1_first"])
    assert [row.name for row in report.blocks] == ["stage1_block2_add"]
    reasons = {one.layer: one.reason for one in report.left}
    assert reasons["stage1_block1_add"] == "excluded"
    assert reasons["stage0_block0_add"] == "not matched by include"
    with pytest.raises(ValueError, match=r"`include`.*'stage7\*'.*matches none"):
        pk.remove_blocks(model, 1, inputs, include="stage7*")


def test_without_data_nothing_is_removed():
    with pytest.raises(ValueError, match="needs calibration data: how much a block changes the outputs cannot be read"):
        pk.remove_blocks(built("resnet20")[0], 1)


def test_more_blocks_than_there_are_is_refused():
    model, inputs = built("rms_norm")
    with pytest.raises(ValueError, match=r"number=2; 1 can be removed"):
        pk.remove_blocks(model, 2, inputs)
    with pytest.raises(ValueError, match="number"):
        pk.remove_blocks(model, 0, inputs)


def test_a_model_without_a_graph_is_refused():
    model, inputs = built("subclassed_model")
    with pytest.raises(ValueError, match=r"graph of a Sequential or functional model.*Perceptron"):
        pk.remove_blocks(model, 1, inputs)


def test_data_with_too_few_inputs_are_refused():
    model, inputs = built("two_towers")
    with pytest.raises(ValueError, match=r"are user, item. Received: calibration data of 1 inputs"):
        pk.remove_blocks(model, 1, inputs)


def test_several_batches_and_labels_are_accepted():
    model, inputs = built("residual_mlp")
    whole = pk.remove_blocks(model, 1, inputs)[1]
    parts = pk.remove_blocks(model, 1, [(inputs[:2], np.zeros(2)), (inputs[2:], np.zeros(4))])[1]
    for one, other in zip(whole.blocks, parts.blocks, strict=True):
        assert one.change == pytest.approx(other.change, rel=1e-5)


# ---- the result ------------------------------------------------------------------------------------------------------


def test_a_sequential_model_stays_sequential():
    model = keras.Sequential([keras.Input((5,)), L.Dense(5, "relu"), L.Dense(5, "relu"), L.Dense(2)])
    smaller, report = pk.remove_blocks(model, 1, np.ones((4, 5), "float32"))
    assert isinstance(smaller, keras.Sequential) and len(smaller.layers) == 2


def test_the_result_is_compiled_and_trains():
    model, inputs = built("residual_mlp")
    model.compile(keras.optimizers.SGD(0.02), "mse")
    model.fit(inputs, np.zeros((6, 9)), verbose=0)
    smaller, report = pk.remove_blocks(model, 1, inputs)
    assert float(smaller.optimizer.learning_rate) == pytest.approx(0.02)
    assert not any("optimizer" in note for note in report.notes)
    before = smaller.evaluate(inputs, np.zeros((6, 9)), verbose=0)
    smaller.fit(inputs, np.zeros((6, 9)), epochs=5, verbose=0)
    assert smaller.evaluate(inputs, np.zeros((6, 9)), verbose=0) < before


def test_a_model_that_no_block_changes_has_a_note():
    model, inputs = built("residual_mlp")
    head = keras.Model(model.inputs, L.Dense(3, kernel_initializer="zeros")(model.outputs[0]))
    _, report = pk.remove_blocks(head, 1, inputs)
    assert "the choice is arbitrary. Is the model trained?" in " ".join(report.notes)
    _, report = pk.remove_blocks(built("residual_mlp")[0], 1, inputs)
    assert "arbitrary" not in " ".join(report.notes)


def test_data_of_another_shape_are_refused():
    inputs = keras.Input((16, 16, 3), name="image")
    x = L.Conv2D(4, 3, padding="same")(inputs)
    x = L.Add()([x, L.Conv2D(4, 3, padding="same")(x)])
    model = keras.Model(inputs, L.Dense(2)(L.GlobalAveragePooling2D()(x)))
    with pytest.raises(ValueError, match=r"'image' is \(None, 16, 16, 3\), .* data of shape \(2, 8, 8, 3\)"):
        pk.remove_blocks(model, 1, np.ones((2, 8, 8, 3), "float32"))


def state_by_weight(optimizer):
    """Returns {(path of a weight, name of the optimizer's list): value}."""
    trained = optimizer._trainable_variables
    held = {name: value for name, value in vars(optimizer).items() if isinstance(value, list | tuple)}
    lists = {
        name: value for name, value in held.items() if len(value) == len(trained) and name != "_trainable_variables"
    }
    return {
        (weight.path, name): np.array(slot)
        for name, value in lists.items()
        for weight, slot in zip(trained, value, strict=True)
    }


@pytest.mark.every_backend
@pytest.mark.parametrize("optimizer", ["adam", "adafactor", "averages"])
def test_the_optimizer_keeps_the_state_of_the_layers_that_stay(optimizer):
    model, inputs = built("residual_mlp")
    chosen = keras.optimizers.Adam(0.01, use_ema=True) if optimizer == "averages" else optimizer
    model.compile(chosen, "mse")
    model.fit(inputs, np.zeros((6, 9)), epochs=2, verbose=0)
    smaller, report = pk.remove_blocks(model, 1, inputs)
    assert int(smaller.optimizer.iterations) == int(model.optimizer.iterations) == 2
    assert smaller.optimizer is not model.optimizer and not any("optimizer" in note for note in report.notes)
    former, left = state_by_weight(model.optimizer), state_by_weight(smaller.optimizer)
    assert len(left) < len(former) and left.keys() <= former.keys()
    for key, value in left.items():
        np.testing.assert_array_equal(value, former[key], err_msg=str(key))
    assert sum(bool(value.any()) for value in left.values()) >= len(left) / 2
    smaller.fit(inputs, np.zeros((6, 9)), verbose=0)


def test_the_saved_file_loads_without_prunekit(tmp_path):
    model, inputs = built("resnet20")
    smaller, _ = pk.remove_blocks(model, 2, inputs)
    np.testing.assert_allclose(outputs_of_file(smaller, inputs, tmp_path), outputs(smaller, inputs)[0], atol=1e-5)


def test_the_report_lists_every_candidate():
    model, inputs = built("resnet20")
    report = pk.remove_blocks(model, 2, inputs)[1]
    assert str(report).count("residual branch") == 7
    assert str(report).count("removed as number") == 2
    found = report.to_dict()
    assert len(found["blocks"]) == 7 and found["layers"][0] == 72
    assert len(report.sections()[0].rows) == 7
    assert "Blocks" in report._repr_html_()


@pytest.mark.thorough
def test_resnet50_has_twelve_removable_blocks():
    model = keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=7)
    randomize(model)
    inputs = inputs_of(model, examples=4)
    smaller, report = pk.remove_blocks(model, 2, inputs, include="*_add")
    assert sum(row.kind == RESIDUAL for row in report.blocks) == 12
    last = next(row for row in report.blocks if row.removed == 2)
    assert relative_change(model, smaller, inputs) == pytest.approx(last.total_change, rel=1e-2, abs=1e-6)


# ---- data and models that mislead ------------------------------------------------------------------------------------


class Sampling(L.Layer):
    """Adds random numbers, in inference too, as the sampling layer of a variational autoencoder does."""

    def __init__(self, **options):
        super().__init__(**options)
        self.seed = keras.random.SeedGenerator(1)

    def call(self, x):
        return x + keras.random.normal(ops.shape(x), seed=self.seed)


@pytest.mark.every_backend
def test_every_block_is_measured_with_the_same_random_numbers_and_the_seeds_stay():
    inputs = keras.Input((8,))
    x = L.Dense(12)(inputs)
    for name, kernel in (("one", "glorot_uniform"), ("nothing", "zeros"), ("other", "glorot_uniform")):
        x = L.Add(name=name)([x, L.Dense(12, kernel_initializer=kernel)(x)])
    model = keras.Model(inputs, Sampling(name="noise")(L.Dense(3)(x)))
    seed = model.get_layer("noise").seed.state
    before = ops.convert_to_numpy(seed).tolist()
    data = np.random.default_rng(0).normal(size=(100, 8)).astype("float32")
    first, second = (pk.remove_blocks(model, 1, data)[1] for _ in range(2))
    assert first == second and first.removed == ("nothing",) and rows_by_name(first)["nothing"].change == 0
    assert ops.convert_to_numpy(seed).tolist() == before


def test_outputs_that_are_not_finite_are_refused_and_changes_are_noted():
    def overflowing(scale):
        inputs = keras.Input((8,))
        x = L.Dense(8, kernel_initializer=keras.initializers.Constant(1e-30), name="tiny")(inputs)
        return keras.Model(inputs, L.Dense(3, kernel_initializer=keras.initializers.Constant(scale))(x))

    data = np.ones((4, 8), "float32")
    _, report = pk.remove_blocks(overflowing(1e38), 1, data)
    assert report.blocks[0].change == np.inf
    assert "Without some of the blocks the outputs are not finite numbers." in report.notes
    assert json.loads(json.dumps(report.to_dict(), allow_nan=False))["blocks"][0]["change"] is None
    model = overflowing(1.0)
    model.layers[-1].bias.assign([np.nan, 0, 0])
    with pytest.raises(ValueError, match="data on which its outputs are not finite"):
        pk.remove_blocks(model, 1, data)


def test_a_number_that_is_too_large_is_refused_before_anything_is_measured():
    model, inputs = built("residual_mlp")
    told = []
    with pytest.raises(ValueError, match=r"number=9; 2 can be removed \(.*\). What stays: .*pk.shrink"):
        pk.remove_blocks(model, 9, inputs, progress=lambda *arguments: told.append(arguments))
    assert not told
    with pytest.raises(ValueError, match="0 can be removed. What stays: .*: excluded"):
        pk.remove_blocks(model, 1, inputs, exclude="*")
    with pytest.raises(ValueError, match="0 can be removed. What stays: no other residual sum, and no other layers"):
        pk.remove_blocks(stack((5,), L.Dense(3)), 1, np.ones((2, 5)))


@pytest.mark.parametrize("given", [3, None])
def test_patterns_of_another_kind_are_refused(given):
    model, inputs = built("residual_mlp")
    with pytest.raises(TypeError, match="`include` takes a pattern or a list of patterns. Received: "):
        pk.remove_blocks(model, 1, inputs, include=given)


class Weighted(keras.Model):
    """Has a training step of its own."""

    def __init__(self, width=6, **options):
        inputs = keras.Input((5,))
        x = L.Dense(width, "relu")(inputs)
        x = L.BatchNormalization()(L.Add()([x, L.Dense(width)(x)]))
        super().__init__(inputs, L.Dense(3)(x), **options)

    def train_step(self, data):
        return {**super().train_step(data), "own": ops.ones(())}


@pytest.mark.parametrize(
    "smaller_of",
    [lambda m: pk.remove_blocks(m, 1, np.ones((4, 5))), pk.simplify, lambda m: pk.shrink(m, channels=0.5)],
    ids=["remove_blocks", "simplify", "shrink"],
)
def test_a_training_step_that_is_lost_is_noted(smaller_of):
    smaller, report = smaller_of(Weighted())
    assert "The new model is a Functional, without the train_step of Weighted." in report.notes


# ---- kinds of models -----------------------------------------------------------------------------------------------


def sequential(*layers):
    keras.utils.set_random_seed(2)
    return keras.Sequential([keras.Input((6, 5)), *layers, L.Flatten(), L.Dense(3)], name="chain")


class Stepping(keras.Sequential):
    """A Sequential with a training step of its own."""

    def train_step(self, data):
        return super().train_step(data)


SEQUENTIAL = {
    "dropout": lambda: sequential(L.Dense(5, "relu"), L.Dropout(0.2), L.Dense(5)),
    "lstm": lambda: sequential(L.LSTM(5, return_sequences=True), L.Dense(5)),
    "gru": lambda: sequential(L.GRU(5, return_sequences=True), L.GaussianNoise(0.1)),
    "own step": lambda: Stepping([keras.Input((6, 5)), L.Dense(5), L.Dropout(0.2), L.Flatten(), L.Dense(3)]),
}


@pytest.mark.parametrize("make", SEQUENTIAL.values(), ids=SEQUENTIAL)
@pytest.mark.parametrize(
    "smaller_of",
    [lambda m: pk.remove_blocks(m, 1, np.ones((4, 6, 5))), pk.simplify, lambda m: pk.shrink(m, channels=0.6)],
    ids=["remove_blocks", "simplify", "shrink"],
)
def test_a_sequential_model_with_layers_for_training_stays_sequential(make, smaller_of):
    smaller, _ = smaller_of(make())
    assert type(smaller) is keras.Sequential
    assert smaller(np.ones((2, 6, 5), "float32")).shape == (2, 3)


def test_blocks_beside_and_in_a_model_that_shares_a_layer_are_measured():
    table = L.Embedding(9, 6, name="table")
    tokens = keras.Input((4,), dtype="int32")
    x = table(tokens)
    inner = keras.Model(tokens, L.Add(name="in")([x, L.Dense(6)(x)]), name="inner")
    outer = keras.Input((4,), dtype="int32")
    y = inner(outer)
    y = L.Add(name="out")([y, L.Dense(6)(y)])
    model = keras.Model(outer, L.Dense(2)(L.Concatenate()([y, table(outer)])))
    data = np.arange(8).reshape(2, 4)
    smaller, report = pk.remove_blocks(model, 2, data)
    assert set(report.removed) == {"in", "out"}
    total = max(row.total_change for row in report.blocks)
    assert relative_change(model, smaller, data) == pytest.approx(total, rel=1e-4)
