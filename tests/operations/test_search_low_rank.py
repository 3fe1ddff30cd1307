"""pk.search where weights become two layers of low rank."""

import keras
import numpy as np
import pytest
from digit_network import digit_network
from keras import layers as L

import prunekit as pk
from prunekit.anatomy.layers.targets import find_targets
from prunekit.searching.building import FORMS, build, weights_of
from prunekit.searching.candidates import Level
from prunekit.searching.costs import Mixture
from prunekit.searching.searched_model import EIGHT_BITS, SearchedModel
from prunekit.techniques.factorize.forms import Structure


@pytest.fixture(scope="module")
def digits():
    return digit_network()


@pytest.fixture(scope="module")
def low_rank(digits):
    """A network whose widest layer has a low rank."""
    keras.utils.set_random_seed(2)
    layers = [L.Flatten(), L.Dense(200, name="wide"), L.ReLU(), L.Dense(40, activation="relu", name="hidden")]
    model = keras.Sequential([keras.Input((8, 8, 1)), *layers, L.Dense(10, name="logits")])
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    images, labels = digits[1]
    kernel, draw = model.get_layer("wide").kernel, np.random.default_rng(0)
    kernel.assign(0.05 * draw.normal(size=(64, 12)) @ draw.normal(size=(12, 200)))
    model.get_layer("wide").trainable = False
    model.fit(images[:300], labels[:300], epochs=20, verbose=0)
    model.get_layer("wide").trainable = True
    return model, (images[300:], labels[300:])


def test_a_weight_of_low_rank_becomes_two_layers(low_rank, tmp_path):
    found = pk.search(*low_rank, drop=0.02, output=tmp_path, techniques=("factorize", "quantize"))
    (row,) = [one for one in found.report.weights if one.name == "wide/kernel"]
    assert row.rank is not None and row.rank <= 16
    reduction = found.model.get_layer("wide_reduction")
    kept = {one.name: one.kept for one in found.report.groups}["wide"]
    assert reduction.kernel.shape == (64, row.rank) and found.model.get_layer("wide").kernel.shape == (row.rank, kept)
    plain = pk.search(*low_rank, drop=0.02, output=tmp_path, techniques=("shrink", "quantize"))
    assert {one.rank for one in plain.report.weights} == {None}
    # At the same predicted error; on so few examples, files that hold the drop differ by chance.
    bytes_of = {one.techniques: one.bytes for one in found.report.alone}
    assert bytes_of["factorize and quantize"] < min(bytes_of[name] for name in ("factorize", "quantize"))
    alone = pk.search(*low_rank, drop=0.02, output=tmp_path, techniques="factorize")
    assert {one.bits for one in alone.report.weights} == {8} and len(alone.file) > len(found.file)


def test_a_pruned_weight_of_low_rank_keeps_its_zeros(low_rank, tmp_path):
    model, data = low_rank
    pruned = keras.models.clone_model(model)
    pruned.set_weights(model.get_weights())
    pruned.compile(loss=model.loss, metrics=["accuracy"])
    pk.prune(pruned, 0.3, data[0][:200], include="wide")
    rows = pk.search(pruned, data, drop=0.02, output=tmp_path).report.weights
    assert {one.name: one.rank for one in rows}["wide/kernel"] is None
    assert {one.name: one.sparsity for one in rows}["wide/kernel"] > 0.2


@pytest.mark.thorough
def test_mixtures_of_low_rank_are_trained_with_their_bits(low_rank):
    model, (images, labels) = low_rank
    seen = []

    def train(smaller, callbacks):
        bits = {type(one).__name__: one for one in callbacks}["QuantizationCallback"].options.bits
        seen.append((bits, {one.name for one in find_targets(smaller)[0]}))
        smaller.compile("adam", "sparse_categorical_crossentropy")
        smaller.fit(images[:64], labels[:64], verbose=0, callbacks=callbacks)

    options = {"target": "packed", "techniques": ("factorize", "quantize"), "training": train}
    report = pk.search(model, (images, labels), drop=0.03, **options).report
    assert any(one.trained for one in report.points)
    assert all(set(bits) == names for bits, names in seen) and any(
        "wide_reduction/kernel" in names for _, names in seen
    )


@pytest.mark.thorough
def test_an_einsum_of_low_rank_becomes_two_layers(digits, tmp_path):
    images, labels = digits[1]
    keras.utils.set_random_seed(3)
    inputs = keras.Input((8, 8, 1))
    x = L.Reshape((8, 8))(inputs)
    x = L.ReLU()(L.EinsumDense("abc,cde->abde", (8, 4, 200), bias_axes="de", name="wide")(x))
    model = keras.Model(inputs, L.Dense(10)(L.Flatten()(L.AveragePooling2D((8, 1))(x))))
    model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True), metrics=["accuracy"])
    draw = np.random.default_rng(0)
    kernel = draw.normal(size=(8, 2)) @ draw.normal(size=(2, 800))
    model.get_layer("wide").kernel.assign(0.3 * kernel.reshape(8, 4, 200))
    model.get_layer("wide").trainable = False
    model.fit(images[:400], labels[:400], epochs=15, verbose=0)
    found = pk.search(model, (images[400:], labels[400:]), drop=0.02, techniques=("factorize",), output=tmp_path)
    (row,) = [one for one in found.report.weights if one.name == "wide/kernel"]
    assert found.report.drop <= 0.02
    assert row.rank == found.model.get_layer("wide_reduction").kernel.shape[-1] <= 4


@pytest.mark.thorough
def test_low_rank_of_a_weight_and_zeros_of_another_are_in_one_file(low_rank):
    model, (images, _) = low_rank
    subject = SearchedModel(model, images[:100], EIGHT_BITS)
    levels = {
        "wide/kernel": Level(0.0, 8, structure=Structure("pair", (12,))),
        "hidden/kernel": Level(0.6, 8),
        "logits/kernel": Level(0.0, 8),
    }
    mixture = Mixture(levels, {}, 0.0, {}, 0.0)
    built = build(subject, mixture, images[:100], images[:64], FORMS["packed"], memory=1e9)
    zeros = {one.name: float((np.array(one.variable) == 0).mean()) for one in weights_of(built.model)}
    assert built.arrays["wide/kernel"] == ("wide_reduction/kernel", "wide/kernel")
    assert zeros["hidden/kernel"] >= 0.59 and max(zeros["wide/kernel"], zeros["wide_reduction/kernel"]) < 0.3
