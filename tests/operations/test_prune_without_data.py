"""pk.prune without data: the kept weights are fitted to what the layers compute on synthetic inputs."""

import keras
import numpy as np
import pytest
from keras import layers as L

import prunekit as pk
from prunekit.core.data import synthetic_inputs
from prunekit.sparsity.array_ops import array_of

pytestmark = pytest.mark.every_backend

NOTE = "No data were given: the weights were fitted on 1,024 synthetic inputs."


def network():
    keras.utils.set_random_seed(0)
    stages = [
        L.Conv2D(8, 3, activation="relu", name="first"),
        L.Conv2D(8, 3, name="second"),
        L.BatchNormalization(),
        L.ReLU(),
    ]
    model = keras.Sequential([keras.Input((10, 10, 2)), *stages, L.Flatten(), L.Dense(4, name="head")])
    normalization = model.layers[2]
    normalization.moving_mean.assign(np.linspace(-1, 1, 8))
    normalization.moving_variance.assign(np.linspace(0.5, 2, 8))
    return model


def images():
    """Images that resemble no signal of `synthetic_inputs`: discs."""
    rows, columns = np.mgrid[:10, :10]
    centres = np.random.default_rng(1).uniform(2, 8, (64, 2, 2))
    distance = np.hypot(rows[..., None] - centres[:, None, None, 0], columns[..., None] - centres[:, None, None, 1])
    return (distance < 3).astype("float32")


def error(model):
    wanted, found = (array_of(one(images(), training=False)) for one in (network(), model))
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def test_it_loses_less_than_without_repair_on_other_inputs():
    repaired, plain = network(), network()
    report = pk.prune(repaired, 0.6)
    pk.prune(plain, 0.6, repair="none")
    assert error(repaired) < 0.4 * error(plain)
    assert report.target_sparsity == pytest.approx(0.6, abs=1e-3)
    assert [row.name for row in report.layer_errors] == ["first/kernel", "second/kernel", "head/kernel"]
    assert report.notes[0].startswith(NOTE)
    reasons = {choice.option: choice.reason for choice in report.choices}
    assert reasons.pop("allocation").startswith("since its outputs are nearest: error ")
    assert reasons == dict.fromkeys(("criterion", "repair"), "on synthetic inputs, since no data were given")
    assert report.damage is None


@pytest.mark.parametrize("options", [{"repair": "none"}, {"criterion": "magnitude"}, {"policy": "tfmot"}], ids=str)
def test_a_named_method_prunes_by_the_weights_alone(options):
    model = network()
    report = pk.prune(model, 0.6, **options)
    for before, after in zip(network().get_weights(), model.get_weights(), strict=True):
        assert ((after == before) | (after == 0)).all()
    assert report.layer_errors == () and not any("synthetic" in note for note in report.notes)


@pytest.mark.parametrize("repair", ["weights", "outputs"])
def test_a_named_criterion_is_repaired_when_asked_for(repair):
    model, plain = network(), network()
    report = pk.prune(model, 0.6, criterion="magnitude", repair=repair)
    pk.prune(plain, 0.6, criterion="magnitude")
    assert error(model) < error(plain) and report.notes[0].startswith(NOTE)


def test_a_model_too_large_for_a_repair_is_pruned_by_magnitude_and_the_note_says_so(monkeypatch):
    monkeypatch.setattr(synthetic_inputs, "LARGEST", 100)
    model = network()
    report = pk.prune(model, 0.6)
    assert {choice.option: choice.value for choice in report.choices} == {
        "criterion": "magnitude",
        "allocation": "lamp",
    }
    assert report.notes[0].startswith("No data were given, and nothing stands in for them: it has")
    with pytest.raises(ValueError, match="repair='weights' without data. Pass `data` as well. No data were given"):
        pk.prune(network(), 0.6, repair="weights")


class Unreachable(L.Layer):
    """Calls its Dense layer in training alone."""

    def __init__(self, **options):
        super().__init__(**options)
        self.dense = L.Dense(4, name="inner")

    def build(self, shape):
        self.dense.build(shape)
        self.built = True

    def call(self, inputs, training=False):
        return self.dense(inputs) if training else inputs


def test_a_layer_that_is_not_called_is_no_error_without_data():
    keras.utils.set_random_seed(0)
    model = keras.Sequential([keras.Input((4,)), L.Dense(4, name="first"), Unreachable(name="other")])
    report = pk.prune(model, 0.5)
    assert report.target_sparsity == 0.5 and report.layer_errors == ()
    (note,) = [note for note in report.notes if note.startswith("No data were given, and the weights were not fitted")]
    assert "other" in note
    assert {choice.option: choice.value for choice in report.choices} == {
        "criterion": "magnitude",
        "allocation": "lamp",
    }


def test_several_inputs_are_one_batch_each():
    keras.utils.set_random_seed(0)
    inputs = [keras.Input((4,), name="one"), keras.Input((3,), dtype="int32", name="two")]
    joined = L.Concatenate()([inputs[0], L.Flatten()(L.Embedding(5, 2, name="table")(inputs[1]))])
    report = pk.prune(keras.Model(inputs, L.Dense(4, name="head")(joined)), 0.5)
    assert [row.name for row in report.layer_errors] == ["table/embeddings", "head/kernel"]


@pytest.mark.one_backend
def test_integer_grids_stay():
    x = np.random.default_rng(0).normal(size=(32, 10, 10, 2)).astype("float32")
    model = network()
    pk.quantize(model, x)
    kernels = [np.array(model.get_layer(name).kernel) for name in ("first", "second", "head")]
    report = pk.prune(model, 0.6)
    for before, name in zip(kernels, ("first", "second", "head"), strict=True):
        after = np.array(model.get_layer(name).kernel)
        assert ((after == before) | (after == 0)).all()
    assert not any("synthetic" in note for note in report.notes)
