"""Removals of blocks: their arguments, the new model and its report, data and models that mislead."""

import json

import keras
import numpy as np
import pytest
from architectures import inputs_of, randomize, stack
from block_models import built, relative_change, rows_by_name
from keras import layers as L, ops
from networks import outputs
from without_prunekit import outputs_of_file

import prunekit as pk
from prunekit.techniques.shrink.layers.blocks import RESIDUAL

# ---- arguments -------------------------------------------------------------------------------------------------------


def test_include_and_exclude_select_by_names_of_blocks_and_layers():
    model, inputs = built("resnet20")
    _, report = pk.remove_blocks(model, 1, inputs, include="stage1*", exclude=["stage1_block1_first"])
    assert [row.name for row in report.blocks] == ["stage1_block2_add"]
    reasons = {one.name: one.reason for one in report.skipped}
    assert reasons["stage1_block1_add"] == "excluded"
    assert reasons["stage0_block0_add"] == "not matched by include"
    with pytest.raises(ValueError, match=r"`include`.*'stage7\*'.*matches none"):
        pk.remove_blocks(model, 1, inputs, include="stage7*")


def test_without_data_nothing_is_removed():
    with pytest.raises(ValueError, match="needs calibration data: how much a block changes the outputs cannot be read"):
        pk.remove_blocks(built("resnet20")[0], 1)


def test_more_blocks_than_there_are_is_refused():
    model, inputs = built("rms_norm")
    with pytest.raises(ValueError, match=r"blocks=2; 1 can be removed"):
        pk.remove_blocks(model, 2, inputs)
    with pytest.raises(ValueError, match="blocks must be at least 1"):
        pk.remove_blocks(model, 0, inputs)


def test_a_model_without_a_graph_is_refused():
    model, inputs = built("subclassed_model")
    with pytest.raises(ValueError, match=r"graph of a Sequential or functional model.*Perceptron"):
        pk.remove_blocks(model, 1, inputs)


def test_data_with_too_few_inputs_are_refused():
    model, inputs = built("two_towers")
    with pytest.raises(ValueError, match=r"are user, item. Received: 1 in the calibration data"):
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
    model = randomize(keras.applications.ResNet50(weights=None, input_shape=(32, 32, 3), classes=7))
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
    with pytest.raises(ValueError, match=r"blocks=9; 2 can be removed \(.*\). What stays: .*pk.shrink"):
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
